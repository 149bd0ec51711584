"""What a comparison came to: numbers (leaderboard.json), and from these alone Markdown and one page.

A cell is a method at a number of bits, over its seeds. Gains are the reference's at the same bits minus the method's,
by the t-test over seeds of `significance`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qupel.report import significance, tables
from qupel.report.measure import Measure, main_measure
from qupel.report.page import facts
from qupel.report.runs import load_run, place
from qupel.report.tables import Result
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_atomic

ABOUT, CHOSEN, FAILED = "compare.json", "search.json", "failed.json"
NUMBERS, TEXT, PAGE = "leaderboard.json", "leaderboard.md", "leaderboard.html"
ROW = ("seeds", "mean", "std", "worst", "spread", "model_bytes", "file_bytes", "unseen")
TESTED = ("gain", "low", "high", "p")
Cell = dict[str, Any]
Federation = dict[str, Any]

WORDS = (
    "Clients of one seed share class draws, a first model and a federation, and are not independent: differences are "
    "tested over seeds alone. p: " + significance.WORDS + "."
)
READ = (
    "mean ± std over seeds of the mean over clients; worst 10%: the mean of the worst tenth of the clients; unseen: "
    "clients kept out of training, after adaptation; file: bytes of a client's model file; sent: bytes that a client "
    "sends in the whole run; seconds: of a seed, on the machine named below, with all that it shares with others"
)


# --- from run directories to numbers ---


def gather(run: Path) -> dict[str, Any]:
    """All that is done of a comparison."""
    if not (run / ABOUT).is_file():
        raise UserError(f"{run} holds no comparison: it has no {ABOUT}")
    about = read_json(run / ABOUT)
    begun = [name for name in about["federations"] if any((run / name).glob("cells/*/result.json"))]
    found = {name: _federation(run / name, name, about) for name in begun}
    return {**about, "federations": found}


def choices(folder: Path) -> dict[str, Any]:
    """search.json of a federation."""
    return dict(read_json(folder / CHOSEN)) if (folder / CHOSEN).exists() else {}


def failures(folder: Path) -> dict[str, str]:
    """failed.json of a run directory: by cell, why it could not be trained."""
    return dict(read_json(folder / FAILED)) if (folder / FAILED).exists() else {}


def _federation(folder: Path, name: str, about: dict[str, Any]) -> Federation:
    run = load_run(folder, name)
    measure = main_measure(run.results)
    order = list(about["methods"])
    by_bits: dict[str, list[Result]] = {}  # "2 bits" -> results
    for result in run.results:
        by_bits.setdefault(place(result["label"])[1], []).append(result)
    cells = [cell for column, results in by_bits.items() for cell in _cells(column, results, measure, name, about)]
    cells.sort(key=lambda c: (-c["bits"], order.index(c["method"]) if c["method"] in order else len(order)))
    machines = dict.fromkeys(
        ", ".join(f"{k} {v}" for k, v in r.get("machine", {}).items() if v and k != "device") for r in run.results
    )
    found = {
        "facts": facts(run, False),
        "note": run.note,
        "measure": {key: getattr(measure, key) for key in ("name", "higher", "percent")},
        "cells": cells,
        "missing": run.cells - len(run.results),
        "failed": failures(folder),
        "search": choices(folder),
        "machine": "; ".join(machines),
        "finished": max(str(r.get("finished", "")) for r in run.results),
    }
    return {**found, "said": sentence(found, about["reference"])}


def _cells(column: str, results: Sequence[Result], m: Measure, federation: str, about: dict[str, Any]) -> list[Cell]:
    """Those of one number of bits; its reference is the reference method's at the same bits."""
    labels = {r["label"] for r in results}
    reference = next((label for label in labels if place(label)[0] == about["reference"]), None)
    found = []
    for row in tables.rows(results, reference or results[0]["label"], m):
        mine = [r for r in results if r["label"] == row.label]
        method = place(row.label)[0]
        cell: Cell = {
            "method": method,
            "bits": int(column.split()[0]),
            "afterwards": mine[0].get("method", {}).get("of"),
        }
        cell["afterwards"] = about["methods"].get(method, {}).get("afterwards") if cell["afterwards"] else None
        told = row.told()
        cell |= {key: known(told.get(key)) for key in ROW}
        cell |= {key: known(told[key]) if reference else None for key in TESTED}
        cell["seconds"] = sum(r["lines"][-1]["seconds"] for r in mine) / len(mine)  # a warm-up that is shared, too
        cell["sent_bytes"] = sum(map(sent, mine)) / len(mine)
        cell["by_seed"] = {str(r["seed"]): known(m.of(r["lines"][-1])) for r in mine}
        words = ["qupel", "compare", about["file"], "--out", "again"]
        cell["command"] = shlex.join([*words, "--only", federation, "--only", method, "--only", column])
        found.append(cell)
    return found


def sent(result: Result) -> float:
    """Bytes that a client sends in a run: of every phase, its rounds times the bytes of a round."""
    each = {line["phase"]: line["upload_bytes"] for line in result["lines"]}
    share = result.get("config", {}).get("sample", 1.0)
    return share * sum(phase["rounds"] * each.get(k, 0) for k, phase in enumerate(result["phases"]))


def known(value: Any) -> Any:
    """JSON has no word for what is not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- in words ---


def measure_of(federation: Federation) -> Measure:
    return Measure(**federation["measure"])


def shown_bits(bits: int) -> str:
    return "full precision" if bits == 32 else f"{bits} bit{'s' * (bits > 1)}"


def by_width(federation: Federation, reference: str) -> Iterator[tuple[int, Cell | None, list[Cell]]]:
    """By bits: the reference's cell, and those of the others that are compared with it, the best first."""
    for bits in dict.fromkeys(c["bits"] for c in federation["cells"]):
        here = [c for c in federation["cells"] if c["bits"] == bits and c["mean"] is not None]
        ours = next((c for c in here if c["method"] == reference), None)
        yield bits, ours, sorted((c for c in here if c["gain"] is not None), key=lambda c: c["gain"])


def sentence(federation: Federation, reference: str) -> str:
    """Where another method wins, and where none does."""
    m, parts, best = measure_of(federation), [], []
    for bits, ours, others in by_width(federation, reference):
        if above := [c for c in others if c["gain"] < 0]:
            first, *more = [f"by {_apart(c, m)}" for c in above[:3]]
            told = [f"{name(above[0])} ends above {reference} {first}"]
            told += [f"{name(c)} {by}" for c, by in zip(above[1:], more, strict=False)]
            told += [f"{len(above) - 3} more do"] if len(above) > 3 else []
            parts.append(f"at {shown_bits(bits)} {', '.join(told)}")
        elif ours is not None and others:
            best.append(f"at {shown_bits(bits)} ({m.said(ours['mean'])})")
    parts += [f"no other method ends above {reference} {', '.join(best)}"] if best else []
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def overview(board: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """By federation and bits: the reference, and the best of the others."""
    rows = []
    for title, federation in board["federations"].items():
        m = measure_of(federation)
        for bits, ours, others in by_width(federation, board["reference"]):
            if ours is None or not others:
                continue
            best = dict(zip(HEAD, (text for text, _ in _texts(others[0], m)), strict=True))
            told = (best[key] for key in ("method", "{score}", "gain", "95 % interval"))
            rows.append([title, shown_bits(bits), _texts(ours, m)[HEAD.index("{score}")][0], *told])
    head = ["federation", "bits", board["reference"], "the best other", "its score", "gain", "95 % interval"]
    return head, rows


def _apart(c: Cell, m: Measure) -> str:
    gap = abs(c["gain"])
    sure = "not tested" if c["p"] is None else f"p = {c['p']:.2g}" if c["p"] < 0.05 else "not significant"
    return f"{gap:.1f} points ({sure})" if m.percent else f"{gap:.4g} ({sure})"


def shipped(c: Cell) -> float:
    """Bytes of a client's model file; computed ones where no files were written."""
    return float(c["file_bytes"] if c["file_bytes"] is not None else c["model_bytes"])


def name(c: Cell) -> str:
    how = {"kmeans": "k-means", "range": "min-max grid"}.get(c["afterwards"], c["afterwards"])
    return f"{c['method']}, then {how}" if how else str(c["method"])


HEAD = (
    "method",
    "bits",
    "{score}",
    "worst 10%",
    "unseen",
    "file",
    "sent",
    "seconds",
    "seeds",
    "gain",
    "95 % interval",
    "p",
)


def table(federation: Federation) -> tuple[list[str], list[list[tuple[str, float | str | None]]]]:
    """Header, and for each cell its texts with what they are sorted by. Columns that nobody fills are left out."""
    m = measure_of(federation)
    body = [_texts(c, m) for c in federation["cells"]]
    used = [k for k in range(len(HEAD)) if any(row[k][0] for row in body)]
    head = [h.format(score=m.head) for h in HEAD]
    return [head[k] for k in used], [[row[k] for k in used] for row in body]


def _texts(c: Cell, m: Measure) -> list[tuple[str, float | str | None]]:
    def number(value: float | None, text: str) -> tuple[str, float | None]:
        return ("", None) if value is None else (text, value)

    file = shipped(c)
    spread = f" ± {m.text(c['std'])}" if c["seeds"] > 1 and c["mean"] is not None else ""
    interval = "" if c["low"] is None else f"{m.text(c['low'], sign='+')} to {m.text(c['high'], sign='+')}"
    p = "" if c["p"] is None else "<1e-4" if c["p"] < 1e-4 else f"{c['p']:.4f}"
    return [
        (name(c), name(c)),
        (str(c["bits"]), c["bits"]),
        (m.text(c["mean"]) + spread, c["mean"]),
        (m.text(c["worst"]), c["worst"]),
        number(c["unseen"], m.text(c["unseen"])),
        (tables.size(file), file),
        (tables.size(c["sent_bytes"]), c["sent_bytes"]),
        (f"{c['seconds']:.0f}" if c["seconds"] >= 10 else f"{c['seconds']:.1f}", c["seconds"]),
        (str(c["seeds"]), c["seeds"]),
        number(c["gain"], f"{m.text(c['gain'], sign='+')}{significance.mark(c['p'])}"),
        number(c["low"], interval),
        number(c["p"], p),
    ]


def gain_words(board: dict[str, Any]) -> str:
    first = board["reference"]
    return (
        f"gain: by how much {first} at the same bits is better than the method (of percentages in points), with its "
        f"95 % confidence interval; * p < 0.05, ** p < 0.01, *** p < 0.001"
    )


def chosen_rows(federation: Federation) -> list[list[str]]:
    """method, what was tried, what was chosen."""
    m = measure_of(federation)
    rows = []
    for method, told in federation["search"].items():
        tried = [f"{_settings(t['settings'])}: {m.text(m.shown(t['validation']))}" for t in told["trials"]]
        rows.append([method, str(told["bits"]), _settings(told["settings"]), "; ".join(tried)])
    return rows


def _settings(table: dict[str, Any]) -> str:
    return ", ".join(f"{k} = {json.dumps(v)}" for k, v in table.items()) or "as it is"


CHOSEN_HEAD = ["method", "bits", "chosen", "tried: validation score"]


def search_words(board: dict[str, Any]) -> str:
    s = board.get("search")
    if not s:
        return "No search: every method has the settings of the file."
    short = f" of {s['rounds']:.0%} of the rounds" if s.get("rounds", 1) != 1 else ""
    return (
        f"The settings of every method were chosen alike: {s['trials']} trials each{short}, on {s['validation']:.0%} "
        f"of every client's training data (seed {s['seed']}); test data were not given to it."
    )


def about_words(federation: Federation) -> list[str]:
    """What is missing, and what failed."""
    found = [federation["note"]] if federation["note"] else []
    if federation["missing"]:
        found.append(f"{federation['missing']} cells are not there yet, or failed.")
    return found + [f"{cell} failed: {why}" for cell, why in federation["failed"].items()]


# --- as files ---


def markdown(board: dict[str, Any]) -> str:
    text = [f"# Leaderboard\n\n`qupel compare {board['file']}`\n\n{search_words(board)}\n\n{WORDS}\n"]
    head, rows = overview(board)
    text += [tables.markdown(head, rows)] if rows else []
    for title, federation in board["federations"].items():
        head, body = table(federation)
        text.append(f"## {tables.markdown_text(title)}\n\n{tables.markdown_text(federation['facts'])}\n")
        text += [f"**{tables.markdown_text(federation['said'])}**\n"] if federation["said"] else []
        text.append(tables.markdown(head, [[t for t, _ in row] for row in body]))
        text += [f"{tables.markdown_text(words)}\n" for words in about_words(federation)]
        text.append(f"Machine: {tables.markdown_text(federation['machine'])}; {federation['finished']}.\n")
        if federation["search"]:
            text.append(tables.markdown(CHOSEN_HEAD, chosen_rows(federation)))
    text.append(f"{tables.markdown_text(READ)}; {tables.markdown_text(gain_words(board))}.\n")
    first = next((c for f in board["federations"].values() for c in f["cells"]), None)
    if first:
        text.append(f"One command repeats a cell; the page and {NUMBERS} have it for each:\n\n    {first['command']}\n")
    return "\n".join(text)


def write(board: dict[str, Any], folder: Path) -> list[Path]:
    """Numbers, Markdown and page."""
    from qupel.report.leaderboard_page import page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}") from None
    texts = {NUMBERS: json.dumps(board, indent=1, allow_nan=False) + "\n", TEXT: markdown(board), PAGE: page(board)}
    for file, content in texts.items():
        write_atomic(folder / file, content)
    return [folder / file for file in texts]


def publish(source: Path, folder: Path) -> list[Path]:
    """From a comparison's directory, or from numbers that are there already."""
    return write(gather(source) if source.is_dir() else read_json(source), folder)
