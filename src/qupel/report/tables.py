"""The comparison of a run: one row per method, over clients and seeds. Last-round accuracy, and accuracy at the round
that validation data chose; never the best round on test data."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from qupel.terminal import plain

Result = dict[str, Any]  # a cell's result.json


@dataclass(frozen=True)
class Row:
    """A method over its seeds. Accuracies in percent; `spread` is over clients, `std` over seeds."""

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
    model_bytes: float
    upload_bytes: float  # a client and round, largest over the phases
    seconds: float
    p: float | None  # paired t-test over (seed, client) against the reference method, two-sided
    gain: float | None  # mean paired difference reference - this, in points


def rows(results: Sequence[Result], reference: str | None = None) -> list[Row]:
    labels = list(dict.fromkeys(r["label"] for r in results))
    reference = reference or labels[0]
    grouped = {label: sorted((r for r in results if r["label"] == label), key=lambda r: r["seed"]) for label in labels}
    return [_row(label, grouped[label], grouped[reference] if label != reference else None) for label in labels]


def _row(label: str, cells: Sequence[Result], reference: Sequence[Result] | None) -> Row:
    last = [c["lines"][-1] for c in cells]
    means = np.array([100 * line["test"] for line in last])
    clients, bits = zip(*(_clients(line) for line in last), strict=True)
    flat, flat_bits = np.concatenate(clients), np.concatenate(bits)
    chosen = [_selected(c["lines"]) for c in cells]
    tuned = [_before_tuning(c["lines"]) for c in cells]
    p, gain = _paired(cells, reference) if reference else (None, None)
    return Row(
        label=label,
        seeds=len(cells),
        mean=float(means.mean()),
        std=float(means.std(ddof=1)) if len(means) > 1 else 0.0,
        selected=None if any(v is None for v in chosen) else float(np.mean([v for v in chosen if v is not None])),
        worst=_mean([np.sort(a)[: max(1, round(len(a) / 10))].mean() for a in clients if len(a)]),
        spread=_mean([a.std() for a in clients if len(a)]),
        by_bits={float(b): float(flat[flat_bits == b].mean()) for b in np.unique(flat_bits)},
        float_mean=_mean([_float(c["lines"]) for c in cells]),
        before_tuning=None if any(v is None for v in tuned) else _mean([v for v in tuned if v is not None]),
        bits=_mean([line["bits"] for line in last]),
        model_bytes=_mean([line["model_bytes"] for line in last]),
        upload_bytes=max(line["upload_bytes"] for c in cells for line in c["lines"]),
        seconds=_mean([c["seconds"] for c in cells]),
        p=p,
        gain=gain,
    )


def _clients(line: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(accuracy in percent, bits) of the clients that have test data."""
    told = line.get("clients", {"test": [], "bits": []})
    tested = [(100 * a, b) for a, b in zip(told["test"], told["bits"], strict=True) if a is not None]
    return np.array([a for a, _ in tested]), np.array([b for _, b in tested])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _selected(lines: Sequence[dict[str, Any]]) -> float | None:
    """Test accuracy at the round with the best mean validation accuracy, among rounds that ship the last one's bits."""
    able = [line for line in lines if "validation" in line and line["bits"] == lines[-1]["bits"]]
    return 100 * max(able, key=lambda line: line["validation"])["test"] if able else None


def _float(lines: Sequence[dict[str, Any]]) -> float:
    """Accuracy of the float model; fine-tuning has none, its weights sit on their centers."""
    learned = [line for line in lines if line["method"] != "finetune"] or lines
    return 100 * learned[-1].get("float_test", learned[-1]["test"])


def _before_tuning(lines: Sequence[dict[str, Any]]) -> float | None:
    if lines[-1]["method"] != "finetune":
        return None
    before = [line for line in lines if line["phase"] < lines[-1]["phase"]]
    return 100 * before[-1]["test"] if before else None


def _paired(cells: Sequence[Result], reference: Sequence[Result]) -> tuple[float | None, float | None]:
    """(p, mean difference reference - method in points) over the (seed, client) pairs that both have."""
    ours = {c["seed"]: c["lines"][-1].get("clients", {}).get("test", []) for c in reference}
    pairs = [
        (a, b)
        for c in cells
        if c["seed"] in ours
        for a, b in zip(ours[c["seed"]], c["lines"][-1].get("clients", {}).get("test", []), strict=True)
        if a is not None and b is not None and math.isfinite(a - b)
    ]
    if len(pairs) < 2:
        return None, None
    gain, _, _, p = paired(100 * (np.array([a for a, _ in pairs]) - np.array([b for _, b in pairs])))
    return p, gain


def paired(d: np.ndarray) -> tuple[float, float | None, float | None, float | None]:
    """Mean of paired differences (n,), the ends of its 95 % confidence interval, and p of the two-sided paired t-test;
    a single pair has neither."""
    mean = float(d.mean())
    if len(d) < 2:
        return mean, None, None, None
    if np.ptp(d) < 1e-9:  # equal but for rounding
        return mean, mean, mean, (1.0 if abs(mean) < 1e-9 else 0.0)
    half = float(stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d)))
    return mean, mean - half, mean + half, float(stats.ttest_1samp(d, 0.0).pvalue)


def size(count: float) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def federation_table(table: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells for a federation: what a comparison of personalized methods needs."""
    widths = sorted({b for r in table for b in r.by_bits if b < 32})
    selected = any(r.selected is not None for r in table)
    head = ["method", "accuracy %", *(["selected %"] if selected else []), *[f"{b:g}-bit" for b in widths]]
    head += ["worst 10%", "spread", "model", "gain", "p"]
    body = []
    for r in table:
        shown = [_number(r.by_bits[b]) if b in r.by_bits else "" for b in widths]
        chosen = [_number(r.selected)] if selected else []
        gain = "" if r.gain is None else f"{r.gain:+.1f}"
        p = "" if r.p is None else ("<1e-4" if r.p < 1e-4 else f"{r.p:.4f}")
        body.append(
            [
                r.label,
                _mean_std(r, 1),
                *chosen,
                *shown,
                _number(r.worst),
                _number(r.spread),
                size(r.model_bytes),
                gain,
                p,
            ]
        )
    return head, body


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _mean_std(r: Row, digits: int) -> str:
    """One seed has no spread to tell."""
    alone = r.seeds < 2 or not math.isfinite(r.mean)
    return _number(r.mean, digits) + ("" if alone else f" ± {r.std:.{digits}f}")


def mark(p: float | None) -> str:
    """* p < 0.05, ** p < 0.01, *** p < 0.001."""
    return "" if p is None else "*" * sum(p < level for level in (0.05, 0.01, 0.001))


def training_table(table: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells for training in one place: float, quantized before and after fine-tuning, size."""
    head = ["method", "float %", "before tuning %", "deployed %", "bits/weight", "model"]
    body = [
        [
            r.label,
            _number(r.float_mean, 2),
            _number(r.before_tuning, 2),
            _mean_std(r, 2),
            f"{r.bits:.3g}",
            size(r.model_bytes),
        ]
        for r in table
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


def as_csv(table: Sequence[Row]) -> str:
    """One line a method, every number in full; accuracies by bit width come last."""
    widths = sorted({b for r in table for b in r.by_bits})
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    for k, r in enumerate(table):
        told = {key: "" if value is None else value for key, value in asdict(r).items() if key != "by_bits"}
        told["label"] = csv_text(r.label)
        if k == 0:
            out.writerow([*told, *(f"{b:g}-bit" for b in widths)])
        out.writerow([*told.values(), *(r.by_bits.get(b, "") for b in widths)])
    return text.getvalue()


def sentence(table: Sequence[Row], full_bytes: float) -> str:
    """What the table means, in words, from its numbers alone."""
    first, *others = table
    if not others and math.isfinite(first.mean):
        return f"{first.label} reaches {first.mean:.1f} % with models of {size(first.model_bytes)}."
    parts = []
    for r in others:
        difference = first.mean - r.mean
        if not math.isfinite(difference):
            continue
        word = "above" if difference > 0 else "below"
        sure = "" if r.p is None or r.p < 0.05 else " (not significant)"
        parts.append(f"{abs(difference):.1f} points {word} {r.label}{sure}")
    ratio = full_bytes / first.model_bytes
    small = f", with models 1/{ratio:.0f} of the full-precision size" if ratio >= 1.5 else ""
    return f"{first.label} ends {', '.join(parts)}{small}." if parts else ""
