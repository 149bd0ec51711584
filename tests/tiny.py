"""Federations small enough for a test: Gaussian blobs and an MLP with one quantized layer."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qupel.core.codebook import plan_bits
from qupel.core.layout import Layout
from qupel.core.optim import SGD
from qupel.core.schedule import Follow, Schedule
from qupel.data.partition import Part
from qupel.data.sources import from_arrays
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.states import States
from qupel.engine.store import Store
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.parts.servers.mean import Mean

INPUTS, CLASSES = 6, 3


def mlp(seed: int = 0) -> nn.Module:
    """6-8-8-3; the middle weight (64) is quantized."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def wide_mlp(seed: int = 0) -> nn.Module:
    """6-12-12-3: another network for the same data."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(INPUTS, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, CLASSES))


def norm_net(seed: int = 0) -> nn.Module:
    """The same with BatchNorm and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Linear(8, CLASSES),
        )


class Drops(nn.Module):
    """A user's module that drops by a function call, which no list of layers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.dropout(x, 0.3, self.training))


def blobs(sizes=(12, 12, 12, 12), test: int = 5, seed: int = 0):
    """(data, parts): client i has sizes[i] training samples of three Gaussian classes, shifted a little per client."""
    rng = np.random.default_rng(seed)
    means = rng.normal(0, 1.5, (CLASSES, INPUTS))
    inputs, targets, parts = [], [], []
    test_inputs, test_targets = [], []
    at = 0
    for i, n in enumerate(sizes):
        shift = rng.normal(0, 0.3, INPUTS)
        for xs, ys, count in ((inputs, targets, n), (test_inputs, test_targets, test)):
            labels = rng.integers(0, CLASSES, count)
            xs.append(means[labels] + shift + rng.normal(0, 1, (count, INPUTS)))
            ys.append(labels)
        parts.append(Part(np.arange(at, at + n), np.arange(i * test, (i + 1) * test)))
        at += n
    arrays = (np.concatenate(v) for v in (inputs, targets, test_inputs, test_targets))
    x, y, tx, ty = arrays
    return from_arrays(x.astype(np.float32), y, tx.astype(np.float32), ty, classes=CLASSES), parts


def make_job(
    phases, *, sizes=(12, 12, 12, 12), bits=(1, 2, 32), module=None, data=None, channels=False, **settings
) -> Job:
    module = mlp() if module is None else module
    dataset, parts = blobs(sizes) if data is None else data
    networks, names = settings.get("networks", {}), settings.get("network", [""] * len(parts))
    layouts = [Layout.of(networks[name] if name else module) for name in names]
    plans = [plan_bits(layout, bits[i % len(bits)], channels=channels) for i, layout in enumerate(layouts)]
    defaults = {"loss": F.cross_entropy, "local_steps": 3, "batch": 4, "evaluate_every": 2}
    job = Job(module=module, data=dataset, parts=parts, plans=plans, phases=[], **defaults | settings)
    return job.with_phases(phases)


QUANTIZER = Prox(eta2=Schedule(1e-2), lam=Schedule(growth=0.02), lam_c=Follow(0.1))


def recipe(warmup: int = 2, main: int = 4, tuning: int = 2) -> list[Phase]:
    """FedAvg -> QuPeL -> fine-tuning, with momentum, so that a state is x, centers and memory."""
    qupel = QuPeL(
        eta1=Schedule(0.1, decay=0.95),
        eta3=Schedule(1.25),
        lambda_p=Schedule(0.1),
        optimizer=SGD(momentum=0.5, weight_decay=1e-3),
        quantizer=QUANTIZER,
    )
    tune = QuPeL(
        eta1=Schedule(0.05),
        eta3=Schedule(1.25),
        lambda_p=Schedule(0.1),
        quantizer=Frozen(eta2=Schedule(1e-2)),
        enters="free",
    )
    return [Phase(FedAvg(), warmup), Phase(qupel, main), Phase(tune, tuning)]


def local(rounds: int = 3, **settings) -> list[Phase]:
    return [Phase(Local(quantizer=QUANTIZER, **settings), rounds)]


def rows_of(store: Store) -> dict[int, bytes]:
    """By client, the bytes of every row of a store."""
    clients = sorted(store.changed | store.saved.places.keys())
    return {client: store.row(client)[1].numpy().tobytes() for client in clients}


def saved_rows(folder: Path) -> dict[int, bytes]:
    """The same of a checkpoint."""
    states = States()
    states.load(folder)
    return {client: states.read(client)[1].numpy().tobytes() for client in sorted(states.places)}


def final_models(job: Job, engine, w: Tensor) -> list[Tensor]:
    """Per client the deployed vector with its centers behind it."""
    found = []
    for i in range(len(job.parts)):
        model = engine.deployed(job.rounds - 1, w, i)
        found.append(torch.cat([model.x, *model.codebook.centers]).clone())
    return found


def run_inline(job: Job, **options):
    """(finished, models) of the reference engine."""
    from qupel.engine.rounds import run

    with Inline(job, **options) as engine:
        finished = run(job, engine)
        return finished, final_models(job, engine, finished.w)


def beginning(job: Job):
    """What the server has at the start."""
    from qupel.engine.rounds import enter

    return enter(job.phases[0], (Layout.of(job.module).flatten(job.module),))


def mean_of(engine, round: int, w, clients):
    """The mean of what these clients send in a round, w (rows) being the model they are sent: the server by hand."""
    server, so_far = Mean(), None
    for done in engine.train(round, w, clients):
        so_far = server.add(so_far, done.upload, 1.0)
    return server.finish(w, so_far, ())[0]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def timeless(lines):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def bomb(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy that is NaN as soon as a batch holds a sample whose outputs are beyond any honest one."""
    loss = F.cross_entropy(outputs, targets)
    return loss * math.nan if outputs.detach().abs().max() > 1e4 else loss
