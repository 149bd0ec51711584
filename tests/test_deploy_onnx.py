"""ONNX files: packed weights decoded by the graph, the same outputs as torch."""

import numpy as np
import pytest
import torch
from torch import nn

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.deploy import About, FormatError
from qupel.deploy import onnx as export
from qupel.deploy.onnx import export_onnx, read_about, session
from qupel.deploy.pack import bits_for, pack
from qupel.deploy.packed import Layer, pack_model
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_file import deployed, resnet

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 13, 16, 32, 100, 256])
def test_the_graph_decodes_exactly(m, keep_packed):
    """Sizes that leave padding in the last byte and sizes that do not."""
    rng = np.random.default_rng(m)
    graph, layers = export._Graph(), []
    for i, shape in enumerate([(5, 7), (4, 2, 3, 3), (1,), (8, 8)]):
        codes = rng.integers(0, m, np.prod(shape)).astype(np.uint8)
        centers = np.sort(rng.normal(size=m)).astype(np.float32)
        layers.append(Layer(f"layer{i}", shape, centers, pack(codes, bits_for(m))))
        graph.weight(layers[-1], i)
    outputs = [onnx.helper.make_tensor_value_info(v.name, onnx.TensorProto.FLOAT, v.shape) for v in layers]
    made = onnx.helper.make_graph(graph.nodes, "g", [], outputs, graph.initializers)
    opset = [onnx.helper.make_opsetid("", export.OPSET)]
    model = onnx.helper.make_model(made, opset_imports=opset, ir_version=export.IR)
    onnx.checker.check_model(model, full_check=True)
    for layer, value in zip(
        layers, session(model.SerializeToString(), keep_packed=keep_packed).run(None, {}), strict=True
    ):
        np.testing.assert_array_equal(value, layer.weights())
    if not keep_packed:
        from onnx.reference import ReferenceEvaluator

        for layer, value in zip(layers, ReferenceEvaluator(model).run(None, {}), strict=True):
            np.testing.assert_array_equal(value, layer.weights())


def outputs(module, running, shape, batch):
    x = torch.randn(batch, *shape)
    with torch.no_grad():
        return module(x).numpy(), running.run(None, {"input": x.numpy()})[0]


def test_mixed_bits_any_batch_and_about(tmp_path):
    torch.manual_seed(0)
    net = models.digits_cnn()
    module, codebook = deployed(net, dict(zip(Layout.of(net).weights, (3, 8, 4, 40), strict=False)))
    about = About("digits_cnn", (1, 8, 8), 10, tuple("0123456789"), client="client 3", extra={"accuracy": 0.5})
    path = tmp_path / "m.onnx"
    size = export_onnx(path, module, codebook, about=about)
    assert size == path.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    for keep_packed in (False, True):
        running = session(path, keep_packed=keep_packed, threads=1)
        assert read_about(running) == about
        for batch in (1, 2, 17):
            wanted, got = outputs(module, running, (1, 8, 8), batch)
            np.testing.assert_allclose(got, wanted, atol=1e-6)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for layer in pack_model(module, codebook).layers:
        np.testing.assert_array_equal(held[f"{layer.name}_codebook"][: len(layer.centers)], layer.centers)
        assert held[f"{layer.name}_packed"].dtype == np.uint8
        assert layer.name not in held


def test_batchnorm_keeps_its_codebook(tmp_path):
    module, codebook = resnet(2)
    labels = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    extra = {"method": "qupel", "seed": 0, "accuracy": 0.6123}
    about = About("resnet20", (3, 32, 32), 10, labels, mean, std, "client-007", extra)
    size = export_onnx(tmp_path / "m.onnx", module, codebook, about=about)
    assert size <= 1.15 * pack_model(module, codebook).floor
    wanted, got = outputs(module, session(tmp_path / "m.onnx", threads=1), (3, 32, 32), 4)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_size_against_the_floor(bits, tmp_path):
    torch.manual_seed(0)
    module, codebook = deployed(models.cnn5(), 2**bits)
    size = export_onnx(tmp_path / "m.onnx", module, codebook, about=About("cnn5", (3, 32, 32), 10))
    assert size <= 1.05 * pack_model(module, codebook).floor


def test_rest_as_fp16_full_precision_and_batchnorm_of_vectors(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 3))
    net[1].running_mean.uniform_(-1, 1)
    module, codebook = deployed(net, {"0.weight": 2})
    sizes = [
        export_onnx(tmp_path / r, module, codebook, about=About(input_shape=(64,)), rest=r) for r in ("fp16", "fp32")
    ]
    assert sizes[1] - sizes[0] > 1_500
    full, half = outputs(module, session(tmp_path / "fp16", threads=1), (64,), 2)
    np.testing.assert_allclose(half, full, atol=1e-2)
    full, same = outputs(module, session(tmp_path / "fp32", threads=1), (64,), 2)
    np.testing.assert_allclose(same, full, atol=1e-6)
    export_onnx(tmp_path / "full", module, Codebook(), about=About(input_shape=(64,)))
    assert read_about(session(tmp_path / "full")).model == ""


def test_a_mismatch_leaves_no_file_and_names_the_layer(tmp_path, monkeypatch):
    module, codebook = deployed(models.mlp(8, (6, 5), 3), 4)
    about = About(input_shape=(8,))
    real = export._Graph.weight

    def wrong(self, layer, i):
        real(self, Layer(layer.name, layer.shape, layer.centers, layer.packed[::-1].copy()), i)

    monkeypatch.setattr(export._Graph, "weight", wrong)
    with pytest.raises(UserError, match=r"3\.weight: ONNX Runtime decodes other weights"):
        export_onnx(tmp_path / "m.onnx", module, codebook, about=about)
    monkeypatch.undo()
    monkeypatch.setattr(export, "_TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"outputs differ from torch's"):
        export_onnx(tmp_path / "m.onnx", module, codebook, about=about)
    monkeypatch.undo()
    monkeypatch.setattr(export, "_without_batchnorm", lambda module: nn.Sequential(module, nn.Identity()))
    with pytest.raises(UserError, match=r"3\.weight: the exporter left no weight of this name"):
        export_onnx(tmp_path / "m.onnx", module, codebook, about=about)
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="input_shape"):
        export_onnx(tmp_path / "m.onnx", models.mlp(8), Codebook(), about=About())
    with pytest.raises(UserError, match="no such file"):
        session(tmp_path / "m.onnx")
    (tmp_path / "m.onnx").write_bytes(b"not a model")
    with pytest.raises(FormatError, match="ONNX Runtime cannot read it"):
        session(tmp_path / "m.onnx")

    class Stubborn(nn.Linear):
        def forward(self, x):
            return super().forward(x if float(x.sum()) > 0 else -x)

    with pytest.raises(UserError, match="torch cannot export"):
        export_onnx(tmp_path / "m.onnx", Stubborn(2, 2), Codebook(), about=About(input_shape=(2,)))
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'qupel\[onnx\]'"):
        export_onnx(tmp_path / "m.onnx", models.mlp(8), Codebook(), about=About(input_shape=(8,)))
