"""Who gets what: pure functions from targets (or groups) and a seed to one `Part` per client."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from qupel.data.batches import generator
from qupel.data.samples import Samples
from qupel.data.sources import Dataset
from qupel.util.errors import UserError

T = TypeVar("T")
Values = np.ndarray | Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one client, each int64 and sorted.

    train_rows, validation_rows  rows of the data set's train split, disjoint
    test_rows                    rows of its test split; of the train split when `test_from_train` (held out of it)
    """

    train_rows: np.ndarray
    test_rows: np.ndarray
    validation_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    test_from_train: bool = False

    def train(self, dataset: Dataset) -> Samples:
        return dataset.train.take(self.train_rows)

    def validation(self, dataset: Dataset) -> Samples:
        return dataset.train.take(self.validation_rows)

    def test(self, dataset: Dataset) -> Samples:
        return (dataset.train if self.test_from_train else dataset.test).take(self.test_rows)


def by_class(
    train_targets: Values,
    test_targets: Values,
    clients: int,
    classes_per_client: int,
    seed: int,
    train_per_client: int | None = None,
    test_per_client: int | None = None,
) -> list[Part]:
    """The pathological split: clients * k label-pure shards of equal size, k shards of k different classes per client.

    Classes have equally many shards (they differ by one, drawn at random, when clients * k is no multiple of the number
    of classes). The test split is cut into shards of the same classes in the same way. CIFAR-10, 20 clients, k = 4: 80
    shards of 625 / 125 images, 2,500 / 500 per client. `train_per_client`, `test_per_client` shrink the shards.
    """
    k = classes_per_client
    train, test = _labels("train targets", train_targets), _labels("test targets", test_targets)
    _at_least(1, clients=clients, classes_per_client=k)
    classes = np.unique(train)
    if k > len(classes):
        raise UserError(f"classes_per_client {k}: the training data has {len(classes)} classes")
    rng = generator(seed, "by_class")
    shards = np.full(len(classes), clients * k // len(classes))  # (classes,)
    shards[rng.permutation(len(classes))[: clients * k % len(classes)]] += 1
    owners = _deal(shards, clients, k, rng)  # (clients, k)
    train_rows = _cut("train", train, classes, shards, owners, train_per_client, rng)
    test_rows = _cut("test", test, classes, shards, owners, test_per_client, rng)
    return [Part(a, b) for a, b in zip(train_rows, test_rows, strict=True)]


def _deal(shards: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """k different classes for every client, class c exactly shards[c] times; int64 (clients, k).

    Client after client draws k classes in proportion to the shards left. A class with as many shards left as there are
    clients left must be drawn: with that rule left <= clients left and sum(left) = k * clients left stay true, so there
    are always k classes to draw and no shard is over at the end.
    """
    left, owners = shards.copy(), np.empty((clients, k), np.int64)
    for client in range(clients):
        with np.errstate(divide="ignore"):
            keys = np.log(left) + rng.gumbel(size=len(left))  # the k largest: a draw without replacement
        keys[left == clients - client] = np.inf
        owners[client] = np.argsort(keys)[-k:]
        left[owners[client]] -= 1
    return owners[rng.permutation(clients)]


def _cut(
    split: str,
    targets: np.ndarray,
    classes: np.ndarray,
    shards: np.ndarray,
    owners: np.ndarray,
    per_client: int | None,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Each client's rows: one shard of each of its classes, all of the largest size that every class can give."""
    clients, k = owners.shape
    pools = [rng.permutation(np.flatnonzero(targets == label)) for label in classes]
    room = [len(pool) // count if count else len(targets) for pool, count in zip(pools, shards, strict=True)]
    scarce = int(np.argmin(room))
    where = f"class {classes[scarce]} has {len(pools[scarce])} {split} samples for {shards[scarce]} shards"
    size = room[scarce]
    if size < 1:
        raise UserError(f"{clients} clients with {k} classes each: {where}; take fewer clients or classes per client")
    if per_client is not None:
        if per_client < k or per_client % k or per_client // k > size:
            raise UserError(
                f"{split}_per_client {per_client}: allowed are multiples of {k} (classes per client) from {k} to "
                f"{size * k}, since {where}"
            )
        size = per_client // k
    taken = np.zeros(len(classes), np.int64)
    rows = []
    for mine in owners:
        rows.append(np.sort(np.concatenate([pools[c][taken[c] * size : (taken[c] + 1) * size] for c in mine])))
        taken[mine] += 1
    return rows


def dirichlet(
    train_targets: Values,
    test_targets: Values,
    clients: int,
    alpha: float,
    seed: int,
    min_train: int = 1,
    min_test: int = 1,
) -> list[Part]:
    """Each class is spread over the clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    Small alpha: few classes per client and unequal sizes; large alpha: nearly iid. All rows are used. Test rows of a
    class are spread as its train rows are. Who ends with less than `min_train` or `min_test` is given rows of clients
    that have more, of its own classes where possible.
    """
    train, test = _labels("train targets", train_targets), _labels("test targets", test_targets)
    _at_least(1, clients=clients, min_train=min_train)
    _at_least(0, min_test=min_test)
    if not 0 < alpha < np.inf:
        raise UserError(f"alpha {alpha}: allowed are finite numbers above 0")
    _enough("training", len(train), clients, min_train)
    _enough("test", len(test), clients, min_test)
    rng = generator(seed, "dirichlet")
    classes = np.unique(np.concatenate([train, test]))
    owner, test_owner = np.empty(len(train), np.int64), np.empty(len(test), np.int64)  # the client of each row
    for label in classes:
        proportions = rng.dirichlet(np.full(clients, float(alpha)))
        for targets, owners in ((train, owner), (test, test_owner)):
            rows = rng.permutation(np.flatnonzero(targets == label))
            owners[rows] = np.repeat(np.arange(clients), _apportion(proportions, len(rows)))
            if targets is train and len(rows):
                proportions = np.bincount(owners[rows], minlength=clients) / len(rows)
    mine, held = _owned(owner, clients), _owned(test_owner, clients)
    _repair(mine, train, [train[rows] for rows in mine], min_train, rng)
    _repair(held, test, [train[rows] for rows in mine], min_test, rng)
    return [Part(a, b) for a, b in zip(mine, held, strict=True)]


def _apportion(proportions: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers (n,) nearest to proportions * total that sum to total (largest remainders)."""
    wanted = proportions / proportions.sum() * total
    counts = np.floor(wanted).astype(np.int64)
    counts[np.argsort(counts - wanted, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _repair(
    owned: list[np.ndarray], targets: np.ndarray, familiar: Sequence[np.ndarray], least: int, rng: np.random.Generator
) -> None:
    """Give rows, in place, to every client with less than `least`, from clients that have more.

    Preferred are rows of the receiver's `familiar` classes, from the client that has most of them; else the largest
    client gives. Each move fills the receiver, or uses up what the giver can spare or has of those classes: so it ends.
    """
    sizes = np.array([len(rows) for rows in owned])
    classes, kind = np.unique(targets, return_inverse=True)
    counts = np.stack([np.bincount(kind[rows], minlength=len(classes)) for rows in owned])  # (clients, classes)
    for poor in np.flatnonzero(sizes < least).tolist():
        mine = np.isin(classes, familiar[poor])  # (classes,)
        while sizes[poor] < least:
            spare = np.maximum(sizes - least, 0)
            known = np.minimum(counts[:, mine].sum(1), spare)
            giver = int(np.argmax(known if known.any() else spare))
            rows = owned[giver]
            offered = rows[mine[kind[rows]]] if known.any() else rows
            moved = rng.permutation(offered)[: min(least - sizes[poor], spare[giver])]
            owned[giver], owned[poor] = np.setdiff1d(rows, moved), np.union1d(owned[poor], moved)
            change = np.bincount(kind[moved], minlength=len(classes))
            counts[giver] -= change
            counts[poor] += change
            sizes[giver] -= len(moved)
            sizes[poor] += len(moved)


def _owned(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each client, sorted, from the client of each row."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def iid(
    train_count: int,
    test_count: int,
    clients: int,
    seed: int,
    train_per_client: int | None = None,
    test_per_client: int | None = None,
) -> list[Part]:
    """A random split into equal parts (sizes differ by at most one), or into parts of the given sizes."""
    _at_least(1, clients=clients)
    rng = generator(seed, "iid")
    parts = []
    for split, count, size in (("train", train_count, train_per_client), ("test", test_count, test_per_client)):
        if size is not None and not 1 <= size <= count // clients:
            raise UserError(
                f"{split}_per_client {size}: allowed are 1 to {count // clients} ({count} for {clients} clients)"
            )
        _enough(split, count, clients, 1)
        order = rng.permutation(count)
        pieces = np.array_split(order, clients)
        parts.append([np.sort(piece[:size]) for piece in pieces])
    return [Part(a, b) for a, b in zip(*parts, strict=True)]


def by_group(
    train_groups: Values, test_groups: Values | None = None, test_fraction: float = 0.2, seed: int = 0
) -> list[Part]:
    """One client per natural group of the train split, in the order of group numbers.

    Its test rows are the test rows of the same group (a test group that never trains has no client). Without test
    groups, `test_fraction` of each group's own rows, at least one, are held out for testing (`test_from_train`).
    """
    groups = _labels("train groups", train_groups)
    names, owner = np.unique(groups, return_inverse=True)
    owned = _owned(owner, len(names))
    if test_groups is not None:
        others = _labels("test groups", test_groups)
        rows = np.flatnonzero(np.isin(others, names))
        held = [rows[mine] for mine in _owned(np.searchsorted(names, others[rows]), len(names))]
        lacking = next((name for name, mine in zip(names, held, strict=True) if len(mine) == 0), None)
        if lacking is not None:
            raise UserError(f"group {lacking} has no test samples; leave out test_groups to hold out training samples")
        return [Part(a, b) for a, b in zip(owned, held, strict=True)]
    if not 0 < test_fraction < 1:
        raise UserError(f"test_fraction {test_fraction}: allowed are numbers between 0 and 1")
    parts = []
    for client, mine in enumerate(owned):
        if len(mine) < 2:
            raise UserError(f"group {names[client]} has 1 sample; holding out test samples needs at least 2")
        order = generator(seed, "by_group", client).permutation(mine)
        cut = min(max(round(test_fraction * len(mine)), 1), len(mine) - 1)
        parts.append(Part(np.sort(order[cut:]), np.sort(order[:cut]), test_from_train=True))
    return parts


def by_owner(dataset: Dataset) -> list[Part]:
    """The clients whose samples a data set is made of; who has no test samples is judged on none."""
    if dataset.train.groups is None or dataset.test.groups is None:
        raise UserError(f"{dataset.name} names owners, but not the owner of each sample (groups)")
    groups = np.asarray(dataset.train.groups), np.asarray(dataset.test.groups)
    train, test = (_owned(np.where(g < 0, len(dataset.owners), g), len(dataset.owners) + 1) for g in groups)
    return [Part(a, b) for a, b in zip(train[:-1], test[:-1], strict=True)]


def given(train_rows: Sequence[Any], test_rows: Sequence[Any] | None, train_count: int, test_count: int) -> list[Part]:
    """The user's own split: one list of row numbers per client. Train rows must not be shared; test rows may.

    `test_rows` None: every client is judged on the whole test split.
    """
    if len(train_rows) == 0:
        raise UserError("no clients: give at least one list of train rows")
    if test_rows is None:
        test_rows = [np.arange(test_count)] * len(train_rows)
    if len(test_rows) != len(train_rows):
        raise UserError(f"{len(train_rows)} lists of train rows but {len(test_rows)} lists of test rows")
    owner = np.full(train_count, -1)
    parts = []
    for client, (train, test) in enumerate(zip(train_rows, test_rows, strict=True)):
        mine, held = _rows(client, "train", train, train_count), _rows(client, "test", test, test_count)
        taken = mine[owner[mine] >= 0]
        if len(taken):
            raise UserError(
                f"clients {owner[taken[0]]} and {client} share train row {taken[0]}; each row has one owner"
            )
        owner[mine] = client
        parts.append(Part(mine, held))
    return parts


def _rows(client: int, split: str, values: Any, count: int) -> np.ndarray:
    rows = np.asarray(values)
    if rows.size == 0:
        raise UserError(f"client {client} has no {split} rows; at least one is needed")
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise UserError(f"client {client}, {split} rows: {rows.dtype} {rows.shape}; allowed is a list of whole numbers")
    bad = rows[(rows < 0) | (rows >= count)]
    if len(bad):
        raise UserError(f"client {client}, {split} row {bad[0]}: allowed are 0 to {count - 1}")
    unique, counts = np.unique(rows.astype(np.int64), return_counts=True)
    if len(unique) < len(rows):
        raise UserError(f"client {client} has {split} row {unique[counts > 1][0]} twice")
    return unique


def hold_out(parts: Sequence[Part], fraction: float, seed: int, targets: Values | None) -> list[Part]:
    """Move a fraction of each client's train rows to its validation rows: at least one, and at least one stays.

    With labels (whole numbers) every class gives its share (largest remainders); otherwise rows are drawn at random. A
    client with a single train row keeps it and validates on nothing.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"validation fraction {fraction}: allowed are numbers from 0 to below 1")
    if fraction == 0:
        return list(parts)
    values = np.asarray([] if targets is None else targets)
    labelled = values.ndim == 1 and values.dtype.kind in "iu"
    result = []
    for client, part in enumerate(parts):
        rows = generator(seed, "hold_out", client).permutation(part.train_rows)
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        if labelled:
            _, kind, sizes = np.unique(values[rows], return_inverse=True, return_counts=True)
            quota = _apportion(sizes / len(rows), count)  # (classes here,)
            order = np.argsort(kind, kind="stable")  # class after class, random within
            place = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # place within its class
            held = np.zeros(len(rows), bool)
            held[order] = place < np.repeat(quota, sizes)
        else:
            held = np.arange(len(rows)) < count
        validation = np.concatenate([part.validation_rows, rows[held]])
        result.append(replace(part, train_rows=np.sort(rows[~held]), validation_rows=np.sort(validation)))
    return result


def leave_out(parts: Sequence[T], unseen: float, seed: int) -> tuple[list[T], list[T]]:
    """(clients that train, clients that join later), in their order. unseen: a share below 1, or how many; they are
    drawn at random."""
    count = round(unseen * len(parts)) if unseen < 1 else int(unseen)
    if not 1 <= count < len(parts):
        allowed = f"1 to {len(parts) - 1}" if len(parts) > 1 else "none"
        raise UserError(f"unseen = {unseen:g} is {count} of {len(parts)} clients; allowed are {allowed}")
    later = set(generator(seed, "unseen").permutation(len(parts))[:count].tolist())
    return [p for i, p in enumerate(parts) if i not in later], [p for i, p in enumerate(parts) if i in later]


def table(parts: Sequence[Part], targets: Values, classes: int) -> np.ndarray:
    """How many train rows of each class each client has, int64 (clients, classes)."""
    labels = _labels("targets", targets)
    return np.stack([np.bincount(labels[part.train_rows], minlength=classes) for part in parts])


def _labels(what: str, values: Values) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{what}: {array.dtype} {array.shape}; this split needs one whole number per sample")
    return array


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name} {value}: at least {least}")


def _enough(what: str, count: int, clients: int, each: int) -> None:
    if count < clients * each:
        raise UserError(f"{count} {what} samples for {clients} clients with at least {each} each; take fewer clients")
