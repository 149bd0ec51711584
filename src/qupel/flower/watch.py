"""What the commands of a federation say on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qupel.util.errors import UserError
from qupel.util.terminal import losses_text, never_text, privacy_text, shown

out = Console()
err = Console(stderr=True)


def tell(progress: dict[str, Any]) -> None:
    for refusal in progress["refused"]:
        err.print(f"round {progress['round']}: refused {shown(refusal)}", highlight=False)
    for note in progress["notes"]:
        err.print(f"round {progress['round']}: {shown(note, 1000)}", highlight=False, soft_wrap=True)
    line = progress["line"] or {}
    test = f"  test {100 * line['test']:.2f} %" if "test" in line else ""
    loss = losses_text(progress["loss"], progress["loss_quantized"])
    head = f"round {progress['round']}/{progress['rounds']}"
    out.print(f"{head}{loss}{test}{privacy_text(line)}  {progress['seconds']:.0f} s", highlight=False)
    if progress["round"] == progress["rounds"] and line.get("never_took_part"):
        err.print(never_text(line), highlight=False)


def show(target: Path, name: str = "exports.json") -> None:
    path = target / name
    if path.exists():
        adapted = ["of the shared model"] if name != "exports.json" else []
        table = Table("client", "model on its disk", "test accuracy", *adapted)
        for told in json.loads(path.read_text()):
            size = shown(told.get("error") or ("written" if told["bytes"] is None else f"{told['bytes']:,} bytes"))
            scores = (
                f"{100 * told[k]:.1f} %" if told.get(k) is not None else ""
                for k in ("test", "shared")[: 1 + len(adapted)]
            )
            table.add_row(str(told["client"]), Text(size), *scores)
        out.print(table)
    out.print(f"[dim]everything the server knows is in {shown(target)}[/dim]")


def show_log(folder: Path, every: bool) -> None:
    """Of a client or of a run: whether its log is whole, its last hash, and of a client what left, by job."""
    from qupel.flower import chain, clean, roundlog
    from qupel.flower.audit import LOG, accounts
    from qupel.flower.ledger import spent

    if (folder / "client.toml").exists():
        path = clean.state_of(folder) / LOG
    elif (folder / "request.json").exists():
        path = folder / roundlog.LOG
    else:
        raise UserError(f"{folder} is neither a client's folder (client.toml) nor a run's (request.json)")
    lines = list(chain.read(path))
    for line in lines if every else ():
        out.print(json.dumps(line.entry), markup=False, highlight=False, soft_wrap=True)
    if path.name == LOG:
        table = Table("job", "from", "to", "rounds", "answers", "bytes that left", "refused")
        for job, a in accounts(lines).items():
            why = "; ".join(f"{text} ({count})" for text, count in a.refused.items())
            row = (job or "-", a.first, a.last, str(len(a.rounds)), str(a.answers), f"{a.left:,}", why)
            table.add_row(*(Text(shown(text, 1000)) for text in row))
        out.print(table)
        if (paid := spent(path.parent)).rounds:
            out.print(f"privacy: {paid.told()}", highlight=False, soft_wrap=True)
    head = lines[-1].hash if lines else "none"
    out.print(
        f"{shown(path)}: {len(lines)} lines, none changed; the last hash: {head}", highlight=False, soft_wrap=True
    )
