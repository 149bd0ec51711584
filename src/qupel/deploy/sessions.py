"""ONNX Runtime sessions: how a model is loaded, run and asked what it is. Needs no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from qupel.deploy import header
from qupel.deploy.about import About
from qupel.deploy.header import FormatError
from qupel.util.errors import UserError

KEY = "qupel"  # our entry in the model's metadata: About as JSON


def library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"ONNX needs the package {name}: pip install 'qupel[onnx]'") from None


def session(model: str | os.PathLike[str] | bytes, *, keep_packed: bool = False, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU, in this process and without limits: for files that you trust.

    keep_packed  False: weights are decoded once, now; runs as fast as fp32. True: they stay packed in memory and are
                 decoded in every run; slower, and as small as the file.
    """
    runtime = library("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    if threads is not None:
        options.intra_op_num_threads = threads
    if keep_packed:
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", "1")
        options.enable_cpu_mem_arena = False  # the arena would keep the memory of every decoded layer
    if not isinstance(model, bytes):
        model = os.fspath(model)
        if not os.path.isfile(model):
            raise UserError(f"{model} cannot be read: no such file")
    try:
        return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime has its own, unexported kinds for every way a file can be broken
        name = "the model" if isinstance(model, bytes) else model
        raise FormatError(f"{name}: ONNX Runtime cannot read it ({_line(error)})") from error


def run(running: Any, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The first output for these inputs, in their order, as float32 numbers (n, ...)."""
    names = [value.name for value in running.get_inputs()]
    if len(names) != len(inputs):
        raise FormatError(f"it takes {len(names)} inputs, not {len(inputs)}")
    try:
        outputs = running.run([running.get_outputs()[0].name], dict(zip(names, inputs, strict=True)))[0]
        return np.ascontiguousarray(outputs, np.float32)
    except Exception as error:  # as above; also an output that is no array of numbers
        raise FormatError(f"ONNX Runtime cannot run it ({_line(error)})") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def read_about(running: Any) -> About:
    """What the file of this session says about its model; nothing for a foreign one."""
    return about_of(running.get_modelmeta().custom_metadata_map.get(KEY), "the model")


def about_of(stored: str | None, path: object) -> About:
    """What the metadata of an ONNX file says."""
    try:
        return About() if stored is None else About.from_json(header.parse(stored, f"the metadata {KEY!r}"))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
