"""`qupel adapt`: a small model for a client that comes later. `cli.py` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qupel.util.errors import UserError
from qupel.util.terminal import number_table, out, shown


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
