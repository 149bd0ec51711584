"""Clients with networks of their own: from Python, from a config, over machines, in files, reports, and later on."""

import json

import numpy as np
import pytest
import torch

import flower_bench as bench
import qupel
from flower_bench import Direct
from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.deploy.file import load
from qupel.engine.choice import choose
from qupel.flower.server import conduct
from qupel.parts.phase import Phase
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import build_job, cells
from qupel.tasks.zoo import build
from qupel.util.errors import UserError
from test_quped import deep_mlp, federation, quped
from tiny import INPUTS, blobs, mlp, same, wide_mlp

SETTINGS = qupel.Settings(warmup=0.3, finetune=0.3)


def people(count=4):
    data, parts = blobs((10,) * count)
    split = ((data.train, part.train_rows) for part in parts), ((data.test, part.test_rows) for part in parts)
    return [
        (a.inputs[r].numpy(), a.targets[r].numpy(), b.inputs[q].numpy(), b.targets[q].numpy())
        for (a, r), (b, q) in zip(*split, strict=True)
    ]


def fit(networks=None, **settings):
    wide, deep = wide_mlp(), deep_mlp()
    usual = {"networks": [None, wide, deep, wide], "bits": [2, 1, 3, 32], "method": "quped", "rounds": 6, "batch": 5}
    usual |= {"local_steps": 3, "settings": SETTINGS, "quiet": True}
    return qupel.fit(mlp(), people(), **usual | ({} if networks is None else {"networks": networks}) | settings)


def weights(done):
    return [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in done.models]


@pytest.fixture(scope="module")
def done():
    return fit()


def test_every_client_ends_with_its_own_network(done, tmp_path):
    sizes = [sum(p.numel() for p in m.parameters()) for m in done.models]
    expected = [sum(p.numel() for p in m.parameters()) for m in (mlp(), wide_mlp(), deep_mlp(), wide_mlp())]
    assert sizes == expected
    assert [len(q) for q in done.quantized] == [1, 1, 2, 0]
    assert [row["network"] for row in done.table()] == [
        "shared",
        "Sequential (279)",
        "Sequential (289)",
        "Sequential (279)",
    ]
    inputs = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(0))
    for path, model in zip(done.save(tmp_path), done.models, strict=True):
        other = {279: wide_mlp, 289: deep_mlp}.get(sum(p.numel() for p in model.parameters()), mlp)(5)
        with torch.no_grad():
            assert torch.equal(qupel.load(path, other)(inputs), model(inputs))


def test_a_fit_that_goes_on_gives_the_same_bits(done, tmp_path):
    class Enough(Exception):
        pass

    def stop(progress):
        if progress.round == 4:
            raise Enough

    with pytest.raises(Enough):
        fit(out=tmp_path, watch=stop, evaluate_every=1)
    again = fit(out=tmp_path, evaluate_every=1)
    assert same(weights(again), weights(done))
    with pytest.raises(UserError, match="was made by a run with other settings"):
        fit([None, None, deep_mlp(), wide_mlp()], out=tmp_path, evaluate_every=1)


def test_clients_that_come_later_have_a_network_of_their_choice(done):
    one, two = people(2)
    new = qupel.adapt(done, [one, two, one], networks=["Sequential (289)", None, wide_mlp(3)], bits=[2, 2, 32])
    assert [len(q) for q in new.quantized] == [2, 1, 0]
    assert all(np.isfinite(new.metrics[-1]["test_loss"]) for _ in new.models)
    with pytest.raises(UserError, match=r"networks: 'resnet' is none of the run's; allowed: Sequential \(279\)"):
        qupel.adapt(done, [one], networks=["resnet"])


def test_some_of_the_clients_may_be_kept_out():
    kept = fit(unseen=[*people(2)])
    assert [len(w) for w in weights(kept.unseen)] == [len(w) for w in weights(kept)[:2]]


def test_what_a_method_or_the_clients_do_not_allow():
    with pytest.raises(UserError, match="qupel ties x to w weight by weight, but client 1 has another network"):
        fit(method="qupel", quantizer="prox", settings=None)
    with pytest.raises(UserError, match="networks: 2 entries for 4 clients"):
        fit([None, mlp()])
    with pytest.raises(UserError, match=r"networks: a int; allowed are a torch\.nn\.Module, and None"):
        fit([None, 3, None, None])


# --- in a config ---

CONFIG = """
rounds = 4
local_steps = 3
batch = 8
evaluate_every = 2
bits = [2, 32, 3]
[model]
name = "mlp"
args = {hidden = [12, 10]}
networks = ["mlp", "digits_cnn", {name = "mlp", args = {hidden = [20, 16, 8]}, layers = ["3.weight"]}]
[split]
clients = 4
train_per_client = 20
test_per_client = 12
unseen = 1
[methods.QuPeD]
recipe = "quped"
warmup = 0.25
finetune = 0.25
[methods.QuPeL]
recipe = "qupel"
warmup = 0.25
finetune = 0.25
networks = []
"""
THIRD = 'mlp {"hidden": [20, 16, 8]}'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, run_experiment(configs.parse(CONFIG, "test"), folder)


def test_a_config_names_the_clients_networks(finished):
    folder, (own, shared) = finished
    assert own["networks"] == ["", "digits_cnn", THIRD]
    assert "networks" not in shared
    found = [load(p) for p in sorted((folder / "cells" / "QuPeD-s0" / "models").glob("client-*"))]
    assert [(f.about.model, f.about.args) for f in found] == [
        ("mlp", {"hidden": [12, 10]}),
        ("digits_cnn", {}),
        ("mlp", {"hidden": [20, 16, 8]}),
    ]
    assert [list(f.names) for f in found] == [["3.weight"], [], ["3.weight"]]
    for f in found:
        f.model()  # needs nothing but the file
    (late,) = (folder / "cells" / "QuPeD-s0" / "models").glob("unseen-*")
    assert load(late).about.model == "mlp"


def test_the_digest_of_a_cell_knows_its_networks():
    from qupel.run.jobs import fingerprint

    def digests(text):
        config = configs.parse(text, "test")
        return [fingerprint(config, cell, build_job(config, cell).phases) for cell in cells(config)]

    plain = CONFIG.replace('networks = ["mlp", "digits_cnn", {name = "mlp", args = {hidden = [20, 16, 8]}', "#")
    first, second = digests(CONFIG)
    assert digests(CONFIG.replace("[20, 16, 8]", "[20, 16, 9]"))[0] != first
    assert digests(plain)[1] == second  # of what a method does not use nothing depends


def test_workers_and_stacks_give_what_one_process_gives(finished, tmp_path):
    folder, _ = finished
    run_experiment(configs.parse(CONFIG, "test"), tmp_path / "two", workers=2)
    for path in sorted((folder / "cells").glob("*/models/*")):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(folder)).read_bytes(), path.name
    config = configs.parse(CONFIG, "test")
    job = build_job(config, cells(config)[0])
    assert choose(job, "on").stacked  # a look at every network


def test_a_client_that_comes_later_to_a_run(finished):
    folder, _ = finished
    rng = np.random.default_rng(0)
    client = rng.integers(0, 255, (16, 1, 8, 8)).astype(np.uint8), np.arange(16) % 10
    done = qupel.adapt(folder, client, cell="QuPeD", networks=[THIRD], bits=2)
    assert [list(q) for q in done.quantized] == [["3.weight", "5.weight"]]


def test_the_summary_groups_clients_by_network_and_bits(finished):
    folder, _ = finished
    text = (folder / "summary.md").read_text()
    for words in ("| QuPeD | mlp | 2 |", "| QuPeD | digits_cnn | 32 |", "| QuPeD | mlp", "| QuPeL | mlp | 3 |"):
        assert words in text, words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"digits_cnn"', '"digits"'), r"model\.networks.*unknown model 'digits'"),
        (('{name = "mlp", args', '{named = "mlp", args'), r"model\.networks"),
        (("networks = []", ""), r"\w+ ties x to w weight by weight, but client 1 has another network"),
        (('layers = ["3.weight"]', 'layers = ["none"]'), r"no layer.*none"),
        (('recipe = "quped"', 'recipe = "quped"\nlambda_p = 2.0'), r"lambda_p = 2\.0: of quped it is a share"),
    ],
)
def test_mistakes_are_told(change, words):
    def build():
        config = configs.parse(CONFIG.replace(*change), "test")
        return [build_job(config, cell) for cell in cells(config)]

    with pytest.raises(UserError, match=words):
        build()


# --- over machines ---


def test_three_machines_with_three_networks_have_the_local_engines_bits(tmp_path):
    """The server knows w's network alone; killed clients are there again from what is on their disks."""
    text = (
        bench.config(3).split("[methods")[0]
        + "[methods.QuPeL]\n"
        + 'recipe = "quped"\nshare = "nothing"\nfinetune = 0.2\n'
    )
    networks = ["mlp", "digits_cnn", {"name": "mlp", "args": {"hidden": [20, 12]}}]
    shown = ['"mlp"', '"digits_cnn"', '{name = "mlp", args = {hidden = [20, 12]}}']
    run_folder, paths = bench.request(tmp_path / "run", text), bench.clients(tmp_path)
    for path, network in zip(paths, shown, strict=True):
        path.write_text(f"network = {network}\n{path.read_text()}")
    post = Direct(paths)

    def twist(client, header, reply):
        if header["kind"] == "train" and header["round"] == 2:
            post.restart(client)
        return [reply]

    post.twist = twist
    w = conduct(run_folder, post).w
    config = configs.parse(text.replace('name = "mlp"\n', f'name = "mlp"\nnetworks = [{", ".join(shown)}]\n'), "test")
    assert [n if isinstance(n, str) else n.model_dump(exclude={"layers"}) for n in config.model.networks] == networks
    run_experiment(config, tmp_path / "local")
    files = sorted((tmp_path / "local" / "cells").glob("*/models/*"))
    assert bench.models(tmp_path) == [p.read_bytes() for p in files]
    assert len(w[0]) == Layout.of(build("mlp", (1, 8, 8), 10, 0)).size
    assert not any("digits_cnn" in json.dumps(header) for header in post.headers)


def test_means_of_networks_are_refused_there(tmp_path):
    text = bench.config(3).split("[methods")[0] + '[methods.QuPeL]\nmethod = {name = "quped", share = "architecture"}\n'
    with pytest.raises(UserError, match='share = "architecture": clients on Flower do not tell their networks'):
        conduct(bench.request(tmp_path / "run", text), Direct(bench.clients(tmp_path)))


# --- phases ---


def test_phases_of_several_methods_that_take_any_network():
    """Local first: each network's own start; then QuPeD."""
    from qupel.engine.inline import Inline
    from qupel.engine.rounds import run
    from qupel.parts.methods.local import Local

    first = Phase(Local(eta1=Schedule(0.1)), 1)
    job = federation(quped())
    job = job.with_phases([first, *job.phases])
    with Inline(job) as engine:
        finished = run(job, engine)
    assert [line["method"] for line in finished.lines][-1] == "quped"
