"""Every part over the federation's own client and server, with the post in this process: the bits of the local engine,
also where the server was killed; parts of one's own; and a server that goes back to an older checkpoint."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flower_bench as bench
from flower_bench import Direct, Reply
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.flower.boundary import DECLINED, NOT_ALLOWED
from qupel.flower.server import conduct, export, open_fleet
from qupel.flower.wire import noise_deviation
from qupel.parts.base import Upload, vector
from qupel.parts.methods import methods
from qupel.parts.servers import servers
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import build_job, cells
from qupel.util.errors import UserError
from tiny import beginning, rows_of, same, saved_rows


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(method, server="mean", more="", count=3, rounds=(2, 3)):
    """FedAvg, then a method, as phases: states, rows and the server's memory change in between."""
    quantizer = "" if "quantizer" not in getattr(method, "__dataclass_fields__", {}) else ', quantizer = "prox"'
    name = method if isinstance(method, str) else methods.name_of(method)
    first, second = rounds
    return f"""{bench.config(count).split("[methods")[0]}
[methods.QuPeL]
phases = [{{rounds = {first}, method = "fedavg"}},
          {{rounds = {second}, method = "{name}"{quantizer}, server = "{server}"{more}}}]
"""


def local(text, folder):
    """(model files, lines) of the local engine."""
    (result,) = run_experiment(configs.parse(text, "test"), folder)
    return [p.read_bytes() for p in sorted((folder / "cells").glob("*/models/*"))], result["lines"]


def final_of(text, engine=Inline):
    parsed = configs.parse(text, "test")
    job = build_job(parsed, cells(parsed)[0])
    with engine(job) as made:
        return run(job, made).w


def told(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def same_lines(lines, others, *more):
    """Centers, and what a method tells beside its losses, stay with their client."""
    drop = {"seconds", "weights", "train_shared_loss", "train_alone_loss", *more}
    plain = [[{k: v for k, v in line.items() if k not in drop} for line in each] for each in (lines, others)]
    assert plain[0] == plain[1]


class Killed(BaseException):
    pass


def killed(post, at, answered):
    """A twist: the server dies when so many have answered this round; once."""
    count = 0

    def twist(client, header, reply):
        nonlocal count
        if header["kind"] == "train" and header["round"] == at:
            count += 1
            if count == answered:
                post.twist = lambda client, header, reply: [reply]
                raise Killed
        return [reply]

    return twist


# --- every part ---


@pytest.mark.parametrize("server", ["mean", "fedavgm"])
@pytest.mark.parametrize("method", methods)
def test_every_method_with_the_local_engines_bits(tmp_path, method, server):
    """With a server that remembers: killed when two have answered the fourth round, all workers too, and resumed."""
    text = config(methods[method], server)
    run_folder = bench.request(tmp_path / "run", text)
    post = Direct(bench.clients(tmp_path))
    if server != "mean":
        post.twist = killed(post, 3, 2)
        with pytest.raises(Killed):
            conduct(run_folder, post)
        for i in range(3):
            post.restart(i)
    finished = conduct(run_folder, post)
    files, lines = local(text, tmp_path / "local")
    assert bench.models(tmp_path) == files
    assert same(finished.w, final_of(text))
    same_lines(told(run_folder), lines, *(["upload_bytes"] if method == "ifca" else []))  # its shares are sent, too
    assert all(not client.job.job.networks for client in post.clients)


@pytest.mark.parametrize("server", servers)
def test_every_server_with_the_local_engines_bits(tmp_path, server):
    text = config(methods["ifca"], server)
    run_folder = bench.request(tmp_path / "run", text)
    post = Direct(bench.clients(tmp_path))
    post.twist = killed(post, 4, 1)
    with pytest.raises(Killed):
        conduct(run_folder, post)
    assert same(conduct(run_folder, post).w, final_of(text))


@pytest.mark.parametrize("method", ["scaffold", "ifca"])
def test_shorter_uploads_of_several_rows(tmp_path, method):
    """One row, then two, in 8 bits with error feedback: every residual is of its row."""
    text = config(methods[method])
    post = Direct(bench.clients(tmp_path))
    finished = conduct(bench.request(tmp_path / "run", text, upload="int8"), post)
    coded = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "flower_uploads.py"))["Coded"]
    assert same(finished.w, final_of(text, lambda job: coded(job, "int8")))
    assert not same(finished.w, final_of(text))


def test_levels_of_channels(tmp_path):
    """As bits, they are the client's own: the server need not know."""
    text = bench.config().replace('name = "mlp"', 'name = "digits_cnn"\nlevels = "channel"')
    paths = bench.clients(tmp_path)
    for path in paths:
        path.write_text(f'levels = "channel"\n{path.read_text()}')
    post = Direct(paths)
    conduct(bench.request(tmp_path / "run", text), post)
    files, _ = local(text, tmp_path / "local")
    assert bench.models(tmp_path) == files
    assert all("channel" not in json.dumps(header) for header in post.headers)


# --- parts of one's own ---

MY_PARTS = '''
from dataclasses import dataclass, replace
from typing import ClassVar
import torch
from torch import Tensor
from qupel.core.schedule import Schedule
from qupel.parts.base import Deployed, Info, State, Upload
from qupel.parts.methods.base import Alone, OneRow
from qupel.parts.codecs.fp32 import Float32


@dataclass(frozen=True)
class Lonely(Alone):
    eta1: Schedule = Schedule(0.1)
    def start(self, before, plan, problem): return State(before.x, before.w)
    def step(self, s, problem, batch, clock):
        found = problem.own.gradient(s.x, batch)
        return replace(s, x=s.x - self.eta1(clock.time) * found.gradient), Info(loss=found.loss)
    def deployed(self, state): return Deployed(state.x, state.codebook)


@dataclass(frozen=True, kw_only=True)
class Slow(State):
    past: Tensor


@dataclass(frozen=True)
class Slowly(OneRow):
    """Half of the way, with a mean of the past; counts by the share of the way."""

    state_type: ClassVar = Slow
    eta1: Schedule = Schedule(0.1)
    half: float = 0.5
    def start(self, before, plan, problem): return Slow(before.x, before.w, past=torch.zeros_like(before.x))
    def receive(self, state, w): return replace(state, w=w[0], x=w[0])
    def step(self, s, problem, batch, clock):
        found = problem.own.gradient(s.x, batch)
        past = self.half * s.past + found.gradient
        return replace(s, x=s.x - self.eta1(clock.time) * past, past=past), Info(loss=found.loss)
    def upload(self, state): return Upload((state.x,), torch.tensor([1 / (1 + float(state.past.norm()))]))
    def deployed(self, state): return Deployed(state.x, state.codebook)


@dataclass(frozen=True)
class Reversed(Float32):
    def encode(self, row, sent, residual, rng): return row.numpy().tobytes()[::-1], None
    def decode(self, payload, sent): return torch.frombuffer(bytearray(payload[::-1]), dtype=torch.float32)


def net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9), torch.nn.Linear(9, 9),
                               torch.nn.Linear(9, classes))


def half(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets) / 2


def late(outputs, targets):
    return (outputs.argmax(1) > targets).double().mean()


def several(outputs, targets):
    return outputs.mean(0)
'''


@pytest.fixture
def my_parts(tmp_path, monkeypatch):
    """A module of the user's, on the path of this machine."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_own_parts.py").write_text(MY_PARTS)
    monkeypatch.syspath_prepend(tmp_path / "own")


@pytest.mark.parametrize("name", ["Lonely", "Slowly"])
def test_a_method_of_ones_own(tmp_path, my_parts, name):
    """In one file, nothing else is touched: refused in one sentence unless client.toml allows its module; then the bits
    of the local engine. So are a network, a loss, a metric and a codec. Of a metric one number is told."""
    text = config(f"my_own_parts:{name}", more=", eta1 = 0.2")
    text = text.replace(
        'name = "mlp"',
        'name = "my_own_parts:net"\n[task]\nloss = "my_own_parts:half"\nmetrics = ["macro_f1", "my_own_parts:late"]',
    )
    paths = bench.clients(tmp_path)
    run_folder = bench.request(tmp_path / "run", text, upload="my_own_parts:Reversed", minimum=2)
    with pytest.raises(UserError, match=f"0 of 3 clients can take part.* .client 0: {NOT_ALLOWED}; client 1"):
        open_fleet(run_folder, Direct(paths))  # at hello, before any round
    for path in paths:
        path.write_text(f'allow = ["my_own_parts"]\n{path.read_text()}')
    post = Direct(paths)
    post.twist = killed(post, 3, 3)
    with pytest.raises(Killed):
        conduct(run_folder, post)
    finished = conduct(run_folder, post)
    files, lines = local(text, tmp_path / "local")
    assert bench.models(tmp_path) == files
    assert same(finished.w, final_of(text))
    same_lines(told(run_folder), lines, "upload_bytes")  # shares are sent, too
    assert 0 < lines[-1]["test_my_own_parts:late"] < 1


def test_metrics_of_ones_own_that_cannot_be_told(tmp_path, my_parts, capfd):
    """One of several numbers has no field to travel in; a private client tells none; one that fails is seen before
    the first step, and the client's own log says why."""
    text = config(methods["fedavg"], more=", eta1 = 0.2")
    text = text.replace("[model]", '[task]\nmetrics = ["my_own_parts:late", "my_own_parts:several"]\n[model]')
    paths = bench.clients(tmp_path)
    for path, more in zip(paths, ("", PRIVACY, ""), strict=True):
        path.write_text(f'allow = ["my_own_parts"]\n{path.read_text()}{more}')
    run_folder = bench.request(tmp_path / "run", text)
    conduct(run_folder, Direct(paths))
    last = told(run_folder)[-1]["clients"]
    assert [v is None for v in last["my_own_parts:late"]] == [False, True, False]
    assert "my_own_parts:several" not in told(run_folder)[-1]["over_clients"]
    failing = text.replace('"my_own_parts:several"', '"my_own_parts:net"')
    post = Direct(paths)
    with pytest.raises(RuntimeError, match=f"round 1: fewer than 3 .*client 0: {DECLINED}; client 1"):
        conduct(bench.request(tmp_path / "other", failing, job="job-2"), post)
    assert "metric 'my_own_parts:net', client 0: " in capfd.readouterr().err


# --- private clients ---

PRIVACY = "[privacy]\nclip = 0.5\nepsilon = 1.0\ndelta = 1e-5\n"


@pytest.mark.parametrize("method", ["scaffold", "ifca"])
def test_private_clients_of_methods_with_several_rows(tmp_path, method):
    """All rows are clipped together and covered with noise; which model a client chose, its shares, is not told."""
    text = config(methods[method], rounds=(0, 3))
    private = Direct(bench.clients(tmp_path / "a", more=PRIVACY))
    bare = Direct(bench.clients(tmp_path / "b"))
    run_folder = bench.request(tmp_path / "run", text)
    fleets = [open_fleet(run_folder, post) for post in (private, bare)]
    w = beginning(fleets[0].job).w
    assert len(w) == 2
    noise = []
    for hidden, plain in zip(*(fleet.train(0, w, range(3)) for fleet in fleets), strict=True):
        assert hidden.upload.shares is None
        assert hidden.wire == 8 * len(w[0])
        assert (plain.upload.shares is not None) == (method == "ifca")
        shares = [1.0, 1.0] if plain.upload.shares is None else plain.upload.shares.tolist()
        moved = torch.cat([s * (u - a) for s, u, a in zip(shares, plain.upload.rows, w, strict=True)])
        clipped = moved * min(1.0, 0.5 / float(moved.norm()))
        noise.append(vector(hidden.upload.rows) - vector(w) - clipped)
    expected = noise_deviation(1.0, 1e-5, 1.0)
    assert float(torch.cat(noise).std()) == pytest.approx(expected, rel=0.05)
    assert hidden.info == {}


# --- a server that goes back ---

POISONER, POISONED, ROUNDS = 2, 5, 9


def poison(round, rows, w):
    """A model away from what is learned, within the bound; once."""
    return (w[0] - 120 * (rows[0] - w[0]), *rows[1:]) if round == POISONED else rows


def numbers(body):
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


class Poisoned(Direct):
    """The third client's uploads are poison."""

    def ask(self, header, body, clients, seconds):
        for reply in super().ask(header, body, clients, seconds):
            if header["kind"] == "train" and header["round"] > 0 and reply.client == POISONER and reply.body:
                rows, w = numbers(reply.body).chunk(2), numbers(body).chunk(2)
                turned = vector(poison(header["round"], rows, w)).numpy().tobytes()
                reply = Reply(reply.client, reply.header, turned)
            yield reply


class PoisonedInline(Inline):
    def train(self, round, w, clients):
        for done in super().train(round, w, clients):
            if done.client == POISONER and done.upload is not None:
                done = replace(done, upload=Upload(poison(round, done.upload.rows, w)))
            yield done


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    """(config, w, the clients' states, lines, what was told of going back) of the local engine with a checkpoint every
    round, as the server on Flower makes them. SCAFFOLD's controls are states that a round changes."""
    text = config(methods["scaffold"], rounds=(1, ROUNDS - 1), more=", eta1 = 0.1").replace(', quantizer = "prox"', "")
    parsed = configs.parse(text, "test")
    job = replace(build_job(parsed, cells(parsed)[0]), checkpoint_every=1)
    with PoisonedInline(job) as engine:
        finished = run(job, engine, checkpoints=Checkpoints(tmp_path_factory.mktemp("rolled"), "f"))
        states = list(rows_of(engine.shard.store).values())
    (back,) = (b for line in finished.lines for b in line.get("rolled_back", []))
    assert (back["round"], back["suspects"]) == (POISONED + 2, [POISONER])
    return text, finished.w, states, finished.lines, back


def newest(folder, client):
    rounds = sorted((folder / f"state-{client}" / "job-1").glob("round-*"))
    return next(iter(saved_rows(rounds[-1]).values()))


@pytest.mark.parametrize("moment", ["undisturbed", "asking", "going back", "after it"])
def test_clients_go_back_with_the_server(tmp_path, rolled, moment):
    """A client's upload ruins w: w goes back, and the clients' states with it; killed and resumed around it, too."""
    text, w, states, lines, back = rolled
    run_folder = bench.request(tmp_path / "run", text)
    post = Poisoned(bench.clients(tmp_path))
    at = back["round"] - 1  # in which it shows
    if moment in ("asking", "after it"):
        post.twist = killed(post, at + (moment == "after it"), 1)
    calls = []

    def die():
        """Asked for when the round is over and its checkpoint is not yet made."""
        calls.append(1)
        if moment == "going back" and len(calls) == at + 1:
            raise Killed
        return False

    if moment != "undisturbed":
        with pytest.raises(Killed):
            conduct(run_folder, post, should_stop=die)
        for i in range(3):
            post.restart(i)
    finished = conduct(run_folder, post)
    assert same(finished.w, w)
    same_lines(told(run_folder), lines)
    assert [newest(tmp_path, i) for i in range(2)] == states[:2]
    assert post.headers[-1]["undone"] == [[back["to"], at]]
    # the suspect sits out to the end: its last round that counts is one before, also when it is asked later
    kept = bench.models(tmp_path)
    fleet = open_fleet(run_folder, post)
    assert not fleet.undone
    export(run_folder, fleet)
    assert bench.models(tmp_path) == kept
    undone = [p.name for p in (tmp_path / "state-2" / "job-1").glob("round-*") if int(p.name[-6:]) >= back["to"]]
    assert undone  # it is there, and does not count
    shard = post.clients[2].job.shard
    assert list(rows_of(shard.store).values()) == [states[2]]


def test_private_clients_go_back_too(tmp_path, rolled):
    """A round that is taken back stays answered, and paid for; the next one starts from the state before it."""
    text, _, _, _, back = rolled
    run_folder = bench.request(tmp_path / "run", text)
    post = Poisoned(bench.clients(tmp_path))
    asked = []
    real = post.ask

    def ask(header, body, clients, seconds):
        asked.append((header, body))
        return real(header, body, clients, seconds)

    post.ask = ask
    conduct(run_folder, post)
    client = Direct(bench.clients(tmp_path / "private", more=PRIVACY)[:1]).clients[0]
    at = back["round"] - 1
    for header, body in asked:
        if header["kind"] == "train":
            reply, payload = client.answer(header, body)
            assert payload, reply
    again = [(h, b) for h, b in asked if h["kind"] == "train" and h["round"] == at]
    assert client.answer(*again[0])[0]["error"].startswith("round-answered")
    assert json.loads((tmp_path / "private/state-0/_privacy.json").read_text())["rounds"] == ROUNDS
    left = sorted(int(p.name[-6:]) for p in (tmp_path / "private/state-0/job-1").glob("round-*"))
    assert not set(left) & set(range(back["to"], at + 1))


def test_a_client_that_has_not_kept_the_past_says_so(tmp_path):
    """Further back than its generations: it does not begin anew as if nothing had been."""
    run_folder = bench.request(tmp_path / "run", config(methods["scaffold"], rounds=(1, 8)))
    post = Direct(bench.clients(tmp_path))
    fleet = open_fleet(run_folder, post)
    w = methods["scaffold"]().broadcast(beginning(fleet.job).w[0])
    list(fleet.train(0, w[:1], range(3)))
    for round in range(1, 7):
        list(fleet.train(round, w, range(3)))
    fleet.undone = [[2, 6]]
    words = "cannot go back to round 3: of the past, round 4 is kept"
    with pytest.raises(RuntimeError, match=f"client 0: {words}"):
        fleet.train(7, w, range(3))
    fleet.undone = [[4, 6]]
    assert all(done.fault is None for done in fleet.train(7, w, range(3)))
    assert [p.name[-1] for p in sorted((tmp_path / "state-0/job-1").glob("round-*"))] == ["3", "7"]
