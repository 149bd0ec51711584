"""Nodes that come late: into the rounds, or when they are over; what they must agree on; what they may have of their
own."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import flower_bench as bench
import qupel
from flower_bench import Direct, Reply
from qupel.core.layout import Layout
from qupel.engine.job import Job
from qupel.flower import boundary
from qupel.flower.client import Client
from qupel.flower.server import adapt, conduct, open_fleet
from qupel.flower.task import load_client
from qupel.run import config as configs
from qupel.run.jobs import build_job, cells, load_data, split_clients
from qupel.util.errors import UserError
from test_flower_boundary import PRIVACY, question
from test_flower_parts import final_of, local, same_lines, told
from tiny import same


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- into the rounds ---


def test_a_node_that_comes_late_takes_part_from_its_first_round_on(tmp_path, monkeypatch):
    """Client 2 is there from the third round on: the bits of a federation that does not draw it before."""
    post = Direct(bench.clients(tmp_path))
    post.gone = {2}

    def twist(client, header, reply):
        if header["kind"] == "train" and header["round"] == 1:
            post.gone = set()
        return [reply]

    post.twist = twist
    finished = conduct(bench.request(tmp_path / "run", minimum=2), post)
    trained = [(round, client) for kind, round, client in post.asked if kind == "train"]
    assert sorted(round for round, client in trained if client == 2) == [2, 3, 4]
    monkeypatch.setattr(Job, "cohort", lambda self, round: [0, 1] if round < 2 else [0, 1, 2])
    assert same(finished.w, final_of(bench.config()))


# --- after the end ---


@pytest.fixture
def ended(tmp_path):
    """A finished run without client 2, which is there now."""
    paths = bench.clients(tmp_path)
    post = Direct(paths)
    post.gone = {2}
    run_folder = bench.request(tmp_path / "run", minimum=2)
    conduct(run_folder, post)
    post.gone = set()
    return run_folder, post


def own_data(number: int, count: int = 3):
    """What a client of `flower_bench` has, as `qupel.adapt` takes it."""
    config = configs.parse(bench.config(count), "test")
    data = load_data("digits", None, None)
    part = split_clients(config, data, 0)[0][number]
    train, test = part.train(data), part.test(data)
    return train.inputs, train.targets, test.inputs, test.targets


def test_a_node_is_served_after_the_end_on_its_own_machine(ended, tmp_path):
    """The model is the one that `qupel.adapt` makes of the run's own file; nothing but its size and scores is told."""
    run_folder, post = ended
    assert "error" in json.loads((run_folder / "exports.json").read_text())[2]
    post.asked.clear()
    (answer,) = adapt(run_folder, open_fleet(run_folder, post))
    assert [(kind, client) for kind, _, client in post.asked] == [("adapt", 2)]  # the others have models of the run
    file = tmp_path / "state-2/job-1/model.safetensors"
    expected = qupel.adapt(run_folder, own_data(2), bits=3)
    written = qupel.load(file)
    assert torch.equal(Layout.of(written).flatten(written), Layout.of(written).flatten(expected.models[0]))
    assert answer == {
        "client": 2,
        "bytes": file.stat().st_size,
        "test": expected.test[0],
        "shared": expected.before[0],
    }
    assert json.loads((run_folder / "adapted.json").read_text()) == [answer]


def test_those_that_are_named_are_served(ended):
    run_folder, post = ended
    (run_folder / "adapt.json").write_text("[0, 2]")
    assert [a["client"] for a in adapt(run_folder, open_fleet(run_folder, post))] == [0, 2]


def test_a_number_beyond_the_federations_own_can_be_served(ended, tmp_path):
    """It could not take part, but it needs nobody's place to adapt."""
    run_folder, post = ended
    path = tmp_path / "client-9.toml"
    np.savez(tmp_path / "mine.npz", classes=10, **dict(zip(
        ("train_inputs", "train_targets", "test_inputs", "test_targets"), map(np.asarray, own_data(1)), strict=True
    )))  # fmt: skip
    path.write_text('client = 9\nbudget = "96 KiB"\nstate = "state-9"\n[data]\nname = "mine.npz"\n')
    client = Client(load_client(path))
    task = json.loads(open_fleet(run_folder, post).task.model_dump_json())
    w = (run_folder / "w.bin").read_bytes()
    header, body = client.answer(question("adapt", task=task) | {"round": 4}, w)
    assert (header["client"], body) == (9, b"")
    assert header["bytes"] <= 96 * 1024
    refused, _ = client.answer(question("train", task=task), w)
    assert refused == {"error": "client 9 in a job for 3 clients, numbered from 0"}


def test_a_private_node_says_that_it_has_a_model_and_no_more(ended, tmp_path):
    run_folder, post = ended
    with post.paths[2].open("a") as file:
        file.write(PRIVACY)
    post.restart(2)
    (answer,) = adapt(run_folder, open_fleet(run_folder, post))
    assert answer == {"client": 2, "bytes": None, "test": None}
    assert (tmp_path / "state-2/job-1/model.safetensors").exists()
    assert not (tmp_path / "state-2/_privacy.json").exists()  # nothing of its data has left it


# --- what they must agree on ---


def test_another_network_is_refused_at_hello_with_both_hashes(tmp_path):
    def twist(client, header, reply):
        if header["kind"] == "hello" and client == 1:
            return [Reply(client, {**reply.header, "layout": "0" * 16})]
        return [reply]

    post = Direct(bench.clients(tmp_path), twist)
    run_folder = bench.request(tmp_path / "run", minimum=2)
    mine = open_fleet(run_folder, post).task.layout
    left = json.loads((run_folder / "clients.json").read_text())["left_out"]
    assert left == {"1": f"its network has layout {'0' * 16}, the server's {mine}"}
    with pytest.raises(UserError, match=f"client 1: its network has layout 0{{16}}, the server's {mine}"):
        open_fleet(bench.request(tmp_path / "other"), post)


def test_a_client_compares_it_with_every_task(tmp_path):
    post = Direct(bench.clients(tmp_path))
    fleet = open_fleet(bench.request(tmp_path / "run"), post)
    task = json.loads(fleet.task.model_dump_json()) | {"layout": "f" * 16}
    header, _ = post.clients[0].answer(question("train", task=task), b"")
    assert header == {"error": f"the server's network has layout {'f' * 16}, this client's {fleet.task.layout}"}


@pytest.mark.parametrize(
    "wanted",
    [
        {"model": "late_nets:Net"},
        {"model": "mlp", "loss": "late_nets:loss"},
        {"model": "mlp", "metrics": ["macro_f1", "late_nets:metric"]},
    ],
)
def test_what_is_not_allowed_is_not_imported_at_hello(tmp_path, monkeypatch, wanted):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_nets.py").write_text("raise SystemExit('imported')\n")
    client = Client(load_client(bench.clients(tmp_path, 1)[0]))
    header, _ = client.answer(question("hello") | {"wanted": wanted}, b"")
    assert header == {"error": boundary.NOT_ALLOWED}
    assert "late_nets" not in sys.modules


# --- their own business ---


def test_metrics_are_told_as_the_local_engine_has_them(tmp_path):
    task = '[task]\nmetrics = ["macro_f1", "top5"]\njudge_by = "macro_f1"\n'
    text = bench.config().replace("[model]", f"{task}[model]")
    run_folder = bench.request(tmp_path / "run", text)
    conduct(run_folder, Direct(bench.clients(tmp_path)))
    files, lines = local(text, tmp_path / "local")
    assert bench.models(tmp_path) == files  # which say how well their model is judged
    assert "test_macro_f1" in lines[-1]
    same_lines(told(run_folder), lines)


def test_a_client_without_metrics_does_not_stop_the_run(tmp_path):
    """An older or a lying one: its other numbers count."""
    text = bench.config().replace("[model]", '[task]\nmetrics = ["top5"]\n[model]')

    def twist(client, header, reply):
        more = {"test_metrics": []} if header["kind"] == "evaluate" and client == 0 else {}
        return [Reply(client, {**reply.header, **more}, reply.body)]

    post = Direct(bench.clients(tmp_path), twist)
    finished = conduct(bench.request(tmp_path / "run", text), post)
    assert len(finished.lines[-1]["clients"]["test"]) == 3


def test_data_of_ones_own_loader(tmp_path):
    """Beside client.toml; no `allow` is needed for what the client's own file names."""
    (tmp_path / "late_data.py").write_text(
        "from qupel.data import sources\n"
        "def load():\n"
        "    d = sources.load('digits')\n"
        "    return d.train.inputs[:50], d.train.targets[:50], d.test.inputs[:30], d.test.targets[:30]\n"
    )
    paths = bench.clients(tmp_path, 2)
    for i, path in enumerate(paths):
        path.write_text(f'client = {i}\nbits = 2\nstate = "state-{i}"\n[data]\nname = "late_data:load"\n')
    post = Direct(paths)
    conduct(bench.request(tmp_path / "run", bench.config(2), clients=2, minimum=2), post)
    assert len(bench.models(tmp_path, count=2)) == 2


def test_a_late_part_of_a_try_outs_split(tmp_path):
    """With `split.unseen` the numbers after those that train are the clients that come later."""
    parsed = configs.parse(bench.config().replace("clients = 3", "clients = 4\nunseen = 1"), "test")
    job = build_job(parsed, cells(parsed)[0])
    assert len(job.parts) == 3
    path = tmp_path / "client-3.toml"
    split = bench.SPLIT.format(count=4) + "unseen = 1\n"
    path.write_text(f'client = 3\nbits = 2\nstate = "state-3"\n{split}')
    header, _ = Client(load_client(path)).answer(question("hello"), b"")
    seen, later = split_clients(parsed, job.data, 0)
    assert (header["client"], header["samples"]) == (3, len(later[0].train_rows))
    assert replace(later[0]).train_rows.tolist() not in [p.train_rows.tolist() for p in seen]
