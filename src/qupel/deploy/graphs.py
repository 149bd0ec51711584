"""What an ONNX file may hold before a runtime sees it: operators of networks, sizes that are known beforehand.

A graph of a few hundred bytes can loop for ever or ask for any amount of memory. So only the operators that this
package and torch's exporter make of networks are allowed, none that loops, branches, calls a function or reads another
file; and the shape of every tensor must follow from the file, for a given batch, and be of reasonable size.

This module needs onnx and numpy only: it is loaded by the confined process (`confined`), which has no torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qupel.deploy.header import LARGEST_HEAD, LONGEST_NAME, MOST_DIMENSIONS, FormatError
from qupel.deploy.sessions import KEY

BATCH = 64  # inputs of one run
LARGEST_FILE = 256 << 20
LARGEST_TENSOR = 256 << 20  # bytes of anything that is computed
MOST_NODES = 10_000
MOST_TENSORS = 20_000
_MOST_INPUTS = 256  # of one node
_LONGEST_LIST = 256  # of numbers in an attribute
_DOMAINS = ("", "ai.onnx")
_LONGEST_VECTOR = 1 << 21  # numbers
_SMALL = 1024  # numbers; a larger initializer is no shape

_LAYERS = """Conv ConvTranspose Gemm MatMul LSTM GRU RNN MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool
GlobalLpPool BatchNormalization InstanceNormalization LayerNormalization GroupNormalization LpNormalization LRN
Dropout"""
_ACTIVATIONS = """Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu Mish Sigmoid HardSigmoid HardSwish Tanh
Softplus Softsign Softmax LogSoftmax Clip Erf"""
_ARITHMETIC = """Add Sub Mul Div Pow Sqrt Reciprocal Exp Log Neg Abs Sign Floor Ceil Round Min Max Sum Mean Sin Cos Mod
BitShift BitwiseAnd BitwiseOr BitwiseNot BitwiseXor And Or Not Xor Equal Greater GreaterOrEqual Less LessOrEqual Where
IsNaN ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp ArgMax
ArgMin"""
_SHAPES = """Reshape Flatten Transpose Squeeze Unsqueeze Concat Slice Split Pad Expand Resize Identity Cast Constant
Shape Size Gather GatherElements Range DepthToSpace SpaceToDepth"""
OPERATORS = frozenset(f"{_LAYERS} {_ACTIVATIONS} {_ARITHMETIC} {_SHAPES}".split())


def _types(onnx: Any) -> dict[int, tuple[np.dtype[Any], str]]:
    """Element types that are allowed: the dtype, and the field that holds the numbers where they are not raw."""
    t, f = onnx.TensorProto, np.dtype
    return {
        t.FLOAT: (f("<f4"), "float_data"),
        t.DOUBLE: (f("<f8"), "double_data"),
        t.FLOAT16: (f("<f2"), "int32_data"),
        t.INT64: (f("<i8"), "int64_data"),
        t.UINT64: (f("<u8"), "uint64_data"),
        t.UINT32: (f("<u4"), "uint64_data"),
        **{k: (f(d), "int32_data") for k, d in ((t.INT32, "<i4"), (t.INT16, "<i2"), (t.UINT16, "<u2"))},
        **{k: (f(d), "int32_data") for k, d in ((t.INT8, "i1"), (t.UINT8, "u1"), (t.BOOL, "?"))},
    }


def parse(content: bytes) -> Any:
    """The ModelProto in these bytes, checked; fields that this reader does not know are dropped."""
    import onnx

    if len(content) > LARGEST_FILE:
        raise FormatError(f"{len(content):,} bytes; allowed are {LARGEST_FILE:,}")
    try:
        model = onnx.load_model_from_string(content)
        model.DiscardUnknownFields()
    except Exception as error:  # protobuf has many kinds
        raise FormatError(f"not an ONNX file that can be read ({str(error)[:80]})") from None
    _check_model(model)
    return model


def _check_model(model: Any) -> None:
    import onnx

    graph = model.graph
    foreign = any(o.domain not in _DOMAINS for o in model.opset_import)
    if len(model.functions) or len(model.training_info) or foreign:
        raise FormatError("functions, training graphs and operators of other domains are not allowed")
    if len(graph.sparse_initializer) or len(graph.quantization_annotation):
        raise FormatError("sparse and annotated tensors are not allowed")
    if not 1 <= len(graph.node) <= MOST_NODES or len(graph.initializer) > MOST_TENSORS:
        counts = f"{len(graph.node):,} nodes and {len(graph.initializer):,} tensors"
        raise FormatError(f"{counts}; allowed are 1 to {MOST_NODES:,} and {MOST_TENSORS:,}")
    types = _types(onnx)
    names = [t.name for t in graph.initializer]
    if len(set(names)) < len(names):
        raise FormatError("two tensors have the same name")
    texts = [entry.value for entry in model.metadata_props] + [n for v in graph.node for n in (*v.input, *v.output)]
    if not all(isinstance(text, str) for text in (*names, *texts)):  # protobuf gives bytes for what is not UTF-8
        raise FormatError("a name or a text that is not UTF-8")
    for tensor in graph.initializer:
        _check_tensor(tensor, types)
    for node in graph.node:
        _check_node(node, types)
    held = set(names)
    given = [value for value in graph.input if value.name not in held]
    if not (1 <= len(given) <= 16 and 1 <= len(graph.output) <= 16):
        raise FormatError(f"{len(given)} inputs and {len(graph.output)} outputs; needed are 1 to 16 of each")
    for value in given:
        kind = value.type.tensor_type
        known = kind.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
        if not known or not 1 <= len(kind.shape.dim) <= MOST_DIMENSIONS:
            raise FormatError("its inputs must be float32 or int64 tensors of known dimensions")


def _check_tensor(tensor: Any, types: dict[int, tuple[np.dtype[Any], str]]) -> None:
    """No other file, a known type, and as many numbers as its shape says."""
    what = f"the tensor {tensor.name[:80]!r}"
    if len(tensor.name) > LONGEST_NAME:
        raise FormatError(f"{what}: a name of {len(tensor.name)} characters; allowed are {LONGEST_NAME}")
    if len(tensor.external_data) or tensor.data_location or tensor.HasField("segment"):
        raise FormatError(f"{what} lies in another file, which is not allowed")
    if tensor.data_type not in types:
        raise FormatError(f"{what} has elements of type {tensor.data_type}, which is not allowed")
    dtype, field = types[tensor.data_type]
    dims = list(tensor.dims)
    if len(dims) > MOST_DIMENSIONS or any(d < 0 for d in dims):
        raise FormatError(f"{what} has the shape {dims[:9]}; allowed are {MOST_DIMENSIONS} dimensions from 0 on")
    held = len(tensor.raw_data) / dtype.itemsize if tensor.HasField("raw_data") else len(getattr(tensor, field))
    if held != math.prod(dims):
        raise FormatError(f"{what} holds {held:g} numbers; its shape is {dims}")


def _check_node(node: Any, types: dict[int, tuple[np.dtype[Any], str]]) -> None:
    if node.op_type not in OPERATORS or node.domain not in _DOMAINS:
        raise FormatError(f"the operator {node.op_type[:40]!r} is not allowed")
    if len(node.input) > _MOST_INPUTS or len(node.output) > _MOST_INPUTS or len(node.attribute) > 32:
        raise FormatError(f"an operator {node.op_type} with too many inputs, outputs or attributes")
    for attribute in node.attribute:
        kind = attribute.AttributeType.Name(attribute.type) if attribute.type in range(15) else "?"
        tensor = kind == "TENSOR" and node.op_type == "Constant"
        nested = attribute.ref_attr_name or attribute.HasField("g") or len(attribute.graphs)
        if nested or (not tensor and kind not in ("FLOAT", "INT", "STRING", "FLOATS", "INTS")):
            raise FormatError(f"{node.op_type}: the attribute {attribute.name[:40]!r} is of a kind that is not allowed")
        if max(len(attribute.floats), len(attribute.ints), len(attribute.s)) > _LONGEST_LIST:
            raise FormatError(f"{node.op_type}: the attribute {attribute.name[:40]!r} is too long")
        if tensor:
            _check_tensor(attribute.t, types)


def about(model: Any) -> str | None:
    """Our metadata, as it is in the file."""
    found = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if found and len(found[0]) > LARGEST_HEAD:
        raise FormatError(f"the metadata {KEY!r} has {len(found[0]):,} bytes; allowed are {LARGEST_HEAD:,}")
    return found[0] if found else None


def check_sizes(model: Any, batch: int = BATCH) -> None:
    """The shape of everything that is computed for `batch` inputs must be known, and none be too large.

    onnx infers shapes that are computed in the graph only from values, and makes a list of the length of a vector for
    that, however long it is: so first without values, and with them only where that is needed and vectors are short.
    """
    bare = _without_data(model)
    for value in bare.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    unknown, longest = _sizes(bare, batch, with_values=False)
    if unknown and longest <= _LONGEST_VECTOR:
        unknown, _ = _sizes(bare, batch, with_values=True)
    if unknown:
        raise FormatError(f"{unknown} does not follow from the file")


def _sizes(bare: Any, batch: int, with_values: bool) -> tuple[str, int]:
    """A result whose size is not known, and the length of the longest vector; too large a result is refused."""
    import onnx

    try:
        told = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=with_values)
    except Exception as error:  # of onnx's own, unexported kinds
        raise FormatError(f"its shapes do not follow ({str(error).strip().splitlines()[-1][:120]})") from None
    types, unknown, longest = _types(onnx), "", 0
    shapes = {v.name: v.type.tensor_type for v in (*told.graph.value_info, *told.graph.output, *told.graph.input)}
    for node in told.graph.node:
        for name in filter(None, node.output):
            kind: Any = shapes.get(name)
            known = kind is not None and kind.elem_type in types and kind.HasField("shape")
            dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim] if known else [-1]
            if min(dims, default=0) < 0:
                unknown = unknown or f"{node.op_type}: the size of its result {name[:40]!r}"
                continue
            longest = max(longest, dims[0]) if len(dims) == 1 else longest
            size = math.prod(dims) * types[kind.elem_type][0].itemsize
            if size > LARGEST_TENSOR:
                result = f"{node.op_type}: a result of {size:,} bytes for {batch} inputs"
                raise FormatError(f"{result}; allowed are {LARGEST_TENSOR:,}")
    return unknown, longest


def _without_data(model: Any) -> Any:
    """The same graph; large tensors are inputs of it, so that they are not copied about."""
    import onnx

    graph = onnx.GraphProto(name=model.graph.name, node=model.graph.node, output=model.graph.output)
    held = {t.name for t in model.graph.initializer}
    graph.input.extend(value for value in model.graph.input if value.name not in held)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=graph)
