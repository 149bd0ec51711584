"""Mean and standard deviation of inputs, per channel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from qupel.data.samples import Arrays, Samples
from qupel.data.stored import looked_at

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std, each (C,)
USUAL = 0.4, 2.5  # root mean squares of inputs that step sizes are made for
CLIENTS = 100  # that are looked at for a unit
MOST = 10_000  # rows that are read of what is not in memory
PART = 1000  # rows at a time


def scale_of(samples: Samples, rows: np.ndarray | None = None, unit: float = 1) -> Scale:
    """Mean and standard deviation of each channel of the inputs (n, C, ...) of these rows, of all by default, in units
    of `unit`. Of more than 10,000 rows that are not in memory: of 10,000 of them, evenly spread."""
    return moments(_parts(samples, rows), unit)


def unit_of(samples: Samples, rows: Sequence[np.ndarray]) -> float:
    """The median over clients of the root mean square of their inputs, to two digits; 1 where that is within 0.4 and
    2.5. rows: each client's."""
    sizes = []
    for k in looked_at(len(rows), CLIENTS):
        squares = [part.to(torch.float64).square().mean((*range(1, part.ndim),)) for part in _parts(samples, rows[k])]
        sizes.append(float(torch.cat(squares).mean().sqrt()))
    unit = float(np.median(sizes))
    return 1.0 if not 0 < unit < np.inf or USUAL[0] <= unit <= USUAL[1] else float(f"{unit:.2g}")


def _parts(samples: Samples, rows: np.ndarray | None) -> Iterator[Tensor]:
    count = len(samples) if rows is None else len(rows)
    if isinstance(samples, Arrays) and samples.in_memory:
        yield from (samples.inputs if rows is None else samples.read(rows).inputs).split(PART)
        return
    chosen = looked_at(count, MOST)
    for start in range(0, len(chosen), PART):
        part = chosen[start : start + PART]
        yield samples.read(part if rows is None else rows[part]).inputs


def moments(parts: Iterable[Tensor], unit: float = 1) -> Scale:
    """The same of inputs that come in parts; a channel that never changes has std 1."""
    count, total, square = 0, torch.zeros(()), torch.zeros(())
    for part in parts:  # (n, C, ...)
        values = part.to(torch.float64)
        rest = [dim for dim in range(part.ndim) if dim != 1]
        count += part.numel() // part.shape[1]
        total = total + values.sum(rest)  # (C,)
        square = square + values.square().sum(rest)
    mean = total / count / unit  # (C,)
    std = (square / count / unit**2 - mean.square()).clamp_min(0).sqrt()
    return tuple(mean.tolist()), tuple(value or 1.0 for value in std.tolist())
