"""Differential privacy of the shared model: every client's move is clipped, and their sum has noise on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload, vector
from qupel.parts.servers.base import Server, ServerState, Sum, add, servers, sums


@servers.register("private", paper="McMahan, Ramage, Talwar, Zhang, ICLR 2018")
@dataclass(frozen=True)
class Private:
    """w <- w + (sum_i D_i min(1, clip / |D_i|) + N(0, (noise clip)^2)) / n  with D_i = w_i - w, all rows together.

    kind: who adds the noise. central: the server, to the sum; it clips once more, as it believes no client. shared:
    every client its part, of variance (noise clip)^2 / n, so that nobody sees a sum without it. local: every client all
    of it. n: `clients`, how many are expected, known beforehand; the sum is divided by it whoever comes (None: by how
    many came, which no accounting here is for). server: what takes that mean a step further; None: it is the next w.
    """

    clip: float = 1.0
    noise: float = 0.0
    kind: Literal["central", "shared", "local"] = "central"
    clients: float | None = None
    server: Server | None = None

    sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip = {self.clip}: a length above 0 is needed")
        if not 0 <= self.noise < math.inf or (self.noise and self.clip == math.inf):
            raise ValueError(f"noise = {self.noise}: a number from 0 on is needed, in clips, and a clip that is finite")
        if self.clients is not None and not self.clients > 0:
            raise ValueError(f"clients = {self.clients}: how many are expected in a round, above 0")
        if self.server is not None and (not sums(self.server) or isinstance(self.server, Private)):
            raise ValueError("server: one that needs no more than the sum of the uploads: mean, fedavgm, fedadam, ...")

    # --- at a client ---

    def leave(self, upload: Upload, sent: Rows, rng: np.random.Generator) -> Upload:
        """What leaves a client: w plus its move, clipped, with its part of the noise. Shares are told by the move."""
        rows = self._clipped(without_shares(upload, sent), sent)
        deviation = self.noise * self.clip
        if self.kind == "central" or not deviation:
            return Upload(tuple(row.to(w.dtype) for row, w in zip(rows, sent, strict=True)))
        if self.kind == "shared":
            deviation /= math.sqrt(self.clients or 1.0)
        return Upload(tuple((row + normal(rng, deviation, w)).to(w.dtype) for row, w in zip(rows, sent, strict=True)))

    # --- at the server ---

    def bounded(self, upload: Upload, sent: Rows) -> Upload:
        """An upload as it is added, in float64: clipped whatever its client did, where its noise does not forbid it."""
        return Upload(self._clipped(upload.rows, sent)) if self.kind == "central" else upload

    def cover(self, so_far: Sum | None, sent: Rows, rng: np.random.Generator) -> Sum:
        """A round's sum as the server within gets it: n w + all moves + noise, of weight n. Nobody came: noise."""
        n = self.clients or (so_far.weights[0] if so_far else 0.0) or 1.0
        deviation = self.noise * self.clip if self.kind == "central" else 0.0
        rows = []
        for k, w in enumerate(sent):
            moves = so_far.rows[k] - so_far.weights[k] * w.double() if so_far else torch.zeros_like(w).double()
            rows.append(n * w.double() + moves + (normal(rng, deviation, w) if deviation else 0.0))
        return Sum(rows, [n] * len(sent))

    def _clipped(self, rows: Rows, sent: Rows) -> Rows:
        """In float64; all rows together are one vector."""
        moves = [row.double() - w.double() for row, w in zip(rows, sent, strict=True)]
        length = float(vector(tuple(moves)).norm())
        scale = 1.0 if length <= self.clip else self.clip / length  # NaN stays NaN, and is screened
        return tuple(w.double() + scale * move for w, move in zip(sent, moves, strict=True))

    def start(self, w: Rows) -> ServerState:
        return self.server.start(w) if self.server else ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return self.server.send(w, state) if self.server else w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        return self.server.finish(w, so_far, state) if self.server else (so_far.mean(w), state)


def without_shares(upload: Upload, w: Rows) -> Rows:
    """The rows of an upload whose shares are not to be told: a row that counts by a half has moved by a half."""
    if upload.shares is None:
        return upload.rows
    found = zip(upload.rows, w, upload.shares.tolist(), strict=True)
    return tuple(sent + share * (row - sent) for row, sent, share in found)


def normal(rng: np.random.Generator, deviation: float, like: Tensor) -> Tensor:
    """Gaussian noise (d,), in float64."""
    return torch.from_numpy(rng.normal(0.0, deviation, len(like))).to(like.device)
