"""Asynchronous rounds, clients that are ill and evaluations that nobody answers, with the post in this process."""

import json
import math
import re
import threading

import pytest
import torch

import flower_bench as bench
from flower_bench import Direct, Reply
from qupel.engine.rounds import Failed
from qupel.flower.late import Late, moved_on
from qupel.flower.server import conduct, open_fleet
from qupel.parts.base import Upload, vector
from tiny import same

CONFIG = """
rounds = {rounds}
local_steps = 2
batch = 8
evaluate_every = {every}
bits = 32
[model]
name = "mlp"
args = {{hidden = [8, 8]}}
{split}
[methods.QuPeL]
method = "fedavg"
eta1 = 0.1
"""


def config(rounds=6, every=6):
    return CONFIG.format(rounds=rounds, every=every, split=bench.SPLIT.format(count=3))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Slow(Direct):
    """A post whose client 2 answers a question to train only when `others` more such answers were given since it
    came."""

    def __init__(self, paths, others=3, **options):
        super().__init__(paths, **options)
        self.others, self.given = others, 0
        self.turn, self.worker = threading.Condition(), threading.Lock()

    def ask(self, header, body, clients, seconds):
        if header["kind"] != "train":
            yield from super().ask(header, body, clients, seconds)
            return
        (client,) = clients
        with self.turn:
            self.asked.append(("train", header["round"], client))
            due = self.given + (self.others if client == 2 else 0)
            self.turn.wait_for(lambda: self.given >= due, timeout=60)
        with self.worker:  # a client has one
            reply = Reply(client, *self.clients[client].answer(header, body))
        with self.turn:
            self.given += 1
            self.turn.notify_all()
        yield from self.twist(client, header, reply)


def told(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_old_upload_counts_with_what_it_moved_and_less():
    sent, now = torch.tensor([1.0, 1.0]), torch.tensor([5.0, 7.0])
    upload = Upload((torch.tensor([2.0, 0.0]),))
    assert moved_on(upload, (sent,), (sent,), 0) is upload
    (found,) = moved_on(upload, (sent,), (now,), 3).rows
    assert found.tolist() == [5.5, 6.5]  # 1 / sqrt(1 + 3)


def test_a_buffer_of_all_is_the_synchronous_run(tmp_path):
    """Everybody is asked in every round and waited for: nothing is late."""
    post = Direct(bench.clients(tmp_path / "a"))
    late = conduct(bench.request(tmp_path / "a" / "run", config(), buffer=3), post)
    plain = conduct(bench.request(tmp_path / "b" / "run", config()), Direct(bench.clients(tmp_path / "b")))
    assert same(late.w, plain.w)


def test_the_slow_client_is_not_waited_for_and_counts_by_its_age(tmp_path, monkeypatch):
    ages = []
    real = moved_on

    def seen(upload, sent, w, staleness):
        ages.append(staleness)
        return real(upload, sent, w, staleness)

    monkeypatch.setattr("qupel.flower.late.moved_on", seen)
    post = Slow(bench.clients(tmp_path))
    finished = conduct(bench.request(tmp_path / "run", config(), buffer=2), post)
    rounds = {i: [r for kind, r, client in post.asked if kind == "train" and client == i] for i in range(3)}
    assert len(rounds[2]) < len(rounds[0])  # it had fewer questions than the fast ones
    assert max(ages) >= 1  # and was late with an answer, which counted
    assert len(ages) == 2 * 6  # six rounds of two uploads
    assert all(len(rs) == len(set(rs)) for rs in rounds.values())  # none was asked for a round twice
    assert math.isfinite(float(vector(finished.w).norm()))


@pytest.mark.parametrize("at", range(12))
def test_a_killed_run_loses_no_upload_and_counts_none_twice(tmp_path, at, monkeypatch):
    """The server dies after so many answers of twelve; resumed, every (client, round) that was asked for counts at most
    once, and only those that are still open at the end not at all. Clients train no round twice."""

    class Killed(BaseException):
        pass

    run_folder = bench.request(tmp_path / "run", config(), buffer=2)
    post = Slow(bench.clients(tmp_path))
    counted, trained, answers = [], [], []
    real = Late._read

    def read(self, reply, client, at_round, sent, round, w):
        if len(answers) == at:
            answers.append(None)
            raise Killed
        answers.append(None)
        counted.append((client, at_round, round))
        return real(self, reply, client, at_round, sent, round, w)

    monkeypatch.setattr(Late, "_read", read)

    def watch(client):
        real_job = client._job

        def job(described):
            found = real_job(described)
            if not hasattr(found, "watched"):
                found.watched, made = True, found._trained
                found._trained = lambda asked, w, undone: (
                    trained.append((client.config.client, asked.round)), made(asked, w, undone)
                )[1]  # fmt: skip
            return found

        client._job = job

    for client in post.clients:
        watch(client)
    with pytest.raises(Killed):
        conduct(run_folder, post)
    saved = sorted((run_folder / "checkpoints").glob("round-*")) if (run_folder / "checkpoints").exists() else []
    done = int(saved[-1].name[-6:]) if saved else 0
    kept = [c for c in counted if c[2] < done]  # what is in the checkpoint
    counted.clear()
    with post.turn:  # from here on nobody is slow
        post.given = 10**6
        post.turn.notify_all()
    finished = conduct(run_folder, post)
    both = [(client, asked) for client, asked, _ in kept + counted]
    assert len(both) == len(set(both)) == 2 * 6  # six rounds of two, none twice
    asked = {(client, round) for kind, round, client in post.asked if kind == "train"}
    open_still = asked - set(both)
    assert len({client for client, _ in open_still}) == len(open_still)  # at most one a client, at the end
    assert len(trained) == len(set(trained))
    assert math.isfinite(float(vector(finished.w).norm()))


def test_open_questions_survive_in_the_checkpoint(tmp_path):
    run_folder = bench.request(tmp_path / "run", config(), buffer=2)
    fleet = open_fleet(run_folder, Direct(bench.clients(tmp_path)))
    size = sum(p.numel() for p in fleet.job.module.parameters())
    fleet.late.asked = {2: (1, (torch.arange(size).float(),)), 0: (4, (torch.ones(size),))}
    folder = tmp_path / "round-000005"
    folder.mkdir()
    fleet.save(folder)
    again = open_fleet(run_folder, fleet.post)
    again.load(folder)
    assert {c: at for c, (at, _) in again.late.asked.items()} == {2: 1, 0: 4}
    assert torch.equal(again.late.asked[2][1][0], torch.arange(size).float())
    (folder / "asked-000001.bin").write_bytes(b"\0" * 4 * size)
    with pytest.raises(Exception, match="damaged"):
        again.load(folder)


def test_a_client_that_is_ill_three_times_is_left_alone_for_a_while(tmp_path):
    """Named, not asked for five rounds, then asked again, and well."""
    ill = {"until": 3}

    def twist(client, header, reply):
        sick = client == 1 and header["kind"] == "train" and header["round"] < ill["until"]
        return [Reply(1, {"error": "it declined; its own log says why"})] if sick else [reply]

    post = Direct(bench.clients(tmp_path), twist)
    conduct(bench.request(tmp_path / "run", config(10, 1), minimum=2), post)
    rounds = [r for kind, r, client in post.asked if (kind, client) == ("train", 1)]
    assert rounds == [0, 1, 2, 8, 9]
    refused = [text for line in told(tmp_path / "run") for text in line["refused"]]
    assert len(refused) == 3
    assert "3 times in a row: left alone until round 9" in refused[2]


def test_also_in_asynchronous_rounds(tmp_path):
    """Its first three answers cannot be used; in the five rounds after the third it has no question."""
    sick = []

    def twist(client, header, reply):
        if client != 1 or header["kind"] != "train" or len(sick) == 3:
            return [reply]
        sick.append(header["round"])
        return [Reply(1, {"error": "it declined; its own log says why"})]

    post = Slow(bench.clients(tmp_path), others=0)
    post.twist = twist
    conduct(bench.request(tmp_path / "run", config(14, 1), minimum=2, buffer=2), post)
    refused = [text for line in told(tmp_path / "run") for text in line["refused"]]
    assert [text.startswith("client 1: it declined") for text in refused] == [True] * 3
    (until,) = re.findall(r"3 times in a row: left alone until round (\d+)", refused[2])
    back = int(until) - 1  # counted from 0
    asked = [r for kind, r, client in post.asked if (kind, client) == ("train", 1)]
    assert asked[:3] == sick
    assert back - sick[2] >= 6
    assert asked[3] == back


def test_who_is_needed_is_asked_however_ill(tmp_path):
    """A round needs all three: then it fails as before, and nobody is left alone."""
    twist = lambda client, header, reply: [] if (client, header["kind"]) == (1, "train") else [reply]  # noqa: E731
    post = Direct(bench.clients(tmp_path), twist)
    with pytest.raises(Failed, match="fewer than 3 clients answered soundly"):
        conduct(bench.request(tmp_path / "run", config()), post)


def test_an_evaluation_that_nobody_answers_is_a_gap(tmp_path):
    def twist(client, header, reply):
        return [] if header["kind"] == "evaluate" and header["round"] == 1 else [reply]

    notes = []
    post = Direct(bench.clients(tmp_path), twist)
    conduct(bench.request(tmp_path / "run", config(4, 2)), post, watch=lambda p: notes.extend(p.refused))
    gap, last = told(tmp_path / "run")
    assert "test" not in gap
    assert gap["clients"]["test"] == []
    assert len(last["clients"]["test"]) == 3
    assert "no client told how its model scores" in notes
