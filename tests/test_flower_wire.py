"""Uploads on the wire: rows, their shares, what is kept for the next time, what noise is added; and the task, whose
parts are named by a server that is not trusted. The codecs themselves: test_codecs.py."""

import json
import math
import sys

import numpy as np
import pytest
import torch

import flower_bench as bench
from qupel.engine.rounds import Failed
from qupel.flower import audit
from qupel.flower.boundary import DECLINED, NO_QUESTION, NOT_ALLOWED
from qupel.flower.server import open_fleet
from qupel.flower.task import PROTOCOL, Task
from qupel.flower.wire import decode, encode, noise_deviation, privatize, without_shares
from qupel.parts.base import Upload, vector
from qupel.parts.codecs import codecs
from qupel.parts.methods import methods
from qupel.parts.phase import Phase
from qupel.parts.servers import servers
from qupel.run.recipes import find, recipes
from qupel.run.settings import Length, Settings
from qupel.util.errors import UserError
from tiny import beginning, same


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def vectors(size: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=g)
    return w, w + 0.01 * torch.randn(size, generator=g)


def rows(count: int, size: int = 300, seed: int = 0):
    """(what the server sent, an upload's rows)."""
    pairs = [vectors(size, seed + k) for k in range(count)]
    return tuple(w for w, _ in pairs), tuple(u for _, u in pairs)


SHARES = {1: torch.tensor([0.25]), 3: torch.tensor([0.0, 1.0, 1 / 3])}


# --- uploads ---


@pytest.mark.parametrize("codec", codecs)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shares", [False, True])
def test_rows_and_shares(codec, count, shares):
    """All rows in the codec's size, then a share each, to the bit."""
    sent, mine = rows(count)
    upload = Upload(mine, SHARES[count] if shares else None)
    payload, _ = encode(codec, upload, sent, None, rng())
    assert len(payload) == count * codecs[codec]().size(300) + 4 * count * shares
    back = decode(codec, payload, sent)
    assert all(float((a - b).abs().max()) < 1e-3 for a, b in zip(back.rows, mine, strict=True))
    assert (codec == "fp32") <= same(back.rows, mine)
    assert back.shares is None if upload.shares is None else torch.equal(back.shares, upload.shares)


@pytest.mark.parametrize("codec", codecs)
def test_a_wrong_length_is_refused(codec):
    for count in (1, 2):
        sent, mine = rows(count)
        payload, _ = encode(codec, Upload(mine), sent, None, rng())
        for wrong in (payload[:-1], payload + b"\0", b"", payload * 2, payload + b"\0" * (4 * count + 1)):
            with pytest.raises(UserError, match="upload has"):
                decode(codec, wrong, sent)


@pytest.mark.parametrize("share", [-1e-7, 1.0001, 1e30, math.nan, math.inf])
def test_shares_are_from_0_to_1(share):
    """Or one client's row would be the mean."""
    sent, mine = rows(2)
    payload, _ = encode("fp32", Upload(mine, torch.tensor([0.5, share])), sent, None, rng())
    with pytest.raises(UserError, match="shares of its rows are not from 0 to 1"):
        decode("fp32", payload, sent)


@pytest.mark.parametrize("codec", codecs)
def test_any_bytes_of_the_right_length_decode(codec):
    """Numbers or not: no warning, no other error; what is not finite is screened afterwards."""
    sent = (torch.zeros(300),) * 2
    size = 2 * codecs[codec]().size(300)
    for fill in (None, b"\xff", b"\x7f\x80", b"\0\0\x80\x7f"):
        payload = rng().bytes(size) if fill is None else (fill * size)[:size]
        assert [row.shape for row in decode(codec, payload, sent).rows] == [(300,)] * 2


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_error_feedback(codec):
    """What was sent in all plus what is left is what should have been sent in all, row by row; and where the next phase
    has another number of rows, the encoder begins anew."""
    residual, generator = None, rng()
    zeros = (torch.zeros(700),) * 2
    wanted, sent = torch.zeros(1400).double(), torch.zeros(1400).double()
    for seed in range(30):
        _, mine = rows(2, 700, 2 * seed)
        payload, residual = encode(codec, Upload(mine), zeros, residual, generator)
        wanted += vector(mine).double()
        sent += vector(decode(codec, payload, zeros).rows).double()
    assert float((sent + residual.double() - wanted).abs().max()) < 1e-4
    assert 0 < float(residual.abs().max()) < 0.1
    for count in (1, 3):
        w, mine = rows(count, 700)
        assert encode(codec, Upload(mine), w, residual, rng())[0] == encode(codec, Upload(mine), w, None, rng())[0]


# --- local differential privacy ---


def test_privacy_clips_and_adds_the_noise_it_says():
    """Clipping as Flower's own mod does it; the noise has the mechanism's deviation and no bias."""
    differential = pytest.importorskip("flwr.supercore.differential_privacy")
    w, upload = vectors(5000)
    upload = w + 100 * (upload - w)
    theirs = [upload.numpy().copy()]
    differential.compute_clip_model_update(theirs, [w.numpy()], 1.5)
    quiet = privatize(upload, w, 1.5, 0.0, rng())
    assert torch.allclose(quiet, torch.from_numpy(theirs[0]), atol=1e-6)
    assert float((quiet - w).norm()) == pytest.approx(1.5, rel=1e-4)
    inside = w + (upload - w) / 1e4
    assert torch.allclose(privatize(inside, w, 1.5, 0.0, rng()), inside, atol=1e-7)
    deviation = noise_deviation(0.5, 1e-5, 3.0)
    assert deviation == pytest.approx(3.0 * math.sqrt(2 * math.log(1.25e5)) / 0.5)
    noise = privatize(upload, w, 1.5, deviation, rng(1)) - quiet
    assert float(noise.std()) == pytest.approx(deviation, rel=0.05)
    assert abs(float(noise.mean())) < 4 * deviation / math.sqrt(5000)


def test_shares_can_be_said_by_how_far_rows_moved():
    """A row that does not count has not moved; the mean over the clients moves by the share."""
    sent, mine = rows(3)
    told = without_shares(Upload(mine, torch.tensor([0.0, 1.0, 0.5])), sent)
    assert torch.equal(told[0], sent[0])
    assert torch.allclose(told[1], mine[1], atol=1e-6)
    assert torch.allclose(told[2], (sent[2] + mine[2]) / 2, atol=1e-6)
    assert without_shares(Upload(mine), sent) is mine


# --- the task ---


def described(phases, **more):
    table = {
        "job": "a", "label": "l", "seed": 0, "model": "mlp", "shape": [4], "classes": 2, "clients": 1,
        "phases": [p.table() for p in phases], "local_steps": 1, "batch": 1, "epoch_steps": 1, "sample": 1.0,
    }  # fmt: skip
    return json.dumps(table | more)


def over_the_wire(phases):
    sent = Task.model_validate_json(described(phases))
    return Task.model_validate_json(json.dumps(json.loads(sent.model_dump_json()))).phases


@pytest.mark.parametrize("recipe", recipes)
def test_every_recipe_survives_the_wire(recipe):
    """Phases arrive as they were sent, to the last bit of every number."""
    known = {k: v for k, v in find(recipe).defaults.items() if k in Settings.model_fields}
    phases = find(recipe).phases(Settings(**known), Length(30, 10, 7))
    assert over_the_wire(phases) == tuple(phases)


def test_every_part_survives_the_wire():
    phases = [Phase(methods[name](), 2, servers["fedavgm"]()) for name in methods]
    assert over_the_wire(phases) == tuple(phases)


def test_a_task_says_what_the_server_means_and_no_more(tmp_path):
    """The method's own network, its settings, the loss; not the server's part, which no client runs."""
    text = bench.config(1).split("[methods")[0].replace('name = "mlp"', 'name = "digits_cnn"\nargs = {hidden = [7, 7]}')
    text += '[methods.QuPeL]\nmodel = "mlp"\nmethod = "fedavg"\nserver = {name = "fedavgm", momentum = 0.5}\n'
    run_folder = bench.request(tmp_path / "run", text, clients=1, minimum=1)
    fleet = open_fleet(run_folder, bench.Direct(bench.clients(tmp_path, 1)))
    assert (fleet.task.model, fleet.task.args) == ("mlp", {"hidden": [7, 7]})
    assert "fedavgm" not in fleet.task.model_dump_json()
    assert fleet.job.phases[0].server == servers["fedavgm"](0.5)
    (done,) = fleet.train(0, beginning(fleet.job).w, [0])
    assert done.fault is None
    assert not fleet.job.networks


def test_what_clients_do_not_tell_cannot_be_asked_for(tmp_path):
    run_folder = bench.request(tmp_path / "run", f'diagnostics = "cheap"\n{bench.config(1)}')
    with pytest.raises(UserError, match=r"clients on Flower tell scores only"):
        open_fleet(run_folder, bench.Direct([]))


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 200])
def test_a_job_cannot_name_another_folder(name):
    with pytest.raises(ValueError, match="job"):
        Task.model_validate_json(described([Phase(methods["fedavg"](), 1)], job=name))


# --- a server names parts, not code ---

MARK = "from pathlib import Path\nPath(__file__).with_suffix('.loaded').touch()\n"
CODE = {
    "method": lambda path: {"phases": [{"rounds": 2, "method": path}]},
    "quantizer": lambda path: {"phases": [{"rounds": 2, "method": "local", "quantizer": path}]},
    "its settings": lambda path: {"phases": [{"rounds": 2, "method": "local", "quantizer": {"name": path}}]},
    "server": lambda path: {"phases": [{"rounds": 2, "method": "fedavg", "server": path}]},
    "codec": lambda path: {"upload": path},
    "network": lambda path: {"model": path},
    "loss": lambda path: {"loss": path},
    "metric": lambda path: {"metrics": ["accuracy", path]},
}


@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("allow", ['allow = ["elsewhere"]\n', ""])
def test_a_server_cannot_make_a_client_import_anything(tmp_path, monkeypatch, capfd, kind, allow):
    """In any place of a task: refused in one sentence, the module is not loaded; the client's own log names it."""
    (tmp_path / "planted_code.py").write_text(MARK)
    monkeypatch.syspath_prepend(tmp_path)
    (path,) = bench.clients(tmp_path, 1)
    path.write_text(allow + path.read_text())
    (client,) = bench.Direct([path]).clients
    task = json.loads(described([Phase(methods["fedavg"](), 2)], shape=[1, 8, 8], classes=10))
    question = {"kind": "train", "protocol": PROTOCOL, "attempt": 1, "round": 0, "undone": []}
    for named, module in (("planted_code:Name", "planted_code"), ("os:system", "os"), ("qupel.cli:app", "qupel.cli")):
        reply = client.answer({**question, "task": {**task, **CODE[kind](named)}}, b"")
        assert reply == ({"error": NOT_ALLOWED}, b"")
        assert f"importing {module} is not allowed here" in capfd.readouterr().err
    assert not (tmp_path / "planted_code.loaded").exists()
    assert "planted_code" not in sys.modules
    assert [path.name for path in (tmp_path / "state-0").iterdir()] == [audit.LOG]


def test_an_allowed_module_gives_its_own_names_only(tmp_path, capfd):
    """What it has from elsewhere is not its own: no os.system through a module that imports os."""
    (tmp_path / "planted_parts.py").write_text("import os\nclass Codec: ...\n")
    (path,) = bench.clients(tmp_path, 1)
    path.write_text('allow = ["planted_parts"]\n' + path.read_text())
    (client,) = bench.Direct([path]).clients  # modules beside client.toml are found
    task = json.loads(described([Phase(methods["fedavg"](), 2)], shape=[1, 8, 8], classes=10))
    question = {"kind": "train", "protocol": PROTOCOL, "attempt": 1, "round": 0, "undone": []}
    for kind in ("codec", "network", "loss", "metric"):
        told = client.answer({**question, "task": {**task, **CODE[kind]("planted_parts:os.getpid")}}, b"")
        assert told == ({"error": DECLINED}, b"")
        assert "a name of the module itself is needed" in capfd.readouterr().err
    for kind in ("method", "quantizer", "server", "codec"):
        told = client.answer({**question, "task": {**task, **CODE[kind]("planted_parts:Codec")}}, b"")
        assert told == ({"error": DECLINED}, b"")
        assert "is no frozen dataclass" in capfd.readouterr().err


# --- rounds and rows that cannot be ---


@pytest.mark.parametrize("round", [5, -1, 10**9, -(10**9), 2**63])
@pytest.mark.parametrize("kind", ["train", "evaluate", "export"])
@pytest.mark.parametrize("more", ["", "[privacy]\nclip = 0.5\nepsilon = 1.0\ndelta = 1e-5\n"])
def test_rounds_that_a_job_has_not(tmp_path, round, kind, more):
    run_folder = bench.request(tmp_path / "run", bench.config(1), clients=1, minimum=1)
    post = bench.Direct(bench.clients(tmp_path, 1, more))
    fleet = open_fleet(run_folder, post)
    header = {"kind": kind, "protocol": PROTOCOL, "attempt": 1, "round": round, "undone": [],
              "task": json.loads(fleet.task.model_dump_json())}  # fmt: skip
    w = vector(beginning(fleet.job).w).numpy().tobytes()
    assert post.clients[0].answer(header, w) == ({"error": NO_QUESTION}, b"")
    assert [path.name for path in (tmp_path / "state-0").iterdir()] == [audit.LOG]


@pytest.mark.parametrize("undone", [None, 3, [3], [[0, "x"]], [[1, 2, 3]], {"a": 1}])
def test_rounds_taken_back_that_are_none(tmp_path, undone):
    run_folder = bench.request(tmp_path / "run", bench.config(1), clients=1, minimum=1)
    post = bench.Direct(bench.clients(tmp_path, 1))
    fleet = open_fleet(run_folder, post)
    header = {"kind": "train", "protocol": PROTOCOL, "attempt": 1, "round": 0, "undone": undone,
              "task": json.loads(fleet.task.model_dump_json())}  # fmt: skip
    w = vector(beginning(fleet.job).w).numpy().tobytes()
    assert post.clients[0].answer(header, w) == ({"error": NO_QUESTION}, b"")


def test_another_number_of_rows(tmp_path):
    """SCAFFOLD has two; a server that sends one or three is told what is expected."""
    text = bench.config(1).split("[methods")[0] + '[methods.QuPeL]\nmethod = "scaffold"\n'
    run_folder = bench.request(tmp_path / "run", text, clients=1, minimum=1)
    fleet = open_fleet(run_folder, bench.Direct(bench.clients(tmp_path, 1)))
    w = beginning(fleet.job).w
    assert len(w) == 2
    for wrong in (w[:1], (*w, w[0])):
        words = f"server's model has {len(wrong) * len(w[0])} parameters, this client's {2 * len(w[0])}"
        with pytest.raises(Failed, match=words):
            fleet.train(0, wrong, [0])
    (done,) = fleet.train(0, w, [0])
    assert done.fault is None
