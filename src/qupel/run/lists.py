"""Commands that tell what there is, and that make a project of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from qupel.util.terminal import out, shown


def methods(markdown: Annotated[bool, typer.Option("--markdown", help="as docs/parts.md has it")] = False) -> None:
    """List recipes, methods, quantizers, servers and codecs."""
    from qupel.parts import codecs, methods, quantizers, servers
    from qupel.run.recipes import recipes
    from qupel.util.registry import Registry, parts_page

    kinds: tuple[Registry[Any], ...] = (recipes, methods.methods, quantizers.quantizers, servers.servers, codecs.codecs)
    if markdown:
        print(parts_page(kinds))
        return
    for k, kind in enumerate(kinds):
        out.print(("\n" if k else "") + f"[dim]{kind.kind}s[/dim]")
        _list({name: (entry.about, entry.paper) for name, entry in kind.all().items()})


def new(folder: Annotated[Path, typer.Argument(help="a new or empty folder")]) -> None:
    """Write a small project of your own (network, data, metric, config, test) that runs at once."""
    from qupel.run.project import write_project

    names = write_project(folder)
    out.print(f"{shown(folder)}: {', '.join(names)}", highlight=False, soft_wrap=True)
    out.print(f"begin with {shown(folder / 'README.md')}", highlight=False, soft_wrap=True)


def datasets() -> None:
    """List the data sets, one line each."""
    from qupel.data.sources import NPZ, datasets

    known = {name: (entry.about,) for name, entry in datasets.all().items()}
    _list({**known, NPZ: ("your own train_inputs, train_targets, test_inputs, test_targets",)})


def models() -> None:
    """List the models, one line each."""
    from qupel.tasks.zoo import networks

    _list({name: (entry.about,) for name, entry in networks.all().items()})


def _list(items: dict[str, tuple[str, ...]]) -> None:
    """A name each, what it is, where it is from."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    for name, (about, *source) in items.items():
        told = Text(about).append(f" {source[0]}" if source and source[0] else "", "dim")
        rows.add_row(Text(name), told)
    out.print(rows, highlight=False)
