"""One digest for all who ask "is this the same run?": checkpoints, cells taken over, ranks that must agree.

Two runs with one digest have the same model (weights, structure, the code of its own classes), loss, data, clients and
settings. Code is compared as bytecode: it is what runs, and it is there in a notebook, too. Of torch, numpy, Python and
this package only names are compared, not their code.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import Plan
from qupel.data.partition import Part
from qupel.data.samples import Items
from qupel.data.stored import Stored
from qupel.engine.job import Job

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "qupel"}
_HOOKS = {"_forward_pre_hooks", "_forward_hooks"}
# what every module has, and no result depends on
_TORCHS_OWN = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", *_HOOKS}


def digest(plain: Any) -> str:
    """A short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def of_job(job: Job) -> str:
    """The digest of all that a job's results depend on. When to write checkpoints is no part of it; how clients are
    stepped is settled later and kept beside them (`choice.settled`)."""
    return digest(_Describe()(replace(job, stacked=False, checkpoint_every=0)))


class _Describe:
    """A value as plain JSON that is the same in another process. What was met before is named by its number: tied
    weights differ from equal ones, and no circle is endless."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return self(value.tolist()) if value.dtype.hasobject else _numbers(value)
        if isinstance(value, Mapping):
            return {"table": [[self(k), self(v)] for k, v in value.items()]}
        if isinstance(value, list | tuple) and value and all(type(v) is Part for v in value):
            return {"parts": self._parts(value)}
        if isinstance(value, list | tuple) and value and all(type(v) is Plan for v in value):
            kinds: dict[Any, int] = {}  # a federation has few plans, however many clients
            each = [kinds.setdefault(plan.key, len(kinds)) for plan in value]
            return {"plans": self(list(kinds)), "of": each}
        if isinstance(value, list | tuple | range):
            return [self(v) for v in value]
        if isinstance(value, set | frozenset):
            return {"set": sorted(json.dumps(self(v)) for v in value)}
        if isinstance(value, CodeType | FunctionType | BuiltinFunctionType | MethodType | type | ModuleType):
            return self._code(value)
        if isinstance(value, staticmethod | classmethod):
            return self(value.__func__)
        if isinstance(value, property):
            return self([value.fget, value.fset])
        if isinstance(value, functools.partial):
            return {"partial": self([value.func, value.args, value.keywords])}
        return self._object(value)

    def _parts(self, parts: Sequence[Part]) -> Any:
        """Field by field of all clients: rows one after the other, and how many each has."""
        found: list[Any] = [[part.test_from_train for part in parts]]
        for name in ("train_rows", "test_rows", "validation_rows"):
            rows = [getattr(part, name) for part in parts]
            found += [_numbers(np.concatenate(rows)), _numbers(np.array([len(each) for each in rows]))]
        return found

    def _code(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, CodeType):
            return {"code": value.co_code.hex(), "names": value.co_names, "constants": self(value.co_consts)}
        if isinstance(value, MethodType):
            return {"method": self(value.__func__), "of": self(value.__self__)}
        if _is_library(value) or isinstance(value, BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if met := self._again(value):
            return met
        if isinstance(value, type):
            own = {k: v for k, v in vars(value).items() if not k.startswith("__") or isinstance(v, FunctionType)}
            return {"class": value.__qualname__, "bases": self(value.__bases__), "own": self(own)}
        inside = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        outside = {n: value.__globals__[n] for n in sorted(set(_globals(value.__code__))) if n in value.__globals__}
        given = (value.__defaults__, value.__kwdefaults__, inside, outside)
        return {"function": value.__qualname__, "code": self(value.__code__), "given": self(given)}

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Stored | Items):  # not in memory: a look at some of its rows
            found = hashlib.sha256()
            value.mark(found)
            return {"samples": found.hexdigest(), "groups": self(getattr(value, "groups", None))}
        plain = is_dataclass(value)
        if not plain and not isinstance(value, Tensor | nn.Module) and _is_library(kind):
            shown = repr(value)
            return [self(kind), "" if " at 0x" in shown else shown]
        if not (plain and _is_library(kind)) and (met := self._again(value)):
            return met
        if isinstance(value, Tensor):
            return _numbers(value)
        if plain:
            held = {f.name: getattr(value, f.name) for f in fields(value)}
        else:
            held = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in _TORCHS_OWN}
            held |= {k: list(held[k].values()) for k in _HOOKS if k in held}  # torch numbers them as they come
        return {"type": self(kind), "holds": self(held)}

    def _again(self, value: Any) -> dict[str, int] | None:
        if id(value) in self.met:
            return {"met": self.met[id(value)]}
        self.met[id(value)] = len(self.met)
        return None


def _is_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


def _globals(code: CodeType) -> Iterator[str]:
    """Names from outside that a function reads, also in functions within it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _numbers(value: Tensor | np.ndarray) -> dict[str, Any]:
    if isinstance(value, Tensor):
        trained = {"trained": value.requires_grad}
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        trained, raw = {}, np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    found = hashlib.sha256(raw.data).hexdigest()
    return {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": found, **trained}
