"""The paper's tables: its numbers, and a run's results in the same form, side by side.

A cell of a reproduced table is labelled "row @ column". Rows that the paper has not (our recipe) carry no number of the
paper. Every client of every seed is compared with itself under the reference; a seed counts once (`significance`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qupel.report.runs import place
from qupel.report.significance import WORDS, Gain, mark, over_seeds, seed_difference
from qupel.report.tables import Result, csv_text, markdown, tex
from qupel.util.terminal import plain

QUPEL, OURS, LOCAL = "QuPeL, paper's method", "QuPeL, our recipe", "Local, paper's method"
FEDAVG, TUNED = "FedAvg", "FedAvg + fine-tuning, our recipe"
FULL = "Full precision"
BITS = ("32 bits", "3 bits", "2.75 bits", "2.5 bits", "2.25 bits", "2 bits")
PARTNERS = ("2-bit partners", "3-bit partners", "full-precision partners")

NOTES = {  # what is to be said beside the numbers of a scale
    "smoke": "Smoke test on digits: its numbers are not to be compared with the paper's",
    "small": "The paper's protocol at a small budget (docs/reproducing.md), not its setting",
    "long": "The paper's protocol and data at a part of its epochs (docs/reproducing.md), not its setting",
    "paper": "",
}

Place = tuple[str, str]  # (row, column)


def _same_column(row: str) -> Callable[[Place], Place]:
    return lambda place: (row, place[1])


@dataclass(frozen=True)
class Published:
    """One of the paper's tables. values: place -> (accuracy in percent, its std or None)."""

    title: str
    columns: tuple[str, ...]
    values: dict[Place, tuple[float, float | None]]
    reference: Callable[[Place], Place]  # what a cell is compared with
    compared: str  # that comparison in words
    judged: Callable[[int], bool] = field(default=lambda client: True)  # the clients that count


def _row(name: str, columns: Sequence[str], means: Sequence[float], stds: Sequence[float | None] = ()) -> dict:
    spread = stds or [None] * len(means)
    return {(name, c): (m, s) for c, m, s in zip(columns, means, spread, strict=False)}


NETWORKS = ("ResNet-20", "ResNet-32")
TABLES: dict[str, Published] = {
    "table1": Published(
        "Table 1: test accuracy of quantized networks, trained in one place",
        NETWORKS,
        _row(FULL, NETWORKS, (92.05, 92.95))
        | _row("ProxQuant, 1 bit", NETWORKS, (90.69, 91.55))
        | _row("BinaryRelax, 1 bit", NETWORKS, (87.82, 90.65))
        | _row("Algorithm 1, paper's method, 1 bit", NETWORKS, (91.17, 92.10))
        | _row("Algorithm 1, paper's method, 2 bits", NETWORKS, (91.45, 92.47)),
        _same_column(FULL),
        "minus full precision",
    ),
    "table2": Published(
        "Table 2: mean test accuracy over 20 clients by average number of bits",
        BITS,
        _row(FEDAVG, BITS, (64.31,), (0.48,))
        | _row(LOCAL, BITS, (78.42, 77.55, 77.21, 77.15, 76.77, 76.46), (0.26, 0.24, 0.13, 0.16, 0.32, 0.02))
        | _row(QUPEL, BITS, (79.94, 79.50, 79.10, 78.74, 78.57, 77.88), (0.12, 0.50, 0.40, 0.03, 0.51, 0.16)),
        _same_column(LOCAL),
        "minus Local",
    ),
    "table3": Published(
        "Table 3: mean test accuracy of ten 2-bit control clients by their ten partners",
        PARTNERS,
        _row(QUPEL, PARTNERS, (78.17, 78.79), (0.11, 0.12)),  # full precision: "further small gains", no number
        lambda place: (place[0], PARTNERS[0]),
        "minus 2-bit partners",
        judged=lambda client: client % 4 < 2,  # two of every four clients: bits = [2, 2, partner, partner]
    ),
}


@dataclass(frozen=True)
class GridCell:
    """Ours and the paper's at one place. Accuracies in percent, differences in points; None: not there (yet)."""

    row: str
    column: str
    mean: float | None = None
    std: float | None = None  # over seeds; None with one seed
    seeds: int = 0
    paper: float | None = None
    paper_std: float | None = None
    difference: float | None = None  # ours minus the paper's
    gain: float | None = None  # this cell minus its reference, paired over seeds and clients
    low: float | None = None  # 95 % confidence interval of the gain
    high: float | None = None
    p: float | None = None  # two-sided t-test over seeds

    @property
    def mark(self) -> str:
        """* p < 0.05, ** p < 0.01, *** p < 0.001."""
        return mark(self.p)


@dataclass(frozen=True)
class Grid:
    """A table in the paper's form: cells[r][c] for rows[r], columns[c]."""

    table: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[GridCell, ...], ...]
    compared: str
    note: str  # about the data, to be shown next to the figures

    def at(self, row: str, column: str) -> GridCell:
        return self.cells[self.rows.index(row)][self.columns.index(column)]


def grid(table: str, results: Sequence[Result], rows: Iterable[str] = (), note: str = "") -> Grid:
    """Finished cells of a reproduced table in the paper's form. rows: their order; the default is that of the results,
    then the paper's rows that are still missing. note: stands before what the data set says of itself."""
    known = TABLES[table]
    found: dict[Place, dict[int, Result]] = {}
    for r in results:
        found.setdefault(place(r["label"]), {})[r["seed"]] = r
    names = list(dict.fromkeys([*rows, *(row for row, _ in found), *(row for row, _ in known.values)]))
    cells = tuple(tuple(_cell((row, column), found, known) for column in known.columns) for row in names)
    said = next((r["data_note"] for r in results if r["data_note"]), "")
    return Grid(
        table, known.title, tuple(names), known.columns, cells, known.compared, ". ".join(filter(None, (note, said)))
    )


def _cell(at: Place, found: dict[Place, dict[int, Result]], known: Published) -> GridCell:
    paper, paper_std = known.values.get(at, (None, None))
    if at not in found:
        return GridCell(*at, paper=paper, paper_std=paper_std)
    scores = {seed: clients(r, known) for seed, r in found[at].items()}
    means = np.array([s[~np.isnan(s)].mean() for s in scores.values()])  # (seeds,)
    mean = float(means.mean())
    reference = known.reference(at)
    gain = None
    if reference != at and reference in found:
        gain = gain_over(scores, {seed: clients(r, known) for seed, r in found[reference].items()})
    return GridCell(
        *at,
        mean=mean,
        std=float(means.std(ddof=1)) if len(means) > 1 else None,
        seeds=len(means),
        paper=paper,
        paper_std=paper_std,
        difference=None if paper is None else mean - paper,
        gain=gain.mean if gain else None,
        low=gain.low if gain else None,
        high=gain.high if gain else None,
        p=gain.p if gain else None,
    )


def clients(result: Result, known: Published) -> np.ndarray:
    """Test accuracy after the last round of the clients that count, percent (n,); NaN: one without test data."""
    told = result["lines"][-1]["clients"]["test"]
    return np.array([np.nan if a is None else 100 * a for i, a in enumerate(told) if known.judged(i)])


def gain_over(ours: dict[int, np.ndarray], others: dict[int, np.ndarray]) -> Gain | None:
    """ours - others over the seeds that both have, client by client."""
    return over_seeds({seed: seed_difference(ours[seed], others[seed]) for seed in ours if seed in others})


# --- what the paper says of its tables ---


@dataclass(frozen=True)
class Claim:
    """A difference of mean accuracies that the paper's table shows, in points, and how large it is here."""

    text: str
    paper: float
    measured: float
    holds: bool


def claims(g: Grid) -> list[Claim]:
    """The paper's statements about this table, those whose cells are done. Our recipe is held to the same ones.

    Above means by 0.005 points at least, what two digits can show."""
    found = []

    def claim(text: str, above: Place, below: Place, least: float = 0.005, most: float = float("inf")) -> None:
        a, b = g.at(*above), g.at(*below)
        if a.mean is None or b.mean is None:
            return
        theirs = [TABLES[g.table].values.get((row.replace(OURS, QUPEL), column)) for row, column in (above, below)]
        paper = theirs[0][0] - theirs[1][0] if theirs[0] and theirs[1] else float("nan")
        measured = a.mean - b.mean
        found.append(Claim(text, paper, measured, least <= measured <= most))

    if g.table == "table1":
        one, two = ("Algorithm 1, paper's method, 1 bit", "Algorithm 1, paper's method, 2 bits")
        for network in NETWORKS:
            claim(f"{network}: learned centers above ProxQuant", (one, network), ("ProxQuant, 1 bit", network))
            claim(f"{network}: 2 bits above 1 bit", (two, network), (one, network))
    if g.table == "table2":
        for row in (r for r in (QUPEL, OURS) if r in g.rows):
            for column in BITS:
                claim(f"{row} above Local by 1.5 or more, {column}", (row, column), (LOCAL, column), 1.5)
            claim(f"{row}: 3 bits within 0.7 of full precision", (row, BITS[0]), (row, "3 bits"), float("-inf"), 0.7)
            claim(f"{row}: 2 bits within 2.5 of full precision", (row, BITS[0]), (row, "2 bits"), float("-inf"), 2.5)
        for row in (r for r in (QUPEL, LOCAL) if r in g.rows):
            claim(f"{row} above FedAvg by 8 or more", (row, BITS[0]), (FEDAVG, BITS[0]), 8.0)
    if g.table == "table3":
        for row in g.rows:
            claim(f"{row}: 3-bit partners help", (row, PARTNERS[1]), (row, PARTNERS[0]))
            claim(f"{row}: full precision above 3 bits", (row, PARTNERS[2]), (row, PARTNERS[1]))
    return found


# --- the table as text ---


def _number(value: float | None, std: float | None, between: str = " ± ") -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if std is None else f"{value:.2f}{between}{std:.2f}"


def _gain(c: GridCell) -> str:
    if c.gain is None:
        return ""
    interval = "" if c.low is None else f" [{c.low:+.2f}, {c.high:+.2f}]"
    return f"{c.gain:+.2f}{interval}{c.mark}"


def lines(g: Grid) -> list[tuple[str, list[str]]]:
    """(name, cells) of the lines of the table: ours, then the paper's, the difference and the paired gain where there
    are any."""
    out = []
    for name, cells in zip(g.rows, g.cells, strict=True):
        out.append((name, [_number(c.mean, c.std) for c in cells]))
        if any(c.paper is not None for c in cells):
            out.append(("the paper", [_number(c.paper, c.paper_std) for c in cells]))
            out.append(("difference", ["" if c.difference is None else f"{c.difference:+.2f}" for c in cells]))
        if any(c.gain is not None for c in cells):
            out.append((g.compared, [_gain(c) for c in cells]))
    return out


LEGEND = (
    "Test accuracy in percent after the last round, mean ± std over seeds; {compared}: mean paired difference with its "
    f"95 % confidence interval, * p < 0.05, ** p < 0.01, *** p < 0.001 ({WORDS})."
)


def as_markdown(g: Grid) -> str:
    names = set(g.rows)
    body = [[f"**{name}**" if name in names else name, *cells] for name, cells in lines(g)]
    note = f"\n{g.note}\n" if g.note else ""
    said = [
        [c.text, "" if np.isnan(c.paper) else f"{c.paper:+.2f}", f"{c.measured:+.2f}", "yes" if c.holds else "no"]
        for c in claims(g)
    ]
    held = f"\n{markdown(['what the paper shows, in points', 'paper', 'here', 'holds'], said)}" if said else ""
    return f"{g.title}\n\n{markdown(['', *g.columns], body)}\n{LEGEND.format(compared=g.compared)}\n{note}{held}"


FIELDS = ("mean", "std", "seeds", "paper", "paper_std", "difference", "gain", "low", "high", "p")


def as_csv(g: Grid) -> str:
    """One line a cell, every number in full."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["row", "column", *FIELDS])
    for cells in g.cells:
        for c in cells:
            values = [getattr(c, name) for name in FIELDS]
            out.writerow([csv_text(c.row), csv_text(c.column), *("" if v is None else v for v in values)])
    return text.getvalue()


def as_latex(g: Grid) -> str:
    """A booktabs table; ours in normal type, the paper's in gray (needs xcolor)."""
    names = set(g.rows)
    body: list[str] = []
    for name, cells in lines(g):
        shown = [tex(name), *("--" if c == "-" else _tex(c) for c in cells)]
        if name == "the paper":
            shown = [rf"\textcolor{{gray}}{{{text}}}" if text else "" for text in shown]
        gap = r"\addlinespace" + "\n" if name in names and body else ""
        body.append(gap + " & ".join(shown) + r" \\")
    head = " & ".join(["", *map(tex, g.columns)]) + r" \\"
    note = f"% {plain(g.note, 5000)}\n" if g.note else ""
    columns = "l" + "c" * len(g.columns)
    return (
        f"% {plain(g.title)}\n% {LEGEND.format(compared=g.compared)}\n{note}"
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n"
        + "\n".join(body)
        + "\n\\bottomrule\n\\end{tabular}\n"
    )


def _tex(text: str) -> str:
    """A signed number keeps its sign as mathematics."""
    return text.replace(" ± ", r" $\pm$ ").replace("+", "$+$").replace("-", "$-$")
