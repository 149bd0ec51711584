"""The resident worker as a real process, the folder that `qupel flower init` writes, and processes that are ended."""

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time

import pytest

import flower_bench as bench
from qupel.flower import frames, processes
from qupel.flower.processes import Process, end, start, started
from qupel.flower.task import PROTOCOL
from qupel.flower.thin import WorkerMissing, forward
from qupel.util.errors import UserError

HELLO = {"kind": "hello", "protocol": PROTOCOL, "seed": 0}


def worker_of(state):
    return Process.noted("worker", state / "worker.json")


@pytest.fixture(autouse=True)
def no_child_is_left():
    yield
    processes.reap()  # another command may have ended them
    assert processes._CHILDREN == {}


@pytest.fixture
def client(tmp_path):
    """The config of a client in a folder whose name is too long for a socket; its worker is ended afterwards."""
    (path,) = bench.clients(tmp_path / ("long-" * 30), 1)
    yield path
    state = path.parent / "state-0"
    if (state / "worker.json").exists():
        end([worker_of(state)])


def test_a_worker_is_started_when_needed_and_outlives_questions(client):
    """Started once, asked twice; killed at work, the next question starts another, and the same round gets the same
    answer; another worker on the same state is refused."""
    state = client.parent / "state-0"
    reply, _ = forward(client, HELLO, b"")
    assert reply == {"client": 0, "samples": 20, "shape": [1, 8, 8], "classes": 10, "layout": None}
    first = worker_of(state)
    assert forward(client, HELLO, b"")[0] == reply
    assert worker_of(state) == first
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    second = subprocess.run(
        [sys.executable, "-m", "qupel.flower.worker", str(client)], capture_output=True, text=True, timeout=600
    )
    assert second.returncode == 1
    assert "already has a worker" in second.stderr
    os.kill(first.pid, signal.SIGSTOP)  # the question waits in the socket, then the worker dies
    answers = []
    asking = threading.Thread(target=lambda: answers.append(forward(client, HELLO, b"")))
    asking.start()
    time.sleep(0.3)
    os.kill(first.pid, signal.SIGKILL)
    asking.join(600)
    assert answers == [(reply, b"")]
    assert worker_of(state) != first
    os.kill(worker_of(state).pid, signal.SIGTERM)


def test_a_worker_that_cannot_start_says_why(tmp_path):
    path = tmp_path / "client.toml"
    path.write_text('client = 0\nbits = 2\n[data]\nname = "nowhere.npz"\n')
    with pytest.raises(WorkerMissing, match=r"nowhere.npz: no such file"):
        forward(path, HELLO, b"")
    assert not worker_of(tmp_path / "state").alive()  # it was noted from its start: what loads for long can be ended


def test_idle_workers_end(client):
    """And begin with removing what others have left."""
    client.write_text("idle_minutes = 0.002\n" + client.read_text())
    state = client.parent / "state-0"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = state / "job" / f".answer.json.{gone.stdout.strip()}.tmp"  # of a worker that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    subprocess.run([sys.executable, "-m", "qupel.flower.worker", str(client)], check=True, timeout=600)
    assert (state / "worker.json").exists()
    assert not left.exists()


def test_without_a_resident_worker_questions_wait_for_one_another(client):
    """Two at once would undo each other's rounds."""
    import torch

    from qupel.flower.worker import alone

    threads = torch.get_num_threads()
    client.write_text("resident = false\n" + client.read_text())
    state = client.parent / "state-0"
    state.mkdir()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(forward(client, HELLO, b"")))
    with alone(state):
        asking.start()
        asking.join(1)
        assert answers == []
    asking.join()
    torch.set_num_threads(threads)  # a client takes one
    assert answers[0][0]["samples"] == 20


def test_garbage_does_not_end_a_worker(client):
    state = client.parent / "state-0"
    forward(client, HELLO, b"")
    first = worker_of(state)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 16, b"\0" * 7 + b"\5" + b"\0" * 8 + b"[1,2]"):
        with socket.socket(socket.AF_UNIX) as connection, frames.inside(state):
            connection.connect(frames.SOCKET)
            connection.sendall(garbage)
    assert "error" in frames.ask(state, {"kind": "train"}, b"x" * 10)[0]
    assert forward(client, HELLO, b"")[0]["samples"] == 20
    assert worker_of(state) == first


def test_the_other_side_may_be_faster():
    """On a busy machine a question is read and answered, and the connection closed, before its sender goes on."""
    ours, theirs = socket.socketpair()

    def answer():
        with theirs:
            frames.receive(theirs)
            frames.send(theirs, {"pong": 1})

    other = threading.Thread(target=answer)

    class Preempted(socket.socket):
        def sendall(self, data):
            super().sendall(data)
            other.join()

    other.start()
    with Preempted(fileno=ours.detach()) as connection:
        frames.send(connection, {"kind": "ping"})
        assert frames.receive(connection) == ({"pong": 1}, b"")


def test_the_thin_side_loads_nothing_heavy():
    code = "import sys, qupel.flower.thin; print(sorted({'torch', 'numpy', 'pydantic', 'flwr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- processes ---


def test_only_the_process_that_was_started_is_ended(tmp_path):
    """A process ends with its children; one that has its number by now but another start is left alone."""
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    )
    script += "print(p.pid, flush=True); time.sleep(600)"
    process = start("parent", [sys.executable, "-c", script], tmp_path / "log", dict(os.environ))
    while not (tmp_path / "log").read_text().endswith("\n"):
        time.sleep(0.05)
    child = int((tmp_path / "log").read_text())
    end([Process("parent", process.pid, "another start")])
    assert process.alive()
    assert started(child)
    end([process])
    assert not process.alive()
    limit = time.monotonic() + 10
    while started(child) and time.monotonic() < limit:
        time.sleep(0.05)
    assert started(child) is None


def test_a_process_that_does_not_listen_is_ended_all_the_same(tmp_path):
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(600)"
    )
    process = start("deaf", [sys.executable, "-c", script], tmp_path / "log", dict(os.environ))
    while not (tmp_path / "log").read_text():
        time.sleep(0.05)
    end([process], seconds=0.2)
    assert not process.alive()


# --- init ---


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("cryptography")
    from qupel.flower.folder import init
    from qupel.run import config as configs

    folder = tmp_path_factory.mktemp("made") / "a folder"
    return init(folder, 2, "flower.example.org", 8443, configs.parse(bench.config(2), "test"), "/opt/qupel")


def test_secrets_are_readable_by_their_owner_only(made):
    secrets = [made.server / "ca.key", made.server / "server.key", *(made.client(i) / "key" for i in range(2))]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600] * 4
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    for i in range(2):  # nothing of the server's or another client's secrets goes to a client
        there = {path.name for path in made.client(i).iterdir()}
        assert there == {
            "key", "key.pub", "ca.crt", "client.toml", "start.sh", "qupel-supernode.service", "app.sha256", "peers"
        }  # fmt: skip


def test_certificates_verify(made):
    """Against the authority, for the server's public name and loopback, and for nothing else."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server / "server.crt", made.server / "server.key")
    trusting = ssl.create_default_context(cafile=str(made.authority))

    def shake(name):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            other = threading.Thread(target=lambda: _accept(server, theirs))
            other.start()
            try:
                with trusting.wrap_socket(ours, server_hostname=name):
                    pass
            finally:
                ours.close()
                other.join()

    for name in ("flower.example.org", "127.0.0.1", "localhost"):
        shake(name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake("evil.example.org")


def _accept(context, connection):
    try:
        with context.wrap_socket(connection, server_side=True):
            pass
    except OSError:
        pass


def test_client_configs_are_what_the_config_says(made):
    from qupel.flower.task import load_client

    for i in range(2):
        own = load_client(made.client(i) / "client.toml")
        assert (own.client, own.bits, own.split.clients) == (i, bench.BITS[i], 2)
        assert own.state == made.client(i) / "state"


def test_start_scripts_start_what_they_say(made, tmp_path):
    """With a stand-in for Python that shows how it was called, from wherever the folder was copied to."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@" "$FLWR_HOME" "$FLWR_TELEMETRY_ENABLED"\n')
    (programs / "python").chmod(0o755)
    moved = tmp_path / "another place"
    shutil.copytree(made.client(1), moved)
    environment = {"PATH": os.environ["PATH"], "QUPEL_VENV": str(programs.parent)}
    done = subprocess.run([moved / "start.sh"], capture_output=True, text=True, env=environment, check=True)
    said = done.stdout.splitlines()
    assert said[0] == str(programs / "python")
    assert said[1:4] == ["-m", "qupel.flower.supernode", str(moved)]
    assert said[1:] == [*made.supernode(1, "flower.example.org:8443", 9094, moved)[1:], f"{moved}/home", "0"]
    done = subprocess.run(
        [made.server / "start.sh"], capture_output=True, text=True, env=environment, check=True
    ).stdout.splitlines()
    assert done[1:-2] == made.superlink(18443)[1:]
    assert "--enable-supernode-auth" in done


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower is made of
def test_the_superlink_waits_for_its_database(tmp_path, monkeypatch):
    """Every connection of Flower's own stores: a client whose question meets a locked database must not lose it."""
    sql = pytest.importorskip("flwr.supercore.sql_mixin")
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    from qupel.flower.superlink import PATIENCE, wait_for_database

    monkeypatch.setattr(sql, "SQLITE_PRAGMAS", sql.SQLITE_PRAGMAS)  # put back afterwards
    wait_for_database()
    store = SqlObjectStore(str(tmp_path / "state.db"))
    store.initialize()
    ((found,),) = [tuple(row.values()) for row in store.query("PRAGMA busy_timeout")]
    assert found == int(PATIENCE) >= 60_000


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_units(made, tmp_path):
    """Valid, and with the delay that Flower needs before a node that died may come back."""
    for unit in (made.server / "qupel-superlink.service", made.client(0) / "qupel-supernode.service"):
        text = unit.read_text()
        assert "RestartSec=60" in text
        start_line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        copy = tmp_path / unit.name  # systemd looks for the program
        copy.write_text(text.replace(start_line, "ExecStart=/bin/true").replace("User=qupel", "User=root"))
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
        assert unit.name not in done.stderr, done.stderr


def test_the_proxy_lets_only_the_fleet_in(made):
    text = (made.server / "nginx.conf").read_text()
    assert "listen 8443 ssl" in text
    assert text.count("location") == 2
    assert "location /v1/fleet/ {" in text
    assert "location / { return 404; }" in text


def test_mistakes_of_init(made, tmp_path):
    from qupel.flower.commands import _init
    from qupel.flower.folder import Federation

    with pytest.raises(UserError, match="is not empty"):
        _init(made.folder, 1, "127.0.0.1:1", None, "/opt/qupel")
    for address in ("nowhere", ":8443", "host:", "host:x", "host:99999"):
        with pytest.raises(UserError, match="expected HOST:PORT"):
            _init(tmp_path / "new", 1, address, None, "/opt/qupel")
    with pytest.raises(UserError, match="holds no federation"):
        Federation.open(tmp_path)


def test_a_superlink_that_is_too_busy_to_answer_is_not_gone(tmp_path, monkeypatch):
    """A run is followed to its end over questions that time out; where nobody takes connections, or for too long, it is
    given up."""
    httpx = pytest.importorskip("httpx")
    from qupel.engine.rounds import Failed
    from qupel.flower import drive

    monkeypatch.setattr(drive, "STATUS_SECONDS", 0.0)
    asked = []

    class Busy:
        error = httpx.ReadTimeout("busy")

        def status(self, number):
            asked.append(number)
            if len(asked) == 3:
                (tmp_path / "end.json").write_text('{"run": 7, "state": "done"}')
            raise self.error

    assert set(drive._follow(tmp_path, 0, Busy(), 7)) <= {None}
    assert asked == [7] * 3
    (tmp_path / "end.json").unlink()
    asked.append(0)
    for Busy.error, patience in ((httpx.ConnectError("nobody"), 300.0), (httpx.ReadTimeout("busy"), 0.0)):
        monkeypatch.setattr(drive, "SILENT_SECONDS", patience)
        with pytest.raises(Failed, match="the SuperLink is gone"):
            list(drive._follow(tmp_path, 0, Busy(), 7))
