"""An upload as bytes, by a codec of `parts.codecs`: its rows one after the other, then, where a method gives its rows
shares of their own, these as float32. And what local differential privacy does to it before."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload, vector
from qupel.parts.codecs import Codec, codecs
from qupel.parts.codecs.base import decode_rows, encode_rows, floats
from qupel.util.errors import UserError


def encode(
    codec: str | Codec, upload: Upload, sent: Rows, residual: Tensor | None, rng: np.random.Generator
) -> tuple[bytes, Tensor | None]:
    """(bytes, what they leave for the next upload) of an upload to a server that sent these rows. What a phase with
    another number of rows has left is let go."""
    size = len(sent[0])
    before = () if residual is None or len(residual) != len(sent) * size else residual.split(size)
    payload, left = encode_rows(codecs.build(codec, "upload"), upload.rows, sent, before, rng)
    if upload.shares is not None:
        payload += upload.shares.to(torch.float32).numpy().tobytes()
    return payload, vector(left) if left else None


def decode(codec: str, payload: bytes, sent: Rows) -> Upload:
    """The upload as the server takes it."""
    part, shares = codecs[codec](), None
    size = len(sent) * part.size(len(sent[0]))
    if len(payload) == size + 4 * len(sent):
        payload, shares = payload[:size], floats(payload[size:])
        if not bool(((shares >= 0) & (shares <= 1)).all()):
            raise UserError("the shares of its rows are not from 0 to 1")
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is screened afterwards
        return Upload(decode_rows(part, payload, sent), shares)


def noise_deviation(epsilon: float, delta: float, sensitivity: float) -> float:
    """The Gaussian mechanism (Dwork and Roth, 2014, theorem A.1), valid for epsilon up to 1."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def without_shares(upload: Upload, w: Rows) -> Rows:
    """The rows of an upload whose shares are not to be told: a row that counts by a half has moved by a half."""
    if upload.shares is None:
        return upload.rows
    found = zip(upload.rows, w, upload.shares.tolist(), strict=True)
    return tuple(sent + share * (row - sent) for row, sent, share in found)


def privatize(upload: Tensor, w: Tensor, clip: float, deviation: float, rng: np.random.Generator) -> Tensor:
    """w + clipped difference + Gaussian noise (d,): the difference to w is scaled to a norm of at most `clip`."""
    difference = upload - w
    difference = difference * min(1.0, clip / max(float(difference.double().norm()), 1e-30))
    noise = torch.from_numpy(rng.normal(0, deviation, len(w)).astype(np.float32))
    return w + difference + noise
