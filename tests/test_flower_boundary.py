"""What leaves a client: every byte of whole runs is accounted for, and what was planted at a client stays there."""

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flower_bench as bench
from flower_bench import Direct
from qupel.deploy.file import load
from qupel.flower import boundary
from qupel.flower.boundary import Unspeakable, told
from qupel.flower.processes import PID_FILE, Process, end
from qupel.flower.server import conduct
from qupel.flower.task import PROTOCOL
from qupel.parts.base import vector

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import flower_grid

PRIVACY = "[privacy]\nclip = 0.5\nepsilon = 1.0\ndelta = 1e-5\n"
SECRET = "planted-secret-folder"
SCORES = ("test", "test_loss", "validation", "validation_loss", "float_test", "float_test_loss")
METRICS = ("test_metrics", "validation_metrics", "float_test_metrics")
# the list once more, by hand: whoever wants another field to leave has to say so here, too
LIST = {
    ("hello", False): {"client", "samples", "shape", "classes", "layout"},
    ("hello", True): {"client", "samples", "shape", "classes", "layout"},
    ("train", False): {"client", "job", "round", "samples", "loss", "loss_quantized"},
    ("train", True): {"client", "job", "round", "samples"},
    **{
        (stage, private): {"client", "job", "round"} for stage in ("share", "mask", "open") for private in (False, True)
    },
    ("evaluate", False): {"client", "round", *SCORES, "bytes", "bits", "dead", "tested", *METRICS},
    ("evaluate", True): {"client", "round"},
    ("export", False): {"client", "round", "bytes", "test"},
    ("export", True): {"client", "round"},
    ("adapt", False): {"client", "round", "bytes", "test", "shared"},
    ("adapt", True): {"client", "round"},
    ("ping", False): set(),
    ("ping", True): set(),
}


def account(kind, private, header, body, size):
    """Every field of an answer: its name is on the list, its value is plain and within its bounds; nothing is left."""
    assert set(header) == LIST[kind, private], kind
    for name, value in header.items():
        if name == "shape":
            assert value == [1, 8, 8]
        elif name == "job":
            assert value == "job-1"
        elif name == "layout":
            assert re.fullmatch("[0-9a-f]{16}", value)
        elif name in METRICS:
            assert value == []  # none were asked for
        else:
            assert value is None or type(value) in (int, float), name
            most = boundary.MOST_LOSS if "loss" in name else 1e6  # another client's noise is not seeded
            assert value is None or 0 <= value <= most, name
    for name in {"test", "validation", "float_test"} & set(header):
        assert header[name] is None or header[name] <= 1
    assert header.get("client", 0) < 3
    assert len(body) == (size if kind == "train" else 0)


def secrets_of(folder, clients=(0, 2)):
    """Texts and bytes that no message may hold: the centers of the clients' models, and where all of it lies."""
    texts = [SECRET.encode(), str(folder).encode(), b"-state.bin", b"digits"]
    for i in clients:
        packed = load(folder / f"state-{i}" / "job-1" / "model.safetensors")
        assert packed.layers
        for layer in packed.layers:  # as `weights` told them, and as they are: alone, four bytes may come by chance
            texts += [text.encode() for v in layer.centers.tolist() if len(text := f"{v:.5g}") > 5]
            texts.append(np.asarray(layer.centers, np.float32).tobytes())
    return texts


# --- whole runs ---


@pytest.mark.parametrize("private", [False, True])
def test_every_field_that_leaves_in_a_whole_run(tmp_path, private):
    """Client and server with the post in this process: the answers are the list, and no secret is in any byte."""
    folder = tmp_path / SECRET
    sent = []

    def record(client, header, reply):
        sent.append((header["kind"], json.dumps(reply.header).encode(), reply.body))
        return [reply]

    post = Direct(bench.clients(folder, more=PRIVACY if private else ""), record)
    finished = conduct(bench.request(tmp_path / "run"), post)
    kinds = [kind for kind, _, _ in sent]
    assert {kind: kinds.count(kind) for kind in kinds} == {"hello": 3, "train": 15, "evaluate": 9, "export": 3}
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    for kind, head, body in sent:
        account(kind, private, json.loads(head), body, 4 * len(vector(finished.w)))
    for secret in secrets_of(folder):
        assert not any(secret in head or secret in body for _, head, body in sent), secret
    assert "weights" not in last
    assert (last["clients"]["bits"] == [None] * 3) is private
    assert [told.keys() for told in json.loads((tmp_path / "run/exports.json").read_text())] == [
        {"client", "bytes", "test"}
    ] * 3


def test_every_byte_that_leaves_over_flower(tmp_path, monkeypatch):
    """One client with a resident worker, a process of its own, and one without that is private: taken apart to the last
    byte, an answer is Flower's frame around the list and the upload."""
    from qupel.flower.client_app import answer
    from qupel.flower.server_app import FlowerPost

    flower_grid.within_a_run(monkeypatch)
    folder = tmp_path / SECRET
    paths = bench.clients(folder, 2)
    paths[1].write_text(f"resident = false\n{paths[1].read_text()}{PRIVACY}")

    def ask(client, message):
        return answer(message, SimpleNamespace(node_config={"config": str(paths[client])}))

    grid = flower_grid.Grid(2, ask)
    run_folder = bench.request(tmp_path / "run", bench.config(2).replace("rounds = 5", "rounds = 3"), clients=2,
                               minimum=2, deadline=120.0, patience=120.0)  # fmt: skip
    try:
        size = 4 * len(vector(conduct(run_folder, FlowerPost(grid)).w))
    finally:
        end([Process.noted("worker", path) for path in folder.glob(f"*/{PID_FILE}")])
    assert len(grid.sent) == 2 * (1 + 3 + 3 + 1)
    for asked, client, reply, objects in grid.sent:
        content, kind = reply.content, flower_grid.header_of(asked)["kind"]
        head = content["answer"]["header"]
        body = content["arrays"]["upload"].data if "arrays" in content else b""
        account(kind, client == 1, json.loads(head), body, size)
        again = RecordDict({"answer": ConfigRecord({"header": head})})
        if body:
            again["arrays"] = ArrayRecord({"upload": Array("uint8", (len(body),), "qupel.bytes", body)})
        rebuilt = Message(content=again, reply_to=asked)
        rebuilt.metadata.created_at = reply.metadata.created_at
        rebuilt.metadata.ttl = reply.metadata.ttl
        assert flower_grid.taken_apart(rebuilt)[1] == objects
    for secret in secrets_of(folder, clients=(0,)):
        for _, _, _, objects in grid.sent:
            assert not any(secret in content for content in objects.values()), secret


# --- when something goes wrong ---


def question(kind, **more):
    return {"kind": kind, "protocol": PROTOCOL, "seed": 0, "attempt": 1, "round": 0, "undone": [], **more}


@pytest.mark.parametrize("private", [False, True])
def test_mishaps_say_a_sentence_of_the_list(tmp_path, private, capfd):
    """A folder that is none, numbers that are not finite, a task that is none: the log has the path, the answer not."""
    folder = tmp_path / SECRET
    post = Direct(bench.clients(folder, 1, more=PRIVACY if private else ""))
    (client,) = post.clients
    tasks = []
    run_folder = bench.request(tmp_path / "run", bench.config(1), clients=1, minimum=1)
    post.twist = lambda i, header, reply: tasks.append(header) or [reply]
    w = vector(conduct(run_folder, post).w).numpy().tobytes()
    task = next(header["task"] for header in tasks if "task" in header)
    (client.config.state / "elsewhere").write_text("a file where a folder should be")
    blown = np.full(len(w) // 4, 1e38, np.float32).tobytes()
    diverged = "round 1: its training met numbers that are not finite"
    over = f"round-answered: {boundary.REFUSALS['round-answered']}"
    mishaps = {
        boundary.FAILED: (question("train", task={**task, "job": "elsewhere"}), w),
        boundary.DECLINED if private else diverged: (question("train", task={**task, "job": "blown"}), blown),
        boundary.DECLINED: (question("train", task={**task, "classes": 7}), w),
        boundary.NO_QUESTION: (question("train", task=task, attempt=[SECRET]), w),
        f"the server speaks protocol 7, this client {PROTOCOL}": ({**question("train", task=task), "protocol": 7}, w),
        f"the server's model has 1 parameters, this client's {len(w) // 4}": (question("train", task=task), b"\0" * 4),
        over if private else "round 1 is over: this client is at round 5": (question("train", task=task), blown),
    }
    for words, (header, body) in mishaps.items():
        reply = client.answer(header, body)
        assert reply == ({"error": words}, b"")
        assert "planted" not in json.dumps(reply[0])
    assert f"{SECRET}/state-0/elsewhere" in capfd.readouterr().err  # its own log


def test_flower_is_not_told_of_exceptions(tmp_path, monkeypatch, capfd):
    """Flower sends the text of what a ClientApp raises to the server: here it raises nothing."""
    from qupel.flower.client_app import answer

    flower_grid.within_a_run(monkeypatch)
    config = tmp_path / SECRET / "client.toml"
    config.parent.mkdir()
    config.write_text('client = 0\nbits = 2\n[data]\nname = "planted-data.npz"\n')

    def ask(header, path):
        asked = RecordDict({"question": ConfigRecord({"header": header})})
        message = Message(asked, dst_node_id=1, message_type="train")
        message.metadata.__dict__["_message_id"] = "question"
        reply = answer(message, SimpleNamespace(node_config={"config": str(path)}))
        assert not any(b"planted" in content for content in flower_grid.taken_apart(reply)[1].values())
        return json.loads(reply.content["answer"]["header"])

    hello = json.dumps(question("hello"))
    assert ask(hello, config) == {"error": boundary.NO_WORKER}
    assert "planted-data.npz: no such file" in capfd.readouterr().err
    assert ask(hello, config.parent / "nowhere.toml") == {"error": boundary.FAILED}
    assert ask("[" * 100_000, config) == {"error": boundary.FAILED}


def test_a_worker_that_knows_no_list_is_not_passed_on():
    """A resident worker of an older version may still be there after an upgrade."""
    header = {"client": 0, "round": 3, "weights": {"centers": {"2.weight": [0.1, 0.2]}}}
    with pytest.raises(Unspeakable, match="those are no answer to evaluate"):
        boundary.passed_on("evaluate", False, header, b"")
    old = {"client": 0, "error": f"cannot read /home/{SECRET}/data.npz: no such file"}
    assert boundary.passed_on("train", False, old, b"") == ({"error": boundary.FAILED}, b"")


# --- the list itself ---


def answers():
    update = boundary.Update(0, "job-1", 3, 20, 0.5, 0.6)
    scores = boundary.Scores(0, 3, 0.5, 1.0, None, None, 0.5, 1.0, 100, 2.0, 0, 12)
    return update, scores, boundary.Export(0, 3, 100, 0.5), boundary.Hello(0, 20, (1, 8, 8), 10)


def test_nothing_else_can_be_encoded():
    """Another type, a subtype with a field more, a private client's scores, a body where there is none, an own text."""
    update, scores, export, hello = answers()

    @dataclass(frozen=True)
    class More(boundary.Scores):
        weights: dict = field(metadata={"rule": boundary.Rule("anything", lambda v: True)}, default_factory=dict)

    more = More(*(getattr(scores, f.name) for f in fields(scores)), {"centers": [0.1]})
    wrong = [("evaluate", False, more, b""), ("evaluate", True, scores, b""), ("train", True, update, b""),
             ("export", True, export, b""), ("hello", False, hello, b"x"), ("evaluate", False, scores, b"x"),
             ("evaluate", False, update, b""), ("other", False, hello, b"")]  # fmt: skip
    for kind, private, answer, body in wrong:
        with pytest.raises(Unspeakable):
            told(kind, private, answer, body)
    for text in ("/home/somebody", "round 1 is over: this client is at round x", boundary.FAILED + "\n", "", 3, None):
        with pytest.raises(Unspeakable):
            boundary.Refusal(text)
    with pytest.raises(Unspeakable):
        boundary.PrivateRefusal(boundary.DIVERGED.format(3))
    object.__setattr__(scores, "test", {"centers": [0.1]})
    with pytest.raises(Unspeakable, match="test = "):
        told("evaluate", False, scores)


@pytest.mark.parametrize(
    ("name", "value"),
    [("client", -1), ("client", True), ("client", 2**31), ("client", 1.0), ("round", "1"), ("test", 5),
     ("test", -1e308), ("test", float("nan")), ("test_loss", float("inf")), ("bytes", 2**41), ("bits", [2]),
     ("dead", None), ("test_metrics", [float("nan")]), ("test_metrics", [1.0] * 101), ("validation_metrics", 1.0)],
)  # fmt: skip
def test_fields_are_within_their_bounds(name, value):
    _, scores, _, _ = answers()
    header, _ = told("evaluate", False, scores)
    assert boundary.heard("evaluate", header) == scores
    with pytest.raises(Unspeakable, match=f"{name} = "):
        boundary.heard("evaluate", {**header, name: value})


@pytest.mark.parametrize("layout", ["", "0123", "Z" * 16, 3, ["0" * 16]])
def test_absurd_layouts(layout):
    header, _ = told("hello", False, answers()[3])
    with pytest.raises(Unspeakable, match="layout"):
        boundary.heard("hello", {**header, "layout": layout})


@pytest.mark.parametrize("shape", [[], [0], [1] * 9, [2**13, 2**12], [True], "abc", [1.0], {}, None])
def test_absurd_shapes(shape):
    header, _ = told("hello", False, answers()[3])
    with pytest.raises(Unspeakable, match="shape"):
        boundary.heard("hello", {**header, "shape": shape})


def test_the_list_is_the_one_above():
    assert {key: {f.name for f in fields(cls)} for key, cls in boundary.LEAVES.items()} == LIST


def table():
    """The list as docs/deploy.md shows it."""
    rows = ["| question | field | what it is | allowed | with `[privacy]` |", "|---|---|---|---|---|"]
    for kind in ("hello", "train", "share", "mask", "open", "evaluate", "export", "adapt"):
        private = {f.name for f in fields(boundary.LEAVES[kind, True])}
        for f in fields(boundary.LEAVES[kind, False]):
            meaning, rule = f.metadata["meaning"], f.metadata["rule"]
            rows.append(f"| {kind} | `{f.name}` | {meaning} | {rule.words} | {'yes' if f.name in private else 'no'} |")
    return "\n".join(rows)


def test_the_docs_have_the_list():
    docs = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
    assert table() in docs
    for text in boundary.SENTENCES:
        assert f"- {text.replace('{}', 'N').replace('{hash}', 'H')}\n" in docs
    for text in boundary.TOLD_BY_DATA:
        assert f"- {text.replace('{}', 'N')} (not with `[privacy]`)\n" in docs
