"""Natural federations: data whose owners are known. Every owner is a client, unless a split deals samples out anew.

Such a set is a list of `Owner`s that `gather` makes one data set of. Files stay where they are, in the folder of --data
or QUPEL_DATA: FOLDER/mnist/qmnist-*, FOLDER/emg/emg.npz; `text` and `leaf` have the others.
"""

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.data.batches import generator
from qupel.data.sources import Arrays, Dataset, Folder, datasets, from_npz
from qupel.util.errors import UserError

Samples = tuple[Tensor, Tensor]  # inputs (n, ...), targets (n, ...)
TEST_SHARE = 5  # one sample in so many of an owner's is for testing


@dataclass(frozen=True)
class Owner:
    """One person, role or device with its own samples. unseen: it takes no part in training, and joins later."""

    name: str
    train: Samples
    test: Samples
    unseen: bool = False


def gather(name: str, owners: Sequence[Owner], limit: int | None = None, **about: Any) -> Dataset:
    """One data set of all owners: owner k has the rows of group k.

    limit: owners stay whole; those are kept whose training samples are among the first `limit`, one at least.
    about: what else a `Dataset` says, `classes` at least.
    """
    if limit is not None:
        ends = np.cumsum([len(owner.train[0]) for owner in owners])
        owners = owners[: max(1, int((ends <= limit).sum()))]
    if not owners:
        raise UserError(f"{name}: nobody has samples both to train and to test with")
    unseen = tuple(k for k, owner in enumerate(owners) if owner.unseen)
    splits = (_joined([o.train for o in owners]), _joined([o.test for o in owners]))
    return Dataset(name, *splits, owners=tuple(o.name for o in owners), unseen=unseen, **about)


def _joined(parts: Sequence[Samples]) -> Arrays:
    counts = torch.tensor([len(inputs) for inputs, _ in parts])
    groups = torch.repeat_interleave(torch.arange(len(parts)), counts)
    return Arrays(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), groups)


def tested(count: int, purpose: str, *address: int) -> tuple[Tensor, Tensor]:
    """Which of an owner's samples are to train and which to test with: a fifth, at random, the same every time."""
    order = generator(0, purpose, *address).permutation(count)
    held = max(1, count // TEST_SHARE)
    return torch.from_numpy(np.sort(order[held:])), torch.from_numpy(np.sort(order[:held]))


def first(count: int | None, of: Sequence[Any], what: str) -> Sequence[Any]:
    """The first `count` of these; all where none is given."""
    if count is not None and not 0 <= count <= len(of):
        raise UserError(f"{what} = {count}: allowed are 0 to {len(of)}")
    return of[:count]


def find_file(name: str, folder: Folder, places: Sequence[str], files: Sequence[str]) -> Path:
    """The first of these files in FOLDER/PLACE or in FOLDER itself."""
    asked = folder if folder is not None else os.environ.get("QUPEL_DATA") or None
    if asked is None:
        raise UserError(f"data set {name}: no data folder is set; set --data or QUPEL_DATA")
    base = Path(asked).expanduser()
    if not base.is_dir():
        raise UserError(f"data folder {base} does not exist or is not a folder; set --data or QUPEL_DATA")
    for file in (base / place / file for place in (*places, "") for file in files):
        if file.is_file():
            return file
    raise UserError(f"data set {name}: no {' or '.join(files)} in {base / places[0]} or {base}")


def read_bytes(path: Path) -> bytes:
    """A file's content, unpacked where its name ends with .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as e:
        raise UserError(f"cannot read {path}: {e}") from None


def _writers(folder: Folder, split: str, labels: np.ndarray) -> np.ndarray:
    """Who wrote each of MNIST's digits, int64 (n,), from QMNIST's extended labels (n, 8): column 0 class, 2 writer."""
    file = f"qmnist-{split}-labels-idx2-int"
    path = find_file("mnist_writers", folder, ("mnist", "qmnist", "mnist_writers"), (f"{file}.gz", file))
    raw = np.frombuffer(read_bytes(path), ">i4")
    if len(raw) < 3 or raw[0] != 0x0C02 or raw[2] != 8 or len(raw) != 3 + raw[1] * 8:
        raise UserError(f"{path}: these are not QMNIST's extended labels")
    table = raw[3:].reshape(-1, 8)[: len(labels)]
    if len(table) < len(labels) or (table[:, 0] != labels).any():
        raise UserError(f"{path}: its classes are not those of the {split} images, in their order")
    return table[:, 2].astype(np.int64)


@datasets.register("mnist_writers", about="MNIST by writer: 539 people, and 297 who join later")
def mnist_writers(
    folder: Folder = None, limit: int | None = None, writers: int | None = None, others: int = 0
) -> Dataset:
    """A client for each writer of MNIST's training set; a fifth of its digits is to test with.

    writers: only the first so many of the 539; others: besides, so many of the 297 writers of MNIST's test set. They
    take no part in training (`Dataset.unseen`) and have digits to adapt with and to test with, as everybody has.
    """
    mnist = datasets["mnist"](folder, None)
    owners: list[Owner] = []
    for split, arrays, count in (("train", mnist.train, writers), ("test", mnist.test, others)):
        wrote = _writers(folder, split, np.asarray(arrays.labels))
        numbers, digits = np.unique(wrote, return_counts=True)
        able = numbers[digits > 1].tolist()  # to train and to test
        for writer in first(count, able, "writers" if split == "train" else "others"):
            rows = np.flatnonzero(wrote == writer)
            parts = (arrays.read(rows[part]) for part in tested(len(rows), "mnist_writers", writer))
            train, test = ((part.inputs, part.targets) for part in parts)
            owners.append(Owner(f"writer {writer}", train, test, unseen=split == "test"))
    same = {"classes": mnist.classes, "labels": mnist.labels, "mean": mnist.mean, "std": mnist.std, "mirror": False}
    return gather("mnist_writers", owners, limit, **same, note=mnist.note)


@datasets.register("emg", about="gestures of 40 people by their muscles, 8 x 52, 7 classes")
def emg(folder: Folder = None, limit: int | None = None, people: int | None = None) -> Dataset:
    """The person of each window is its group; the fourth of four recordings is to test with. people: only the first so
    many of the 40."""
    data = from_npz(find_file("emg", folder, ("emg",), ("emg.npz",)))
    groups, tests = data.train.groups, data.test.groups
    if groups is None or tests is None:
        raise UserError("emg.npz: train_groups and test_groups say who made each window; they are missing")
    owners = []
    for person in first(people, groups.unique().tolist(), "people"):
        pairs = ((data.train, groups == person), (data.test, tests == person))
        read = (samples.read(np.flatnonzero(mine)) for samples, mine in pairs)
        train, test = ((found.inputs, found.targets) for found in read)
        owners.append(Owner(f"person {person}", train, test))
    return gather("emg", owners, limit, classes=data.classes, mirror=False)
