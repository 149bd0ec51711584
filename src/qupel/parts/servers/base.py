"""What a server is: functions in a frozen dataclass that take uploads one at a time, so that no more than one need be
in memory, and a state of its own, which is part of every checkpoint.

    start(w)                     -> state        at the first round of a phase; tensors, none for most
    send(w, state)               -> rows         what goes out to the clients: w itself for most
    add(so_far, upload, share)   -> so_far       one upload more; `so_far` is None at first
    finish(w, so_far, state)     -> w, state     the next model

`sums = True` says that it needs no more than the weighted sum of the uploads: it works where nobody sees one of them
(secure aggregation). A server with a `cover` is private: what leaves a client, its `leave` makes (`Covering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.util.registry import Registry

ServerState = tuple[Tensor, ...]

servers: Registry[type[Server]] = Registry("server", "qupel.parts.servers")


class Server(Protocol):
    """The protocol above. An upload is only lent: what is kept of it must be copied."""

    def start(self, w: Rows) -> ServerState: ...

    def send(self, w: Rows, state: ServerState) -> Rows: ...

    def add(self, so_far: Any, upload: Upload, share: float) -> Any: ...

    def finish(self, w: Rows, so_far: Any, state: ServerState) -> tuple[Rows, ServerState]: ...


servers.protocol = Server


def sums(server: Server) -> bool:
    """Whether a server needs no more than the weighted sum of the uploads."""
    return getattr(server, "sums", False)


@runtime_checkable
class Covering(Server, Protocol):
    """A server whose sums have noise on them; `leave` is done at the client, the others at the server."""

    clip: float
    noise: float
    kind: str
    clients: float | None

    def leave(self, upload: Upload, sent: Rows, rng: np.random.Generator) -> Upload: ...

    def bounded(self, upload: Upload, sent: Rows) -> Upload: ...

    def cover(self, so_far: Sum | None, sent: Rows, rng: np.random.Generator) -> Sum: ...


def covering(server: Server) -> Covering | None:
    """The server if it is private, else None."""
    return server if isinstance(server, Covering) else None


@dataclass
class Sum:
    """Weighted sums of the rows so far, in float64 and in client order, so that no engine changes a bit of them."""

    rows: list[Tensor]
    weights: list[float]

    def mean(self, w: Rows) -> Rows:
        """The means; a row that nobody sent stays what it was."""
        found = zip(self.rows, self.weights, w, strict=True)
        return tuple((total / weight).to(old.dtype) if weight else old for total, weight, old in found)


def add(so_far: Sum | None, upload: Upload, share: float) -> Sum:
    """One upload more in the sums, with its client's share."""
    shares: Sequence[float] = [1.0] * len(upload.rows) if upload.shares is None else upload.shares.tolist()
    weights = [share * part for part in shares]
    if so_far is None:
        return Sum([row.double() * weight for row, weight in zip(upload.rows, weights, strict=True)], weights)
    for k, (row, weight) in enumerate(zip(upload.rows, weights, strict=True)):
        so_far.rows[k].add_(row, alpha=weight)
        so_far.weights[k] += weight
    return so_far


Columns = list[list[Tensor]]  # per row of the model, what clients sent of it


class Together:
    """The functions of servers that look at all uploads of a round at once: for each row of the model

        w <- meet(w_1, ..., w_n; w)

    Shares do not count, but a row of share 0 was not sent; one that nobody sent stays what it was. All uploads of a
    round are in memory.
    """

    def meet(self, uploads: Tensor, w: Tensor) -> Tensor:
        """The next row (d,), of what clients sent (n, d) and the row as it was (d,)."""
        raise NotImplementedError

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Columns | None, upload: Upload, share: float) -> Columns:
        sent = [True] * len(upload.rows) if upload.shares is None else (upload.shares > 0).tolist()
        columns = [[] for _ in upload.rows] if so_far is None else so_far
        for column, row, counts in zip(columns, upload.rows, sent, strict=True):
            column.extend([row.clone()] if counts else [])
        return columns

    def finish(self, w: Rows, so_far: Columns, state: ServerState) -> tuple[Rows, ServerState]:
        found = zip(so_far, w, strict=True)
        return tuple(self.meet(torch.stack(rows), old).to(old.dtype) if rows else old for rows, old in found), state


def zeros_like(w: Rows) -> ServerState:
    return tuple(torch.zeros_like(row) for row in w)


class Adaptive:
    """The functions of FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021, Algorithm 2). With D = mean - w:

        m <- beta1 m + (1 - beta1) D,   v <- second(v, D^2),   w <- w + rate m / (sqrt(v) + tau)

    v starts at tau^2. The paper's form has no bias correction.
    """

    rate: float
    beta1: float
    tau: float

    sums: ClassVar[bool] = True

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v."""
        raise NotImplementedError

    def start(self, w: Rows) -> ServerState:
        return (*zeros_like(w), *(torch.full_like(row, self.tau**2) for row in w))

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        r, new, first, squares = len(w), [], [], []
        for mean, old, m, v in zip(so_far.mean(w), w, state[:r], state[r:], strict=True):
            difference = mean - old
            first.append(self.beta1 * m + (1 - self.beta1) * difference)
            squares.append(self.second(v, difference.square()))
            new.append(old + self.rate * first[-1] / (squares[-1].sqrt() + self.tau))
        return tuple(new), (*first, *squares)
