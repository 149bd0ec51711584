"""Start the Flower app on a SuperLink and follow its run: what `qupel flower run` and `export` do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from qupel.engine.rounds import Failed, Stopped
from qupel.flower.control import Control
from qupel.flower.folder import Federation, bundle
from qupel.util.terminal import stop_requests

STATUS_SECONDS = 3.0  # between two questions to the SuperLink whether the run still lives
SILENT_SECONDS = 300.0  # so long a SuperLink that takes connections and is too busy to answer is waited for


def drive(
    federation: Federation,
    address: str,
    target: Path,
    mode: Literal["run", "export", "adapt"],
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Run what RUN/request.json asks for, to its end. The first Ctrl-C stops it after its round, the second at once."""
    for leftover in ("end.json", "stop"):
        (target / leftover).unlink(missing_ok=True)
    progress = target / "progress.jsonl"
    at = progress.stat().st_size if progress.exists() else 0
    bundle(federation.folder)
    with Control(address, federation.authority) as control:
        control.check()
        number = control.start(federation.folder / "app.fab", {"run": str(target), "mode": mode})
        try:
            with stop_requests() as should_stop:
                for line in _follow(target, at, control, number):
                    if line:
                        tell(line)
                    if should_stop():
                        (target / "stop").touch()
        except KeyboardInterrupt:
            control.stop(number)
            raise
    ended = ending(target, number)
    assert ended is not None
    if ended["state"] == "stopped":
        raise Stopped(ended["message"])
    if ended["state"] != "done":
        raise Failed(f"{ended['message']}; go on with --resume --name {target.name}")


def ending(target: Path, number: int) -> dict[str, Any] | None:
    """How the run with this number ended; None while it goes on. An older one may end late."""
    path = target / "end.json"
    ended = json.loads(path.read_text()) if path.exists() else {}
    return ended if ended.get("run") == number else None


def _follow(target: Path, at: int, control: Control, number: int) -> Iterator[dict[str, Any] | None]:
    """Lines of progress as they come (None while there are none) until the run has ended."""
    import httpx

    path, asked = target / "progress.jsonl", time.monotonic()
    answered = asked
    while True:
        ended = ending(target, number)
        if path.exists():
            with path.open() as file:
                file.seek(at)
                for text in file:
                    if text.endswith("\n"):
                        at += len(text.encode())
                        yield json.loads(text)
        if ended:
            return
        if time.monotonic() - asked > STATUS_SECONDS:
            asked = time.monotonic()
            try:
                status = control.status(number)
                answered = time.monotonic()
            except httpx.HTTPError as e:
                if isinstance(e, httpx.ReadTimeout) and time.monotonic() - answered < SILENT_SECONDS:
                    continue
                raise Failed(f"the SuperLink is gone ({e}); go on with --resume --name {target.name}") from None
            if status.startswith("finished") and not ending(target, number):
                raise Failed(f"the server's process ended ({status}); go on with --resume --name {target.name}")
        yield None
        time.sleep(0.2)
