"""A report as files: a page, its pictures and its tables from run directories."""

from __future__ import annotations

from pathlib import Path

from qupel.report import charts, figures
from qupel.report.forms import NOTHING, Own, forms
from qupel.report.page import page
from qupel.report.runs import load_runs
from qupel.util.errors import UserError
from qupel.util.files import write_atomic


def write_report(folders: list[Path], out: Path | None = None, own: Own = NOTHING) -> Path:
    """Write the report of these runs into a folder; returns its page. own: tables that have a form of their own."""
    runs = load_runs(folders)
    out = out or runs[0].folder / ("report" if len(runs) == 1 else "comparison")
    compared = charts.compare(runs)
    told, tables = charts.all_charts(compared), forms(runs, own)
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
