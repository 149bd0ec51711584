"""The comparison of a run: one row per method, over clients and seeds. The score (`measure`) of the last round, and of
the round that validation data chose; never the best round on test data."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qupel.engine import scores
from qupel.report.measure import ACCURACY, Measure, main_measure, other_measures
from qupel.report.significance import Gain, mark, over_seeds, seed_difference
from qupel.util.terminal import plain

Result = dict[str, Any]  # a cell's result.json


@dataclass(frozen=True)
class Row:
    """A method over its seeds. Accuracies and other shares in percent; `spread` is over clients, `std` over seeds."""

    label: str
    seeds: int
    mean: float
    std: float
    selected: float | None  # test accuracy at the round with the best mean validation accuracy
    worst: float  # mean of the worst tenth of the clients
    spread: float
    by_bits: dict[float, float]  # bits of the client's model -> mean accuracy
    float_mean: float  # the model before quantization: at the end, or where fine-tuning began
    before_tuning: float | None  # the quantized model at the end of the phase before fine-tuning
    bits: float
    model_bytes: float  # the floor of a client's file, computed
    file_bytes: float | None  # a client's file as written; None: models were not saved
    upload_bytes: float  # a client and round, smallest over the phases that send: the model alone
    seconds: float
    gain: float | None  # mean paired difference reference - this, in points; where less is better this - reference
    low: float | None  # its 95 % confidence interval
    high: float | None
    p: float | None  # two-sided t-test over seeds (`significance`)
    weighted: float | None = None  # mean over clients by their test samples; None: these are not told
    unseen: float | None = None  # mean of the clients that were kept out of training; None: there were none

    def told(self) -> dict[str, Any]:
        """As JSON, without what this run has not."""
        return {k: v for k, v in asdict(self).items() if v is not None or k not in ("weighted", "unseen")}

    @property
    def shipped_bytes(self) -> float:
        """What a client's model takes: its file where there is one."""
        return self.model_bytes if self.file_bytes is None else self.file_bytes


def rows(results: Sequence[Result], reference: str | None = None, measure: Measure | None = None) -> list[Row]:
    """measure: by default the score that clients are judged by."""
    labels = list(dict.fromkeys(r["label"] for r in results))
    reference, m = reference or labels[0], measure or main_measure(results)
    grouped = {label: sorted((r for r in results if r["label"] == label), key=lambda r: r["seed"]) for label in labels}
    return [_row(label, grouped[label], grouped[reference] if label != reference else None, m) for label in labels]


def _row(label: str, cells: Sequence[Result], reference: Sequence[Result] | None, m: Measure) -> Row:
    last = [c["lines"][-1] for c in cells]
    means = np.array([_or_nan(m.of(line)) for line in last])
    clients, bits = zip(*(_clients(line, m) for line in last), strict=True)
    flat, flat_bits = np.concatenate(clients), np.concatenate(bits)
    weighted = [_weighted(line["clients"], m) for line in last if "count" in line.get("clients", {})]
    unseen = [v for c in cells for v in [_known(m.each(c.get("unseen", {})))] if len(v)]
    tuned = [_before_tuning(c["lines"], m) for c in cells]
    written = [size for c in cells for size in c.get("files", ())]
    found = gain(reference, cells, m) if reference else None
    return Row(
        label=label,
        seeds=len(cells),
        mean=float(means.mean()),
        std=float(means.std(ddof=1)) if len(means) > 1 else 0.0,
        selected=_mean_of_all([_selected(c["lines"], m) for c in cells]),
        worst=_mean([scores.worst(a, m.higher) for a in clients if len(a)]),
        spread=_mean([a.std() for a in clients if len(a)]),
        by_bits={float(b): float(flat[flat_bits == b].mean()) for b in np.unique(flat_bits)},
        float_mean=_mean([_float(c["lines"], m) for c in cells]),
        before_tuning=_mean_of_all(tuned),
        bits=_mean([line["bits"] for line in last]),
        model_bytes=_mean([line["model_bytes"] for line in last]),
        file_bytes=_mean(written) if all("files" in c for c in cells) else None,
        upload_bytes=min((sent for c in cells for line in c["lines"] if (sent := line["upload_bytes"])), default=0),
        seconds=_mean([c["seconds"] for c in cells]),
        gain=found.mean if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        p=found.p if found else None,
        weighted=_mean(weighted) if len(weighted) == len(last) else None,
        unseen=_mean([float(v.mean()) for v in unseen]) if unseen else None,
    )


def _clients(line: dict[str, Any], m: Measure) -> tuple[np.ndarray, np.ndarray]:
    """(score as it is shown, bits) of the clients that have one."""
    told = line.get("clients", {"bits": []})
    tested = [(a, b) for a, b in zip(m.each(told), told["bits"], strict=False) if a is not None]
    return np.array([a for a, _ in tested]), np.array([b for _, b in tested])


def _weighted(clients: dict[str, Any], m: Measure) -> float:
    counted = [(a, n) for a, n in zip(m.each(clients), clients["count"], strict=False) if a is not None]
    return sum(a * n for a, n in counted) / sum(n for _, n in counted) if counted else math.nan


def _known(values: Sequence[float | None]) -> np.ndarray:
    return np.array([v for v in values if v is not None])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    """None where one is missing."""
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if len(there) == len(values) else None


def _selected(lines: Sequence[dict[str, Any]], m: Measure) -> float | None:
    """The test score at the round with the best mean validation score, among rounds that ship the last one's bits."""
    able = [line for line in lines if "validation" in line and line["bits"] == lines[-1]["bits"]]
    able = [line for line in able if m.of(line, "validation") is not None]
    best = max if m.higher else min
    return m.of(best(able, key=lambda line: _or_nan(m.of(line, "validation")))) if able else None


def _float(lines: Sequence[dict[str, Any]], m: Measure) -> float:
    """The score of the float model; fine-tuning has none, its weights sit on their centers."""
    last = ([line for line in lines if not _tuned(line)] or lines)[-1]
    return _or_nan(m.of(last, "float_test") if "float_test" in last else m.of(last))


def _tuned(line: dict[str, Any]) -> bool:
    """Assignments were frozen; before 0.2 that was a method of its own."""
    return line.get("quantizer") == "frozen" or line["method"] == "finetune"


def _before_tuning(lines: Sequence[dict[str, Any]], m: Measure) -> float | None:
    if not _tuned(lines[-1]):
        return None
    before = [line for line in lines if line["phase"] < lines[-1]["phase"]]
    return m.of(before[-1]) if before else None


def gain(ours: Sequence[Result], others: Sequence[Result], m: Measure = ACCURACY) -> Gain | None:
    """By how much ours are better over the seeds that both have, client by client where clients are told: ours minus
    others, the other way round where less is better."""
    mine, theirs = ({c["seed"]: c["lines"][-1] for c in cells} for cells in (ours, others))
    pairs = {seed: (mine[seed], theirs[seed]) for seed in mine if seed in theirs}
    return over_seeds({seed: _difference(*(pair if m.higher else pair[::-1]), m) for seed, pair in pairs.items()})


def _difference(a: dict[str, Any], b: dict[str, Any], m: Measure) -> float | None:
    told = [line.get("clients", {}) for line in (a, b)]
    lists = [m.each(clients) for clients in told]
    if not lists[0] or len(lists[0]) != len(lists[1]) or told[0].get("number") != told[1].get("number"):
        lists = [[m.of(a)], [m.of(b)]]  # clients are not told, or not the same ones
    ours, others = ([_or_nan(v) for v in values] for values in lists)
    return seed_difference(ours, others)


def size(count: float) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def federation_table(
    table: Sequence[Row], intervals: bool = True, measure: Measure = ACCURACY
) -> tuple[list[str], list[list[str]]]:
    """Header and cells for a federation: what a comparison of personalized methods needs. intervals: a terminal has no
    room for them."""
    widths = sorted({b for r in table for b in r.by_bits if b < 32})
    selected = any(r.selected is not None for r in table)
    unseen = any(r.unseen is not None for r in table)
    chosen = ["selected %" if measure.percent else "selected"] if selected else []
    head = ["method", measure.head, *chosen, *[f"{b:g}-bit" for b in widths], "worst 10%", "spread"]
    head += [*(["unseen"] if unseen else []), _size_head(table), "gain", *(["95 % interval"] if intervals else []), "p"]
    body = []
    for r, taken in zip(table, _sizes(table), strict=True):
        text = measure.text
        interval = "" if r.low is None else f"{text(r.low, sign='+')} to {text(r.high, sign='+')}"
        body.append(
            [
                r.label,
                _mean_std(r, 1, measure),
                *([text(r.selected)] if selected else []),
                *(text(r.by_bits[b]) if b in r.by_bits else "" for b in widths),
                text(r.worst),
                text(r.spread),
                *([text(r.unseen)] if unseen else []),
                taken,
                "" if r.gain is None else f"{text(r.gain, sign='+')}{mark(r.p)}",
                *([interval] if intervals else []),
                "" if r.p is None else ("<1e-4" if r.p < 1e-4 else f"{r.p:.4f}"),
            ]
        )
    return head, body


def metrics_table(results: Sequence[Result], one: bool, vectors: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and cells for every metric of a run that was asked for some: the score first, then a block for each
    metric. one: training in one place, with nothing over clients. vectors: the entries of a vector, too."""
    main, body = main_measure(results), []
    over = [] if one else ["weighted", "worst 10%", "spread"]
    known = {m: rows(results, measure=m) for m in (main, *other_measures(results))}
    unseen = any(r.unseen is not None for table in known.values() for r in table)
    for m, table in known.items():
        if m.vector and not vectors:
            continue
        for r in table:
            told = [] if one else [m.text(r.weighted), m.text(r.worst), m.text(r.spread)]
            body.append([r.label, m.head, _mean_std(r, 1, m), *told, *([m.text(r.unseen)] if unseen else [])])
    return ["method", "metric", "mean", *over, *(["unseen"] if unseen else [])], body


METRIC = ("mean", "std", "weighted", "worst", "spread", "unseen", "gain", "low", "high", "p")


def told_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The rows as JSON, with what each says of every other metric."""
    found = [r.told() for r in rows(results)]
    for m in other_measures(results):
        for told, r in zip(found, rows(results, measure=m), strict=True):
            other = r.told()
            told.setdefault("metrics", {})[m.name] = {key: other[key] for key in METRIC if key in other}
    return found


def _mean_std(r: Row, digits: int, m: Measure = ACCURACY) -> str:
    """One seed has no spread to tell."""
    alone = r.seeds < 2 or not math.isfinite(r.mean)
    return m.text(r.mean, digits) + ("" if alone else f" ± {m.text(r.std, digits)}")


def _size_head(table: Sequence[Row]) -> str:
    return "floor" if any(r.file_bytes is None for r in table) else "file"


def _sizes(table: Sequence[Row]) -> list[str]:
    """Of a client's model: the mean of the files where every method has them, else of their computed floors."""
    floor = _size_head(table) == "floor"
    return [size(r.model_bytes if floor else r.shipped_bytes) for r in table]


def training_table(table: Sequence[Row], measure: Measure = ACCURACY) -> tuple[list[str], list[list[str]]]:
    """Header and cells for training in one place: float, quantized before and after fine-tuning, size."""
    unit = " %" if measure.percent else ""
    deployed = "deployed %" if measure.percent else f"deployed {measure.name}"
    head = ["method", f"float{unit}", f"before tuning{unit}", deployed, "bits/weight", _size_head(table)]
    body = [
        [
            r.label,
            measure.text(r.float_mean, 2),
            measure.text(r.before_tuning, 2),
            _mean_std(r, 2, measure),
            f"{r.bits:.3g}",
            taken,
        ]
        for r, taken in zip(table, _sizes(table), strict=True)
    ]
    return head, body


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = (head, ["---"] * len(head), *body)
    return "".join("| " + " | ".join(map(markdown_text, row)) + " |\n" for row in rows)


def markdown_text(text: str) -> str:
    """Text in Markdown, also in a cell: one line, no tag, no link, no code."""
    text = re.sub(r"([\\|`])", r"\\\1", plain(text, 5000))
    return re.sub(r"\[(?=[^\]]*\][(\[])", r"\\[", re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text))


_TEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_TEX |= {"±": r"$\pm$", "<": "$<$", ">": "$>$", "*": "$^*$", "[": "{[}"}  # \\[ would be an argument of \\


def tex(text: str) -> str:
    """Text in LaTeX."""
    return "".join(_TEX.get(c, c) for c in plain(text, 5000))


def latex(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A booktabs table."""
    lines = [" & ".join(map(tex, row)) + r" \\" for row in (head, *body)]
    inside = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n{inside}\n\\end{{tabular}}\n"


def csv_text(text: str) -> str:
    """Text in CSV that no spreadsheet takes for a formula."""
    text = plain(text, 5000)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") and text.strip() else text


def as_csv(table: Sequence[dict[str, Any]]) -> str:
    """One line a method (`told_rows`), every number in full; scores by bit width come last, then other metrics."""
    widths = sorted({b for r in table for b in r["by_bits"]})
    keys = list(dict.fromkeys(key for r in table for key in r if key not in ("by_bits", "metrics")))
    more = list(dict.fromkeys((m, key) for r in table for m, told in r.get("metrics", {}).items() for key in told))
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*keys, *(f"{b:g}-bit" for b in widths), *(csv_text(f"{m} {key}") for m, key in more)])
    for r in table:
        told = [csv_text(r[key]) if key == "label" else r.get(key) for key in keys]
        told += [r["by_bits"].get(b) for b in widths] + [r.get("metrics", {}).get(m, {}).get(key) for m, key in more]
        out.writerow(["" if value is None else value for value in told])
    return text.getvalue()


def privacy(results: Sequence[Result]) -> str:
    """What private methods have cost, of each the seed that cost most."""
    told: dict[str, tuple[float, float]] = {}
    for r in results:
        if spent := r["lines"][-1].get("privacy"):
            told[r["label"]] = max((spent["epsilon"], spent["delta"]), told.get(r["label"], (0.0, 0.0)))
    words = (f"{label} epsilon {epsilon:.3g} at delta {delta:g}" for label, (epsilon, delta) in told.items())
    return f"Privacy of the shared model: {', '.join(words)}." if told else ""


def sentence(table: Sequence[Row], measure: Measure = ACCURACY) -> str:
    """What the table means, in words, from its numbers alone."""
    first, *others = table
    if not others and math.isfinite(first.mean):
        return f"{first.label} reaches {measure.said(first.mean)} with models of {size(first.shipped_bytes)}."
    parts = []
    for r in others:
        if not math.isfinite(first.mean - r.mean):
            continue
        better = (first.mean - r.mean) * (1 if measure.higher else -1) if r.gain is None else r.gain
        word = "above" if better > 0 else "below"
        sure = " (not tested)" if r.p is None else "" if r.p < 0.05 else " (not significant)"
        apart = f"{abs(better):.1f} points" if measure.percent else f"{abs(better):.4g}"
        if not measure.higher:
            word = "better than" if better > 0 else "worse than"
        parts.append(f"{apart} {word} {r.label}{sure}")
    full = max(max(r.shipped_bytes, r.upload_bytes) for r in table)
    ratio = full / first.shipped_bytes
    small = f", with models 1/{ratio:.0f} of the full-precision size" if ratio >= 1.5 else ""
    return f"{first.label} ends {', '.join(parts)}{small}." if parts else ""
