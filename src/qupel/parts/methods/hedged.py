"""Hedged sharing: each client also trains alone, and all find out together for whom that is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from qupel.core.codebook import Codebook, Plan
from qupel.core.optim import SGD, Adam, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem, each_loss

ADAM = Adam()
MARGIN = 0.02  # of the first loss: what going alone must be worth
TRIES = 30  # steps that w has at a client before it is compared with the client's own model


@dataclass(frozen=True, kw_only=True)
class HedgedState(State):
    """alone: 1 where the client goes its own way (..., 1). first: what w lost on the client's first batch (..., 1).
    evidence: what the samples held back say for going alone (..., 4): the gain e, e^2, the variance of e, and 1; zeros
    where none were. v: until clients have chosen, the model trained alone, with its levels and `memory`, which is then
    that of x; the shared optimizer's is `shared_memory`."""

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
           they judge at the end: the gain e of v is the mean over them of

               (loss of w after 30 steps at the client - loss of v) / the first loss,     each at most the first loss

    asked  the same; with x goes (e, e^2, variance of e), and the clients' means (m, m_2, s) of these come back. Few
           samples say little of one client, those of all clients say much: a client takes for its gain

               (t e + s m) / (t + s),     t = max(m_2 - m^2 - s, 0), how much clients really differ,

           and is alone where that is above 0.02 (empirical Bayes; James and Stein, 1961). Two rounds: ask, hear.
    own    nobody sends. Those alone go on with x = v; the others from w: x <- x - eta1 (g + lambda_p (x - w)).
           g: what the quantizer descends on.

    Where nobody goes alone: FedAvg, then QuPeL whose w rests; where all do: Local. Without `asked`, or for who was not
    there: alone where e is above its own standard error.
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
        none = before.x.new_zeros(*before.x.shape[:-1], 1)
        b = before if isinstance(before, HedgedState) else _begun(before, none)

        def begin(x: Tensor, codebook: Codebook) -> tuple[Tensor, Codebook]:
            return self.quantizer.start(State(x, b.w, codebook), plan, problem.own.layout)

        if self.stage == "own":
            goes = bool(b.v) and bool(b.alone)
            x, codebook = begin(b.v[0], b.v_codebook) if goes else begin(b.x, b.codebook)
            memory = b.memory if b.v else self.alone_optimizer.memory(x)
            b = replace(b, x=x, codebook=codebook, memory=memory, v=(), v_codebook=Codebook())
        else:
            x, codebook = begin(b.w, b.codebook)
            v, v_codebook = begin(b.v[0] if b.v else b.x, b.v_codebook)
            memory = b.memory if self.stage == "asked" and b.v else self.alone_optimizer.memory(v)
            b = replace(b, x=x, codebook=codebook, memory=memory, v=(v,), v_codebook=v_codebook)
        return replace(b, shared_memory=self.optimizer.memory(x))

    def receive(self, state: HedgedState, w: Rows) -> HedgedState:
        if self.stage == "own":
            return replace(state, w=w[0])
        state = replace(state, x=w[0], w=w[0], shared_memory=self.optimizer.memory(w[0]))
        return replace(state, alone=choice(state.evidence, w[1], state.alone)) if self.stage == "asked" else state

    def step(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        return (self._personal if self.stage == "own" else self._both)(s, problem, batch, clock)

    def _both(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        (x, codebook, shared_memory, info), (v, v_codebook, memory, own) = (
            quantized_step(self.quantizer, optimizer, eta1, model, problem.own, batch, clock)
            for optimizer, eta1, model in (
                (self.optimizer, self.eta1, (s.x, s.codebook, s.shared_memory)),
                (self.alone_optimizer, self.alone_eta1, (s.v[0], s.v_codebook, s.memory)),
            )
        )
        first = torch.where(s.first > 0, s.first, _loss(info).to(s.first).view_as(s.first))
        s = replace(s, x=x, codebook=codebook, shared_memory=shared_memory, first=first)
        s = replace(s, v=(v,), v_codebook=v_codebook, memory=memory)
        return s, replace(info, more={**info.more, "alone_loss": _loss(own)})

    def _personal(self, s: HedgedState, problem: Problem, batch: Batch, clock: Clock) -> tuple[HedgedState, Info]:
        descent = self.quantizer.gradient(s.x, s.codebook, problem.own, batch, clock)
        g, pull = descent.gradient, self.tie(clock.time)
        apart, memory = self.alone_optimizer.step(s.x, g, s.memory, self.alone_eta1(clock.time))
        pulled = torch.add(g, s.x - s.w, alpha=pull) if pull else g
        together, shared_memory = self.optimizer.step(s.x, pulled, s.shared_memory, self.eta1(clock.time))
        y = torch.where(s.alone > 0, apart, together)
        x, codebook, info = self.quantizer.settle(y, s.codebook, descent, problem.own, batch, self.eta1, clock)
        return replace(s, x=x, codebook=codebook, memory=memory, shared_memory=shared_memory), info

    def choose(
        self, s: HedgedState, problem: Problem, batches: Iterable[Batch], held: Batch, clock: Clock
    ) -> HedgedState:
        if self.stage != "both":
            return s
        model = s.w, s.codebook, self.optimizer.memory(s.w)
        for batch in islice(batches, TRIES):
            model = quantized_step(self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock)[:3]
        # a model that is wrong and sure of it loses without bound: no sample counts for more than all did at first
        together, apart = (
            (torch.tensor(each_loss(problem.own, self.quantizer.deployed(x, c).x, held)) / s.first.cpu()).clamp(max=1.0)
            for x, c in ((model[0], model[1]), (s.v[0], s.v_codebook))
        )
        gains = (together - apart).double()  # (n,)
        e, variance = gains.mean(), gains.var() / len(gains) if len(gains) > 1 else torch.ones(())
        evidence = torch.stack((e, e**2, variance, torch.ones(()))).to(s.evidence)
        return replace(s, evidence=evidence, alone=(e > variance.sqrt()).to(s.alone)[..., None])

    def upload(self, state: HedgedState) -> Upload | None:
        if self.stage == "own":
            return None
        if self.stage == "both":
            return Upload((state.x,))
        told, known = torch.zeros_like(state.x), state.evidence[..., 3:]
        told[..., :3] = state.evidence[..., :3][..., : told.shape[-1]]
        return Upload((state.x, told), torch.cat((torch.ones_like(known), known), -1))

    def deployed(self, state: HedgedState) -> Deployed:
        if self.stage == "own":
            return self.quantizer.deployed(state.x, state.codebook)
        alone = bool(state.alone)
        x, codebook = (state.v[0], state.v_codebook) if alone else (state.w, state.codebook)
        return self.quantizer.deployed(x, codebook)

    def tie(self, time: float) -> float:
        return self.lambda_p(time) if self.stage == "own" else 0.0


def choice(evidence: Tensor, told: Tensor, before: Tensor) -> Tensor:
    """1 where a client is better alone (..., 1), of its own evidence (..., 4) and the clients' mean of that (..., 3 or
    more); where nobody told, all zeros, it is what it was before."""
    e, _, _, known = evidence.split(1, -1)
    m, m_2, s = pad(told[..., :3], (0, max(0, 3 - told.shape[-1]))).split(1, -1)
    t = (m_2 - m**2 - s).clamp(min=0)
    shrunk = torch.where(known > 0, (t * e + s * m) / (t + s), m)
    return torch.where(s > 0, (shrunk > MARGIN).to(before), before)


def _begun(before: State, none: Tensor) -> HedgedState:
    """The state of a client that comes from another method, or from nowhere."""
    evidence = torch.cat((none,) * 4, -1)
    return HedgedState(before.x, before.w, before.codebook, alone=none, first=none, evidence=evidence)


def _loss(info: Info) -> Tensor:
    """What a step says the model lost on its batch."""
    return torch.as_tensor(next(v for v in (info.loss, info.quantized_loss, *info.more.values()) if v is not None))
