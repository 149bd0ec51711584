"""One model, one file, in any of the formats."""

from __future__ import annotations

import os
from typing import Literal, get_args

from torch import nn

from qupel.core.codebook import Codebook
from qupel.deploy.about import About
from qupel.deploy.coreml import export_coreml
from qupel.deploy.file import save
from qupel.deploy.onnx import export_onnx
from qupel.deploy.packed import Rest
from qupel.util.errors import UserError

Format = Literal["packed", "onnx", "coreml"]
SUFFIX: dict[str, str] = {"packed": ".safetensors", "onnx": ".onnx", "coreml": ".mlpackage"}


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
    if to == "packed":
        return save(path, module, codebook, about=about, rest=rest, compress=compress)
    if to == "onnx":
        return export_onnx(path, module, codebook, about=about, rest=rest)
    if to == "coreml":
        return export_coreml(path, module, codebook, about=about, half=rest == "fp16")
    raise UserError(f"to = {to!r}: allowed are {', '.join(get_args(Format))}")
