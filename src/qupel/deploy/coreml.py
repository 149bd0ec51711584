"""Core ML packages with native palettized weights: our centers are the look-up table (`constexpr_lut_to_dense`).

Converted on any system, run on Apple's only. So that the file can be trusted without a Mac, its weights are read back
and compared: exactly, or rounded to fp16 if that was asked for.

    bits of a layer      stored as    needs
    1, 2, 4, 6, 8        the same     iOS 16, macOS 13
    3                    3            iOS 18, macOS 15
    5, 7                 6, 8         iOS 16, macOS 13

Levels that are scaled by channel are a look-up table for each channel, which needs iOS 18, macOS 15.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import Codebook
from qupel.deploy import header
from qupel.deploy.about import About
from qupel.deploy.formats import exporter
from qupel.deploy.packed import Layer, Packed, Rest, pack_model
from qupel.util.errors import UserError

_PALETTIZED = 2  # coremltools' CompressionType.PALETTIZATION
_STORED = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8}
# They would multiply BatchNorm into full-precision weights, which could then not be compared with the model's.
_FUSIONS = {"common::fuse_conv_batchnorm", "common::fuse_conv_scale", "common::fuse_conv_bias"}


@contextmanager
def _quiet() -> Iterator[None]:
    """coremltools tells of untested versions, of its progress, and that nothing can run here; none helps the user."""
    log = logging.getLogger("coremltools")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _library() -> ModuleType:
    try:
        with _quiet():
            import coremltools
    except ImportError:
        raise UserError("Core ML needs the package coremltools: pip install 'qupel[coreml]'") from None
    return coremltools


@exporter("coreml", suffix=".mlpackage")
def export_coreml(
    path: str | os.PathLike[str],
    module: nn.Module,
    codebook: Codebook,
    *,
    about: About,
    rest: Rest = "fp32",
) -> int:
    """Write an .mlpackage with input "input" (batch, *input_shape) and output "output", and return its bytes.

    rest  fp16: compute and store everything in fp16, which Apple's neural engine wants; levels are rounded to it
    """
    ct, half = _library(), rest == "fp16"
    if not about.input_shape or about.dtype != "float32":
        raise UserError("Core ML needs about.input_shape, the shape of one input of float32 numbers; tokens go to ONNX")
    _refuse(module, codebook)
    packed = pack_model(module, codebook, about, rest)
    module = copy.deepcopy(module).cpu().eval()
    _register(module, packed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        made = Path(folder) / "model.mlpackage"
        with _quiet():
            converted = _convert(ct, module, about, target(packed), half)
            converted.user_defined_metadata["qupel"] = header.dump(about.to_json())
            converted.save(str(made))
            _compare(ct, made, packed, half)
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def target(packed: Packed) -> str:
    """The oldest system that knows these bit widths, and tables of channels."""
    return "iOS18" if packed.channels or any(layer.bits == 3 for layer in packed.layers) else "iOS16"


def _register(module: nn.Module, packed: Packed) -> None:
    """Tell coremltools the look-up tables, by buffers of names it knows."""
    owners = dict(module.named_modules())
    for layer in packed.layers:
        path, _, key = layer.name.rpartition(".")
        levels = 2 ** _STORED[layer.bits]
        table = np.concatenate([layer.centers, np.repeat(layer.centers[-1:], levels - len(layer.centers))])
        if layer.scales is not None:  # coremltools would make the same tables of its own scales, and keep those, too
            table = layer.scales[:, None] * table
        shape = [-1] + [1] * (len(layer.shape) - 1) + [levels, 1]
        owners[path].register_buffer(f"_COREML_/{key}/lut", torch.from_numpy(table).reshape(shape))
        owners[path].register_buffer(f"_COREML_/{key}/compression_type", torch.tensor([_PALETTIZED]))
    module.register_buffer("_COREML_/metadata_version", torch.tensor(1))


def _refuse(module: nn.Module, codebook: Codebook) -> None:
    """What coremltools has no look-up table for."""
    for slot in codebook.slots:
        path, _, key = slot.name.rpartition(".")
        layer = module.get_submodule(path)
        if not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) or key != "weight":
            kind = type(layer).__name__
            raise UserError(
                f"{slot.name}: a {kind}'s weights cannot be packed for Core ML; use ONNX, or 32 bits for it"
            )
    shared = len(list(module.named_parameters(remove_duplicate=False))) - len(list(module.parameters()))
    if shared and codebook.slots:
        raise UserError("tied layers cannot be packed for Core ML; use ONNX, or full precision")


def _convert(ct: ModuleType, module: nn.Module, about: About, system: str, half: bool) -> Any:
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(_FUSIONS)
    try:
        return ct.convert(
            torch.jit.trace(module, torch.zeros(1, *about.input_shape)),
            inputs=[ct.TensorType("input", shape=(ct.RangeDim(1, 256, default=1), *about.input_shape))],
            outputs=[ct.TensorType("output")],
            convert_to="mlprogram",
            minimum_deployment_target=ct.target[system],
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            pass_pipeline=pipeline,
            skip_model_load=True,
        )
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UserError(f"coremltools cannot convert this network: {str(error).splitlines()[0][:200]}") from error


def _compare(ct: ModuleType, made: Path, packed: Packed, half: bool) -> None:
    """Every quantized layer must be in the file as a look-up of exactly its weights, and every other weight plainly."""
    from coremltools.converters.mil.frontend.milproto.load import load

    model = ct.models.MLModel(str(made), skip_model_load=True)
    spec = model.get_spec()
    program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir)
    main = program.functions["main"]
    decoded = [op.materialized_val_inference() for op in main.find_ops(op_type="constexpr_lut_to_dense")]
    for layer in packed.layers:
        _take(decoded, _rounded(layer.weights(), half), layer)
    plain = [np.asarray(op.outputs[0].val) for op in main.find_ops(op_type="const") if op.outputs[0].val is not None]
    for name, value in packed.rest.items():
        wanted = _rounded(value, half)
        if value.ndim > 1 and not any(v.shape == wanted.shape and np.array_equal(v, wanted) for v in plain):
            raise UserError(f"{name}: the Core ML file holds other weights than the model; it was deleted")


def _rounded(value: np.ndarray, half: bool) -> np.ndarray:
    return value.astype(np.float16) if half and value.dtype == np.float32 else value


def _take(decoded: list[np.ndarray], wanted: np.ndarray, layer: Layer) -> None:
    """Coremltools renames weights, so a layer is found by its values; each look-up counts for one layer."""
    for i, value in enumerate(decoded):
        if value.shape == wanted.shape and np.array_equal(value, wanted):
            del decoded[i]
            return
    raise UserError(f"{layer.name}: the Core ML file holds other weights than the model's; it was deleted")
