"""The commands for model files, on a run directory as experiments leave it."""

import re
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from qupel.core.codebook import Codebook
from qupel.data import sources
from qupel.deploy import About, FormatError, energy, load, open_model, save
from qupel.deploy import inspect as look
from qupel.deploy.file import write_file
from qupel.deploy.onnx import export_onnx
from qupel.deploy.predict import accuracy, read_inputs
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_file import deployed, resnet
from test_timing import zone

with warnings.catch_warnings():  # typer imports names that its dependency click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from qupel.deploy import commands
    from qupel.run.plan import plan, quick_score

app = typer.Typer()
for name in ("export", "inspect", "predict"):
    app.command(name)(getattr(commands, name))
app.command("eval")(commands.evaluate_file)
app.command("plan")(plan)


def call(*words, code=0):
    """The output of a command; for a UserError its text."""
    result = CliRunner().invoke(app, [str(w) for w in words])
    if isinstance(result.exception, UserError):
        assert code == 2, result.exception
        return str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two clients of 1 and 3 bits (5 centers), trained a little so that they are right more often than by chance."""
    folder = tmp_path_factory.mktemp("run")
    data = sources.load("digits")
    for client, levels in enumerate((2, 5)):
        torch.manual_seed(client)
        module = models.digits_cnn()
        optimizer = torch.optim.Adam(module.parameters(), 3e-3)
        for _ in range(40):
            rows = torch.randint(len(data.train), (100,))
            loss = torch.nn.functional.cross_entropy(module(data.train.inputs[rows]), data.train.targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        module, codebook = deployed(module, levels, how="kmeans")
        extra = {"data": "digits", "test": 0.5, "budget": 60_000}
        about = About("digits_cnn", (1, 8, 8), 10, data.labels, client=f"client {client}", extra=extra)
        save(folder / f"cells/QuPeL-s0/models/client-{client:03d}.safetensors", module, codebook, about=about)
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    call("export", run, "--all", "--to", "onnx", "--out", folder)
    call("export", run, "--client", 1, "--out", folder, "--zstd")
    call("export", run, "--client", 1, "--client", 0, "--out", folder)
    return folder


def test_export(run, exported, tmp_path):
    names = sorted(p.name for p in exported.iterdir())
    assert names == [f"client-{i}" for i in ("000.onnx", "000.safetensors", "001.onnx", "001.safetensors")] + [
        "client-001.safetensors.zst"
    ]
    original = run / "cells/QuPeL-s0/models/client-000.safetensors"
    assert (exported / "client-000.safetensors").read_bytes() == original.read_bytes()
    said = call("export", original, "--out", tmp_path, "--rest", "fp16")
    assert "% of 58.6 KiB" in said
    assert (tmp_path / "client-000.safetensors").stat().st_size < original.stat().st_size


def test_clients_that_joined_later_are_exported_by_their_own_numbers(run, tmp_path):
    models = tmp_path / "run/cells/QuPeL-s0/models"
    shutil.copytree(run / "cells/QuPeL-s0/models", models)
    assert "no model of a client that joined later" in call("export", tmp_path / "run", "--unseen", "--all", code=2)
    shutil.copy(models / "client-001.safetensors", models / "unseen-000.safetensors")
    call("export", tmp_path / "run", "--unseen", "--all", "--out", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["unseen-000.safetensors"]
    call("export", tmp_path / "run", "--all", "--out", tmp_path / "others")
    assert len(list((tmp_path / "others").glob("client-*"))) == len(list((tmp_path / "others").iterdir())) == 2


def test_export_refusals(run, tmp_path):
    assert "no cells" in call("export", tmp_path, "--all", code=2)
    assert "--client N (0 to 1" in call("export", run, code=2)
    assert "--client N (0 to 1" in call("export", run, "--all", "--client", 0, code=2)
    assert "no client 7" in call("export", run, "--client", 7, code=2)
    assert "no cell 'x'; allowed: QuPeL-s0" in call("export", run, "--cell", "x", "--all", code=2)
    assert "only packed files" in call("export", run, "--all", "--zstd", "--to", "onnx", code=2)
    packed = load(run / "cells/QuPeL-s0/models/client-001.safetensors")
    about = About("digits_cnn", (1, 8, 8), 10, extra={"budget": 2_000})
    module, codebook = deployed(models.digits_cnn(), 4)
    save(tmp_path / "big.safetensors", module, codebook, about=about)
    assert "1 of 1 files are over" in call("export", tmp_path / "big.safetensors", "--out", tmp_path / "o", code=2)
    assert packed.about.client == "client 1"


def test_accuracy_agrees_in_every_format(exported):
    """torch, packed in memory, compressed, ONNX decoded at load and per run: the same to the last digit printed."""
    test = sources.load("digits").test
    module = load(exported / "client-001.safetensors").model()
    with torch.no_grad():
        right = float((module(test.inputs).argmax(1) == test.targets).double().mean())
    assert right > 0.3
    for file in ("client-001.safetensors", "client-001.safetensors.zst", "client-001.onnx"):
        for keep_packed in (False, True):
            model = open_model(exported / file, keep_packed=keep_packed, threads=1)
            assert accuracy(model, test.inputs, test.targets) == right
        assert f"{100 * right:.2f} % of 445 test samples of digits" in call("eval", exported / file)
    assert f"{100 * right:.2f} %" in call("eval", exported / "client-001.onnx", "--data", "digits", "--keep-packed")


def test_eval_tells_how_sure_its_latencies_are_and_energy_where_there_is_a_counter(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "ZONES", tmp_path)
    number = r"([\d.e+-]+)"
    shape = rf"{number} (ms|mJ) \({number} to {number}\)"
    for file in ("client-001.safetensors", "client-001.onnx"):
        said = call("eval", exported / file, "--limit", 10)
        found = re.findall(shape, re.sub(r"[\s│]+", " ", said))
        assert [unit for _, unit, _, _ in found] == ["ms", "ms"]  # no word about energy
        assert all(0 < float(low) <= float(median) <= float(high) for median, _, low, high in found)
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    said = call("eval", exported / "client-001.safetensors", "--limit", 10)
    found = re.findall(shape, re.sub(r"[\s│]+", " ", said))
    assert found[2:] == [("0", "mJ", "0", "0")] * 2


def test_eval_refusals(exported, tmp_path):
    save(tmp_path / "m", models.resnet20(), Codebook(), about=About("resnet20", (3, 32, 32), 10))
    assert "give --data" in call("eval", tmp_path / "m", code=2)
    assert "takes inputs (3, 32, 32)" in call("eval", tmp_path / "m", "--data", "digits", code=2)
    assert "cannot be read" in call("eval", tmp_path / "none", "--data", "digits", code=2)


def test_inspect(exported, tmp_path):
    packed, onnx = (call("inspect", exported / f"client-000.{kind}") for kind in ("safetensors", "onnx"))
    for said in (packed, onnx):
        assert "not quantized" in said
        assert "times smaller than fp32" in said
        assert "client 0" in said
        assert max(map(len, said.splitlines())) <= 80
    call("inspect", exported / "client-001.onnx", "--picture", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    one, two = (look.rows(look.read(exported / f"client-001.{kind}")) for kind in ("safetensors", "onnx"))
    for a, b in zip(one, two, strict=True):
        assert (a.name, a.shape, a.bits, a.entropy) == (b.name, b.shape, b.bits, b.entropy)
        assert b.centers[: len(a.centers)] == a.centers  # padded to 8
        assert sum(a.counts) == np.prod(a.shape)
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(FormatError):
        look.read(tmp_path / "bad.onnx")


def test_entropy_and_bars():
    assert look.entropy((4, 4)) == 1
    assert look.entropy((0, 8)) == 0
    assert look.entropy((1, 1, 2)) == 1.5
    assert look.bars((0, 7, 14)) == "▁▄█"
    assert len(look.bars(tuple(range(256)))) == 16


def test_predict(exported, tmp_path):
    test = sources.load("digits").test
    labels = {}
    for i in range(4):
        pixels = (test.inputs[i, 0] * 255).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        labels[f"{i}.png"] = pixels
    wanted = load(exported / "client-001.safetensors").model()(test.inputs[:4]).argmax(1).tolist()
    np.savez(tmp_path / "some.npz", inputs=test.inputs[:4].numpy())
    np.savetxt(tmp_path / "some.csv", test.inputs[:4].reshape(4, -1).numpy(), delimiter=",", header="a,b", comments="")
    for file in ("client-001.safetensors", "client-001.onnx"):
        lines = call("predict", exported / file, tmp_path, "--top", 3).splitlines()
        assert [line.split(": ")[0] for line in lines] == list(labels)
        assert [int(line.split(": ")[1].split()[0]) for line in lines] == wanted
        assert lines[0].count("%") == 3
        for other in ("some.npz", "some.csv"):
            said = call("predict", exported / file, tmp_path / other).splitlines()
            assert [int(line.split(": ")[1].split()[0]) for line in said] == wanted
    assert call("predict", exported / file, tmp_path / "2.png").startswith(f"2.png: {wanted[2]} ")


def test_predict_normalizes_pixels_as_training_does(tmp_path):
    """A model for uint8 images sees (pixel / 255 - mean) / std, whatever file the pixels come from."""
    module, codebook = resnet(2)
    about = About("resnet20", (3, 32, 32), 10, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    save(tmp_path / "m.safetensors", module, codebook, about=about)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.savez(tmp_path / "a.npz", x=pixels[None])
    np.savetxt(tmp_path / "a.csv", pixels.transpose(2, 0, 1).reshape(1, -1), delimiter=",")
    model = open_model(tmp_path / "m.safetensors")
    chw = pixels.transpose(2, 0, 1)[None] / 255
    wanted = (chw - np.array(about.mean)[:, None, None]) / np.array(about.std)[:, None, None]
    for file in ("a.png", "a.npz", "a.csv"):
        np.testing.assert_allclose(read_inputs(tmp_path / file, model)[1], wanted, atol=1e-5)


def test_predict_refusals(exported, tmp_path):
    model = exported / "client-000.onnx"
    (tmp_path / "a.png").write_bytes(b"not an image")
    (tmp_path / "a.npz").write_bytes(b"not an archive")
    (tmp_path / "a.csv").write_text("1,2\n3,x\n")
    (tmp_path / "b.csv").write_text("1,2\n3\n")
    (tmp_path / "c.csv").write_text("1,2\n")
    np.savez(tmp_path / "b.npz", p=np.zeros(3), q=np.zeros(3))
    (tmp_path / "empty").mkdir()
    cases = [
        ("a.png", "not an image"),
        ("a.npz", "not a readable"),
        ("a.csv", "line 2"),
        ("b.csv", "line 2"),
        ("c.csv", "takes"),
    ]
    for file, message in [*cases, ("b.npz", "holds p, q"), ("empty", "no images"), ("none", "no such file")]:
        assert message in call("predict", model, tmp_path / file, code=2)


def test_plan(run):
    said = call("plan", "cnn5", "--budget", "300KiB", "--budget", "64KiB")
    assert "300.0 KiB: 2-bit layers" in said
    assert "even 1 bit takes" in said
    assert max(map(len, said.splitlines())) <= 80
    said = call("plan", run / "cells/QuPeL-s0/models/client-001.safetensors", "--budget", "30kB", "--all-layers")
    assert "layer by layer" in said
    assert "even 1 bit takes" in call("plan", "cnn5", "--budget", "9KiB", code=2)
    assert "neither a model" in call("plan", "nothing", "--budget", "30kB", code=2)
    assert "such as 3x32x32" in call("plan", "mlp", "--input", "big", "--budget", "30kB", code=2)
    assert "size 'x'" in call("plan", "mlp", "--budget", "x", code=2)


def test_plan_chooses_a_network_for_each_budget():
    said = call("plan", "small_cnn", "cnn5", "--budget", "110KiB", "--budget", "30KiB")
    first, second, config = said.splitlines()
    assert re.fullmatch(r"110\.0 KiB: small_cnn at 6 bits \(.* KiB\)", first)
    assert second.startswith("30.0 KiB: small_cnn at 1 bit (")
    assert 'networks = ["' in config
    refused = call("plan", "small_cnn", "cnn5", "--budget", "9KiB", code=2)
    assert "the smallest, small_cnn at 1 bit, takes" in refused


def test_plan_measures_what_it_chooses_from():
    """The one that is better after a quick training comes first, and what its line says is that training's score."""
    said = call("plan", "mlp", "digits_cnn", "--budget", "80KiB", "--measure", "digits", "--steps", "20")
    (line, _, config) = said.splitlines()
    found = re.findall(r"(\w+) at (\d) bits? \([\d.]+ KiB, ([\d.]+) %\)", line)
    assert len(found) == 2
    assert [float(score) for *_, score in found] == sorted((float(score) for *_, score in found), reverse=True)
    name, bits, score = found[0]
    assert round(100 * quick_score(name, int(bits), "digits", 20), 1) == float(score)
    assert f'networks = ["{name}"]' in config


def test_foreign_onnx(tmp_path):
    """A model that is not ours still runs once its inputs are known; ours says everything itself."""
    module, codebook = deployed(models.mlp(4, (5, 3), 2), 2)
    export_onnx(tmp_path / "m.onnx", module, codebook, about=About(input_shape=(4,)))
    write_file(tmp_path / "x.csv", b"1,2,3,4\n")
    assert call("predict", tmp_path / "m.onnx", tmp_path / "x.csv").startswith("row 0: ")
