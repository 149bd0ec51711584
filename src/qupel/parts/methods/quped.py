"""QuPeD: personal models of any network and any bits, tied to a shared one by what they predict, not by their weights.
Only the shared network's w leaves the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.distill import On, Taught, kd
from qupel.tasks.task import Batch, Pass, Problem, Task, Tree


@methods.register("quped", paper="Ozkara, Singh, Data, Diggavi, NeurIPS 2021")
@dataclass(frozen=True)
class QuPeD(OneRow):
    """(1 - lambda_p) [f(x) + f(Q~_c(x))] + lambda R(x, c) + lambda_p [KD(x, w) + KD(Q~_c(x), w)], x of any network.

    Prox steps on x and c, then w <- w - eta3 grad_w;  w = mean of w_i.  lambda_p = 0: Local, and w stays.
    reading: what w descends on: `distill`, lambda_p [KD(x, w) + KD(Q(x), w)] alone; `mutual`, where w learns from the
    data, too: (1 - lambda_p) f(w) + lambda_p KD(w, x), with x the teacher (Shen et al., Federated Mutual Learning).
    eta3: none: that of x. temperature, on: of KD (`tasks.distill.kd`).
    share: with `architecture` clients of one network also average within it: x <- x + pull (mean of its network - x) at
    the start of a round; pull = 1 is FedAvg there. The mean of the shared network is w, until x is quantized: w is not,
    and would undo what x learns of its levels, so from then on its clients go their own ways.
    fresh: w sees what the new x and c say, as the listing has it, at two forward passes more; else what they said in
    this step's own passes.
    """

    any_network: ClassVar[bool] = True
    labels_only: ClassVar[bool] = True

    eta1: Schedule = Schedule(0.1)
    eta3: Schedule | None = None
    lambda_p: Schedule = Schedule(0.5)
    reading: Literal["distill", "mutual"] = "distill"
    temperature: float = 1.0
    on: On = "both"
    fresh: bool = False
    share: Literal["nothing", "architecture"] = "nothing"
    pull: float = 0.3
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: allowed are numbers greater than 0")
        if not 0 <= self.lambda_p.start <= 1:
            raise ValueError(f"lambda_p = {self.lambda_p.start}: a share, allowed are 0 to 1")
        if not 0 <= self.pull <= 1:
            raise ValueError(f"pull = {self.pull}: allowed are 0 to 1")

    @property
    def row_per_network(self) -> bool:
        return self.share == "architecture"

    @property
    def w_is_mean(self) -> bool:
        return isinstance(self.quantizer, NoQuantizer)

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Rows) -> State:
        shared, *mean = w
        if not mean or not self.row_per_network:
            return replace(state, w=shared)
        return replace(state, w=shared, x=torch.lerp(state.x, mean[0], self.pull))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        lambda_p, eta3 = self.lambda_p(clock.time), (self.eta3 or self.eta1)(clock.time)
        own: Task = problem.own
        shared = problem.shared.forward(s.w, batch[0]) if lambda_p or self.reading == "mutual" else None
        if shared is not None:
            own = Taught(problem.own, shared.outputs, lambda_p, self.temperature, self.on, s.x)
        # prox step on x, then on c at the new x, each on its part of (1 - lambda_p) f + lambda_p KD
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, (s.x, s.codebook, s.memory), own, batch, clock
        )
        if shared is None or not isinstance(own, Taught):
            return State(x, s.w, codebook, memory), info
        if self.fresh:
            q = self.quantizer.deployed(x, codebook).x
            own.heard.update({at: own.outputs(x if at == "x" else q, batch[0]) for at in own.heard})
        w = torch.add(s.w, self._w_gradient(shared, problem, own, batch), alpha=-eta3)
        if self.reading == "mutual":
            info = replace(info, more={**info.more, "shared_loss": problem.shared.loss_of(shared.outputs, batch)})
        return State(x, w, codebook, memory), info

    def _w_gradient(self, shared: Pass, problem: Problem, own: Taught, batch: Batch) -> Tensor:
        """Of what w descends on, by what x and Q(x) said (..., d)."""
        if self.reading == "mutual":
            x = own.heard["x" if "x" in own.heard else "q"]
            lesson = replace(own, task=problem.shared, teacher=x)
            return shared.gradient(batch, loss=lesson.loss, given=(x,)).gradient
        students = tuple(own.heard.values())

        def distilled(w: Tree, targets: Tree, *said: Tree) -> Tensor:
            each = [kd(z, w, self.temperature, self.on) for z in said[: len(students)]]
            return own.weight * torch.stack(each).sum()

        return shared.gradient(batch, loss=distilled, given=students).gradient

    def upload(self, state: State) -> Upload:
        return Upload((state.w, state.x) if self.row_per_network else (state.w,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)
