"""Hedged sharing: each client also trains alone, and all find out together for whom that is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.optim import SGD, Adam, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Quantized, Rows, State, Upload
from qupel.parts.beside import HedgedState
from qupel.parts.evidence import alone_by_itself, choice, gain, nothing, sent
from qupel.parts.methods.base import OneRow, Past, Stepped, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem, each_loss

ADAM = Adam()
Batches = Iterable[Batch]
TRIES = 30  # steps that w has at a client before it is compared with the client's own model


@methods.register("hedged", about="FedAvg with a model of one's own beside it until held-back samples have chosen")
@dataclass(frozen=True)
class Hedged(OneRow):
    """Three stages, a phase or more each:

    both   x is FedAvg's. Beside it the client trains v alone, by an optimizer of its own. Where samples were held back,
           they judge v and w, after 30 steps at the client, at the end.
    asked  the same; with x goes what they said, the clients' means of it come back, and who seems better alone of both
           together is alone (`parts.evidence` has the formula). Two rounds: ask, hear.
    own    nobody sends. Those alone go on with x = v, learned anew on all samples; the others from w:
           x <- x - eta1 (g + lambda_p (x - w)). g: what the quantizer descends on.

    Where nobody goes alone: FedAvg, then QuPeL whose w rests; where all do: Local. Without `asked`, or for who was not
    there, a client's own samples decide.
    """

    state_type: ClassVar[type[State]] = HedgedState
    models: ClassVar[int] = 1  # what is asked is averaged, whatever the server

    stage: Literal["both", "asked", "own"] = "both"
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    alone_eta1: Schedule = Schedule(0.003)
    alone_optimizer: Optimizer = ADAM
    lambda_p: Schedule = Schedule(0.0)
    quantizer: Quantizer = NoQuantizer()

    @property
    def sends(self) -> bool:
        return self.stage != "own"

    def broadcast(self, w: Tensor) -> Rows:
        return (w, torch.zeros_like(w)) if self.stage == "asked" else (w,)

    def start(self, before: State, plan: Plan, problem: Problem) -> HedgedState:
        b, none = before, before.x.new_zeros(*before.x.shape[:-1], 1)
        if not isinstance(b, HedgedState):
            b = HedgedState(b.x, b.w, b.codebook, alone=none, first=none, evidence=nothing(none))

        goes = self.stage == "own" and bool(b.v) and bool(b.alone)
        model = (b.v[0], b.v_codebook) if goes else (b.x if self.stage == "own" else b.w, b.codebook)
        x, codebook = self.quantizer.start(State(model[0], b.w, model[1]), plan, problem.own.layout)
        if self.stage == "own":
            b = replace(b, v=(), v_codebook=Codebook(), memory=b.memory if b.v else self.alone_optimizer.memory(x))
        else:
            b = self._begin_beside(b if b.v else replace(b, v=(b.x,)), plan, problem)
        return replace(b, x=x, codebook=codebook, shared_memory=self.optimizer.memory(x))

    def again(self, b: State, x: Tensor, past: Past, plan: Plan, problem: Problem) -> State:
        """v of those who go alone is learned anew, on all samples: what they would be, had they never shared."""
        if self.stage != "own" or not isinstance(b, HedgedState) or not b.v or not bool(b.alone):
            return b
        b = replace(b, v=(x,), v_codebook=Codebook())
        for method, steps in past:
            p = method if isinstance(method, Hedged) else replace(self, stage="both", quantizer=NoQuantizer())
            b = p._begin_beside(b, plan, problem)
            for batch, clock in steps:
                b = b.with_beside(*p._step(b.beside, problem, batch, clock, alone=True)[:3])
        return b

    def _begin_beside(self, b: HedgedState, plan: Plan, problem: Problem) -> HedgedState:
        """v's levels for this phase, and its optimizer's memory, which stays while clients are asked."""
        v, codebook = self.quantizer.start(State(b.v[0], b.w, b.v_codebook), plan, problem.own.layout)
        stays = self.stage == "asked" and b.memory
        return b.with_beside(v, codebook, b.memory if stays else self.alone_optimizer.memory(v))

    def receive(self, state: HedgedState, w: Rows) -> HedgedState:
        if self.stage == "own":
            return replace(state, w=w[0])
        state = replace(state, x=w[0], w=w[0], shared_memory=self.optimizer.memory(w[0]))
        return replace(state, alone=choice(state.evidence, w[1], state.alone)) if self.stage == "asked" else state

    def step(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        return (self._personal if self.stage == "own" else self._both)(s, problem, batch, clock)

    def _step(self, model: Quantized, problem: Problem, batch: Batch, clock: Clock, alone: bool = False) -> Stepped:
        """A step of the shared model, or of the one trained alone."""
        optimizer, eta1 = (self.alone_optimizer, self.alone_eta1) if alone else (self.optimizer, self.eta1)
        return quantized_step(self.quantizer, optimizer, eta1, model, problem.own, batch, clock)

    def _both(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        v, v_codebook, memory, own = self._step(s.beside, problem, batch, clock, alone=True)
        x, codebook, shared, info = self._step((s.x, s.codebook, s.shared_memory), problem, batch, clock)
        first = torch.where(s.first > 0, s.first, torch.as_tensor(info.any_loss).to(s.first).view_as(s.first))
        s = replace(s.with_beside(v, v_codebook, memory), x=x, codebook=codebook, shared_memory=shared, first=first)
        return s, replace(info, more={**info.more, "alone_loss": own.any_loss})

    def _personal(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        descent = self.quantizer.gradient(s.x, s.codebook, problem.own, batch, clock)
        g, pull = descent.gradient, self.tie(clock.time)
        apart, memory = self.alone_optimizer.step(s.x, g, s.memory, self.alone_eta1(clock.time))
        pulled = torch.add(g, s.x - s.w, alpha=pull) if pull else g
        together, shared_memory = self.optimizer.step(s.x, pulled, s.shared_memory, self.eta1(clock.time))
        y = torch.where(s.alone > 0, apart, together)
        x, codebook, info = self.quantizer.settle(y, s.codebook, descent, problem.own, batch, self.eta1, clock)
        return replace(s, x=x, codebook=codebook, memory=memory, shared_memory=shared_memory), info

    def choose(self, s: HedgedState, problem: Problem, batches: Batches, held: Batch, clock: Clock) -> HedgedState:
        if self.stage != "both":
            return s
        model: Quantized = s.w, s.codebook, self.optimizer.memory(s.w)
        for batch in islice(batches, TRIES):
            model = self._step(model, problem, batch, clock)[:3]
        w, v = (self.quantizer.deployed(*found[:2]).x for found in (model, s.beside))
        shared, own = (each_loss(problem.own, x, held) for x in (w, v))
        evidence = gain(shared, own, float(s.first)).to(s.evidence)
        return replace(s, evidence=evidence, alone=alone_by_itself(evidence))

    def upload(self, state: HedgedState) -> Upload | None:
        if self.stage == "asked":
            return Upload(sent(state.evidence, state.x))
        return Upload((state.x,)) if self.sends else None

    def deployed(self, state: HedgedState) -> Deployed:
        model = (state.x if self.stage == "own" else state.w), state.codebook
        return self.quantizer.deployed(*((state.v[0], state.v_codebook) if state.v and bool(state.alone) else model))

    def tie(self, time: float) -> float:
        return self.lambda_p(time) if self.stage == "own" else 0.0
