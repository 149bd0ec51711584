# %% [markdown]
# # Your own method, in 40 lines
# A method says how a client's model is tied to the others'. Ours goes half way: every round a client starts from the
# mean of its own model and the shared one, trains it, and sends it. Everything else (quantizers, servers, engines,
# crash safety, reports) is there already.

# %%
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import qupel
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Schedule
from qupel.parts.base import State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox


# %%
@methods.register("half-way")
@dataclass(frozen=True)
class HalfWay(OneRow):
    """x <- (1 - share) x + share w, then tau steps on f_i;  w = mean of x.  share = 0: training alone."""

    eta1: Schedule = Schedule(0.1)
    share: float = 0.5
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before, plan, problem):
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state, w):
        return replace(state, w=w[0], x=torch.lerp(state.x, w[0], self.share))

    def step(self, s, problem, batch, clock):
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, (s.x, s.codebook, s.memory), problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state):
        return Upload((state.x,))

    def deployed(self, state):
        return self.quantizer.deployed(state.x, state.codebook)


# %% [markdown]
# It composes with every quantizer and server: `quantizer="lsq"`, `server="fedavgm"`. In a file of its own it is
# `method = "my_methods:HalfWay"` in a config.

# %%
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
clients = [(x[k::10][:30], y[k::10][:30], x[k::10][30:], y[k::10][30:]) for k in range(6)]
for options in ({"method": "half-way"}, {"method": "half-way", "quantizer": "lsq"}, {"method": "local"}):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fit = qupel.fit(net, clients, bits=2, rounds=20, local_steps=20, **options)
    print(options, f"{100 * np.mean(fit.test):.1f} %")
