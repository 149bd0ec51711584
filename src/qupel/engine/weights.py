"""What a line of metrics tells of weights and centers: enough to draw them, for a few clients. Reads, never changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qupel.core.codebook import Plan, mean_bits
from qupel.parts.methods.base import Deployed

BINS = 200
MOST_PLANS = 6
MOST_CENTERS = 16  # more lines than that in one picture nobody can read


def shown_clients(plans: Sequence[Plan]) -> frozenset[int]:
    """The first client of each plan that quantizes something, of the first few such plans."""
    first: dict[tuple[tuple[str, int], ...], int] = {}
    for client, plan in enumerate(plans):
        if plan:
            first.setdefault(tuple(plan.items()), client)
    return frozenset(list(first.values())[:MOST_PLANS])


def told(client: int, x: Tensor, model: Deployed, with_weights: bool) -> dict[str, Any] | None:
    """A client's centers by layer; with its weights: histograms of x (d,), unless all of them sit on their centers."""
    layers = [(slot, c) for slot, c in model.codebook if len(c) <= MOST_CENTERS]
    if not layers:
        return None
    found: dict[str, Any] = {"client": client, "bits": mean_bits(model.codebook)}
    found["centers"] = {slot.name: [short(v) for v in c.tolist()] for slot, c in layers}
    if with_weights and not torch.equal(x, model.x):
        found["histograms"] = {slot.name: histogram(x[slot.slice], model.x[slot.slice]) for slot, _ in layers}
    return found


def histogram(x: Tensor, q: Tensor) -> dict[str, Any]:
    """Counts of a layer's weights x (k,) in equal bins, and the share of them that sit on their centers q (k,)."""
    low, high = float(x.min()), float(x.max())
    counts = torch.histc(x, BINS, low, high).int().tolist() if low < high else [len(x)]
    return {"low": short(low), "high": short(high), "on": short(float((x == q).double().mean())), "counts": counts}


def short(value: float) -> float:
    """Five significant digits: a picture has no more."""
    return float(f"{value:.5g}")
