"""Federations on Flower itself: real SuperLink, SuperNodes and resident workers on loopback, with TLS and node keys.

What does not need Flower's processes is tested in test_flower_rounds.py. Every test ends what it started and looks
whether anything is left.
"""

import http.server
import itertools
import json
import os
import signal
import socketserver
import ssl
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flower_bench as bench
from flower_fleet import begun, exported, fleets, job_of, local, qupel, rounds_done, until
from qupel.engine import group as groups
from qupel.engine.rounds import run
from qupel.flower import frames, processes
from qupel.flower.folder import flower_environment, free_port
from qupel.flower.processes import end, start
from qupel.flower.server import conduct
from qupel.flower.tryout import SERVER, Running, up
from qupel.parts.base import vector
from qupel.run import config as configs
from qupel.run.experiment import engine_for, run_experiment
from qupel.run.jobs import build_job, cells
from tiny import saved_rows, timeless

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Message, RecordDict

BINARIES = Path(sys.executable).parent


@pytest.fixture
def make(tmp_path):
    """make(count, text) -> a federation that is up; ended after the test, with nothing left."""
    with fleets(tmp_path) as start_it:
        yield start_it


def ranks(text, folder):
    """(w, model files, lines) of two ranks of torch.distributed."""
    config = configs.parse(text, "test")
    (result,) = run_experiment(config, folder, workers=2, start=groups.start)
    files = [p.read_bytes() for p in sorted((folder / "cells").glob("*/models/*"))]
    (cell,) = cells(config)
    job = build_job(config, cell)
    with groups.start(2) as group, engine_for(config, cell, job, group, 2, folder) as engine:
        return vector(run(job, engine).w), files, result["lines"]


@pytest.mark.slow
def test_six_supernodes_end_with_the_reference_engines_bits(make, tmp_path):
    """Final w, every client's state and every client's model file, on one process, two ranks and Flower; bits are known
    to the clients only."""
    text = bench.config(6, "digits_cnn").replace("evaluate_every = 2", "evaluate_every = 5")
    federation, config = make(6, text)
    table = qupel("up", federation.folder).stdout  # once more: all is there, nothing is started
    assert table.count("online") == 6
    done = qupel("run", federation.folder, config, "--name", "r")
    assert "round 5/5" in done.stdout
    w, files, rows, lines = local(text, tmp_path / "local")
    other_w, other_files, other_lines = ranks(text, tmp_path / "ranks")
    assert torch.equal(other_w, w)
    assert other_files == files
    assert timeless(other_lines) == timeless(lines)
    target = federation.folder / "runs" / "r"
    assert torch.equal(bench.final_w(target), w)
    assert len(files) == 6
    assert exported(federation, job_of(federation, "r")) == files
    for i in range(6):
        state = federation.client(i) / "state" / job_of(federation, "r") / "round-000004"
        assert list(saved_rows(state).values()) == [rows[i]]
    told = [json.loads(text) for text in (target / "metrics.jsonl").read_text().splitlines()]
    same = {"seconds": 0, "weights": None}  # centers stay with their client
    assert [{**line, **same} for line in told] == [{**line, **same} for line in lines]
    assert "nothing was running" not in qupel("down", federation.folder).stdout
    assert "nothing was running" in qupel("down", federation.folder).stdout


def test_strangers_are_refused(make, tmp_path):
    """A node without a key, with an unregistered key, without TLS or with another authority never gets in."""
    from qupel.flower.folder import certificate_pem, make_authority

    federation, _ = make(1)
    other = tmp_path / "other"
    qupel("init", other, "--clients", 1)
    (tmp_path / "wrong.crt").write_bytes(certificate_pem(make_authority()[0]))
    running = Running.of(federation)
    authority, key = "--root-certificates", "--auth-supernode-private-key"
    good = federation.supernode(0, running.address, 0)[4:]  # what Flower's own program is told
    options = dict(zip(good[::2], good[1::2], strict=True))
    unregistered, wrong = str(other / "clients/client-0/key"), str(tmp_path / "wrong.crt")
    attempts = {
        "unregistered key": ({**options, key: unregistered}, [], "code: 2004"),
        "no key": ({k: v for k, v in options.items() if k != key}, [], "code: 2001"),
        "no TLS": ({k: v for k, v in options.items() if k not in (key, authority)}, ["--insecure"], "Exit Code: 305"),
        "wrong authority": ({**options, authority: wrong}, [], "CERTIFICATE_VERIFY_FAILED"),
    }
    environment = os.environ | flower_environment(tmp_path / "home") | {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
    started = {}
    for what, (pairs, flags, _) in attempts.items():
        pairs["--port"], pairs["--max-retries"] = str(free_port()), "1"
        command = [str(BINARIES / "flower-supernode"), *(x for pair in pairs.items() for x in pair), *flags]
        started[what] = start(what, command, tmp_path / what, environment)
    try:
        until(lambda: not any(p.alive() for p in started.values()), 120)
    finally:
        end(list(started.values()))
    for what, (_, _, words) in attempts.items():
        said = (tmp_path / what).read_text()
        assert "SuperNode ID" not in said, what
        assert words in said, what
    with running.control() as control:
        assert [(node.name, node.status) for node in control.nodes()] == [("client-0", "online")]


EVIL = """
import json
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()
Path("{marks}").joinpath(f"imported-{{__import__('os').getppid()}}").touch()

@client.query()
def answer(message, context):
    Path("{marks}").joinpath("ran").touch()
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    ask = [Message(RecordDict({{"q": ConfigRecord({{"x": 1}})}}), n, "query") for n in grid.get_node_ids()]
    told = [m.error.reason if m.has_error() else "" for m in grid.send_and_receive(ask, timeout=120)]
    Path(context.run_config["run"]).write_text(json.dumps(told))
"""


@pytest.mark.slow
def test_a_foreign_bundle_and_a_revoked_key(make, tmp_path):
    """A bundle with our app's name and other code is refused by every client before any of it runs there; a client that
    is revoked at a running server takes no part from then on, nor after the next `up`."""
    from qupel.flower import templates
    from qupel.flower.folder import bundle

    federation, config = make(2)
    (tmp_path / "evil" / "app").mkdir(parents=True)
    marks = tmp_path / "marks"
    marks.mkdir()
    text = templates.APP.replace("qupel.flower.server_app:app", "evil:server")
    (tmp_path / "evil/app/pyproject.toml").write_text(text.replace("qupel.flower.client_app:app", "evil:client"))
    (tmp_path / "evil/app/evil.py").write_text(EVIL.format(marks=marks))
    (tmp_path / "evil/app/LICENSE").write_text("MIT")
    bundle(tmp_path / "evil")
    with Running.of(federation).control() as control:
        control.start(tmp_path / "evil/app.fab", {"run": str(tmp_path / "told.json")})
        until(lambda: (tmp_path / "told.json").exists(), 180)
    assert json.loads((tmp_path / "told.json").read_text()) == ["The FAB could not be verified."] * 2
    assert len(list(marks.iterdir())) == 1  # at the server, whose own it is
    assert "refuses its key from now on" in qupel("revoke", federation.folder, 1).stdout
    qupel("run", federation.folder, config, "--name", "r", "--set", "rounds=2")
    lines = (federation.folder / "runs" / "r" / "progress.jsonl").read_text().splitlines()
    assert [json.loads(line)["refused"] for line in lines] == [["client 1: not connected"]] * 2
    end([Running.of(federation).processes["client-1"]])
    table = qupel("up", federation.folder).stdout
    assert (table.count("online"), table.count("revoked")) == (1, 1)
    assert not Running.of(federation).alive("client-1")
    # Its owner starts it all the same.
    command = federation.supernode(1, Running.of(federation).address, free_port())
    environment = os.environ | flower_environment(tmp_path / "home") | {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
    again = start("again", [sys.executable, *command[1:], "--max-retries", "1"], tmp_path / "again", environment)
    try:
        until(lambda: not again.alive(), 120)
    finally:
        end([again])
    assert "SuperNode ID" not in (tmp_path / "again").read_text()


class Grid:
    """Two SuperNodes as flwr 1.41 has them: for every message that comes, all answers that are there are sent, and only
    if there is none it waits for one. `held`: per node, answers that wait for the next message."""

    def __init__(self):
        self.held, self.sent, self.kinds, self.numbers = {0: [], 1: []}, [], [], itertools.count()

    def get_nodes(self):
        return [SimpleNamespace(name=f"client-{i}", node_id=i, registered_at="") for i in self.held]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self.numbers))
            header = json.loads(message.content["question"]["header"])
            self.kinds.append((header["kind"], message.metadata.dst_node_id))
            held = self.held[message.metadata.dst_node_id]
            told = RecordDict({"answer": ConfigRecord({"header": json.dumps({"to": header["kind"]})})})
            answers = [*held, Message(content=told, reply_to=message)]
            self.sent += answers[: max(1, len(held))]
            held[:] = answers[max(1, len(held)) :]
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        found = [m for m in self.sent if m.metadata.reply_to_message_id in ids]
        self.sent = [m for m in self.sent if m.metadata.reply_to_message_id not in ids]
        return found


def test_supernodes_that_are_one_answer_behind_are_pinged(monkeypatch):
    """What a killed server leaves: an answer that is kept back comes with the next message."""
    from flwr.supercore.task_identity import TaskIdentity

    from qupel.flower.server_app import FlowerPost

    for name in ("_task_id", "_run_id", "_node_id"):  # Flower makes messages only within a run
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = Grid()
    post = FlowerPost(grid)
    stale = Message(RecordDict(), dst_node_id=1, message_type="train")
    stale.metadata.__dict__["_message_id"] = "of a run that is over"
    grid.held[1].append(Message(content=RecordDict(), reply_to=stale))

    def ask():
        grid.kinds.clear()
        replies = list(post.ask({"kind": "train", "round": 0}, b"", [0, 1], seconds=1.0))
        assert sorted((r.client, r.header["to"]) for r in replies) == [(0, "train"), (1, "train")]
        return grid.kinds

    train = [("train", 0), ("train", 1)]
    assert ask() == [*train, ("ping", 1)]
    assert ask() == [*train, ("ping", 1)]
    grid.held[1].clear()  # its process was started again
    assert ask() == train


def test_a_server_that_outlived_its_superlink(tmp_path):
    """It is ended before another one goes on with its run, and how it ended is not how that one did."""
    from qupel.flower.drive import ending
    from qupel.flower.server_app import alone

    before = start("server", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", dict(os.environ))
    before.note(tmp_path / "server.json")
    alone(tmp_path)
    assert not before.alive()
    assert processes.Process.noted("server", tmp_path / "server.json").pid == os.getpid()
    (tmp_path / "end.json").write_text('{"run": 6, "state": "broken", "message": ""}')
    assert ending(tmp_path, 7) is None
    assert ending(tmp_path, 6)["state"] == "broken"


# --- faults; long, because Flower takes its time to see that somebody is gone ---


def in_round(target, federation, client, round):
    """The round is under way, and this client has its message."""
    log = federation.folder / "logs" / f"client-{client}.log"
    return rounds_done(target) >= round and log.read_text().count("Receiving: train message") > round


def long(count, rounds):
    text = bench.config(count).replace("rounds = 5", f"rounds = {rounds}")
    return text.replace("evaluate_every = 2", f"evaluate_every = {rounds}")


@pytest.mark.slow
def test_a_supernode_is_killed_within_a_round(make, tmp_path):
    """The round ends by its deadline without it, the others go on, it rejoins with its state: final w and every model
    are those of a federation in which it was merely absent in the rounds that refused it."""
    text = long(3, 20)
    federation, config = make(3, text)
    target = federation.folder / "runs" / "r"
    with begun(federation, config, "--name", "r", "--minimum", 2, "--deadline", 40) as process:
        until(lambda: in_round(target, federation, 1, 2), process=process)
        os.kill(Running.of(federation).processes["client-1"].pid, signal.SIGKILL)
        until(lambda: rounds_done(target) >= 4)  # the others go on
        assert process.poll() is None
        up(federation, 3)  # comes back as soon as Flower lets it
        out, err = process.communicate(timeout=3600)
    assert process.returncode == 0, f"{out}\n{err}"
    lines = [json.loads(line) for line in (target / "progress.jsonl").read_text().splitlines()]
    missed = [line["round"] - 1 for line in lines if any(r.startswith("client 1:") for r in line["refused"])]
    assert missed
    assert missed[-1] < 19  # it was back before the end
    assert all(r.startswith("client 1:") for line in lines for r in line["refused"])
    print("rounds without client 1:", [m + 1 for m in missed], {r for line in lines for r in line["refused"]})
    outcomes = []
    for executed in (True, False):  # its worker may have trained the round in which the answer was lost
        folder = tmp_path / f"executed-{executed}"
        post = bench.Direct(bench.clients(folder))
        answer = post.clients[1].answer

        def absent(header, body, answer=answer, executed=executed):
            if header["kind"] == "train" and header["round"] in missed:
                if executed and header["round"] == missed[0]:
                    answer(header, body)
                return {"client": 1, "error": "away"}, b""
            return answer(header, body)

        post.clients[1].answer = absent
        w = vector(conduct(bench.request(folder / "run", text, minimum=2), post).w)
        outcomes.append((w.numpy().tobytes(), bench.models(folder)))
    assert (bench.final_w(target).numpy().tobytes(), exported(federation, job_of(federation, "r"))) in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["superlink", "serverapp"])
def test_the_server_is_killed_and_resumed(make, tmp_path, victim):
    """Killed within a round with all it has started, resumed: the undisturbed run's bits; no step counts twice."""
    killed_and_resumed(make, tmp_path, long(2, 5), 2, victim)


@pytest.mark.slow
def test_three_machines_with_three_networks_are_killed_and_resumed(make, tmp_path):
    """QuPeD: each machine builds its own network, which its own client.toml names; the server knows w's alone."""
    text = long(3, 5).split("[methods")[0] + '[methods.QuPeD]\nrecipe = "quped"\nshare = "nothing"\n'
    own = 'networks = ["mlp", "digits_cnn", {name = "mlp", args = {hidden = [20, 12]}}]\n'
    federation, files = killed_and_resumed(
        make, tmp_path, text.replace('name = "mlp"\n', f'name = "mlp"\n{own}'), 3, "superlink"
    )
    assert len(set(map(len, files))) == 3
    told = [(federation.client(i) / "client.toml").read_text() for i in range(3)]
    assert ['network = "mlp"' in told[0], 'network = "digits_cnn"' in told[1], '"hidden"' in told[2]] == [True] * 3
    tasks = json.loads((federation.folder / "runs" / "r" / "request.json").read_text())
    assert tasks["label"] == "QuPeD"


def killed_and_resumed(make, tmp_path, text, count, victim):
    """(the federation, the clients' files) after a server that died in its third round."""
    federation, config = make(count, text)
    target = federation.folder / "runs" / "r"
    with begun(federation, config, "--name", "r") as process:
        until(lambda: in_round(target, federation, 0, 2), process=process)
        server = Running.of(federation).processes[SERVER].pid
        if victim == "superlink":
            os.killpg(server, signal.SIGKILL)
        else:
            apps = [p for p in descendants(server) if "flwr-serverapp" in p[1]]
            os.kill(apps[0][0], signal.SIGKILL)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 1, err
    assert "--resume" in err
    up(federation, count)
    done = qupel("run", federation.folder, config, "--name", "r", "--resume")
    assert "round 5/5" in done.stdout
    w, files, rows, _ = local(text, tmp_path / "local")
    assert torch.equal(bench.final_w(target), w)
    assert exported(federation, job_of(federation, "r")) == files
    for i in range(count):
        state = federation.client(i) / "state" / job_of(federation, "r") / "round-000004"
        assert list(saved_rows(state).values()) == [rows[i]]
    return federation, files


def descendants(pid):
    """(pid, command line) of everything that a process has started."""
    found, parents = [], {pid}
    for path in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent in parents:
            parents.add(int(path.parent.name))
            found.append((int(path.parent.name), command))
    return found


class Liar:
    """In place of a client's resident worker: passes questions on to the real client and changes its answers."""

    def __init__(self, folder: Path, twist) -> None:
        from qupel.flower.worker import open_client

        self.client, self.twist = open_client(folder / "client.toml"), twist
        self.state = folder / "state"
        self.state.mkdir(mode=0o700, exist_ok=True)
        liar = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                header, body = frames.receive(self.request)
                frames.send(self.request, *liar.twist(header, *liar.client.answer(header, body)))

        with frames.inside(self.state):
            self.server = socketserver.UnixStreamServer(frames.SOCKET, Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.slow
def test_liars_are_left_out(make):
    """Over Flower: NaN, a wrong length, an old round, another client's number; the honest two are averaged."""

    def twist(header, reply, body):
        if header["kind"] != "train":
            return reply, body
        how = header["round"]
        if how == 0:
            broken = np.frombuffer(body, np.float32).copy()
            broken[7] = np.nan
            return reply, broken.tobytes()
        if how == 1:
            return reply, body[:-4]
        if how == 2:
            return {**reply, "round": 0}, body
        return {**reply, "client": 0}, body

    federation, config = make(3, long(3, 5))
    liar = Liar(federation.client(2), twist)
    try:
        qupel("run", federation.folder, config, "--name", "r", "--minimum", 2)
    finally:
        liar.close()
    target = federation.folder / "runs" / "r"
    lines = [json.loads(line) for line in (target / "progress.jsonl").read_text().splitlines()]
    said = [line["refused"] for line in lines]
    words = ["not finite", "upload has", "answered round 1 when asked for round 3", "says it is client 0"]
    for refused, word in zip(said, words, strict=False):
        assert len(refused) == 1
        assert refused[0].startswith("client 2:")
        assert word in refused[0]
    total = 0
    for i in range(2):
        kept = federation.client(i) / "state" / job_of(federation, "r") / "round-000004" / "upload.bin"
        total = total + torch.frombuffer(bytearray(kept.read_bytes()), dtype=torch.float32).double()
    assert torch.equal(bench.final_w(target), (total / 2).float())


class Fleet(http.server.BaseHTTPRequestHandler):
    """The proxy rule of DIR/server/nginx.conf: /v1/fleet/ is passed on, everything else is not there."""

    inner, authority, passed, hidden = "", "", [], []
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        import httpx

        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.path.startswith("/v1/fleet/"):
            self.hidden.append(self.path)
            self.send_error(404)
            return
        self.passed.append(self.path)
        context = ssl.create_default_context(cafile=self.authority)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in {"host", "connection"}}
        answer = httpx.post(
            f"https://{self.inner}{self.path}", content=body, headers=headers, verify=context, timeout=60
        )
        self.send_response(answer.status_code)
        for key, value in answer.headers.items():
            if key.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(key, value)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_clients_need_the_fleet_interface_only(make):
    """Behind a proxy with the rule of nginx.conf a client works, and the control interface is out of reach."""
    from qupel.flower.control import Control

    federation, config = make(1, bench.config(1).replace("clients = 1", 'kind = "one"\nclients = 1'))
    running = Running.of(federation)
    Fleet.inner, Fleet.authority = running.address, str(federation.authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(federation.server / "server.crt", federation.server / "server.key")
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fleet)
    proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        outside = f"127.0.0.1:{proxy.server_port}"
        end([running.processes["client-0"]])
        command = federation.supernode(0, outside, free_port())
        until(lambda: not any(n.status == "online" for n in nodes_of(running)))
        running.launch("client-0", command, federation.client(0) / "home")
        until(lambda: any(n.status == "online" for n in nodes_of(running)))
        qupel("run", federation.folder, config, "--name", "r", "--set", "rounds=2")
        assert bench.final_w(federation.folder / "runs" / "r").isfinite().all()
        assert any("pull-messages" in path for path in Fleet.passed)
        with Control(outside, federation.authority) as control:
            assert not control.answers()
        assert any("/v1/control/" in path for path in Fleet.hidden)
        assert not any("/v1/control/" in path for path in Fleet.passed)
    finally:
        proxy.shutdown()
        proxy.server_close()


def nodes_of(running):
    with running.control() as control:
        return control.nodes()


@pytest.mark.slow
def test_asked_to_stop_and_resumed(make, tmp_path):
    """Ctrl-C stops after the round with a checkpoint and exit code 130; resumed, the undisturbed run's bits."""
    text = long(2, 6)
    federation, config = make(2, text)
    target = federation.folder / "runs" / "r"
    with begun(federation, config, "--name", "r", "--upload", "int8") as process:
        until(lambda: rounds_done(target) >= 2, process=process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert 2 <= rounds_done(target) < 6
    qupel("run", federation.folder, config, "--name", "r", "--resume", "--upload", "int8")
    post = bench.Direct(bench.clients(tmp_path / "direct", 2))
    expected = conduct(bench.request(tmp_path / "direct/run", text, clients=2, minimum=2, upload="int8"), post)
    assert torch.equal(bench.final_w(target), vector(expected.w))
    again = qupel("export", federation.folder, "r").stdout
    assert again.count("bytes") == 2
