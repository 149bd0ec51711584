"""From a config to a run directory: one cell per method and seed, finished cells never run twice.

RUN/config.json                  the whole config; identity.json: the data's checksum, versions; lock
RUN/shared/...                   what cells share: the FedAvg warm-up of equal recipes, trained once a seed
RUN/cells/<label>-s<seed>/       metrics.jsonl, engine.json, checkpoints/ while running, result.json when done, models/;
                                 scores.npz where there are many clients
RUN/summary.json, summary.md     the comparison
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from torch import nn

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data import partition, sources
from qupel.data.batches import Transform
from qupel.deploy.about import About
from qupel.deploy.budget import Planner, parse_size
from qupel.deploy.file import load, save
from qupel.engine import ranks, scores
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.choice import RECORD, settled
from qupel.engine.door import check_trainable
from qupel.engine.fingerprint import digest
from qupel.engine.group import Group
from qupel.engine.identity import check_identity
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Failed, Progress, Stopped, run
from qupel.engine.workers import Pool, Workers
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.base import Rows
from qupel.parts.methods.base import quantizer_of
from qupel.parts.phase import Phase
from qupel.run import config as configs
from qupel.run.config import Config, MethodConfig
from qupel.run.recipes import Length, compose, find
from qupel.tasks import zoo
from qupel.tasks.judge import Judge
from qupel.util.errors import UserError
from qupel.util.files import LOCK, Damaged, check_files, checksums, locked, read_json, write_sealed
from qupel.util.machine import check_device, device_name, machine

CPU = torch.device("cpu")
_building = threading.Lock()  # a model's first weights are drawn from torch's one generator

SHARED = ("seed", "data", "split", "model", "local_steps", "batch", "sample", "weighted")


@dataclass(frozen=True)
class Cell:
    """One method on one seed."""

    label: str
    seed: int

    @property
    def name(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.+]+', '-', self.label).strip('-')}-s{self.seed}"


def cells(config: Config) -> list[Cell]:
    found = [Cell(label, seed) for seed in config.seeds for label in config.methods]
    if len({c.name for c in found}) < len(found):
        raise UserError("methods: two labels differ only in punctuation; seeds: each once")
    return found


# --- from config to job ---


@lru_cache(maxsize=2)
def load_data(name: str, folder: Path | None, limit: int | None) -> sources.Dataset:
    return sources.load(name, folder, limit)


def split_data(config: Config, data: sources.Dataset, seed: int) -> list[partition.Part]:
    s, train, test = config.split, data.train, data.test
    if s.kind in {"classes", "dirichlet"} and data.classes is None:
        raise UserError(f"split.kind = {s.kind!r} needs class labels, which {data.name} has not; try iid or groups")
    if s.kind == "classes":
        parts = partition.by_class(
            train.targets, test.targets, s.clients, s.classes, seed, s.train_per_client, s.test_per_client
        )
    elif s.kind == "dirichlet":
        parts = partition.dirichlet(train.targets, test.targets, s.clients, s.alpha, seed)
    elif s.kind == "groups":
        if train.groups is None:
            raise UserError(f"split.kind = 'groups' needs a group column, which {data.name} has not")
        parts = partition.by_group(train.groups, test.groups, seed=seed)
    else:
        clients = 1 if s.kind == "one" else s.clients
        parts = partition.iid(len(train), len(test), clients, seed, s.train_per_client, s.test_per_client)
    return partition.hold_out(parts, s.validation, seed, train.targets) if s.validation else parts


def model_name(config: Config, cell: Cell) -> str:
    return config.methods[cell.label].model or config.model.name


def build_model(config: Config, data: sources.Dataset, cell: Cell) -> nn.Module:
    if data.classes is None:
        raise UserError(f"{data.name} has no class labels: train on it from Python, with qupel.fit and your own loss")
    module = zoo.build(model_name(config, cell), tuple(data.train.inputs.shape[1:]), data.classes, cell.seed)
    if config.model.start is not None:
        load(Path(str(config.model.start).replace("{seed}", str(cell.seed)))).into(module)
    return module


def build_job(config: Config, cell: Cell) -> Job:
    """The job of one cell. Cells of a seed share data, split and initial model, so that comparisons are paired."""
    data = load_data(config.data.name, config.data.folder, config.data.limit)
    parts = split_data(config, data, cell.seed)
    module = build_model(config, data, cell)
    job = assemble(config, cell, module, data, parts, build_plans(config, cell, module, data, len(parts)))
    check_trainable(job)
    return job


def assemble(
    config: Config,
    cell: Cell,
    module: nn.Module,
    data: sources.Dataset,
    parts: Sequence[partition.Part],
    plans: Sequence[Plan],
) -> Job:
    """The settings of a cell on a model, data and clients."""
    method = config.methods[cell.label]
    job = Job(
        module=module,
        loss=nn.functional.cross_entropy,
        data=data,
        parts=parts,
        plans=plans,
        phases=[],
        seed=cell.seed,
        local_steps=method.steps_per_round(config.local_steps),
        batch=config.batch,
        sample=config.sample,
        weighted=config.weighted,
        evaluate_every=config.evaluate_every,
        evaluate_sample=config.evaluate_sample,
        checkpoint_every=config.checkpoint_every,
        on_bad_upload=config.on_bad_upload if len(parts) > 1 else "stop",
        upload_bound=config.upload_bound,
        transform=Transform.of(data, augment=config.data.augment),
        diagnostics=None if config.diagnostics == "off" else Diagnostics(config.diagnostics),
    )
    return job.with_phases(build_phases(method, config.rounds, job, cell.label))


def build_plans(config: Config, cell: Cell, module: nn.Module, data: sources.Dataset, clients: int) -> list[Plan]:
    """How many centers each layer of each client gets: from the bits given, or from what fits the client's budget."""
    bits = config.methods[cell.label].bits or config.bits
    layout, layers = Layout.of(module), config.model.layers
    plans: list[Plan]
    if bits == "auto":
        planner = Planner(module, layers=layers, about=describe(config, cell, data, "x" * 20, 0.999999, 10**9))
        plans = [plan_bits(layout, planner.fit(parse_size(text)).bits) for text in config.budgets()]
    else:
        each = [bits] if isinstance(bits, int) else list(bits)
        plans = [plan_bits(layout, int(b), layers) for b in each]
    return [plans[i % len(plans)] for i in range(clients)]


def describe(
    config: Config, cell: Cell, data: sources.Dataset, client: str, test: float, allowed: int | None = None
) -> About:
    """What a client's file says about its model; `allowed`: the bytes it may have."""
    budget = {} if allowed is None else {"budget": allowed}
    return About(
        model=model_name(config, cell),
        input_shape=tuple(data.train.inputs.shape[1:]),
        classes=data.classes or 0,
        labels=data.labels,
        mean=data.mean,
        std=data.std,
        client=client,
        extra={"method": cell.label, "seed": cell.seed, "data": data.name, "test": round(test, 6), **budget},
    )


def build_phases(method: MethodConfig, rounds: int, job: Job, label: str) -> list[Phase]:
    if method.phases is not None:
        return list(method.phases)
    length = Length(rounds, job.local_steps, job.steps_per_epoch)
    if method.recipe is None:
        assert method.method is not None
        return [compose(method.method, method.quantizer, method.server, method, length)]
    return find(method.recipe).phases(method, length)


# --- running ---


Crew = Pool | Group  # processes that outlive a job


@contextmanager
def engine_for(
    config: Config, cell: Cell, job: Job, crew: Crew | None, workers: int, folder: Path, warmup: bool = False
) -> Iterator[Engine]:
    """One client: this process with all threads. Several: the crew's single-threaded processes, or this one.

    warmup: the job is only the first phase of the cell's. Whether clients are stacked is settled here, once for all
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
        description |= {"warmup": warmup, "stacked": job.stacked}
        with ranks.Ranks(crew, job, description, config.store, folder) as engine:
            yield engine


def serve(group: Group) -> None:
    """What ranks other than 0 do in place of `run_experiment`."""

    def build(description: ranks.Description) -> Job:
        job = build_job(configs.read(description["config"]), Cell(description["label"], description["seed"]))
        return replace(warmup_of(job) if description["warmup"] else job, stacked=description["stacked"])

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
) -> list[dict[str, Any]]:
    """Run every cell that is not done, write the summary and return all results. Raises `Stopped` when asked to stop.

    start: gives the processes that several workers are: `Pool`, or `group.start`.
    reuse: other run directories; a cell that one of them has done with the same settings is taken over.
    device: where models and data live; on any but the CPU all clients are trained in this process.
    other_versions: go on with a run that other versions of the packages began.
    """
    from qupel.report.runs import read_result
    from qupel.report.summary import write_summary  # with scipy, which no worker needs

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
        for cell in todo:
            adopt(config, cell, out, reuse)
        left = [cell for cell in todo if not is_done(out, cell)]
        run_cells(config, left, out, workers, start, watch, should_stop, place)
        results = [read_result(result_file(out, cell)) for cell in todo]
        write_summary(results, out, one=config.split.kind == "one")
        return results


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Make a run's folder and have it alone."""
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            check_own(out)  # nothing is left in a folder that is something else
            stack.enter_context(locked(out))
        except OSError as e:
            raise UserError(f"cannot use {out}: {e.strerror}") from None
        yield


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


def check_own(out: Path) -> None:
    if not (out / "config.json").exists() and any(p.name != LOCK for p in out.iterdir()):
        raise UserError(f"{out} is not empty and holds no run; give another --out")


def open_folder(out: Path, config: Config, resume: bool, other_versions: bool = False) -> None:
    described = json.loads(config.model_dump_json())
    try:
        out.mkdir(parents=True, exist_ok=True)
        known = out / "config.json"
        if known.exists():
            if not resume:
                raise UserError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
            before = read_json(known)
            unknown = {key: Config.model_fields[key].default for key in described if key not in before}
            if {**before, **unknown} != described:  # what an older version did not know has its default
                raise UserError(f"{out} was made with another config; resume it with that one, or give another --out")
        else:
            check_own(out)
            write_sealed(known, described)
        check_identity(out, config.data.name, identity(config), other_versions)
    except OSError as e:
        raise UserError(f"cannot use {out}: {e.strerror}") from None


@lru_cache(maxsize=2)
def data_identity(name: str, folder: Path | None, limit: int | None) -> str:
    return sources.identity(load_data(name, folder, limit))


def identity(config: Config) -> str:
    """A checksum of the data that a config names."""
    return data_identity(config.data.name, config.data.folder, config.data.limit)


def is_done(out: Path, cell: Cell) -> bool:
    """Whether a cell is done. Raises `Damaged` where something it left is not what it was."""
    path = result_file(out, cell)
    if not path.exists():
        return False
    try:
        result = read_json(path)
        if (result["label"], result["seed"]) != (cell.label, cell.seed):
            raise Damaged(f"{path} is the result of {result['label']}, seed {result['seed']}")
        check_files(path.parent, result.get("checksums", {}))
    except Damaged as e:
        raise Damaged(f"{e}; remove {path.parent} to run this cell again") from None
    return True


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a cell's result, with checksums of the files beside it."""
    folder = path.parent
    left = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file() and p != path]
    files = checksums(folder, [str(p) for p in left if p.parts[0] != "checkpoints"])
    write_sealed(path, {**json.loads(json.dumps(result, default=str)), "checksums": files})


def result_file(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.name / "result.json"


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
    with _building:
        built = build_job(config, cell)
    job = built.to(device)
    checkpoints = Checkpoints(folder, fingerprint(config, cell, job.phases), config.keep_checkpoints)
    begin = None
    began = time.monotonic()
    if len(job.phases) > 1 and is_dense(job.phases[0]) and checkpoints.newest() is None:
        begin = shared_warmup(config, cell, job, out, crew, workers, watch, should_stop)
    with engine_for(config, cell, job, crew, workers, folder) as engine:
        finished = run(
            job,
            engine,
            checkpoints=checkpoints,
            begin=begin,
            watch=lambda p: watch(cell, p),
            should_stop=should_stop,
        )
        files = (
            save_models(config, cell, built, engine, finished.w, folder, finished.lines[-1])
            if config.save_models
            else None
        )
    result = {
        "label": cell.label,
        "seed": cell.seed,
        "fingerprint": checkpoints.fingerprint,
        "config": shared_settings(config, cell),
        "method": json.loads(config.methods[cell.label].model_dump_json()),
        "phases": [p.table() for p in job.phases],
        "seconds": finished.lines[-1]["seconds"] if begin is None else time.monotonic() - began,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {**machine(), "device": device_name(device)},
        "quantized": list(dict.fromkeys(name for plan in job.plans for name in plan)),
        "engine": read_json(folder / RECORD),
        "data_identity": identity(config),
        "data_note": job.data.note,
        **({} if files is None else {"files": files}),  # bytes of each client's
        "lines": [scores.short(line) for line in finished.lines],
    }
    write_result(done, result)
    checkpoints.remove()


def warmup_of(job: Job) -> Job:
    """The first phase of a job, for which no client needs bits."""
    return replace(job, phases=job.phases[:1], plans=[Plan() for _ in job.plans])


def shared_warmup(
    config: Config,
    cell: Cell,
    job: Job,
    out: Path,
    crew: Crew | None,
    workers: int,
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
) -> tuple[int, Rows, list[dict[str, Any]], Path | None]:
    """(rounds, w, metrics, clients' states) of the full-precision phase that this cell begins with, trained once for
    all cells that do so; the result is the same bits."""
    only = warmup_of(job)
    key = fingerprint(config, cell, only.phases)
    folder = out / "shared" / key
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, key, config.keep_checkpoints)
    with engine_for(config, cell, only, crew, workers, folder, warmup=True) as engine:

        def tell(p: Progress) -> None:
            watch(cell, replace(p, rounds=job.rounds))

        finished = run(only, engine, checkpoints=checkpoints, watch=tell, should_stop=should_stop)
    return only.rounds, finished.w, finished.lines, checkpoints.newest()


def is_dense(phase: Phase) -> bool:
    """No client is quantized in this phase, whatever its bits."""
    return quantizer_of(phase.method) == "none"


def adopt(config: Config, cell: Cell, out: Path, others: Sequence[Path]) -> None:
    """Take a cell's result and models over from a run that has done the same under whatever label."""
    done = result_file(out, cell)
    if not others or done.exists():
        return
    key = fingerprint(config, cell, build_job(config, cell).phases)
    for path in (p for other in others for p in sorted(other.glob("cells/*/result.json"))):
        result = read_json(path)
        if result.get("fingerprint") != key:
            continue
        done.parent.mkdir(parents=True, exist_ok=True)
        if (path.parent / "models").exists():
            shutil.copytree(path.parent / "models", done.parent / "models", dirs_exist_ok=True)
        shutil.copy(path.parent / "metrics.jsonl", done.parent)
        scores.copy(path.parent, done.parent)
        taken = f"{path.parents[2].name}/{path.parent.name}"
        write_result(done, {**result, "label": cell.label, "taken_from": taken})
        return


def save_models(
    config: Config, cell: Cell, job: Job, engine: Engine, w: Rows, folder: Path, line: dict[str, Any]
) -> list[int]:
    """models/client-000.safetensors and so on: what each client ships, packed and checked against its budget. Returns
    the bytes of each file."""
    target = folder / "models"
    target.mkdir(exist_ok=True)
    judge, data = Judge(job.module, job.loss), job.data
    budgets = [parse_size(text) for text in config.budgets()]
    sizes = []
    for client in range(len(job.parts)):
        model = engine.deployed(job.rounds - 1, w, client).cpu()
        module = judge.load(model.x, job.calibration(client))
        test = line["clients"]["test"][client]
        allowed = budgets[client % len(budgets)] if budgets and model.codebook else None
        about = describe(config, cell, data, job.name(client), test, allowed)
        written = save(target / f"client-{client:03d}.safetensors", module, model.codebook, about=about)
        if allowed is not None and written > allowed:
            raise Failed(f"{job.name(client)}: its file has {written} bytes, over its budget of {allowed}")
        sizes.append(written)
    return sizes


def fingerprint(config: Config, cell: Cell, phases: list[Phase] | Any) -> str:
    """What a cell's numbers depend on, as a short hash."""
    described = json.loads(config.model_dump_json())
    parts = shared_settings(config, cell)
    parts["phases"] = [p.table() for p in phases]
    parts["bits"] = described["methods"][cell.label]["bits"] or [described["bits"], described["budget"]]
    if all(is_dense(p) for p in phases):
        del parts["bits"]  # no client is quantized
    return digest(parts)


def shared_settings(config: Config, cell: Cell) -> dict[str, Any]:
    """The settings of a cell besides its phases and bits."""
    described = json.loads(config.model_dump_json())
    found = {key: described[key] for key in SHARED if key in described}
    found["seed"] = cell.seed
    found["model"]["name"] = model_name(config, cell)
    found["local_steps"] = config.methods[cell.label].steps_per_round(config.local_steps)
    return found
