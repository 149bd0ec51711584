"""The command `qupel theory`. `cli.py` registers it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qupel.util.errors import UserError
from qupel.util.terminal import number_table, out, shown


def theory(
    config: Annotated[Path, typer.Argument(help="a TOML file with theorem = 1 or 2 (experiments/theory1.toml)")],
    folder: Annotated[Path | None, typer.Option("--out", help="folder (default: runs/<name>-<time>)")] = None,
    publish: Annotated[
        Path | None,
        typer.Option("--publish", help="run nothing; put the run in --out on a page in this folder"),
    ] = None,
) -> None:
    """Run what Theorem 1 or 2 speaks of, full batch and with its step sizes, and draw measured against bound."""
    import torch

    from qupel.paper.convergence.config import load
    from qupel.paper.convergence.page import publish as write
    from qupel.paper.convergence.study import study, total_steps

    settings = load(config)
    if publish is not None:
        if folder is None:
            raise UserError("--publish needs --out, the folder of a finished run")
        made = write(folder, publish, f"qupel theory {config} --out {folder}")
        out.print(f"written to {shown(publish)}: {', '.join(path.name for path in made)}")
        return
    folder = folder or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn()]
    begun: list[str] = []

    def tell(name: str, steps: int) -> None:
        bar.update(task, advance=steps, description=shown(name, 40))
        if not out.is_terminal and name not in begun:
            begun.append(name)
            out.print(shown(name), highlight=False)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are tiny
    try:
        with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
            task = bar.add_task("starting", total=total_steps(settings))
            head, body = study(settings, folder, tell)
    finally:
        torch.set_num_threads(threads)
    out.print(number_table(head, body))
    out.print(f"[dim]everything is in {shown(folder)}: theorem.md, theorem.json, theorem.png, theorem.svg[/dim]")
