"""Core ML packages: what is in the file is the model, bit for bit. (Running them takes a Mac.)"""

import sys

import numpy as np
import pytest
import torch

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.deploy import About
from qupel.deploy import coreml as export
from qupel.deploy.coreml import export_coreml, target
from qupel.deploy.packed import pack_model
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_file import deployed, resnet


@pytest.fixture
def needs_coremltools():
    try:
        export._library()
    except UserError:
        pytest.skip("coremltools is not installed")


def lookups(path):
    """The look-up operations of a package: (indices, table, needed iOS version)."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load

    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    main = load(spec, spec.specificationVersion, model.weights_dir).functions["main"]
    return [op.lut.val for op in main.find_ops(op_type="constexpr_lut_to_dense")], spec


def test_mixed_bits(tmp_path, needs_coremltools):
    torch.manual_seed(0)
    net = models.digits_cnn()
    module, codebook = deployed(net, dict(zip(Layout.of(net).weights, (3, 8, 4, 20), strict=False)))
    about = About("digits_cnn", (1, 8, 8), 10)
    path = tmp_path / "m.mlpackage"
    size = export_coreml(path, module, codebook, about=about)
    assert size == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert size < 0.6 * 4 * sum(p.numel() for p in module.parameters())
    tables, spec = lookups(path)
    assert [t.size for t in tables] == [4, 8, 4, 64]  # 3 centers padded to 4; 20 need 5 bits, stored as 6
    for table, centers in zip(tables, codebook.centers, strict=True):
        np.testing.assert_array_equal(table.reshape(-1)[: len(centers)], centers)
    assert spec.specificationVersion == 9  # iOS 18, for its 3 bits
    assert spec.description.input[0].name == "input"
    assert export_coreml(path, module, Codebook(), about=about) > size  # written over


def test_batchnorm_and_fp16(tmp_path, needs_coremltools):
    module, codebook = resnet(4)
    assert target(pack_model(module, codebook)) == "iOS16"
    export_coreml(tmp_path / "m.mlpackage", module, codebook, about=About("resnet20", (3, 32, 32), 10), rest="fp16")
    tables, spec = lookups(tmp_path / "m.mlpackage")
    assert len(tables) == 18
    assert all(t.dtype == np.float16 for t in tables)
    assert spec.specificationVersion == 7  # iOS 16
    assert [p.name for p in tmp_path.iterdir()] == ["m.mlpackage"]


def test_a_mismatch_leaves_no_file_and_names_the_layer(tmp_path, needs_coremltools, monkeypatch):
    module, codebook = deployed(models.mlp(8, (6, 5), 3), 4)
    real = export._register

    def wrong(module, packed):
        real(module, packed)
        dict(module.named_parameters())["3.weight"].data.neg_()

    monkeypatch.setattr(export, "_register", wrong)
    with pytest.raises(UserError, match=r"3\.weight: the Core ML file holds other weights"):
        export_coreml(tmp_path / "m.mlpackage", module, codebook, about=About(input_shape=(8,)))
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(UserError, match=r"pip install 'qupel\[coreml\]'"):
        export_coreml(tmp_path / "m", models.mlp(8), Codebook(), about=About(input_shape=(8,)))
