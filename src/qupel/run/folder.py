"""A run directory: opened by one process alone, its finished cells believed only where nothing is damaged.

RUN/config.json                  the whole config; identity.json: the data's checksum, versions; lock
RUN/shared/...                   what cells share: the FedAvg warm-up of equal recipes, trained once a seed
RUN/cells/<label>-s<seed>/       metrics.jsonl, engine.json, checkpoints/ while running, result.json when done, models/;
                                 w.safetensors, the shared model for clients that come later (`adapt`); scores.npz where
                                 there are many clients
RUN/summary.json, summary.md     the comparison
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from qupel.core.layout import Coverage, Layout
from qupel.data import sources
from qupel.deploy.budget import parse_size
from qupel.deploy.file import save
from qupel.engine import scores
from qupel.engine.identity import check_identity
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Failed, Finished
from qupel.parts.base import Deployed, Rows
from qupel.run import adapt
from qupel.run.adapt import Adapted, Origin
from qupel.run.config import Config, explain, merge
from qupel.run.jobs import (
    Cell,
    build_plans,
    client_names,
    data_of,
    describe,
    split_clients,
)
from qupel.run.networks import model_name, network_names, network_of, networks_of
from qupel.tasks.judge import Judge
from qupel.util.errors import UserError
from qupel.util.files import LOCK, Damaged, check_files, checksums, locked, read_json, write_sealed
from qupel.util.machine import device_name, machine


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
            usual = json.loads(Config(methods=config.methods).model_dump_json())
            if merge(usual, before) != described:  # what an older version did not know has its default
                raise UserError(f"{out} was made with another config; resume it with that one, or give another --out")
        else:
            check_own(out)
            write_sealed(known, described)
        check_identity(out, config.data.name, identity(config), other_versions)
    except OSError as e:
        raise UserError(f"cannot use {out}: {e.strerror}") from None


RETIRED = ("fails",)  # settings that are no more: runs that were made with them are still read


def read_config(run: Path) -> Config:
    """The config of a run directory."""
    known = read_json(run / "config.json")
    for method in known.get("methods", {}).values():
        for name in RETIRED:
            method.pop(name, None)
    try:
        return Config.model_validate_json(json.dumps(known))
    except ValidationError as e:
        raise UserError(f"{run / 'config.json'}: {explain(e)}") from None


def grown(folder: Path, config: Config) -> Config:
    """The config of a directory with these methods and seeds beside those that it has; else it must be the same."""
    known = folder / "config.json"
    if not known.exists():
        return config
    before = read_config(folder)
    rest = {"seeds": (0,), "methods": {}}
    if before.model_copy(update=rest) != config.model_copy(update=rest):
        raise UserError(f"{folder} was made with other settings of the federation; give another folder")
    for label, method in before.methods.items():
        if config.methods.get(label, method) != method:
            raise UserError(f"{folder} was made with other settings of {label!r}; give another folder")
    seeds = tuple(sorted({*before.seeds, *config.seeds}))
    config = config.model_copy(update={"seeds": seeds, "methods": {**config.methods, **before.methods}})
    write_sealed(known, json.loads(config.model_dump_json()))
    return config


@lru_cache(maxsize=2)
def _checksum(data: sources.Dataset) -> str:
    return sources.identity(data)


def identity(config: Config) -> str:
    """A checksum of the data that a config names."""
    return _checksum(data_of(config))


def result_file(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.name / "result.json"


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


def result_of(
    job: Job,
    cell: Cell,
    fingerprint: str,
    engine: dict[str, Any],
    finished: Finished,
    device: torch.device,
    files: list[int] | None,
) -> dict[str, Any]:
    """What every run says of a cell, however it was started. engine: how clients were trained (`choice.Choice`); files:
    bytes of each client's."""
    quantized = list(dict.fromkeys(name for plan in job.plans for name in plan))
    coverages = dict.fromkeys(str(c) for c in covered(job)) if quantized else {}
    return {
        "label": cell.label,
        "seed": cell.seed,
        "fingerprint": fingerprint,
        "phases": [p.table() for p in job.phases],
        "seconds": finished.lines[-1]["seconds"],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {**machine(), "device": device_name(device)},
        "quantized": quantized,
        **({"precision": "; ".join(coverages)} if quantized else {}),
        **({"networks": [job.network_of(i) for i in range(len(job.parts))]} if job.networks else {}),
        "engine": engine,
        **({"owners": len(job.parts)} if job.data.owners and job.names else {}),  # they are the clients
        "data_note": job.data.note,
        "classes": job.data.classes,
        **({} if files is None else {"files": files}),
        "lines": [scores.short(line) for line in finished.lines],
    }


def covered(job: Job) -> Iterator[Coverage]:
    """What is quantized of each network that clients with bits have."""
    for name, module in job.modules.items():
        plans = [plan for i, plan in enumerate(job.plans) if plan and job.network_of(i) == name]
        if plans:
            yield Coverage.of(Layout.of(module), list(dict.fromkeys(layer for plan in plans for layer in plan)))


def save_models(
    config: Config, cell: Cell, job: Job, engine: Engine, w: Rows, folder: Path, line: dict[str, Any]
) -> list[int]:
    """models/client-000.safetensors and so on: what each client ships, packed and checked against its budget. Returns
    the bytes of each file."""
    target = folder / "models"
    target.mkdir(exist_ok=True)
    models = (engine.deployed(job.rounds - 1, w, client).cpu() for client in range(len(job.parts)))
    return write_models(config, cell, job, models, line["clients"]["test"], target, "client")


def write_models(
    config: Config,
    cell: Cell,
    job: Job,
    models: Iterable[Deployed],
    tests: Sequence[float | None],
    target: Path,
    prefix: str,
) -> list[int]:
    judges, sizes = {name: Judge(module, job.loss) for name, module in job.modules.items()}, []
    budgets = [parse_size(text) for text in config.budgets()]
    for client, model in enumerate(models):
        module = judges[job.network_of(client)].load(model.x, job.calibration(client))
        allowed = budgets[client % len(budgets)] if budgets and model.codebook else None
        network = network_of(config, cell, client)
        about = describe(config, cell, job.data_of(client), job.name(client), tests[client], allowed, network)
        written = save(target / f"{prefix}-{client:03d}.safetensors", module, model.codebook, about=about)
        if allowed is not None and written > allowed:
            raise Failed(f"{job.name(client)}: its file has {written} bytes, over its budget of {allowed}")
        sizes.append(written)
    return sizes


def origin_of(config: Config, cell: Cell, job: Job, w: Rows) -> Origin:
    """What a cell leaves for clients that come later."""
    names: dict[str, Any] = {"model": model_name(config, cell), "args": config.model.args}
    names |= {"loss": config.task.loss or "cross_entropy", "standardize": config.data.standardize}
    names["named"] = {n.title: {"model": n.name, "args": n.args} for n in networks_of(config, cell)}
    return Origin.of(job, w, cell.label, layers=config.model.layers, channels=config.model.levels == "channel", **names)


def adapt_unseen(config: Config, cell: Cell, job: Job, origin: Origin, folder: Path) -> dict[str, Any]:
    """The clients that were kept out of training, adapted and judged; their models beside the others' where these are
    kept. Returns what the result says of them, under "unseen" where there are any."""
    _, parts = split_clients(config, job.data, cell.seed)
    if not parts:
        return {}
    plans = build_plans(config, cell, job.modules, job.data, len(parts))
    names = client_names(config, job.data, parts) or [f"unseen {i}" for i in range(len(parts))]
    network = network_names(config, cell, len(parts)) if job.networks else ()
    done: Adapted = adapt.adapt_clients(origin, job.data, parts, plans, names, network)
    told = done.told()
    if config.save_models:
        told["files"] = write_models(config, cell, done.job, done.models, told["test"], folder / "models", "unseen")
    return {"unseen": told}
