"""How far a run is: what is done, what is left, and about how long that takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qupel.report.runs import place
from qupel.run.config import Config
from qupel.run.folder import result_file
from qupel.run.jobs import Cell, cells
from qupel.util.files import read_json
from qupel.util.terminal import out, shown


@dataclass(frozen=True)
class Status:
    """How far a run is. `share`: of each cell (0 to 1); `seconds`: expected for the rest, None: not known yet."""

    share: dict[Cell, float]
    seconds: float | None

    @property
    def done(self) -> int:
        return sum(share == 1 for share in self.share.values())

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """(row, cells done, cells) of the table."""
        names = dict.fromkeys(place(cell.label)[0] for cell in self.share)
        for name in names:
            shares = [s for cell, s in self.share.items() if place(cell.label)[0] == name]
            yield name, sum(s == 1 for s in shares), len(shares)


def status(run: Path, config: Config) -> Status:
    """What a run directory holds. A cell that is left is expected to take as long as the mean of those done in its row
    and column, else in its row, else of all."""
    took: dict[Cell, float] = {}
    share: dict[Cell, float] = {}
    for cell in cells(config):
        path = result_file(run, cell)
        if path.exists():
            result = read_json(path)
            share[cell] = 1.0
            if not {"taken_from", "of"} & set(result):
                took[cell] = result["seconds"]
        else:
            share[cell] = _rounds(path.with_name("metrics.jsonl")) / config.rounds
    left = {c: 1 - s for c, s in share.items() if s < 1 and config.methods[c.label].of is None}  # others are quick
    if left and not took:
        return Status(share, None)
    return Status(share, sum(part * _expected(cell, took) for cell, part in left.items()))


def _expected(cell: Cell, took: dict[Cell, float]) -> float:
    same = [s for c, s in took.items() if c.label == cell.label]
    row = [s for c, s in took.items() if place(c.label)[0] == place(cell.label)[0]]
    known = same or row or list(took.values())
    return sum(known) / len(known)


def _rounds(log: Path) -> int:
    """The last round in a log of metrics, 0 if there is none."""
    try:
        lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
        return json.loads(lines[-1])["round"] if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def show_status(run: Path, config: Config) -> None:
    found = status(run, config)
    for row, done, count in found.rows():
        out.print(f"{done:3} of {count:3} done  {shown(row)}", highlight=False)
    going = [f"{cell.label}, seed {cell.seed}: {share:.0%}" for cell, share in found.share.items() if 0 < share < 1]
    for line in going:
        out.print(f"begun: {shown(line)}", highlight=False)
    left = len(found.share) - found.done
    if left == 0:
        eta = "nothing is left"
    elif found.seconds is None:
        eta = f"{left} left; no cell is done yet to tell the time from"
    else:
        eta = f"{left} left, about {duration(found.seconds)}"
    out.print(f"{found.done} of {len(found.share)} cells done, {eta}  [dim]({shown(run)})[/dim]", highlight=False)


def duration(seconds: float) -> str:
    """3725 -> '1 h 2 min'."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
