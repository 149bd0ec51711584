"""The paper's four claims, each decided by an interval: from finished cells of Tables 2 and 3, kept ones for instance.

A part of a claim says that a difference d of mean accuracies, in points, is above a bound. Its 95 % interval, low to
high, is over seeds (`significance`): it holds where low > bound, does not where high < bound, and cannot be told else.
One seed has no such interval; that over the differences of its clients is told beside it, and is about this federation
alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qupel.paper.published import FEDAVG, LOCAL, NOTES, OURS, PARTNERS, QUPEL, TABLES, Place, clients, gain_over
from qupel.paper.reproduce import plan
from qupel.report.runs import place
from qupel.report.significance import Gain, over_seeds
from qupel.report.tables import Result, markdown, markdown_text
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

HOLDS, FAILS, OPEN, MISSING = "holds", "does not", "cannot be told", "not run"
ROWS = (QUPEL, OURS)
WIDTHS = ("32 bits", "3 bits", "2 bits")
Scores = Mapping[int, np.ndarray]  # seed -> accuracy of the clients that count, percent (n,)


@dataclass(frozen=True)
class Part:
    """above - below > bound."""

    claim: str
    text: str
    table: str
    above: Place
    below: Place
    bound: float = 0.0


def parts(row: str) -> list[Part]:
    """The four claims, of a row of the tables."""
    local = [Part("QuPeL is above Local", c, "table2", (row, c), (LOCAL, c)) for c in WIDTHS]
    shared = [Part("QuPeL is above FedAvg", c, "table2", (row, c), (FEDAVG, "32 bits")) for c in WIDTHS]
    costs = [("3 bits", -0.5), ("2 bits", -2.1)]  # "about 2": the paper's own is 2.06
    little = [
        Part("quantization costs little", f"{c}: at most {-b:g}", "table2", (row, c), (row, "32 bits"), b)
        for c, b in costs
    ]
    poor, *rich = PARTNERS
    gains = [Part("2-bit clients gain from richer partners", c, "table3", (row, c), (row, poor)) for c in rich]
    return local + shared + little + gains


@dataclass(frozen=True)
class Judged:
    """What came out of a part: d with its interval, over `seeds` seeds, or over `clients` clients where that is one."""

    row: str
    claim: str
    text: str
    verdict: str
    inside: str | None = None  # the verdict for the clients of the one seed
    paper: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    clients: int = 0


def judge(row: str, part: Part, found: Mapping[Place, Scores]) -> Judged:
    """found: the scores of a table, by place."""
    table = TABLES[part.table]
    theirs = [table.values.get((r.replace(OURS, QUPEL), c)) for r, c in (part.above, part.below)]
    paper = theirs[0][0] - theirs[1][0] if theirs[0] and theirs[1] and row == QUPEL else None
    ours, others = found.get(part.above, {}), found.get(part.below, {})
    both = sorted(set(ours) & set(others))
    gain, inside = gain_over(dict(ours), dict(others)), None
    if gain is None:
        return Judged(row, part.claim, part.text, MISSING, paper=paper)
    told = verdict(gain, part.bound)
    pairs = ours[both[0]] - others[both[0]]  # (n,)
    pairs = pairs[np.isfinite(pairs)]
    if len(both) == 1:
        gain = over_seeds(dict(enumerate(pairs.tolist()))) or gain
        inside = verdict(gain, part.bound)
    numbers = (gain.mean, gain.low, gain.high, len(both), len(pairs))
    return Judged(row, part.claim, part.text, told, inside, paper, *numbers)


def verdict(gain: Gain, bound: float) -> str:
    if gain.low is None or gain.high is None:
        return OPEN
    return HOLDS if gain.low > bound else FAILS if gain.high < bound else OPEN


def together(verdicts: Sequence[str]) -> str:
    """Of a claim in parts: all must hold, and one that does not is enough."""
    if FAILS in verdicts:
        return FAILS
    same = set(verdicts)
    return verdicts[0] if len(same) == 1 else OPEN


# --- files ---


def gather(runs: Path, scale: str) -> dict[str, Any]:
    """The claims as numbers, from RUNS/table2-SCALE and table3-SCALE."""
    results = {}
    for table in ("table2", "table3"):
        folder = plan.folder(runs, table, scale)
        results[table] = plan.results(folder, plan.read(folder)[1]) if folder.exists() else []
    done = [r for each in results.values() for r in each]
    if not done:
        raise UserError(f"{runs} has no finished cell of table2-{scale} or table3-{scale}")
    found = {table: _scores(table, each) for table, each in results.items()}
    judged = [judge(row, part, found[part.table]) for row in ROWS for part in parts(row)]
    commits = sorted({str(r["machine"]["commit"]) for r in done})
    notes = [NOTES[scale], *dict.fromkeys(r["data_note"] for r in done if r["data_note"])]
    about = {"scale": scale, "cells": len(done), "commits": commits, "note": ". ".join(filter(None, notes))}
    return {**about, "parts": [asdict(j) for j in judged]}


def _scores(table: str, results: Sequence[Result]) -> dict[Place, dict[int, np.ndarray]]:
    found: dict[Place, dict[int, np.ndarray]] = {}
    for r in results:
        found.setdefault(place(r["label"]), {})[r["seed"]] = clients(r, TABLES[table])
    return found


def write(runs: Path, scale: str, target: Path) -> list[Path]:
    """claims-SCALE.json, and .md from it."""
    raw = gather(runs, scale)
    target.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(raw, indent=1) + "\n", ".md": page(raw)}
    for suffix, text in texts.items():
        write_atomic(target / f"claims-{scale}{suffix}", text)
    return [target / f"claims-{scale}{suffix}" for suffix in texts]


def page(raw: Mapping[str, Any]) -> str:
    judged = [Judged(**told) for told in raw["parts"]]
    rows = [row for row in ROWS if any(j.row == row and j.verdict != MISSING for j in judged)]
    head = ["claim", "where", "the paper", "here", "95 % interval", "over", "verdict"]
    four, tables = {j.claim: [j.claim] for j in judged}, []
    for row in rows:
        mine = [j for j in judged if j.row == row]
        for claim, line in four.items():
            line.append(_together([j for j in mine if j.claim == claim]))
        body = [[j.claim, j.text, _number(j.paper), _number(j.gain), *_interval(j), _said(j)] for j in mine]
        tables.append(f"## {row}\n\n{markdown(head, body)}")
    title = f"# The paper's claims, scale {raw['scale']}\n\n{markdown_text(raw['note'])}.\n"
    origin = (
        f"`qupel reproduce claims --scale {raw['scale']}`: {raw['cells']} cells, commit {', '.join(raw['commits'])}.\n"
    )
    return "\n".join([title, markdown(["claim", *rows], list(four.values())), *tables, f"{READ}\n", origin])


READ = (
    "Differences of mean test accuracies in points; a cost is the quantized accuracy minus the full-precision one. "
    "A claim holds where the whole interval of each of its parts is beyond the bound, and does not where one is "
    "wholly on the other side. An interval over seeds is that of a t-test in which a seed counts once; none is "
    "corrected for their number. One seed cannot tell: its interval is over the paired differences of its clients, "
    "which share class draws and a first model, and says something about this one federation only."
)


def _together(some: Sequence[Judged]) -> str:
    inside = [j.inside for j in some if j.inside is not None]
    return _words(together([j.verdict for j in some]), together(inside) if len(inside) == len(some) else None)


def _said(j: Judged) -> str:
    return _words(j.verdict, j.inside)


def _words(told: str, inside: str | None) -> str:
    return told if inside in (None, OPEN) else f"{told} (one seed; for its clients: {inside})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _interval(j: Judged) -> tuple[str, str]:
    if j.low is None:
        return "", ""
    return f"{j.low:+.2f} to {j.high:+.2f}", f"{j.seeds} seeds" if j.seeds > 1 else f"{j.clients} clients of one seed"
