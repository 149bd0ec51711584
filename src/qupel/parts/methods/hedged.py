"""Hedged sharing: a client that others cannot help goes its own way, and finds out by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Adam, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload, received
from qupel.parts.methods.base import OneRow, methods
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem, each_loss

ADAM = Adam()
BETTER = 0.8  # of w's loss on samples held back: one's own model is better by that much
TRIES = 30  # steps that w has at a client before that


@dataclass(frozen=True, kw_only=True)
class HedgedState(State):
    """alone: 1 where the client goes its own way (..., 1). losses: what w, as it comes, loses on a batch of the client
    (..., 2): at first, and lately; begun: 0 until the first step of a round (..., 1). beside: in the first stage, the
    model trained alone, with `memory`; the shared optimizer's is `shared_memory`."""

    alone: Tensor
    losses: Tensor
    begun: Tensor = received()
    beside: Rows = ()
    shared_memory: Memory = ()


@methods.register("hedged", about="FedAvg with a model of one's own beside it until one's own data have chosen")
@dataclass(frozen=True)
class Hedged(OneRow):
    """Three stages, a phase or more each:

    both     x is FedAvg's. Beside it the client trains v alone, by an optimizer of its own. It is alone where sharing
             fails: where w, as it comes, loses on the client's batches more than `fails` of what it lost at first.
             (w saw them with a weight of 1/n only, so that is nearly a loss on fresh samples.) And, where the phase has
             held samples back, it is alone where v loses on these less than 0.8 of what w does after 30 steps at the
             client; a sample counts at most as much as a whole batch lost at first.
    chosen   FedAvg among those who stay, with the quantizer; those alone go on with x = v, and send no share.
    own      nobody sends: x <- x - eta1 (g + lambda_p (x - w)) of those who stayed; those alone have no pull.
             g: what the quantizer descends on.

    Where nobody goes alone: FedAvg, then QuPeL whose w rests; where all do: Local.
    """

    state_type: ClassVar[type[State]] = HedgedState

    stage: Literal["both", "chosen", "own"] = "both"
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    alone_eta1: Schedule = Schedule(0.003)
    alone_optimizer: Optimizer = ADAM
    lambda_p: Schedule = Schedule(0.0)
    fails: float = 0.8
    quantizer: Quantizer = NoQuantizer()

    @property
    def sends(self) -> bool:
        return self.stage != "own"

    def start(self, before: State, plan: Plan, problem: Problem) -> HedgedState:
        x, none = before.x, before.x.new_zeros(*before.x.shape[:-1], 1)
        alone, losses = none, torch.cat((none, none), -1)
        if isinstance(before, HedgedState):
            alone, losses = before.alone, before.losses
            x = _pick(alone, before.beside[0], x) if before.beside else x
        x, codebook = self.quantizer.start(replace(before, x=x), plan, problem.own.layout)
        beside = (x,) if self.stage == "both" else ()
        memory, shared = self.alone_optimizer.memory(x), self.optimizer.memory(x)
        made = HedgedState(x, before.w, codebook, memory, alone=alone, losses=losses, begun=none)
        return replace(made, beside=beside, shared_memory=shared)

    def receive(self, state: HedgedState, w: Rows) -> HedgedState:
        if self.stage == "own":
            return replace(state, w=w[0])
        x = w[0] if self.stage == "both" else _pick(state.alone, state.x, w[0])
        begun = torch.zeros_like(state.alone)
        return replace(state, x=x, w=w[0], begun=begun, shared_memory=self.optimizer.memory(x))

    def step(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        eta1, alone_eta1 = self.eta1(clock.time), self.alone_eta1(clock.time)
        descent = self.quantizer.gradient(s.x, s.codebook, problem.own, batch, clock)
        g, pull, more = descent.gradient, self.tie(clock.time), {}
        if self.stage == "both":
            s = s if bool(s.begun.any()) else self._arrived(s, descent.info)
            own = problem.own.gradient(s.beside[0], batch)
            v, memory = self.alone_optimizer.step(s.beside[0], own.gradient, s.memory, alone_eta1)
            y, shared_memory = self.optimizer.step(s.x, g, s.shared_memory, eta1)
            s, more = replace(s, beside=(v,)), {"alone_loss": own.loss}
        else:
            apart, memory = self.alone_optimizer.step(s.x, g, s.memory, alone_eta1)
            pulled = torch.add(g, s.x - s.w, alpha=pull) if pull else g
            together, shared_memory = self.optimizer.step(s.x, pulled, s.shared_memory, eta1)
            y = _pick(s.alone, apart, together)
        x, codebook, info = self.quantizer.settle(y, s.codebook, descent, problem.own, batch, self.eta1, clock)
        info = replace(info, more={**info.more, **more})
        return replace(s, x=x, codebook=codebook, memory=memory, shared_memory=shared_memory), info

    def choose(
        self, s: HedgedState, problem: Problem, batches: Iterable[Batch], held: Batch, clock: Clock
    ) -> HedgedState:
        if self.stage != "both":
            return s
        u, memory, eta1 = s.w, self.optimizer.memory(s.w), self.eta1(clock.time)
        for batch in islice(batches, TRIES):
            u, memory = self.optimizer.step(u, problem.own.gradient(u, batch).gradient, memory, eta1)
        most = float(s.losses[..., 0])  # more than w at first is just wrong, however sure of it a model is
        apart, together = (mean_of(each_loss(problem.own, x, held), most) for x in (s.beside[0], u))
        return replace(s, alone=torch.ones_like(s.alone)) if apart < BETTER * together else s

    def upload(self, state: HedgedState) -> Upload | None:
        if self.stage == "own":
            return None
        if self.stage == "both":
            return Upload((state.x,))
        return Upload((_pick(state.alone, state.w, state.x),), 1 - state.alone)  # nothing of those who are alone

    def deployed(self, state: HedgedState) -> Deployed:
        if self.stage == "own":
            return self.quantizer.deployed(state.x, state.codebook)
        x = _pick(state.alone, state.beside[0] if state.beside else state.x, state.w)
        return self.quantizer.deployed(x, state.codebook)

    def _arrived(self, s: HedgedState, info: Info) -> HedgedState:
        """A round's first loss: kept if it is the first of all, and in a mean whose weights halve with every round."""
        first, lately = s.losses[..., :1], s.losses[..., 1:]
        seen = next(value for value in (info.loss, info.quantized_loss, *info.more.values()) if value is not None)
        loss = torch.as_tensor(seen).to(first).reshape(first.shape)
        lately = torch.where(first > 0, (lately + loss) / 2, loss)
        first = torch.where(first > 0, first, loss)
        alone = (lately > self.fails * first).to(s.alone)
        return replace(s, losses=torch.cat((first, lately), -1), alone=alone, begun=torch.ones_like(s.begun))

    def tie(self, time: float) -> float:
        return self.lambda_p(time) if self.stage == "own" else 0.0


def mean_of(losses: Sequence[float], most: float) -> float:
    """Where none counts for more than `most`."""
    return sum(min(loss, most) for loss in losses) / len(losses)


def _pick(alone: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """x of those who are alone, w of the others (..., d)."""
    return torch.where(alone > 0, x, w)
