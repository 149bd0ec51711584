"""What the commands of a federation print: a run's progress, what it left, a log's account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qupel.util.terminal import losses_text, never_text, shown

if TYPE_CHECKING:
    from qupel.flower.chain import Line

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
    out.print(f"{head}{loss}{test}  {progress['seconds']:.0f} s", highlight=False)
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


def show_account(path: Path, log: Iterator[Line], every: bool) -> None:
    """Of a log whose chain holds: what left, by job, and its last hash; raises at a line that was changed."""
    from qupel.flower.audit import accounts

    lines = list(log)
    if every:
        for line in lines:
            out.print(json.dumps(line.entry), markup=False, highlight=False, soft_wrap=True)
    if lines and "left" in lines[0].entry:
        table = Table("job", "from", "to", "rounds", "answers", "bytes that left", "refused")
        for job, a in accounts(lines).items():
            why = "; ".join(f"{text} ({count})" for text, count in a.refused.items())
            row = (job or "-", a.first, a.last, str(len(a.rounds)), str(a.answers), f"{a.left:,}", why)
            table.add_row(*(Text(shown(text, 1000)) for text in row))
        out.print(table)
    head = lines[-1].hash if lines else "-"
    out.print(
        f"{shown(path)}: {len(lines)} lines, none changed; the last hash is {head}", highlight=False, soft_wrap=True
    )
