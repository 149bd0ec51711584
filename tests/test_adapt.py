"""Clients that come later: what they start from, which steps they make, what is said of them."""

import json
import random
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save as to_bytes
from torch import nn

import qupel
from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.data import partition, sources
from qupel.data.clients import pool
from qupel.data.partition import by_owner
from qupel.engine.inline import Inline
from qupel.engine.rounds import Failed
from qupel.parts.methods import methods
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.ste import StraightThrough
from qupel.run import adapt as adapting
from qupel.run import config as configs
from qupel.run import experiment, jobs
from qupel.run.recipes import compose, recipes
from qupel.run.settings import Length, Settings
from qupel.util.errors import UserError
from qupel.util.files import read_json
from tiny import CLASSES, INPUTS, make_job, mlp

with warnings.catch_warnings():  # typer imports names that its dependency click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from qupel.cli import app


def call(*words):
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


SHORT = {"rounds": 5, "local_steps": 3, "batch": 4}


def people(sizes=(8, 8, 8), test=6, seed=0):
    """Clients whose label is the place of the largest of their first three numbers."""
    rng = np.random.default_rng(seed)

    def some(n):
        x = rng.standard_normal((n, INPUTS)).astype(np.float32)
        return x, x[:, :CLASSES].argmax(1)

    return [(*some(n), *some(test)) for n in sizes]


NEW = people((10, 12), seed=9)


def weights(model: nn.Module) -> torch.Tensor:
    return Layout.of(model).flatten(model)


# --- which steps ---


def two_phases(last, rounds=2):
    return [Phase(FedAvg(), 3), Phase(last, rounds)]


def test_a_personal_phase_is_run_at_the_new_client_with_w_fixed():
    """The same as a newcomer's steps in the last two rounds."""
    done = qupel.fit(mlp(), people(), method=two_phases(Local(quantizer=NoQuantizer())), local_steps=3, batch=4)
    new = qupel.adapt(done, NEW[0], bits=32)
    origin = done.origin
    w = origin.w[0].clone()
    state = Inline(replace(origin.job, **_one(origin, NEW[0])))
    for round in (3, 4):
        list(state.train(round, (w,), [0]))
    assert torch.equal(state.deployed(4, (w,), 0).x, weights(new.models[0]))
    assert not torch.equal(weights(new.models[0]), w)
    assert torch.equal(w, weights(done.global_model))  # it has not moved


def _one(origin, client):
    data = pool([client])
    own = replace(origin.job.data, train=data.train, test=data.test)
    return {"data": own, "parts": by_owner(data), "plans": [Plan()]}


@pytest.mark.parametrize(
    ("phases", "rounds"),
    [
        ([Phase(FedAvg(), 3), Phase(FedAvg(quantizer=StraightThrough()), 2)], [4]),
        (
            [Phase(FedAvg(), 2), Phase(FedAvg(quantizer=StraightThrough()), 1), Phase(Local(), 1), Phase(QuPeL(), 1)],
            [3, 4],
        ),
        ([Phase(Local(), 2), Phase(FedAvg(), 3)], [4]),
        ([Phase(QuPeL(), 5)], [0, 1, 2, 3, 4]),
        ([Phase(FedAvg(quantizer=StraightThrough()), 3), Phase(QuPeL(quantizer=Frozen()), 2)], [3, 4]),
    ],
    ids=["shared", "default-like", "shared last", "personal all along", "frozen after shared"],
)
def test_the_rounds_of_the_personal_phases_at_the_end(phases, rounds, monkeypatch):
    seen = []
    real = adapting.Inline.train
    monkeypatch.setattr(adapting.Inline, "train", lambda self, r, w, c: (seen.append(r), real(self, r, w, c))[1])
    done = qupel.fit(mlp(), people(), method=phases, **SHORT)
    seen.clear()
    new = done.adapt(NEW, bits=2)
    assert seen == rounds
    assert new.quantized == [{"2.weight": 2}] * 2  # also where frozen assignments come after a shared phase


@pytest.mark.parametrize("name", [*methods, *recipes])
def test_every_method_and_recipe_serves_a_client_that_comes_later(name):
    """Any bits, on the levels, and no worse typed than its own clients' models."""
    known = name in methods
    length = Length(10, 2, 1.0)
    phases = [compose(name, None, None, Settings(), length)] if known else recipes[name].phases(Settings(), length)
    done = qupel.fit(mlp(), people(), method=phases, bits=32, local_steps=2, batch=4)
    new = done.adapt(NEW, bits=[1, 32])
    assert new.quantized == [{"2.weight": 1}, {}]
    assert len(new.models[0][2].weight.unique()) <= 2
    assert len(new.test) == len(new.before) == 2
    assert new.before == pytest.approx([_accuracy(done.global_model, c) for c in NEW])


def _accuracy(model, client):
    return float((model(torch.from_numpy(client[2])).argmax(1).numpy() == client[3]).mean())


def test_a_shared_full_precision_model_is_quantized_afterwards():
    done = qupel.fit(mlp(), people(), method="fedavg", **SHORT)
    full, small = done.adapt(NEW[0]), done.adapt(NEW[0], bits=8)
    assert full.quantized == [{}]
    assert torch.equal(weights(full.models[0]), weights(done.global_model))
    assert weights(small.models[0]) == pytest.approx(weights(done.global_model), abs=0.02)


def test_adapting_again_gives_the_same_bits_and_the_fit_is_left_alone():
    done = qupel.fit(mlp(), people(), **SHORT)
    before = weights(done.global_model).clone(), done.origin.w[0].clone()
    first, again = done.adapt(NEW, bits=2), done.adapt(NEW, bits=2)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(first.models, again.models, strict=True))
    alone = done.adapt(NEW[0], bits=2)
    assert torch.equal(weights(alone.models[0]), weights(first.models[0]))  # the second one is none of its business
    assert torch.equal(before[0], weights(done.global_model))
    assert torch.equal(before[1], done.origin.w[0])


def test_adapted_models_beat_the_global_one_where_data_differ():
    """Every client's labels are permuted in its own way: only a personal model can know."""
    rng = np.random.default_rng(0)
    clients = [(x, p[y], tx, p[ty]) for (x, y, tx, ty), p in
               zip(people((60,) * 6, test=60), [rng.permutation(CLASSES) for _ in range(6)], strict=True)]  # fmt: skip
    phases = [Phase(FedAvg(), 5), Phase(Local(Schedule(0.3), quantizer=StraightThrough()), 30)]
    done = qupel.fit(mlp(), clients[:4], method=phases, bits=4, unseen=clients[4:])
    assert done.unseen is not None
    assert np.mean(done.unseen.test) > np.mean(done.unseen.before) + 0.1


# --- budgets, mistakes ---


def test_a_budget_is_kept(tmp_path):
    net = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    done = qupel.fit(net, people(), budget=["6 KiB", "5 KiB", "8 KiB"], **SHORT)
    new = done.adapt(NEW, budget="6 KiB")
    for found, most in ((done, [6, 5, 8]), (new, [6, 6])):
        files = found.save(tmp_path / str(len(most)))
        assert all(path.stat().st_size <= 1024 * m for path, m in zip(files, most, strict=True))
    assert new.quantized[0]["2.weight"] > 1


def test_mistakes_are_told(tmp_path):
    done = qupel.fit(mlp(), people(), method="qupel-prox", **SHORT)
    x, y = NEW[0][:2]
    for given, options, words in (
        ((x, y), {"bits": 2, "budget": "4 KiB"}, "either bits or budget"),
        ((x, y), {"bits": [2, 3]}, "bits: 2 entries for 1 clients"),
        ((x, y.astype(np.float32)), {}, "targets are numbers; the federation was trained on labels"),
        ((x[:, :3], y), {}, "does not take this data"),
        ((x, y + 2), {}, "does not take this data"),
        ([], {}, "at least one"),
        ((x, y), {"budget": "1 KiB"}, "even 1 bit takes"),
    ):
        with pytest.raises(UserError, match=words):
            qupel.adapt(done, given, **options)
    with pytest.raises(UserError, match="no finished run"):
        qupel.adapt(tmp_path, NEW[0])
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="damaged"):
        qupel.adapt(tmp_path, NEW[0])
    x = np.full_like(x, 1e38)
    with pytest.raises(Failed, match="another kind"):
        qupel.adapt(done, (x, y))


# --- unseen ---


def test_unseen_clients_are_drawn_by_the_seed_and_never_train():
    parts = list(range(10))
    seen, later = partition.leave_out(parts, 0.3, 1)
    assert (len(seen), len(later), sorted(seen + later)) == (7, 3, parts)
    assert (seen, later) == partition.leave_out(parts, 3, 1)
    assert any(partition.leave_out(parts, 3, s)[1] != later for s in range(2, 5))
    for share in (0.01, 10, 0.99):
        with pytest.raises(UserError, match=r"unseen = .* of 10 clients; allowed are 1 to 9"):
            partition.leave_out(parts, share, 0)


def test_a_fit_without_the_unseen_is_the_same_fit():
    clients = people((8,) * 5)
    seen, later = partition.leave_out(range(5), 0.4, 0)
    bits = [1, 2, 3, 4, 5]
    done = qupel.fit(mlp(), clients, bits=bits, unseen=0.4, **SHORT)
    same = qupel.fit(mlp(), [clients[i] for i in seen], bits=[bits[i] for i in seen], **SHORT)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(done.models, same.models, strict=True))
    given = qupel.fit(mlp(), [clients[i] for i in seen], bits=2, unseen=[clients[i] for i in later], **SHORT)
    assert [list(q.values()) for q in done.unseen.quantized] == [[bits[i]] for i in later]
    assert [list(q.values()) for q in given.unseen.quantized] == [[2], [2]]
    assert given.unseen.names == ["unseen 0", "unseen 1"]


CONFIG = """
rounds = 4
local_steps = 3
batch = 5
bits = [2, 3]
[split]
clients = 5
unseen = 0.4
train_per_client = 12
test_per_client = 8
[model]
name = "mlp"
[task]
metrics = ["macro_f1"]
[methods.QuPeL]
recipe = "qupel"
warmup = 0.5
finetune = 0.25
[methods.FedAvg]
recipe = "fedavg"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("adapt") / "run"
    experiment.run_experiment(configs.parse(CONFIG, "c"), out)
    return out


def test_a_run_tells_of_its_unseen_clients(finished):
    result = read_json(finished / "cells/QuPeL-s0/result.json")
    told = result["unseen"]
    assert {len(told[key]) for key in ("test", "count", "global", "macro_f1", "bits", "bytes", "files")} == {2}
    assert (told["count"], told["bits"]) == ([8, 8], [2.0, 3.0])
    models = sorted((finished / "cells/QuPeL-s0/models").glob("unseen-*.safetensors"))
    assert [p.stat().st_size for p in models] == told["files"]
    assert len(result["lines"][-1]["clients"]["test"]) == 3
    assert {"w.safetensors", "models/unseen-000.safetensors"} <= set(result["checksums"])
    shared = read_json(finished / "cells/FedAvg-s0/result.json")["unseen"]
    assert shared["test"] == shared["global"]  # full precision, as this recipe ships it


def test_unseen_data_are_in_no_job():
    config = configs.parse(CONFIG, "c")
    cell = experiment.Cell("QuPeL", 0)
    data = jobs.load_data("digits", None, None)
    seen, later = jobs.split_clients(config, data, 0)
    assert [p.train_rows.tolist() for p in jobs.build_job(config, cell).parts] == [p.train_rows.tolist() for p in seen]
    assert not set(np.concatenate([p.train_rows for p in later])) & set(np.concatenate([p.train_rows for p in seen]))


@pytest.mark.parametrize("value", ["-0.1", "1.5", "5", "0.01"])
def test_a_share_of_unseen_clients_that_cannot_be(value):
    with pytest.raises(UserError, match="unseen"):
        jobs.build_job(configs.parse(CONFIG, "c", [f"split.unseen={value}"]), jobs.Cell("QuPeL", 0))


# --- run folders and the command line ---


def _new_client(tmp_path, groups=False):
    data = sources.load("digits")
    arrays = {"train_inputs": data.train.inputs[:40].numpy(), "train_targets": data.train.targets[:40].numpy()}
    arrays |= {"test_inputs": data.test.inputs[:30].numpy(), "test_targets": data.test.targets[:30].numpy()}
    if groups:
        arrays |= {"train_groups": np.arange(40) % 2, "test_groups": np.arange(30) % 2}
    path = tmp_path / "new.npz"
    np.savez(path, **arrays)
    return path, [arrays[k] for k in ("train_inputs", "train_targets", "test_inputs", "test_targets")]


def test_a_run_its_file_and_the_command_line_give_the_same_model(finished, tmp_path):
    path, arrays = _new_client(tmp_path)
    from_run = qupel.adapt(finished, tuple(arrays), bits=2, cell="QuPeL")
    from_file = qupel.adapt(finished / "cells/QuPeL-s0/w.safetensors", tuple(arrays), bits=2)
    assert torch.equal(weights(from_run.models[0]), weights(from_file.models[0]))
    said = call(
        "adapt", finished, "--data", path, "--bits", 2, "--cell", "QuPeL-s0", "--out", tmp_path / "m.safetensors"
    )
    assert "adapted from QuPeL" in said
    loaded = qupel.load(tmp_path / "m.safetensors")
    assert torch.equal(weights(loaded), weights(from_run.models[0]))
    with pytest.raises(UserError, match=r"one cell is needed.*QuPeL-s0"):
        qupel.adapt(finished, tuple(arrays))


def test_groups_are_clients(finished, tmp_path):
    path, _ = _new_client(tmp_path, groups=True)
    call("adapt", finished, "--data", path, "--budget", "96 KiB", "--cell", "QuPeL", "--out", tmp_path / "models")
    files = sorted((tmp_path / "models").iterdir())
    assert [p.name for p in files] == ["client-000.safetensors", "client-001.safetensors"]
    assert all(p.stat().st_size <= 96 * 1024 for p in files)


def test_a_damaged_shared_model_is_not_believed(finished, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    file = copy / "cells/QuPeL-s0/w.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        qupel.adapt(copy, tuple(_new_client(tmp_path)[1]), cell="QuPeL")


def test_the_folder_of_a_fit_serves_with_its_own_network(tmp_path):
    done = qupel.fit(mlp(), people(), out=tmp_path, **SHORT)
    new = qupel.adapt(tmp_path, NEW, model=mlp(3), bits=2)
    here = done.adapt(NEW, bits=2)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(new.models, here.models, strict=True))
    with pytest.raises(UserError, match="network is one of your own"):
        qupel.adapt(tmp_path, NEW, bits=2)
    with pytest.raises(UserError, match=r"layout [0-9a-f]{16}, this one has [0-9a-f]{16}"):
        qupel.adapt(tmp_path, NEW, model=nn.Sequential(nn.Linear(INPUTS, CLASSES)), bits=2)


def test_an_adapt_that_ends_while_it_writes_leaves_nothing_half_written(finished, tmp_path, monkeypatch):
    path, _ = _new_client(tmp_path)
    target = tmp_path / "out" / "m.safetensors"
    words = ("adapt", finished, "--data", path, "--cell", "QuPeL", "--out", target)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            call(*words)
    assert list(target.parent.iterdir()) == []
    call(*words)
    assert qupel.load(target)


# --- whose code is loaded ---


@pytest.mark.parametrize(
    "told",
    [
        {"model": "subprocess:run", "args": {"args": ["touch", "{here}/broken-in"]}},
        {"loss": "os:getcwd"},
        {"phases": [{"rounds": 1, "method": "os:getcwd"}]},
        {"model": "mlp", "args": {"hidden": [2_000_000_000]}},
    ],
)
def test_nothing_is_loaded_because_a_file_says_so(finished, tmp_path, told):
    """A file may come from anybody. It is not believed that it may import, nor that it may build what fills memory."""
    described, tensors = adapting._read(finished / "cells/QuPeL-s0/w.safetensors")
    changed = json.loads(json.dumps({**described, **told}).replace("{here}", str(tmp_path)))
    (tmp_path / "w.safetensors").write_bytes(to_bytes(tensors, {"qupel": json.dumps(changed)}))
    with pytest.raises(UserError, match=r"not allowed here|must be whole numbers"):
        qupel.adapt(tmp_path / "w.safetensors", tuple(_new_client(tmp_path)[1]), bits=2)
    assert not (tmp_path / "broken-in").exists()


def test_a_run_with_modules_of_ones_own_adapts_where_they_are(tmp_path, monkeypatch):
    layers = "nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)"
    (tmp_path / "joining_nets.py").write_text(f"from torch import nn\ndef Net(): return nn.Sequential({layers})\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = CONFIG.replace("[methods.FedAvg]", "[methods.Other]").replace('name = "mlp"', 'name = "joining_nets:Net"')
    assert "joining_nets" in text
    experiment.run_experiment(configs.parse(text, "c"), tmp_path / "run")
    new = tuple(_new_client(tmp_path)[1])
    assert qupel.adapt(tmp_path / "run", new, cell="QuPeL", bits=2).quantized == [{"3.weight": 2}]
    alone = tmp_path / "run/cells/QuPeL-s0/w.safetensors"
    with pytest.raises(UserError, match=r"importing joining_nets is not allowed here; allowed: none"):
        qupel.adapt(alone, new, bits=2)
    assert qupel.adapt(alone, new, bits=2, allow=["joining_nets"]).quantized == [{"3.weight": 2}]


# --- the user's own generators ---


def test_global_random_states_are_not_touched():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    done = qupel.fit(nn.Sequential(nn.Dropout(0.1), *mlp()), people(), unseen=1, layers=["3"], **SHORT)
    done.adapt(NEW, bits=2)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert np.array_equal(np.random.get_state()[1], expected[1])
    assert random.getstate() == expected[2]


def test_schedules_go_on_by_the_federations_clock():
    """Its epochs, not those of the new client, which may have far more data."""
    job = replace(make_job(two_phases(Local())), sample=0.5)
    origin = adapting.Origin.of(job, (Layout.of(job.module).flatten(job.module),), "x")
    assert origin.job.epoch_steps == job.steps_per_epoch == 2 * job.client_epoch_steps
    many = replace(origin.job, parts=job.parts[:1], plans=job.plans[:1], data=job.data)
    assert many.clock(2, 1) == replace(job.clock(2, 1), share=1.0)


def test_a_network_with_settings_of_its_own_adapts_from_its_file(tmp_path):
    """Its parameters are one tensor there, whatever the number of layers; what is adapted names the network, too."""
    text = """
        bits = 2
        rounds = 2
        local_steps = 1
        [split]
        clients = 2
        [model]
        name = "mlp"
        args = {hidden = [8, 8, 8]}
        [methods.QuPeL]
        recipe = "qupel"
        warmup = 0.0
        finetune = 0.0
    """
    (tmp_path / "c.toml").write_text(text)
    call = [sys.executable, "-m", "qupel", "run", "c.toml", "--out", "run"]
    subprocess.run(call, cwd=tmp_path, check=True, capture_output=True)
    origin = adapting.read_origin(tmp_path / "run/cells/QuPeL-s0/w.safetensors")
    assert [m.out_features for m in origin.job.module if hasattr(m, "out_features")] == [8, 8, 8, 10]
    data = sources.load("digits")
    new = (data.train.inputs[:20], data.train.targets[:20])
    done = qupel.adapt(tmp_path / "run", new, bits=2)
    done.save_one(0, tmp_path / "mine.safetensors")
    call = [sys.executable, "-m", "qupel", "export", "mine.safetensors", "--to", "onnx"]
    subprocess.run(call, cwd=tmp_path, check=True, capture_output=True)
    assert isinstance(qupel.load(tmp_path / "mine.safetensors"), nn.Module)
