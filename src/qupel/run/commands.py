"""`qupel adapt`: a small model for a client that comes later; `qupel compare` and `leaderboard`: many methods on many
federations. `cli.py` registers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from qupel.util.errors import UserError
from qupel.util.terminal import Watcher, number_table, out, shown, stop_requests

Reuse = Annotated[
    list[Path] | None,
    typer.Option(exists=True, file_okay=False, help="take over cells that are done in this folder with equal settings"),
]


def keep(
    run: Annotated[Path, typer.Argument(help="the directory of a run, a reproduction or a comparison")],
    folder: Annotated[Path, typer.Argument(help="where to: small files, to be committed")],
) -> None:
    """Keep the results of all finished cells, without models, for later runs (--reuse) and reports."""
    from qupel.run.kept import keep as copy

    out.print(f"{copy(run, folder)} cells are in {shown(folder)}", highlight=False, soft_wrap=True)


def adapt(
    run: Annotated[Path, typer.Argument(help="the folder of a finished run, or its file w.safetensors alone")],
    data: Annotated[
        str,
        typer.Option(
            "--data", help="the client's data, as data.name in a config; with groups or owners, a client each"
        ),
    ],
    bits: Annotated[int | None, typer.Option(min=1, max=32, help="1 to 8, or 32 for full precision")] = None,
    budget: Annotated[str | None, typer.Option(help='bytes a file may have, e.g. "24 KiB", in place of --bits')] = None,
    cell: Annotated[str | None, typer.Option(help="METHOD-sSEED or a method's label, when the run has several")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="a module of yours that the file may name a network or parts from")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", help="file (default: adapted.safetensors); of several clients a folder")
    ] = None,
) -> None:
    """Adapt the shared model of a finished run to new clients, each for itself: no further federation."""
    from qupel.data import partition, sources
    from qupel.data.clients import Client
    from qupel.run.api import adapt as adapt_to

    found = sources.load(data)
    train, test, names = found.train, found.test, found.owners
    if found.owners:
        parts = partition.by_owner(found)
    elif train.groups is None:
        parts = partition.iid(len(train), len(test), 1, 0)
    else:
        parts = partition.by_group(train.groups, test.groups)
    people = []
    for k, part in enumerate(parts):
        mine, held = (samples.read(slice(0, len(samples))) for samples in (part.train(found), part.test(found)))
        name = names[k] if names else found.name if len(parts) == 1 else f"{found.name} {k}"
        tested = (held.inputs, held.targets) if len(part.test_rows) else (None, None)
        weights = mine.given[0] if mine.given else None
        people.append(Client(mine.inputs, mine.targets, tested[0], tested[1], name, weights))
    several = len(people) > 1
    target = target or Path("adapted" if several else "adapted.safetensors")
    if target.is_dir() and not several:
        raise UserError(f"--out {target} is a folder; one client's model is a file")
    done = adapt_to(run, people, bits=bits, budget=budget, cell=cell, allow=allow or ())
    sizes = [path.stat().st_size for path in done.save(target)] if several else [done.save_one(0, target)]
    head = ["client", "bits", "file", "test", "global model"]
    body = [
        [row["client"], f"{row['bits']:g}", f"{size:,}", done.score(row["test"]), done.score(row["global"])]
        for row, size in zip(done.table(), sizes, strict=True)
    ]
    out.print(number_table(head, body, f"adapted from {done.origin.label} in {done.metrics[-1]['seconds']:.1f} s"))
    out.print(f"[dim]written to {shown(target)}[/dim]")


def compare(
    file: Annotated[Path, typer.Argument(help="a TOML file of federations, methods, bits and seeds")],
    folder: Annotated[Path, typer.Option("--out", help="directory of the comparison, a run directory a federation")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help='a part of it: a federation, a method, "2 bits", "seed 0"; several times'),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with what is in --out, or add to it")] = False,
    status: Annotated[bool, typer.Option("--status", help="show what is done and what is left, run nothing")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes (default: all cores)")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="folder with the data sets (else QUPEL_DATA)")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; on a GPU all clients run in this process")] = "cpu",
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="resume what other versions of the packages began")
    ] = False,
    reuse: Reuse = None,
) -> None:
    """Compare methods on several federations; settings of each are chosen on validation data. Cells that are done are
    never run again."""
    from qupel.run.compare import load
    from qupel.run.comparing import How, run_comparison, show_progress
    from qupel.util.machine import available_cpus, check_device

    check_device(device)
    comparison = load(file, data)
    if status:
        show_progress(comparison, folder, only or ())
        return
    with stop_requests() as should_stop:
        how = How(workers or available_cpus(), device, other_versions, _watched, should_stop, reuse or ())
        page = run_comparison(comparison, folder, only=only or (), resume=resume, how=how)
    out.print(f"written to {shown(page)}", highlight=False, soft_wrap=True)


@contextmanager
def _watched(what: str, rounds: int) -> Iterator[Callable[[Any, Any], None]]:
    """A bar or lines for one run of a comparison."""
    if rounds:
        out.print(f"[bold]{shown(what)}[/bold]", highlight=False)
    with Watcher(rounds) as watcher:
        yield watcher.tell


def leaderboard(
    source: Annotated[Path, typer.Argument(help="the directory of a comparison, or a leaderboard.json")],
    folder: Annotated[Path | None, typer.Option("--out", help="folder to publish to (default: where it is)")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="also draw scores against bytes, a panel a federation, to this PNG or SVG")
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="show the page in the browser")] = False,
) -> None:
    """Write the leaderboard of a comparison: leaderboard.json, .md and one page, .html."""
    import webbrowser

    from qupel.report.figures import check_picture, leaderboard_picture
    from qupel.report.leaderboard import NUMBERS, publish
    from qupel.util.files import read_json

    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if picture is not None:
        check_picture(picture)
    folder = folder or (source if source.is_dir() else source.parent)
    written = publish(source, folder)
    if picture is not None:
        leaderboard_picture(read_json(folder / NUMBERS)).savefig(picture)
        written = [picture, *written]
    out.print(f"written: {', '.join(shown(p) for p in written)}", highlight=False, soft_wrap=True)
    if open:
        webbrowser.open(written[-1].resolve().as_uri())
