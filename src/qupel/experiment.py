"""From a config to a run directory: one cell per method and seed, finished cells never run twice.

RUN/config.json                  the whole config
RUN/shared/...                   what cells share: the FedAvg warm-up of equal recipes, trained once a seed
RUN/cells/<label>-s<seed>/       metrics.jsonl, checkpoints/ while running, result.json when done, models/
RUN/summary.json, summary.md     the comparison
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qupel import models
from qupel.algorithms import FedAvg, Phase
from qupel.codebook import Plan, plan_bits
from qupel.config import Config, MethodConfig
from qupel.data import partition, sources
from qupel.data.batches import Transform
from qupel.deploy.about import About
from qupel.deploy.budget import Planner, parse_size
from qupel.deploy.file import load, save
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Failed, Progress, check_trainable, run
from qupel.engine.workers import Pool, Workers
from qupel.errors import UserError
from qupel.evaluate import Judge
from qupel.files import write_json
from qupel.flat import Layout
from qupel.recipes import RECIPES, Budget

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


def build_model(config: Config, data: sources.Dataset, seed: int) -> nn.Module:
    if data.classes is None:
        raise UserError(f"{data.name} has no class labels: train on it from Python, with qupel.fit and your own loss")
    module = models.build(config.model.name, tuple(data.train.inputs.shape[1:]), data.classes, seed)
    if config.model.start is not None:
        load(Path(str(config.model.start).format(seed=seed))).into(module)
    return module


def build_job(config: Config, cell: Cell) -> Job:
    """The job of one cell. Cells of a seed share data, split and initial model, so that comparisons are paired."""
    data = load_data(config.data.name, config.data.folder, config.data.limit)
    parts = split_data(config, data, cell.seed)
    module = build_model(config, data, cell.seed)
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
        checkpoint_every=config.checkpoint_every,
        on_bad_upload=config.on_bad_upload if len(parts) > 1 else "stop",
        transform=Transform.of(data, augment=config.data.augment),
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
        model=config.model.name,
        input_shape=tuple(data.train.inputs.shape[1:]),
        classes=data.classes or 0,
        labels=data.labels,
        mean=data.mean,
        std=data.std,
        client=client,
        extra={"method": cell.label, "seed": cell.seed, "data": data.name, "test": round(test, 6), **budget},
    )


def build_phases(method: MethodConfig, rounds: int, job: Job, label: str) -> list[Phase]:
    if (method.recipe is None) == (method.phases is None):
        raise UserError(f"methods.{label}: give either recipe or phases")
    if method.phases is not None:
        return [Phase(p.method, p.rounds) for p in method.phases]
    assert method.recipe is not None
    budget = Budget(rounds, job.local_steps, job.steps_per_epoch)
    return RECIPES[method.recipe].phases(method, budget)


# --- running ---


@contextmanager
def engine_for(job: Job, pool: Pool | None, workers: int, store: str, scratch: Path | None) -> Iterator[Engine]:
    """One client: this process with all threads. Several: the pool of single-threaded workers, or this process."""
    if pool is not None and len(job.parts) > 1:
        yield Workers(pool, job, store, scratch)
    else:
        with Inline(job, workers if len(job.parts) == 1 else 1, store, scratch) as engine:
            yield engine


def run_experiment(
    config: Config,
    out: Path,
    *,
    workers: int = 1,
    resume: bool = False,
    watch: Callable[[Cell, Progress], None] = lambda cell, progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Run every cell that is not done and return all results. Raises `Stopped` when asked to stop."""
    todo = cells(config)
    for cell in todo:  # every mistake is found before the first step is made
        if cell.seed == config.seeds[0]:
            build_job(config, cell)
    open_folder(out, config, resume)
    many = config.split.kind == "groups" or (config.split.kind != "one" and config.split.clients > 1)
    pool = Pool(workers) if workers > 1 and many and any(not result_file(out, c).exists() for c in todo) else None
    try:
        return [run_cell(config, cell, out, pool, workers, watch, should_stop) for cell in todo]
    finally:
        if pool is not None:
            pool.__exit__(None, None, None)


def open_folder(out: Path, config: Config, resume: bool) -> None:
    described = json.loads(config.model_dump_json())
    try:
        out.mkdir(parents=True, exist_ok=True)
        known = out / "config.json"
        if known.exists():
            if not resume:
                raise UserError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
            if json.loads(known.read_text()) != described:
                raise UserError(f"{out} was made with another config; resume it with that one, or give another --out")
        elif any(out.iterdir()):
            raise UserError(f"{out} is not empty and holds no run; give another --out")
        else:
            write_json(known, described)
    except OSError as e:
        raise UserError(f"cannot use {out}: {e.strerror}") from None


def result_file(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.name / "result.json"


def run_cell(
    config: Config,
    cell: Cell,
    out: Path,
    pool: Pool | None,
    workers: int,
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    done = result_file(out, cell)
    if done.exists():
        return json.loads(done.read_text())
    folder = done.parent
    folder.mkdir(parents=True, exist_ok=True)
    job = build_job(config, cell)
    checkpoints = Checkpoints(folder, fingerprint(config, cell, job.phases))
    begin = None
    began = time.monotonic()
    if len(job.phases) > 1 and isinstance(job.phases[0].method, FedAvg) and checkpoints.newest() is None:
        begin = shared_warmup(config, cell, job, out, pool, workers, watch, should_stop)
    with engine_for(job, pool, workers, config.store, folder) as engine:
        finished = run(
            job,
            engine,
            checkpoints=checkpoints,
            begin=begin,
            watch=lambda p: watch(cell, p),
            should_stop=should_stop,
        )
        if config.save_models:
            save_models(config, cell, job, engine, finished.w, folder, finished.lines[-1])
    result = {
        "label": cell.label,
        "seed": cell.seed,
        "method": json.loads(config.methods[cell.label].model_dump_json()),
        "phases": [{"rounds": p.rounds, **asdict(p.method)} for p in job.phases],
        "seconds": finished.lines[-1]["seconds"] if begin is None else time.monotonic() - began,
        "machine": machine(),
        "data_note": job.data.note,
        "lines": finished.lines,
    }
    write_json(done, json.loads(json.dumps(result, default=str)))
    checkpoints.remove()
    return result


def shared_warmup(
    config: Config,
    cell: Cell,
    job: Job,
    out: Path,
    pool: Pool | None,
    workers: int,
    watch: Callable[[Cell, Progress], None],
    should_stop: Callable[[], bool],
) -> tuple[int, Tensor, list[dict[str, Any]]]:
    """(rounds, w, metrics) of the FedAvg phase that this cell begins with, trained once for all cells that do so.

    FedAvg's clients keep nothing between rounds, so w is all there is to share; the result is the same bits.
    """
    only = replace(job, phases=job.phases[:1], plans=[{} for _ in job.plans])
    key = fingerprint(config, cell, only.phases)
    folder = out / "shared" / key
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, key)
    with engine_for(only, pool, workers, config.store, folder) as engine:

        def tell(p: Progress) -> None:
            watch(cell, replace(p, rounds=job.rounds))

        finished = run(only, engine, checkpoints=checkpoints, watch=tell, should_stop=should_stop)
    return only.rounds, finished.w, finished.lines


def save_models(
    config: Config, cell: Cell, job: Job, engine: Engine, w: Tensor, folder: Path, line: dict[str, Any]
) -> None:
    """models/client-000.safetensors and so on: what each client ships, packed and checked against its budget."""
    target = folder / "models"
    target.mkdir(exist_ok=True)
    judge, data = Judge(job.module, job.loss), job.data
    budgets = [parse_size(text) for text in config.budgets()]
    for client in range(len(job.parts)):
        model = engine.deployed(job.rounds - 1, w, client)
        module = judge.load(model.x, job.calibration(client))
        test = line["clients"]["test"][client] if "clients" in line else line["test"]
        allowed = budgets[client % len(budgets)] if budgets and model.codebook else None
        about = describe(config, cell, data, job.name(client), test, allowed)
        written = save(target / f"client-{client:03d}.safetensors", module, model.codebook, about=about)
        if allowed is not None and written > allowed:
            raise Failed(f"{job.name(client)}: its file has {written} bytes, over its budget of {allowed}")


def fingerprint(config: Config, cell: Cell, phases: list[Phase] | Any) -> str:
    """What a cell's numbers depend on, as a short hash."""
    described = json.loads(config.model_dump_json())
    parts = {key: described[key] for key in SHARED if key in described}
    parts["seed"] = cell.seed
    parts["phases"] = [{"rounds": p.rounds, **asdict(p.method)} for p in phases]
    parts["bits"] = described["methods"][cell.label]["bits"] or [described["bits"], described["budget"]]
    if all(isinstance(p.method, FedAvg) for p in phases):
        del parts["bits"]  # no client is quantized
    parts["local_steps"] = config.methods[cell.label].steps_per_round(config.local_steps)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What a number was measured on."""
    packages = {name: version(name) for name in ("qupel", "torch", "numpy")}
    return {"python": platform.python_version(), "cpus": available_cpus(), "processor": platform.machine(), **packages}


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
