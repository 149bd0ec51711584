"""Exporters by name: one model, one file, in any of the formats.

An exporter is a function that writes a model to a path. It is registered where it is written:

    @exporter("onnx", suffix=".onnx")
    def export_onnx(path, module, codebook, *, about, rest="fp32") -> int: ...

One of your own needs no registration: "my_package.module:write" is its name, and `write.suffix`, where it has one, ends
the names of its files.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from qupel.core.codebook import Codebook
from qupel.deploy.about import About
from qupel.deploy.packed import Rest
from qupel.util.errors import UserError
from qupel.util.registry import Registry

exporters: Registry[Callable[..., Any]] = Registry("exporter", "qupel.deploy")
Format = str  # the name of an exporter
Export = TypeVar("Export", bound=Callable[..., Any])


def exporter(name: str, suffix: str) -> Callable[[Export], Export]:
    """Register a function as the exporter of this name, whose files end with `suffix`."""

    def keep(function: Export) -> Export:
        function.suffix = suffix  # type: ignore[attr-defined]
        exporters.register(name)(function)
        return function

    return keep


def suffix(to: Format) -> str:
    """How the names of an exporter's files end."""
    return str(getattr(exporters[to], "suffix", ""))


def write(
    path: str | os.PathLike[str],
    module: nn.Module,
    codebook: Codebook,
    about: About,
    to: Format = "packed",
    rest: Rest = "fp32",
    compress: bool = False,
) -> int:
    """Write the model in this format and return its bytes. `compress`: packed files only."""
    export = exporters[to]
    given: dict[str, Any] = {"about": about, "rest": rest}
    if compress:
        if to != "packed":
            raise UserError(f"only packed files are compressed, not {to}")
        given["compress"] = True
    try:
        inspect.signature(export).bind(path, module, codebook, **given)
    except (TypeError, ValueError) as error:  # also of what is no function
        what = f"(path, module, codebook, {', '.join(f'{name}=...' for name in given)})"
        raise UserError(f"exporter {to!r} cannot be called with {what}: {error}") from None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    export(path, module, codebook, **given)
    return written(Path(path), to)


def written(path: Path, to: Format) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not path.exists():
        raise UserError(f"exporter {to!r} has not written {path}")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
