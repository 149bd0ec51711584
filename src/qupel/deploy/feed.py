"""What goes into a network, as its file describes it: one tensor, several by their places, or by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qupel.deploy.about import INPUT_TYPES, About, Input
from qupel.util.errors import UserError

Inputs = tuple[Tensor, ...] | dict[str, Tensor]


def feed(about: About, batch: int, random: torch.Generator | None = None, below: int = 1) -> Inputs:
    """Inputs of a batch as the file describes them: zeros, or normal numbers and tokens from 0 to `below` - 1."""

    def value(i: Input) -> Tensor:
        shape = (batch, *i.shape)
        if random is None:
            return torch.zeros(shape, dtype=getattr(torch, i.dtype))
        if i.dtype == "int64":
            return torch.randint(below, shape, generator=random)
        return torch.randn(shape, generator=random)

    values = [value(i) for i in about.takes]
    names = [i.name for i in about.takes]
    return dict(zip(names, values, strict=True)) if all(names) else tuple(values)


def described(inputs: Any) -> dict[str, Any]:
    """The fields of `About` that tell what one batch of inputs is: a tensor, or a tuple or a dict of them."""
    if isinstance(inputs, Tensor):
        return {"input_shape": tuple(inputs.shape[1:]), "dtype": _dtype(inputs)}
    pairs = inputs.items() if isinstance(inputs, dict) else [("", value) for value in inputs]
    return {"inputs": tuple(Input(name, tuple(value.shape[1:]), _dtype(value)) for name, value in pairs)}


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    name = {"int32": "int64", "bool": "int64"}.get(name, name)
    if name not in INPUT_TYPES:
        raise UserError(
            f"inputs of type {value.dtype} cannot be described in a file; allowed: {', '.join(INPUT_TYPES)}"
        )
    return name
