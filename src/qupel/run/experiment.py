"""Running a config into a run directory (`folder`): cell by cell, finished ones never twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from qupel.core.layout import Layout
from qupel.engine import ranks
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.choice import RECORD, settled
from qupel.engine.group import Group
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Begin, Engine, Progress, Stopped, run
from qupel.engine.workers import Pool, Workers
from qupel.run import config as configs
from qupel.run.adapt import FILE, write_origin
from qupel.run.afterwards import quantize_cell
from qupel.run.config import Config
from qupel.run.folder import (
    adapt_unseen,
    identity,
    is_done,
    open_folder,
    origin_of,
    own_folder,
    result_file,
    result_of,
    save_models,
    write_result,
)
from qupel.run.jobs import (
    Cell,
    build_job,
    cells,
    fingerprint,
    first_rounds,
    shared_rounds,
    shared_settings,
    source_of,
)
from qupel.run.kept import take_over
from qupel.run.networks import model_name
from qupel.run.privacy import open_ledger
from qupel.util.errors import UserError, warn
from qupel.util.files import read_json
from qupel.util.machine import check_device

CPU = torch.device("cpu")
_building = threading.Lock()  # a model's first weights are drawn from torch's one generator
Crew = Pool | Group  # processes that outlive a job


@contextmanager
def engine_for(
    config: Config, cell: Cell, job: Job, crew: Crew | None, workers: int, folder: Path, only: int = 0
) -> Iterator[Engine]:
    """One client: this process with all threads. Several: the crew's single-threaded processes, or this one.

    only: the job is only so many first rounds of the cell's. Whether clients are stacked is settled here, once for all
    processes.
    """
    job, _ = settled(job, config.vectorize, folder)
    if crew is None:
        with Inline(job, workers if len(job.parts) == 1 else 1, config.store, folder) as engine:
            yield engine
    elif isinstance(crew, Pool):
        yield Workers(crew, job, config.store, folder)
    else:
        description = {"config": configs.write(config), "label": cell.label, "seed": cell.seed}
        description |= {"only": only, "stacked": job.stacked}
        with ranks.Ranks(crew, job, description, config.store, folder) as engine:
            yield engine


def serve(group: Group) -> None:
    """What ranks other than 0 do in place of `run_experiment`."""

    def build(description: ranks.Description) -> Job:
        job = build_job(configs.read(description["config"]), Cell(description["label"], description["seed"]))
        only = description["only"]
        return replace(first_rounds(job, only) if only else job, stacked=description["stacked"])

    ranks.serve(group, build)


def run_experiment(
    config: Config,
    out: Path,
    *,
    workers: int = 1,
    start: Callable[[int], AbstractContextManager[Crew]] = Pool,
    resume: bool = False,
    watch: Callable[[Cell, Progress], None] = lambda cell, progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    reuse: Sequence[Path] = (),
    device: str = "cpu",
    other_versions: bool = False,
    wanted: Callable[[Cell], bool] = lambda cell: True,
) -> list[dict[str, Any]]:
    """Run every cell that is not done, write the summary and return all results. Raises `Stopped` when asked to stop.

    start: gives the processes that several workers are: `Pool`, or `group.start`.
    reuse: folders of other runs, or of kept cells; a cell that is done there with the same settings is taken over.
    device: where models and data live; on any but the CPU all clients are trained in this process.
    other_versions: go on with a run that other versions of the packages began.
    wanted: which cells to run; of the others only those that they are made of.
    """
    from qupel.report.runs import read_result
    from qupel.report.summary import write_summary  # with scipy, which no worker needs

    if config.secure is not None:
        raise UserError(
            "secure: it is for machines that do not trust each other (`qupel flower run`); leave it out here"
        )
    place = check_device(device)
    if place.type != "cpu" and start is not Pool:
        raise UserError(f"device {device}: ranks compute on CPUs")
    workers = workers if place.type == "cpu" else 1
    todo = cells(config)
    for cell in todo:  # every mistake is found before the first step is made
        if cell.seed == config.seeds[0]:
            build_job(config, cell)
    with own_folder(out):
        open_folder(out, config, resume, other_versions)
        take_over(config, out, reuse)
        left = unfinished(config, filter(wanted, todo), out)
        run_cells(config, left, out, workers, start, watch, should_stop, place)
        results = [read_result(path) for cell in todo if (path := result_file(out, cell)).exists()]
        write_summary(results, out, one=config.split.kind == "one")
        return results


def unfinished(config: Config, wanted: Iterable[Cell], out: Path) -> list[Cell]:
    """Of these cells those that are not done, and what they are made of, which comes first: a cell that is done but has
    no models (they are not kept) is trained again where they are needed."""
    found: dict[Cell, None] = {}
    for cell in wanted:
        if is_done(out, cell):
            continue
        source = source_of(config, cell)
        if source is not None and not (is_done(out, source) and (result_file(out, source).parent / "models").is_dir()):
            found[source] = None
        found[cell] = None
    return list(found)


def run_cells(
    config: Config,
    left: Sequence[Cell],
    out: Path,
    workers: int,
    start: Callable[[int], AbstractContextManager[Crew]],
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
    place: torch.device,
) -> None:
    many = config.split.kind == "groups" or (config.split.kind != "one" and config.split.clients > 1)
    with ExitStack() as stack:
        if workers > 1 and many and left:
            crew = stack.enter_context(start(workers))
            for cell in left:
                run_cell(config, cell, out, crew, workers, watch, should_stop, place)
        elif workers > 1 and not many and len(groups := alike(config, left)) > 1:
            pools = [stack.enter_context(Pool(1)) for _ in range(min(workers, len(groups)))]
            run_side_by_side(config, groups, out, pools, watch, should_stop)
        else:
            for cell in left:
                run_cell(config, cell, out, None, workers, watch, should_stop, place)


def alike(config: Config, todo: Sequence[Cell]) -> list[list[Cell]]:
    """Cells in groups that may share a warm-up: those of a seed and a model, larger models first."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in todo:
        groups.setdefault((model_name(config, cell), cell.seed), []).append(cell)
    sizes = {name: Layout.of(build_job(config, group[0]).module).size for (name, _), group in groups.items()}
    return [groups[key] for key in sorted(groups, key=lambda key: -sizes[key[0]])]


def run_side_by_side(
    config: Config,
    groups: Sequence[Sequence[Cell]],
    out: Path,
    pools: Sequence[Pool],
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Trainings of one client each, as many at a time as there are pools, each in a process of one thread. The first
    one that fails asks the others to stop."""
    waiting: Queue[Sequence[Cell]] = Queue()
    for group in groups:
        waiting.put(group)
    failed = threading.Event()

    def work(pool: Pool) -> None:
        try:
            while not failed.is_set():
                for cell in waiting.get_nowait():
                    run_cell(config, cell, out, pool, 1, watch, lambda: failed.is_set() or should_stop())
        except Empty:
            return
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(len(pools)) as threads:
        ends = [threads.submit(work, pool) for pool in pools]
        errors = [error for end in ends if (error := end.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])


def run_cell(
    config: Config,
    cell: Cell,
    out: Path,
    crew: Crew | None,
    workers: int,
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
    device: torch.device = CPU,
) -> None:
    done = result_file(out, cell)
    folder = done.parent
    folder.mkdir(parents=True, exist_ok=True)
    if done.exists():
        warn(f"{cell.name} is trained again: its models, which another cell is made of, were not kept")
        done.unlink()
    if source_of(config, cell) is not None:
        with _building:
            write_result(done, quantize_cell(config, cell, out))
        return
    with _building:
        built = build_job(config, cell)
    job = built.to(device)
    checkpoints = Checkpoints(folder, fingerprint(config, cell, job.phases), config.keep_checkpoints)
    began, resumed = time.monotonic(), checkpoints.newest() is not None
    shared = shared_rounds(config, cell, job)
    begin = shared_start(config, cell, job, shared, out, crew, workers, watch, should_stop) if shared else None
    with engine_for(config, cell, job, crew, workers, folder) as engine:
        finished = run(
            job,
            engine,
            checkpoints=checkpoints,
            begin=begin,
            ledger=open_ledger(config, job, folder, cell.name),
            watch=lambda p: watch(cell, p),
            should_stop=should_stop,
        )
        files = (
            save_models(config, cell, built, engine, finished.w, folder, finished.lines[-1])
            if config.save_models
            else None
        )
    origin = origin_of(config, cell, built, finished.w)
    if config.save_models:
        write_origin(folder / FILE, origin)
    result = result_of(job, cell, checkpoints.fingerprint, read_json(folder / RECORD), finished, device, files)
    result |= adapt_unseen(config, cell, built, origin, folder)
    result |= {"config": shared_settings(config, cell), "data_identity": identity(config)}
    result["method"] = json.loads(config.methods[cell.label].model_dump_json())
    if begin is not None and not resumed:
        result["seconds"] = time.monotonic() - began
    write_result(done, result)
    checkpoints.remove()


def shared_start(
    config: Config,
    cell: Cell,
    job: Job,
    rounds: int,
    out: Path,
    crew: Crew | None,
    workers: int,
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
) -> Begin:
    """The full-precision rounds that this cell begins with, trained once for all cells that do so; the result is the
    same bits. Of its metrics those remain that the cell's own run would have."""
    only = first_rounds(job, rounds)
    key = fingerprint(config, cell, only.phases)
    folder = out / "shared" / key
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, key, config.keep_checkpoints)
    with engine_for(config, cell, only, crew, workers, folder, rounds) as engine:

        def tell(p: Progress) -> None:
            watch(cell, replace(p, rounds=job.rounds))

        finished = run(only, engine, checkpoints=checkpoints, watch=tell, should_stop=should_stop)
    saved = checkpoints.load(Layout.of(job.module))
    assert saved is not None
    due = [line for line in finished.lines if line["round"] % job.evaluate_every == 0 or rounds == job.phases[0].rounds]
    return Begin(rounds, saved.w, saved.memory, due, saved.states, finished.lines[-1]["seconds"], saved.guard)
