"""Hedged sharing: each client also trains alone, and all find out together for whom that is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.optim import SGD, Adam, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.evidence import alone_by_itself, choice, gain, nothing, sent
from qupel.parts.methods.base import OneRow, Past, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem, Value, each_loss

ADAM = Adam()
Batches = Iterable[Batch]
TRIES = 30  # steps that w has at a client before it is compared with the client's own model


@dataclass(frozen=True, kw_only=True)
class HedgedState(State):
    """alone: 1 where the client goes its own way (..., 1). first: what w lost on the client's first batch (..., 1).
    evidence: what samples held back say of going alone (..., 4). v: until clients have chosen, the model trained alone,
    with its levels and `memory`, which is then that of x; the shared optimizer's is `shared_memory`."""

    alone: Tensor
    first: Tensor
    evidence: Tensor
    v: Rows = ()
    v_codebook: Codebook = field(default_factory=Codebook)
    shared_memory: Memory = ()


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
            b = self._beside(b if b.v else replace(b, v=(b.x,)), plan, problem)
        return replace(b, x=x, codebook=codebook, shared_memory=self.optimizer.memory(x))

    def again(self, b: State, x: Tensor, past: Past, plan: Plan, problem: Problem) -> State:
        """v of those who go alone is learned anew, on all samples: what they would be, had they never shared."""
        if self.stage != "own" or not isinstance(b, HedgedState) or not b.v or not bool(b.alone):
            return b
        b = replace(b, v=(x,), v_codebook=Codebook())
        for method, steps in past:
            p = method if isinstance(method, Hedged) else replace(self, stage="both", quantizer=NoQuantizer())
            b = p._beside(b, plan, problem)
            for batch, clock in steps:
                v, v_codebook, memory, _ = p._alone_step(b, problem, batch, clock)
                b = replace(b, v=(v,), v_codebook=v_codebook, memory=memory)
        return b

    def _beside(self, b: HedgedState, plan: Plan, problem: Problem) -> HedgedState:
        """A phase begins for v: its levels, and its optimizer's memory, which stays while clients are asked."""
        v, v_codebook = self.quantizer.start(State(b.v[0], b.w, b.v_codebook), plan, problem.own.layout)
        memory = b.memory if self.stage == "asked" and b.memory else self.alone_optimizer.memory(v)
        return replace(b, v=(v,), v_codebook=v_codebook, memory=memory)

    def _alone_step(
        self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock
    ) -> tuple[Tensor, Codebook, Memory, Info]:
        beside = s.v[0], s.v_codebook, s.memory
        return quantized_step(self.quantizer, self.alone_optimizer, self.alone_eta1, beside, problem.own, batch, clock)

    def receive(self, state: HedgedState, w: Rows) -> HedgedState:
        if self.stage == "own":
            return replace(state, w=w[0])
        state = replace(state, x=w[0], w=w[0], shared_memory=self.optimizer.memory(w[0]))
        return replace(state, alone=choice(state.evidence, w[1], state.alone)) if self.stage == "asked" else state

    def step(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        return (self._personal if self.stage == "own" else self._both)(s, problem, batch, clock)

    def _both(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        model = s.x, s.codebook, s.shared_memory
        v, v_codebook, memory, own = self._alone_step(s, problem, batch, clock)
        x, codebook, shared, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        first = torch.where(s.first > 0, s.first, torch.as_tensor(_loss(info)).to(s.first).view_as(s.first))
        s = replace(s, x=x, codebook=codebook, shared_memory=shared, v=(v,), v_codebook=v_codebook, memory=memory)
        return replace(s, first=first), replace(info, more={**info.more, "alone_loss": _loss(own)})

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
        model = s.w, s.codebook, self.optimizer.memory(s.w)
        for batch in islice(batches, TRIES):
            model = quantized_step(self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock)[:3]
        w, v = self.quantizer.deployed(*model[:2]), self.quantizer.deployed(s.v[0], s.v_codebook)
        together, apart = (each_loss(problem.own, found.x, held) for found in (w, v))
        evidence = gain(together, apart, float(s.first)).to(s.evidence)
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


def _loss(info: Info) -> Value:
    """What a step says the model lost on its batch."""
    return next(v for v in (info.loss, info.quantized_loss, *info.more.values()) if v is not None)
