"""`qupel.fit`: your own model and data, from Python."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from qupel.algorithms import Phase
from qupel.codebook import Codebook, plan_bits
from qupel.data import partition, sources
from qupel.data.batches import Transform
from qupel.deploy.about import About
from qupel.deploy.file import save
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.choice import Choice, Vectorize, settled
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Finished, Progress, check_trainable, run
from qupel.engine.workers import Pool, Workers
from qupel.errors import UserError
from qupel.evaluate import Judge
from qupel.flat import Layout
from qupel.oracle import Loss
from qupel.recipes import RECIPES, Budget, Settings
from qupel.terminal import plain

Array = np.ndarray | Tensor
Bits = int | dict[str, int]


@dataclass(frozen=True)
class Client:
    """One client's data. Inputs: float, or uint8 images (n, C, H, W); targets: int labels, or float."""

    train_inputs: Array
    train_targets: Array
    test_inputs: Array | None = None
    test_targets: Array | None = None
    name: str = ""


@dataclass(frozen=True)
class Fit:
    """What a federation ends with: a model and a codebook per client, the global model, and the metrics by round."""

    models: list[nn.Module]
    codebooks: list[Codebook]
    global_model: nn.Module
    metrics: list[dict[str, Any]]
    names: list[str]
    engine: Choice  # whether clients were trained in stacks, and why

    @property
    def test(self) -> list[float]:
        """Each client's test score at the end: accuracy for labels, else the loss."""
        return list(self.metrics[-1]["clients"]["test"])

    def save(self, folder: str | Path) -> list[Path]:
        """Write every client's model as a packed file."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"client-{i:03d}.safetensors" for i in range(len(self.models))]
        for path, model, codebook, name in zip(paths, self.models, self.codebooks, self.names, strict=True):
            save(path, model, codebook, about=About(client=plain(name)))
        return paths


def fit(
    model: nn.Module,
    clients: Sequence[Client | Sequence[Array]],
    *,
    method: str | Sequence[Phase] = "qupel",
    bits: Bits | Sequence[Bits] = 2,
    rounds: int = 30,
    local_steps: int = 10,
    batch: int = 20,
    loss: Loss | None = None,
    settings: Settings | None = None,
    layers: Sequence[str] | None = None,
    seed: int = 0,
    sample: float = 1.0,
    weighted: bool = False,
    evaluate_every: int = 10,
    evaluate_sample: float = 1.0,
    diagnostics: Literal["off", "cheap", "full"] = "off",
    vectorize: Vectorize = "auto",
    workers: int = 1,
    out: str | Path | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Fit:
    """Train a personal model for every client and return them all.

    model:    any module with Linear or Conv layers; its weights are where every client starts. It is not changed.
    clients:  `Client`s, or tuples (train inputs, train targets[, test inputs, test targets]).
    method:   a recipe (`qupel methods`), or phases of your own.
    bits:     for all clients or one entry each: 1 to 8, 32 for full precision, or a table layer -> bits.
    loss:     (outputs, targets) -> mean loss; cross entropy for int targets and mean squared error for float ones.
    evaluate_sample: share of the clients that are judged on the way; at the end of a phase all are.
    diagnostics: measure what the theorems speak of at every evaluation (docs/theory.md).
    vectorize: clients trained in stacks: "on", "off", or "auto", where a quick look says that it pays.
    workers:  more than 1: that many processes; model and loss must then be importable (not defined in a notebook).
    out:      a folder for checkpoints: a fit that is killed goes on from there when called again.
    """
    people = [c if isinstance(c, Client) else _client(c, i) for i, c in enumerate(clients)]
    if not people:
        raise UserError("clients: at least one is needed")
    data, parts = _pool(people)
    layout = Layout.of(model)
    each = list(bits) if isinstance(bits, Sequence) else [bits] * len(people)
    if len(each) != len(people):
        raise UserError(f"bits: {len(each)} entries for {len(people)} clients")
    default = nn.functional.mse_loss if data.train.targets.is_floating_point() else nn.functional.cross_entropy
    job = Job(
        module=copy.deepcopy(model),
        loss=loss or default,
        data=data,
        parts=parts,
        plans=[plan_bits(layout, b, layers) for b in each],
        phases=[],
        seed=seed,
        local_steps=local_steps,
        batch=batch,
        sample=sample,
        weighted=weighted,
        evaluate_every=evaluate_every,
        evaluate_sample=evaluate_sample,
        transform=Transform.of(data),
        names=[p.name or f"client {i}" for i, p in enumerate(people)],
        diagnostics=diagnostics,
    )
    job = job.with_phases(_phases(method, settings or Settings(), rounds, job))
    check_trainable(job)
    checkpoints = None
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(Path(out), _fingerprint(job))
    job, choice = settled(job, vectorize, Path(out) if out is not None else None)
    if workers > 1:
        with Pool(workers) as pool:
            engine: Engine = Workers(pool, job)
            return _collect(job, engine, run(job, engine, checkpoints=checkpoints, watch=watch), choice)
    with Inline(job) as engine:
        return _collect(job, engine, run(job, engine, checkpoints=checkpoints, watch=watch), choice)


def _client(arrays: Sequence[Array], i: int) -> Client:
    if len(arrays) not in {2, 4}:
        raise UserError(f"client {i}: {len(arrays)} arrays; allowed are train inputs, targets[, test inputs, targets]")
    return Client(arrays[0], arrays[1], *arrays[2:])  # type: ignore[arg-type]


def _phases(method: str | Sequence[Phase], settings: Settings, rounds: int, job: Job) -> list[Phase]:
    if not isinstance(method, str):
        return list(method)
    if method not in RECIPES:
        raise UserError(f"unknown method {method!r}; allowed: {', '.join(RECIPES)}, or a list of phases")
    recipe = RECIPES[method]
    given = settings.model_dump(exclude_unset=True)
    known = {k: v for k, v in recipe.defaults.items() if k in Settings.model_fields}
    budget = Budget(rounds, job.local_steps, job.steps_per_epoch)
    return recipe.phases(Settings(**{**known, **given}), budget)


def _pool(people: Sequence[Client]) -> tuple[sources.Dataset, list[partition.Part]]:
    """All clients' samples as one data set, and the rows that are each client's."""

    def rows(counts: Sequence[int]) -> list[np.ndarray]:
        ends = np.cumsum([0, *counts])
        return [np.arange(a, b) for a, b in pairwise(ends)]

    tested = [p for p in people if p.test_inputs is not None and p.test_targets is not None]
    train = [np.concatenate([np.asarray(a) for a in arrays]) for arrays in _columns(people, "train")]
    test = [np.concatenate([np.asarray(a) for a in arrays]) for arrays in _columns(tested, "test")] if tested else None
    data = sources.from_arrays(*train, *(test or [a[:1] for a in train]))
    test_rows = rows([len(p.test_inputs) if p.test_inputs is not None else 0 for p in people])
    train_rows = rows([len(p.train_inputs) for p in people])
    return data, [partition.Part(a, b) for a, b in zip(train_rows, test_rows, strict=True)]


def _columns(people: Sequence[Client], split: str) -> list[list[Array]]:
    for i, p in enumerate(people):
        inputs, targets = getattr(p, f"{split}_inputs"), getattr(p, f"{split}_targets")
        if len(inputs) != len(targets):
            who = p.name or f"client {i}"
            raise UserError(f"{who}: {len(inputs)} {split} inputs but {len(targets)} {split} targets")
    return [[getattr(p, f"{split}_{kind}") for p in people] for kind in ("inputs", "targets")]


def _fingerprint(job: Job) -> str:
    parts = [repr([asdict(p.method) | {"rounds": p.rounds} for p in job.phases]), repr(job.plans), str(job.seed)]
    parts += [str(job.local_steps), str(job.batch), str(job.sample), str(job.weighted), repr(Layout.of(job.module))]
    digest = hashlib.sha256("\n".join(parts).encode())
    for tensor in (Layout.of(job.module).flatten(job.module), job.data.train.inputs, job.data.train.targets):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def _collect(job: Job, engine: Engine, finished: Finished, choice: Choice) -> Fit:
    judge, models, codebooks = Judge(job.module, job.loss), [], []
    for client in range(len(job.parts)):
        deployed = engine.deployed(job.rounds - 1, finished.w, client)
        models.append(copy.deepcopy(judge.load(deployed.x, job.calibration(client))))
        codebooks.append(deployed.codebook)
    whole = copy.deepcopy(job.module)
    Layout.of(whole).load(whole, finished.w)
    return Fit(models, codebooks, whole, finished.lines, list(job.names), choice)
