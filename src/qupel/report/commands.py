"""`qupel report`: a page, its pictures and its tables from run directories. `cli.py` registers it."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from qupel.util.errors import UserError
from qupel.util.terminal import out as console


def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories; several are compared in one page")],
    open: Annotated[bool, typer.Option("--open", help="show the page in the browser")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder (default: RUN/report; RUN/comparison for several)")
    ] = None,
) -> None:
    """Make a page to look at, with its figures (PNG, SVG) and tables (Markdown, LaTeX, CSV)."""
    target = write_report(runs, out)
    console.print(f"written to {target}", highlight=False, soft_wrap=True, markup=False)
    if open:
        webbrowser.open(target.resolve().as_uri())


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write the report of these runs into a folder; returns its page."""
    from qupel.report import charts, figures
    from qupel.report.forms import forms
    from qupel.report.page import page
    from qupel.report.runs import load_runs
    from qupel.util.files import write_atomic

    runs = load_runs(folders)
    out = out or runs[0].folder / ("report" if len(runs) == 1 else "comparison")
    compared = charts.compare(runs)
    told, tables = charts.all_charts(compared), forms(runs)
    note = "; ".join(dict.fromkeys(run.note for run in runs if run.note))
    contents: dict[str, bytes | str] = {}
    for k, form in enumerate(tables):
        name = "table" if k == 0 else f"table-{k + 1}"
        contents |= {f"{name}.md": form.markdown, f"{name}.tex": form.latex, f"{name}.csv": form.csv}
    contents |= figures.report_pictures(compared, told, note)
    contents["index.html"] = page(runs, compared, told, tables, sorted(contents))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write the report to {out}: {e.strerror}") from None
    for name, content in contents.items():
        write_atomic(out / name, content)
    return out / "index.html"
