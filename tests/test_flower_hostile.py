"""Answers that are made to harm the server: whatever a registered client sends, it alone is left out, and named."""

import json
import math
import re
import threading
import tracemalloc

import numpy as np
import pytest
import torch

import flower_bench as bench
from flower_bench import Direct, Reply
from qupel.engine.checkpoint import Since
from qupel.engine.rounds import metrics
from qupel.flower import frames, watch
from qupel.flower.boundary import printable
from qupel.flower.server import Request, conduct, greet, open_fleet
from qupel.parts.base import vector
from tiny import beginning, same

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import flower_grid

ESC = "\x1b[2J\x1b]0;owned\x07"
MARKUP = "[/red][bold]x[/nothing]"
DEEP = "[" * 100_000


# --- fields ---


def changed(kind, **fields):
    """Client 2 gives these fields to this question."""

    def twist(client, header, reply):
        same = client != 2 or header["kind"] != kind
        return [reply if same else Reply(client, {**reply.header, **fields}, reply.body)]

    return twist


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("field", "value"), [("test", math.nan), ("client", nested(100_000)), (f"{MARKUP}{ESC}", 1)], ids=range(3)
)
def test_scores_that_are_none_are_left_out_and_named(tmp_path, field, value):
    told = []
    post = Direct(bench.clients(tmp_path), changed("evaluate", **{field: value}))
    conduct(bench.request(tmp_path / "run"), post, watch=told.append)
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["clients"]["number"] for line in lines] == [[0, 1]] * 3
    assert all(0 <= line["test"] <= 1 for line in lines)
    refused = [text for progress in told for text in progress.refused]
    assert len(refused) == 3
    assert all(text.startswith("client 2: an answer that cannot be read: ") and text.isprintable() for text in refused)


@pytest.mark.parametrize("value", [f"{ESC}{MARKUP}\n" * 1000, nested(100_000), {}], ids=("text", "deep", "table"))
def test_texts_of_clients_reach_the_terminal_as_text(tmp_path, value, capsys):
    """Neither escape sequences nor markup, one line, not for ever: in what is refused and in the table of exports."""
    target = tmp_path / "run"

    def tell(progress):
        watch.tell({**vars(progress), "seconds": 1.0})

    def twist(client, header, reply):
        return [Reply(client, {"error": value}) if client == 2 and header["kind"] in ("train", "export") else reply]

    conduct(bench.request(target, minimum=2), Direct(bench.clients(tmp_path), twist), watch=tell)
    watch.show(target)
    shown = capsys.readouterr()
    assert len(re.findall(r"round \d: refused client 2: ", shown.err.replace("\n", " "))) == 3  # then it is left alone
    for text in (shown.err, shown.out):
        assert "\x1b" not in text
        assert "\x07" not in text
    if isinstance(value, str):
        assert MARKUP in shown.err.replace("\n", "")


def test_printable():
    assert printable("a\x1b[2Jb\nc\u202ed\ud800\u200b\x9b") == "a?[2Jb?c?d???"
    assert printable("Größe 日本") == "Größe 日本"
    assert len(printable("x" * 10_000)) == 300


@pytest.mark.parametrize(
    "text",
    [DEEP, '{"a": ' * 50_000, '{"a": ' + "9" * 5000 + "}", "[]", '"x"', "", "{", '{"a": [[1]]}', b"\xff\xfe{}",
     '{"a": "' + "x" * 2**14 + '"}', '{"a": 1}{"a": 2}', "nul"],
    ids=range(12),
)  # fmt: skip
def test_headers_are_looked_at_before_they_are_parsed(text):
    with pytest.raises(ValueError, match=r"."):
        frames.table(text, 2**14, 2)


def test_brackets_in_texts_are_no_depth():
    header = {"error": '[[[{{{"\\', "list": [1]}
    assert frames.table(json.dumps(header), 2**14, 2) == header


# --- the weight of a client ---


def test_a_claimed_number_of_samples_is_bounded(tmp_path):
    """weighted = true: a client that claims 2^31 - 1 samples counts for ten medians, not for everything."""
    text = bench.config().replace("rounds = 5", "rounds = 5\nweighted = true")

    def lie(client, header, reply):
        many = {"samples": 2**31 - 1} if client == 2 and "samples" in reply.header else {}
        return [Reply(client, {**reply.header, **many}, reply.body)]

    for most, weights in ((10.0, (20, 20, 200)), (1.0, (20, 20, 20))):
        folder = tmp_path / f"{most}"
        finished = conduct(bench.request(folder / "run", text, most_weight=most), Direct(bench.clients(folder), lie))
        total = torch.zeros(len(finished.w[0]), dtype=torch.float64)
        for i, weight in enumerate(weights):
            body = (folder / f"state-{i}" / "job-1" / "round-000004" / "upload.bin").read_bytes()
            total += weight * torch.frombuffer(bytearray(body), dtype=torch.float32).double()
        assert torch.allclose(finished.w[0].double(), total / sum(weights), atol=1e-6)


# --- Flower's messages ---


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """fleet(count, hostile, twist) -> (a fleet behind Flower's messages, its first w): client 0 is honest, the others
    repeat what it says under their own numbers, changed by hostile(client, question, header, body) -> message."""
    from qupel.flower import server_app

    flower_grid.within_a_run(monkeypatch)
    monkeypatch.setattr(server_app, "PULL_SECONDS", 60.0)  # a busy machine is no fault
    (path,) = bench.clients(tmp_path, 1)
    honest = Direct([path]).clients[0]
    said = {}

    def make(count, hostile=None, twist=lambda client, objects: objects, deadline=60.0):
        def answer(client, question):
            header = flower_grid.header_of(question)
            key = header["kind"], header.get("round")
            if key not in said:
                w = question.content["arrays"]["w"].numpy().tobytes() if "arrays" in question.content else b""
                said[key] = honest.answer(header, w)
            reply, body = said[key]
            reply = {**reply, "client": client} if "client" in reply else reply
            if client and hostile:
                return hostile(client, question, reply, body)
            return message(question, json.dumps(reply), body)

        grid = flower_grid.Grid(count, answer, twist)
        terms = {"clients": count, "minimum": 1, "deadline": deadline, "patience": 30.0}
        folder = bench.request(tmp_path / "run", bench.config(1), **terms)
        opened = open_fleet(folder, server_app.FlowerPost(grid))
        return opened, opened.job, Request.read(folder)

    return make


def message(question, header, body=b"", upload=None):
    content = RecordDict({"answer": ConfigRecord({"header": header})})
    if body or upload:
        content["arrays"] = ArrayRecord({"upload": upload or Array("uint8", (len(body),), frames.BYTES, body)})
    return Message(content=content, reply_to=question)


def first_w(job):
    return beginning(job).w


def npy(shape, size=100):
    """A file of numpy whose header promises more than there is."""
    head = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * size


ARRAYS = {
    "numpy of petabytes": lambda body: Array("float32", (2**50,), "numpy.ndarray", npy((2**50,))),
    "numpy of 2 GB": lambda body: Array("float32", (2**29,), "numpy.ndarray", npy((2**29,))),
    "numpy that is broken": lambda body: Array("uint8", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00\xff\xff("),
    "another shape": lambda body: Array("uint8", (2**62, 2**62), frames.BYTES, body),
    "another type": lambda body: Array("O", (len(body),), frames.BYTES, body),
    "too long": lambda body: Array("uint8", (len(body) + 1,), frames.BYTES, body + b"x"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_absurd_arrays(fleet, name):
    """Refused without making room for what their headers promise."""

    def hostile(client, question, header, body):
        return message(question, json.dumps(header), upload=ARRAYS[name](body) if body else None)

    opened, job, _ = fleet(3, hostile)
    w = first_w(job)
    list(opened.train(0, w, range(3)))  # whatever is loaded only once
    tracemalloc.start()
    done = {d.client: d for d in opened.train(0, w, range(3))}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done[0].fault is None
    assert all(re.search("upload is not plain bytes|upload has", done[i].fault) for i in (1, 2))
    assert peak < 50e6


def test_one_broken_answer_takes_no_other_with_it(fleet):
    """A message that Flower itself cannot put together, and one that would fill the memory: the third one counts."""

    def twist(client, objects):
        for key, content in objects.items():
            if client == 1 and content.startswith(b"RecordDict"):
                objects[key] = content[:-5]
            if client == 2 and content.startswith(b"Array "):
                objects[key] = content.replace(
                    b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0," * 99_999 + b"0]"
                )
        return objects

    opened, job, _ = fleet(4, twist=twist)
    done = {d.client: d for d in opened.train(0, first_w(job), range(4))}
    assert [done[i].fault is None for i in range(4)] == [True, False, False, True]
    assert "cannot be read" in done[1].fault
    assert "100000 chunks, of which 1 were sent" in done[2].fault


def test_an_answer_that_never_comes_blocks_no_other(fleet, monkeypatch):
    """Announced, but its objects are held back: Flower waits for them for up to two hours."""
    from qupel.flower import server_app

    opened, job, _ = fleet(3, deadline=3.0)
    list(opened.train(0, first_w(job), range(3)))  # the honest client takes its time once
    monkeypatch.setattr(server_app, "PULL_SECONDS", 0.1)
    release = threading.Event()

    def twist(client, objects):
        if client == 1:
            release.wait(60)
        return objects

    opened.post.grid.twist = twist
    done = {d.client: d.fault for d in opened.train(0, first_w(job), range(3))}
    release.set()
    assert done == {0: None, 1: "no answer before the deadline", 2: None}


# --- anything ---

VALUES = (
    None, True, -1, 0, 5, 1.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 2**31, 2**63, 10**19, "", "x", ESC, MARKUP,
    "\ud800", "\u202e" * 50, [], {}, [[]], [1, 2], {"a": {}}, [None] * 1000, "x" * 5000, ["\x1b"], {"error": "x"},
)  # fmt: skip
RAW = (DEEP, '{"a":' * 50_000, "9" * 5000, "[1]", '"x"', "", "{", "nul", '{"client": ' + "9" * 4400 + "}", "\0" * 100)


def any_header(rng, header):
    """The text of a header with a value, a name or its form changed."""
    how = rng.integers(8)
    if how == 0:
        return RAW[rng.integers(len(RAW))]
    names = list(header) or ["client"]
    name = names[rng.integers(len(names))]
    if how == 1:
        return json.dumps({k: v for k, v in header.items() if k != name})
    if how == 2:
        return json.dumps({**header, ["error", "fault", "weights", ESC, MARKUP][rng.integers(5)]: pick(rng)})
    if how == 3:
        text = json.dumps(header)
        return text[: rng.integers(len(text) + 1)]
    if how == 4:
        text = list(json.dumps(header))
        for _ in range(rng.integers(1, 4)):
            text[rng.integers(len(text))] = chr(rng.integers(1, 256))
        return "".join(text)
    return json.dumps({**header, name: pick(rng)})


def pick(rng):
    return VALUES[rng.integers(len(VALUES))]


def any_message(rng, question, header, body):
    """A message whose header, upload or whole form is changed."""
    how = rng.integers(10)
    if how == 0:
        return Message(Error(code=int(rng.integers(-5, 2000)), reason=f"{ESC}{MARKUP}" * 50), reply_to=question)
    if how == 1:
        forms = [{}, {"answer": MetricRecord({"header": 1.0})}, {"answer": ConfigRecord({})},
                 {"answer": ConfigRecord({"header": [1, 2]})}, {"answer": ConfigRecord({"header": b"{}"})},
                 {"answer": ArrayRecord({"header": Array("uint8", (1,), "x", b"x")})}]  # fmt: skip
        return Message(content=RecordDict(forms[rng.integers(len(forms))]), reply_to=question)
    if how <= 3 and body:
        names = list(ARRAYS)
        return message(question, json.dumps(header), upload=ARRAYS[names[rng.integers(len(names))]](body))
    if how == 4 and body:
        numbers = np.frombuffer(body, np.float32).copy()
        numbers[rng.integers(len(numbers))] = [np.nan, np.inf, -np.inf][rng.integers(3)]
        return message(question, json.dumps(header), numbers.tobytes())
    if how == 5:
        return message(question, json.dumps(header), b"x" * int(rng.integers(1, 2000)))
    return message(question, any_header(rng, header), body)


def any_objects(rng, objects):
    """Bytes of the parts that Flower carries: turned, cut, doubled, put in."""
    keys = list(objects)  # their names are hashes of times, too: unsorted they are the same in every run
    key = keys[rng.integers(len(keys))]
    content = bytearray(objects[key])
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(content) + 1))
        how = rng.integers(4)
        if how == 0 and at < len(content):
            content[at] ^= 1 << int(rng.integers(8))
        elif how == 1:
            content[at:at] = rng.bytes(int(rng.integers(1, 20)))
        elif how == 2:
            del content[at : at + int(rng.integers(1, 100))]
        else:
            content[at:at] = content[max(0, at - 50) : at]
    objects[key] = bytes(content)
    return objects


def fuzz(fleet, total, seed=0, count=50):
    """Send `total` hostile answers to all four questions; per kind of question how many of them were believed."""
    rng = np.random.default_rng(seed)
    opened, job, request = fleet(count)
    grid, w = opened.post.grid, first_w(job)
    honest = {d.client: d for d in opened.train(0, w, range(count))}
    upload = honest[0].upload.rows
    assert all(same(d.upload.rows, upload) for d in honest.values())
    plain, turned, hostile = grid.answer, set(), 0

    def answer(client, question):
        """Half of the answers are changed in their form, the others, in `twist`, in their bytes."""
        nonlocal hostile
        reply = plain(client, question)
        if not client:
            return reply
        hostile += 1
        if rng.random() < 0.5:
            turned.add(client)
            return reply
        body = reply.content["arrays"]["upload"].data if "arrays" in reply.content else b""
        return any_message(rng, question, json.loads(reply.content["answer"]["header"]), body)

    def twist(client, objects):
        if client in turned:
            turned.discard(client)
            return any_objects(rng, objects)
        return objects

    grid.answer, grid.twist = answer, twist
    believed = {"hello": 0, "train": 0, "evaluate": 0, "export": 0}
    while hostile < total:
        told = greet(opened.post, request)
        believed["hello"] += count - len(told["left_out"])
        assert (told["shape"], told["classes"]) == ((1, 8, 8), 10)
        done = list(opened.train(0, w, range(count)))
        assert same(done[0].upload.rows, upload)
        assert all(d.fault or d.upload is None or bool(torch.isfinite(vector(d.upload.rows)).all()) for d in done)
        believed["train"] += sum(d.fault is None for d in done)
        judged = list(opened.evaluate(0, w, range(count)))
        believed["evaluate"] += len(judged)
        assert 0 in [j.client for j in judged]
        line = metrics(job, 0, judged, Since(refused=opened.unheard), 0, 0)
        assert 0 <= line["test"] <= 1
        exported = opened.written("export", 0, w, range(opened.terms.clients))
        believed["export"] += sum("error" not in e for e in exported)
        assert exported[0]["bytes"] > 0
        texts = [d.fault for d in done if d.fault] + opened.unheard + list(told["left_out"].values())
        texts += [e["error"] for e in exported if "error" in e]
        assert all(text.isprintable() and len(text) < 500 for text in texts)
        json.dumps([line, exported, texts], allow_nan=False)
        watch.tell(
            {
                "refused": texts,
                "notes": [],
                "line": line,
                "loss": 0.0,
                "loss_quantized": 0.0,
                "round": 1,
                "rounds": 1,
                "seconds": 1.0,
            }
        )
        grid.sent.clear()
    return hostile, believed


def test_mutated_answers(fleet, capsys):
    sent, believed = fuzz(fleet, 1000)
    assert all(0 < n < sent for n in believed.values())


@pytest.mark.slow
def test_ten_thousand_mutated_answers(fleet, capsys):
    sent, believed = fuzz(fleet, 10_000, seed=1)
    assert sent >= 10_000
    with capsys.disabled():
        print(f"{sent} answers, believed: {believed}")
