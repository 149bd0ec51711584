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

from qupel.report.significance import Gain, mark, over_seeds, seed_difference
from qupel.util.terminal import plain

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
    model_bytes: float  # the floor of a client's file, computed
    file_bytes: float | None  # a client's file as written; None: models were not saved
    upload_bytes: float  # a client and round, largest over the phases
    seconds: float
    gain: float | None  # mean paired difference reference - this, in points
    low: float | None  # its 95 % confidence interval
    high: float | None
    p: float | None  # two-sided t-test over seeds (`significance`)

    @property
    def shipped_bytes(self) -> float:
        """What a client's model takes: its file where there is one."""
        return self.model_bytes if self.file_bytes is None else self.file_bytes


def labelled(results: Sequence[Result]) -> bool:
    """Whether targets are class labels, so that there are accuracies to compare."""
    return all(r.get("classes", True) is not None for r in results)


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
    written = [size for c in cells for size in c.get("files", ())]
    found = gain(reference, cells) if reference else None
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
        file_bytes=_mean(written) if all("files" in c for c in cells) else None,
        upload_bytes=max(line["upload_bytes"] for c in cells for line in c["lines"]),
        seconds=_mean([c["seconds"] for c in cells]),
        gain=found.mean if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        p=found.p if found else None,
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
    learned = [line for line in lines if not _tuned(line)] or lines
    return 100 * learned[-1].get("float_test", learned[-1]["test"])


def _tuned(line: dict[str, Any]) -> bool:
    """Assignments were frozen; before 0.2 that was a method of its own."""
    return line.get("quantizer") == "frozen" or line["method"] == "finetune"


def _before_tuning(lines: Sequence[dict[str, Any]]) -> float | None:
    if not _tuned(lines[-1]):
        return None
    before = [line for line in lines if line["phase"] < lines[-1]["phase"]]
    return 100 * before[-1]["test"] if before else None


def gain(ours: Sequence[Result], others: Sequence[Result]) -> Gain | None:
    """ours - others in points over the seeds that both have, client by client where clients are told."""
    mine, theirs = ({c["seed"]: c["lines"][-1] for c in cells} for cells in (ours, others))
    return over_seeds({seed: _difference(mine[seed], theirs[seed]) for seed in mine if seed in theirs})


def _difference(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    told = [line.get("clients", {}) for line in (a, b)]
    lists = [clients.get("test", []) for clients in told]
    if not lists[0] or len(lists[0]) != len(lists[1]) or told[0].get("number") != told[1].get("number"):
        lists = [[a["test"]], [b["test"]]]  # clients are not told, or not the same ones
    ours, others = ([math.nan if v is None else 100 * v for v in values] for values in lists)
    return seed_difference(ours, others)


def size(count: float) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def federation_table(table: Sequence[Row], intervals: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and cells for a federation: what a comparison of personalized methods needs. intervals: a terminal has no
    room for them."""
    widths = sorted({b for r in table for b in r.by_bits if b < 32})
    selected = any(r.selected is not None for r in table)
    head = ["method", "accuracy %", *(["selected %"] if selected else []), *[f"{b:g}-bit" for b in widths]]
    head += ["worst 10%", "spread", _size_head(table), "gain", *(["95 % interval"] if intervals else []), "p"]
    body = []
    for r, taken in zip(table, _sizes(table), strict=True):
        shown = [_number(r.by_bits[b]) if b in r.by_bits else "" for b in widths]
        chosen = [_number(r.selected)] if selected else []
        gain = "" if r.gain is None else f"{r.gain:+.1f}{mark(r.p)}"
        interval = "" if r.low is None else f"{r.low:+.1f} to {r.high:+.1f}"
        p = "" if r.p is None else ("<1e-4" if r.p < 1e-4 else f"{r.p:.4f}")
        body.append(
            [
                r.label,
                _mean_std(r, 1),
                *chosen,
                *shown,
                _number(r.worst),
                _number(r.spread),
                taken,
                gain,
                *([interval] if intervals else []),
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


def _size_head(table: Sequence[Row]) -> str:
    return "floor" if any(r.file_bytes is None for r in table) else "file"


def _sizes(table: Sequence[Row]) -> list[str]:
    """Of a client's model: the mean of the files where every method has them, else of their computed floors."""
    floor = _size_head(table) == "floor"
    return [size(r.model_bytes if floor else r.shipped_bytes) for r in table]


def training_table(table: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells for training in one place: float, quantized before and after fine-tuning, size."""
    head = ["method", "float %", "before tuning %", "deployed %", "bits/weight", _size_head(table)]
    body = [
        [
            r.label,
            _number(r.float_mean, 2),
            _number(r.before_tuning, 2),
            _mean_std(r, 2),
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


def sentence(table: Sequence[Row]) -> str:
    """What the table means, in words, from its numbers alone."""
    first, *others = table
    if not others and math.isfinite(first.mean):
        return f"{first.label} reaches {first.mean:.1f} % with models of {size(first.shipped_bytes)}."
    parts = []
    for r in others:
        if not math.isfinite(first.mean - r.mean):
            continue
        difference = first.mean - r.mean if r.gain is None else r.gain
        word = "above" if difference > 0 else "below"
        sure = " (not tested)" if r.p is None else "" if r.p < 0.05 else " (not significant)"
        parts.append(f"{abs(difference):.1f} points {word} {r.label}{sure}")
    full = max(max(r.shipped_bytes, r.upload_bytes) for r in table)
    ratio = full / first.shipped_bytes
    small = f", with models 1/{ratio:.0f} of the full-precision size" if ratio >= 1.5 else ""
    return f"{first.label} ends {', '.join(parts)}{small}." if parts else ""
