"""What an upload looks like on the wire, and what local differential privacy does to it before.

fp32  the vector itself, bit for bit
fp16  its difference to the w that the server sent, as float16
int8  the same difference in blocks of 256: one float32 scale s = max |v| / 127 a block, then q = floor(v / s + u) with
      u uniform in [0, 1). E[q s] = v: rounding is unbiased.

Error feedback (Seide et al., 2014): what rounding took away is kept at the client and added to its next upload.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qupel.errors import UserError

Codec = Literal["fp32", "fp16", "int8"]
BLOCK = 256  # numbers that share a scale: 1.6 % more bytes
LARGEST = 65504.0  # of float16; what is beyond stays in the residual


def wire_bytes(codec: Codec, size: int) -> int:
    """Bytes of an upload of `size` numbers."""
    return {"fp32": 4 * size, "fp16": 2 * size, "int8": size + 4 * -(-size // BLOCK)}[codec]


def encode(
    codec: Codec, upload: Tensor, w: Tensor, residual: Tensor | None, rng: np.random.Generator
) -> tuple[bytes, Tensor | None]:
    """(bytes, what they leave for the next upload) of an upload (d,) to a server that has w (d,)."""
    if codec == "fp32":
        return upload.contiguous().numpy().tobytes(), None
    v = upload - w if residual is None else upload - w + residual  # (d,)
    payload = v.clamp(-LARGEST, LARGEST).half().numpy().tobytes() if codec == "fp16" else _encode_int8(v, rng)
    return payload, v - _difference(codec, payload, len(v))


def decode(codec: Codec, payload: bytes, w: Tensor) -> Tensor:
    """The upload (d,) as the server takes it."""
    if len(payload) != wire_bytes(codec, len(w)):
        wanted = wire_bytes(codec, len(w))
        raise UserError(f"upload has {len(payload)} bytes; {codec} of {len(w)} numbers takes {wanted}")
    return _floats(payload) if codec == "fp32" else w + _difference(codec, payload, len(w))


def _floats(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)


def _difference(codec: Codec, payload: bytes, size: int) -> Tensor:
    if codec == "fp16":
        return torch.frombuffer(bytearray(payload), dtype=torch.float16).to(torch.float32)
    cut = 4 * -(-size // BLOCK)
    scales = np.frombuffer(payload[:cut], np.float32)  # (blocks,)
    codes = np.frombuffer(payload[cut:], np.int8)  # (d,)
    with np.errstate(invalid="ignore", over="ignore"):  # of scales that are not finite: the server screens for that
        return torch.from_numpy(codes * np.repeat(scales, BLOCK)[:size])


def _encode_int8(v: Tensor, rng: np.random.Generator) -> bytes:
    blocks = np.pad(v.numpy(), (0, -len(v) % BLOCK)).reshape(-1, BLOCK)  # (blocks, 256)
    scales = np.nextafter(np.abs(blocks).max(1) / np.float32(127), np.float32(np.inf))  # (blocks,); |v| / s <= 127
    codes = np.floor(blocks / scales.astype(np.float64)[:, None] + rng.random(blocks.shape)).astype(np.int8)
    return scales.tobytes() + codes.reshape(-1)[: len(v)].tobytes()


def noise_deviation(epsilon: float, delta: float, sensitivity: float) -> float:
    """The Gaussian mechanism (Dwork and Roth, 2014, theorem A.1), valid for epsilon up to 1."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def privatize(upload: Tensor, w: Tensor, clip: float, deviation: float, rng: np.random.Generator) -> Tensor:
    """w + clipped difference + Gaussian noise (d,): the difference to w is scaled to a norm of at most `clip`."""
    difference = upload - w
    difference = difference * min(1.0, clip / max(float(difference.double().norm()), 1e-30))
    noise = torch.from_numpy(rng.normal(0, deviation, len(w)).astype(np.float32))
    return w + difference + noise
