"""Data of the user's own, by name: a function "module:name", or a folder with one file for each client."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qupel.data import npz
from qupel.data.clients import Client, is_dataset, pool
from qupel.data.sources import NPZ_NAMES, Dataset, from_arrays
from qupel.util.errors import UserError

RETURNS = "a list or a dict of clients, four arrays (train inputs and targets, test inputs and targets), or a Dataset"
COLUMNS = "the column `target`, and `inputs` (lists of numbers) or one column for each feature; `split`, `weight`"


def from_function(name: str, function: Any, args: Mapping[str, Any]) -> Dataset:
    """What a function of the user's returns: clients, four arrays, or a Dataset of ours."""
    where = f"data {name!r}"
    try:
        inspect.signature(function).bind(**args)
    except (TypeError, ValueError) as e:
        raise UserError(f"{where} cannot be called with args = {dict(args)}: {e}") from None
    try:
        found = function(**args)
    except UserError:
        raise
    except Exception as e:  # whatever the user's function raises
        raise UserError(f"{where} raises {type(e).__name__}: {(str(e).splitlines() or [''])[0]}") from e
    try:
        return replace(_dataset(found), name=name)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None


def _dataset(found: Any) -> Dataset:
    if isinstance(found, Dataset):
        return found
    if isinstance(found, Mapping):
        return pool(found)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise UserError(f"returns {type(found).__name__}; allowed are {RETURNS}")
    if all(isinstance(one, Client | tuple) or is_dataset(one) for one in found):
        return pool(found)
    if len(found) == 4:
        return from_arrays(*found)
    raise UserError(f"returns {len(found)} of {type(found[0]).__name__}; allowed are {RETURNS}")


def from_folder(folder: Path) -> Dataset:
    """One client for each `.npz` or `.parquet` file, named by its stem, in the order of names."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".npz", ".parquet"))
    if not files:
        raise UserError(f"{folder}: no .npz and no .parquet file, one for each client")
    stems = [file.stem for file in files]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None)
    if twice is not None:
        raise UserError(f"{folder}: two files of client {twice!r}")
    read = {".npz": _from_npz, ".parquet": _from_parquet}
    return replace(pool({file.stem: read[file.suffix](file) for file in files}), name=folder.name)


def _from_npz(path: Path) -> Client:
    """train_inputs, train_targets; if there are, test_inputs, test_targets, train_weights, test_weights."""

    def wanted(held: list[str]) -> list[str]:
        names = next((names for names in NPZ_NAMES if all(name in held for name in names[:2])), None)
        if names is None:
            raise UserError(f"holds {', '.join(held[:20]) or 'nothing'}; needed are train_inputs and train_targets")
        return [name for name in (*names, "train_weights", "test_weights") if name in held]

    held = npz.read(path, wanted)
    names = next(names for names in NPZ_NAMES if names[0] in held)
    one, two, three, four = (held.get(name) for name in names)
    return Client(one, two, three, four, weights=held.get("train_weights"), test_weights=held.get("test_weights"))


def _from_parquet(path: Path) -> Client:
    """A row is a sample. Rows whose `split` is "test" are for testing, all others for training."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{path}: not a readable Parquet file ({(str(e).splitlines() or [''])[0][:120]})") from None
    names = table.column_names
    target = next((name for name in ("target", "targets", "label") if name in names), None)
    if target is None or len(names) < 2:
        raise UserError(f"{path}: has columns {', '.join(names[:20])}; needed are {COLUMNS}")
    features = [name for name in names if name not in {target, "split", "weight"}]
    features = ["inputs"] if "inputs" in features else features
    columns = [_column(path, table, name) for name in features]
    inputs = columns[0] if features == ["inputs"] else np.stack(columns, 1)  # (n, ...)
    testing = np.zeros(len(table), bool)
    if "split" in names:
        said = table["split"].to_pylist()
        strange = next((word for word in said if word not in ("train", "test")), None)
        if strange is not None:
            raise UserError(f"{path}: split {strange!r}; allowed are train and test")
        testing = np.array([word == "test" for word in said])
    targets = _column(path, table, target)
    weights = _column(path, table, "weight") if "weight" in names else None
    train, test = ~testing, testing
    learned, judged = (None, None) if weights is None else (weights[train], weights[test] if test.any() else None)
    held = (inputs[test], targets[test]) if test.any() else (None, None)
    return Client(inputs[train], targets[train], held[0], held[1], weights=learned, test_weights=judged)


def _column(path: Path, table: pa.Table, name: str) -> np.ndarray:
    column = table[name]
    if column.null_count:
        raise UserError(f"{path}: column {name!r} has {column.null_count} empty cells")
    try:
        values = np.array(column.to_pylist()) if pa.types.is_nested(column.type) else column.to_numpy()
    except ValueError:
        raise UserError(f"{path}: column {name!r}: lists of different lengths") from None
    if values.dtype.kind not in "biuf":
        raise UserError(f"{path}: column {name!r} is of type {column.type}; allowed are numbers and lists of numbers")
    return values
