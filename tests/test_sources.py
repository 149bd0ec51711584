"""Image sets from real files: small Parquet files written here, and the true sets where QUPEL_DATA has them."""

import io
import logging
import os
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from qupel.data import images, load
from qupel.data.sources import datasets
from qupel.util.errors import UserError

REAL = os.environ.get("QUPEL_DATA", "")
needs_real = {
    name: pytest.mark.skipif(not (Path(REAL) / name).is_dir() or not REAL, reason=f"QUPEL_DATA has no {name}")
    for name in ("cifar10", "mnist")
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no data folder of the user's."""
    monkeypatch.setenv("QUPEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QUPEL_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path / "cache"


def pixels(n, shape=(32, 32, 3), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def encoded(array, kind="PNG"):
    stream = io.BytesIO()
    Image.fromarray(array.squeeze()).save(stream, kind)
    return stream.getvalue()


def write(path, pictures, labels, image="img", label="label", struct=True):
    """A Parquet file; pictures are arrays (encoded as PNG here) or bytes."""
    data = [encoded(p) if isinstance(p, np.ndarray) else p for p in pictures]
    column = [{"bytes": d, "path": None} for d in data] if struct else data
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if struct else pa.binary()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: pa.array(column, kind), label: labels}), path)


def cifar(folder, train=12, test=5, **names):
    write(folder / "train-00000-of-00001.parquet", pixels(train), [i % 10 for i in range(train)], **names)
    write(folder / "test-00000-of-00001.parquet", pixels(test, seed=1), [i % 10 for i in range(test)], **names)
    return folder


def test_digits():
    dataset = load("digits")
    assert dataset.train.inputs.shape == (len(dataset.train), 1, 8, 8)
    assert (len(dataset.train) + len(dataset.test), dataset.classes) == (1797, 10)
    assert (dataset.train.inputs.min(), dataset.train.inputs.max()) == (0, 1)
    train, test = dataset.train.targets.bincount(), dataset.test.targets.bincount()
    assert ((test / (train + test) - 0.25).abs() < 0.01).all()
    assert torch.equal(dataset.test.inputs, load("digits").test.inputs)
    assert len(load("digits", limit=7).train) == len(load("digits", limit=7).test) == 7


@pytest.mark.parametrize("place", ["cifar10", "cifar-10", "CIFAR_10", "cifar10/plain_text", "cifar10/data", "."])
def test_parquet_is_found_and_decoded(tmp_path, cache, place):
    cifar(tmp_path / "data" / place)
    dataset = load("cifar10", tmp_path / "data")
    assert (dataset.train.inputs.numpy() == pixels(12).transpose(0, 3, 1, 2)).all()
    assert dataset.train.targets.tolist() == [*range(10), 0, 1]
    assert (dataset.test.inputs.numpy() == pixels(5, seed=1).transpose(0, 3, 1, 2)).all()
    assert (dataset.classes, dataset.labels[3], dataset.note) == (10, "cat", "")
    assert dataset.mean == pytest.approx(pixels(12).mean((0, 1, 2)) / 255)
    assert dataset.std == pytest.approx(pixels(12).std((0, 1, 2)) / 255)


def test_folder_from_the_environment(tmp_path, cache, monkeypatch):
    cifar(tmp_path / "data" / "cifar10")
    monkeypatch.setenv("QUPEL_DATA", str(tmp_path / "data"))
    assert len(load("cifar10").train) == 12


def test_shards_plain_binary_and_other_column_names(tmp_path, cache):
    first, second, names = pixels(3, (28, 28)), pixels(2, (28, 28), 1), {"image": "image", "struct": False}
    write(tmp_path / "train-00000-of-00002.parquet", first, [0, 1, 2], **names)
    write(tmp_path / "train-00001-of-00002.parquet", second, [3, 4], **names)
    write(tmp_path / "test-00000-of-00001.parquet", second, [3, 4], **names)
    dataset = load("mnist", tmp_path)
    assert dataset.train.inputs.shape == (5, 1, 28, 28)
    assert dataset.train.targets.tolist() == [0, 1, 2, 3, 4]
    assert (dataset.train.inputs[3:, 0].numpy() == second).all()
    assert load("mnist", tmp_path, limit=4).train.targets.tolist() == [0, 1, 2, 3]
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="1 of 2 train files found"):
        load("mnist", tmp_path)


def test_cifar100_reads_the_fine_labels(tmp_path, cache):
    dataset = load("cifar100", cifar(tmp_path, label="fine_label"))
    assert (dataset.classes, len(dataset.labels)) == (100, 100)


def test_jpeg_is_noted(tmp_path, cache):
    write(tmp_path / "train-0.parquet", [encoded(p, "JPEG") for p in pixels(3)], [0, 1, 2])
    write(tmp_path / "test-0.parquet", pixels(3), [0, 1, 2])
    assert load("cifar10", tmp_path).note.startswith("JPEG copy of cifar10")
    assert load("cifar10", tmp_path).note.startswith("JPEG copy of cifar10")  # from the cache too


def test_cache_is_used_and_follows_the_files(tmp_path, cache, monkeypatch):
    cifar(tmp_path / "data")
    full = load("cifar10", tmp_path / "data")
    assert len(list(cache.iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode", lambda *_: pytest.fail("decoded again"))
        again = load("cifar10", tmp_path / "data")
        assert torch.equal(again.train.inputs, full.train.inputs)
        assert torch.equal(load("cifar10", tmp_path / "data", limit=3).train.inputs, full.train.inputs[:3])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", pixels(6, seed=2), [9] * 6)
    assert load("cifar10", tmp_path / "data").test.targets.tolist() == [9] * 6


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", "half", "flip"])
def test_corrupt_cache_is_rebuilt(tmp_path, cache, damage, caplog):
    cifar(tmp_path / "data")
    full = load("cifar10", tmp_path / "data")
    for file in cache.iterdir():
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 255
        file.write_bytes(content[: len(content) // 2] if damage == "half" else content if damage == "flip" else damage)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(load("cifar10", tmp_path / "data").train.inputs, full.train.inputs)
    assert "decoding again" in caplog.text
    assert torch.equal(load("cifar10", tmp_path / "data").train.inputs, full.train.inputs)


def test_cache_that_cannot_be_written_is_not_used(tmp_path, cache, monkeypatch, caplog):
    cifar(tmp_path / "data")
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(load("cifar10", tmp_path / "data").train) == 12
    assert "not kept" in caplog.text
    cache.unlink()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(load("cifar10", tmp_path / "data").train) == 12
    assert list(cache.iterdir()) == []


def truncated():
    return encoded(pixels(1)[0])[:-1500]


@pytest.mark.parametrize(
    ("pictures", "labels", "message"),
    [
        ([*pixels(2), b"no image"], [0, 1, 2], r"train-0.parquet row 2: the image cannot be decoded"),
        ([*pixels(2), truncated()], [0, 1, 2], r"train-0.parquet row 2: the image cannot be decoded"),
        ([*pixels(2), None], [0, 1, 2], r"row 2: the image is not inside the file"),
        ([*pixels(2), pixels(1, (28, 32, 3))[0]], [0, 1, 2], r"row 2: image of 32x28; all of cifar10 are 32x32"),
        (list(pixels(3)), [0, 10, 2], r"row 1: label 10; cifar10 has labels 0 to 9"),
        (list(pixels(3)), [0, 1, -1], r"row 2: label -1; cifar10 has labels 0 to 9"),
        (list(pixels(3)), [0, 1, None], r"row 2: label None"),
        (list(pixels(3)), ["cat"] * 3, r"label column is string; allowed: integers"),
        ([], pa.array([], pa.int64()), r"train-0.parquet: holds no rows"),
    ],
)
def test_bad_rows(tmp_path, cache, pictures, labels, message):
    write(tmp_path / "train-0.parquet", pictures, labels)
    write(tmp_path / "test-0.parquet", pixels(1), [0])
    with pytest.raises(UserError, match=message):
        load("cifar10", tmp_path)


def test_bad_files(tmp_path, cache):
    cifar(tmp_path)
    train = tmp_path / "train-00000-of-00001.parquet"
    good = train.read_bytes()
    for content in (b"", b"PAR1 nonsense PAR1", good[:-100], good[:200] + bytes(4000) + good[4200:]):
        train.write_bytes(content)
        with pytest.raises(
            UserError, match=r"train-00000-of-00001.parquet.*(not a readable Parquet|cannot be decoded)"
        ):
            load("cifar10", tmp_path)
    write(train, pixels(2), [0, 1], image="picture")
    with pytest.raises(UserError, match="no column named img or image"):
        load("cifar10", tmp_path)
    write(train, pixels(2), [0, 1], label="kind")
    with pytest.raises(UserError, match="no column named label or fine_label"):
        load("cifar10", tmp_path)
    pq.write_table(pa.table({"img": [1.5], "label": [0]}), train)
    with pytest.raises(UserError, match="image column is double; allowed: binary"):
        load("cifar10", tmp_path)
    train.unlink()
    with pytest.raises(UserError, match=r"no train-\*.parquet beside the other split"):
        load("cifar10", tmp_path)


def test_nothing_found(tmp_path, cache):
    with pytest.raises(UserError, match=r"no data folder is set; set --data FOLDER .*QUPEL_DATA.*qupel\[datasets\]"):
        load("cifar10")
    with pytest.raises(UserError, match="does not exist or is not a folder"):
        load("cifar10", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"looked for .*cifar10/"):
        load("cifar10", tmp_path)
    (tmp_path / "cifar10").mkdir()
    with pytest.raises(UserError, match=r"cifar10: holds no train-\*.parquet"):
        load("cifar10", tmp_path)
    with pytest.raises(UserError, match=r"unknown data set 'imagenet'; known are digits, cifar10"):
        load("imagenet")
    with pytest.raises(UserError, match="limit 0: at least 1"):
        load("digits", limit=0)
    cifar(tmp_path / "cifar10")
    with pytest.raises(UserError, match="data set mnist not found"):
        load("mnist", tmp_path / "cifar10")  # another set's own folder


class Hub:
    """What the `datasets` package returns, as far as it is used: a split that reads our own Parquet file."""

    def __init__(self, file):
        self.table, self.cache_files = pq.read_table(file), [{"filename": str(file)}]
        self.column_names = self.table.column_names

    def cast_column(self, column, feature):
        assert (column, feature) == ("img", "raw")
        return self

    def with_format(self, kind):
        assert kind == "arrow"
        return self

    def __len__(self):
        return len(self.table)

    def __getitem__(self, rows):
        return self.table[rows.start : rows.stop]


def test_fetching(tmp_path, cache, monkeypatch):
    cifar(tmp_path / "hub", train=1005)
    splits = {s: Hub(tmp_path / "hub" / f"{s}-00000-of-00001.parquet") for s in ("train", "test")}
    module = types.ModuleType("datasets")
    module.load_dataset = {"uoft-cs/cifar10": splits}.__getitem__
    module.Image = lambda decode: "raw"
    monkeypatch.setitem(sys.modules, "datasets", module)
    dataset = load("cifar10")
    assert (dataset.train.inputs.numpy() == pixels(1005).transpose(0, 3, 1, 2)).all()
    assert len(load("cifar10", limit=3).test) == 3
    with pytest.raises(UserError, match=r"uoft-cs/cifar100 could not be fetched .*; give a folder"):
        load("cifar100")
    with pytest.raises(UserError, match="data set cifar10 not found"):
        load("cifar10", tmp_path)  # who names a folder means it


@pytest.fixture
def package():
    """The package itself, before `cache` hides it; loaded twice, its classes would be taken for strangers'."""
    return pytest.importorskip("datasets")


def test_fetching_through_the_package(package, tmp_path, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", package)
    datasets = package
    cifar(tmp_path)
    files = {split: str(tmp_path / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
    local = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "kept"))
    monkeypatch.setattr(datasets, "load_dataset", lambda hub: local)
    assert (load("cifar10").train.inputs.numpy() == pixels(12).transpose(0, 3, 1, 2)).all()


@needs_real["mnist"]
def test_the_real_mnist():
    dataset = load("mnist", limit=10_000)
    assert dataset.test.inputs.shape == (10_000, 1, 28, 28)
    assert dataset.test.targets.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert not dataset.mirror


@needs_real["cifar10"]
def test_the_real_cifar10_in_part():
    dataset = load("cifar10", limit=1000)
    assert dataset.train.inputs.shape == (1000, 3, 32, 32)
    assert dataset.mean == pytest.approx((0.491, 0.482, 0.447), abs=0.02)


@pytest.mark.slow
@needs_real["cifar10"]
def test_the_real_cifar10():
    dataset = load("cifar10")
    assert dataset.train.inputs.shape == (50_000, 3, 32, 32)
    assert dataset.train.targets.bincount().tolist() == [5000] * 10
    assert dataset.test.targets.bincount().tolist() == [1000] * 10
    assert dataset.mean == pytest.approx((0.491, 0.482, 0.447), abs=1e-3)
    assert dataset.std == pytest.approx((0.247, 0.243, 0.261), abs=3e-3)


def test_available_names_every_set():
    assert {*datasets} >= {"digits", "cifar10", "cifar100", "mnist", "fashion_mnist"}
