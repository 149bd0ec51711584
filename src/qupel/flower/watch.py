"""What `qupel flower run`, `export` and `adapt` say on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
