"""What a model file says about its model: enough to build it, feed it and name its answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from qupel.deploy.header import FormatError, shape_of

LARGEST_INPUT = 1 << 24  # numbers; whoever uses the file makes room for inputs
INPUT_TYPES = ("float32", "int64")  # of what goes into a network


@dataclass(frozen=True)
class Input:
    """One tensor that a network takes, without the batch. name: of a keyword; "": by its place."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class About:
    """Stored as JSON in the file.

    model        a name of `qupel.tasks.zoo.networks`, or "module:Name" of the user's own, which nobody imports because
                 a file says so (`own`); "" where the network is not known by name
    args         what it is built with, beside the shape and the number of classes
    source       of a module of the user's own: the sha256 of its code
    needs        ... and the versions of packages it was made with
    input_shape  of one input, (C, H, W) for images
    dtype        of it
    inputs       in place of both, where the network takes several tensors
    classes      number of outputs; 0 where they are no classes
    labels       names of the classes, or ()
    mean, std    per channel, of uint8 inputs as fractions of 255: the model takes (input / 255 - mean) / std; () for
                 inputs that are used as they are
    client       whose model it is
    extra        anything else that is plain JSON: accuracy, method, seed, ...
    """

    model: str = ""
    input_shape: tuple[int, ...] = ()
    classes: int = 0
    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    client: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    inputs: tuple[Input, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    needs: dict[str, str] = field(default_factory=dict)

    @property
    def takes(self) -> tuple[Input, ...]:
        """Every tensor that the network takes; none where the file does not say."""
        return self.inputs or ((Input("", self.input_shape, self.dtype),) if self.input_shape else ())

    @property
    def input_names(self) -> list[str]:
        """Of a graph's inputs: "input"; of several their own names, or input0, input1, ..."""
        return [i.name or (f"input{k}" if self.inputs else "input") for k, i in enumerate(self.takes)]

    def to_json(self) -> dict[str, Any]:
        """A field that has its default value is left out."""
        return {name: value for name, value in asdict(self).items() if value != getattr(About(), name)}

    @staticmethod
    def from_json(value: Any) -> About:
        """The inverse of `to_json`, strict."""
        if not isinstance(value, dict) or not set(value) <= {f.name for f in fields(About)}:
            raise FormatError("'about' must be an object of known fields")
        about = About(
            model=_text(value.get("model", ""), "model"),
            input_shape=shape_of(value.get("input_shape", []), "about.input_shape"),
            classes=_count(value.get("classes", 0)),
            labels=tuple(_text(v, "labels") for v in _list(value.get("labels", []), "labels")),
            mean=tuple(_number(v, "mean") for v in _list(value.get("mean", []), "mean")),
            std=tuple(_number(v, "std") for v in _list(value.get("std", []), "std")),
            client=_text(value.get("client", ""), "client"),
            extra=_table(value.get("extra", {}), "extra"),
            dtype=_dtype(value.get("dtype", "float32")),
            inputs=tuple(_input(v) for v in _list(value.get("inputs", []), "inputs")),
            args=_table(value.get("args", {}), "args"),
            source=_text(value.get("source", ""), "source"),
            needs={k: _text(v, "needs") for k, v in _table(value.get("needs", {}), "needs").items()},
        )
        if any(0 in i.shape for i in about.takes) or sum(math.prod(i.shape) for i in about.takes) > LARGEST_INPUT:
            raise FormatError(f"about.input_shape: dimensions of at least 1, at most {LARGEST_INPUT:,} numbers in all")
        names = [i.name for i in about.inputs]
        if about.inputs and (about.input_shape or (any(names) and (not all(names) or len(set(names)) < len(names)))):
            raise FormatError("about.inputs: in place of input_shape; each with a name of its own, or none with one")
        if about.labels and len(about.labels) != about.classes:
            raise FormatError(f"about.labels: {len(about.labels)} names for {about.classes} classes")
        if len(about.mean) != len(about.std) or any(s <= 0 for s in about.std):
            raise FormatError("about.mean and about.std: one of each per channel, std greater than 0")
        if about.mean and (not about.input_shape or len(about.mean) not in (1, about.input_shape[0])):
            raise FormatError("about.mean: one number per channel of about.input_shape")
        return about


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise FormatError(f"about.{what}: must be text that can be printed")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"about.{what}: must be a list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise FormatError("about.classes: must be a whole number from 0 to 2^31 - 1")
    return value


def _number(value: Any, what: str) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond the range of floats
        pass
    raise FormatError(f"about.{what}: must be finite numbers")


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"about.{what}: must be an object")
    return value


def _dtype(value: Any) -> str:
    if value not in INPUT_TYPES:
        raise FormatError(f"about.dtype: allowed are {', '.join(INPUT_TYPES)}")
    return str(value)


def _input(value: Any) -> Input:
    if not isinstance(value, dict) or not set(value) <= {"name", "shape", "dtype"}:
        raise FormatError("about.inputs: objects of name, shape and dtype")
    shape = shape_of(value.get("shape", []), "about.inputs")
    return Input(_text(value.get("name", ""), "inputs"), shape, _dtype(value.get("dtype", "float32")))
