"""LEAF's JSON layout (Caldas et al., 2018; leaf.cmu.edu), as its scripts leave it on disk.

FOLDER/train/*.json and FOLDER/test/*.json, or FOLDER/all_data/*.json, or either in FOLDER/data; each file is
{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}. What x is decides what is made:

numbers   float32 (n, k); 784 of them are an image (1, 28, 28), as in FEMNIST; y: labels
a string  characters as int64 (n, length); y: the next one, as in Shakespeare
a list    a tweet of Sent140, whose fifth entry is the text: its first words as int64 (n, length); y: 0 or 1
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.data import text
from qupel.data.natural import Owner, gather, read_bytes, tested
from qupel.data.sources import Dataset, Folder, datasets
from qupel.util.errors import UserError

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's own alphabet
TEXT = 4  # where a tweet's text stands
Raw = tuple[Any, list[Any]]  # x: float32 (n, k), or a list of strings; y
Users = dict[str, Raw]


@datasets.register("leaf", about="LEAF's JSON files, leaf:FOLDER: FEMNIST, Shakespeare, Sent140")
def leaf(
    folder: Folder = None,
    limit: int | None = None,
    classes: int | None = None,
    vocabulary: int = 10_000,
    words: int = 25,
) -> Dataset:
    """A client for each user. Users of test/ alone (LEAF's split by user) take no part in training (`Dataset.unseen`);
    with all_data/ and for them, a fifth of a user's samples is to test with. Users with nothing to train or to test
    with are left out.

    classes: how many labels there are (FEMNIST: 62); by default one more than the largest.
    vocabulary, words: of Sent140: how many words of the training text have a number, and how many of a tweet are read.
    """
    if folder is None:
        raise UserError("data set leaf: which folder? data.name = 'leaf:FOLDER', or data.folder")
    base = _home(Path(folder).expanduser())
    whole = not (base / "train").is_dir()
    train, test = _users(base / ("all_data" if whole else "train")), {} if whole else _users(base / "test")
    kind = _kind(base, [*train.values(), *test.values()])
    inputs, targets, about = _coded(kind, train, test, classes, vocabulary, words)

    owners, known = [], {**train, **test}
    for k, user in enumerate(known):
        if user in train and user in test:
            mine, held = ((inputs(x), targets(y)) for x, y in (train[user], test[user]))
        else:
            x, y = inputs(known[user][0]), targets(known[user][1])
            mine, held = ((x[rows], y[rows]) for rows in tested(len(x), "leaf", k))
        if len(mine[0]) and len(held[0]):
            owners.append(Owner(user, mine, held, unseen=bool(train) and user not in train))
    left = len(known) - len(owners)
    note = f"{left} users have nothing to train or to test with and are left out" if left else ""
    return gather(f"leaf:{base.name}", owners, limit, mirror=False, note=note, **about)


def _home(folder: Path) -> Path:
    """The folder that has the splits."""
    for place in (folder, folder / "data"):
        if (place / "all_data").is_dir() or ((place / "train").is_dir() and (place / "test").is_dir()):
            return place
    raise UserError(f"{folder}: LEAF's layout has train/ and test/, or all_data/, with .json files")


def _users(folder: Path) -> Users:
    """All users of a split's files, in the files' order; numbers become arrays at once, a tenth of the lists' size."""
    found: Users = {}
    for path in sorted(folder.glob("*.json")):
        try:
            for user, data in json.loads(read_bytes(path))["user_data"].items():
                x, y = data["x"], list(data["y"])
                if user in found:
                    raise UserError(f"{path}: {user} is in another file, too")
                if len(x) != len(y):
                    raise UserError(f"{path}: {user} has {len(x)} x and {len(y)} y")
                found[user] = (_plain(x), y)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            raise UserError(f"{path}: not LEAF's layout ({type(e).__name__}: {e})") from None
    if not found:
        raise UserError(f"{folder}: no .json file with users")
    return found


def _plain(x: list[Any]) -> Any:
    """A user's x: float32 (n, k) of numbers, texts of tweets, strings as they are."""
    if x and isinstance(x[0], list) and x[0] and isinstance(x[0][-1], str):
        return [str(row[TEXT]) for row in x]
    if x and isinstance(x[0], str):
        return x
    array = np.asarray(x, np.float32)
    if not np.isfinite(array).all():
        raise ValueError("NaN or infinite numbers")
    return array.reshape(len(x), -1) if len(x) else array


def _kind(base: Path, users: Iterable[Raw]) -> str:
    """What x is: "numbers", "characters" (y is a character) or "words"."""
    some = [(x, y) for x, y in users if len(y)]
    numbers = {isinstance(x, np.ndarray) for x, _ in some}
    if len(numbers) != 1:
        raise UserError(f"{base}: {'some x are numbers and some are texts' if numbers else 'no user has a sample'}")
    if numbers.pop():
        return "numbers"
    return "words" if all(str(v).isdigit() for _, y in some for v in y) else "characters"


Code = Callable[[Any], Tensor]


def _coded(
    kind: str, train: Users, test: Users, classes: int | None, vocabulary: int, length: int
) -> tuple[Code, Code, dict[str, Any]]:
    """How a user's x and y become tensors, and what the data set says of its classes."""
    users = [*train.values(), *test.values()]
    if kind == "characters":
        letters = text.alphabet((s for x, y in users for s in (*x, *y)), LETTERS)

        def characters(x: list[str]) -> Tensor:
            return torch.stack([text.encode(s, letters) for s in x])

        return characters, lambda y: text.encode("".join(y), letters), {
            "classes": len(letters), "labels": text.shown(letters),
        }  # fmt: skip
    most = max(int(v) for _, y in users for v in y) + 1
    if classes is not None and most > classes:
        raise UserError(f"classes = {classes}, but there is a label {most - 1}")
    about = {"classes": classes or most}

    def labels(y: list[Any]) -> Tensor:
        return torch.tensor([int(v) for v in y], dtype=torch.int64)

    if kind == "words":
        numbers = text.words((s for x, _ in (train or test).values() for s in x), vocabulary)
        return lambda x: text.encode_words(x, numbers, length), labels, about

    def images(x: np.ndarray) -> Tensor:
        found = torch.from_numpy(x)
        return found.view(-1, 1, 28, 28) if found.shape[1:] == (784,) else found

    return images, labels, about
