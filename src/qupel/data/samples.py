"""Samples: what an engine needs of data is their number and the rows it asks for.

Arrays   tensors in memory, or arrays in files whose rows are read when they are asked for
Items    a Dataset of torch's or Hugging Face's, asked item by item
Pool     the samples of several clients one after another, none of them copied
Some     some rows of any of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qupel.data import checks
from qupel.data.stored import LOOK, Stored, looked_at
from qupel.tasks.task import Batch
from qupel.tasks.trees import Tree, leaves, over
from qupel.util.errors import UserError

Rows = np.ndarray | Tensor | slice
Kind = Any  # a tree of (dtype, shape of one sample)
CPU = torch.device("cpu")


class Samples(Protocol):
    """Of `read` and `take` the first gives a batch, the second samples again."""

    @property
    def groups(self) -> Tensor | None:
        """The natural owner (user, device, hospital) of each sample, int64 (n,), when known."""

    @property
    def labels(self) -> Tensor | None:
        """int64 (n,) where targets are class labels that are known without reading any sample."""

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Type and shape of one sample's inputs and targets."""

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> Batch:
        """The batch of these row numbers, in this order."""

    def take(self, rows: np.ndarray | Tensor) -> Samples:
        """The samples at these row numbers, in this order."""

    def to(self, device: torch.device) -> Samples: ...

    def mark(self, found: Any) -> None:
        """Put what tells these samples from others into a hash. Of what is not in memory: a look at a few rows."""


def kind_of(leaf: Tensor | Stored) -> tuple[torch.dtype, tuple[int, ...]]:
    return leaf.dtype, tuple(leaf.shape[1:])


def shape_of(samples: Samples) -> tuple[int, ...]:
    """Of one input; () where there are several."""
    kind = samples.kinds[0]
    return tuple(kind[1]) if isinstance(kind, tuple) and isinstance(kind[0], torch.dtype) else ()


@dataclass(frozen=True, eq=False)
class Arrays:
    """Samples as tensors in memory, or as arrays in files (`Stored`).

    inputs   uint8 images (n, C, H, W), float32 or int64 (n, ...); a dict or a tuple of these where there are several
    targets  labels int64 (n,), or int64 or float32 (n, ...); a dict or a tuple of these
    groups   int64 (n,), the natural owner (user, device, hospital) of each sample, when known
    weights  float32 (n,), what each sample counts in the loss
    """

    inputs: Tree
    targets: Tree
    groups: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0])

    @property
    def labels(self) -> Tensor | None:
        known = isinstance(self.targets, Tensor) and self.targets.dtype == torch.int64 and self.targets.ndim == 1
        return self.targets if known else None

    @cached_property
    def kinds(self) -> tuple[Kind, Kind]:
        return over(kind_of, self.inputs), over(kind_of, self.targets)

    @cached_property
    def in_memory(self) -> bool:
        return all(isinstance(leaf, Tensor) for leaf in (*leaves(self.inputs), *leaves(self.targets)))

    def tensors(self) -> list[Tensor]:
        """All that is held in memory."""
        held = [*leaves(self.inputs), *leaves(self.targets), self.groups, self.weights]
        return [leaf for leaf in held if isinstance(leaf, Tensor)]

    def read(self, rows: Rows) -> Batch:
        if isinstance(rows, slice):
            given = () if self.weights is None else (self.weights[rows],)
            return Batch(over(lambda leaf: leaf[rows], self.inputs), over(lambda leaf: leaf[rows], self.targets), given)
        if isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor):  # index_select: 10x as fast as [index]
            index = torch.as_tensor(rows).to(self.inputs.device)
            inputs, targets = self.inputs.index_select(0, index), self.targets.index_select(0, index)
        else:
            index = torch.as_tensor(rows).to(leaves(self.inputs)[0].device)
            inputs = over(lambda leaf: leaf.index_select(0, index), self.inputs)
            targets = over(lambda leaf: leaf.index_select(0, index), self.targets)
        return Batch(inputs, targets, () if self.weights is None else (self.weights.index_select(0, index),))

    def take(self, rows: np.ndarray | Tensor) -> Samples:
        """In memory a copy."""
        if not self.in_memory:
            return Some(self, np.asarray(rows))
        inputs, targets, given = self.read(rows)
        index = torch.as_tensor(rows, dtype=torch.int64)
        groups = None if self.groups is None else self.groups.index_select(0, index.to(self.groups.device))
        return Arrays(inputs, targets, groups, *given)

    def to(self, device: torch.device) -> Arrays:
        def there(leaf: Any) -> Any:
            return None if leaf is None else leaf.to(device)

        return Arrays(*(over(there, part) for part in (self.inputs, self.targets, self.groups, self.weights)))

    def mark(self, found: Any) -> None:
        for tree in (self.inputs, self.targets, self.groups, self.weights):
            if tree is None:
                continue
            if isinstance(tree, dict):
                found.update(repr(list(tree)).encode())
            for leaf in leaves(tree):
                if isinstance(leaf, Stored):
                    leaf.mark(found)
                else:
                    found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
                    found.update(np.ascontiguousarray(leaf.cpu().numpy()).data)


@dataclass(frozen=True, eq=False)
class Items:
    """A map-style Dataset: `dataset[i]` is, or `convert` makes of it, (inputs, targets) or (inputs, targets, weight).

    who  whose samples these are, for messages
    """

    dataset: Any
    who: str
    convert: Callable[[Any], Any] | None = None
    device: torch.device = CPU
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def labels(self) -> Tensor | None:
        """torchvision's sets and their like have their labels as `targets`."""
        held = getattr(self.dataset, "targets", None)
        if held is None or not self._first_is_label():
            return None
        values = np.asarray(held)
        fits = values.shape == (len(self),) and values.dtype.kind in "iu"
        return torch.from_numpy(values.astype(np.int64)) if fits else None

    def _first_is_label(self) -> bool:
        kind = self.kinds[1]
        return isinstance(kind, tuple) and kind == (torch.int64, ())

    @cached_property
    def kinds(self) -> tuple[Kind, Kind]:
        inputs, targets, _ = self.read(np.array([0]))
        return over(kind_of, inputs), over(kind_of, targets)

    def read(self, rows: Rows) -> Batch:
        numbers = list(range(*rows.indices(len(self)))) if isinstance(rows, slice) else np.asarray(rows).tolist()
        samples = [self._sample(number) for number in numbers]
        if len({len(sample) for sample in samples}) > 1:
            raise UserError(f"{self.who}: some rows have a weight, others none; give all of them one")
        try:
            parts = [over(lambda *leaf: torch.stack(leaf), *column) for column in zip(*samples, strict=True)]
        except (RuntimeError, ValueError, KeyError) as e:
            why = str(e).splitlines()[0]
            raise UserError(f"{self.who}: rows {numbers[0]}, ... differ in shape; make them alike ({why})") from None
        inputs, targets, *given = (over(lambda leaf: leaf.to(self.device), part) for part in parts)
        return Batch(inputs, targets, tuple(given))

    def _sample(self, row: int) -> tuple[Tree, ...]:
        """inputs, targets[, weight], as tensors of one sample."""
        where = f"{self.who}, row {row}"
        try:
            item = self.dataset[row]
            item = item if self.convert is None else self.convert(item)
        except Exception as e:  # whatever a user's Dataset raises
            raise UserError(f"{where}: the Dataset raises {type(e).__name__}: {_first_line(e)}") from e
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            what = f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            needed = "(inputs, targets) or (inputs, targets, weight); give convert=, a function that makes it"
            raise UserError(f"{where}: the Dataset gives {what}; needed is {needed}")
        inputs = checks.tree(f"{where}: inputs", item[0], checks.one_input)
        targets = checks.tree(f"{where}: targets", item[1], checks.one_target)
        if len(item) == 2:
            return inputs, targets
        return inputs, targets, torch.tensor(float(item[2]))

    def take(self, rows: np.ndarray | Tensor) -> Samples:
        return Some(self, np.asarray(rows))

    def to(self, device: torch.device) -> Items:
        return replace(self, device=device)

    def mark(self, found: Any) -> None:
        found.update(f"{type(self.dataset).__qualname__} {len(self)}".encode())
        inputs, targets, given = self.read(looked_at(len(self), LOOK // 4))
        Arrays(inputs, targets, None, *given).mark(found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


@dataclass(frozen=True, eq=False)
class Some:
    """These rows of other samples."""

    samples: Samples
    rows: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def groups(self) -> Tensor | None:
        groups = self.samples.groups
        return None if groups is None else groups[torch.from_numpy(self.rows)]

    @property
    def labels(self) -> Tensor | None:
        labels = self.samples.labels
        return None if labels is None else labels[torch.from_numpy(self.rows)]

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.samples.kinds

    def read(self, rows: Rows) -> Batch:
        return self.samples.read(self.rows[rows if isinstance(rows, slice) else np.asarray(rows)])

    def take(self, rows: np.ndarray | Tensor) -> Samples:
        return Some(self.samples, self.rows[np.asarray(rows)])

    def to(self, device: torch.device) -> Some:
        return Some(self.samples.to(device), self.rows)

    def mark(self, found: Any) -> None:
        self.samples.mark(found)
        found.update(np.ascontiguousarray(self.rows).data)


@dataclass(frozen=True, eq=False)
class Pool:
    """Samples of several owners, those of the first before those of the second; all of one kind."""

    parts: Sequence[Samples]
    groups: Tensor | None = None

    @cached_property
    def ends(self) -> np.ndarray:
        return np.cumsum([len(part) for part in self.parts])  # (owners,)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def labels(self) -> Tensor | None:
        known = [part.labels for part in self.parts]
        return torch.cat([k for k in known if k is not None]) if all(k is not None for k in known) else None

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.parts[0].kinds

    def read(self, rows: Rows) -> Batch:
        """A batch is most often one owner's."""
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        owner = np.searchsorted(self.ends, numbers, "right")  # (n,)
        within = numbers - np.concatenate([[0], self.ends])[owner]
        if (owner == owner[0]).all():
            return self.parts[owner[0]].read(within)
        order = np.argsort(owner, kind="stable")
        batches = [self.parts[k].read(within[order][owner[order] == k]) for k in np.unique(owner)]
        back = torch.from_numpy(np.argsort(order))
        return Batch(*over(lambda *leaf: torch.cat(leaf)[back.to(leaf[0].device)], *map(tuple, batches)))

    def take(self, rows: np.ndarray | Tensor) -> Samples:
        return Some(self, np.asarray(rows))

    def to(self, device: torch.device) -> Pool:
        return Pool([part.to(device) for part in self.parts], None if self.groups is None else self.groups.to(device))

    def mark(self, found: Any) -> None:
        for part in self.parts:
            part.mark(found)


def held(samples: Samples) -> list[Tensor]:
    """The tensors that samples have in memory."""
    if isinstance(samples, Arrays):
        return samples.tensors()
    if isinstance(samples, Some):
        return held(samples.samples)
    return [tensor for part in samples.parts for tensor in held(part)] if isinstance(samples, Pool) else []
