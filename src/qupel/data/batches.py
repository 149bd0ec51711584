"""Which rows a client sees at step t, and how rows become a batch. Randomness is addressed, not consumed.

Every random draw of a run comes from `generator(seed, purpose, *address)`: the same address gives the same numbers,
whoever asks, in whatever order, on whatever machine.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.data.samples import Samples
from qupel.data.sources import Dataset
from qupel.tasks.task import Batch
from qupel.tasks.trees import Tree, over
from qupel.util.errors import UserError


def generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A generator of its own for every (seed, purpose, address); all numbers are from 0 to 2^64 - 1.

    >>> generator(0, "batches", 3, 17).integers(100) == generator(0, "batches", 3, 17).integers(100)
    True
    """
    words = [len(address), zlib.crc32(purpose.encode())]  # the length first: (1,) and (1, 0) are two addresses
    for number in (seed, *address):
        if not 0 <= number < 2**64:
            raise UserError(f"seed or address {number} of {purpose!r}: allowed are 0 to 2^64 - 1")
        words += (int(number) & 0xFFFFFFFF, int(number) >> 32)
    entropy = np.array(words, np.uint32)  # a list would be converted word by word
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


@lru_cache(maxsize=128)
def _order(seed: int, client: int, epoch: int, count: int) -> np.ndarray:
    """The permutation of a client's samples in one epoch, int32 (count,)."""
    return generator(seed, "batches", client, epoch).permutation(count).astype(np.int32)


def rows(seed: int, client: int, step: int, count: int, size: int) -> np.ndarray:
    """Positions 0..count-1 of the client's `step`-th batch (from 0), int64 (min(size, count),).

    Batches are consecutive slices of the endless stream of per-epoch permutations: within each `count` numbers of the
    stream every sample comes exactly once, and a batch may reach from one epoch into the next.
    """
    if count < 1 or size < 1 or step < 0:
        raise UserError(f"batch of {size} from {count} samples at step {step}: allowed are at least 1, 1 and 0")
    return rows_of_steps(seed, client, step, 1, count, size)[0]


def rows_of_steps(seed: int, client: int, step: int, steps: int, count: int, size: int) -> np.ndarray:
    """The same of `steps` batches from the `step`-th on, int64 (steps, min(size, count))."""
    size = min(size, count)
    epoch, start = divmod(step * size, count)
    end = start + steps * size
    stream = [_order(seed, client, epoch + k, count) for k in range(max(1, -(-end // count)))]
    drawn = stream[0][start:end] if len(stream) == 1 else np.concatenate(stream)[start:end]
    return drawn.astype(np.int64).reshape(steps, size)


FIRST, LEAST, MOST = 10, 2, 20  # samples that nothing is held back of; that are, at least and at the most


def held_back(labels: np.ndarray, share: float) -> np.ndarray:
    """Whether a client's sample is held back (n,): a share of all beyond the first ten, 2 to 20; none of fewer than 8.
    Who has few misses each, and more than 20 tell not much else. Of every class it is the last ones: windows of one
    recording stand side by side, and are too alike to be split at random.

    >>> held_back(np.array([0] * 8 + [1] * 12), 0.5).nonzero()[0]
    array([ 6,  7, 17, 18, 19])
    """
    count = min(max(share * (len(labels) - FIRST), LEAST), MOST) if len(labels) >= 4 * LEAST else 0.0
    share = count / len(labels) if count else 0.0
    held, owed = np.zeros(len(labels), bool), 0.5
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        owed += share * len(rows)
        held[rows[len(rows) - int(owed) :]] = True
        owed -= int(owed)
    return held


@dataclass(frozen=True, eq=False)
class Transform:
    """Rows of inputs -> float32: normalized, and in training randomly flipped and cropped. Whole numbers (tokens) and
    truth values stay what they are.

    mean, std  per channel (C,), of uint8 inputs as fractions of 255; None: uint8 is divided by 255, floats are kept
    augment    images are mirrored with probability 1/2 (if `flip`) and cropped at random from a frame of `pad` pixels.
               The frame is 0 after normalization, which is the mean colour.
    """

    mean: Tensor | None = None
    std: Tensor | None = None
    augment: bool = False
    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UserError("mean and std: give both or none")
        if self.pad < 0:
            raise UserError(f"pad {self.pad}: at least 0")

    @classmethod
    def of(cls, dataset: Dataset, augment: bool = False, pad: int = 4) -> "Transform":
        """The transform that the data set's own mean, std and symmetry ask for."""
        if augment and len(dataset.shape) != 3:
            raise UserError(
                f"augment: {dataset.name} has inputs of shape {dataset.shape}; only images (C, H, W) can be augmented"
            )
        known = bool(dataset.mean)
        mean, std = (torch.tensor(dataset.mean), torch.tensor(dataset.std)) if known else (None, None)
        return cls(mean, std, augment, pad, dataset.mirror)

    @property
    def scale(self) -> dict[str, Any]:
        """mean and std as numbers, as files have them."""
        if self.mean is None or self.std is None:
            return {}
        return {"mean": tuple(self.mean.tolist()), "std": tuple(self.std.tolist())}

    @cached_property
    def _affine(self) -> dict[bool, tuple[Tensor, Tensor] | None]:
        """(scale, shift), each (C,), so that the output is input * scale + shift; by whether inputs are uint8."""
        if self.mean is None or self.std is None:
            return {True: (torch.tensor([1 / 255]), torch.tensor([0.0])), False: None}
        shift = -self.mean / self.std
        return {True: (1 / (255 * self.std), shift), False: (1 / self.std, shift)}

    def apply(self, inputs: Tree, rng: np.random.Generator | None = None) -> Tree:
        """uint8 or float (n, C, ...) -> float32 of the same shape, images in channels_last memory order.

        Augments only when `augment` is set and a generator is given; evaluation gives none.
        """
        if not isinstance(inputs, Tensor):
            return over(self.apply, inputs)
        if inputs.dtype in (torch.int64, torch.bool):
            return inputs.clone()
        values = inputs.to(torch.float32, copy=True)  # never a view of the data set
        affine = self._affine[inputs.dtype == torch.uint8]
        if affine is not None:
            scale, shift = (part.to(values.device).view(-1, *[1] * (inputs.ndim - 2)) for part in affine)  # (C, 1, 1)
            values = torch.addcmul(shift, values, scale)
        if inputs.ndim == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        if not self.augment or rng is None:
            return values
        if inputs.ndim != 4:
            raise UserError(
                f"augment: inputs of shape {tuple(inputs.shape[1:])}; only images (C, H, W) can be augmented"
            )
        return self._crop(values, rng)

    def _crop(self, values: Tensor, rng: np.random.Generator) -> Tensor:
        """One gather: out[i, :, y, x] = framed[i, :, top_i + y, left_i + (x or, mirrored, W-1-x)]."""
        n, channels, height, width = values.shape
        pad = self.pad
        top, left = torch.from_numpy(rng.integers(0, 2 * pad + 1, (2, n)))  # (n,), (n,)
        mirrored = torch.from_numpy(rng.random(n) < 0.5 if self.flip else np.zeros(n, bool))  # (n,)
        framed = torch.nn.functional.pad(values.permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad))  # (n, H+2p, W+2p, C)
        x = torch.arange(width)
        column = left[:, None] + torch.where(mirrored[:, None], width - 1 - x, x)  # (n, W)
        row = torch.arange(n)[:, None] * (height + 2 * pad) + top[:, None] + torch.arange(height)  # (n, H)
        index = row[:, :, None] * (width + 2 * pad) + column[:, None, :]  # (n, H, W), a pixel of `framed`
        picked = framed.reshape(-1, channels).index_select(0, index.flatten().to(values.device))  # (n*H*W, C)
        return picked.view(n, height, width, channels).permute(0, 3, 1, 2)


def batch(
    samples: Samples, rows: np.ndarray | Tensor, transform: Transform, rng: np.random.Generator | None = None
) -> Batch:
    """The batch of these rows; augmented when the transform says so and `rng` is given."""
    inputs, targets, given = samples.read(rows)
    return Batch(transform.apply(inputs, rng), targets, given)


def chunks(samples: Samples, size: int, transform: Transform) -> Iterator[Batch]:
    """All samples in order, at most `size` at a time, never augmented: what evaluation iterates."""
    if size < 1:
        raise UserError(f"evaluation batch of {size}: at least 1")
    for start in range(0, len(samples), size):
        inputs, targets, given = samples.read(slice(start, min(start + size, len(samples))))
        yield Batch(transform.apply(inputs), targets, given)
