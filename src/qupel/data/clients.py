"""Clients as they come: each with samples of its own, pooled to one data set that knows its owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from qupel.data import checks
from qupel.data.samples import Arrays, Items, Pool, Samples
from qupel.data.sources import Dataset, from_samples, kind_in_words
from qupel.tasks.trees import length, over
from qupel.util.errors import UserError

ALLOWED = "train inputs, train targets[, test inputs, test targets]"


@dataclass(frozen=True, eq=False)
class Client:
    """One client's data.

    train, test  inputs: an array (n, ...) of floats, whole numbers (tokens) or uint8 images; a dict or a tuple of such
                 arrays, which the network is called with; or, in place of inputs and targets, a map-style Dataset of
                 torch's or Hugging Face's. A memory-mapped array stays in its file.
    targets      int labels (n,), or any numbers (n, ...)
    weights      what each training sample counts in the loss (n,); test_weights: the same of test samples, by default 1
    convert      what makes (inputs, targets) or (inputs, targets, weight) of a Dataset's item

    >>> import numpy as np, qupel
    >>> qupel.Client(np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]), name="ward 7").name
    'ward 7'
    >>> one = qupel.Client(np.zeros((8, 4), "float32"), np.zeros(8, int), name="a pump")
    >>> two = qupel.Client({"ids": np.zeros((3, 5), int), "mask": np.ones((3, 5), bool)}, np.zeros(3, int))
    """

    train: Any
    train_targets: Any = None
    test: Any = None
    test_targets: Any = None
    name: str = ""
    weights: Any = None
    test_weights: Any = None
    convert: Callable[[Any], Any] | None = None


def is_dataset(value: Any) -> bool:
    """Whether samples come item by item: what has a length and items, and is no array."""
    arrays = isinstance(value, torch.Tensor | np.ndarray | Mapping | list | tuple) or hasattr(value, "__array__")
    return not arrays and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def client_of(given: Any, who: str) -> Client:
    """A client from a Client, or from a tuple of two or four arrays, or of one or two Datasets."""
    if isinstance(given, Client):
        return given
    if is_dataset(given):
        return Client(given)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UserError(f"{who}: a {type(given).__name__}; allowed are a Client, or a tuple of {ALLOWED}")
    if 1 <= len(given) <= 2 and all(is_dataset(part) for part in given):
        return Client(given[0], test=given[1] if len(given) == 2 else None)
    if len(given) not in {2, 4}:
        raise UserError(f"{who}: {len(given)} arrays; allowed are {ALLOWED}")
    return Client(*given)


def is_client(given: Any) -> bool:
    """Whether this is one client, and not several of them: a Client, a Dataset, or a tuple of arrays or of Datasets."""
    if isinstance(given, Client) or is_dataset(given):
        return True
    if isinstance(given, Mapping) or not len(given):
        return False
    return not isinstance(given[0], Client | tuple | list)


def people(clients: Sequence[Any] | Mapping[str, Any], what: str = "client") -> list[Client]:
    """Clients as they come, each with a name."""
    if isinstance(clients, Mapping):
        pairs = [(str(key), given) for key, given in clients.items()]
    else:
        pairs = [(f"{what} {i}", given) for i, given in enumerate(clients)]
    if not pairs:
        raise UserError("clients: at least one is needed")
    made = ((name, client_of(given, name)) for name, given in pairs)
    return [replace(one, name=one.name or name) for name, one in made]


def pool(clients: Sequence[Any] | Mapping[str, Any], name: str = "arrays", classes: int | None = None) -> Dataset:
    """All clients' samples as one data set, which names their owners. What is in memory is put together; what is in a
    file or a Dataset stays there."""
    everyone = people(clients)
    names = tuple(one.name for one in everyone)
    weighted = any(one.weights is not None for one in everyone)
    if (both := _at_once(everyone, classes)) is not None:
        return from_samples(*both, classes=classes, name=name, owners=names)
    train, test = [], []
    for who, one in zip(names, everyone, strict=True):
        train.append(
            _samples(f"{who}: train", one.train, one.train_targets, one.weights, one.convert, classes, weighted)
        )
        _same_kind(names[0], train[0], who, train[-1])
        mine = None
        if one.test is not None:
            parts = (one.test, one.test_targets, one.test_weights)
            mine = _samples(f"{who}: test", *parts, one.convert, classes, weighted)
            _same_kind(f"{who}'s training data", train[-1], f"{who}'s test data", mine)
        elif one.test_targets is not None:
            raise UserError(f"{who}: test targets without test inputs")
        test.append(mine)
    owned = [(i, samples) for i, samples in enumerate(test) if samples is not None]
    nobody = [(-1, train[0].take(np.array([0])))]  # a test set cannot be empty; this row belongs to no client
    both = _joined(list(enumerate(train))), _joined(owned or nobody)
    return from_samples(*both, classes=classes, name=name, owners=names)


def _at_once(everyone: Sequence[Client], classes: int | None) -> tuple[Samples, Samples] | None:
    """(train, test) where all clients have plain arrays of one kind: looked at together, which a hundred thousand need.
    None: they are not, or something is wrong, and one by one shows whose it is."""
    if any(one.weights is not None or one.test_weights is not None or one.test is None for one in everyone):
        return None
    made = []
    for inputs, targets in (
        ([one.train for one in everyone], [one.train_targets for one in everyone]),
        ([one.test for one in everyone], [one.test_targets for one in everyone]),
    ):
        if not all(map(_is_one_kind, (inputs, targets))) or list(map(len, inputs)) != list(map(len, targets)):
            return None
        try:
            samples = _samples("", np.concatenate(inputs), np.concatenate(targets), None, None, classes, False)
        except UserError:
            return None
        counts = torch.tensor(list(map(len, inputs)))
        assert isinstance(samples, Arrays)
        made.append(replace(samples, groups=torch.arange(len(counts)).repeat_interleave(counts)))
    return (made[0], made[1]) if made[0].kinds == made[1].kinds else None


def _is_one_kind(arrays: Sequence[Any]) -> bool:
    """Whether these are arrays in memory that differ in their number of rows only, none empty."""
    if any(type(array) is not np.ndarray or not array.size for array in arrays):
        return False
    return len({(array.dtype, array.shape[1:]) for array in arrays}) == 1


def _samples(
    what: str,
    inputs: Any,
    targets: Any,
    weights: Any,
    convert: Callable[[Any], Any] | None,
    classes: int | None,
    weighted: bool,
) -> Samples:
    if is_dataset(inputs):
        if targets is not None or weights is not None:
            raise UserError(f"{what}: a Dataset gives inputs, targets and weights itself; leave the others out")
        if not len(inputs):
            raise UserError(f"{what}: the Dataset is empty")
        return Items(inputs, what, convert)
    if targets is None:
        raise UserError(f"{what}: inputs without targets; only a Dataset has both ({type(inputs).__name__} given)")
    made = checks.inputs(f"{what} inputs", inputs)
    count = length(made)
    labels = checks.targets(f"{what} targets", targets, count, classes)
    counts = checks.weights(f"{what} weights", weights, count)
    return Arrays(made, labels, None, torch.ones(count) if weighted and counts is None else counts)


def _same_kind(first: str, known: Samples, who: str, samples: Samples) -> None:
    for what, one, other in zip(("inputs", "targets"), known.kinds, samples.kinds, strict=True):
        if one != other:
            shown = f"{kind_in_words(other)}, {first} has {kind_in_words(one)}"
            raise UserError(f"{who}: {what} {shown}; all clients' must be of one kind")


def _joined(owned: Sequence[tuple[int, Samples]]) -> Samples:
    groups = torch.cat([torch.full((len(samples),), owner) for owner, samples in owned])
    parts = [samples for _, samples in owned]
    arrays = [part for part in parts if isinstance(part, Arrays) and part.in_memory]
    if len(arrays) < len(parts):
        return Pool(parts, groups)
    inputs, targets = (over(lambda *leaf: torch.cat(leaf), *trees) for trees in zip(*map(_trees, arrays), strict=True))
    weights = [part.weights for part in arrays if part.weights is not None]
    return Arrays(inputs, targets, groups, torch.cat(weights) if weights else None)


def _trees(arrays: Arrays) -> tuple[Any, Any]:
    return arrays.inputs, arrays.targets
