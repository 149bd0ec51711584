"""Running a comparison (`compare`): for each federation the search, then its cells, then what came out so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qupel.engine.rounds import Failed
from qupel.report import leaderboard
from qupel.report.runs import AT
from qupel.run.compare import SEARCH, Comparison, Part, Table, federations
from qupel.run.config import Config
from qupel.run.experiment import run_experiment, unfinished
from qupel.run.folder import grown, is_done, open_folder, own_folder, read_config, result_file
from qupel.run.jobs import Cell, build_job, cells, data_of, fingerprint, source_of
from qupel.run.kept import take_over
from qupel.run.status import show_status
from qupel.tasks.metrics import kind_of
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_json

Tell = Callable[[Cell, Any], None]
Watch = Callable[[str, int], AbstractContextManager[Tell]]  # what is run, how many rounds -> whom to tell


def _unwatched(what: str, rounds: int) -> AbstractContextManager[Tell]:
    return nullcontext(lambda cell, progress: None)


@dataclass(frozen=True)
class How:
    """How cells are run, the same for all."""

    workers: int = 1
    device: str = "cpu"
    other_versions: bool = False
    watch: Watch = _unwatched
    should_stop: Callable[[], bool] = lambda: False
    reuse: Sequence[Path] = ()  # folders whose finished cells are taken over


def run_comparison(
    c: Comparison, out: Path, *, only: Iterable[str] = (), resume: bool = False, how: How | None = None
) -> Path:
    """Run what is wanted and not done; returns the page. Raises `Stopped` when asked to stop."""
    how = how or How()
    part, about = Part.of(c, only), out / leaderboard.ABOUT
    if about.exists() and not resume:
        raise UserError(f"{out} already holds a comparison; add --resume to go on with it, or give another --out")
    if not about.exists() and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no comparison; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(about, c.described())
    for federation, methods in federations(c, part):
        found = search(c, federation, methods, out / SEARCH / federation, how) if c.sheet.search else {}
        config = c.config(federation, methods, {name: told["settings"] for name, told in found.items()})
        folder = out / federation
        config = _opened(config, folder, how)
        if found:
            write_json(folder / leaderboard.CHOSEN, {**leaderboard.choices(folder), **found})
        _run(config, folder, federation, how, part.has)
        leaderboard.write(leaderboard.gather(out), out)
    return out / leaderboard.PAGE


def show_progress(c: Comparison, out: Path, only: Iterable[str] = ()) -> None:
    """What is done and what is left of every federation, and of its search."""
    for federation, methods in federations(c, Part.of(c, only)):
        runs = {out / federation: c.config(federation, methods, {})}
        if c.sheet.search:
            runs = {out / SEARCH / federation: c.trials(federation, methods)[0], **runs}
        for folder, config in runs.items():
            known = read_config(folder).methods if (folder / "config.json").exists() else {}
            show_status(folder, config.model_copy(update={"methods": {**config.methods, **known}}))


def search(c: Comparison, federation: str, methods: Sequence[str], folder: Path, how: How) -> dict[str, Table]:
    """By method: what was tried, what it reached on validation data, and which settings were chosen: the best, of equal
    ones the first. A trial that failed has reached nothing."""
    config, tried = c.trials(federation, methods)
    wanted = set(config.methods)
    _run(_opened(config, folder, how), folder, f"{federation}, search", how, lambda label, seed: label in wanted)
    higher, found = _higher_is_better(config), {}
    for name in methods:
        labels = [f"{name}{AT}trial {k}" for k in range(1, len(tried[name]) + 1)]
        reached = [_validation(folder, Cell(label, config.seeds[0])) for label in labels]
        if all(math.isnan(v) for v in reached):
            raise UserError(f"{federation}: no trial of {name} has a score on validation data; give it other settings")
        ranked = [-math.inf if math.isnan(v) else v if higher else -v for v in reached]
        best = ranked.index(max(ranked))
        trials = [
            {"settings": settings, "validation": None if math.isnan(v) else v}
            for settings, v in zip(tried[name], reached, strict=True)
        ]
        bits = config.methods[labels[0]].bits
        found[name] = {"settings": tried[name][best], "trials": trials, "bits": bits, "seed": config.seeds[0]}
    return found


def _validation(folder: Path, cell: Cell) -> float:
    path = result_file(folder, cell)
    line = read_json(path)["lines"][-1] if path.exists() else {}
    assert not [key for key in line if key.startswith("test")], "a trial saw test data"
    return float(line.get("validation", math.nan))


def _higher_is_better(config: Config) -> bool:
    """Of the score that clients are judged by."""
    by = config.task.judge_by
    if by not in (None, "accuracy", "loss"):
        return kind_of(by, config.task.asked()[by]).higher
    return by == "accuracy" or (by is None and data_of(config).classes is not None)


def _opened(config: Config, folder: Path, how: How) -> Config:
    """The whole config of a directory that may hold other cells; those that others have done are taken over."""
    with own_folder(folder):
        config = grown(folder, config)
        open_folder(folder, config, True, how.other_versions)
        take_over(config, folder, how.reuse)
        _take_failures(config, folder, how.reuse)
    return config


def _take_failures(config: Config, folder: Path, others: Sequence[Path]) -> None:
    """Take over which cells could not be trained: with the same settings they would fail again."""
    known: dict[str, str] = {}  # fingerprint -> why
    for home in (path.parent for other in others for path in other.rglob(leaderboard.FAILED)):
        theirs, why = read_config(home), leaderboard.failures(home)
        for cell in (cell for cell in cells(theirs) if cell.name in why):
            known[_key(theirs, cell)] = why[cell.name]
    keys = {cell.name: _key(config, cell) for cell in cells(config)} if known else {}
    if found := {name: known[key] for name, key in keys.items() if key in known}:
        write_json(folder / leaderboard.FAILED, {**found, **leaderboard.failures(folder)})


def _key(config: Config, cell: Cell) -> str:
    return fingerprint(config, cell, build_job(config, cell, check=False).phases)


def _run(config: Config, folder: Path, what: str, how: How, wanted: Callable[[str, int], bool]) -> None:
    """Run the cells that are wanted and not done. One that fails is noted, and the others go on."""
    while True:
        failed = leaderboard.failures(folder)
        chosen = [cell for cell in cells(config) if wanted(cell.label, cell.seed) and not _lost(config, cell, failed)]
        left = unfinished(config, chosen, folder)
        trained = sum(config.methods[cell.label].of is None for cell in left)
        try:
            with how.watch(what, trained * config.rounds) as tell:
                _run_cells(config, folder, set(chosen), tell, how)
        except Failed as e:  # cells are run one after the other
            first = next(cell for cell in left if not is_done(folder, cell))
            write_json(folder / leaderboard.FAILED, {**failed, first.name: str(e)})
            continue
        return


def _lost(config: Config, cell: Cell, failed: Mapping[str, str]) -> bool:
    """A cell that could not be trained, or is made of one; it would fail again."""
    source = source_of(config, cell)
    return cell.name in failed or (source is not None and source.name in failed)


def _run_cells(config: Config, folder: Path, chosen: Collection[Cell], tell: Tell, how: How) -> None:
    run_experiment(
        config,
        folder,
        workers=how.workers,
        device=how.device,
        resume=True,
        other_versions=True,  # as `open_folder` has said
        watch=tell,
        should_stop=how.should_stop,
        wanted=lambda cell: cell in chosen,
    )
