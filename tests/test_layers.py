"""Every kind of layer: quantized by default, trained through its flat vector, saved, reloaded, run packed and as ONNX,
each time with the same numbers. What stays full precision is told."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qupel
from qupel.core.codebook import plan_bits, start_codebook
from qupel.core.layout import KINDS, Coverage, Layout, choose_layers
from qupel.deploy import About, export_onnx, keep_packed, load, open_model, save
from qupel.deploy.about import Input
from qupel.deploy.inspect import read
from qupel.tasks import zoo
from qupel.tasks.task import ModuleTask
from qupel.util.errors import UserError

WORDS, LENGTH = 11, 6


class Recurrent(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.body = kind(5, 6, 2, batch_first=True, **more)
        self.head = nn.Linear(12 if more.get("bidirectional") else 6, WORDS)

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens.long()))[0][:, -1])


class Cells(nn.Module):
    """A recurrent layer written as a loop."""

    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, 5), nn.GRUCell(5, 6), nn.Linear(6, WORDS)

    def forward(self, tokens):
        h = torch.zeros(tokens.shape[0], 6)
        for k in range(tokens.shape[1]):
            h = self.cell(self.words(tokens[:, k].long()), h)
        return self.head(h)


class Attention(nn.Module):
    """Keys and values of another size: the three projections lie apart."""

    def __init__(self):
        super().__init__()
        self.words, self.keys = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 4)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens):
        keys = self.keys(tokens.long())
        return self.head(self.attention(self.words(tokens.long()), keys, keys, need_weights=False)[0].mean(1))


class Tied(nn.Module):
    """The embedding is the head, and two layers within share their weight."""

    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight, self.b.weight = self.words.weight, self.a.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.b(torch.relu(self.a(self.words(tokens.long()).mean(1))))))


class Transposed(nn.Module):
    def __init__(self, n):
        super().__init__()
        conv, back = getattr(nn, f"Conv{n}d"), getattr(nn, f"ConvTranspose{n}d")
        self.first, self.back, self.last = conv(2, 4, 3), back(4, 5, 3, stride=2), conv(5, 3, 3)

    def forward(self, x):
        return self.last(torch.relu(self.back(self.first(x)))).flatten(2).mean(2)


TOKENS = ((LENGTH,), "int64")
RECURRENT = [f"body.weight_{w}_l{k}" for k in (0, 1) for w in ("ih", "hh")]
BLOCK = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
NETS = {  # name -> network, what it takes, what is quantized
    "lstm": (lambda: Recurrent(nn.LSTM), TOKENS, RECURRENT),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS, RECURRENT),
    "cells": (Cells, TOKENS, ["cell.weight_ih", "cell.weight_hh"]),
    "attention": (
        Attention,
        TOKENS,
        ["keys.weight", *(f"attention.{k}_proj_weight" for k in "qkv"), "attention.out_proj.weight"],
    ),
    "transformer": (
        lambda: zoo.TextTransformer(WORDS, LENGTH, width=8, heads=2),
        TOKENS,
        ["places.weight", *(f"encoder.layers.{k}.{w}" for k in (0, 1) for w in BLOCK)],
    ),
    "tied": (Tied, TOKENS, ["a.weight"]),
    "transposed1": (lambda: Transposed(1), ((2, 9), "float32"), ["back.weight"]),
    "transposed2": (lambda: Transposed(2), ((2, 6, 6), "float32"), ["back.weight"]),
}
SLOW = {  # more of the same
    "rnn": (lambda: Recurrent(nn.RNN), TOKENS, RECURRENT),
    "both ways": (
        lambda: Recurrent(nn.LSTM, bidirectional=True),
        TOKENS,
        [f"body.weight_{w}_l{k}{r}" for k in (0, 1) for r in ("", "_reverse") for w in ("ih", "hh")],
    ),
    "transposed3": (lambda: Transposed(3), ((2, 5, 5, 5), "float32"), ["back.weight"]),
}
LONG = {*SLOW, "gru", "cells", "transposed1"}
EVERY = [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in [*NETS, *SLOW]]


def made(name):
    torch.manual_seed(0)
    make, (shape, dtype), quantized = (NETS | SLOW)[name]
    return make(), About(input_shape=shape, dtype=dtype), quantized


def deployed(net, channels=False):
    """The network on levels of 3 bits, and its codebook."""
    layout = Layout.of(net)
    x = layout.flatten(net)
    codebook = start_codebook(layout, x, plan_bits(layout, 3, channels=channels), "kmeans")
    layout.load(net, codebook.hard(x))
    return net.eval(), codebook


def inputs_of(about, rows=5, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, *about.input_shape)
    return rng.integers(0, WORDS, shape) if about.dtype == "int64" else rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", [*NETS, *SLOW])
def test_what_is_quantized_by_default(name):
    net, _, quantized = made(name)
    layout = Layout.of(net)
    assert list(layout.default_layers()) == quantized
    left = layout.left(quantized)
    assert {*left, *quantized} == {slot.name for slot in layout.slots}
    matrices = {n: why for n, why in left.items() if len(layout[n].shape) > 1}
    ends = ["the first and the last layer"] if name == "tied" else ["the first layer", "the last layer"]
    assert sorted(matrices.values()) == ends


@pytest.mark.parametrize("name", [*NETS, *SLOW])
def test_gradients_through_the_flat_vector_are_autograds(name):
    net, about, _ = made(name)
    layout = Layout.of(net)
    x = layout.flatten(net) + 0.01
    batch = (torch.from_numpy(inputs_of(about)), torch.arange(5) % 3)
    task = ModuleTask(net, F.cross_entropy)
    task.gradient(x + 1, batch)  # another model before: nothing of it is left
    found = task.gradient(x, batch)
    plain = copy.deepcopy(net)
    layout.load(plain, x)
    loss = F.cross_entropy(plain(batch[0]), batch[1])
    loss.backward()
    expected = torch.cat([slot.flat(plain.get_parameter(slot.name).grad) for slot in layout.slots])
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(found.gradient, expected, rtol=1e-5, atol=1e-7)
    assert found.loss == pytest.approx(loss.item())


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("name", [*NETS, *SLOW])
def test_packed_files_reload_and_run_packed_bit_for_bit(name, channels, tmp_path):
    net, about, quantized = made(name)
    net, codebook = deployed(net, channels)
    save(tmp_path / "m.safetensors", net, codebook, about=about)
    packed = load(tmp_path / "m.safetensors")
    assert list(packed.names) == quantized
    other = made(name)[0]
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(7)
    packed.into(other)
    for key, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    stays = keep_packed(packed, made(name)[0])
    assert not {*quantized} & {key for key, _ in stays.named_parameters()}
    x = torch.from_numpy(inputs_of(about))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            wanted = net(x)
            assert torch.equal(other.eval()(x), wanted)
            assert torch.equal(stays(x), wanted)


@pytest.mark.parametrize("name", EVERY)
def test_onnx_has_the_codes_and_gives_torchs_outputs(name, tmp_path):
    """Through the confined process, as a stranger's file: its graph is allowed, its sizes are known."""
    pytest.importorskip("onnxruntime")
    net, about, quantized = made(name)
    net, codebook = deployed(net, channels=name == "lstm")
    export_onnx(tmp_path / "m.onnx", net, codebook, about=about)
    held = read(tmp_path / "m.onnx")
    assert list(held.names) == quantized
    for layer in held.layers:
        np.testing.assert_array_equal(layer.weights(), net.get_parameter(layer.name).detach().numpy())
    model = open_model(tmp_path / "m.onnx")
    x = inputs_of(about, rows=7)
    with torch.no_grad():
        wanted = net(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(model.run(x), wanted, rtol=1e-4, atol=1e-5)


class Pair(nn.Module):
    """Tokens and numbers."""

    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 4), nn.Linear(7, 6), nn.Linear(6, 2)

    def forward(self, tokens, numbers):
        return self.head(torch.relu(self.body(torch.cat([self.words(tokens).mean(1), numbers], 1))))


@pytest.mark.parametrize("names", [("tokens", "numbers"), pytest.param(("", ""), marks=pytest.mark.slow)])
def test_several_inputs_are_several_inputs_of_the_graph(names, tmp_path):
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    net, codebook = deployed(Pair())
    about = About(inputs=(Input(names[0], (LENGTH,), "int64"), Input(names[1], (3,))))
    export_onnx(tmp_path / "m.onnx", net, codebook, about=about)
    given = {v.name: v.type.tensor_type.elem_type for v in onnx.load(tmp_path / "m.onnx").graph.input}
    assert given == dict(zip(names if names[0] else ("input0", "input1"), (7, 1), strict=True))  # INT64, FLOAT
    save(tmp_path / "m.safetensors", net, codebook, about=about)
    assert load(tmp_path / "m.safetensors").about == about
    tokens, numbers = np.arange(LENGTH)[None].repeat(2, 0), np.ones((2, 3), np.float32)
    with torch.no_grad():
        wanted = net(torch.from_numpy(tokens), torch.from_numpy(numbers)).numpy()
    model = open_model(tmp_path / "m.onnx")
    np.testing.assert_allclose(model.run(tokens, numbers), wanted, atol=1e-5)
    with pytest.raises(UserError, match="takes 2 inputs"):
        model.run(tokens)


# --- naming layers, and what cannot be quantized ---


def test_the_name_of_an_lstm_means_all_its_weights():
    layout = Layout.of(made("lstm")[0])
    assert choose_layers(layout, ["body", "head"]) == (*RECURRENT, "head.weight")
    plan = plan_bits(layout, {"body": 2, "words": 4})
    assert plan == {**dict.fromkeys(RECURRENT, 4), "words.weight": 16}


def test_a_matrix_of_no_known_layer_is_quantized_where_it_is_named():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net.table = nn.Parameter(torch.randn(4, 3))
    layout = Layout.of(net)
    assert layout.default_layers() == ("1.weight",)
    assert layout.left(["1.weight"])["table"] == "of no known kind of layer, not named"
    assert choose_layers(layout, ["table"]) == ("table",)


def test_an_embedding_with_max_norm_is_barred():
    net = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3, max_norm=1.0), nn.Linear(3, 3))
    assert Layout.of(net).default_layers() == ()
    with pytest.raises(UserError, match="'1' cannot be quantized: its max_norm changes it"):
        choose_layers(Layout.of(net), ["1"])


def test_sparse_gradients_of_an_embedding():
    net = nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Flatten(), nn.Linear(4 * LENGTH, 3))
    batch = (torch.arange(2 * LENGTH).reshape(2, LENGTH) % WORDS, torch.tensor([0, 1]))
    x = Layout.of(net).flatten(net)
    sparse = ModuleTask(net, F.cross_entropy).gradient(x, batch).gradient
    net[0].sparse = False
    assert torch.equal(sparse, ModuleTask(net, F.cross_entropy).gradient(x, batch).gradient)


def test_coverage_in_a_line():
    layout = Layout.of(made("gru")[0])
    told = str(Coverage.of(layout, layout.default_layers()))
    assert told == (
        "414 of 618 numbers (67.0%); full precision: words (the first layer), head (the last layer), "
        "5 biases and other vectors"
    )


def test_the_docs_table_is_what_the_code_does():
    page = (Path(__file__).parents[1] / "docs" / "layers.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.partition("Classes derived")[0], re.M)[1:]
    assert rows == [(", ".join(f"`{name}`" for name in kind.names), kind.about) for kind in KINDS]


# --- federations of them ---


def text_clients(count=2, rows=12):
    clients = []
    for k in range(count):
        rng = np.random.default_rng(k)
        tokens = rng.integers(0, WORDS, (rows, LENGTH))
        clients.append(qupel.Client(tokens, tokens[:, -1], tokens, tokens[:, -1]))
    return clients


@pytest.mark.parametrize("name", ["lstm", "transformer", "tied"])
def test_a_federation_ends_on_its_levels(name, tmp_path):
    net, _, quantized = made(name)
    found = qupel.fit(net, text_clients(), method="local", rounds=3, local_steps=2, batch=4)
    assert [list(q) for q in found.quantized] == [quantized] * 2
    assert all("words.weight" in left or "embedding.weight" in left for left in found.left)
    for model, codebook, path in zip(found.models, found.codebooks, found.save(tmp_path), strict=True):
        layout = Layout.of(model)
        x = layout.flatten(model)
        assert torch.equal(codebook.hard(x), x)
        assert torch.equal(layout.flatten(qupel.load(path, made(name)[0])), x)


def test_a_network_that_cannot_be_stacked_says_so_and_runs_one_by_one():
    net = made("lstm")[0]
    with pytest.raises(UserError, match=r'vectorize = "on": the model or the loss does not work in a stack: .*lstm'):
        qupel.fit(net, text_clients(), method="local", rounds=2, vectorize="on")
    found = qupel.fit(net, text_clients(32, 4), method="local", rounds=2, local_steps=1, batch=4)
    assert not found.engine.stacked
    assert "does not work in a stack" in found.engine.why


@pytest.mark.parametrize(("name", "shape"), [("lstm", (9,)), ("transformer", (9,)), ("cnn1d", (3, 17))])
def test_networks_of_the_zoo_are_known_by_name_and_built_from_their_file(name, shape, tmp_path):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(8, *shape)) if name == "cnn1d" else rng.integers(0, 5, (8, *shape))
    net = zoo.build(name, shape, 5, seed=0)
    found = qupel.fit(net, method="local", clients=[(inputs, np.arange(8) % 5)], rounds=2, local_steps=1, batch=4)
    (path,) = found.save(tmp_path)
    assert load(path).about.model == name
    again = qupel.load(path)
    x = torch.from_numpy(inputs).float() if name == "cnn1d" else torch.from_numpy(inputs)
    with torch.inference_mode():
        assert torch.equal(again(x), found.models[0](x))


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [("lstm", (3, 8), r"takes tokens \(length,\)"), ("cnn1d", (8, 3), "signals"), ("transformer", (1, 8, 8), "tokens")],
)
def test_other_shapes_are_refused(name, shape, says):
    with pytest.raises(UserError, match=says):
        zoo.build(name, shape, 5, 0)
