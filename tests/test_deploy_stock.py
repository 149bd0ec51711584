"""Our ONNX files in runtimes that are not ours: in a browser, and in the oldest ONNX Runtime that we say understands
them. Outputs differ by at most 1e-5 of the largest (or of 1): sums are made in another order."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qupel.deploy import About, Input, keep_packed, load, save
from qupel.deploy.feed import feed
from qupel.deploy.onnx import export_onnx, session
from qupel.tasks import zoo as models
from qupel.tasks.task import call
from stock import Missing, Oldest, Web
from test_deploy_channels import scaled
from test_deploy_file import deployed

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow


class Own(nn.Module):
    """A network of the user's own, of tokens and numbers: embedding, GRU, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(30, 16), nn.GRU(16, 24, batch_first=True)
        self.body, self.norm, self.head = nn.Linear(27, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)

    def forward(self, tokens, numbers):
        last = self.gru(self.embedding(tokens))[0][:, -1]
        return self.head(torch.relu(self.norm(self.body(torch.cat([last, numbers], 1)))))


def networks():
    """name -> (module on its levels, codebook, about, the module anew)"""
    digits, picture = About("digits_cnn", (1, 8, 8), 10), models.digits_cnn
    several = About(inputs=(Input("tokens", (12,), "int64"), Input("numbers", (3,))), classes=5)

    def text():
        return models.build("transformer", (16,), 30, seed=0)

    yield "2 bits", *deployed(picture(), 4), digits, picture
    yield "3 bits", *deployed(picture(), 8), digits, picture
    yield "2 bits by channel", *scaled(picture(), 4), digits, picture
    yield "own, 3 bits", *deployed(Own(), 8), several, Own
    yield "transformer, 2 bits", *deployed(text(), 4), About("", (16,), 30, dtype="int64"), text


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name -> (ONNX file, inputs, outputs of the packed runtime), the outputs of which are torch's bit for bit."""
    folder, found = tmp_path_factory.mktemp("stock"), {}
    torch.manual_seed(0)
    for name, module, codebook, about, anew in networks():
        path = folder / f"{name}.onnx"
        export_onnx(path, module, codebook, about=about)
        save(path.with_suffix(".safetensors"), module, codebook, about=about)
        given = feed(about, 7, torch.Generator().manual_seed(1), below=30)
        with torch.inference_mode():
            outputs = call(keep_packed(load(path.with_suffix(".safetensors")), anew()), given).numpy()
        values = given.values() if isinstance(given, dict) else given
        found[name] = path, dict(zip(about.input_names, (v.numpy() for v in values), strict=True)), outputs
    return found


def compare(got: np.ndarray, path: Path, inputs: dict[str, np.ndarray], wanted: np.ndarray) -> None:
    atol = 1e-5 * max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)
    np.testing.assert_allclose(got, session(path, threads=1).run(None, inputs)[0], rtol=0, atol=atol)


def test_in_a_browser(exported):
    """onnxruntime-web, weights decoded at load and in every run; nothing but our own server is asked."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            web = Web(Path(folder))
        except Missing as missing:
            pytest.skip(str(missing))
        with web:
            for keep in (False, True):
                for name, (path, inputs, wanted) in exported.items():
                    web.open(path, name, keep_packed=keep)
                    compare(web.run(name, inputs), path, inputs, wanted)
            assert {address.split("/")[2] for address in web.window.requests()} == {web.address}


def test_in_the_oldest_onnx_runtime(exported):
    with tempfile.TemporaryDirectory() as folder:
        try:
            oldest = Oldest(Path(folder))
        except Missing as missing:
            pytest.skip(str(missing))
        for path, inputs, wanted in exported.values():
            compare(oldest.run(path, inputs), path, inputs, wanted)
