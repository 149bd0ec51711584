"""Data and parts of a user's own, in a module that workers, ranks and configs can import."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import qupel

VOCABULARY, LENGTH, CLASSES = 11, 5, 3


def numbers(seed, n, shape=(4,)):
    return np.random.default_rng(seed).standard_normal((n, *shape)).astype(np.float32)


def tokens(seed, n, top=VOCABULARY):
    return np.random.default_rng(seed).integers(0, top, (n, LENGTH))


class Embedded(nn.Module):
    """Tokens (n, 5) -> classes."""

    def __init__(self, size=VOCABULARY):
        super().__init__()
        self.table = nn.Embedding(size, 4)
        self.hidden, self.mid, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.out(torch.relu(self.mid(torch.relu(self.hidden(self.table(ids).mean(1))))))


class Several(Embedded):
    """A dict of inputs: tokens, a mask of truth values, and numbers."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(4, 8)

    def forward(self, ids, mask, side):
        kept = self.table(ids) * mask.unsqueeze(-1)
        return self.out(torch.relu(self.mid(torch.relu(self.hidden(kept.mean(1)) + self.side(side)))))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def several(seed, n):
    ids = tokens(seed, n)
    return {"ids": ids, "mask": ids > 2, "side": numbers(seed, n)}


def labels(inputs):
    ids = inputs["ids"] if isinstance(inputs, dict) else inputs
    return ids.sum(1) % CLASSES


def on_dicts(clients=4):
    """What a config names: clients whose samples have three inputs."""
    made = [(several(10 + i, 9 + i), several(90 + i, 6)) for i in range(clients)]
    return [qupel.Client(a, labels(a), b, labels(b), name=f"user {i}") for i, (a, b) in enumerate(made)]


def on_tokens(clients=4, top=VOCABULARY):
    made = [(tokens(10 + i, 9 + i, top), tokens(90 + i, 6, top)) for i in range(clients)]
    return {f"user {i}": (a, labels(a), b, labels(b)) for i, (a, b) in enumerate(made)}


def arrays():
    return numbers(0, 40), np.arange(40) % CLASSES, numbers(1, 12), np.arange(12) % CLASSES


def nothing():
    return 7


def broken():
    raise OSError("no such sensor\nsecond line")


def per_sample(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def plain(outputs, targets):
    return F.cross_entropy(outputs, targets)


class Rows(torch.utils.data.Dataset):
    """Item by item; `bad` is a row that cannot be read."""

    def __init__(self, inputs, targets, bad=None):
        self.inputs, self.rows, self.bad = inputs, targets, bad

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        if row == self.bad:
            raise OSError("the disk is gone")
        return self.inputs[row], self.rows[row]


def by_name(row):
    """Of a row of Hugging Face's: inputs and target."""
    return row["x"], row["y"]
