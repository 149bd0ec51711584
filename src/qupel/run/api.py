"""`qupel.fit`: your own model and data, from Python."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from qupel.core.codebook import FULL_PRECISION, Plan
from qupel.data import partition
from qupel.data.batches import Transform
from qupel.data.clients import Client, is_client, people, pool
from qupel.deploy import file
from qupel.deploy.budget import parse_size
from qupel.engine.choice import Vectorize, settled
from qupel.engine.door import check_trainable
from qupel.engine.inline import Inline
from qupel.engine.job import Job, standardized
from qupel.engine.rounds import Engine, Progress, run
from qupel.engine.workers import Pool, Workers
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.methods import methods
from qupel.parts.phase import Phase
from qupel.parts.quantizers import Quantizer
from qupel.parts.servers import Server
from qupel.run.adapt import Origin, find_origin, modules_of, read_origin
from qupel.run.fit import Fit, adapted_fit, collect, described, leave, open_out
from qupel.run.folder import own_folder, result_of
from qupel.run.jobs import Cell, is_dense, loss_for, usual_loss
from qupel.run.networks import named_networks, plans_by_network
from qupel.run.recipes import compose, find, recipes
from qupel.run.settings import Length, Settings
from qupel.tasks.losses import losses
from qupel.tasks.metrics import Metric, chosen
from qupel.tasks.task import Loss
from qupel.util.errors import UserError
from qupel.util.machine import available_cpus, check_device
from qupel.util.terminal import Watcher

Bits = int | dict[str, int]
DEFAULT_BITS = 2


def load(path: str | os.PathLike[str], module: nn.Module | None = None) -> nn.Module:
    """The model in a packed file, ready for inference, bit for bit as it was saved.

    module: a network of your own, which is filled; without it the file must name one of `qupel models`.

    >>> import numpy as np, qupel, tempfile
    >>> from torch import nn
    >>> x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> file, = qupel.fit(net, [(x, y)], rounds=5).save(tempfile.mkdtemp())
    >>> len(qupel.load(file, net)[2].weight.unique())  # 2 bits
    4
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
    # what a client ships
    networks: Sequence[nn.Module | None] = (),
    bits: Bits | Sequence[Bits] | None = None,
    budget: str | Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    levels: Literal["layer", "channel"] = "layer",
    # how it is learned
    method: str | Sequence[Phase] = "qupel",
    rounds: int = 30,
    local_steps: int = 10,
    batch: int = 20,
    loss: Loss | str | None = None,
    standardize: Literal["auto", "off", "client", "shared"] = "auto",
    settings: Settings | None = None,
    quantizer: str | Quantizer | None = None,
    server: str | Server | None = None,
    sample: float = 1.0,
    weighted: bool = False,
    seed: int = 0,
    # how it is judged
    metrics: Sequence[str] | Mapping[str, Metric] = (),
    judge_by: str | None = None,
    unseen: float | Sequence[Client | Sequence[Any]] | Mapping[str, Any] = 0,
    evaluate_every: int = 10,
    evaluate_sample: float = 1.0,
    diagnostics: Literal["off", "cheap", "full"] = "off",
    # where and how it runs
    engine: Literal["inline", "workers"] | None = None,
    workers: int | None = None,
    store: Literal["memory", "disk"] = "memory",
    device: str = "cpu",
    vectorize: Vectorize = "auto",
    out: str | Path | None = None,
    quiet: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Fit:
    """Train a personal model for every client and return them all.

    model:    any module that gives one tensor; its weights are where every client starts. It is not changed.
              Frozen parameters (requires_grad=False) stay as they are, at full precision.
    clients:  `Client`s, or tuples (train inputs, train targets[, test inputs, test targets]); a dict has their names.

    networks: one entry each where clients have networks of their own, None for `model`; for methods that take any, as
              "quped" and "local". `model` is the shared one. Their weights are where their clients start.
    bits:     for all clients or one entry each: 1 to 8, 32 for full precision, or a table layer -> bits. By default
              the method's own: 32 for FedAvg with and without tuning, 2 for all others.
    budget:   in place of bits, the bytes a client's file may have, "24 KiB", for all or one entry each.
    layers:   which layers of `model` get the bits: by default all of docs/layers.md but the first and the last weight.
              `Fit.quantized` and `Fit.left` tell; fewer bits than 32 for no layer at all are refused.
    levels:   one set of levels a layer, or scaled by each output "channel".

    method:   a recipe or a method (`qupel methods`), "module:Name" of your own, or phases.
    loss:     a name, or (outputs, targets) -> mean loss; where samples have weights, (outputs, targets, weights); by
              default cross entropy for int targets, mean squared error for float ones.
    standardize: float inputs by mean and deviation of the client's own training data, or of all clients' ("shared").
              "auto": where their root mean square is not within 0.4 and 2.5, they are divided by it; the models that
              are returned do so themselves.
    quantizer, server: of a method; by default its own quantizer, and the mean. A name that is both a recipe's and a
              method's is the recipe's, unless one of these is given.

    metrics:  names, or name -> (outputs, targets) -> number or a torchmetrics object, beside loss and accuracy.
    judge_by: what a client's score is: one of the metrics, "accuracy" or "loss"; by default accuracy for int targets.
    unseen:   clients that take no part in training and are adapted at its end (`Fit.unseen`): a share of `clients`, how
              many of them, or others.
    evaluate_sample: share of the clients that are judged on the way; at the end of a phase all are.
    diagnostics: measure what the theorems speak of at every evaluation (docs/theory.md).

    engine:   "inline", this process, or "workers", several: as many as `workers` says, else one a core; model and loss
              must then be importable (not defined in a notebook). By default by the number of workers.
    store:    clients' states in "memory", or on "disk".
    device:   "cpu", "cuda", "cuda:N"; on a GPU all clients are trained in this process.
    vectorize: clients trained in stacks: "on", "off", or "auto", where a quick look says that it pays.
    out:      a folder for checkpoints, metrics and a summary: a fit that is killed goes on from there when called again
              with the same model, loss, data and settings; called with any other it is refused.
    quiet:    no progress bar; there is one in terminals and notebooks only.

    >>> import numpy as np, qupel
    >>> from torch import nn
    >>> x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> done = qupel.fit(net, [(x, y, x, y)] * 2, bits=2, rounds=5)
    >>> len(done.models), done.quantized[0]
    (2, {'2.weight': 2})
    """
    if bits is not None and budget is not None:
        raise UserError("give either bits or budget")
    everyone = people(clients)
    seen, later = _apart(everyone, unseen, seed)
    data = pool([everyone[i] for i in seen])
    parts = partition.by_owner(data)
    own, network = named_networks(networks, len(everyone))
    job = Job(
        module=copy.deepcopy(model),
        networks=copy.deepcopy(own),
        network=[network[i] for i in seen] if own else (),
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
    each = _each("bits", _own_bits(method, job.phases) if bits is None else bits, len(everyone))
    sizes = _sizes(budget, len(everyone))
    plans = plans_by_network({"": model, **own}, network, each, sizes, layers, levels == "channel")
    job = replace(job, plans=[plans[i] for i in seen])
    if (bits is not None or budget is not None) and any(plans) and is_dense(job.phases[-1]):
        last, given = methods.name_of(job.phases[-1].method), "bits" if budget is None else "budget"
        why = f"the last phase, {last}, ships full precision"
        raise UserError(f"{given}: {why}; leave {given} out, or change the method")
    check_trainable(job)
    label = method if isinstance(method, str) else "own phases"
    cell = Cell(label, seed)
    with ExitStack() as stack:
        folder, checkpoints = None, None
        if out is not None:
            stack.enter_context(own_folder(Path(out)))
            folder, checkpoints = open_out(Path(out), job, cell)
        place, processes = _place(engine, workers, device)
        job, choice = settled(job.to(place), vectorize, folder)
        crew = stack.enter_context(Pool(processes)) if processes > 1 else None
        shards: Engine = (
            Workers(crew, job, store, folder) if crew else stack.enter_context(Inline(job, 1, store, folder))
        )
        bar = stack.enter_context(Watcher(job.rounds, lines=False, live=not quiet))
        finished = run(job, shards, checkpoints=checkpoints, watch=bar.both(cell, watch))
        names: dict[str, Any] = {"layers": layers and tuple(layers), "channels": levels == "channel"}
        names |= {
            "loss": (usual_loss(data) if loss is None else loss) if not callable(loss) else "",
            "standardize": standardize,
        }
        found = collect(job, shards, finished, choice, Origin.of(job, finished.w, label, **names))
        found = replace(found, budgets=[sizes[i] for i in seen] if sizes else ())
        key = checkpoints.fingerprint if checkpoints else ""
        result = result_of(job, cell, key, asdict(choice), finished, place, None)
        if later:
            new = _later(found.origin, everyone, later, plans, sizes, network)
            found, result["unseen"] = replace(found, unseen=new), new.run["unseen"]
        found = replace(found, run={"config": described(job, label), "result": result})
        return found if out is None else leave(Path(out), cell, found)


def adapt(
    run: Fit | str | os.PathLike[str],
    clients: Client | Sequence[Any],
    *,
    networks: Sequence[nn.Module | str | None] = (),
    bits: Bits | Sequence[Bits] | None = None,
    budget: str | Sequence[str] | None = None,
    cell: str | None = None,
    model: nn.Module | None = None,
    loss: Loss | str | None = None,
    allow: Sequence[str] = (),
    quiet: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Fit:
    """Small personal models for clients that were not there, from the global model, with no further federation.

    run:      a `Fit`, the folder of a finished run, or its file w.safetensors alone, which holds all that is needed.
    clients:  one, or several, as `fit` takes them; each adapts for itself.
    networks: one entry each, of methods that take any: a module, the name of one of the run's, None for the shared one.
    bits, budget: as in `fit`; by default 2 bits, or full precision where no phase quantizes.
    cell:     which of a run's cells, by its name or its method's label, where there are several.
    model, loss: of a folder whose network or loss is one of your own, from Python.
    allow:    modules that the file may name networks, losses and parts from; those of a folder's own config need not be
              given, unless they are installed packages. Nothing else is imported because a file says so.

    The local steps are those of the run's personal phases, w staying as it is; a run that ends with a shared model
    ships that, in these bits.

    >>> import numpy as np, qupel
    >>> from torch import nn
    >>> x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> done = qupel.fit(net, [(x, y, x, y)] * 2, bits=[2, 3], rounds=5)
    >>> new = qupel.adapt(done, (x, y, x, y), bits=1)
    >>> new.quantized
    [{'2.weight': 1}]
    """
    if bits is not None and budget is not None:
        raise UserError("give either bits or budget")
    if isinstance(run, Fit):
        origin = run.origin
    else:
        allowed = {*allow, *modules_of(Path(run))}
        origin = read_origin(find_origin(Path(run), cell), model, loss, allowed)
    given: Any = clients
    who = people([given] if is_client(given) else given)
    usual = FULL_PRECISION if all(map(is_dense, origin.job.phases)) else DEFAULT_BITS
    each, sizes = _each("bits", usual if bits is None else bits, len(who)), _sizes(budget, len(who))
    own, network = named_networks(networks, len(who), origin.job.networks)
    origin = origin.with_networks(own)
    modules = {"": origin.filled(), **origin.job.networks}
    plans = plans_by_network(modules, network, each, sizes, origin.layers, origin.channels)
    with Watcher(0, lines=False, live=not quiet) as bar:
        told = bar.both(Cell(origin.label, origin.job.seed), watch)
        of = network if any(network) else ()
        return adapted_fit(origin, pool(who), plans, sizes, strict=True, network=of, watch=told)


def _apart(everyone: Sequence[Client], unseen: Any, seed: int) -> tuple[list[int], list[Any]]:
    """(those that train, those that join later): numbers of clients, or the clients that were given beside them."""
    if not isinstance(unseen, int | float):
        return list(range(len(everyone))), people(unseen, "unseen") if len(unseen) else []
    if not unseen:
        return list(range(len(everyone))), []
    seen, later = partition.leave_out(range(len(everyone)), unseen, seed)
    return seen, list(later)


def _later(
    origin: Origin,
    everyone: Sequence[Client],
    later: Sequence[Any],
    plans: Sequence[Plan],
    sizes: list[int] | None,
    network: Sequence[str],
) -> Fit:
    """Adapts those of `_apart`: one of the clients has its own bits and network, others have those of the clients in
    turn."""
    at = [i if isinstance(i, int) else k % len(plans) for k, i in enumerate(later)]
    who = [everyone[i] if isinstance(i, int) else i for i in later]
    limits = [sizes[i] for i in at] if sizes else None
    own = [network[i] for i in at] if any(network) else ()
    return adapted_fit(origin, pool(who), [plans[i] for i in at], limits, strict=False, network=own)


def _place(engine: str | None, workers: int | None, device: str) -> tuple[torch.device, int]:
    """(device, number of processes)."""
    place = check_device(device)
    if engine not in {None, "inline", "workers"}:
        raise UserError(f'engine {engine!r}: allowed are "inline" and "workers"; ranks run configs (`qupel run`)')
    if engine == "inline" and (workers or 1) > 1:
        raise UserError(f'engine "inline" is this process; {workers} workers are engine = "workers"')
    processes = workers or (available_cpus() if engine == "workers" else 1)
    return place, processes if place.type == "cpu" else 1


def _each(what: str, values: Any, clients: int) -> list[Any]:
    """One entry a client."""
    each = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values] * clients
    if len(each) != clients:
        raise UserError(f"{what}: {len(each)} entries for {clients} clients")
    return each


def _sizes(budget: str | Sequence[str] | None, clients: int) -> list[int] | None:
    return None if budget is None else [parse_size(text) for text in _each("budget", budget, clients)]


def _own_bits(method: str | Sequence[Phase], phases: Sequence[Phase]) -> int:
    """Where none are given: those of the recipe, else full precision where no phase quantizes."""
    known = find(method).bits if isinstance(method, str) and method in recipes else None
    return known or (FULL_PRECISION if all(map(is_dense, phases)) else DEFAULT_BITS)


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
    length = Length.of(job, rounds)
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
