"""Who is trusted, and for how long: one app by its hash, certificates that end, keys that are revoked; and what is
removed of a federation's folders. With Flower's processes: test_flower.py."""

import datetime
import hashlib
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

import flower_bench as bench
from qupel import cli
from qupel.flower import audit, chain, clean, folder, peers, trust
from qupel.flower.generations import Asked, Generations
from qupel.flower.processes import Process, began, end, start
from qupel.flower.task import load_client, named_modules
from qupel.run import config as configs
from qupel.util.errors import UserError

pytest.importorskip("flwr")


@pytest.fixture
def made(tmp_path):
    return folder.init(tmp_path / "f", 2, "flower.example.org", 8443, configs.parse(bench.config(2), "test"), "/opt/q")


@pytest.fixture
def qupel(capsys, monkeypatch):
    """The command line, in this process: what it says, and its exit code."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qupel", "flower", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


# --- modules of one's own ---

OWN_TASK = '[task]\nmetrics = ["macro_f1", "tryout_metrics:half"]\n[model]'


@pytest.mark.parametrize("address", ["127.0.0.1:8443", "flower.example.org:8443"])
def test_a_try_out_allows_what_its_config_names_and_real_clients_decide_themselves(
    tmp_path, qupel, monkeypatch, address
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "tryout_metrics.py").write_text("def half(outputs, targets):\n    return 0.5\n")
    (tmp_path / "own.toml").write_text(bench.config(2).replace("[model]", OWN_TASK))
    done = qupel("init", tmp_path / "f", "--clients", 2, "--config", tmp_path / "own.toml", "--address", address)
    text = (tmp_path / "f/clients/client-1/client.toml").read_text()
    client = load_client(tmp_path / "f/clients/client-1/client.toml")
    assert 'allow = ["tryout_metrics"]' in done.stdout
    if address.startswith("127"):
        assert (client.allow, client.modules) == (("tryout_metrics",), tmp_path)
        assert "a try-out: every client.toml has" in done.stdout
    else:
        assert (client.allow, client.modules) == ((), None)
        assert '\n# allow = ["tryout_metrics"]' in text
        assert "owners that agree write" in done.stdout


def test_what_a_config_names_is_what_its_jobs_name(tmp_path, monkeypatch):
    """In every place that a client is told of: not the server's part, and no text that only looks like it."""
    monkeypatch.syspath_prepend(tmp_path)
    parts = "import dataclasses\nimport qupel.parts.{}.{} as m\n@dataclasses.dataclass(frozen=True)\nclass P(m.{}): ..."
    for name, words in {"a": ("methods", "local", "Local"), "b": ("quantizers", "prox", "Prox")}.items():
        (tmp_path / f"named_{name}.py").write_text(parts.format(*words))
    (tmp_path / "named_c.py").write_text(parts.format("servers", "mean", "Mean"))
    (tmp_path / "named_d.py").write_text("def f(outputs, targets, gain=1): ...\nnet = f\n")
    text = """
    [model]
    name = "named_d:net"
    args = {text = "named_x:y"}
    [task]
    judge_by = "named_d:f"
    [methods."A:b"]
    method = "named_a:P"
    quantizer = "named_b:P"
    server = "named_c:P"
    """
    assert named_modules(configs.parse(text, "test")) == ["named_a", "named_b", "named_d"]
    assert named_modules(configs.parse(bench.config(), "test")) == []


# --- who signs ---


def test_every_client_knows_the_keys_of_all(made):
    """As `init` writes them, and `renew` for a folder of before; a revoked key is nobody's any more."""
    for number in range(2):
        known = peers.read(made.client(number) / "peers")
        assert sorted(known) == [0, 1]
        signature = peers.signer(made.client(number))(b"text")
        verify = peers.verifier(made.client(1 - number))
        assert verify(number, b"text", signature)
        assert not verify(1 - number, b"text", signature)
        assert not verify(number, b"other", signature)
        assert not verify(7, b"text", signature)
    assert peers.read(made.server / "peers").keys() == {0, 1}
    (made.client(0) / "peers").unlink()
    trust.revoke(made, "client-1")
    trust.renew(made)
    assert sorted(peers.read(made.client(0) / "peers")) == [0]


# --- one app ---


def taken(monkeypatch, content, wanted, fab_id="qupel/qupel-app", version="1.0.0", fab_hash=None, note=lambda *_: None):
    """Whether Flower's own function, held to the bundle `wanted`, takes a message of a run with another one."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode import start_client_internal as node
    from flwr.supernode.nodestate import NodeStateFactory

    from qupel.flower import supernode

    for name in ("_task_id", "_run_id", "_node_id"):  # Flower makes messages only within a run
        monkeypatch.setattr(TaskIdentity, name, 1)
    plain = node._pull_and_store_message, node._verify_fab
    if wanted:
        supernode.pin(wanted, note)
    pinned = node._pull_and_store_message
    store = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=store).state()
    state.set_node_id(1)
    message = Message(RecordDict({"question": ConfigRecord({"header": "{}"})}), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = message.object_id
    run = Run.create_empty(7)
    run.fab_id, run.fab_version, run.fab_hash = fab_id, version, fab_hash or hashlib.sha256(content).hexdigest()
    run.primary_task_type = TaskType.SERVER_APP
    message.metadata.__dict__["_run_id"] = 7
    try:
        pinned(
            state=state, object_store=store.store(), node_config={},
            receive=lambda: (message, get_object_tree(message)), get_run=lambda _: run,
            get_fab=lambda fab_hash, _: Fab(fab_hash, content, {"valid_license": "forged"}),
            pull_object=lambda *_: b"", confirm_message_received=lambda *_: None, trusted_entities=None,
        )  # fmt: skip
    finally:
        node._pull_and_store_message, node._verify_fab = plain
    refused = [m for m in state.get_messages_legacy(is_reply=True) if m.has_error()]
    assert all("could not be verified" in m.error.reason for m in refused)
    known = state.get_run(7) is not None
    assert known != bool(refused)
    return known


def test_only_the_pinned_bundle_is_taken(made, monkeypatch):
    """The very bytes under their own name, and nothing else: a changed app, a forged hash, a name that is a path."""
    ours = (made.folder / "app.fab").read_bytes()
    wanted = (made.client(0) / "app.sha256").read_text().strip()
    assert wanted == hashlib.sha256(ours).hexdigest()
    assert taken(monkeypatch, ours, wanted)
    app = made.folder / "app" / "pyproject.toml"
    app.write_text(app.read_text().replace("qupel.flower.client_app:app", "evil:app"))
    (app.parent / "evil.py").write_text("print('evil')\n")
    (made.folder / "app.fab").unlink()
    folder.bundle(made.folder)
    foreign = (made.folder / "app.fab").read_bytes()
    assert foreign != ours
    assert taken(monkeypatch, foreign, None)  # Flower alone takes it
    assert not taken(monkeypatch, foreign, wanted, note=partial(audit.refused_code, made.client(0) / "state"))
    (line,) = chain.read(made.client(0) / "state" / audit.LOG)
    assert line.entry["refused"] == "another app than the pinned one"
    assert line.entry["why"] == f"run 7: {hashlib.sha256(foreign).hexdigest()}"
    assert not taken(monkeypatch, foreign, wanted, fab_hash=wanted)
    assert not taken(monkeypatch, ours, wanted, version="1.0.0/../../elsewhere")
    assert not taken(monkeypatch, ours, wanted, fab_id="../x")
    assert not taken(monkeypatch, ours, wanted, fab_hash="0" * 64)


def test_a_supernode_that_cannot_be_held_to_an_app_does_not_start(made, monkeypatch):
    import flwr

    from qupel.flower import supernode

    monkeypatch.setattr(flwr, "__version__", "1.42.0")
    with pytest.raises(UserError, match=r"flwr 1.42.0 cannot be held to one app"):
        supernode.pin("0" * 64)
    (made.client(0) / "app.sha256").unlink()
    command = [sys.executable, "-m", "qupel.flower.supernode", str(made.client(0))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "names no app" in done.stderr
    trust.renew(made)  # what a folder of an older version needs
    Process.here("SuperNode").note(made.client(0) / clean.SUPERNODE)
    with pytest.raises(UserError, match="already has a SuperNode"):
        supernode.main(made.client(0), [])
    valid_for(made, -0.01, monkeypatch)
    with pytest.raises(UserError, match=r"ca.crt has expired; "):
        supernode.main(made.client(1), [])


# --- certificates ---


def valid_for(made, days, monkeypatch):
    """Certificates that end in so many days."""
    with monkeypatch.context() as patch:
        patch.setattr(folder, "YEARS", days / 365)
        trust.renew(made)


def test_certificates_are_renewed(made):
    """The server's under the same authority, so that clients with the old certificate and with the new one believe it;
    the key is new, and nobody else's to read."""
    old = made.authority.read_bytes()
    server = (made.server / "server.crt").read_bytes()
    until = trust.renew(made)
    assert until > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=365)
    assert made.authority.read_bytes() != old
    assert (made.server / "server.crt").read_bytes() != server
    assert stat.S_IMODE((made.server / "server.key").stat().st_mode) == 0o600
    assert (made.client(1) / "ca.crt").read_bytes() == made.authority.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server / "server.crt", made.server / "server.key")
    for authority in (old, made.authority.read_bytes()):
        trusting = ssl.create_default_context(cadata=authority.decode())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            other = threading.Thread(target=lambda end=theirs: context.wrap_socket(end, server_side=True).close())
            other.start()
            with trusting.wrap_socket(ours, server_hostname="flower.example.org"):
                other.join()


def test_certificates_that_end_are_said_in_time(made, monkeypatch, qupel):
    assert trust.warning(made) is None
    valid_for(made, 31, monkeypatch)
    assert trust.warning(made) is None
    valid_for(made, 20.5, monkeypatch)
    assert re.search(r"expire in 20 days; make new ones with `qupel flower renew ", trust.warning(made))
    done = qupel("status", made.folder, "--server", "127.0.0.1:1")
    assert "expire in 20 days" in done.stderr
    assert "20 days left" in done.stdout
    assert "no SuperLink answers" in done.stderr
    valid_for(made, -0.01, monkeypatch)
    config = made.folder.parent / "config.toml"
    config.write_text(bench.config(2))
    for command in (("up", made.folder), ("run", made.folder, config)):
        done = qupel(*command)
        assert done.returncode == 2
        assert "have expired; make new ones with" in " ".join(done.stderr.split())
        assert not (made.folder / "up.json").exists()
    assert qupel("renew", made.folder).returncode == 0
    assert trust.days_left(made) > 365


# --- keys ---


def test_a_revoked_key_is_kept_apart(made, qupel):
    """Without a server it is noted for the next one; a name that is none is one line."""
    done = qupel("revoke", made.folder, "1", "--server", "127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "the next `up` or `register` tells it" in " ".join(done.stdout.split())
    assert made.revoked() == {"client-1"}
    assert [path.name for path in (made.server / "keys").iterdir()] == ["client-0.pub"]
    trust.revoke(made, "client-1")  # once more: nothing happens
    with pytest.raises(UserError, match=r"no client 'client-7'; those let in are client-0"):
        trust.revoke(made, "client-7")


# --- leftovers ---


@pytest.fixture
def gone():
    """The number of a process that lives no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_clean_removes_what_is_ours_and_nobodys(made, gone, qupel):
    """Half-written files of dead processes and of those whose number another has by now, states of old jobs; not what
    is being written, is not ours, or is of a young job."""
    state = made.client(0) / "state"
    old, young = state / "old", state / "young"
    for job in (old, young):
        (job / "round-000003").mkdir(parents=True)
        (job / "round-000003" / "answer.json").write_text("{}")
        (job / "model.safetensors").write_text("model")
    os.utime(old / "round-000003" / "answer.json", (0, time.time() - 40 * 86400))
    (state / "_privacy.json").write_text("{}")
    goes = [
        state / f".worker.json.{gone}.tmp",
        old / f".model.safetensors.{gone}.tmp",
        made.folder / f".up.json.{gone}.tmp",
    ]
    stays = [
        state / f".worker.json.{os.getpid()}.tmp",
        state / ".notes",
        state / f"x.{gone}.tmp",
        young / "model.safetensors",
    ]
    recycled = state / f".other.json.{os.getpid()}.tmp"  # older than the process that has its number
    for path in (*goes, *stays, recycled):
        path.write_text("x")
    os.utime(recycled, (0, began(os.getpid()) - 1000))
    folders = [old / f".round-000004.{gone}", old / f".round-000005.{os.getpid()}", old / f".other.{gone}"]
    for path in folders:
        path.mkdir()
    goes += [recycled, folders[0], old / "round-000003"]
    stays += [
        *folders[1:],
        young / "round-000003",
        young / "model.safetensors",
        old / "model.safetensors",
        state / "_privacy.json",
    ]
    for target in (made.folder, made.client(0)):
        done = qupel("clean", target, "--dry-run")
        assert all(path.exists() for path in (*goes, *stays))
        assert all(
            f"would remove {path}" in done.stdout
            for path in goes
            if path.is_relative_to(target) and path.name[0] == "."
        )
    done = qupel("clean", made.folder)
    assert "states of a job whose last round was 40 days ago" in done.stdout
    assert not any(path.exists() for path in goes)
    assert all(path.exists() for path in stays)
    done = qupel("clean", made.folder)
    assert "nothing of ours is left there" in done.stdout
    generations = Generations(old, None)
    with pytest.raises(UserError, match="has removed its states of this job"):
        generations.upto(3)
    assert generations.answered(Asked.of(1, 3, b"")) is None
    assert qupel("clean", made.server).returncode == 2


def test_workers_of_a_supernode_that_is_gone(made, gone):
    """Ended; with its SuperNode alive, or without one, a worker is left alone."""
    here, state = made.client(0), made.client(0) / "state"
    state.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    worker = start("worker", command, state / "log", dict(os.environ))
    try:
        worker.note(state / "worker.json")
        assert clean.of_client(here) == []
        Process.here("SuperNode").note(here / clean.SUPERNODE)
        assert clean.of_client(here) == []
        Process("SuperNode", gone, "long ago").note(here / clean.SUPERNODE)
        (left,) = clean.of_client(here)
        assert str(worker.pid) in left.what
        left.remove()
        assert not worker.alive()
        (state / "worker.json").write_text("{")
        assert clean.of_client(here) == []
    finally:
        end([worker])


# --- what a run cannot be ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--upload", "zip"), "--upload: unknown codec 'zip'; allowed: fixed, fp16, fp32, int8"),
        (("--set", 'task.metrics=["operators:sub"]'), "metric 'operators:sub': no module 'operators'"),
        (
            ("--set", "seeds=[1, 2]"),
            "this config has 2 runs (methods x seeds), one at a time is run here; give --cell,",
        ),
        (
            ("--set", "seeds=[1, 2]", "--cell", "QuPeL-s3"),
            "--cell 'QuPeL-s3' is none of them; give --cell, one of QuPeL-s1",
        ),
        (("--secure",), "--secure: 3 of 2 clients in a sum; allowed are 3 and more, up to all"),
        (("--secure", "--upload", "fp16"), "--upload fp16: with secure, uploads are integers in fixed point"),
        (("--set", "secure.clip=-1"), "secure.clip: input should be greater than 0"),
        (("--secure", "--set", "weighted=true"), "weighted = true: with secure every client counts once"),
        (("--secure", "--set", "methods.QuPeL.server=median"), "server 'median' looks at uploads one by one"),
        (("--buffer", "2"), "--buffer 2: rounds of --mode sync have none; add --mode async"),
        (("--mode", "async", "--buffer", "3"), "--buffer 3: more uploads than the 2 clients have under way"),
        (
            ("--mode", "async", "--secure", "--minimum", "3"),
            "--secure: a sum is of one round's uploads; leave out --mode",
        ),
        (("--mode", "async", "--audit"), "--audit: a log is of rounds in turn; leave out --mode async"),
        (("--mode", "async", "--target-epsilon", "8"), "privacy: what it costs in asynchronous rounds is not counted"),
        (("--target-epsilon", "0"), "privacy.target_epsilon: input should be greater than 0"),
        (("--delta", "1e-6"), "privacy: give noise, or target_epsilon, which finds it"),
        (
            ("--secure", "--set", "secure.threshold=0.3"),
            "secure.threshold: input should be greater than or equal to 0.5",
        ),
        (("--set", "diagnostics=cheap"), "diagnostics: clients on Flower tell scores only"),
        (("--set", "model.start=x.safetensors"), "model.start: a federation on Flower starts from the model's name"),
    ],
)
def test_mistakes_of_run(made, qupel, tmp_path, options, words):
    """Found before the server is asked for anything."""
    (tmp_path / "small.toml").write_text(bench.config(2))
    done = qupel("run", made.folder, tmp_path / "small.toml", "--name", "r", *options)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert not (made.folder / "runs" / "r").exists()


def test_a_try_out_has_the_configs_layers_and_levels(tmp_path):
    text = bench.config(1).replace('name = "mlp"', 'name = "mlp"\nlayers = ["3"]\nlevels = "channel"')
    made = folder.init(tmp_path / "f", 1, "127.0.0.1", 8443, configs.parse(text, "test"), "/opt/q")
    client = load_client(made.client(0) / "client.toml")
    assert (client.layers, client.levels, client.allow) == (("3",), "channel", ())
