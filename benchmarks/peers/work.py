"""The same federated work for every framework: one model, one data set, the same batches in the same order.

`prepare` writes a work item to a folder; every framework reads it from there, so that none pays for making it:

    work.json     the settings
    first.npy     the first model, flat (d,)
    inputs.npy    all samples, normalized float32;  targets.npy
    rows.npy      which sample client i sees at step t of round r: (rounds, clients, steps, batch)

A framework's script runs the rounds, notes the time after each, and ends with `tell`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.layout import Layout
from qupel.data.batches import Transform, generator, rows
from qupel.data.sources import load
from qupel.tasks import zoo as models

CLASSES, SEED = 10, 0
HIDDEN = {"mlp": (64, 32), "wide mlp": (256, 128)}  # of the digits MLPs: 6,570 and 50,826 parameters


@dataclass(frozen=True)
class Work:
    """FedAvg (bits = 32), or QuPeL with the paper's settings in hard mode and corrected signs."""

    model: str
    clients: int
    rounds: int
    steps: int
    batch: int
    samples: int  # of a client
    bits: int = 32
    channels_last: bool = False  # give images and models in this order to everyone; our engine takes it by itself
    eta1: float = 0.05
    eta2: float = 1e-4
    lam: float = 1e-2
    lambda_p: float = 0.025
    share: float = 0.125  # eta3 lambda_p: how much of x enters w a step


_CNN = {"model": "cnn5", "clients": 20, "rounds": 3, "steps": 10, "batch": 50, "samples": 500}
_MLP = {"model": "mlp", "rounds": 6, "steps": 10, "batch": 10, "samples": 100}  # a round is an epoch
WORKS = {
    "FedAvg, CNN, 20 clients": Work(**_CNN),
    "QuPeL 2 bits, CNN, 20 clients": Work(**_CNN, bits=2),
    "FedAvg, MLP, 100 clients": Work(**_MLP, clients=100),
    "QuPeL 2 bits, MLP, 100 clients": Work(**_MLP, clients=100, bits=2),
    "FedAvg, MLP, 1,000 clients": Work(**_MLP, clients=1000),
    "QuPeL 2 bits, MLP, 1,000 clients": Work(**_MLP, clients=1000, bits=2),
    "FedAvg, CNN, 20 clients, peers in channels_last": Work(**_CNN, channels_last=True),
    "FedAvg, wide MLP, 100 clients": Work(**_MLP | {"model": "wide mlp"}, clients=100),
}


def module_of(model: str) -> nn.Module:
    if model in HIDDEN:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return models.mlp(64, HIDDEN[model], CLASSES)
    return models.build(model, (3, 32, 32), CLASSES, SEED)


def prepare(work: Work, folder: Path, data: str | None) -> str:
    """Write a work item; returns what the samples are."""
    folder.mkdir(parents=True, exist_ok=True)
    if work.model in HIDDEN:
        dataset, said = load("digits"), "digits"
    elif data:
        dataset, said = load("cifar10", Path(data)), "CIFAR-10 (JPEG copy)"
    else:
        dataset, said = None, "random images of CIFAR-10's size"
    rng = generator(SEED, "benchmark")
    if dataset is None:
        inputs = torch.from_numpy(rng.standard_normal((20_000, 3, 32, 32), dtype=np.float32))
        targets = torch.from_numpy(rng.integers(0, CLASSES, len(inputs)))
    else:
        inputs, targets = Transform.of(dataset).apply(dataset.train.inputs), dataset.train.targets
    if work.model in HIDDEN:
        inputs = inputs.flatten(1)
    owned = np.stack([rng.choice(len(inputs), work.samples, replace=False) for _ in range(work.clients)])
    picked = [
        [
            [owned[i, rows(SEED, i, r * work.steps + t, work.samples, work.batch)] for t in range(work.steps)]
            for i in range(work.clients)
        ]
        for r in range(work.rounds)
    ]
    np.save(folder / "inputs.npy", inputs.contiguous().numpy())
    np.save(folder / "targets.npy", targets.numpy())
    np.save(folder / "owned.npy", owned)
    np.save(folder / "rows.npy", np.array(picked))
    module = module_of(work.model)
    np.save(folder / "first.npy", Layout.of(module).flatten(module).numpy())
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    return said


class Prepared:
    """A work item as a framework reads it. Samples are tensors in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = Work(**json.loads((folder / "work.json").read_text()))
        self.rows = np.load(folder / "rows.npy", mmap_mode="r")

    @property
    def order(self) -> torch.memory_format:
        return torch.channels_last if self.work.channels_last else torch.contiguous_format

    @cached_property
    def samples(self) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(np.load(self.folder / f"{n}.npy")) for n in ("inputs", "targets"))
        return inputs.contiguous(memory_format=self.order) if inputs.ndim == 4 else inputs, targets

    def module(self) -> nn.Module:
        """The first model."""
        module = module_of(self.work.model)
        Layout.of(module).load(module, torch.from_numpy(np.load(self.folder / "first.npy")))
        return module.to(memory_format=self.order)

    def batches(self, client: int, round: int) -> list[tuple[Tensor, Tensor]]:
        inputs, targets = self.samples
        index = torch.from_numpy(np.array(self.rows[round, client]))  # (steps, batch)
        return [(inputs.index_select(0, k), targets.index_select(0, k)) for k in index]


def tell(begun: float, ended: list[float], module: nn.Module) -> None:
    """Last words of a framework's script: when the first round began, when each ended, and the server's last model."""
    w = Layout.of(module).flatten(module)
    out = Path(sys.argv[2])
    np.save(out.with_suffix(".npy"), w.detach().numpy())
    born = float(os.environ["QUPEL_BENCH_BORN"])  # when this process was started
    rounds = [b - a for a, b in zip([begun, *ended], ended, strict=False)]
    out.write_text(json.dumps({"start": begun - born, "rounds": rounds}))


now = time.time  # seconds that every process of a machine agrees on
