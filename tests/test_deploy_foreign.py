"""ONNX files from anywhere: bombs and mutated graphs end with a line, in a process that cannot take this one along."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from qupel.core.codebook import Codebook
from qupel.deploy import About, FormatError, open_model
from qupel.deploy import inspect as look
from qupel.deploy.graphs import OPERATORS
from qupel.deploy.onnx import export_onnx
from qupel.deploy.sandbox import Limits, Sandbox
from qupel.deploy.sessions import about_of
from qupel.tasks import zoo as models
from test_deploy_commands import call
from test_deploy_file import deployed

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper, F, I = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64  # noqa: E741

ABOUT = '{"input_shape":[4],"classes":4}'


def const(name, value, dtype=np.int64):
    return onnx.numpy_helper.from_array(np.array(value, dtype), name)


def model(nodes, tensors=(), shape=("batch", 4), outputs=("y",), **more):
    """A file with input x and output y around these nodes."""
    values = [helper.make_tensor_value_info(name, F, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", F, shape)], values, list(tensors))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8, **more)
    made.metadata_props.add(key="qupel", value=ABOUT)
    return made


def node(op, inputs, output="y", **attributes):
    return helper.make_node(op, inputs.split(), [output], **attributes)


def body(*nodes):
    """A graph in a graph."""
    true = const("true", True, bool)
    out = [helper.make_tensor_value_info(n, k, []) for n, k in (("more", onnx.TensorProto.BOOL), ("v2", F))]
    given = [helper.make_tensor_value_info("i", I, []), helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])]
    return helper.make_graph(
        [helper.make_node("Identity", ["true"], ["more"]), helper.make_node("Identity", ["v"], ["v2"]), *nodes],
        "b", [*given, helper.make_tensor_value_info("v", F, [])], out, [true],
    )  # fmt: skip


def external(path):
    tensor = onnx.TensorProto(name="w", data_type=F, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=str(path))
    return tensor


def nested(depth):
    """An If in an If in an If ..."""
    inner = helper.make_graph([node("Identity", "x", "z")], "t", [], [helper.make_tensor_value_info("z", F, None)])
    for k in range(depth):
        branch = helper.make_node("If", ["c"], [f"z{k}"], then_branch=inner, else_branch=inner)
        inner = helper.make_graph([branch], "t", [], [helper.make_tensor_value_info(f"z{k}", F, None)])
    return node("If", "c", then_branch=inner, else_branch=inner)


def doubling(times):
    """x with itself, and that with itself, ..."""
    nodes = [node("Concat", f"v{k} v{k}", f"v{k + 1}", axis=1) for k in range(times)]
    return [node("Identity", "x", "v0"), *nodes, node("Identity", f"v{times}")]


def bombs():
    """(what is said, model)."""
    huge = const("n", [2**31, 8])
    forever = [const("n", 2**62), const("c", True, bool), const("v", 0.0, np.float32)]
    yield "operator 'Loop' is not allowed", model([node("Loop", "n c v", body=body())], forever)
    yield "operator 'If' is not allowed", model([nested(6)], forever[1:2])
    yield "operator 'ConstantOfShape' is not allowed", model([node("ConstantOfShape", "n")], [huge])
    yield "operator 'Tile' is not allowed", model([node("Tile", "x n")], [const("n", [2**20, 2**20])])
    yield "operator 'Scan' is not allowed", model([node("Scan", "x", body=body(), num_scan_inputs=1)])
    yield "operator 'RandomNormal' is not allowed", model([node("RandomNormal", "", shape=[2**30])])
    yield "operator 'Inner' is not allowed", model([helper.make_node("Inner", ["x"], ["y"], domain="")])
    yield "operator 'Relu' is not allowed", model([helper.make_node("Relu", ["x"], ["y"], domain="ai.evil")])
    function = helper.make_function("own", "Relu", ["x"], ["y"], [node("Relu", "x")], [helper.make_opsetid("", 18)])
    yield "functions, training", model([node("Relu", "x")], functions=[function])
    yield "Expand: a result of", model([node("Expand", "x n")], [const("n", [2**20, 64, 4])])
    yield (
        "Expand: a result of",
        model([node("Constant", "", "n", value=const("", [2**31, 64, 4])), node("Expand", "x n")]),
    )
    ends = [const(name, v, np.float32) for name, v in (("a", 0), ("b", 1e12), ("c", 1))]
    yield "Range: a result of", model([node("Range", "a b c")], ends)
    yield "Pad: a result of", model([node("Pad", "x n")], [const("n", [0, 2**31, 0, 2**31])])
    yield "Concat: a result of", model(doubling(40))
    yield (
        "Resize: a result of",
        model(
            [node("Unsqueeze", "x a", "z"), helper.make_node("Resize", ["z", "", "s"], ["y"])],
            [const("a", [1]), const("s", [1, 1e4, 1e4], np.float32)],
        ),
    )
    ones = [const(name, np.ones(shape), np.float32) for name, shape in (("c", (30_000, 1)), ("r", (1, 30_000)))]
    yield "MatMul: a result of", model([node("MatMul", "c r")], ones)
    given = [node("Cast", "x", "n", to=I), node("Slice", "n a b", "m"), node("Squeeze", "m", "s")]
    yield "does not follow", model([*given, node("Expand", "x s")], [const("a", [0]), const("b", [1])])
    yield "lies in another file", model([node("Add", "x w")], [external("/etc/hostname")])
    yield "holds 0 numbers", model([node("Add", "x w")], [onnx.TensorProto(name="w", data_type=F, dims=[2**40])])
    yield "elements of type 8", model([node("Add", "x w")], [helper.make_tensor("w", 8, [1], [b"text"])])
    yield "nodes and", model([node("Relu", "x" if k == 0 else f"v{k}", f"v{k + 1}") for k in range(20_000)])
    yield "of a kind that is not allowed", model([node("Relu", "x", extra=body())])
    made = model([node("Relu", "x")])
    made.metadata_props[0].value = '{"client":"' + "x" * (1 << 20) + '"}'
    yield "bytes; allowed are 1,048,576", made
    yield "needed are 1 to 16 of each", model([node("Relu", "x")], outputs=[f"y{k}" for k in range(40)])


def written(path, made):
    path.write_bytes(made.SerializeToString())
    return path


BOMBS = list(bombs())


@pytest.fixture(scope="module")
def box():
    made = Sandbox("none")
    yield made
    made.close()


@pytest.mark.parametrize("case", range(len(BOMBS)), ids=[f"{k}-{said}" for k, (said, _) in enumerate(BOMBS)])
def test_bombs_are_refused_before_the_runtime_sees_them(case, box, tmp_path):
    said, made = BOMBS[case]
    box.path = written(tmp_path / "m.onnx", made)
    with pytest.raises(FormatError, match="a file that you trust is run without limits with --trust") as refused:
        box.open()
    assert said in str(refused.value)
    assert box.process.poll() is None  # a refusal, not a death


def test_the_commands_answer_with_one_line(tmp_path):
    path = written(tmp_path / "m.onnx", BOMBS[0][1])
    (tmp_path / "x.csv").write_text("1,2,3,4\n")
    for words in (("inspect", path), ("predict", path, tmp_path / "x.csv"), ("eval", path, "--data", "digits")):
        said = call(*words, code=2)
        assert "m.onnx: the operator 'Loop' is not allowed" in said
        assert "\n" not in said


def run(box, batch):
    box.open()
    return box.run(np.zeros((batch, 4), np.float32))


def test_more_time_or_memory_than_allowed_ends_the_child_only(tmp_path):
    """Allowed operators and sizes, but thousands of them one after the other, or many at a time."""
    big = const("w", np.eye(1500), np.float32)
    chain = [node("Gather", "w i", "v0"), *(node("MatMul", f"v{k} v{k}", f"v{k + 1}") for k in range(2_000))]
    slow = model([node("ReduceSum", "x", "z"), node("Cast", "z", "i0", to=I), node("Mul", "i0 zero", "i1"),
                  node("Add", "i1 all", "i2"), node("Reshape", "i2 flat", "i"), *chain, node("Identity", "v2000")],
                 [big, const("zero", 0), const("all", range(1500)), const("flat", [1500])])  # fmt: skip
    box = Sandbox(written(tmp_path / "slow.onnx", slow), Limits(seconds=1.5))
    with pytest.raises(FormatError, match=r"slow.onnx: not done after 1.5 s; a file that you trust"):
        run(box, 1)
    assert box.process.returncode is not None
    wide = [node("Unsqueeze", "x a", "u"), node("Expand", "u n", "e")]
    wide += [node("LeakyRelu", "e", f"v{k}", alpha=k / 64) for k in range(40)]  # each other numbers, all needed at once
    last = node("Sum", " ".join(f"v{k}" for k in range(40)))
    many = model([*wide, last], [const("a", [1]), const("n", [64, 2**16, 4])])
    box = Sandbox(written(tmp_path / "wide.onnx", many))
    with pytest.raises(FormatError, match=r"wide.onnx: .*a file that you trust"):
        run(box, 64)
    box.close()


def test_honest_files_give_what_they_give_in_this_process(tmp_path):
    """All of our networks' operators, and those of other layers that torch exports."""
    torch.manual_seed(0)
    nets = {
        "mlp": (models.mlp(12, classes=3), (12,)),
        "other": (
            nn.Sequential(
                nn.Conv2d(1, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Hardswish(),
                nn.ConvTranspose2d(4, 2, 2), nn.Upsample(scale_factor=2), nn.Flatten(), nn.LayerNorm(200),
                nn.Linear(200, 3), nn.GELU(), nn.LogSoftmax(1),
            ),
            (1, 8, 8),
        ),
    }  # fmt: skip
    for name, (net, shape) in nets.items():
        module, codebook = deployed(net, 8) if name == "mlp" else (net.eval(), Codebook())
        path = tmp_path / f"{name}.onnx"
        export_onnx(path, module, codebook, about=About(input_shape=shape, classes=3))
        confined, trusted = open_model(path), open_model(path, trust=True)
        assert confined.about == trusted.about
        x = np.random.default_rng(0).normal(size=(150, *shape)).astype(np.float32)
        np.testing.assert_allclose(confined.run(x), trusted.run(x), atol=1e-5)
        assert confined.timed(4, 0.01).seconds > 0
        before, most = confined.memory()
        assert 1 << 20 < before <= most
        a, b = look.read(path), look.read(path, trust=True)
        assert a.names == b.names
        for key, value in b.rest.items():
            np.testing.assert_array_equal(a.rest[key], value)
            assert a.rest[key].shape == value.shape
    assert {n.op_type for path in tmp_path.iterdir() for n in onnx.load(path).graph.node} <= OPERATORS


def test_names_that_are_not_text(box, tmp_path):
    content = model([node("Add", "x wwww")], [const("wwww", [1.0] * 4, np.float32)]).SerializeToString()
    box.path = tmp_path / "m.onnx"
    box.path.write_bytes(content.replace(b"wwww", b"w\xff\xfew"))
    for task in (box.open, box.read):
        with pytest.raises(FormatError, match=r"not UTF-8|not an ONNX file"):
            task()
    assert box.process.poll() is None


def test_a_file_that_is_not_there(tmp_path):
    for words in (("inspect", tmp_path / "m.onnx"), ("predict", tmp_path / "m.onnx", tmp_path / "x.csv")):
        assert call(*words, code=2) == f"{tmp_path / 'm.onnx'} cannot be read: no such file"


def test_outputs_that_are_no_classes(tmp_path):
    (tmp_path / "x.csv").write_text("1,2,3,4\n")
    made = model([node("Unsqueeze", "x a")], [const("a", [1])])
    assert "outputs of shape (1, 4)" in call("predict", written(tmp_path / "a.onnx", made), tmp_path / "x.csv", code=2)
    made = model([node("Relu", "x")])
    made.metadata_props[0].value = '{"input_shape":[4],"classes":2,"labels":["a","b"]}'
    assert "outputs of shape (4,)" in call("predict", written(tmp_path / "a.onnx", made), tmp_path / "x.csv", code=2)
    (tmp_path / "x.csv").write_text("1,2,3,4\n5,6,7,8\n")
    made = model([node("ReduceSum", "x a")], [const("a", [0])])
    said = call("predict", written(tmp_path / "a.onnx", made), tmp_path / "x.csv", code=2)
    assert "2 inputs, but outputs of shape (1, 4)" in said


# --- mutated graphs ---

ODD = [0, 1, -1, 2, 3, 7, 64, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**40, 2**62, -(2**31), -(2**63)]
ODD_TEXT = [ABOUT, "{}", "[" * 5_000, "\x1b[2J", '{"classes":1e9}']
ODD_TEXT += ['{"input_shape":[4,4]}', '{"input_shape":[100000000]}']
OTHERS = ["Loop", "If", "Scan", "Tile", "ConstantOfShape", "LSTM", "Einsum", "NonZero", "OneHot"]


def originals(folder):
    torch.manual_seed(0)
    found = [made.SerializeToString() for _, made in BOMBS if len(made.graph.node) < 100]
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 12), nn.Linear(12, 4)
    cnn = nn.Sequential(*layers)
    for k, (net, levels, shape) in enumerate([(models.mlp(4, (6, 5), 4), 4, (4,)), (cnn, 8, (1, 8, 8))]):
        module, codebook = deployed(net, levels)
        export_onnx(folder / f"{k}.onnx", module, codebook, about=About(input_shape=shape, classes=4))
        found += [(folder / f"{k}.onnx").read_bytes()] * 15  # as often as bombs
    return found


def mutated_bytes(content, rng):
    b = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        i = int(rng.integers(len(b) + 1))
        j = min(len(b), i + int(rng.integers(1, 32)))
        how = rng.integers(5)
        if how == 0 and i < len(b):
            b[i] ^= 1 << int(rng.integers(8))
        elif how == 1:
            b[i:j] = rng.bytes(j - i)
        elif how == 2:
            del b[i:j]
        elif how == 3:
            b[i:i] = b[i:j]
        else:
            b[i:i] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(b)


def mutated_graph(content, rng, operators):
    """A model that still is one, with a few things changed."""
    made = onnx.load_model_from_string(content)
    graph = made.graph
    for _ in range(rng.integers(1, 3)):
        how = rng.integers(10)
        target = graph.node[rng.integers(len(graph.node))] if len(graph.node) else graph.node.add()
        if how == 0:
            target.op_type = str(rng.choice(operators))
        elif how == 1 and target.input:
            names = [n for v in graph.node for n in (*v.input, *v.output)]
            target.input[rng.integers(len(target.input))] = str(rng.choice(names))
        elif how == 2 and target.attribute:
            attribute = target.attribute[rng.integers(len(target.attribute))]
            if attribute.ints:
                attribute.ints[rng.integers(len(attribute.ints))] = int(rng.choice(ODD))
            else:
                attribute.i = int(rng.choice(ODD))
        elif how == 3 and graph.initializer:
            tensor = graph.initializer[rng.integers(len(graph.initializer))]
            if tensor.data_type == I and tensor.raw_data:
                values = np.frombuffer(tensor.raw_data, "<i8").copy()
                values[rng.integers(len(values))] = rng.choice(ODD)
                tensor.raw_data = values.tobytes()
            elif tensor.dims:
                tensor.dims[rng.integers(len(tensor.dims))] = int(rng.choice(ODD))
        elif how == 4 and graph.initializer:
            graph.initializer[rng.integers(len(graph.initializer))].data_type = int(rng.integers(0, 24))
        elif how == 5 and graph.input[0].type.tensor_type.shape.dim:
            dims = graph.input[0].type.tensor_type.shape.dim
            dims[rng.integers(len(dims))].dim_value = int(rng.choice(ODD))
        elif how == 6:
            graph.node.add().CopyFrom(target)
        elif how == 7:
            made.opset_import[0].version = int(rng.integers(0, 30))
        elif how == 8 and graph.initializer:  # other numbers
            tensor = graph.initializer[rng.integers(len(graph.initializer))]
            tensor.raw_data = rng.bytes(len(tensor.raw_data))
        elif made.metadata_props:
            made.metadata_props[0].value = ODD_TEXT[rng.integers(len(ODD_TEXT))]
    return made.SerializeToString()


def fuzz(count, seed, folder):
    """Open, run and inspect `count` hostile files; what came of them."""
    rng = np.random.default_rng(seed)
    plain = originals(folder)
    operators = [*sorted(OPERATORS), *OTHERS]
    seen = {"files": count, "sound": 0, "children that died": 0, "longest s": 0.0, "most MiB": 0.0}
    reasons, path, box = set(), folder / "m.onnx", None
    for i in range(count):
        content = plain[rng.integers(len(plain))]
        path.write_bytes(mutated_bytes(content, rng) if i % 5 == 0 else mutated_graph(content, rng, operators))
        if box is None or i % 1000 == 0:
            box = Sandbox(path)
        began = time.perf_counter()
        try:
            about = about_of(box.open(threads=1), path)
            shape = about.input_shape if np.prod(about.input_shape) < 1_000 else (4,)
            box.run(np.ones((2, *shape), np.float32))
            before, most = box.memory()
            seen["most MiB"] = max(seen["most MiB"], (most - before) / 2**20)
            seen["sound"] += 1
        except FormatError as error:
            reasons.add(str(error)[len(str(path)) :])
        seen["longest s"] = max(seen["longest s"], time.perf_counter() - began)
        if box.process.poll() is None:
            try:
                box.read()
            except FormatError as error:
                reasons.add(str(error)[len(str(path)) :])
        if box.process.poll() is not None:
            seen["children that died"] += 1
            box = None
    assert all(len(reason) < 700 for reason in reasons)
    return seen | {"reasons": len({reason[:40] for reason in reasons})}


def test_hundreds_of_mutated_graphs(tmp_path):
    seen = fuzz(300, 1, tmp_path)
    assert seen["sound"] > 5
    assert seen["reasons"] > 30
    assert seen["most MiB"] < 1024


@pytest.mark.slow
def test_ten_thousand_mutated_graphs(tmp_path):
    seen = fuzz(10_000, 2, tmp_path)
    print(seen)
    assert seen["sound"] > 300
    assert seen["longest s"] < 10  # two tasks of at most 5 s
    assert seen["most MiB"] < 1024
