"""A SuperNode that runs one app: `python -m qupel.flower.supernode FOLDER`, then the options of flower-supernode.

FOLDER/app.sha256 names the bundle that `qupel flower init` made. Flower's own --trusted-entities takes only what
Flower's hub has signed: a SuperLink (of flwr 1.41) drops the signatures of any other app. So its check of a bundle,
which comes before anything of it is unpacked, is given ours: the very bytes, or an answer that the bundle is refused. A
flwr that is not the one this was made for is not started.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from qupel.flower import audit, clean
from qupel.flower.processes import Process
from qupel.flower.templates import APP_NAME, APP_VERSION
from qupel.flower.trust import ends
from qupel.util.errors import UserError

TESTED = "1.41."  # of flwr: what is replaced here is not part of its interface


def pin(wanted: str, note: Callable[[int, str], None] = lambda run, other: None) -> None:
    """Let Flower's SuperNode take this bundle and no other; note: is told the run and hash of any other."""
    import flwr
    from flwr.supernode import start_client_internal as node

    pull = getattr(node, "_pull_and_store_message", None)
    needed = {"get_run", "get_fab", "trusted_entities"}
    known = pull is not None and needed <= set(inspect.signature(pull).parameters) and hasattr(node, "_verify_fab")
    if not known or pull is None or not flwr.__version__.startswith(TESTED):
        raise UserError(f"flwr {flwr.__version__} cannot be held to one app; install flwr {TESTED}*")
    node._pull_and_store_message = _checked(pull, wanted, note)
    node._verify_fab = lambda fab, trusted_entities: hashlib.sha256(fab.content).hexdigest() == wanted


def _checked(pull: Callable[..., Any], wanted: str, note: Callable[[int, str], None]) -> Callable[..., Any]:
    """Flower's function that takes a message in; a bundle comes to it with a sign that it is ours, or with none."""
    from flwr.supercore.fab import Fab

    def checked(*, get_run: Callable[[int], Any], get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        runs: dict[int, Any] = {}

        def asked_run(number: int) -> Any:
            runs[number] = get_run(number)
            return runs[number]

        def asked_fab(fab_hash: str, number: int) -> Any:
            content, run = get_fab(fab_hash, number).content, runs[number]
            named = (run.fab_id, run.fab_version, fab_hash) == (APP_NAME, APP_VERSION, wanted)  # they become a path
            ours = named and hashlib.sha256(content).hexdigest() == wanted
            if not ours:
                note(number, hashlib.sha256(content).hexdigest())
            return Fab(fab_hash, content, {"valid_license": "pinned"} if ours else {})

        return pull(get_run=asked_run, get_fab=asked_fab, **{**rest, "trusted_entities": {"app": wanted}})

    return checked


def main(folder: Path, options: list[str]) -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    try:
        wanted = (folder / "app.sha256").read_text().strip()
    except OSError:
        raise UserError(
            f"{folder} names no app (app.sha256); make it anew with `qupel flower renew` on the server"
        ) from None
    note = folder / clean.SUPERNODE
    if (before := clean.noted("SuperNode", note)) and before.alive():
        raise UserError(f"{folder} already has a SuperNode, process {before.pid}")
    if ends(folder / "ca.crt") < datetime.now(UTC):
        raise UserError(f"{folder / 'ca.crt'} has expired; `qupel flower renew` on the server makes a new one")
    pin(wanted, partial(audit.refused_code, clean.state_of(folder)))
    for left in clean.of_client(folder):
        left.remove()
        print(f"removed {left.what}", file=sys.stderr, flush=True)
    Process.here("SuperNode").note(note)
    sys.argv = ["flower-supernode", *options]
    flower_supernode()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
