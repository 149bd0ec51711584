"""ONNX that any stock ONNX Runtime executes: codes stay packed in the file and are decoded by the graph itself.

ONNX has no look-up of sub-byte codes, so a byte is the index: a table [256, 8 / b] holds the centers of the 8 / b codes
in every possible byte, and Gather(table, packed) decodes a layer (opset 18, no custom operator):

    digits[v, i] = (v >> b i) & (2^b - 1)        made in the graph, once per bit width
    weight       = reshape(Gather(Gather(codebook, digits), packed), shape)

3 bits: three bytes are two numbers of 12 bits, each four codes, hence a table [4096, 4]. 5 to 7 bits are stored as 8.
Levels that are scaled by channel: Mul(weight, scales) follows, the scales as [o, 1, ...].

A session decodes when it is made and runs as fast as the fp32 model (the default), or keeps the codes and decodes in
every run, which takes less memory and more time: `session(path, keep_packed=True)`.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import Codebook
from qupel.deploy import header
from qupel.deploy.about import About
from qupel.deploy.feed import Inputs, feed
from qupel.deploy.file import write_file
from qupel.deploy.formats import exporter
from qupel.deploy.pack import pack
from qupel.deploy.packed import Layer, Packed, Rest, pack_model
from qupel.deploy.sessions import KEY, library, read_about, session
from qupel.deploy.tidy import tidy
from qupel.tasks.task import call
from qupel.util.errors import UserError

__all__ = ["KEY", "export_onnx", "library", "read_about", "session"]

OPSET, IR = 18, 8  # understood by ONNX Runtime 1.14 and later
_TOLERANCE = 1e-4  # of the largest output, for verification: sums are made in another order


@exporter("onnx", suffix=".onnx")
def export_onnx(
    path: str | os.PathLike[str],
    module: nn.Module,
    codebook: Codebook,
    *,
    about: About,
    rest: Rest = "fp32",
) -> int:
    """Write the model as ONNX with input "input" (batch, *input_shape) and output "output", and return its bytes. Of
    several inputs each has its own name (`About.input_names`); tokens are int64.

    The file appears only after ONNX Runtime has reproduced every weight exactly and torch's outputs on random inputs.
    """
    for name in ("onnx", "onnxruntime", "onnxscript"):
        library(name)
    if not about.takes:
        raise UserError("ONNX needs about.input_shape, the shape of one input")
    packed = pack_model(module, codebook, about, rest)
    module = copy.deepcopy(module).cpu().eval()
    packed.into(module)  # rest = "fp16" rounds
    names = _names(module)
    model = _trace(_without_batchnorm(module), about, {layer.name: names[layer.name] for layer in packed.layers})
    _swap(model, packed, halve=rest == "fp16")
    _describe(model, about)
    content = model.SerializeToString()
    _verify(content, model, packed, module)
    write_file(path, content)
    return len(content)


class _ScaleShift(nn.Module):
    """BatchNorm in evaluation: y = scale x + shift, scale = gamma / sqrt(var + eps), shift = beta - mean scale.

    The exporter would multiply BatchNorm into the convolution before it, and the codebook would be gone.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise UserError("BatchNorm without running statistics cannot be exported")
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        shift = -norm.running_mean.double() * scale
        shift = shift if norm.bias is None else shift + norm.bias.double()
        self.scale = nn.Parameter(scale.float(), requires_grad=False)  # (C,)
        self.shift = nn.Parameter(shift.float(), requires_grad=False)  # (C,)

    def forward(self, x: Tensor) -> Tensor:
        spread = (-1,) + (1,) * (x.ndim - 2)
        return x * self.scale.view(spread) + self.shift.view(spread)


def _without_batchnorm(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return _ScaleShift(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _without_batchnorm(child))
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own deprecations and of packages it could use; neither concerns the user."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _names(module: nn.Module) -> dict[str, list[str]]:
    """First name of a parameter -> all of them: several where it is tied."""
    first = {id(p): name for name, p in module.named_parameters()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, p in module.named_parameters(remove_duplicate=False):
        names[first[id(p)]].append(name)
    return names


def _trace(module: nn.Module, about: About, quantized: dict[str, list[str]]) -> Any:
    """The module as an ONNX ModelProto with a dynamic batch, stripped of everything that only describes. Quantized
    weights are inputs of its graph, so that no optimization can fold them into something else."""
    inputs, batch = feed(about, 2), torch.export.Dim("batch")
    named = inputs if isinstance(inputs, dict) else None
    axes: Any = tuple({0: batch} for _ in inputs) if named is None else {name: {0: batch} for name in named}
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                module,
                tuple(inputs) if named is None else (),
                kwargs=named,
                dynamo=True,
                opset_version=OPSET,
                input_names=about.input_names,
                output_names=["output"],
                dynamic_shapes=axes,
                optimize=False,
                verbose=False,
            )
            weights = _as_inputs(program.model.graph, quantized)
            program.optimize()
    except torch.onnx.errors.OnnxExporterError as error:
        raise UserError(f"torch cannot export this network to ONNX: {str(error).splitlines()[0]}") from error
    model = program.model_proto
    model.ir_version = IR
    del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
    for value in list(model.graph.input):
        if value.name in weights:
            model.graph.input.remove(value)
    for thing in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        thing.doc_string = ""
        del thing.metadata_props[:]
    kept = {name for name, _ in module.named_parameters()} | {*about.input_names, "output"}
    tidy(model.graph, kept | weights)
    return model


def _as_inputs(graph: Any, quantized: dict[str, list[str]]) -> set[str]:
    """Let quantized weights come from outside; the exporter keeps a tied one under any of its names."""
    for name, aliases in quantized.items():
        held = [graph.initializers.pop(alias) for alias in aliases if alias in graph.initializers]
        if not held:
            raise UserError(f"{name}: the exporter left no weight of this name in the graph; it cannot be packed")
        for value in held[1:]:
            value.replace_all_uses_with(held[0])
        held[0].name, held[0].const_value = name, None
        graph.inputs.append(held[0])
    return set(quantized)


def _describe(model: Any, about: About) -> None:
    model.producer_name, model.producer_version, model.doc_string = "qupel", "", ""
    model.graph.name = about.model or "model"
    model.metadata_props.add(key=KEY, value=header.dump(about.to_json()))


# --- packed weights in the graph ---


class _Graph:
    """Nodes and initializers to be put before those of the network."""

    def __init__(self) -> None:
        self.onnx = library("onnx")
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.digits: dict[int, str] = {}
        self.shapes: dict[tuple[int, ...], str] = {}

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(self.onnx.numpy_helper.from_array(np.array(value), name))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(op, inputs, [output], **attributes))
        return output

    def cast(self, source: str, to: str, output: str) -> str:
        return self.node("Cast", [source], output, to=getattr(self.onnx.TensorProto, to))

    def shape(self, shape: tuple[int, ...]) -> str:
        if shape not in self.shapes:
            name = f"shape{len(self.shapes)}"
            self.shapes[shape] = self.constant(name, np.array(shape, np.int64))
        return self.shapes[shape]

    def digit_table(self, bits: int) -> str:
        """The name of digits [2^(b k), k], int32: the k codes in every byte (in every 12-bit number for 3 bits)."""
        if bits not in self.digits:
            width = 12 if bits == 3 else 8
            name = f"digits{bits}"
            bounds = [self.constant(f"{name}_{v}", np.array(v, np.int32)) for v in (0, 2**width, 1)]
            # uint32: some runtimes miscompute shifts of uint8.
            shifts = self.constant(f"{name}_shifts", np.arange(0, width, bits, dtype=np.uint32)[None])
            mask = self.constant(f"{name}_mask", np.array(2**bits - 1, np.uint32))
            axis = self.constant(f"{name}_axis", np.array([1], np.int64))
            values = self.cast(self.node("Range", bounds, f"{name}_r"), "UINT32", f"{name}_u")
            column = self.node("Unsqueeze", [values, axis], f"{name}_c")
            shifted = self.node("BitShift", [column, shifts], f"{name}_s", direction="RIGHT")
            self.cast(self.node("BitwiseAnd", [shifted, mask], f"{name}_a"), "INT32", name)
            self.digits[bits] = name
        return self.digits[bits]

    def triples(self, packed: str, i: int) -> str:
        """uint8 [k, 3] -> int32 [k, 2]: three bytes, least significant first, as two numbers of 12 bits."""
        if "triple_scale" not in {t.name for t in self.initializers}:
            self.constant("triple_scale", np.array([[1, 1 << 8, 1 << 16]], np.int32))
            self.constant("triple_axis", np.array([1], np.int64))
            self.constant("triple_shifts", np.array([[0, 12]], np.uint32))
            self.constant("triple_mask", np.array(0xFFF, np.uint32))
        scaled = self.node("Mul", [self.cast(packed, "INT32", f"t{i}i"), "triple_scale"], f"t{i}m")
        word = self.cast(self.node("ReduceSum", [scaled, "triple_axis"], f"t{i}w"), "UINT32", f"t{i}u")  # [k, 1]
        parts = self.node("BitShift", [word, "triple_shifts"], f"t{i}s", direction="RIGHT")
        return self.cast(self.node("BitwiseAnd", [parts, "triple_mask"], f"t{i}a"), "INT32", f"t{i}x")

    def weight(self, layer: Layer, i: int) -> None:
        """Nodes whose last output has the layer's name and is its dense weight."""
        if layer.scales is None:
            self.centers(layer, i, layer.name)
            return
        scales = layer.scales.reshape(-1, *[1] * (len(layer.shape) - 1))
        units = f"{layer.name}_units"
        self.centers(layer, i, units)
        self.node("Mul", [units, self.constant(f"{layer.name}_scales", scales)], layer.name)

    def centers(self, layer: Layer, i: int, output: str) -> None:
        """Nodes that give the center of every code, in the layer's shape."""
        bits = layer.bits if layer.bits in (1, 2, 3, 4) else 8
        # Every code that fits into the bits has a center, so that no table is read beyond its end.
        centers = np.concatenate([layer.centers, np.repeat(layer.centers[-1:], 2**layer.bits - len(layer.centers))])
        codebook = self.constant(f"{layer.name}_codebook", centers)
        if bits == 8:
            packed = self.constant(f"{layer.name}_packed", layer.codes().reshape(layer.shape))
            self.node("Gather", [codebook, self.cast(packed, "INT32", f"w{i}x")], output)
            return
        table = self.node("Gather", [codebook, self.digit_table(bits)], f"w{i}t")
        if bits == 3:
            codes = np.zeros(-(-layer.size // 8) * 8, np.uint8)
            codes[: layer.size] = layer.codes()
            index = self.triples(self.constant(f"{layer.name}_packed", pack(codes, 3).reshape(-1, 3)), i)
        else:
            index = self.cast(self.constant(f"{layer.name}_packed", layer.packed), "INT32", f"w{i}x")
        dense = self.node("Gather", [table, index], f"w{i}d")
        if layer.size % (8 if bits == 3 else 8 // bits):  # a few codes of padding at the end
            flat = self.node("Reshape", [dense, self.shape((-1,))], f"w{i}v")
            ends = [self.constant(f"w{i}{k}", np.array([v], np.int64)) for k, v in (("b", 0), ("e", layer.size))]
            dense = self.node("Slice", [flat, *ends], f"w{i}g")
        self.node("Reshape", [dense, self.shape(layer.shape)], output)


def _swap(model: Any, packed: Packed, halve: bool) -> None:
    """Put the nodes that decode the quantized weights before those of the network, which take them by name."""
    numpy_helper = library("onnx").numpy_helper
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    graph = _Graph()
    for i, layer in enumerate(packed.layers):
        graph.weight(layer, i)
    for tensor in list(held.values()):
        value = numpy_helper.to_array(tensor)
        if halve and value.dtype == np.float32 and value.ndim and np.array_equal(value.astype(np.float16), value):
            graph.cast(graph.constant(f"{tensor.name}_half", value.astype(np.float16)), "FLOAT", tensor.name)
            del held[tensor.name]
    nodes = graph.nodes + list(model.graph.node)
    tensors = graph.initializers + list(held.values())
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(tensors)


# --- verification ---


def _verify(content: bytes, model: Any, packed: Packed, module: nn.Module) -> None:
    """ONNX Runtime must decode every weight exactly, and reproduce torch's outputs for several batch sizes."""
    onnx = library("onnx")
    weights = onnx.ModelProto()
    weights.CopyFrom(model)
    del weights.graph.output[:]
    for layer in packed.layers:
        weights.graph.output.append(onnx.helper.make_tensor_value_info(layer.name, onnx.TensorProto.FLOAT, layer.shape))
    if packed.layers:
        decoded = session(weights.SerializeToString()).run(None, _arrays(packed.about, feed(packed.about, 1)))
        for layer, value in zip(packed.layers, decoded, strict=True):
            if not np.array_equal(value, layer.weights()):
                raise UserError(f"{layer.name}: ONNX Runtime decodes other weights; no file was written")
    running = session(content)
    for batch in (1, 3):
        inputs, wanted = _tried(module, packed.about, batch)
        try:
            got = running.run(None, _arrays(packed.about, inputs))[0]
        except Exception as e:  # of the runtime's own, unexported kinds
            said = str(e).splitlines()[0][:120]
            raise UserError(f"the exported graph does not take {batch} inputs at a time: {said}") from e
        error = np.abs(got - wanted).max() if got.shape == wanted.shape else math.inf
        if not error <= _TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            raise UserError(
                f"ONNX Runtime's outputs differ from torch's by {error:.3g}, though every packed weight is right: "
                "an operator of this network is exported wrongly; no file was written"
            )


def _arrays(about: About, inputs: Inputs) -> dict[str, np.ndarray]:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return {name: value.numpy() for name, value in zip(about.input_names, values, strict=True)}


def _tried(module: nn.Module, about: About, batch: int) -> tuple[Inputs, np.ndarray]:
    """Random inputs and torch's outputs: tokens as high as the largest embedding goes, or a smaller one."""
    tables = {m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)} or {about.classes or 2}
    for below in sorted(tables, reverse=True):
        inputs = feed(about, batch, torch.Generator().manual_seed(batch), below)
        try:
            with torch.no_grad():
                outputs = call(module, inputs)
        except IndexError:  # beyond an embedding
            continue
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise UserError(f"the network gives {kind}; for ONNX wrap it in a module that gives one tensor")
        return inputs, outputs.numpy()
    raise UserError("the network takes no tokens that its embeddings have; no file was written")
