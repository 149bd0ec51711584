"""What every method shares: the state of a client, the six functions of a method, the server's mean.

A method is six small functions in a frozen dataclass; none inherits from another:

    start(before, plan)             -> state    enter the method from the phase before it (or from the initial model)
    receive(state, w)               -> state    take the server's model
    step(state, gradient, batch, clock) -> state    one local step
    upload(state)                   -> vector   what leaves the device; None where nothing does
    aggregate(w, uploads)           -> w        the server's part, of (upload, its share) in client order
    deployed(state)                 -> model    what is evaluated and exported, for every method, in one place
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from qupel.codebook import Codebook, Plan
from qupel.flat import Layout, Slot
from qupel.optim import Memory
from qupel.oracle import Of
from qupel.schedule import Clock

Batch = tuple[Tensor, Tensor]  # inputs, targets
Uploads = Iterable[tuple[Tensor, float]]  # (upload, its share of the mean), one after the other


class Gradient(Protocol):
    """The gradient of the client's loss at a vector, on a batch. slots: where it is asked for; elsewhere it may be 0,
    so that nothing has to be computed below the first layer that is asked for. of: what the vector is, x or Q(x), so
    that metrics can name the loss found there."""

    def __call__(self, x: Tensor, batch: Batch, slots: Sequence[Slot] | None = None, of: Of = "x") -> Tensor: ...


@dataclass(frozen=True)
class State:
    """Everything a client keeps. x: its own model; w: its copy of the global model; both (d,)."""

    x: Tensor
    w: Tensor
    codebook: Codebook = field(default_factory=Codebook)
    memory: Memory = ()  # the optimizer's


@dataclass(frozen=True)
class Deployed:
    """The model a client ships: a vector whose quantized layers sit exactly on the codebook's centers."""

    x: Tensor
    codebook: Codebook

    def cpu(self) -> Deployed:
        return Deployed(self.x.cpu(), self.codebook.with_centers(c.cpu() for c in self.codebook.centers))


def keeps_state(method: Method) -> bool:
    """Whether a client's next round depends on its last one; a method says no by a class attribute of this name."""
    return getattr(method, "keeps_state", True)


def streams(method: Method) -> bool:
    """Whether `aggregate` is done with an upload when it asks for the next, so that it may be lent one in place of a
    copy that it can keep; a method says so by a class attribute of this name."""
    return getattr(method, "streams", False)


class Method(Protocol):
    """The protocol above. Methods are frozen dataclasses whose fields are their settings."""

    def start(self, before: State, plan: Plan, layout: Layout) -> State: ...

    def receive(self, state: State, w: Tensor) -> State: ...

    def step(self, state: State, gradient: Gradient, batch: Any, clock: Clock) -> State: ...

    def upload(self, state: State) -> Tensor | None: ...

    def aggregate(self, w: Tensor, uploads: Uploads) -> Tensor: ...

    def deployed(self, state: State) -> Deployed: ...


class Alone:
    """The three functions of a method that does not communicate."""

    def receive(self, state: State, w: Tensor) -> State:
        return state

    def upload(self, state: State) -> Tensor | None:
        return None

    def aggregate(self, w: Tensor, uploads: Uploads) -> Tensor:
        return w


def quantized(state: State) -> Deployed:
    """Q_c(x): what every method with a codebook ships."""
    return Deployed(state.codebook.hard(state.x), state.codebook)


def mean(uploads: Uploads) -> Tensor:
    """The weighted mean of vectors, in client order and in float64, so that no engine changes a bit of it.

    Each vector is used once, when it comes: no more than one need be in memory.
    """
    pairs = iter(uploads)
    vector, weight = next(pairs)
    total = vector.double() * weight
    for vector, share in pairs:
        total.add_(vector, alpha=share)
        weight += share
    return total.div_(weight).to(vector.dtype)
