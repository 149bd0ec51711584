"""What both sides of a secure round compute of its job: its rules, and integers out of an upload and back.

An upload with rows w_k, k = 1..r, and their shares a_k (1 where a method has none) is the integers of a_k (w_k - w) and
of a_k, in fixed point: from their sums over clients the server has the same weighted means as from the uploads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qupel.flower.wire import encode, without_shares
from qupel.parts.base import Rows, Upload
from qupel.parts.codecs.fixed import Fixed, Integers
from qupel.parts.phase import Phase
from qupel.parts.servers.base import Covering, servers, sums
from qupel.run.sections import SecureConfig
from qupel.util.errors import UserError

if TYPE_CHECKING:
    from qupel.flower.secagg import Rules
    from qupel.flower.task import Task

DEVIATIONS = 8  # of a client's noise that secure.clip leaves room for: one number in 10^15 is cut


def codec_of(secure: SecureConfig) -> Fixed:
    return Fixed(secure.clip, secure.bits)


def rules_of(task: Task, session: str, numbers: int) -> Rules:
    """Of a sum of vectors with so many numbers."""
    from qupel.flower.secagg import Rules, width_of

    assert task.secure is not None
    secure = task.secure
    return Rules(session, numbers, secure.bits, width_of(secure.bits, task.clients), secure.threshold)


def encoded(
    codec: Fixed, upload: Upload, w: Rows, residual: torch.Tensor | None, rng: np.random.Generator
) -> tuple[bytes, torch.Tensor | None]:
    """(an upload as its client keeps it, what rounding and the clip leave for the next one)."""
    shares = np.ones(len(w)) if upload.shares is None else upload.shares.double().numpy()
    payload, left = encode(codec, Upload(without_shares(upload, w)), w, residual, rng)
    return payload + np.rint(shares * codec.most).astype("<i4").tobytes(), left


def integers(codec: Fixed, payload: bytes, rows: int) -> Integers:
    """The vector that is masked: (r d + r,)."""
    cut = len(payload) - 4 * rows
    return np.concatenate([codec.integers(payload[:cut]), np.frombuffer(payload[cut:], "<i4").astype(np.int64)])


def mean_of(codec: Fixed, total: Integers, clients: int, w: Rows) -> Upload:
    """The mean upload of so many clients out of the sum of their integers: counted so often, it moves a server that
    adds up as all of them would. A row that nobody sent stays what it was."""
    rows, size = len(w), len(w[0])
    shares = total[rows * size :] / codec.most  # (r,)
    moved = total[: rows * size].reshape(rows, size) * codec.step  # (r, d), float64
    means = tuple(
        old if share == 0 else (old.double() + torch.from_numpy(row / share)).to(old.dtype)
        for old, row, share in zip(w, moved, shares.tolist(), strict=True)
    )
    whole = bool((shares == clients).all())
    return Upload(means, None if whole else torch.from_numpy((shares / clients).astype(np.float32)))


def in_fixed_point(cover: Covering, secure: SecureConfig, numbers: int) -> Covering:
    """A private server as clients are told it. Rounding moves each number by up to a step: the clip makes room for it,
    so that a client moves the sum by no more than is counted. Raises where secure.clip would cut the clients' noise."""
    if cover.kind == "local" or not math.isfinite(cover.clip):  # rounded afterwards: that tells no more
        return cover
    deviation = cover.noise * cover.clip
    if cover.kind == "shared" and deviation:
        part = deviation / math.sqrt(cover.clients or 1.0)
        if secure.clip < (least := cover.clip + DEVIATIONS * part):
            cut = f"it would cut the clients' noise, of deviation {part:.3g}; {least:.3g} and more keep it whole"
            raise UserError(f"secure.clip = {secure.clip:g}: {cut}")
    clip = cover.clip - codec_of(secure).step * math.sqrt(numbers)
    if clip < cover.clip / 2:
        far = f"rounding to {secure.bits} bits may move an upload by more than half of its clip, {cover.clip:g}"
        raise UserError(f"secure.clip = {secure.clip:g}: {far}; use secure.bits = 32, or a smaller secure.clip")
    known: Any = cover
    return replace(known, clip=clip, noise=deviation / clip)


def check_secure(phases: Sequence[Phase], weighted: bool, upload: str) -> None:
    """Raises where a job needs more of the uploads than their sum."""
    if upload != "fp32":
        raise UserError(f"--upload {upload}: with secure, uploads are integers in fixed point; set secure.bits")
    if weighted:
        raise UserError("weighted = true: with secure every client counts once; weights could single one out")
    for phase in phases:
        if not sums(phase.server):
            name = servers.name_of(phase.server)
            raise UserError(f"server {name!r} looks at uploads one by one, and with secure there is only their sum")
