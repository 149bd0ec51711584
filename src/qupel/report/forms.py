"""A comparison in every form that people put it in: HTML, Markdown, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

from qupel.report import later, networks, significance, tables
from qupel.report.measure import Measure, main_measure, told_metrics
from qupel.report.runs import Run
from qupel.util.terminal import plain

GAIN = (
    "gain: {first} minus the method, in points, with its 95 % confidence interval; * p < 0.05, ** p < 0.01, "
    f"*** p < 0.001 ({significance.WORDS})."
)
OVER = "mean: over clients, ± std over seeds; weighted: by the clients' test samples; worst 10% and spread over clients"
UNSEEN = "unseen: clients kept out of training, after adaptation"


def gain_text(first: str, measure: Measure) -> str:
    """How to read a gain."""
    text = GAIN if measure.higher else GAIN.replace("{first} minus the method", "the method minus {first}")
    return (text if measure.percent else text.replace(", in points,", ",")).format(first=first)


@dataclass(frozen=True)
class Form:
    """One table. `said`: what it means, in a sentence; `legend`: how to read it."""

    title: str
    said: str
    html: str
    legend: str
    markdown: str
    latex: str
    csv: str


Own = Mapping[str, Callable[[Run], Form]]  # by the name of a table, the form that its runs have
NOTHING: Own = MappingProxyType({})


def forms(runs: Sequence[Run], own: Own = NOTHING) -> list[Form]:
    """A table for each run of a table with a form of its own, and for each group of others that can be compared."""
    found, rest = [], []
    for run in runs:
        if run.table is not None and run.table in own:
            found.append(own[run.table](run))
        else:
            rest.append(run)
    while rest:
        group = [r for r in rest if r.comparable(rest[0])]
        found.append(_form(group, alone=len(runs) == 1))
        rest = [r for r in rest if r not in group]
    return found


def _form(runs: Sequence[Run], alone: bool) -> Form:
    """The comparison of these runs; alone: nothing else is in the report, so that names need not be said."""
    results = [{**r, "label": run.name_of(r["label"], len(runs) == 1)} for run in runs for r in run.results]
    rows, measure = tables.rows(results), main_measure(results)
    first, one = rows[0].label, runs[0].one_place
    head, body = tables.training_table(rows, measure) if one else tables.federation_table(rows, measure=measure)
    unit = " in percent" if measure.percent else "" if measure.higher else " (less is better)"
    legend = f"Test {measure.name}{unit} after the last round, mean ± std over seeds"
    if not one:
        legend += "; worst 10%: mean of the worst tenth of the clients; spread: std over clients"
        if "unseen" in head:
            legend += f"; {UNSEEN}"
        if any(r.gain is not None for r in rows):
            legend += f". {gain_text(first, measure)}"
    said = "" if one or len(rows) > 6 else tables.sentence(rows, measure)
    more = [tables.metrics_table(results, one)] if told_metrics(results) else []
    over = "" if one else f"{OVER}."
    title = "After the last round" + ("" if alone else f": {', '.join(run.name for run in runs)}")
    notes = " ".join(dict.fromkeys(run.note for run in runs if run.note))
    said_in = [text for text in (title, legend, notes) if text]
    comments = "".join(f"% {plain(text, 5000)}\n" for text in said_in)
    title_md, legend_md, *notes_md = map(tables.markdown_text, said_in)
    html = html_table(head, body) + "".join(f"<h3>Every metric</h3>{html_table(*m)}" for m in more)
    several = networks.with_networks(results)
    if several:
        html += f"<h3>By network and bits</h3>{html_table(*networks.table(results))}"
        html += f'<p class="legend">{escape(networks.legend(results))}</p>'
    if late := later.with_late(results):
        html += f"<h3>Clients that joined later</h3>{html_table(*later.table(late))}"
        html += f'<p class="legend">{escape(later.legend(late))}</p>'
    after = "".join(f"\n{tables.markdown(*m)}" + (f"\n{tables.markdown_text(over)}\n" if over else "") for m in more)
    if several:
        after += f"\n{tables.markdown(*networks.table(results))}\n{tables.markdown_text(networks.legend(results))}\n"
    if late:
        after += f"\n{tables.markdown(*later.table(late))}\n{tables.markdown_text(later.legend(late))}\n"
    return Form(
        title=title,
        said=said,
        html=html,
        legend=f"{legend.rstrip('.')}. {over}".strip() if more else legend,
        markdown=f"{title_md}\n\n{tables.markdown(head, body)}\n{legend_md}\n{after}"
        + "".join(f"\n{n}\n" for n in notes_md),
        latex=comments + tables.latex(head, body) + "".join(f"\n% {over}\n{tables.latex(*m)}" for m in more),
        csv=tables.as_csv(tables.told_rows(results)),
    )


def html_table(
    head: Sequence[str], body: Sequence[Sequence[str]], kind: str = "", rows: Sequence[str] = (), size: str = "whole"
) -> str:
    """A table in its own scrolling box; the first cell of a row is its heading. rows: a class for each row."""
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    lines = []
    for k, (name, *cells) in enumerate(body):
        inside = f'<th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(c)}</td>" for c in cells)
        lines.append(f'<tr class="{rows[k]}">{inside}</tr>' if rows else f"<tr>{inside}</tr>")
    table = f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="scroll {size}" tabindex="0" role="region" aria-label="table">{table}</div>'
