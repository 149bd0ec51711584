"""The federation's own code, client and server, with the post in this process: equal to the reference engine bit for
bit, and steady against clients that are late, gone, killed, repeated or wrong. The same over Flower: test_flower.py."""

import json
import math
import runpy
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import flower_bench as bench
from flower_bench import Direct, Reply
from qupel.engine.inline import Inline
from qupel.engine.rounds import Failed, Stopped, run
from qupel.flower.server import conduct, open_fleet
from qupel.flower.task import PROTOCOL
from qupel.parts.base import vector
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import build_job, cells
from qupel.util.errors import UserError
from tiny import beginning, same


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(w, model files, lines) of the reference engine."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    config = configs.parse(bench.config(), "test")
    (result,) = run_experiment(config, folder)
    files = [p.read_bytes() for p in sorted((folder / "cells").glob("*/models/*"))]
    job = build_job(config, cells(config)[0])
    with Inline(job) as engine:
        w = run(job, engine).w
    return w, files, result["lines"]


def told(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def same_lines(a, b):
    drop = ("seconds", "weights")  # centers stay with their client
    assert [{k: v for k, v in line.items() if k not in drop} for line in a] == [
        {k: v for k, v in line.items() if k not in drop} for line in b
    ]


def test_equal_to_the_reference_engine(tmp_path, reference):
    """Final w, every personal model's file and every metric, with mixed bits, which the server never sees."""
    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path))
    finished = conduct(run_folder, post)
    w, files, lines = reference
    assert same(finished.w, w)
    assert torch.equal(bench.final_w(run_folder), vector(w))
    assert bench.models(tmp_path) == files
    same_lines(told(run_folder), lines)
    assert all('"bits"' not in json.dumps(header) for header in post.headers)
    exports = json.loads((run_folder / "exports.json").read_text())
    assert [e["bytes"] for e in exports] == [len(f) for f in files]
    assert [e["test"] for e in exports] == lines[-1]["clients"]["test"]
    assert not (run_folder / "checkpoints").exists()


def test_some_of_the_clients_a_round_equal_the_reference_engine(tmp_path):
    """Clients know from the task how often they are expected: late ones, their travel and step sizes are the same."""
    text = "sample = 0.4\n" + bench.config().replace("warmup = 0.4", "warmup = 0.0")
    (result,) = run_experiment(configs.parse(text, "test"), tmp_path / "reference")
    run_folder = bench.request(tmp_path / "run", text)
    conduct(run_folder, Direct(bench.clients(tmp_path)))
    files = [p.read_bytes() for p in sorted((tmp_path / "reference" / "cells").glob("*/models/*"))]
    assert bench.models(tmp_path) == files
    same_lines(told(run_folder), result["lines"])


def test_workers_that_die_between_rounds_lose_nothing(tmp_path, reference):
    """Every client is a new process in every round: all it has is on its disk."""
    post = Direct(bench.clients(tmp_path))

    def die(client, header, reply):
        post.restart(client)
        return [reply]

    post.twist = die
    finished = conduct(bench.request(tmp_path / "run"), post)
    assert same(finished.w, reference[0])
    assert bench.models(tmp_path) == reference[1]


@pytest.mark.parametrize(("at", "answered"), [(0, 0), (0, 1), (1, 3), (3, 2), (4, 0), (4, 3)])
def test_server_killed_within_a_round(tmp_path, reference, at, answered):
    """It dies after so many clients have trained the round and answered; resumed, no step counts twice."""

    class Killed(BaseException):
        pass

    count = 0

    def kill(client, header, reply):
        nonlocal count
        if header["kind"] == "train" and header["round"] == at:
            if count == answered:
                raise Killed
            count += 1
        return [reply]

    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path), kill)
    if answered < 3:
        with pytest.raises(Killed):
            conduct(run_folder, post)
    else:  # all have answered; the server dies before its checkpoint
        with pytest.raises(Killed):
            conduct(run_folder, post, watch=lambda p: None, should_stop=lambda: stop_at(post, at, Killed))
    post.twist = lambda client, header, reply: [reply]
    finished = conduct(run_folder, post)
    assert same(finished.w, reference[0])
    assert bench.models(tmp_path) == reference[1]
    assert json.loads((run_folder / "attempt.json").read_text()) == 2


def test_the_servers_newest_checkpoints_are_damaged(tmp_path, reference):
    """It goes on from the oldest of three; clients still have the states that it needs."""
    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        conduct(run_folder, post, should_stop=lambda: stop_at(post, 4, KeyboardInterrupt))
    damaged = sorted((run_folder / "checkpoints").glob("round-*"))[1:]
    assert [path.name for path in damaged] == ["round-000003", "round-000004"]
    for path in damaged:
        (path / "w.bin").write_bytes(b"")
    finished = conduct(run_folder, post)
    assert post.asked.count(("train", 2, 1)) == 2
    assert same(finished.w, reference[0])
    assert bench.models(tmp_path) == reference[1]


def test_a_round_that_could_not_be_kept_is_not_half_of_one(tmp_path, reference):
    """Trained, then something fails before its state is kept: asked again, it trains from the state it had before."""
    post = Direct(bench.clients(tmp_path))

    def fill(client, header, reply):
        if client == 0 and header["kind"] == "train" and header["round"] == 2:
            generations = post.clients[1].job.generations  # who is asked next
            real = generations.keep

            def keep(*_):
                generations.keep = real
                raise OSError("no space left on device")

            generations.keep = keep
            post.twist = lambda client, header, reply: [reply]
        return [reply]

    post.twist = fill
    real_ask = post.ask
    post.ask = lambda header, body, clients, seconds: real_ask(header, body, sorted(clients, reverse=True), seconds)
    finished = conduct(bench.request(tmp_path / "run"), post)
    assert post.asked.count(("train", 2, 1)) == 2
    assert same(finished.w, reference[0])
    assert bench.models(tmp_path) == reference[1]


def stop_at(post, at, error):
    """`should_stop` is asked between the mean and the checkpoint: the worst moment to die."""
    if sum(1 for kind, round, _ in post.asked if kind == "train" and round == at) == 3:
        raise error
    return False


def test_stopped_on_request_and_resumed(tmp_path, reference):
    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path))
    with pytest.raises(Stopped, match="after round 1 of 5"):
        conduct(run_folder, post, should_stop=lambda: True)
    finished = conduct(run_folder, post)
    assert same(finished.w, reference[0])


def test_a_round_asked_twice_counts_once(tmp_path):
    """Asked again, the same bytes; another w in a new attempt starts from the generation before; an old round is
    refused; nothing of this moves the state."""
    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path))
    heard = []

    def listen(client, header, reply):
        if client == 2 and header["kind"] == "train":
            heard.append((header, reply))
        return [reply]

    post.twist = listen
    bodies = []
    original = post.ask

    def ask(header, body, clients, seconds):
        bodies.append((header, body))
        return original(header, body, clients, seconds)

    post.ask = ask
    conduct(run_folder, post)
    trained = [(h, b) for h, b in bodies if h["kind"] == "train"]
    client = post.clients[2]
    for k in (1, 2, 3, 4):  # all kept generations answer again
        header, body = trained[k]
        reply, payload = client.answer(header, body)
        assert (reply, payload) == (heard[k][1].header, heard[k][1].body)
    header, body = trained[4]
    other = (np.frombuffer(body, np.float32) + np.float32(1e-3)).tobytes()
    reply, _ = client.answer(header, other)
    assert "is over" in reply["error"]  # the same attempt does not ask for a round with two models
    reply, _ = client.answer(*trained[0])
    assert "round 1 is over: this client is at round 5" in reply["error"]
    again, payload = client.answer({**header, "attempt": 9}, other)
    assert "error" not in again
    assert payload != heard[4][1].body
    reply, _ = client.answer(header, body)
    assert "is over" in reply["error"]  # attempt 1 has been overtaken
    _, payload = client.answer({**header, "attempt": 10}, body)  # from the generation before, once more
    assert payload == heard[4][1].body
    reply, _ = client.answer({**trained[1][0], "attempt": 11}, other)
    assert "cannot go back to round 2: of the past, round 2 is kept" in reply["error"]


# --- clients that are gone, late or wrong ---


def undisturbed_without(tmp_path, missing, rounds):
    """The w of a federation in which these clients are not there in these rounds."""
    folder = tmp_path / "expected"
    post = Direct(bench.clients(folder))

    def drop(client, header, reply):
        return [] if header["kind"] == "train" and header["round"] in rounds and client in missing else [reply]

    real = [c.answer for c in post.clients]
    for i in missing:

        def answer(header, body, i=i):
            if header["kind"] == "train" and header["round"] in rounds:
                return {"client": i, "error": "away"}, b""
            return real[i](header, body)

        post.clients[i].answer = answer
    post.twist = drop
    return conduct(bench.request(folder / "run", minimum=2), post).w


def spoil(**changes):
    def twist(client, header, reply):
        return [Reply(client, {**reply.header, **changes}, reply.body)]

    return twist


def nan(client, header, reply):
    body = bytearray(reply.body)
    body[0:4] = struct.pack("<f", math.nan)
    return [Reply(client, reply.header, bytes(body))]


LIES = {
    "NaN": (nan, "upload holds values that are not finite"),
    "too short": (lambda c, h, r: [Reply(c, r.header, r.body[:-4])], "upload has"),
    "nothing": (lambda c, h, r: [Reply(c, r.header)], "sent no upload"),
    "too long": (lambda c, h, r: [Reply(c, r.header, r.body + b"\0" * 8)], "upload has"),
    "old round": (spoil(round=0), "answered round 1 when asked for round 2"),
    "no round": (spoil(round="x"), "round = 'x': allowed is a whole number"),
    "another job": (spoil(job="other"), "answered job 'other'"),
    "another client": (spoil(client=1), "says it is client 1"),
    "no samples": (spoil(samples=-1), "samples = -1: allowed is a whole number"),
    "an error": (lambda c, h, r: [Reply(c, {"error": "boom"})], "boom"),
    "a fault": (spoil(fault="its own fault"), "its fields are client, fault, job,"),
    "late": (lambda c, h, r: [], "no answer before the deadline"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_left_out_and_named(tmp_path, lie):
    """In round 2 client 2 answers wrongly: w is the mean of the others, as if it had not been there."""
    twist, words = LIES[lie]

    def only(client, header, reply):
        return (
            twist(client, header, reply)
            if (client, header["kind"], header.get("round")) == (2, "train", 1)
            else [reply]
        )

    run_folder = bench.request(tmp_path / "run", minimum=2)
    post = Direct(bench.clients(tmp_path), only)
    with pytest.raises(Stopped):
        conduct(run_folder, post, should_stop=lambda: len([a for a in post.asked if a[:2] == ("train", 1)]) == 3)
    w = bench.final_w(next((run_folder / "checkpoints").glob("round-000002")))
    assert torch.equal(w, mean_of_round_two(tmp_path, without=2))
    (line,) = told(run_folder)
    assert line["refused"] == [f"client 2: {line['refused'][0].removeprefix('client 2: ')}"]
    assert words in line["refused"][0]


def mean_of_round_two(tmp_path, without):
    """The mean of the kept answers to round 2 of all clients but one, in float64 and in client order."""
    total, count = 0, 0
    for i in range(3):
        if i != without:
            body = (tmp_path / f"state-{i}" / "job-1" / "round-000001" / "upload.bin").read_bytes()
            total, count = total + torch.frombuffer(bytearray(body), dtype=torch.float32).double(), count + 1
    return (total / count).float()


def test_duplicates_and_strangers_are_not_averaged(tmp_path, reference):
    """Every answer comes twice, the second one changed, and one comes from a client that was not asked."""

    def twice(client, header, reply):
        changed = Reply(client, {**reply.header, "loss": 99.0}, b"\0" * len(reply.body))
        return [reply, changed, Reply(17, reply.header, reply.body)]

    finished = conduct(bench.request(tmp_path / "run"), Direct(bench.clients(tmp_path), twice))
    assert same(finished.w, reference[0])
    same_lines(told(tmp_path / "run"), reference[2])


def test_a_client_that_is_gone_for_a_while_rejoins_with_its_state(tmp_path):
    """Offline in rounds 2 and 3, the others go on; then it takes part again from its own model, not from the start."""
    run_folder = bench.request(tmp_path / "run", minimum=2)
    post = Direct(bench.clients(tmp_path))

    def leave(progress):
        post.gone = {1} if progress.round in (1, 2) else set()

    finished = conduct(run_folder, post, watch=leave)
    refused = [text for line in told(run_folder) for text in line["refused"]]
    assert refused == ["client 1: not connected"] * 2
    assert [r for kind, r, i in post.asked if (kind, i) == ("train", 1)] == [0, 3, 4]
    assert same(finished.w, undisturbed_without(tmp_path, {1}, {1, 2}))
    assert "number" in told(run_folder)[0]["clients"]


def test_too_few_clients(tmp_path):
    """A round that too few answer is asked again, then the run ends; it can be resumed."""
    run_folder = bench.request(tmp_path / "run", minimum=3)
    post = Direct(bench.clients(tmp_path), lambda c, h, r: [] if c == 0 and h["kind"] == "train" else [r])
    with pytest.raises(
        Failed, match=r"fewer than 3 clients answered soundly \(client 0: no answer before the deadline"
    ):
        conduct(run_folder, post)
    assert [a for a in post.asked if a == ("train", 0, 1)] == [("train", 0, 1)] * 3
    post.gone = {2}
    with pytest.raises(Failed, match="2 of 3 clients are connected, 3 are needed"):
        conduct(run_folder, post)


def test_every_client_counts_by_its_samples(tmp_path):
    """weighted = true: shares are what the clients tell."""
    before, after = "train_per_client = 20\ntest_per_client = 12", 'kind = "dirichlet"'
    text = bench.config().replace(before, after).replace("rounds = 5", "rounds = 5\nweighted = true")
    paths = bench.clients(tmp_path)
    for path in paths:
        path.write_text(path.read_text().replace(before, after))
    finished = conduct(bench.request(tmp_path / "run", text), Direct(paths))
    config = configs.parse(text, "test")
    job = build_job(config, cells(config)[0])
    assert len({job.share(i) for i in range(3)}) > 1
    with Inline(job) as engine:
        assert same(run(job, engine).w, finished.w)


def test_a_claim_of_samples_costs_nothing(tmp_path):
    """A client that claims a thousand million needs no room for them, and counts once (with weighted = true: for ten
    medians, see test_flower_hostile.py)."""
    run_folder = bench.request(tmp_path / "run", bench.config())

    def claim(client, header, reply):
        return [Reply(client, {**reply.header, "samples": 10**9}, reply.body) if client == 1 else reply]

    fleet = open_fleet(run_folder, Direct(bench.clients(tmp_path), claim))
    assert [len(p.train_rows) for p in fleet.job.parts] == [20, 10**9, 20]
    assert all(p.train_rows.strides == (0,) for p in fleet.job.parts)
    trained = list(fleet.train(0, beginning(fleet.job).w, range(3)))
    assert all(t.fault is None for t in trained)
    assert [fleet.job.share(i) for i in range(3)] == [1.0] * 3
    assert fleet.task.epoch_steps == 20 // 8


# --- a client's own business ---


def test_own_data_own_budget(tmp_path):
    """A client's .npz holds all it has; its budget decides its bits; its file fits."""
    from qupel.data import sources
    from qupel.deploy.file import load

    data = sources.load("digits")
    for i in range(2):
        rows, tests = slice(100 * i, 100 * i + 60), slice(20 * i, 20 * i + 20)
        arrays = {"train_inputs": data.train.inputs[rows], "train_targets": data.train.targets[rows]}
        arrays |= {"test_inputs": data.test.inputs[tests], "test_targets": data.test.targets[tests], "classes": 10}
        np.savez(tmp_path / f"own-{i}.npz", **arrays)
        size = "budget = '90 KiB'" if i else "bits = 3"
        (tmp_path / f"client-{i}.toml").write_text(
            f'client = {i}\n{size}\nstate = "state-{i}"\n[data]\nname = "own-{i}.npz"\n'
        )
    post = Direct([tmp_path / f"client-{i}.toml" for i in range(2)])
    run_folder = bench.request(tmp_path / "run", clients=2, minimum=2)
    conduct(run_folder, post)
    exports = json.loads((run_folder / "exports.json").read_text())
    assert exports[1]["bytes"] <= 90 * 1024
    assert all(0 <= e["test"] <= 1 for e in exports)
    packed = load(tmp_path / "state-1" / "job-1" / "model.safetensors")
    assert packed.about.client == "client 1"
    assert packed.about.extra["budget"] == 90 * 1024
    assert json.loads((run_folder / "clients.json").read_text())["samples"] == [60, 60]


def test_first_answers_may_fail(tmp_path, reference):
    """On a busy machine the first message to a client may get lost: it is asked again."""
    post = Direct(bench.clients(tmp_path))

    def lose(client, header, reply):
        lost = header["kind"] == "hello" and post.asked.count(("hello", None, client)) <= client
        return [Reply(client, {"error": "error 5: node unavailable"})] if lost else [reply]

    post.twist = lose
    assert same(conduct(bench.request(tmp_path / "run"), post).w, reference[0])
    assert [post.asked.count(("hello", None, i)) for i in range(3)] == [1, 2, 3]


def test_data_of_another_kind_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", train_inputs=np.zeros((4, 3), np.float32), train_targets=[0, 1, 0, 1],
             test_inputs=np.zeros((4, 3), np.float32), test_targets=[0, 1, 0, 1])  # fmt: skip
    paths = bench.clients(tmp_path, 2)
    paths[1].write_text('client = 1\nbits = 2\n[data]\nname = "own.npz"\n')
    with pytest.raises(UserError, match=r"client 1: inputs \(3,\) and 2 classes, most have"):
        conduct(bench.request(tmp_path / "run", clients=2, minimum=2), Direct(paths))


def test_private_clients_tell_no_scores_and_never_the_same_noise(tmp_path):
    """Clipped and noisy uploads, no loss, no accuracy; a repeated round repeats its noise; another client's differs."""
    more = "[privacy]\nclip = 0.5\nepsilon = 1.0\ndelta = 1e-5\nsensitivity = 1e-4\n"
    run_folder = bench.request(tmp_path / "run")
    post = Direct(bench.clients(tmp_path, more=more))
    first = conduct(run_folder, post)
    line = told(run_folder)[-1]
    assert "test" not in line
    assert "train_loss" not in line
    assert [e["test"] for e in json.loads((run_folder / "exports.json").read_text())] == [None] * 3
    uploads = [(tmp_path / f"state-{i}/job-1/round-000004/upload.bin").read_bytes() for i in range(3)]
    assert len(set(uploads)) == 3
    again = conduct(bench.request(tmp_path / "other", job="job-2"), post)
    assert not same(first.w, again.w)  # noise is the machine's, not the seed's


def test_private_uploads_have_noise_for_twice_the_clip(tmp_path):
    """Two uploads of norm `clip` each can be 2 * clip apart: a client without a sensitivity is safe for that."""
    privacy = "[privacy]\nclip = 0.5\nepsilon = 1.0\ndelta = 1e-5\n"
    post, bare = Direct(bench.clients(tmp_path / "a", more=privacy)), Direct(bench.clients(tmp_path / "b"))
    run_folder = bench.request(tmp_path / "run")
    fleets = [open_fleet(run_folder, p) for p in (post, bare)]
    w = beginning(fleets[0].job).w
    noisy, plain = ([d.upload.rows[0] for d in fleet.train(0, w, range(3))] for fleet in fleets)
    w = w[0]
    noise = []
    for upload, honest in zip(noisy, plain, strict=True):
        moved = honest - w
        noise.append(upload - w - moved * min(1.0, 0.5 / float(moved.norm())))
    found, expected = float(torch.cat(noise).std()), 2 * 0.5 * math.sqrt(2 * math.log(1.25e5))
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_shorter_uploads(tmp_path, reference, codec):
    """Half or a quarter of the bytes, close to the exact run; workers that die keep their residual; the local engine
    with the codec in between, which benchmarks/flower_uploads.py measures, gives the same bits."""
    run_folder = bench.request(tmp_path / "run", upload=codec)
    post = Direct(bench.clients(tmp_path))

    def die(client, header, reply):
        post.restart(client)
        return [reply]

    post.twist = die
    finished = conduct(run_folder, post)
    exact = reference[0][0]
    away = float((finished.w[0] - exact).norm() / exact.norm())
    assert 0 < away < (1e-3 if codec == "fp16" else 2e-2)
    size = len(exact)
    assert told(run_folder)[-1]["upload_bytes"] == (2 * size if codec == "fp16" else size + 4 * -(-size // 256))
    script = Path(__file__).parents[1] / "benchmarks" / "flower_uploads.py"
    config = configs.parse(bench.config(), "test")
    job = build_job(config, cells(config)[0])
    with runpy.run_path(str(script))["Coded"](job, codec) as engine:
        assert same(run(job, engine).w, finished.w)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bits = 2\nbudget = '1 MB'\n", "give either bits or budget"),
        ("", "give either bits or budget"),
        ("bits = 9\n", "bits = 9: allowed are 1 to 8"),
        ("bits = 2\nbit = 3\n", "unknown key 'bit'"),
        ("bits = 2\n[privacy]\nclip = 1.0\nepsilon = 3.0\ndelta = 1e-5\n", "privacy.epsilon"),
        ("bits = 2\n[data]\nname = 'nothing.npz'\n", "nothing.npz: no such file"),
    ],
)
def test_mistakes_in_a_client_config(tmp_path, text, words):
    path = tmp_path / "client.toml"
    path.write_text(f"client = 0\n{text}")
    with pytest.raises(UserError, match=words):
        Direct([path])


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"kind": "train"},
        {"kind": "hello", "protocol": PROTOCOL},
        {"kind": "hello", "protocol": 2, "seed": 0},
        {"kind": "train", "protocol": PROTOCOL, "task": {"job": "../x"}},
        {"kind": "x", "protocol": PROTOCOL},
    ],
)
def test_a_question_that_is_none_is_answered_with_an_error(tmp_path, header):
    reply, body = Direct(bench.clients(tmp_path, 1)).clients[0].answer(header, b"")
    assert reply["error"]
    assert body == b""
