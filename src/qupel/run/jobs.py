"""From a config to the jobs of its cells, one for each method and seed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data import partition, sources
from qupel.data.batches import Transform
from qupel.deploy.about import About
from qupel.deploy.budget import Planner, parse_size
from qupel.deploy.feed import described
from qupel.deploy.file import load
from qupel.deploy.own import facts
from qupel.engine.door import check_trainable
from qupel.engine.fingerprint import digest
from qupel.engine.job import Job, standardized
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.methods.base import quantizer_of, sends
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.hedged import Hedged
from qupel.parts.phase import Phase
from qupel.parts.servers import servers
from qupel.run.config import Config, MethodConfig
from qupel.run.networks import build_networks, model_name, network_names, network_of, networks_of
from qupel.run.privacy import with_privacy
from qupel.run.recipes import compose, find
from qupel.run.sections import NetworkConfig
from qupel.run.settings import Length
from qupel.tasks import zoo
from qupel.tasks.losses import losses, with_weights
from qupel.tasks.task import Loss
from qupel.util.errors import UserError

SHARED = ("seed", "data", "split", "model", "task", "local_steps", "batch", "sample", "sampling", "weighted")


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


def source_of(config: Config, cell: Cell) -> Cell | None:
    """The cell whose finished models this one quantizes; None: it is trained."""
    label = config.methods[cell.label].of
    return None if label is None else Cell(label, cell.seed)


def one_cell(config: Config, name: str | None) -> Cell:
    """The cell of this name; without one, the only cell that there is."""
    found = cells(config)
    meant = [cell for cell in found if name in {None, cell.name}]
    if len(meant) != 1:
        said = "one at a time is run here" if name is None else f"--cell {name!r} is none of them"
        known = ", ".join(cell.name for cell in found)
        raise UserError(f"this config has {len(found)} runs (methods x seeds), {said}; give --cell, one of {known}")
    return meant[0]


def data_of(config: Config) -> sources.Dataset:
    """The data that a config names; they are kept for the next who asks."""
    data = config.data
    return load_data(data.name, data.folder, data.limit, json.dumps(data.args, sort_keys=True))


@lru_cache(maxsize=2)
def load_data(name: str, folder: Path | None, limit: int | None, args: str = "{}") -> sources.Dataset:
    """args: as JSON."""
    return sources.load(name, folder, limit, json.loads(args))


def split_data(config: Config, data: sources.Dataset, seed: int) -> list[partition.Part]:
    """The clients that train."""
    return split_clients(config, data, seed)[0]


def split_clients(
    config: Config, data: sources.Dataset, seed: int
) -> tuple[list[partition.Part], list[partition.Part]]:
    """(clients that train, clients that join when that is over)."""
    parts, joining = _split(config, data, seed), []
    if config.split.blind:
        nothing = np.empty(0, np.int64)
        parts = [replace(part, test_rows=nothing, test_from_train=False) for part in parts]
    if is_natural(config, data) and data.unseen:
        joining = [parts[i] for i in data.unseen]
        parts = [part for i, part in enumerate(parts) if i not in set(data.unseen)]
    if config.split.unseen:
        parts, out = partition.leave_out(parts, config.split.unseen, seed)
        joining += out
    return parts, [] if config.split.blind else joining


def _split(config: Config, data: sources.Dataset, seed: int) -> list[partition.Part]:
    """Who gets what. Data that come as clients are their own federation, unless they are to be dealt out anew."""
    s, train, test = config.split, data.train, data.test
    labels, held = train.labels, test.labels
    if is_natural(config, data):
        parts = partition.by_owner(data)
    elif s.kind in {"classes", "dirichlet"}:
        if labels is None or held is None:
            raise UserError(f"split.kind = {s.kind!r} needs class labels, which {data.name} has not; try iid or groups")
        if s.kind == "dirichlet":
            parts = partition.dirichlet(labels, held, s.clients, s.alpha, seed)
        else:
            sizes = (s.train_per_client, s.test_per_client)
            parts = partition.by_class(labels, held, s.clients, s.classes, seed, *sizes)
    elif s.kind == "groups":
        if train.groups is None:
            raise UserError(f"split.kind = 'groups' needs a group column, which {data.name} has not")
        parts = partition.by_group(train.groups, test.groups, seed=seed)
    else:
        clients = 1 if s.kind == "one" else s.clients
        parts = partition.iid(len(train), len(test), clients, seed, s.train_per_client, s.test_per_client)
    return partition.hold_out(parts, s.validation, seed, labels) if s.validation else parts


def is_natural(config: Config, data: sources.Dataset) -> bool:
    """Whether the owners of the samples are the clients."""
    return bool(data.owners) and config.split.kind in {"classes", "groups"}


def client_names(config: Config, data: sources.Dataset, parts: Sequence[partition.Part]) -> tuple[str, ...]:
    """The owners', where they are the clients."""
    if not is_natural(config, data) or data.train.groups is None:
        return ()
    return tuple(data.owners[int(data.train.groups[part.train_rows[0]])] for part in parts)


def build_model(config: Config, data: sources.Dataset, cell: Cell) -> nn.Module:
    if data.classes is None and config.task.loss is None:
        raise UserError(f"{data.name} has no class labels: say which loss is meant ([task] loss = ...)")
    shape = data.shape
    module = zoo.build(model_name(config, cell), shape, data.classes, cell.seed, config.model.args)
    if config.model.start is not None:
        load(Path(str(config.model.start).replace("{seed}", str(cell.seed)))).into(module)
    return module


def usual_loss(data: sources.Dataset) -> str:
    """Cross entropy for whole numbers, else the squared error."""
    kind = data.train.kinds[1]
    if not (isinstance(kind, tuple) and isinstance(kind[0], torch.dtype)):
        raise UserError("loss: where a sample has several targets, give a function (outputs, targets) -> mean loss")
    return "mse" if kind[0].is_floating_point else "cross_entropy"


def loss_for(data: sources.Dataset, loss: Loss | None) -> Loss:
    """The loss on this data, by default the usual one; weighted where samples are."""
    loss = losses[usual_loss(data)] if loss is None else loss
    weighted = len(data.train) > 0 and bool(data.train.read(slice(0, 1)).given)
    return with_weights(loss) if weighted else loss


def build_job(config: Config, cell: Cell, *, check: bool = True) -> Job:
    """The job of one cell. Cells of a seed share data, split and initial model, so that comparisons are paired.
    check: whether model and loss are tried on the data; who only asks what would be run need not."""
    data = data_of(config)
    parts = split_data(config, data, cell.seed)
    module, networks = build_model(config, data, cell), build_networks(config, data, cell)
    plans = build_plans(config, cell, {"": module, **networks}, data, len(parts))
    job = assemble(config, cell, module, data, parts, plans, networks)
    if check:
        check_trainable(job)
    if (source := source_of(config, cell)) is not None:
        taken = build_job(config, source, check=check)
        if any(taken.plans) and not all(is_dense(p) for p in taken.phases):
            raise UserError(f"methods.{cell.label}.of = {source.label!r}: its models are quantized; give it bits = 32")
    return job


def assemble(
    config: Config,
    cell: Cell,
    module: nn.Module,
    data: sources.Dataset,
    parts: Sequence[partition.Part],
    plans: Sequence[Plan],
    networks: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Job:
    """The settings of a cell on a model, data and clients. networks: those that are not the shared one, by name."""
    method = config.methods[cell.label]
    job = Job(
        module=module,
        loss=loss_for(data, losses[config.task.loss or "cross_entropy"]),
        data=data,
        parts=parts,
        plans=plans,
        phases=[],
        seed=cell.seed,
        local_steps=method.steps_per_round(config.local_steps),
        batch=config.batch,
        sample=config.sample,
        sampling=config.sampling,
        weighted=config.weighted,
        evaluate_every=config.evaluate_every,
        evaluate_sample=config.evaluate_sample,
        checkpoint_every=config.checkpoint_every,
        on_bad_upload=config.on_bad_upload if len(parts) > 1 else "stop",
        upload_bound=config.upload_bound,
        transform=Transform.of(data, augment=config.data.augment),
        names=client_names(config, data, parts),
        diagnostics=None if config.diagnostics == "off" else Diagnostics(config.diagnostics),
        metrics=config.task.asked(),
        judge_by=config.task.judge_by or "",
        networks=dict(networks),
        network=network_names(config, cell, len(parts)) if networks else (),
    )
    job = standardized(job, config.data.standardize)
    job = job.with_phases(build_phases(method, length_of(config, job)))
    return job if config.privacy is None else with_privacy(job, config.privacy)


def build_plans(
    config: Config, cell: Cell, modules: Mapping[str, nn.Module], data: sources.Dataset, clients: int
) -> list[Plan]:
    """How many centers each layer of each client gets: from the bits given, or from what fits the client's budget.
    modules: the networks by name, "" the shared one."""
    bits = config.methods[cell.label].bits or config.bits
    if config.data.standardize in {"client", "shared"} and data.shape:  # as long as any client's can be
        data = replace(
            data, mean=(-1.2345678901234567e-100,) * data.shape[0], std=(1.2345678901234567e-100,) * data.shape[0]
        )
    channels, names = config.model.levels == "channel", network_names(config, cell, clients)
    each: Sequence[Any] = config.budgets() if bits == "auto" else [bits] if isinstance(bits, int) else bits
    planners: dict[str, Planner] = {}
    plans: dict[tuple[str, int], Plan] = {}  # by network and entry of bits or budgets

    def plan(client: int, entry: int) -> Plan:
        name, network = names[client], network_of(config, cell, client)
        layout = Layout.of(modules[name])
        if bits != "auto":
            return plan_bits(layout, int(each[entry]), network.layers, channels)
        if name not in planners:
            about = describe(config, cell, data, _longest(data), 0.999999, 10**9, network)
            planners[name] = Planner(modules[name], layers=network.layers, channels=channels, about=about)
        return plan_bits(layout, planners[name].fit(parse_size(each[entry])).bits, channels=channels)

    for client, name in enumerate(names):
        if (key := (name, client % len(each))) not in plans:
            plans[key] = plan(client, key[1])
    return [plans[name, client % len(each)] for client, name in enumerate(names)]


def _longest(data: sources.Dataset) -> str:
    """A name as long as any client's may be."""
    return "x" * max([20, *(len(name.encode()) for name in data.owners)])


def describe(
    config: Config,
    cell: Cell,
    data: sources.Dataset,
    client: str,
    test: float | None,
    allowed: int | None,
    network: NetworkConfig,
) -> About:
    """What a client's file says about its model. test: its score, if it has one; allowed: the bytes it may have."""
    told: dict[str, Any] = {} if test is None or data.classes is None else {"test": round(test, 6)}
    told |= {} if allowed is None else {"budget": allowed}
    how = config.data.standardize
    told |= {} if how == "off" or (how == "auto" and not data.mean) else {"standardize": how}
    example = Transform.of(data).apply(data.train.read(slice(0, 1)).inputs)
    return About(
        **facts(network.name, network.args),
        **described(example),
        classes=data.classes or 0,
        labels=data.labels,
        mean=data.mean,
        std=data.std,
        client=client,
        extra={"method": cell.label, "seed": cell.seed, "data": data.name, **told},
    )


def length_of(config: Config, job: Job) -> Length:
    return Length.of(job, config.rounds)


def build_phases(method: MethodConfig, length: Length) -> list[Phase]:
    if method.phases is not None:
        return list(method.phases)
    if method.recipe is None:
        assert method.method is not None
        return [compose(method.method, method.quantizer, method.server, method, length)]
    phases = find(method.recipe).phases(method, length)
    return phases if method.server is None else with_server(phases, method.server)


def with_server(phases: Sequence[Phase], server: Any) -> list[Phase]:
    """A recipe's phases, those in which one model is shared with this server."""
    made = servers.build(server, "server")
    shares = [isinstance(p.method, FedAvg | Hedged) and sends(p.method) for p in phases]
    if not any(shares):
        raise UserError("server: its recipe has no FedAvg phase for one")
    return [replace(p, server=made) if shared else p for p, shared in zip(phases, shares, strict=True)]


def is_dense(phase: Phase) -> bool:
    """No client is quantized in this phase, whatever its bits."""
    return quantizer_of(phase.method) == "none"


def shared_rounds(config: Config, cell: Cell, job: Job) -> int:
    """How many of its first rounds this cell may have in common with others of its seed: those of the shortest first
    phase like its own in which no client is quantized; 0 where that is the whole run."""
    mine, shared = job.phases[0], job.phases[0].rounds
    if not is_dense(mine) or job.budget is not None:  # what is private is counted run by run
        return 0
    for label, method in config.methods.items():
        other = Cell(label, cell.seed)
        alike = (model_name(config, other), networks_of(config, other), method.steps_per_round(config.local_steps))
        if alike == (model_name(config, cell), networks_of(config, cell), job.local_steps):
            first = next(p for p in build_phases(method, length_of(config, job)) if p.rounds)
            if (first.method, first.server) == (mine.method, mine.server):
                shared = min(shared, first.rounds)
    return shared if shared < job.rounds else 0


def first_rounds(job: Job, rounds: int) -> Job:
    """The first rounds of a job, within a phase for which no client needs bits."""
    return replace(job, phases=[replace(job.phases[0], rounds=rounds)], plans=[Plan() for _ in job.plans])


def fingerprint(config: Config, cell: Cell, phases: list[Phase] | Any) -> str:
    """What a cell's numbers depend on, as a short hash."""
    described = json.loads(config.model_dump_json())
    parts = shared_settings(config, cell)
    parts["phases"] = [p.table() for p in phases]
    parts["bits"] = described["methods"][cell.label]["bits"] or [described["bits"], described["budget"]]
    if config.methods[cell.label].of is not None:
        parts["afterwards"] = config.methods[cell.label].afterwards or "kmeans"
    elif all(is_dense(p) for p in phases):
        del parts["bits"]  # no client is quantized
    return digest(parts)


def shared_settings(config: Config, cell: Cell) -> dict[str, Any]:
    """The settings of a cell besides its phases and bits."""
    described = json.loads(config.model_dump_json())
    found = {key: described[key] for key in SHARED if key in described}
    found["seed"] = cell.seed
    if not config.split.unseen:  # nothing of the run depends on it
        del found["split"]["unseen"]
    found["model"]["name"] = model_name(config, cell)
    found["model"].pop("networks", None)
    if any(network_names(config, cell, len(known := networks_of(config, cell)))):
        found["model"]["networks"] = [n.model_dump(mode="json") for n in known]
    found["local_steps"] = config.methods[cell.label].steps_per_round(config.local_steps)
    return found
