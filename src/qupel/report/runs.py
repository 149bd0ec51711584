"""Run directories, read for a report: those of `qupel run`, `qupel train` and `qupel reproduce`, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qupel.engine import scores
from qupel.report.measure import main_measure
from qupel.report.tables import Result, privacy
from qupel.util.errors import UserError
from qupel.util.files import read_json

AT = " @ "  # a method that is a cell of a table is labelled "row @ column"


def place(label: str) -> tuple[str, str]:
    """ "row @ column" -> (row, column)."""
    row, _, column = label.rpartition(AT)
    return row, column


@dataclass(frozen=True)
class Run:
    """A run directory: its settings and its finished cells, in the config's order of methods, then by seed."""

    name: str
    folder: Path
    config: dict[str, Any]
    results: list[Result]
    cells: int  # how many the config asks for
    table: str | None = None  # which one its cells are of, as a run of `qupel reproduce` says in reproduce.json
    scale: str = ""
    scale_note: str = ""  # what to say beside its numbers
    rows: tuple[str, ...] = ()  # of that table, in their order

    @property
    def one_place(self) -> bool:
        """Trained in one place, not a federation."""
        return bool(self.config["split"]["kind"] == "one")

    @property
    def note(self) -> str:
        """What to say about the data beside every number."""
        said = next((r["data_note"] for r in self.results if r.get("data_note")), "")
        return ". ".join(filter(None, (self.scale_note, said, privacy(self.results).rstrip("."))))

    def name_of(self, label: str, alone: bool) -> str:
        """A method's name, with the run's where it is not alone."""
        return label if alone else f"{label} ({self.name})"

    def comparable(self, other: Run) -> bool:
        """The same data, split and judged the same way: clients of equal seeds can be compared one by one."""
        mine, others = ({**r.config["data"], "folder": None} for r in (self, other))
        judged = [main_measure(r.results) for r in (self, other)]
        return bool(mine == others and self.config["split"] == other.config["split"] and judged[0] == judged[1])


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, each named by its folder, or by the end of its path where names repeat."""
    once = list({f.resolve(): f for f in folders}.items())
    repeat = len({path.name for path, _ in once}) < len(once)
    return [load_run(f, f"{path.parent.name}/{path.name}" if repeat else path.name) for path, f in once]


def load_run(folder: Path, name: str) -> Run:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no run directory: it has no config.json")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not {"methods", "seeds", "split", "data"} <= set(config):
        raise UserError(f"{folder / 'config.json'} is not the config of a run")
    order = {label: k for k, label in enumerate(config["methods"])}
    results = [read_result(path) for path in sorted(folder.glob("cells/*/result.json"))]
    results = sorted((r for r in results if r["label"] in order), key=lambda r: (order[r["label"]], r["seed"]))
    if not results:
        raise UserError(f"{folder} has no finished cell yet (cells/*/result.json)")
    if any("test" not in r["lines"][-1] for r in results):
        raise UserError(f"{folder}: a report shows scores on test data, and there is none; see metrics.jsonl")
    about = read_json(folder / "reproduce.json") if (folder / "reproduce.json").exists() else {}
    cells = len(config["methods"]) * len(config["seeds"])
    told = {key: about[key] for key in ("table", "scale") if key in about}
    rows = tuple(about.get("rows", ()))
    return Run(name, folder, config, results, cells, **told, scale_note=about.get("note", ""), rows=rows)


def read_result(path: Path) -> Result:
    """A cell's result.json; the sizes of its clients' files are read from its folder where it does not tell them."""
    result: Result = read_json(path)
    scores.attach(path.parent, result["lines"])
    models = sorted((path.parent / "models").glob("client-*.safetensors"))
    return {"files": [f.stat().st_size for f in models], **result} if models else result
