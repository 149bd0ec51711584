"""The user's own data: npz files and arrays, of every allowed kind and of many that are not."""

import numpy as np
import pytest
import torch

from qupel.data import load
from qupel.data.sources import from_arrays, from_npz
from qupel.util.errors import UserError


def colours(n, shape):
    return np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)


def own(**change):
    arrays = {
        "train_inputs": np.arange(12.0).reshape(4, 3),
        "train_targets": np.array([0, 1, 2, 1]),
        "test_inputs": np.ones((2, 3)),
        "test_targets": np.array([2, 0]),
    }
    return {**arrays, **change}


def test_npz(tmp_path):
    np.savez(
        tmp_path / "mine.npz", **own(), train_groups=np.array(["b", "a", "b", "c"]), test_groups=np.array(["c", "a"])
    )
    dataset = load(str(tmp_path / "mine.npz"))
    assert (dataset.name, dataset.classes, dataset.mean) == ("mine", 3, ())
    assert (dataset.train.inputs.dtype, dataset.train.targets.dtype) == (torch.float32, torch.int64)
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([1, 0, 1, 2], [2, 0])
    assert dataset.train.take(np.array([3, 0])).groups.tolist() == [2, 1]
    assert len(load(str(tmp_path / "mine.npz"), limit=3).train) == 3
    names = dict(zip(("x_train", "y_train", "x_test", "y_test"), own().values(), strict=True))
    np.savez(tmp_path / "keras.npz", **names, classes=5)
    assert from_npz(tmp_path / "keras.npz").classes == 5


def test_npz_is_never_unpickled(tmp_path):
    np.savez(tmp_path / "objects.npz", **own(train_inputs=np.array([{}, {}, {}, {}], dtype=object)))
    with pytest.raises(UserError, match=r"objects.npz: not a readable .npz file of plain numbers"):
        from_npz(tmp_path / "objects.npz")


def test_bad_npz(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        from_npz(tmp_path / "none.npz")
    path = tmp_path / "bad.npz"
    for content in (b"", b"PK\x03\x04", b"text"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"bad.npz: not a readable .npz file"):
            from_npz(path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(UserError, match="a single array"):
        from_npz(path)
    np.savez(path, x_train=np.ones(3))
    with pytest.raises(UserError, match="holds x_train; needed are train_inputs, train_targets"):
        from_npz(path)
    np.savez(path, **own(), classes=np.array([1.5]))
    with pytest.raises(UserError, match="classes must be one whole number"):
        from_npz(path)
    np.savez(path, **own(train_targets=np.array([0, 1])))
    with pytest.raises(UserError, match=r"bad.npz: train_targets has 2 rows, its inputs have 4"):
        from_npz(path)


def test_images_of_either_layout():
    x = colours(4, (5, 6, 3))
    for given in (x, x.transpose(0, 3, 1, 2), torch.from_numpy(x)):
        dataset = from_arrays(given, [0, 1, 0, 1], given, [0, 1, 0, 1])
        assert (dataset.train.inputs.numpy() == x.transpose(0, 3, 1, 2)).all()
        assert dataset.mean == pytest.approx(x.mean((0, 1, 2)) / 255)
    grey = from_arrays(x[..., 0], [0, 1, 0, 1], x[..., 0], [0, 1, 0, 1])
    assert grey.train.inputs.shape == (4, 1, 5, 6)
    both = colours(4, (3, 6, 3))  # either could be the channels: the second is
    assert (from_arrays(both, [0] * 4, both, [0] * 4).train.inputs.numpy() == both).all()
    flat = from_arrays(np.zeros((2, 5, 5), np.uint8), [0, 0], np.zeros((2, 5, 5), np.uint8), [0, 0])
    assert (flat.mean, flat.std) == ((0.0,), (1.0,))


def test_kinds_of_targets():
    assert from_arrays(**own(train_targets=[[0], [1], [2], [1]])).train.targets.tolist() == [0, 1, 2, 1]
    regression = from_arrays(**own(train_targets=[0.5, 1, 2, -1], test_targets=[1.0, 2.0]))
    assert (regression.classes, regression.train.targets.dtype) == (None, torch.float32)
    many = from_arrays(**own(train_targets=np.eye(4, dtype=int), test_targets=np.zeros((2, 4), int)))
    assert (many.classes, many.train.targets.shape, many.train.targets.dtype) == (None, (4, 4), torch.int64)
    floats = from_arrays(**own(train_targets=[0.0, 1, 2, 1], test_targets=[1.0, 2.0]), classes=3)
    assert floats.train.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_inputs": np.array([[0.0], [1.0], [np.nan], [np.inf]])}, "train_inputs row 2: NaN or infinite"),
        ({"test_inputs": np.full((2, 3), 1e300)}, "test_inputs row 0: NaN or infinite"),
        ({"train_inputs": np.empty((0, 3))}, "train_inputs is empty"),
        ({"train_inputs": np.array(["a"] * 4)}, "train_inputs is of type <U1; allowed are real numbers"),
        ({"train_inputs": np.ones((4, 3), complex)}, "allowed are real numbers"),
        ({"test_inputs": np.ones((2, 4))}, r"differ in kind: float32 \(3,\) and float32 \(4,\)"),
        ({"train_targets": [0, 1, 2]}, "train_targets has 3 rows, its inputs have 4"),
        ({"train_targets": [0, -1, 2, 1]}, "train_targets row 1: label -1; allowed are whole numbers from 0"),
        ({"train_targets": [0, 1, 2, 1.5], "classes": 3}, "train_targets row 3: label 1.5; .* from 0 to 2"),
        ({"test_targets": [0, 3], "classes": 3}, "test_targets row 1: label 3; allowed are whole numbers from 0 to 2"),
        ({"train_targets": [0, np.nan, 1, 1]}, "train_targets row 1: NaN or infinite"),
        ({"train_targets": [0.5, 1, 1, 1]}, "targets differ in kind: .*; both labels, or both numbers"),
        ({"train_targets": [0, 1, 2, 10**9]}, "labels go up to 1000000000: more classes than samples"),
        ({"classes": 0}, "classes 0: at least 1"),
        ({"classes": 3, "labels": ("a",)}, "1 names of classes for 3 classes"),
        ({"test_groups": [0, 1]}, "test_groups without train_groups"),
        ({"train_groups": [0, 1]}, "train_groups: .*; allowed are 4 whole numbers or strings"),
    ],
)
def test_bad_arrays(change, message):
    with pytest.raises(UserError, match=message):
        from_arrays(**own(**change))
