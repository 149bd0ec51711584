"""What is allowed in a user's own arrays: each function returns the tensor, or says which row is wrong."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from qupel.data.stored import Stored
from qupel.tasks.trees import Tree, leaves, length
from qupel.util.errors import UserError


def tree(what: str, values: Any, leaf: Callable[[str, Any, bool], Any]) -> Tree:
    """`leaf(what, values, alone)` of an array, or of every array of a dict or a tuple. A list is one array."""
    if isinstance(values, Mapping):
        if not values or not all(isinstance(key, str) for key in values):
            raise UserError(f"{what}: a dict of arrays by their names is needed, not {list(values)}")
        return {key: tree(f"{what} {key!r}", part, partial(_inside, leaf)) for key, part in values.items()}
    if isinstance(values, tuple) and values and not all(np.ndim(part) == 0 for part in values if _is_plain(part)):
        return tuple(tree(f"{what} {k}", part, partial(_inside, leaf)) for k, part in enumerate(values))
    return leaf(what, values, True)


def _inside(leaf: Callable[[str, Any, bool], Any], what: str, values: Any, alone: bool) -> Any:
    return leaf(what, values, False)


def _is_plain(part: Any) -> bool:
    return not isinstance(part, Mapping | tuple)


def inputs(what: str, values: Any) -> Tree:
    """uint8 pictures stay uint8 (n, C, H, W), other whole numbers become int64, all else float32. One of several inputs
    may hold truth values."""
    return _same_rows(what, tree(what, values, _input))


def _input(what: str, values: Any, alone: bool) -> Tensor | Stored:
    array = numbers(what, values)
    mapped = isinstance(values, np.memmap)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        picture = "grey" if array.ndim == 3 else ""
        if array.ndim == 4 and array.shape[-1] in (1, 3, 4) and array.shape[1] not in (1, 3, 4):
            picture = "last"
        if mapped:
            return Stored.of(values, torch.uint8, what, picture)
        array = array[:, None] if picture == "grey" else array.transpose(0, 3, 1, 2) if picture else array
        return torch.from_numpy(np.array(array, order="C"))
    dtype = _dtype(array, alone)
    return Stored.of(values, dtype, what) if mapped else _tensor(what, array, dtype)


def _dtype(array: np.ndarray, alone: bool = True) -> torch.dtype:
    if array.dtype.kind in "iu":
        return torch.int64
    return torch.bool if array.dtype.kind == "b" and not alone else torch.float32


def _tensor(what: str, array: np.ndarray, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return floats(what, array)
    return torch.from_numpy(np.array(array, np.int64 if dtype == torch.int64 else np.bool_))


def _same_rows(what: str, made: Tree) -> Tree:
    counts = [len(leaf) for leaf in leaves(made)]
    if len(set(counts)) > 1:
        raise UserError(f"{what}: {' and '.join(map(str, counts))} rows; all must have one for each sample")
    return made


def targets(what: str, values: Any, rows: int, classes: int | None) -> Tree:
    """Whole numbers (n,) or (n, 1) are labels from 0; whole numbers of other shapes stay int64, floats become float32.
    With `classes` any numbers (n,) or (n, 1) are labels."""
    made = _same_rows(what, tree(what, values, partial(_target, classes)))
    if length(made) != rows:
        raise UserError(f"{what} has {length(made)} rows, its inputs have {rows}")
    return made


def _target(classes: int | None, what: str, values: Any, alone: bool) -> Tensor | Stored:
    array = numbers(what, values)
    whole = array.dtype.kind in "biu"
    column = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    if not (alone and column and (whole or classes is not None)):
        dtype = torch.int64 if whole else torch.float32
        return Stored.of(values, dtype, what) if isinstance(values, np.memmap) else _tensor(what, array, dtype)
    array = array.reshape(len(array))
    if classes is not None and classes < 1:
        raise UserError(f"classes {classes}: at least 1")
    top = math.inf if classes is None else classes - 1
    bad = np.flatnonzero(~((array >= 0) & (array <= top) & (array == np.floor(array))))
    if len(bad):
        allowed = "whole numbers from 0" if classes is None else f"whole numbers from 0 to {classes - 1}"
        raise UserError(f"{what} row {bad[0]}: label {array[bad[0]]}; allowed are {allowed}")
    return torch.from_numpy(array.astype(np.int64))


def weights(what: str, values: Any, rows: int) -> Tensor | None:
    """float32 (n,), at least 0."""
    if values is None:
        return None
    made = floats(what, numbers(what, values))
    if made.shape != (rows,):
        raise UserError(f"{what}: shape {tuple(made.shape)}; needed is one number for each of {rows} samples")
    if float(made.min()) < 0:
        raise UserError(f"{what} row {int(made.argmin())}: {float(made.min())}; allowed are numbers from 0")
    return made


def one_input(what: str, value: Any, alone: bool) -> Tensor:
    """An input of one sample, as `inputs` makes them of many."""
    return cast(Tensor, _input(what, _batched(what, value), alone))[0]


def one_target(what: str, value: Any, alone: bool) -> Tensor:
    array = _batched(what, value)
    return _tensor(what, array, torch.int64 if array.dtype.kind in "biu" else torch.float32)[0]


def _batched(what: str, value: Any) -> np.ndarray:
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (ValueError, TypeError) as e:
        raise UserError(f"{what}: cannot be made an array of numbers ({e})") from None
    return np.asarray(numbers(what, array[None]))


def numbers(what: str, values: Any) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} is of type {array.dtype}; allowed are real numbers")
    if array.ndim == 0 or array.size == 0:
        raise UserError(f"{what} is empty (shape {array.shape})")
    return array


def floats(what: str, array: np.ndarray) -> Tensor:
    with np.errstate(over="ignore"):  # what overflows is found below
        values = array.astype(np.float32)
    finite = np.isfinite(values).reshape(len(values), -1).all(1)
    if not finite.all():
        raise UserError(f"{what} row {np.argmin(finite)}: NaN or infinite; every value must be finite")
    return torch.from_numpy(values)


def groups(train: Any, test: Any, rows: int, test_rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Group numbers of both splits; strings are numbered in sorted order over both."""
    if train is None and test is None:
        return None, None
    if train is None:
        raise UserError("test_groups without train_groups")
    given = {"train_groups": (np.asarray(train), rows)}
    if test is not None:
        given["test_groups"] = (np.asarray(test), test_rows)
    for what, (array, count) in given.items():
        if array.shape != (count,) or array.dtype.kind not in "iuUS":
            raise UserError(f"{what}: {array.dtype} {array.shape}; allowed are {count} whole numbers or strings")
    parts = [array for array, _ in given.values()]
    if parts[0].dtype.kind in "US":
        numbers = np.unique(np.concatenate(parts), return_inverse=True)[1]
        parts = [numbers[:rows], numbers[rows:]]
    tensors = [torch.from_numpy(part.astype(np.int64)) for part in parts]
    return tensors[0], tensors[1] if test is not None else None
