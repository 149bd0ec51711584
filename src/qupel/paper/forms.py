"""A run of one of the paper's tables in the form that the paper prints it, for the report."""

from __future__ import annotations

from qupel.paper import published as paper
from qupel.report.forms import Form, Own, html_table
from qupel.report.runs import Run


def table_form(run: Run) -> Form:
    assert run.table is not None
    grid = paper.grid(run.table, run.results, run.rows, paper.NOTES.get(run.scale, ""))
    body: list[list[str]] = []
    for name, texts in paper.lines(grid):
        if name in grid.rows:
            cells = grid.cells[grid.rows.index(name)]
        if name != grid.compared:
            body.append([name, *texts])
            continue
        # the interval goes below the gain: a screen is narrower than a text
        body.append([name, *("" if c.gain is None else f"{c.gain:+.2f}{c.mark}" for c in cells)])
        body.append(["95 % interval", *("" if c.low is None else f"{c.low:+.2f} to {c.high:+.2f}" for c in cells)])
    classes = ["ours" if name in grid.rows else "more" for name, *_ in body]
    return Form(
        title=grid.title + (f" (scale {run.scale})" if run.scale else ""),
        said="",
        html=html_table(["", *grid.columns], body, "grid", classes),
        legend=paper.LEGEND.format(compared=grid.compared),
        markdown=paper.as_markdown(grid),
        latex=paper.as_latex(grid),
        csv=paper.as_csv(grid),
    )


FORMS: Own = dict.fromkeys(paper.TABLES, table_form)
