"""What is allowed in a user's own arrays: each function returns the tensor, or says which row is wrong."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.util.errors import UserError


def inputs(what: str, values: Any) -> Tensor:
    array = numbers(what, values)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        if array.ndim == 3:
            array = array[:, None]
        elif array.shape[-1] in (1, 3, 4) and array.shape[1] not in (1, 3, 4):
            array = array.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.array(array, order="C"))
    return floats(what, array)


def targets(what: str, values: Any, rows: int, classes: int | None) -> Tensor:
    array = numbers(what, values)
    if len(array) != rows:
        raise UserError(f"{what} has {len(array)} rows, its inputs have {rows}")
    whole = array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer)
    column = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    if not (column and (whole or classes is not None)):
        return floats(what, array)
    array = array.reshape(rows)
    if classes is not None and classes < 1:
        raise UserError(f"classes {classes}: at least 1")
    top = math.inf if classes is None else classes - 1
    bad = np.flatnonzero(~((array >= 0) & (array <= top) & (array == np.floor(array))))
    if len(bad):
        allowed = "whole numbers from 0" if classes is None else f"whole numbers from 0 to {classes - 1}"
        raise UserError(f"{what} row {bad[0]}: label {array[bad[0]]}; allowed are {allowed}")
    return torch.from_numpy(array.astype(np.int64))


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
    for what, (array, length) in given.items():
        if array.shape != (length,) or array.dtype.kind not in "iuUS":
            raise UserError(f"{what}: {array.dtype} {array.shape}; allowed are {length} whole numbers or strings")
    parts = [array for array, _ in given.values()]
    if parts[0].dtype.kind in "US":
        numbers = np.unique(np.concatenate(parts), return_inverse=True)[1]
        parts = [numbers[:rows], numbers[rows:]]
    tensors = [torch.from_numpy(part.astype(np.int64)) for part in parts]
    return tensors[0], tensors[1] if test is not None else None
