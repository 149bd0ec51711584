"""The leaderboard as one page from its numbers: for each federation what it says, a table to sort, a chart."""

from __future__ import annotations

from html import escape
from itertools import product
from typing import Any

from qupel.report import leaderboard as numbers
from qupel.report.charts import Chart, Comparison, Series
from qupel.report.forms import html_table
from qupel.report.leaderboard import Federation, shown_bits
from qupel.report.page import document, figure, switches

Places = dict[tuple[str, int], int]  # (method, bits) -> which of the page's series


def page(board: dict[str, Any]) -> str:
    """A color is a method's; methods, and numbers of bits, are switched off and on in tables and charts."""
    found = board["federations"]
    there = [c for f in found.values() for c in f["cells"]]
    methods = [m for m in board["methods"] if any(c["method"] == m for c in there)]
    widths = sorted({c["bits"] for c in there}, reverse=True)
    places = {(m, b): k for k, (m, b) in enumerate(product(methods, widths))}
    series = (Series(f"{m}, {shown_bits(b)}", methods.index(m), widths.index(b), ()) for m, b in places)
    c = Comparison(tuple(methods), tuple(map(shown_bits, widths)), tuple(series))
    told = {f"chart-{k}": chart(f, places, board["reference"]) for k, f in enumerate(found.values())}
    overview = numbers.overview(board)
    links = ", ".join(f'<a href="#federation-{k}">{escape(name)}</a>' for k, name in enumerate(found))
    parts = [
        "<h1>Leaderboard</h1>",
        f'<p class="soft"><code>qupel compare {escape(board["file"])}</code> · {links}</p>',
        f"<p>{escape(numbers.search_words(board))} {escape(numbers.WORDS)}</p>",
        *([html_table(*overview, "words")] if overview[1] else []),
        switches(c),
        *(_section(k, name, f, places, board["reference"]) for k, (name, f) in enumerate(found.items())),
        f'<p class="legend">{escape(numbers.READ)}; {escape(numbers.gain_words(board))}.</p>',
    ]
    return document("QuPeL leaderboard", parts, c, told)


def chart(federation: Federation, places: Places, reference: str) -> Chart:
    """Score against bytes: a point a cell, a line through a method's. The reference's points are named first."""
    m = numbers.measure_of(federation)
    points = []
    for c in sorted(federation["cells"], key=lambda c: c["method"] != reference):
        at = {"series": places[c["method"], c["bits"]], "x": numbers.shipped(c), "y": c["mean"], "std": c["std"]}
        points.append({**at, "name": f"{numbers.name(c)}, {shown_bits(c['bits'])}", "group": c["method"]})
    about = {"kind": "scatter", "x": "bytes of a client's model", "y": m.axis, "unit": "%" if m.percent else ""}
    return {**about, "name": m.name, "points": points}


def _section(k: int, name: str, federation: Federation, places: Places, reference: str) -> str:
    lead = "Mean over seeds (bar: std) against the bytes of a client's model file; a line joins the bits of a method."
    notes = "".join(f'<p class="soft note">{escape(words)}</p>' for words in numbers.about_words(federation))
    chosen = ""
    if federation["search"]:
        inside = html_table(numbers.CHOSEN_HEAD, numbers.chosen_rows(federation), "words")
        chosen = f"<details><summary>What was tried and chosen on validation data</summary>{inside}</details>"
    return (
        f'<section id="federation-{k}"><h2>{escape(name)}</h2><p class="soft">{escape(federation["facts"])}</p>'
        f"<p>{escape(federation['said'])}</p>{_table(federation, places, reference)}{notes}{chosen}"
        f'<p class="soft">{escape(federation["machine"])}; {escape(federation["finished"])}.</p></section>'
        + figure(f"chart-{k}", f"{escape(name)}: score against size", lead, "")
    )


def _table(federation: Federation, places: Places, reference: str) -> str:
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
        series = places[cell["method"], cell["bits"]]
        rows.append(
            f'<tr{ours} data-series="{series}">{first}{inside}<td><code>{escape(cell["command"])}</code></td></tr>'
        )
    table = f'<thead><tr>{"".join(top)}<th scope="col">to repeat it</th></tr></thead><tbody>{"".join(rows)}</tbody>'
    label = 'tabindex="0" role="region" aria-label="table"'
    return f'<div class="scroll whole" {label}><table class="sortable">{table}</table></div>'
