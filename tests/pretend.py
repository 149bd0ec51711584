"""A second device for machines that have none: CPU memory that may not be mixed with the rest of it.

Inside `Pretend()`, device "cuda" exists. Its tensors live in CPU memory and compute the same bits, but what a real GPU
refuses is refused: an operation on tensors of both devices, and `.numpy()`.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

CUDA = torch.device("cuda")
MAY_MIX = {"aten::copy_"}


class _Kept:
    """The memory of the pretended device. It is kept alive, so that an address stays what it is."""

    def __init__(self):
        self.storages = {}

    def add(self, value):
        for t in _tensors(value):
            if t.untyped_storage().nbytes():
                self.storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return value

    def has(self, t) -> bool:
        return t.untyped_storage().data_ptr() in self.storages


def _tensors(value):
    return [v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]


class _Operations(TorchDispatchMode):
    """Every operation below autograd: its tensors are of one device, and so are its results."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _tensors((args, kwargs))
        there = [t for t in given if self.kept.has(t)]
        here = [t for t in given if t.ndim and t.numel() and not self.kept.has(t)]
        if there and here and func._schema.name not in MAY_MIX:
            raise RuntimeError(f"{func}: tensors on two devices")
        result = func(*args, **(kwargs or {}))
        return self.kept.add(result) if there and func._schema.name not in MAY_MIX else result


class _Questions(TorchFunctionMode):
    """What is asked of tensors above autograd: their device, a copy on another one, a new one on it."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func == torch.Tensor.device.__get__ and self.kept.has(first):
            return CUDA
        if func is torch.Tensor.numpy and self.kept.has(first):
            raise TypeError("can't convert cuda device type tensor to numpy")
        if func is torch.Tensor.cpu and first is not None:
            return self._moved(first, torch.device("cpu"))
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):  # as another tensor
            return self._moved(first.to(args[1].dtype), CUDA if self.kept.has(args[1]) else torch.device("cpu"))
        if func is torch.Tensor.to and (target := _target(args[1:], kwargs)) is not None:
            return self._moved(first, target)
        if func is torch.Tensor.new_tensor and self.kept.has(first):
            return self.kept.add(func(*args, **kwargs))
        if first is None and str(kwargs.get("device")).startswith("cuda"):
            return self.kept.add(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)

    def _moved(self, t, target):
        if self.kept.has(t) == (target.type == "cuda"):
            return t
        with torch._C.DisableTorchFunction():
            copy = torch.empty(t.shape, dtype=t.dtype)
            copy.numpy()[...] = t.detach().numpy() if t.ndim else t.item()
        return self.kept.add(copy) if target.type == "cuda" else copy


def _target(args, kwargs):
    for value in (*args[:1], kwargs.get("device")):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str):
            return torch.device(value)
    return None


@contextmanager
def Pretend():
    kept = _Kept()
    with _Questions(kept), _Operations(kept):
        yield
