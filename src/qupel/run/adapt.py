"""Clients that come later: from the shared model of a finished federation to a small one of their own, with no further
rounds of anybody else.

The client enters as a newcomer to the last rounds, and w stays as it is: it makes the local steps of the personal
phases, those at the end in which what a client ships depends on its own model x, and nothing that it would send is
used. Where a run ends with a shared model, there is nothing to learn but which of the models is the client's, or its
levels: one round's steps, and what ships is the shared model in the client's bits.

cells/<cell>/w.safetensors    all that this needs, in one file: the server's rows, the phases, the settings
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save as to_bytes
from torch import nn

from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.data.batches import Transform, chunks
from qupel.data.partition import Part
from qupel.data.samples import Arrays
from qupel.data.sources import Dataset
from qupel.deploy import own
from qupel.deploy.about import About
from qupel.engine.door import check_trainable
from qupel.engine.inline import Inline
from qupel.engine.job import Job, standardized
from qupel.engine.rounds import Progress
from qupel.engine.shard import Judged, Shard
from qupel.parts.base import Deployed, Rows
from qupel.parts.methods.base import quantizer_of
from qupel.parts.phase import Phase, phase_from
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.servers.mean import Mean
from qupel.tasks import zoo
from qupel.tasks.judge import EVALUATION_BATCH, Judge, Score, value
from qupel.tasks.losses import losses, with_weights
from qupel.tasks.metrics import metrics
from qupel.tasks.task import Loss
from qupel.util.errors import UserError
from qupel.util.files import check_files, read_json, write_atomic
from qupel.util.registry import imports_limited_to

FILE = "w.safetensors"
VERSION = 1
MOST_LAYERS = 1000  # of a network of ours that a file names: its parameters are one vector there, which does not tell


def layout_hash(module: nn.Module) -> str:
    """Names, order and shapes of all that is trained: networks with one hash have vectors of one meaning."""
    slots = [[slot.name, list(slot.shape)] for slot in Layout.of(module).slots]
    return hashlib.sha256(json.dumps(slots).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Origin:
    """What a finished federation leaves for those who come later.

    job: its network, loss, phases and settings; it has no clients. w: the server's last rows. model, args, loss: the
    names that a config has for them, "" for a network or a loss that only Python knows. standardize: "client" where
    every client's inputs are scaled by its own data.
    """

    job: Job
    w: Rows
    label: str
    layers: tuple[str, ...] | None = None
    channels: bool = False
    model: str = ""
    args: Mapping[str, Any] | None = None
    loss: str = ""
    standardize: str = "off"
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the job's other networks: model and args

    @classmethod
    def of(cls, job: Job, w: Rows, label: str, **names: Any) -> Origin:
        """Of a job that has run. The clock of its schedules stays that of its own clients."""
        nothing = np.empty(0, np.int64)
        data = replace(job.data, train=job.data.train.take(nothing), test=job.data.test.take(nothing))
        left = replace(
            job,
            data=data,
            parts=(),
            plans=(),
            names=(),
            network=(),
            transforms=(),
            epoch_steps=job.steps_per_epoch,
            sample=1.0,
            evaluate_sample=1.0,
            diagnostics=None,
            stacked=False,
        )
        rows = w[: len(w) - len(job.first_means)]  # who has which network is not kept, nor are their means
        return cls(left.to(torch.device("cpu")), tuple(row.cpu() for row in rows), label, **names)

    def rows(self, phase: int) -> Rows:
        """What the server sends in a phase: its last rows, or what the method makes of the model in them."""
        if phase == len(self.job.phases) - 1:
            return self.w
        return self.job.phases[phase].method.broadcast(self.w[0])

    def filled(self) -> nn.Module:
        module = copy.deepcopy(self.job.module)
        Layout.of(module).load(module, self.w[0])
        return module

    def with_networks(self, networks: Mapping[str, nn.Module]) -> Origin:
        """With others for clients that come later."""
        return replace(self, job=replace(self.job, networks={**self.job.networks, **networks}))


# --- the file ---


def find_origin(run: Path, cell: str | None = None) -> Path:
    """The file of a finished run: of its only cell, or of the one that is named, by its folder or its method's label.
    It is what the run has left, or an error."""
    if run.is_file():
        return run
    if (run / FILE).is_file():  # a federation over machines
        return run / FILE
    found = {path.parent.name: path.parent for path in sorted(run.glob(f"cells/*/{FILE}"))}
    done = {name: read_json(path / "result.json") for name, path in found.items() if (path / "result.json").exists()}
    chosen = [name for name, result in done.items() if cell is None or cell in (name, result["label"])]
    if not done:
        raise UserError(f"{run} is no finished run that keeps its shared model (cells/*/{FILE})")
    if len(chosen) != 1:
        asked = "" if cell is None else f" {cell!r}"
        raise UserError(f"{run}: one cell is needed,{asked} is {len(chosen)} of them; allowed: {', '.join(done)}")
    folder = found[chosen[0]]
    check_files(folder, {FILE: done[chosen[0]]["checksums"][FILE]})
    return folder / FILE


def write_origin(path: Path, origin: Origin) -> None:
    job, data = origin.job, origin.job.data
    trained = {slot.name for slot in Layout.of(job.module).slots}
    rest = {f"rest.{k}": v.contiguous() for k, v in job.module.state_dict().items() if k not in trained}
    described = {
        "version": VERSION,
        "label": origin.label,
        "model": origin.model,
        "args": dict(origin.args or {}),
        "layout": layout_hash(job.module),
        "loss": origin.loss,
        "metrics": [name for name in job.metrics if name in metrics],
        "layers": origin.layers,
        "channels": origin.channels,
        "phases": [replace(p, server=Mean()).table() for p in job.phases],
        "seed": job.seed,
        "local_steps": job.local_steps,
        "batch": job.batch,
        "epoch_steps": job.epoch_steps,
        "augment": job.transform.augment,
        "shape": list(data.shape),
        "standardize": origin.standardize,
        "judge_by": job.judge_by,
        "networks": {name: dict(how) for name, how in origin.named.items() if name in job.networks},
        **{key: getattr(data, key) for key in ("name", "classes", "labels", "mean", "std", "mirror", "note")},
    }
    rows = {f"w{k}": row.contiguous() for k, row in enumerate(origin.w)}
    write_atomic(path, to_bytes({**rows, **rest}, {"qupel": json.dumps(described, default=str)}))


def modules_of(run: Path) -> set[str]:
    """The modules of the user's own that the config of a run names: in no installed package, nor of Python itself."""
    if not (run / "config.json").is_file():
        return set()
    found: set[str] = set()

    def look(value: Any) -> None:
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(inner)
        if isinstance(value, str) and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value):
            found.add(value.partition(":")[0])

    look(read_json(run / "config.json"))
    own.modules_here()
    return {module for module in found if not own.is_installed(module)}


def read_origin(
    path: Path, module: nn.Module | None = None, loss: Loss | str | None = None, allow: Iterable[str] = ()
) -> Origin:
    """What `write_origin` wrote. module, loss: where only Python knows them; they are compared with the file. allow:
    modules that the file may name parts from; a file is anybody's, and nothing else is imported because it says so."""
    with imports_limited_to(allow):
        return _origin(path, module, loss)


def _origin(path: Path, module: nn.Module | None, loss: Loss | str | None) -> Origin:
    described, tensors = _read(path)
    try:
        if described["version"] != VERSION:
            raise UserError(f"{path} is of version {described['version']}, this is {VERSION}")
        shape, classes, seed = tuple(described["shape"]), described["classes"], described["seed"]
        if module is None:
            if not described["model"]:
                raise UserError(f"{path}: its network is one of your own: give it, adapt(..., model=net)")
            if described["model"] in zoo.networks:
                own.check_args(About(model=described["model"], args=described["args"]), MOST_LAYERS)
            module = zoo.build(described["model"], shape, classes, seed, described["args"])
        module, named = copy.deepcopy(module), described.get("networks", {})
        networks = {}
        for name, how in named.items():
            if how["model"] in zoo.networks:
                own.check_args(About(model=how["model"], args=how["args"]), MOST_LAYERS)
            networks[name] = zoo.build(how["model"], shape, classes, seed, how["args"])
        if (mine := layout_hash(module)) != described["layout"]:
            raise UserError(f"{path} is of a network with layout {described['layout']}, this one has {mine}")
        rest = {k.removeprefix("rest."): v for k, v in tensors.items() if k.startswith("rest.")}
        module.load_state_dict(rest, strict=False)
        if loss is None and not described["loss"]:
            raise UserError(f"{path}: its loss is one of your own: give it, adapt(..., loss=...)")
        loss = loss or described["loss"]
        none = Arrays(torch.empty(0, *shape), torch.empty(0, dtype=torch.float32 if classes is None else torch.int64))
        told: dict[str, Any] = {key: described[key] for key in ("name", "classes", "mirror", "note")}
        told |= {key: tuple(described[key]) for key in ("labels", "mean", "std")}
        data = Dataset(train=none, test=none, **told)
        job = Job(
            module=module,
            loss=losses[loss] if isinstance(loss, str) else loss,
            data=data,
            parts=(),
            plans=(),
            phases=[phase_from(table, f"{path}, phase {k}") for k, table in enumerate(described["phases"], 1)],
            transform=replace(Transform.of(data), augment=described["augment"]),
            metrics={name: metrics[name] for name in described["metrics"]},
            judge_by=described["judge_by"],
            networks=networks,
            **{key: described[key] for key in ("seed", "local_steps", "batch", "epoch_steps")},
        )
        layers = None if described["layers"] is None else tuple(described["layers"])
        w = tuple(tensors[f"w{k}"] for k in range(sum(name[:1] == "w" for name in tensors)))
        names = {key: described[key] for key in ("model", "args", "loss", "standardize")}
        return Origin(job, w, described["label"], layers, described["channels"], **names, named=named)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"{path} is damaged: not the shared model of a run ({e!r:.80})") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {})["qupel"])
            return described, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a run keeps its shared model where save_models is on") from None
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as e:
        raise UserError(f"{path} is damaged: not the shared model of a run ({e!r:.80})") from None


# --- adapting ---


@dataclass(frozen=True)
class Adapted:
    """What new clients end with, in their order. plain: w as it is, judged on their data; faults: by client, why it
    stopped before its last round, with the model that it had then."""

    job: Job
    models: list[Deployed]
    judged: list[Judged]
    plain: list[Score]
    faults: Mapping[int, str]
    seconds: float

    def _value(self, score: Score) -> float | None:
        return value(score, self.job.judge_by) if score.count else None

    def told(self) -> dict[str, Any]:
        """As result.json has it: test scores of the adapted models and of w, how many samples, other metrics."""
        tests = [j.test for j in self.judged]
        found: dict[str, Any] = {
            "test": [self._value(s) for s in tests],
            "count": [s.count for s in tests],
            "global": [self._value(s) for s in self.plain],
            "bits": [j.bits for j in self.judged],
            "bytes": [j.bytes for j in self.judged],
            "seconds": round(self.seconds, 3),
        }
        names = dict.fromkeys(name for s in tests for name in s.more)
        found |= {name: [s.more.get(name) for s in tests] for name in names}
        return found | ({"faults": {self.job.name(i): why for i, why in self.faults.items()}} if self.faults else {})


def adapt_clients(
    origin: Origin,
    data: Dataset,
    parts: Sequence[Part],
    plans: Sequence[Plan],
    names: Sequence[str] = (),
    network: Sequence[str] = (),
    watch: Callable[[Progress], None] = lambda _: None,
) -> Adapted:
    """Each of these clients for itself. data: of the same kind as the federation's; only its arrays are looked at.
    network: of each client, one of the origin's by name, "" the shared one; none: all have that."""
    began = time.monotonic()
    known = origin.job.data
    if (data.classes is None) != (known.classes is None):
        kinds = ("labels of classes", "numbers")
        here, theirs = (kinds[d.classes is None] for d in (data, known))
        raise UserError(f"targets are {here}; the federation was trained on {theirs}")
    phases = list(origin.job.phases)
    if any(plans):
        phases[-1] = _quantizing(phases[-1])
    mine, transform = replace(known, train=data.train, test=data.test), origin.job.transform
    if data.mean and not known.mean:  # of a federation over machines: every client normalizes by its own
        mine = replace(mine, mean=data.mean, std=data.std)
        transform = replace(Transform.of(mine), augment=transform.augment)
    job = replace(origin.job, data=mine, parts=parts, plans=plans, names=names, phases=phases, transform=transform)
    job = replace(job, network=network)
    if data.train.read(slice(0, 1)).given:
        job = replace(job, loss=with_weights(job.loss))
    if origin.standardize == "client":
        job = standardized(job, "client")
    check_trainable(job)
    left, faults = list(range(len(parts))), {}
    with Inline(job) as engine:
        rounds = own_rounds(engine.shard, origin)
        for k, round in enumerate(rounds, 1):
            losses: list[float] = []
            for done in engine.train(round, origin.rows(job.locate(round)[0]), left):
                losses.append(done.info.get("loss", done.info.get("loss_quantized", float("nan"))))
                if done.fault:
                    faults[done.client] = done.fault
            left = [client for client in left if client not in faults]
            watch(Progress(k, len(rounds), float(np.mean(losses)) if losses else float("nan"), float("nan"), None, ()))
        last, everyone = job.rounds - 1, range(len(parts))
        judged = sorted(engine.evaluate(last, origin.w, everyone), key=lambda j: j.client)
        models = [engine.deployed(last, origin.w, i) for i in everyone]
        judge = Judge(job.module, job.loss, job.metrics)
        plain = [
            judge.score(
                origin.w[0], job.calibration(i), chunks(parts[i].test(mine), EVALUATION_BATCH, job.transform_of(i))
            )
            for i in everyone
        ]
    return Adapted(job, models, judged, plain, faults, time.monotonic() - began)


def own_rounds(shard: Shard, origin: Origin) -> list[int]:
    """The rounds of the personal phases at the end; the last one alone where there are none."""
    job, first = shard.job, shard.job.rounds
    for phase in reversed(range(len(job.phases))):
        if not _personal(shard, phase, origin.rows(phase)):
            break
        first -= job.phases[phase].rounds
    return list(range(min(first, job.rounds - 1), job.rounds))


def _personal(shard: Shard, phase: int, w: Rows) -> bool:
    """Whether what a client ships depends on its own model x, whatever the method."""
    method, state = shard.job.phases[phase].method, shard.state(0, phase, w)
    return not torch.equal(method.deployed(replace(state, x=state.x + 1)).x, method.deployed(state).x)


def _quantizing(phase: Phase) -> Phase:
    """A phase that ships full precision ships the same quantized afterwards."""
    if quantizer_of(phase.method) != "none":
        return phase
    method: Any = phase.method
    if not hasattr(method, "quantizer"):
        raise UserError(f"bits: {type(method).__name__} ships full precision; ask for 32 bits")
    return replace(phase, method=replace(method, quantizer=Afterwards()))
