"""The leaderboard as one page from its numbers: for each federation what it says, a table to sort, a chart."""

from __future__ import annotations

from html import escape
from typing import Any

from qupel.report import leaderboard as numbers
from qupel.report.charts import Chart, Comparison, Series
from qupel.report.forms import html_table
from qupel.report.leaderboard import Federation
from qupel.report.page import document, figure, switches


def page(board: dict[str, Any]) -> str:
    methods = [
        m for m in board["methods"] if any(c["method"] == m for f in board["federations"].values() for c in f["cells"])
    ]
    series = tuple(Series(name, k, 0, ()) for k, name in enumerate(methods))
    c = Comparison(tuple(methods), ("",), series)
    found = board["federations"]
    told = {f"chart-{k}": chart(f, methods, board["reference"]) for k, f in enumerate(found.values())}
    links = ", ".join(f'<a href="#federation-{k}">{escape(name)}</a>' for k, name in enumerate(found))
    parts = [
        "<h1>Leaderboard</h1>",
        f'<p class="soft"><code>qupel compare {escape(board["file"])}</code> · {links}</p>',
        f"<p>{escape(numbers.search_words(board))} {escape(numbers.WORDS)}</p>",
        switches(c),
        *(_section(k, name, f, board["reference"]) for k, (name, f) in enumerate(found.items())),
        f'<p class="legend">{escape(numbers.READ)}; {escape(numbers.gain_words(board))}.</p>',
    ]
    return document("QuPeL leaderboard", parts, c, told)


def chart(federation: Federation, methods: list[str], reference: str) -> Chart:
    """Score against bytes: a point a cell, a line through a method's. The reference's points are named first."""
    m = numbers.measure_of(federation)
    points = []
    for c in sorted(federation["cells"], key=lambda c: c["method"] != reference):
        size = c["file_bytes"] if c["file_bytes"] is not None else c["model_bytes"]
        name = f"{numbers.name(c)}, {numbers.shown_bits(c['bits'])}"
        point = {"series": methods.index(c["method"]), "name": name, "x": size, "y": c["mean"], "std": c["std"]}
        points.append({**point, "group": methods.index(c["method"])})
    about = {"kind": "scatter", "x": "bytes of a client's model", "y": m.axis, "unit": "%" if m.percent else ""}
    return {**about, "name": m.name, "points": points}


def _section(k: int, name: str, federation: Federation, reference: str) -> str:
    lead = "Mean over seeds (bar: std) against the bytes of a client's model file; a line joins the bits of a method."
    notes = "".join(f'<p class="soft note">{escape(words)}</p>' for words in numbers.about_words(federation))
    chosen = ""
    if federation["search"]:
        inside = html_table(numbers.CHOSEN_HEAD, numbers.chosen_rows(federation), "words")
        chosen = f"<details><summary>What was tried and chosen on validation data</summary>{inside}</details>"
    return (
        f'<section id="federation-{k}"><h2>{escape(name)}</h2><p class="soft">{escape(federation["facts"])}</p>'
        f"<p>{escape(federation['said'])}</p>{_table(federation, reference)}{notes}{chosen}"
        f'<p class="soft">{escape(federation["machine"])}; {escape(federation["finished"])}.</p></section>'
        + figure(f"chart-{k}", f"{escape(name)}: score against size", lead, "")
    )


def _table(federation: Federation, reference: str) -> str:
    """Every cell has the value that it is sorted by; the last one the command that repeats it."""
    head, body = numbers.table(federation)
    top = []
    for k, title in enumerate(head):
        kind = ' data-kind="text"' if k == 0 else ""
        top.append(f'<th scope="col"{kind}><button type="button">{escape(title)}</button></th>')
    rows = []
    for cell, texts in zip(federation["cells"], body, strict=True):
        values = [("" if value is None else str(value), text) for text, value in texts]
        inside = "".join(f'<td data-value="{escape(v)}">{escape(text)}</td>' for v, text in values[1:])
        first = f'<th scope="row" data-value="{escape(values[0][0])}">{escape(values[0][1])}</th>'
        ours = ' class="ours"' if cell["method"] == reference else ""
        rows.append(f"<tr{ours}>{first}{inside}<td><code>{escape(cell['command'])}</code></td></tr>")
    table = f'<thead><tr>{"".join(top)}<th scope="col">to repeat it</th></tr></thead><tbody>{"".join(rows)}</tbody>'
    label = 'tabindex="0" role="region" aria-label="table"'
    return f'<div class="scroll whole" {label}><table class="sortable">{table}</table></div>'
