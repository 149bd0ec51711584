"""One self-contained HTML page: no library, no request, light and dark, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from qupel.report import charts
from qupel.report.charts import Chart, Comparison
from qupel.report.forms import Form, html_table
from qupel.report.measure import Measure
from qupel.report.runs import Run

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    runs: Sequence[Run], c: Comparison, told: dict[str, Chart], tables: Sequence[Form], beside: Sequence[str]
) -> str:
    """The page. told: the charts by name; beside: files that lie next to it."""
    title = ", ".join(run.name for run in runs)
    links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in beside)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(facts(run, len(runs) > 1))}</p>' for run in runs),
        *(f'<p class="note">{escape(text)}</p>' for text in _unfinished(runs)),
        _tables(tables, notes(runs)),
        switches(c, charts.measures(c)),
        *_figures(told, notes(runs), not all(run.one_place for run in runs), charts.measures(c)),
        "<section><h2>Settings</h2>" + "".join(settings(run) for run in runs) + "</section>",
        f'<p class="soft">Beside this page, for a paper: {links}.</p>',
    ]
    return document(f"{title}: QuPeL report", parts, c, told)


def document(title: str, parts: Sequence[str], c: Comparison, told: dict[str, Chart]) -> str:
    """A whole page: its parts, and the charts (`told`) that the script draws of these series."""
    series = [
        {"label": s.label, "family": s.family, "variant": s.variant, "color": s.color, "dash": s.dash} for s in c.series
    ]
    data = {"series": series, "dashes": charts.DASHES, "charts": told}
    here = files("qupel.report")
    script, style = ((here / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{palette()}{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def embedded(data: Any) -> str:
    """JSON that cannot end its script element, whatever a label says; NaN is refused, not written."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def palette() -> str:
    light, dark = ("".join(f"--s{k}: {v}; " for k, v in enumerate(colors)) for colors in (charts.LIGHT, charts.DARK))
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"


def facts(run: Run, named: bool) -> str:
    """What was run, in a line."""
    c = run.config
    split = c["split"]
    clients = {
        "one": "one place",
        "classes": f"{split['clients']} clients with {split['classes']} classes each",
        "dirichlet": f"{split['clients']} clients, Dirichlet({split['alpha']:g})",
        "groups": "a client for each group",
    }.get(split["kind"], f"{split['clients']} clients")
    if owners := next((r["owners"] for r in run.results if r.get("owners")), 0):
        clients = f"{owners} clients, each with its own data"
    seeds = sorted({r["seed"] for r in run.results})
    models = dict.fromkeys(m.get("model") or c["model"]["name"] for m in c["methods"].values())
    parts = [
        c["data"]["name"].rstrip("/").rpartition("/")[2],
        clients,
        " and ".join(models),
        f"{c['rounds']} rounds of {c['local_steps']} steps",
    ]
    parts.append(f"{len(seeds)} seed{'s' * (len(seeds) > 1)}")
    return (f"{run.name}: " if named else "") + " · ".join(filter(None, parts))


def _unfinished(runs: Sequence[Run]) -> list[str]:
    return [
        f"{run.name}: {len(run.results)} of {run.cells} cells are finished; the rest is missing here."
        for run in runs
        if len(run.results) < run.cells
    ]


def notes(runs: Sequence[Run]) -> str:
    """What is to be said about the data, next to every figure and table."""
    found = dict.fromkeys(run.note for run in runs if run.note)
    return f'<p class="soft note">{escape("; ".join(found))}.</p>' if found else ""


def _tables(tables: Sequence[Form], note: str) -> str:
    found = []
    for form in tables:
        said = f"<p>{escape(form.said)}</p>" if form.said else ""
        legend = f'<p class="legend">{escape(form.legend)}</p>'
        found.append(f"<section><h2>{escape(form.title)}</h2>{said}{form.html}{legend}{note}</section>")
    return "\n".join(found)


def switches(c: Comparison, measures: Sequence[Measure] = ()) -> str:
    """The legend of all figures: a button for each family, and for each variant; which metric, where there are
    several."""
    rows = []
    families = {s.family: (f"var(--s{s.color})", s.family // len(charts.LIGHT)) for s in c.series}  # color, dashes
    variants = {s.variant: ("currentColor", s.variant) for s in c.series}
    for kind, names, looks in (("family", c.families, families), ("variant", c.variants, variants)):
        buttons = []
        for k, (color, dash) in sorted(looks.items()):
            dashes = charts.DASHES[dash % len(charts.DASHES)]
            style = f'style="stroke: {color}; stroke-width: 3" stroke-dasharray="{dashes}"'
            buttons.append(
                f'<button type="button" aria-pressed="true" data-kind="{kind}" data-index="{k}">'
                f'<svg width="22" height="10" aria-hidden="true"><path d="M1 5H21" {style}/></svg>{escape(names[k])}'
                "</button>"
            )
        if len(buttons) > 1:
            rows.append(f'<div role="group" aria-label="show or hide">{"".join(buttons)}</div>')
    if len(measures) > 1:
        options = "".join(f'<option value="{k or ""}">{escape(m.name)}</option>' for k, m in enumerate(measures))
        rows.append(f'<div><label>metric <select id="measure">{options}</select></label></div>')
    return f'<nav class="switches">{"".join(rows)}</nav>' if rows else ""


# --- the figures ---

PICK = ("method", "client", "layer")


def _figures(told: dict[str, Chart], note: str, federated: bool, measures: Sequence[Measure]) -> list[str]:
    score = "accuracy" if [m.name for m in measures] == ["accuracy"] else "score"
    found = [
        figure(
            "accuracy",
            f"{score.capitalize()} while they learn",
            f"Mean test {score} of the models that would be shipped at that moment. The band goes from the lowest to "
            "the highest seed. A model that is quantized along the way may dip where it is.",
            note,
            '<button type="button" class="zoom" aria-pressed="false">zoom to the end</button>',
        )
    ]
    if "clients" in told:
        lead = (
            f"Test {score} of the clients' own models at the end: a dot for each client and seed, a bar for the mean."
        )
        found.append(figure("clients", "Every client, by bit width", lead, note))
    elif federated:
        why = "there are too many of them, or the runs keep no list."
        found.append(f'<section><h2>Every client</h2><p class="soft">Not shown: {why}</p></section>')
    lead = f"Mean {score} after the last round (bar: std over seeds) against the mean bytes of a client's model."
    found.append(figure("sizes", f"{score.capitalize()} against size", lead, note))
    if "weights" in told:
        lead = (
            "Above, each center's way to where it ends, time running down; short ways are magnified, values on hover "
            "are not. Below, the layer's weights around their centers before fine-tuning (first seed, one client of "
            "each bit width)."
        )
        picks = "".join(f"<label>{name} <select></select></label>" for name in PICK)
        found.append(figure("weights", "Weights and centers", lead, note, f'<div class="choose">{picks}</div>'))
    else:
        why = "no client is quantized, or the run is older than the recording of centers."
        found.append(f'<section><h2>Weights and centers</h2><p class="soft">Not shown: {why}</p></section>')
    small = [name for name in told if name.startswith("diagnostics-")]
    if small:
        each = "".join(f'<figure><div class="chart" data-small data-chart="{escape(n)}"></div></figure>' for n in small)
        found.append(f'<section><h2>Diagnostics</h2>{note}<div class="small">{each}</div></section>')
    return found


def figure(name: str, title: str, lead: str, note: str, before: str = "") -> str:
    return (
        f'<section id="{name}"><h2>{title}</h2><p class="soft">{lead}</p><figure>{before}'
        f'<div class="chart" data-chart="{name}"></div><figcaption>{note}</figcaption>'
        "<details><summary>The numbers of this figure</summary></details></figure></section>"
    )


# --- the settings ---


def settings(run: Run) -> str:
    """What the config says: for the run, and for its methods where they differ."""
    whole = [[key, value] for key, value in _flat({k: v for k, v in run.config.items() if k != "methods"})]
    methods = {label: dict(_flat(m)) for label, m in run.config["methods"].items()}
    keys = list(dict.fromkeys(key for m in methods.values() for key in m))
    differ = [k for k in keys if len({m.get(k) for m in methods.values()}) > 1]
    same = [[k, next(iter(methods.values())).get(k, "")] for k in keys if k not in differ]
    phases = {r["label"]: _phases(r) for r in run.results}
    head = ["", *methods]
    body = [["phases (rounds)", *(phases.get(label, "not finished") for label in methods)]]
    body += [[key, *(m.get(key, "") for m in methods.values())] for key in differ]
    if len(methods) > len(body):  # the longer side goes down
        (head, *body) = ([*column] for column in zip(head, *body, strict=True))
    machines = dict.fromkeys(", ".join(f"{k} {v}" for k, v in r.get("machine", {}).items() if v) for r in run.results)
    minutes = sum(r["seconds"] for r in run.results) / 60
    return (
        f"<h3>{escape(run.name)}</h3>"
        f'<p class="soft">{minutes:.1f} minutes in all, on {escape("; ".join(machines))}.</p>'
        + html_table(head, body)
        + f"<details><summary>Everything else</summary>{html_table(['run', ''], whole, 'words')}"
        + f"{html_table(['all methods', ''], same, 'words')}</details>"
    )


def _phases(result: dict[str, Any]) -> str:
    """fedavg 8, qupel (prox) 1, qupel (frozen) 1."""

    def said(phase: dict[str, Any]) -> str:
        quantizer = phase.get("quantizer", {}).get("name", "none")
        return phase["method"] + ("" if quantizer == "none" else f" ({quantizer})")

    return ", ".join(f"{said(p)} {p['rounds']}" for p in result.get("phases", []))


def _flat(table: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """{'split': {'clients': 20}} -> [('split.clients', '20')]; what is not set is left out."""
    found = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{key}.")
        elif value is not None and value not in ([], ()):
            text = value if isinstance(value, str) else json.dumps(value)
            found.append((before + key, text))
    return found
