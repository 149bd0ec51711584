"""Levels scaled by channel, in every file: the same weights bit for bit, hostile scales refused, bytes counted."""

import hashlib
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qupel.core.codebook import Codebook, Plan, model_bytes, plan_bits, start_codebook
from qupel.core.layout import Layout
from qupel.deploy import About, FormatError, keep_packed, load, open_model, save
from qupel.deploy import inspect as look
from qupel.deploy import onnx as export
from qupel.deploy.budget import Planner, file_bytes, relative_errors
from qupel.deploy.coreml import export_coreml, target
from qupel.deploy.file import dumps, loads, pack_model
from qupel.deploy.graphs import OPERATORS
from qupel.deploy.onnx import export_onnx
from qupel.deploy.pack import bits_for, pack
from qupel.deploy.packed import Layer
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_commands import call
from test_deploy_coreml import lookups, needs_coremltools
from test_deploy_file import deployed, rebuilt, same

assert needs_coremltools  # a fixture


def scaled(module, levels):
    """The module with levels scaled by channel, whose scales differ much."""
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(torch.logspace(-2, 1, len(p)).view(-1, *[1] * (p.ndim - 1)))
    names = dict.fromkeys(Layout.of(module).default_layers(), levels) if isinstance(levels, int) else levels
    return deployed(module, Plan(names, channels=True))


def network():
    """Every kind of layer that has channels, a transposed convolution among them; takes (2, 6, 6)."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2), nn.Conv2d(3, 5, 3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(45, 7), nn.Linear(7, 3))


LEVELS = {"0.weight": 3, "3.weight": 2, "4.weight": 13, "6.weight": 4, "7.weight": 100}


# --- packed files ---

KINDS = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d]
LAYERS = st.tuples(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 256))


def made_of(drawn):
    found = [kind(*(i, o) if kind is nn.Linear else (i, o, k)) for kind, i, o, k, _ in drawn]
    return nn.Sequential(*found), {f"{n}.weight": m for n, (*_, m) in enumerate(drawn)}


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=1, max_size=3), st.integers(0, 2**31), st.booleans())
def test_any_shapes_come_back_bit_for_bit(drawn, seed, compress):
    torch.manual_seed(seed)
    module, codebook = scaled(*made_of(drawn))
    content = dumps(pack_model(module, codebook))
    if compress:
        from qupel.deploy import zstd

        content = zstd.compress(content)
    packed, other = loads(content), made_of(drawn)[0]
    assert same(module, packed.into(other))
    back = packed.codebook(Layout.of(other))
    for ours, theirs in ((back.centers, codebook.centers), (back.scales, codebook.scales)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [len(s) for s in back.scales] == [slot.shape[0] for slot in codebook.slots]
    assert packed.floor == model_bytes(Layout.of(module).size, codebook)


def test_a_reader_made_from_the_page():
    """Nothing of this package: docs/format.md alone."""
    module, codebook = scaled(network(), LEVELS)
    content = dumps(pack_model(module, codebook))
    size = struct.unpack("<Q", content[:8])[0]
    head, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    described = json.loads(head["__metadata__"]["qupel"])
    assert described["version"] == 2

    def array(name, dtype):
        begin, end = head[name]["data_offsets"]
        return np.frombuffer(data[begin:end], dtype)

    for name, shape in described["layers"].items():
        centers, scales = array(f"{name}_codebook", "<f4"), array(f"{name}_scales", "<f4")
        assert len(scales) == shape[0]
        b, n = max(1, math.ceil(math.log2(len(centers)))), math.prod(shape)
        string = np.unpackbits(array(f"{name}_packed", "u1"), bitorder="little")
        codes = [sum(int(string[k * b + j]) << j for j in range(b)) for k in range(n)]
        weights = [np.float32(centers[code] * scales[k // (n // shape[0])]) for k, code in enumerate(codes)]
        np.testing.assert_array_equal(np.reshape(weights, shape), module.state_dict()[name])


def test_levels_that_lie_as_close_as_numbers_can():
    """Codes are found among each channel's own levels, whatever rounding does to w / s."""
    rng = np.random.default_rng(0)
    one = np.float32(0.1)
    centers = torch.from_numpy(np.array([np.nextafter(one, np.float32(0)), one, np.nextafter(one, np.float32(1))]))
    scales = torch.from_numpy(rng.uniform(0.1, 10, 500).astype(np.float32))
    module = nn.Linear(40, 500)
    codebook = Codebook((Layout.of(module)["weight"],), (centers,), (scales,))
    module.weight.data = scales[:, None] * centers[torch.from_numpy(rng.integers(0, 3, (500, 40)))]
    assert same(module, loads(dumps(pack_model(module, codebook))).into(nn.Linear(40, 500)))


def fixed():
    """A model that is the same everywhere."""
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    centers = torch.tensor([-0.75, 0.125, 0.5]), torch.tensor([-1.0, 2.0])
    for i, (layer, c) in enumerate(zip((module[0], module[2]), centers, strict=True)):
        layer.weight.data = c[torch.arange(layer.weight.numel()) * (i + 2) % 7 % len(c)].view_as(layer.weight)
        layer.bias.data = torch.arange(len(layer.bias)) / 8
    layout = Layout.of(module)
    return module, Codebook((layout["0.weight"], layout["2.weight"]), centers)


@pytest.mark.parametrize(
    ("rest", "digest"),
    [
        ("fp32", "bfd9fbc79d388938b5f578866e170c0aa7539e477da2d1e6d17845a17ec6ba98"),
        ("fp16", "e115244cc9d738a0aa44b9df6102542c77fdee0e5ed20927222565fe11d3e8ab"),
    ],
)
def test_a_file_without_scales_is_that_of_version_0_1(rest, digest):
    about = About("", (4,), 3, ("a", "b", "c"), client="Ann", extra={"seed": 1})
    content = dumps(pack_model(*fixed(), about, rest))
    assert hashlib.sha256(content).hexdigest() == digest
    assert not loads(content).channels


def test_scales_that_are_refused_when_writing(tmp_path):
    module, codebook = scaled(nn.Sequential(nn.Linear(3, 4)), {"0.weight": 2})

    def told(scales, centers=codebook.centers):
        with pytest.raises(UserError) as error:
            save(tmp_path / "f", module, Codebook(codebook.slots, centers, (torch.as_tensor(scales),)))
        assert str(error.value).startswith("0.weight: ")
        assert str(error.value).isprintable()
        return str(error.value)

    for bad in (0.0, -1.0, math.nan, math.inf):
        assert "finite and greater than 0" in told([1.0, 1.0, 1.0, bad])
    for bad in ([1.0] * 3, [1.0] * 5, 1.0, [[1.0]] * 4):
        assert "one for each first index of its shape [4, 3]" in told(bad)
    assert "float32" in told(np.ones(4))
    assert "beyond float32" in told([1e30] * 4, (torch.tensor([-1e30, 1.0]),))
    assert "12 of 12 weights are not on its centers" in told(2 * codebook.scales[0])
    assert not list(tmp_path.iterdir())


def breakages():
    torch.manual_seed(0)
    module, codebook = scaled(models.mlp(4, (5, 3), 2), {"1.weight": 3, "3.weight": 2})
    content = dumps(pack_model(module, codebook, About("mlp", (4,), 2)))
    size = struct.unpack("<Q", content[:8])[0]
    head, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    described = json.loads(head["__metadata__"]["qupel"])
    place = head["1.weight_scales"]["data_offsets"][0]

    def first(value):
        return rebuilt(head, data[:place] + struct.pack("<f", value) + data[place + 4 :])

    def entry(name, **change):
        return rebuilt(head | {name: head[name] | change}, data)

    def told(**change):
        return rebuilt(head, data, described | change)

    assert loads(rebuilt(head, data)).channels
    for bad in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf):
        yield "1.weight: its scales must be finite and greater than 0", first(bad)
    yield "beyond float32", first(3.4e38)
    yield "belongs to no layer: 1.weight_scales", told(version=1)
    yield "no tensor 1.weight_scales of type F32", rebuilt(renamed(head, "1.weight_scales", "x"), data)
    yield "no tensor 1.weight_scales of type F32", entry("1.weight_scales", shape=[5, 1])
    yield "no tensor 1.weight_scales of type F32", entry("1.weight_scales", dtype="I32")
    # Scales of 3 and 5 channels change places; 20 weights as a matrix of 4 rows; a layer without dimensions.
    swapped = renamed(
        renamed(renamed(head, "1.weight_scales", "x"), "3.weight_scales", "1.weight_scales"), "x", "3.weight_scales"
    )
    yield r"1.weight: scales of shape \[3\]; needed is one", rebuilt(swapped, data)
    yield "needed is one", told(layers=described["layers"] | {"1.weight": [4, 5]})
    yield "need", told(layers=described["layers"] | {"1.weight": []})


def renamed(table, old, new):
    return {new if name == old else name: value for name, value in table.items()}


BROKEN = list(breakages())


@pytest.mark.parametrize("case", range(len(BROKEN)), ids=[f"{i}-{message}" for i, (message, _) in enumerate(BROKEN)])
def test_hostile_scales_are_refused(case):
    message, content = BROKEN[case]
    with pytest.raises(FormatError, match=message) as error:
        loads(content)
    assert str(error.value).isprintable()


def test_one_weight_without_dimensions():
    """A shape of no dimension has one weight and no channel."""
    module, codebook = scaled(nn.Linear(1, 1, bias=False), {"weight": 1})
    content = dumps(pack_model(module, codebook))
    size = struct.unpack("<Q", content[:8])[0]
    head = json.loads(content[8 : 8 + size])
    described = json.loads(head["__metadata__"]["qupel"]) | {"layers": {"weight": []}}
    with pytest.raises(FormatError, match=r"needed is one for each first index of its shape \[\]"):
        loads(rebuilt(head, content[8 + size :], described))


# --- running them ---


def test_kept_packed_gives_the_same_outputs():
    module, codebook = scaled(network(), LEVELS)
    running, x = keep_packed(pack_model(module, codebook), network()), torch.randn(3, 2, 6, 6)
    with torch.no_grad():
        assert torch.equal(running(x), module(x))
        assert torch.equal(running(x), module(x))


@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 13, 32, 256])
def test_the_graph_decodes_exactly(m, keep_packed):
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(m)
    graph, layers = export._Graph(), []
    for i, shape in enumerate([(5, 7), (4, 2, 3, 3), (1,), (8, 8), (3,)]):
        codes = rng.integers(0, m, np.prod(shape)).astype(np.uint8)
        centers, scales = np.sort(rng.normal(size=m)).astype(np.float32), rng.uniform(0.01, 9, shape[0])
        layers.append(Layer(f"layer{i}", shape, centers, pack(codes, bits_for(m)), scales.astype(np.float32)))
        graph.weight(layers[-1], i)
    outputs = [onnx.helper.make_tensor_value_info(v.name, onnx.TensorProto.FLOAT, v.shape) for v in layers]
    made = onnx.helper.make_graph(graph.nodes, "g", [], outputs, graph.initializers)
    opset = [onnx.helper.make_opsetid("", export.OPSET)]
    model = onnx.helper.make_model(made, opset_imports=opset, ir_version=export.IR)
    onnx.checker.check_model(model, full_check=True)
    decoded = export.session(model.SerializeToString(), keep_packed=keep_packed).run(None, {})
    for layer, value in zip(layers, decoded, strict=True):
        np.testing.assert_array_equal(value, layer.weights())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model as packed file and as ONNX, and itself."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("channels")
    module, codebook = scaled(network(), LEVELS)
    about = About("", (2, 6, 6), 3)
    save(folder / "m.safetensors", module, codebook, about=about)
    export_onnx(folder / "m.onnx", module, codebook, about=about)
    return folder, module


@pytest.mark.parametrize("stay", [False, True])
def test_onnx_gives_the_outputs_of_torch(files, stay):
    """In the confined process, which allows the operators of `graphs` only."""
    import onnx

    folder, module = files
    assert {node.op_type for node in onnx.load(folder / "m.onnx").graph.node} <= OPERATORS
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = module(x).numpy()
    got = open_model(folder / "m.onnx", keep_packed=stay, threads=1).run(x.numpy())
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("trust", [False, True])
def test_both_files_are_inspected_alike(files, trust):
    folder, _ = files
    packed, graph = look.read(folder / "m.safetensors"), look.read(folder / "m.onnx", trust)
    for one, two in zip(packed.layers, graph.layers, strict=True):
        assert (one.name, one.shape) == (two.name, two.shape)
        np.testing.assert_array_equal(one.weights(), two.weights())
        np.testing.assert_array_equal(one.scales, two.scales)
    assert packed.rest.keys() >= {"0.bias", "7.bias"}
    assert not any("scales" in name for name in graph.rest)
    for kind in ("safetensors", "onnx"):
        said = call("inspect", folder / f"m.{kind}")
        smallest, largest = (f"{v:.3g}" for v in (packed.layers[0].scales.min(), packed.layers[0].scales.max()))
        assert f"times {smallest} to {largest}, scaled by channel" in " ".join(said.split())
        assert "codes, centers, scales and rest" in said


def test_scales_of_a_graph_are_checked(files, tmp_path):
    import onnx

    folder, _ = files
    for values, message in (
        (np.zeros((4, 1, 1, 1), np.float32), "greater than 0"),
        (np.ones((1, 4, 1, 1), np.float32), "not packed as this package packs"),
        (np.ones((4, 1, 1, 1), np.float64), "not packed as this package packs"),
    ):
        model = onnx.load(folder / "m.onnx")
        (held,) = (t for t in model.graph.initializer if t.name == "0.weight_scales")
        held.CopyFrom(onnx.numpy_helper.from_array(values, "0.weight_scales"))
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(FormatError, match=message):
            look.read(tmp_path / "m.onnx")


@pytest.mark.parametrize("rest", ["fp32", "fp16"])
def test_coreml_has_a_table_for_each_channel(tmp_path, needs_coremltools, rest):
    module, codebook = scaled(network(), LEVELS)
    assert target(pack_model(module, codebook)) == "iOS18"
    export_coreml(tmp_path / "m.mlpackage", module, codebook, about=About("", (2, 6, 6), 3), rest=rest)
    tables, spec = lookups(tmp_path / "m.mlpackage")
    for table, centers, scales in zip(tables, codebook.centers, codebook.scales, strict=True):
        wanted = (scales[:, None] * centers).numpy().astype(table.dtype)
        np.testing.assert_array_equal(table.reshape(len(scales), -1)[:, : len(centers)], wanted)
    assert spec.specificationVersion == 9  # iOS 18


# --- budgets ---


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 256), min_size=4, max_size=4), st.sampled_from(["fp32", "fp16"]), st.booleans())
def test_the_prediction_of_bytes_is_exact(counts, rest, channels):
    torch.manual_seed(0)
    module = nn.Sequential(models.mlp(9, (70, 7, 3), 3), nn.BatchNorm1d(3))
    plan = Plan({name: m for name, m in zip(Layout.of(module).weights, counts, strict=True) if m}, channels=channels)
    module, codebook = deployed(module, plan)
    about = About("", (9,), 3, client="x")
    assert file_bytes(module, plan, about, rest) == len(dumps(pack_model(module, codebook, about, rest)))


def test_plans_count_scales():
    module, about = models.build("resnet20", (3, 32, 32), 10, seed=0), About("resnet20", (3, 32, 32), 10)
    plain, planner = Planner(module), Planner(module, channels=True)
    layout = Layout.of(module)
    scales = sum(layout[name].shape[0] for name in planner.layers)
    assert planner.bytes(2) >= plain.bytes(2) + 4 * scales
    assert planner.bytes(32) == plain.bytes(32)
    for factor in (1, 1.5, 3, 40):
        plan = planner.fit(int(planner.bytes(1) * factor))
        assert plan.levels().channels == bool(plan.levels())
        x = layout.flatten(module)
        other = models.build("resnet20", (3, 32, 32), 10, seed=0)
        codebook = start_codebook(layout, x, plan.levels(), "quantile")
        layout.load(other, codebook.hard(x))
        assert bool(codebook.scales) == bool(plan.levels())
        assert len(dumps(pack_model(other, codebook, about))) <= plan.bytes <= plan.budget
        assert plan.levels() == plan_bits(layout, plan.bits, channels=True)


def test_full_precision_does_without_scales():
    """From 8 bits to 32: 3 n bytes more for the weights, 4 for each center and each scale less."""
    planner = Planner(models.mlp(16, (20, 40, 30), 2), channels=True)
    for name in planner.layers:
        slot = planner.layout[name]
        cost = 3 * slot.size - 4 * (256 + slot.shape[0])
        assert planner._gain(name, 8) == pytest.approx(planner.errors[name][8] / max(1, cost))
    assert cost > 1


def test_sensitivity_is_that_of_scaled_levels():
    """Channels of very different sizes: one set of levels for all is coarse, scaled levels are not."""
    torch.manual_seed(0)
    weight = torch.randn(30, 400) * torch.logspace(-2, 0, 30)[:, None]
    plain, by_channel = relative_errors(weight), relative_errors(weight, channels=True)
    assert by_channel[2] < 0.7 * plain[2]
    assert by_channel[1] == pytest.approx(0.363, abs=0.03)  # 1 - 2/pi, as of one Gaussian


def test_the_plan_command_counts_scales():
    plain = call("plan", "cnn5", "--budget", "300KiB")
    by_channel = call("plan", "cnn5", "--budget", "300KiB", "--levels", "channel")
    sizes = [float(said.split("KiB")[1].split("│")[1]) for said in (plain, by_channel)]
    assert sizes[1] - sizes[0] >= 4 * (64 + 384 + 192) / 1024 - 0.1
    assert "Invalid value" in call("plan", "cnn5", "--budget", "300KiB", "--levels", "row", code=2)


def test_export_packs_scales_again(files, tmp_path):
    folder, _ = files
    call("export", folder / "m.safetensors", "--out", tmp_path)
    assert (tmp_path / "m.safetensors").read_bytes() == (folder / "m.safetensors").read_bytes()
    assert load(tmp_path / "m.safetensors").channels
