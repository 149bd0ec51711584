"""What models are compared by: the score that a run judges its clients by, and every other metric it tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qupel.util.errors import UserError

Line = dict[str, Any]
MOST = 30  # metrics beside the score that a report shows; a vector may have thousands of entries


@dataclass(frozen=True)
class Measure:
    """A number that lines of metrics tell, and how it is read. key: where; "test": the score itself."""

    name: str = "accuracy"
    higher: bool = True  # more is better
    percent: bool = True  # a share, shown in percent
    key: str = "test"
    vector: str = ""  # the metric that it is an entry of, where that gives several numbers

    @property
    def head(self) -> str:
        return f"{self.name} %" if self.percent else self.name

    @property
    def axis(self) -> str:
        return f"test {self.name}{', %' if self.percent else ''}"

    def of(self, line: Line, split: str = "test") -> float | None:
        """Its mean over the clients, as it is shown; None where it is not told."""
        return self.shown(line.get(split if self.key == "test" else f"{split}_{self.key}"))

    def each(self, clients: dict[str, list[Any]]) -> list[float | None]:
        """Every client's, as they are shown."""
        return [self.shown(value) for value in clients.get(self.key, ())]

    def shown(self, value: float | None) -> float | None:
        return None if value is None else 100 * value if self.percent else value

    def text(self, value: float | None, digits: int = 1, sign: str = "") -> str:
        """Percent with so many digits, other numbers with four; a dash for what is none."""
        if value is None or not math.isfinite(value):
            return "-"
        return f"{value:{sign}.{digits}f}" if self.percent else f"{value:{sign}.4g}"

    def said(self, value: float) -> str:
        """In a sentence."""
        return f"{value:.1f} %" if self.percent else f"{self.name} {value:.4g}"


ACCURACY, LOSS = Measure(), Measure("loss", higher=False, percent=False)


def main_measure(results: Iterable[dict[str, Any]]) -> Measure:
    """What these cells are judged by: as their lines say, else by accuracy where there are class labels."""
    found = list(dict.fromkeys(_judged_by(result) for result in results))
    if len(found) > 1:
        names = " and ".join(m.name for m in found)
        raise UserError(f"these runs are judged by {names}, which cannot be compared: report them apart")
    return found[0]


def _judged_by(result: dict[str, Any]) -> Measure:
    line = result["lines"][-1]
    if told := line.get("over_clients", {}).get("test"):
        return _measure(told, "test")
    unlabelled = result.get("classes", True) is None and line.get("test") == line.get("test_loss")
    return LOSS if unlabelled else ACCURACY


def _measure(told: dict[str, Any], key: str) -> Measure:
    return Measure(told["name"], told["higher"], told["percent"], key, told["vector"])


def other_measures(results: Sequence[dict[str, Any]]) -> list[Measure]:
    """The metrics beside the score that a cell tells at its end, each once, in their order."""
    main = main_measure(results)
    told = (item for r in results for item in r["lines"][-1].get("over_clients", {}).items())
    found = {key: _measure(one, key) for key, one in told if key != "test" and one["name"] != main.name}
    return list(found.values())[:MOST]


def told_metrics(results: Iterable[dict[str, Any]]) -> bool:
    """Whether a run was asked for more than loss and accuracy."""
    return any("over_clients" in r["lines"][-1] for r in results)
