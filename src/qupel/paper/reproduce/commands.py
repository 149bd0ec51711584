"""`qupel reproduce`: run a table of the paper, say how far it is, draw its figure, publish what came out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from qupel.run.commands import Reuse
from qupel.util.terminal import Watcher, out, plain, shown, stop_requests

if TYPE_CHECKING:
    from qupel.paper.published import Grid
    from qupel.run.config import Config

What = Literal["table1", "table2", "table3", "figure1", "diagnostics", "claims"]
Scale = Literal["smoke", "small", "long", "paper"]


def reproduce(
    what: Annotated[What, typer.Argument(help="figure1, diagnostics and claims are made of runs that are done")],
    scale: Annotated[Scale, typer.Option(help="on digits; an hour, or ten, on two cores; the paper's")] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="how many: 0, 1, ...")] = 3,
    only: Annotated[
        list[str] | None, typer.Option("--only", help='a part of it: a row, a column, "seed 0"; several times')
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes (default: all cores)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run that is there")] = False,
    status: Annotated[bool, typer.Option("--status", help="show what is done and what is left, run nothing")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; on a GPU all clients run in this process")] = "cpu",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="also write event files")] = False,
    data: Annotated[Path | None, typer.Option("--data", help="folder with the data sets (else QUPEL_DATA)")] = None,
    runs: Annotated[Path, typer.Option("--out", help="folder of the runs: OUT/table2-small and so on")] = Path("runs"),
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="resume what other versions of the packages began")
    ] = False,
    reuse: Reuse = None,
    publish: Annotated[
        Path | None, typer.Option("--publish", help="run nothing; write page, numbers and figure to this folder")
    ] = None,
) -> None:
    """Reproduce a table or the figure of the paper. Cells that are done are never run again."""
    from qupel.paper.reproduce import plan
    from qupel.run.folder import read_config
    from qupel.run.status import show_status

    if what == "claims":
        from qupel.paper.reproduce import claims

        out.print(f"written: {', '.join(map(shown, claims.write(runs, scale, publish or runs)))}", soft_wrap=True)
        return
    table = "table2" if what in ("figure1", "diagnostics") else what
    run = plan.folder(runs, table, scale)
    if status:
        begun = (run / "config.json").exists()
        show_status(run, read_config(run) if begun else plan.build(table, scale, seeds, data))
    elif publish is not None:
        from qupel.paper.reproduce.publish import publish as write

        out.print(f"written to {shown(publish)}: {', '.join(p.name for p in write(run, what, publish))}")
    elif what != table:
        from qupel.paper.reproduce.publish import draw

        out.print(f"drawn: {', '.join(map(shown, draw(run, what)))}", soft_wrap=True)
    else:
        config = plan.build(table, scale, seeds, data)
        _run(table, scale, config, run, workers, resume, device, tensorboard, other_versions, reuse or (), only or ())


def _run(
    table: str,
    scale: str,
    config: Config,
    run: Path,
    workers: int | None,
    resume: bool,
    device: str,
    tensorboard: bool,
    other_versions: bool,
    reuse: Sequence[Path],
    only: Sequence[str],
) -> None:
    from qupel.paper.reproduce import plan
    from qupel.paper.reproduce.publish import write_tables
    from qupel.report.board import Board
    from qupel.run import experiment
    from qupel.util.machine import available_cpus, check_device

    began = time.monotonic()
    check_device(device)
    part = plan.part(config, only)
    wanted = [cell for cell in experiment.cells(config) if part.has(cell.label, cell.seed)]
    left = [cell for cell in wanted if not experiment.result_file(run, cell).exists()]
    watcher = Watcher(len(left) * config.rounds)
    tell = Board(run / "tensorboard", watcher.tell).tell if tensorboard else watcher.tell
    others = [p for p in (plan.folder(run.parent, name, scale) for name in plan.SIBLINGS.get(table, ())) if p.exists()]
    experiment.open_folder(run, config, resume, other_versions)
    plan.describe(run, table, scale, config)
    with stop_requests() as should_stop, watcher:
        experiment.run_experiment(
            config,
            run,
            workers=workers or available_cpus(),
            resume=True,
            watch=tell,
            should_stop=should_stop,
            reuse=[*others, *reuse],
            device=device,
            other_versions=True,  # as said above
            wanted=lambda cell: cell in wanted,
        )
    grid = write_tables(run)
    out.print(_grid_table(grid))
    if grid.note:
        out.print(shown(grid.note, 2000))
    out.print(f"[dim]{time.monotonic() - began:.0f} s; everything is in {shown(run)}[/dim]")
    out.print(f"[dim]a page to look at: qupel report {shown(run)} --open[/dim]")


def _grid_table(grid: Grid) -> Table:
    """Ours and the paper's; the confidence intervals are in the files."""
    made = Table(title=shown(grid.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for k, name in enumerate(("", *grid.columns)):
        made.add_column(Text(plain(name).replace(" ", "\n")), justify="right" if k else "left", no_wrap=k > 0)
    for row, cells in zip(grid.rows, grid.cells, strict=True):
        made.add_row(Text(plain(row)), *("-" if c.mean is None else f"{c.mean:.1f}{c.mark}" for c in cells))
        if any(c.paper is not None for c in cells):
            made.add_row("the paper", *("" if c.paper is None else f"{c.paper:.1f}" for c in cells), style="dim")
    return made
