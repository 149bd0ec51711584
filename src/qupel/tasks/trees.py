"""Inputs, targets and outputs are a tensor, or a tree of tensors: dicts and tuples in one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Tree = Any  # Tensor | Mapping[str, Tree] | tuple[Tree, ...]: a recursive type that would have to be narrowed everywhere


def over(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """f of every leaf, with the leaves at the same place of the other trees; lists become tuples.

    >>> over(lambda a: a + 1, {"a": 1, "b": (2, 3)})
    {'a': 2, 'b': (3, 4)}
    """
    if isinstance(tree, Mapping):
        return {key: over(f, part, *(other[key] for other in others)) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(over(f, *parts) for parts in zip(tree, *others, strict=True))
    return f(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """
    >>> leaves({"a": 1, "b": (2, 3)})
    [1, 2, 3]
    """
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def length(tree: Tree) -> int:
    """The samples in it: the first dimension of its first leaf."""
    return len(tree) if isinstance(tree, Tensor) else len(leaves(tree)[0])


def arguments(inputs: Tree) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a module is called with: a tensor as it is, a tuple as several arguments, a dict as arguments by name."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, tuple | list) else (inputs,)), {}


def call(module: nn.Module, inputs: Tree) -> Any:
    """module(inputs), module(*inputs) or module(**inputs)."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    positional, named = arguments(inputs)
    return module(*positional, **named)
