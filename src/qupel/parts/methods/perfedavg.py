"""Per-FedAvg: a shared model from which one step on a client's own data goes far (MAML in a federation)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from torch.utils._pytree import tree_leaves, tree_map

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.methods.base import OneRow, methods
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem

LEAST = 4  # samples in a batch that is halved: a BatchNorm needs two


@methods.register("perfedavg", paper="Fallah, Mokhtari, Ozdaglar, NeurIPS 2020")
@dataclass(frozen=True)
class PerFedAvg(OneRow):
    """x <- x - eta1 (I - alpha H) grad f_i(x - alpha grad f_i(x)), tau times from w;  w = mean of x_i.

    kind: `first-order` leaves H out; `hessian-free` takes H v as a difference of gradients at x +- delta v/|v|, at full
    precision. Each batch is halved: one half for the inner steps and H, the other for the gradient behind them; of less
    than four samples both see all. inner: how many inner steps, 0 is FedAvg.
    What ships is w after `inner` steps of size alpha on the client's own training data.
    """

    eta1: Schedule = Schedule(0.1)
    alpha: float = 0.05
    inner: int = 1
    kind: Literal["first-order", "hessian-free"] = "first-order"
    delta: float = 1e-2
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = NoQuantizer()

    @property
    def keeps_state(self) -> bool:
        return self.quantizer != NoQuantizer()

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Rows) -> State:
        return replace(state, x=w[0], w=w[0], memory=self.optimizer.memory(w[0]))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        q, task, (first, second) = self.quantizer, problem.own, _halves(batch, s.x.ndim - 1)
        points = [s.x]
        for _ in range(self.inner):
            g = q.gradient(points[-1], s.codebook, task, first, clock).gradient
            points.append(points[-1] - self.alpha * g)
        rest = second if self.inner else batch
        descent = q.gradient(points[-1], s.codebook, task, rest, clock)
        v = descent.gradient
        for x in reversed(points[:-1]) if self.kind == "hessian-free" else ():
            length = v.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            ahead, behind = (task.gradient(x + d * v / length, first).gradient for d in (self.delta, -self.delta))
            v = v - self.alpha * (ahead - behind) * length / (2 * self.delta)
        y, memory = self.optimizer.step(s.x, v, s.memory, self.eta1(clock.time))
        x, codebook, info = q.settle(y, s.codebook, descent, task, rest, self.eta1, clock)
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state: State) -> Upload:
        return Upload((state.x,))

    def adapt(self, state: State, problem: Problem, batches: Iterable[Batch], clock: Clock) -> State:
        x = state.w
        for batch in islice(batches, self.inner):
            x = x - self.alpha * self.quantizer.gradient(x, state.codebook, problem.own, batch, clock).gradient
        return replace(state, x=x)

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)


def _halves(batch: Batch, dim: int) -> tuple[Batch, Batch]:
    """The samples of a batch, which count along this dimension, in two halves; few of them twice."""
    if tree_leaves(batch)[0].shape[dim] < LEAST:
        return batch, batch
    first, second = (tree_map(lambda t, k=k: t.chunk(2, dim)[k], batch) for k in (0, 1))
    return first, second
