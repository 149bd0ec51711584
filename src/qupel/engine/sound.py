"""Whether what a client made can be used."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qupel.parts.base import Rows, State, Upload


def screen(upload: Upload | None, w: Rows) -> str | None:
    """Why an upload is refused, None if it is sound: it has the rows that the server sent."""
    if upload is None:
        return None
    if len(upload.rows) != len(w):
        return f"upload has {len(upload.rows)} rows, expected {len(w)}"
    for row, sent in zip(upload.rows, w, strict=True):
        if row.shape != sent.shape:
            return f"upload has shape {tuple(row.shape)}, expected {tuple(sent.shape)}"
        if not all_finite(row):
            return "upload holds values that are not finite"
    return None


def sound(state: State) -> str | None:
    """Why a client's new state is refused, None if it is sound: a method that sends nothing is screened, too."""
    for tensor in (state.x, *state.codebook.centers):
        if not all_finite(tensor):
            return "its model holds values that are not finite"
    return None


def all_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and takes a fortieth of the time of looking at each; any other may be theirs."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
