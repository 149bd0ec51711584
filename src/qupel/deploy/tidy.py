"""Make an exported ONNX graph small and its sizes plain: names, attributes and shapes that say nothing go."""

from __future__ import annotations

from typing import Any

import numpy as np

from qupel.deploy.sessions import library

_DEFAULTS: dict[str, Any] = {"auto_pad": b"NOTSET", "group": 1, "strides": {1}, "dilations": {1}, "pads": {0}}


def tidy(graph: Any, keep: set[str]) -> None:
    """In place. keep: names that stay. Graphs within the graph may name our tensors, and nothing is renamed then."""
    nested = any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute)
    if not nested:
        _plain_reshapes(graph)
        _shorten(graph, keep)
    for node in graph.node:
        _strip(node)


def _plain_reshapes(graph: Any) -> None:
    """Reshape(x, [x.shape[0], ..., x.shape[k], n]) -> Reshape(x, [0, ..., 0, -1]), which says the same: the exporter
    computes such shapes after recurrent layers, in a way that onnx cannot follow."""
    numpy_helper = library("onnx").numpy_helper
    made = {name: node for node in graph.node for name in node.output}
    known = {t.name: numpy_helper.to_array(t) for t in graph.initializer if len(t.dims) < 2}

    def is_dimension(name: str, k: int, x: str) -> bool:
        """Whether the name is x.shape[k : k + 1]."""
        part = made.get(name)
        if part is None or part.op_type != "Slice" or not all(v in known for v in part.input[1:3]):
            return False
        whole = made.get(part.input[0])
        of_x = whole is not None and whole.op_type == "Shape" and whole.input[0] == x
        return of_x and [known[v].tolist() for v in part.input[1:3]] == [[k], [k + 1]]

    for node in graph.node:
        shape = made.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is None or shape.op_type != "Concat" or len(shape.input) < 2:
            continue
        if all(is_dimension(name, k, node.input[0]) for k, name in enumerate(shape.input[:-1])):
            name = f"shape_rest{len(shape.input)}"
            if name not in {t.name for t in graph.initializer}:
                rest = np.array([0] * (len(shape.input) - 1) + [-1], np.int64)
                graph.initializer.append(numpy_helper.from_array(rest, name))
            node.input[1] = name
    _drop_unused(graph)


def _drop_unused(graph: Any) -> None:
    used = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):  # in the order of computation
        if used.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            used.update(node.input)
    for tensor in list(graph.initializer):
        if tensor.name not in used:
            graph.initializer.remove(tensor)


def _shorten(graph: Any, keep: set[str]) -> None:
    """Give tensors between the nodes short names; small models feel them."""
    short: dict[str, str] = {}
    for name in [t.name for t in graph.initializer] + [name for node in graph.node for name in node.output]:
        if name and name not in keep and not name.startswith("shape_rest"):
            short[name] = f"v{len(short)}"
    for tensor in graph.initializer:
        tensor.name = short.get(tensor.name, tensor.name)
    for node in graph.node:
        node.input[:] = [short.get(name, name) for name in node.input]
        node.output[:] = [short.get(name, name) for name in node.output]


def _strip(node: Any) -> None:
    """Drop from a node what says nothing."""
    helper = library("onnx").helper
    node.name = node.doc_string = ""
    del node.metadata_props[:]
    if node.op_type in ("Conv", "MaxPool", "AveragePool"):
        for attribute in list(node.attribute):
            value = helper.get_attribute_value(attribute)
            value = set(value) if isinstance(value, list) else value
            if value == _DEFAULTS.get(attribute.name):
                node.attribute.remove(attribute)
