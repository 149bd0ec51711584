"""What a method is: six small functions in a frozen dataclass; none inherits from another.

    start(before, plan, problem)        -> state          enter it from the phase before, or from the first model
    receive(state, w)                   -> state          take what the server sent
    step(state, problem, batch, clock)  -> state, info    one local step, and what happened in it
    upload(state)                       -> rows           what leaves the device; None where nothing does
    deployed(state)                     -> model          what is evaluated and exported, for every method, in one place
    broadcast(w)                        -> rows           what the server's model is at the start: w alone for most

What a class may say of its method beside these, with the default in brackets:

    state_type   its own state, a frozen dataclass that extends `parts.base.State`             [that one]
    keeps_state  whether a client's next round depends on its last one                         [True]
    sends        whether anything leaves a client                                              [True]
    any_network  whether x may be of another network than w                                    [False]
    row_per_network
                 whether x is averaged, too, over the clients of its network: its uploads end
                 with x, and what it receives with the mean                                    [False]
    w_is_mean    whether w is that mean for the clients of its network; else they have none    [True]
    labels_only  whether outputs must be logits of classes                                     [False]
    models       how many of the rows are models, the first ones; the server averages others   [all]
    tie(time)    lambda_p, the pull between x and w, for diagnostics                           [0]
    adapt(state, problem, batches, clock) -> state
                 a last look at the client's own training data before its model is judged or
                 shipped; nothing of it is kept                                                [none]
    again(before, x, past, plan, problem) -> state
                 before `start`, for a client that wishes it had learned something else: past has
                 the methods of all phases before, each with the steps that the client took,
                 x is what it began with                                                       [before]

The smallest one, with which every client trains the shared model for itself and nothing is sent:

    @methods.register("lonely")
    @dataclass(frozen=True)
    class Lonely(Alone):
        eta1: Schedule = Schedule(0.1)
        def start(self, before, plan, problem): return State(before.x, before.w)
        def step(self, s, problem, batch, clock):
            found = problem.own.gradient(s.x, batch)
            return replace(s, x=s.x - self.eta1(clock.time) * found.gradient), Info(loss=found.loss)
        def deployed(self, state): return Deployed(state.x, state.codebook)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.optim import Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Quantized, Rows, State, Upload
from qupel.parts.quantizers import Quantizer, quantizers
from qupel.tasks.task import Batch, Problem, Task
from qupel.util.registry import Registry

methods: Registry[type[Method]] = Registry("method", "qupel.parts.methods")


class Method(Protocol):
    """The protocol above."""

    def start(self, before: State, plan: Plan, problem: Problem) -> Any: ...

    def receive(self, state: Any, w: Rows) -> Any: ...

    def step(self, state: Any, problem: Problem, batch: Batch, clock: Clock) -> tuple[Any, Info]: ...

    def upload(self, state: Any) -> Upload | None: ...

    def deployed(self, state: Any) -> Deployed: ...

    def broadcast(self, w: Tensor) -> Rows: ...


methods.protocol = Method

Stepped = tuple[Tensor, Codebook, Memory, Info]
Past = Iterable[tuple[Method, Iterable[tuple[Batch, Clock]]]]  # methods of phases, each with the steps of a client


class OneRow:
    """For methods whose server has one model: w comes, and takes the place of the client's copy."""

    def receive(self, state: Any, w: Rows) -> Any:
        return replace(state, w=w[0])

    def broadcast(self, w: Tensor) -> Rows:
        return (w,)


class Alone:
    """The functions of a method that does not communicate."""

    sends: ClassVar[bool] = False

    def receive(self, state: State, w: Rows) -> State:
        return state

    def upload(self, state: State) -> Upload | None:
        return None

    def broadcast(self, w: Tensor) -> Rows:
        return (w,)


def state_of(method: Method) -> type[State]:
    return getattr(method, "state_type", State)


def sends(method: Method) -> bool:
    return getattr(method, "sends", True)


def keeps_state(method: Method) -> bool:
    return getattr(method, "keeps_state", True)


def models_of(method: Method, rows: int) -> int:
    return getattr(method, "models", rows)


def any_network(method: Method) -> bool:
    return getattr(method, "any_network", False)


def row_per_network(method: Method) -> bool:
    return getattr(method, "row_per_network", False)


def w_is_mean(method: Method) -> bool:
    return getattr(method, "w_is_mean", True)


def labels_only(method: Method) -> bool:
    """Of the method, or of its quantizer."""
    parts = (method, getattr(method, "quantizer", None))
    return any(getattr(part, "labels_only", False) for part in parts)


def quantizer_of(method: Method) -> str:
    """The name of a method's quantizer; "none" where it has none."""
    held = getattr(method, "quantizer", None)
    return "none" if held is None else quantizers.name_of(held)


def tie(method: Method, time: float) -> float:
    """lambda_p at a time, 0 where nothing pulls x to w."""
    pull = getattr(method, "tie", None)
    return pull(time) if pull is not None else 0.0


def adapted(method: Method, state: Any, problem: Problem, batches: Iterable[Batch], clock: Clock) -> Any:
    """The state whose model is judged and shipped: itself, but for a method that adapts it to the client's data."""
    adapt = getattr(method, "adapt", None)
    return adapt(state, problem, batches, clock) if adapt is not None else state


def chosen(method: Method, state: Any, problem: Problem, batches: Iterable[Batch], held: Batch, clock: Clock) -> Any:
    """The state after a look at samples that no step of the phase has seen; itself, unless the method looks."""
    choose = getattr(method, "choose", None)
    return choose(state, problem, batches, held, clock) if choose is not None else state


def again(method: Method, before: Any, x: Tensor, past: Past, plan: Plan, problem: Problem) -> Any:
    """The state with which a phase is entered; itself, unless the method has some of it learned anew."""
    relearn = getattr(method, "again", None)
    return relearn(before, x, past, plan, problem) if relearn is not None else before


def quantized_step(
    quantizer: Quantizer,
    optimizer: Optimizer,
    eta1: Schedule,
    model: Quantized,
    task: Task,
    batch: Batch,
    clock: Clock,
    pull: tuple[Tensor, float] | None = None,
) -> Stepped:
    """One step of a quantized model on f plus a term whose gradient at x is strength * direction, `pull` the two of
    them: Algorithm 1 (lines 2 to 5) for the quantizer `prox`, the plain optimizer's step for `none`."""
    x, codebook, memory = model
    descent = quantizer.gradient(x, codebook, task, batch, clock)
    g = descent.gradient if pull is None else descent.gradient.add_(pull[0], alpha=pull[1])
    y, memory = optimizer.step(x, g, memory, eta1(clock.time))
    x, codebook, info = quantizer.settle(y, codebook, descent, task, batch, eta1, clock)
    return x, codebook, memory, info
