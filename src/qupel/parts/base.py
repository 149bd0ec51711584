"""What the four parts of a federated method share: a client's state, what it ships, what a step tells.

method     how are a client's models tied to the others'?        `parts.methods`
quantizer  how do weights and levels meet?                       `parts.quantizers`
server     how do uploads become the next w?                     `parts.servers`
codec      how does an upload travel?                            `parts.codecs`

Each part is a frozen dataclass whose fields are its settings, registered by name in a file of its own; any choice of
four works together. The functions of the parts take one client, vectors (d,), or a stack of k of them, vectors (k, d);
shapes are written (..., d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qupel.core.codebook import Codebook
from qupel.core.optim import Memory
from qupel.tasks.task import Value

Rows = tuple[Tensor, ...]  # what travels: r vectors (..., d), one for most methods
Quantized = tuple[Tensor, Codebook, Memory]  # a model, its levels and its optimizer's memory
RECEIVED = {"received": True}  # of a field that `receive` fills at the start of every round


def vector(rows: Rows) -> Tensor:
    """All rows one after the other (r d,); of one row itself."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def received() -> Any:
    """A field of a state that comes anew with every round."""
    return field(metadata=RECEIVED)


@dataclass(frozen=True)
class State:
    """Everything a client keeps: its own model x (..., d_i), its copy w (..., d) of the global one, the levels of x,
    the optimizer's memory. A method that needs more extends it, `kw_only`, with fields that are tensors, codebooks or
    tuples of tensors; stores, stacks and checkpoints walk the fields. What is marked `received`, as w is, comes anew
    with every round and is not stored."""

    x: Tensor
    w: Tensor = field(metadata=RECEIVED)
    codebook: Codebook = field(default_factory=Codebook)
    memory: Memory = ()


S = TypeVar("S", bound=State)


def combined(states: Sequence[S], join: Callable[[Sequence[Tensor]], Tensor]) -> S:
    """One state of several of the same form: `join` makes one tensor of theirs, for each tensor of the fields."""

    def one(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return join(values)
        if isinstance(first, Codebook):
            return Codebook(first.slots, one([v.centers for v in values]), one([v.scales for v in values]))
        return tuple(one(parts) for parts in zip(*values, strict=True))

    return replace(states[0], **{f.name: one([getattr(s, f.name) for s in states]) for f in fields(states[0])})


@dataclass(frozen=True)
class Info:
    """What happened in a step. loss: f(x); quantized_loss: f(Q(x)); None where the step had no use for it. `more`: what
    else a method wants in the metrics, by name."""

    loss: Value | None = None
    quantized_loss: Value | None = None
    more: Mapping[str, Value] = field(default_factory=dict)

    @property
    def any_loss(self) -> Value:
        """What the step knows best of what the model lost on its batch."""
        return next(v for v in (self.loss, self.quantized_loss, *self.more.values()) if v is not None)


def as_rows(x: Tensor, size: int) -> Rows:
    """A vector as rows of a size, the last one filled up with zeros."""
    room = -len(x) % size
    return torch.cat([x, x.new_zeros(room)]).split(size)


@dataclass(frozen=True)
class Upload:
    """What leaves a client: rows, and a share for each (none: 1), by which the server's mean is weighted."""

    rows: Rows
    shares: Tensor | None = None  # (..., r)

    def part(self, which: slice) -> Upload:
        """Some of the rows."""
        return Upload(self.rows[which], None if self.shares is None else self.shares[..., which])


@dataclass(frozen=True)
class Deployed:
    """The model a client ships: a vector whose quantized layers sit exactly on the codebook's levels."""

    x: Tensor
    codebook: Codebook

    def cpu(self) -> Deployed:
        return Deployed(self.x.cpu(), self.codebook.to("cpu"))
