"""`qupel.fit`: your own model and data, from Python."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import FULL_PRECISION, Codebook, Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data import partition, sources
from qupel.data.batches import Transform, batch, chunks, generator
from qupel.data.clients import Client, pool
from qupel.deploy import file
from qupel.deploy.about import About
from qupel.deploy.feed import described
from qupel.deploy.formats import Format, suffix, write
from qupel.deploy.pack import bits_for
from qupel.deploy.packed import Rest, known_as
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.choice import Choice, Vectorize, settled
from qupel.engine.door import check_trainable
from qupel.engine.fingerprint import of_job
from qupel.engine.identity import check_identity
from qupel.engine.inline import Inline
from qupel.engine.job import Job, standardized
from qupel.engine.rounds import Engine, Finished, Progress, run
from qupel.engine.workers import Pool, Workers
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.methods import methods
from qupel.parts.phase import Phase
from qupel.parts.quantizers import Quantizer
from qupel.parts.servers import Server
from qupel.run.config import Config, MethodConfig, SplitConfig
from qupel.run.folder import own_folder, result_file, result_of, write_result
from qupel.run.jobs import Cell, is_dense, loss_for
from qupel.run.recipes import Length, Settings, compose, find, recipes
from qupel.tasks.judge import CALIBRATION_SAMPLES, EVALUATION_BATCH, Judge
from qupel.tasks.losses import losses
from qupel.tasks.metrics import Metric, chosen
from qupel.tasks.task import Batch, Loss, call
from qupel.tasks.trees import over
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_sealed
from qupel.util.terminal import plain

Bits = int | dict[str, int]
DEFAULT_BITS = 2


@dataclass(frozen=True)
class Fit:
    """What a federation ends with: a model and a codebook per client, the global model, and the metrics by round.

    BatchNorm's statistics are measured on each client's training data, the global model's on all clients'.
    """

    models: list[nn.Module]
    codebooks: list[Codebook]
    global_model: nn.Module
    metrics: list[dict[str, Any]]
    names: list[str]
    engine: Choice  # whether clients were trained in stacks, and why
    about: About  # what every client's file says
    transforms: Sequence[Transform] = ()  # one a client, where inputs are standardized by each client's own data

    @property
    def test(self) -> list[float]:
        """Each client's test score at the end: what it is judged by, else accuracy for labels, else the loss."""
        return list(self.metrics[-1]["clients"]["test"])

    @property
    def quantized(self) -> list[dict[str, int]]:
        """Each client's quantized layers and their bits; everything else is full precision."""
        return [{slot.name: bits_for(len(c)) for slot, c in codebook} for codebook in self.codebooks]

    @property
    def left(self) -> list[dict[str, str]]:
        """Each client's parameters at full precision, and why they are."""
        pairs = zip(self.models, self.codebooks, strict=True)
        return [Layout.of(model).left(slot.name for slot in codebook.slots) for model, codebook in pairs]

    def save(self, folder: str | Path, to: Format = "packed", rest: Rest = "fp32") -> list[Path]:
        """Write every client's model and return the files.

        to    "packed": read by `load`; the command line runs it if the network is one of `qupel models`.
              "onnx": any network, runs without its code; "coreml": on Apple's devices
        rest  "fp16": what is not quantized in half precision
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        scores = self.metrics[-1].get("clients", {}).get("test") or [None] * len(self.models)
        paths = []
        for i, (model, codebook) in enumerate(zip(self.models, self.codebooks, strict=True)):
            path = folder / f"client-{i:03d}{suffix(to)}"
            told = {} if scores[i] is None or not self.about.classes else {"test": round(scores[i], 6)}
            about = replace(self.about, client=plain(self.names[i]), extra={**self.about.extra, **told})
            if self.transforms:
                about = replace(about, **self.transforms[i].scale)
            write(path, model, codebook, about, to, rest)
            paths.append(path)
        return paths


def load(path: str | os.PathLike[str], module: nn.Module | None = None) -> nn.Module:
    """The model in a packed file, ready for inference, bit for bit as it was saved.

    module: a network of your own, which is filled; without it the file must name one of `qupel models`.
    """
    packed = file.load(path)
    if module is None:
        return packed.model()
    packed.into(module)
    return module.eval()


def fit(
    model: nn.Module,
    clients: Sequence[Client | Sequence[Any]] | Mapping[str, Any],
    *,
    method: str | Sequence[Phase] = "qupel",
    quantizer: str | Quantizer | None = None,
    server: str | Server | None = None,
    bits: Bits | Sequence[Bits] | None = None,
    rounds: int = 30,
    local_steps: int = 10,
    batch: int = 20,
    loss: Loss | str | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] = (),
    judge_by: str | None = None,
    settings: Settings | None = None,
    layers: Sequence[str] | None = None,
    levels: Literal["layer", "channel"] = "layer",
    standardize: Literal["off", "client", "shared"] = "off",
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

    model:    any module that gives one tensor; its weights are where every client starts. It is not changed.
              Frozen parameters (requires_grad=False) stay as they are, at full precision.
    clients:  `Client`s, or tuples (train inputs, train targets[, test inputs, test targets]); a dict has their names.
    method:   a recipe or a method (`qupel methods`), "module:Name" of your own, or phases.
    quantizer, server: of a method; by default its own quantizer, and the mean. A name that is both a recipe's and a
              method's is the recipe's, unless one of these is given.
    bits:     for all clients or one entry each: 1 to 8, 32 for full precision, or a table layer -> bits. By default
              the method's own: 32 for FedAvg with and without tuning, 2 for all others.
    layers:   which layers get the bits: by default all of docs/layers.md but the first and the last weight.
              `Fit.quantized` and `Fit.left` tell; fewer bits than 32 for no layer at all are refused.
    levels:   one set of levels a layer, or scaled by each output "channel".
    standardize: float inputs by mean and deviation of the client's own training data, or of all clients' ("shared").
    loss:     a name, or (outputs, targets) -> mean loss; where samples have weights, (outputs, targets, weights); by
              default cross entropy for int targets, mean squared error
              for float ones.
    metrics:  names, or name -> (outputs, targets) -> number or a torchmetrics object, beside loss and accuracy.
    judge_by: what a client's score is: one of the metrics, "accuracy" or "loss"; by default accuracy for int targets.
    evaluate_sample: share of the clients that are judged on the way; at the end of a phase all are.
    diagnostics: measure what the theorems speak of at every evaluation (docs/theory.md).
    vectorize: clients trained in stacks: "on", "off", or "auto", where a quick look says that it pays.
    workers:  more than 1: that many processes; model and loss must then be importable (not defined in a notebook).
    out:      a folder for checkpoints, metrics and a summary: a fit that is killed goes on from there when called again
              with the same model, loss, data and settings; called with any other it is refused.
    """
    data = pool(clients)
    parts = partition.by_owner(data)
    job = Job(
        module=copy.deepcopy(model),
        loss=loss_for(data, losses[loss] if isinstance(loss, str) else loss),
        data=data,
        parts=parts,
        plans=[Plan()] * len(parts),
        phases=[],
        seed=seed,
        local_steps=local_steps,
        batch=batch,
        sample=sample,
        weighted=weighted,
        evaluate_every=evaluate_every,
        evaluate_sample=evaluate_sample,
        transform=Transform.of(data),
        names=data.owners,
        diagnostics=None if diagnostics == "off" else Diagnostics(diagnostics),
        metrics=chosen(metrics, judge_by),
        judge_by=judge_by or "",
    )
    job = standardized(job, standardize)
    job = job.with_phases(_phases(method, quantizer, server, settings or Settings(), rounds, job))
    asked = _own_bits(method, job.phases) if bits is None else bits
    job = replace(job, plans=_plans(model, asked, layers, len(parts), levels == "channel"))
    if bits is not None and any(job.plans) and is_dense(job.phases[-1]):
        last = methods.name_of(job.phases[-1].method)
        raise UserError(f"bits: the last phase, {last}, ships full precision; leave bits out, or change the method")
    check_trainable(job)
    checkpoints = None
    label = method if isinstance(method, str) else "own phases"
    with ExitStack() as stack:
        cell, folder = Cell(label, seed), None
        if out is not None:
            stack.enter_context(own_folder(Path(out)))
            _open(Path(out), job, label)
            folder = result_file(Path(out), cell).parent
            folder.mkdir(parents=True, exist_ok=True)
            checkpoints = Checkpoints(folder, of_job(job))
        job, choice = settled(job, vectorize, folder)
        crew = stack.enter_context(Pool(workers)) if workers > 1 else None
        engine: Engine = Workers(crew, job) if crew else stack.enter_context(Inline(job))
        finished = run(job, engine, checkpoints=checkpoints, watch=watch)
        found = _collect(job, engine, finished, choice, label)
        if out is not None and checkpoints is not None:
            _leave(Path(out), job, cell, checkpoints, finished, found)
        return found


def _own_bits(method: str | Sequence[Phase], phases: Sequence[Phase]) -> int:
    """Where none are given: those of the recipe, else full precision where no phase quantizes."""
    known = find(method).bits if isinstance(method, str) and method in recipes else None
    return known or (FULL_PRECISION if all(map(is_dense, phases)) else DEFAULT_BITS)


def _plans(
    model: nn.Module, bits: Bits | Sequence[Bits], layers: Sequence[str] | None, clients: int, channels: bool
) -> list[Plan]:
    each = list(bits) if isinstance(bits, Sequence) else [bits] * clients
    if len(each) != clients:
        raise UserError(f"bits: {len(each)} entries for {clients} clients")
    layout = Layout.of(model)
    return [plan_bits(layout, b, layers, channels) for b in each]


def _phases(
    method: str | Sequence[Phase],
    quantizer: str | Quantizer | None,
    server: str | Server | None,
    settings: Settings,
    rounds: int,
    job: Job,
) -> list[Phase]:
    """A name may be a recipe's and a method's: it is the method's where a quantizer or a server is given."""
    parts = quantizer is not None or server is not None
    if not isinstance(method, str):
        if parts:
            raise UserError("quantizer and server go with the name of a method; phases have their own")
        return list(method)
    length = Length(rounds, job.local_steps, job.steps_per_epoch)
    if method in methods and (parts or method not in recipes):
        return [compose(method, quantizer, server, settings, length)]
    recipe: Any = recipes[method]  # or what "module:Name" names
    if isinstance(recipe, type):
        return [compose(method, quantizer, server, settings, length)]
    if parts:
        raise UserError(f"quantizer and server go with a method: {', '.join(methods)}; {method} is a recipe")
    recipe = find(method)
    given = settings.model_dump(exclude_unset=True)
    return recipe.phases(Settings(**{**recipe.defaults, **given}), length)


def _open(out: Path, job: Job, label: str) -> None:
    """The run directory of a fit: what `qupel run` writes first. A fit of other settings is refused."""
    split = SplitConfig(kind="one" if len(job.parts) == 1 else "groups", clients=len(job.parts))
    names = ("local_steps", "batch", "sample", "weighted", "evaluate_every", "evaluate_sample", "upload_bound")
    same: dict[str, Any] = {name: getattr(job, name) for name in names}
    own = {label: MethodConfig(phases=tuple(job.phases))}
    config = Config(seeds=(job.seed,), split=split, rounds=job.rounds, methods=own, **same)
    described = json.loads(config.model_dump_json()) | {"fingerprint": of_job(job)}
    described["data"]["name"], described["model"]["name"] = job.data.name, ""
    known = out / "config.json"
    if not known.exists():
        write_sealed(known, described)
    check_identity(out, job.data.name, sources.identity(job.data), other_versions=True)
    if read_json(known).get("fingerprint") != described["fingerprint"]:
        raise UserError(f"{out} was made by a run with other settings; give another out, or the same settings")


def _leave(out: Path, job: Job, cell: Cell, checkpoints: Checkpoints, finished: Finished, found: Fit) -> None:
    """What `qupel run` leaves: the cell's models and result, and the summary."""
    from qupel.report.runs import read_result
    from qupel.report.summary import write_summary  # with scipy, which takes its time to load

    done = result_file(out, cell)
    files = [path.stat().st_size for path in found.save(done.parent / "models")]
    device = next(job.module.parameters()).device
    write_result(done, result_of(job, cell, checkpoints, finished, device, files))
    if job.data.classes is not None:
        write_summary([read_result(done)], out, one=len(job.parts) == 1)


def _collect(job: Job, engine: Engine, finished: Finished, choice: Choice, label: str) -> Fit:
    judge, models, codebooks = Judge(job.module, job.loss), [], []
    for client in range(len(job.parts)):
        deployed = engine.deployed(job.rounds - 1, finished.w, client)
        models.append(copy.deepcopy(judge.load(deployed.x, job.calibration(client))))
        codebooks.append(deployed.codebook)
    whole = copy.deepcopy(judge.load(finished.w[0], _everybody(job)))
    about = _about(job, whole, label)
    return Fit(models, codebooks, whole, finished.lines, list(job.names), choice, about, job.transforms)


def _everybody(job: Job) -> Iterator[Batch]:
    """Training data of all clients together for the global model's BatchNorm, drawn from its own address."""
    rows = np.concatenate([p.train_rows for p in job.parts])
    some = generator(job.seed, "calibrate all").permutation(len(rows))[:CALIBRATION_SAMPLES]
    batches = -(-len(some) // EVALUATION_BATCH)
    size = -(-len(some) // batches)
    if not job.transforms:
        yield from chunks(job.data.train.take(rows[some]), size, job.transform)
        return
    owner = np.repeat(np.arange(len(job.parts)), [len(p.train_rows) for p in job.parts])  # (rows,)
    for start in range(0, len(some), size):
        part = some[start : start + size]
        each = [batch(job.data.train, rows[part][owner[part] == k], job.transforms[k]) for k in np.unique(owner[part])]
        yield Batch(*over(lambda *leaf: torch.cat(leaf), *map(tuple, each)))


def _about(job: Job, module: nn.Module, label: str) -> About:
    """What the files say: enough to feed the model, and its name where it is one of ours."""
    data, shape = job.data, job.data.shape
    with torch.inference_mode():
        inputs = job.transform_of(0).apply(data.train.read(slice(0, 1)).inputs)
        outputs = call(module, inputs)
    classes = outputs.shape[1] if data.classes is not None and isinstance(outputs, Tensor) and outputs.ndim == 2 else 0
    how = "client" if job.transforms else "shared"
    told = {"standardize": how} if job.standardized else {}
    return About(
        model=known_as(module, shape, classes) if classes else "",
        **described(inputs),
        classes=classes,
        mean=data.mean,
        std=data.std,
        extra={"method": label, "seed": job.seed, **told},
    )
