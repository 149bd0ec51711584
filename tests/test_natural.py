"""Natural federations: who owns what, from files as people have them."""

import gzip
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qupel.data import load, text
from qupel.data.batches import Transform
from qupel.data.sources import datasets
from qupel.run import config as configs
from qupel.run import experiment
from qupel.run.jobs import split_data
from qupel.util.errors import UserError
from test_sources import pixels, write

REAL = Path(os.environ.get("QUPEL_DATA", "nowhere"))


def real(path):
    return pytest.mark.skipif(not (REAL / path).exists(), reason=f"QUPEL_DATA has no {path}")


def qmnist(path, labels, writers):
    """QMNIST's extended labels: a header of three numbers, then 8 columns, big-endian."""
    table = np.zeros((len(labels), 8), ">i4")
    table[:, 0], table[:, 2] = labels, writers
    path.write_bytes(gzip.compress(np.array([0x0C02, len(labels), 8], ">i4").tobytes() + table.tobytes()))


@pytest.fixture
def written(tmp_path):
    """40 digits of 4 writers to train with, one of whom wrote a single one, and 20 digits of two others."""
    folder = tmp_path / "data"
    wrote = {"train": np.array([7, 9, 3] * 13 + [5]), "test": np.array([11, 8] * 10)}
    for k, (split, writers) in enumerate(wrote.items()):
        labels = [i % 10 for i in range(len(writers))]
        write(folder / f"mnist/{split}-0.parquet", pixels(len(writers), (28, 28), seed=k), labels, image="image")
        qmnist(folder / f"mnist/qmnist-{split}-labels-idx2-int.gz", labels, writers)
    return folder, wrote


def described(arrays):
    return [x.numpy().tobytes() + bytes([y]) for x, y in zip(arrays.inputs, arrays.targets, strict=True)]


def test_every_writer_has_its_own_digits(written):
    folder, wrote = written
    data = load("mnist_writers", folder)
    plain = load("mnist", folder)
    assert data.owners == ("writer 3", "writer 7", "writer 9")  # the one with a single digit has nothing to test with
    assert (data.unseen, data.classes, data.mean, data.mirror) == ((), 10, plain.mean, False)
    for k, writer in enumerate((3, 7, 9)):
        rows = np.flatnonzero(wrote["train"] == writer)
        mine = [split.take(np.flatnonzero(split.groups == k)) for split in (data.train, data.test)]
        assert [len(part) for part in mine] == [11, 2]
        assert sorted(row for part in mine for row in described(part)) == sorted(described(plain.train.take(rows)))
    again = load("MNIST-writers", folder)
    assert torch.equal(again.test.inputs, data.test.inputs)


def test_others_join_later(written):
    folder, _ = written
    data = datasets["mnist_writers"](folder, None, writers=2, others=1)
    assert (data.owners, data.unseen) == (("writer 3", "writer 7", "writer 8"), (2,))
    assert (data.train.groups == 2).sum() == 8
    assert (data.test.groups == 2).sum() == 2
    same = load("mnist_writers", folder)  # who else is there changes nobody's split
    assert torch.equal(data.train.inputs[data.train.groups == 1], same.train.inputs[same.train.groups == 1])
    with pytest.raises(UserError, match="others = 3: allowed are 0 to 2"):
        datasets["mnist_writers"](folder, None, others=3)


def test_those_who_join_later_are_no_clients_in_training(written):
    folder, _ = written
    whole = datasets["mnist_writers"](folder, None, others=2)
    config = configs.parse('[split]\nkind = "groups"\n[methods.A]\nrecipe = "fedavg"\n', "c")
    parts = split_data(config, whole, 0)
    assert [set(whole.train.groups[p.train_rows].tolist()) for p in parts] == [{0}, {1}, {2}]


def test_a_limit_leaves_owners_whole(written):
    folder, _ = written
    assert [len(load("mnist_writers", folder, limit).train) for limit in (1, 11, 22, 32, 100)] == [11, 11, 22, 22, 33]


def test_labels_of_other_images_are_refused(written):
    folder, wrote = written
    qmnist(folder / "mnist/qmnist-train-labels-idx2-int.gz", [3] * 40, wrote["train"])
    with pytest.raises(UserError, match="its classes are not those of the train images"):
        load("mnist_writers", folder)
    (folder / "mnist/qmnist-train-labels-idx2-int.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"cannot read .*qmnist-train"):
        load("mnist_writers", folder)
    (folder / "mnist/qmnist-train-labels-idx2-int.gz").unlink()
    with pytest.raises(UserError, match=r"no qmnist-train-labels-idx2-int.gz or qmnist-train-labels-idx2-int in"):
        load("mnist_writers", folder)


@real("mnist/qmnist-train-labels-idx2-int.gz")
def test_the_true_writers():
    data = datasets["mnist_writers"](None, None, others=297)
    counts = torch.bincount(data.train.groups) + torch.bincount(data.test.groups)
    assert (len(data.owners), len(data.unseen)) == (836, 297)
    assert (counts[:539].min(), counts[:539].max(), counts[:539].sum()) == (19, 131, 60_000)
    assert counts[539:].sum() == 10_000


@real("emg/emg.npz")
def test_the_true_people_of_emg():
    data = load("emg")
    assert data.train.inputs.shape == (15_882, 8, 52)
    assert data.train.inputs.dtype == torch.float32
    assert (len(data.test), data.classes, len(data.owners)) == (5_298, 7, 40)
    plain = load(str(REAL / "emg/emg.npz"))
    order = torch.argsort(plain.train.groups, stable=True)
    assert torch.equal(data.train.inputs, plain.train.inputs[order])


ROLES = {"Puck": "ab" * 30, "Bottom": "ba\n" * 25, "Snug": "c" * 50}


@pytest.fixture
def spoken(tmp_path):
    lines = [json.dumps({"role": role, "text": said}) for role, said in ROLES.items()]
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/roles.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_roles_predict_their_next_character(spoken):
    data = datasets["roles"](spoken, None, length=4, stride=3)
    assert (data.owners, data.classes, data.labels) == (tuple(ROLES), 4, ("\\n", "a", "b", "c"))
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.int64
    letters = "\nabc"
    for k, said in enumerate(ROLES.values()):
        held = len(said) // 5
        for split, part in ((data.train, said[:-held]), (data.test, said[-held:])):
            mine = split.take(np.flatnonzero(split.groups == k))
            read = [
                ("".join(letters[i] for i in x), letters[y]) for x, y in zip(mine.inputs, mine.targets, strict=True)
            ]
            assert read == [(part[i : i + 4], part[i + 4]) for i in range(0, len(part) - 4, 3)]


def test_the_alphabet_is_that_of_all_roles(spoken):
    data = datasets["roles"](spoken, None, roles=1, others=1, length=4)
    assert (data.owners, data.unseen, data.classes) == (("Puck", "Bottom"), (1,), 4)
    assert datasets["roles"](spoken, None, others=2, length=4).unseen == (1, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stride": 0}, "stride = 0: at least 1"),
        ({"length": 30}, "Puck says 60 characters; windows of 30 need more"),
        ({"others": 4, "length": 4}, "roles and others together = -1"),
        ({"roles": 2, "others": 2, "length": 4}, "roles and others together = 4: allowed are 0 to 3"),
    ],
)
def test_roles_that_cannot_be(spoken, options, says):
    with pytest.raises(UserError, match=says):
        datasets["roles"](spoken, None, **options)


def test_a_line_that_is_no_role(spoken):
    (spoken / "shakespeare/roles.jsonl").write_text('{"role": "Puck", "text": "a"}\n{"role": 3}\n')
    with pytest.raises(UserError, match=r"roles.jsonl line 2: needed is"):
        load("roles", spoken)


@real("shakespeare/roles.jsonl.gz")
def test_the_true_roles():
    data = load("roles")
    assert (len(data.owners), data.classes) == (264, 80)
    assert data.train.inputs.shape[1:] == (80,)
    assert torch.bincount(data.test.groups).min() >= 40


def test_characters_keep_their_numbers():
    """Also those beyond 16 bits, and in whatever order they come."""
    letters = text.alphabet(["b—a", "😀"])
    assert letters == "ab—😀"
    assert text.encode("😀ba—", letters).tolist() == [3, 1, 0, 2]


def test_whole_numbers_are_never_made_floats():
    tokens = torch.tensor([[3, 1], [2**40, 0]])
    made = Transform().apply(tokens)
    assert made.dtype == torch.int64
    assert torch.equal(made, tokens)
    assert made.data_ptr() != tokens.data_ptr()


def leaf(folder, split, **users):
    (folder / split).mkdir(parents=True, exist_ok=True)
    told = {"users": list(users), "num_samples": [len(y) for _, y in users.values()]}
    told["user_data"] = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    (folder / split / f"{split}_{'_'.join(users)}.json").write_text(json.dumps(told))


def images(n, seed=0):
    return np.random.default_rng(seed).random((n, 784)).astype(np.float32).tolist()


def test_leaf_images(tmp_path):
    x, held = images(3), images(2, 1)
    leaf(tmp_path / "data", "train", f1=(x, [0, 61, 5]), f2=(images(2, 2), [1, 2]))
    leaf(tmp_path / "data", "test", f2=(images(1, 3), [3]), f1=(held, [4, 5]))
    data = load(f"leaf:{tmp_path}")
    assert (data.name, data.owners, data.classes, data.unseen) == (f"leaf:{tmp_path}", ("f1", "f2"), 62, ())
    assert data.train.inputs.shape == (5, 1, 28, 28)
    assert torch.equal(data.train.inputs[:3].flatten(1), torch.tensor(x))
    assert torch.equal(data.test.inputs[:2].flatten(1), torch.tensor(held))
    assert data.train.targets.tolist() == [0, 61, 5, 1, 2]
    assert data.train.groups.tolist() == [0, 0, 0, 1, 1]
    assert data.test.targets.tolist() == [4, 5, 3]
    with pytest.raises(UserError, match="classes = 10, but there is a label 61"):
        datasets["leaf"](tmp_path, None, classes=10)


def test_leaf_users_of_the_test_set_alone_join_later(tmp_path):
    leaf(tmp_path, "train", a=(images(3), [0, 1, 2]))
    leaf(tmp_path, "test", a=(images(1), [0]), late=(images(10, 4), list(range(10))))
    data = load(f"leaf:{tmp_path}")
    assert (data.owners, data.unseen) == (("a", "late"), (1,))
    assert [int((part.groups == 1).sum()) for part in (data.train, data.test)] == [8, 2]
    mine = torch.cat([part.targets[part.groups == 1] for part in (data.train, data.test)])
    assert sorted(mine.tolist()) == list(range(10))


def test_leaf_in_one_piece(tmp_path):
    leaf(tmp_path, "all_data", a=(images(10), [0] * 10), lonely=(images(1), [1]))
    leaf(tmp_path, "all_data", b=(images(5), [1] * 5))
    data = load(f"leaf:{tmp_path}")
    assert data.owners == ("a", "b")
    assert [len(data.train), len(data.test)] == [12, 3]
    assert data.note == "1 users have nothing to train or to test with and are left out"
    leaf(tmp_path, "all_data", c=(images(2), [1] * 2), a=(images(2), [0, 0]))
    with pytest.raises(UserError, match="a is in another file, too"):
        load(f"leaf:{tmp_path}")


def test_leaf_characters(tmp_path):
    leaf(tmp_path, "train", PUCK=(["To be, or", "o be, or "], [" ", "n"]))
    leaf(tmp_path, "test", PUCK=(["1 be, or "], ["é"]))
    data = load(f"leaf:{tmp_path}")
    assert data.classes == 81  # LEAF's own 80 letters, and one that is not among them
    assert data.train.inputs.dtype == torch.int64
    assert "".join(data.labels[i] for i in data.train.inputs[0]) == "To be, or"
    assert [data.labels[i] for i in (*data.train.targets, *data.test.targets)] == [" ", "n", "é"]


def test_leaf_words(tmp_path):
    def tweet(said):
        return ["1467", "Mon Apr 06", "NO_QUERY", "me", said, "training"]

    leaf(tmp_path, "train", me=([tweet("So, so good!"), tweet("bad")], ["1", "0"]))
    leaf(tmp_path, "test", me=([tweet("good day")], ["1"]))
    data = datasets["leaf"](tmp_path, None, words=4, vocabulary=5)
    assert data.train.inputs.tolist() == [[2, 4, 2, 1], [0, 0, 0, 1]]  # so: 2, "!": 3, ",": 4; the rest is unknown
    assert data.test.inputs.tolist() == [[0, 0, 1, 1]]
    assert (data.classes, data.train.targets.tolist()) == (2, [1, 0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not LEAF's layout"),
        ('{"users": []}', "not LEAF's layout"),
        ('{"user_data": {}}', "no .json file with users"),
        ('{"user_data": {"a": {"x": [[1.0]], "y": []}}}', "a has 1 x and 0 y"),
        ('{"user_data": {"a": {"x": [[NaN]], "y": [1]}}}', "NaN or infinite"),
        (
            '{"user_data": {"a": {"x": [[1.0]], "y": [1]}, "b": {"x": ["abc"], "y": ["d"]}}}',
            "some x are numbers and some",
        ),
        ('{"user_data": {"a": {"x": [[1.0], [1.0, 2.0]], "y": [1, 1]}}}', "not LEAF's layout"),
        ('{"user_data": {"a": {"x": [], "y": []}}}', "no user has a sample"),
    ],
)
def test_what_is_not_leafs_layout(tmp_path, content, says):
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data/x.json").write_text(content)
    with pytest.raises(UserError, match=says) as error:
        load(f"leaf:{tmp_path}")
    assert "\n" not in str(error.value)


def test_where_nothing_is(tmp_path, monkeypatch):
    monkeypatch.delenv("QUPEL_DATA", raising=False)
    with pytest.raises(UserError, match="LEAF's layout has train/ and test/, or all_data/"):
        load(f"leaf:{tmp_path}")
    with pytest.raises(UserError, match="data set roles: no data folder is set"):
        load("roles")
    with pytest.raises(UserError, match=r"data set emg: no emg.npz in"):
        load("emg", tmp_path)


NET = """
from torch import nn

class Next(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, 4)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4 * shape[0], 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))
"""


def test_a_federation_of_roles(tmp_path, monkeypatch):
    """From files to models: tokens reach the network as they are, and every client is known by its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    (tmp_path / "text_nets.py").write_text(NET)
    (tmp_path / "shakespeare").mkdir()
    lines = [json.dumps({"role": role, "text": said * 9}) for role, said in ROLES.items()]
    (tmp_path / "shakespeare/roles.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.toml").write_text(
        "rounds = 10\nlocal_steps = 2\nbits = 2\n"
        '[data]\nname = "roles"\n[split]\nkind = "groups"\n[model]\nname = "text_nets:Next"\n'
        '[methods.Q]\nrecipe = "qupel"\n'
    )
    config = configs.load(tmp_path / "c.toml", [f"data.folder={tmp_path}"])
    job = experiment.build_job(config, experiment.cells(config)[0])
    assert [job.name(i) for i in range(3)] == list(ROLES)
    (result,) = experiment.run_experiment(config, tmp_path / "run")
    assert np.isfinite(result["lines"][-1]["test_loss"])
    assert len(list((tmp_path / "run/cells/Q-s0/models").iterdir())) == 3
    sys.modules.pop("text_nets", None)
