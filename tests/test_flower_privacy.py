"""A private client's own budget: a round is answered once, and no more is given away than its caps allow, whatever the
server says, whenever anybody is killed."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import flower_bench as bench
from flower_bench import Direct
from qupel.engine.rounds import Failed
from qupel.flower import audit, boundary, ledger, watch
from qupel.flower.ledger import LEDGER
from qupel.flower.server import conduct
from qupel.util.errors import UserError

PRIVACY = "[privacy]\nclip = 0.5\nepsilon = 0.1\ndelta = 1e-6\nsensitivity = 1e-4\n"  # little noise: it is not seeded


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spent(folder, client=0):
    return json.loads((folder / f"state-{client}" / LEDGER).read_text())


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    """(header, w) of the first round of a job, as a server asks it."""
    folder = tmp_path_factory.mktemp("question")
    post = Direct(bench.clients(folder))
    asked = []
    real = post.ask

    def ask(header, body, clients, seconds):
        asked.append((header, body))
        return real(header, body, clients, seconds)

    post.ask = ask
    with pytest.raises(KeyboardInterrupt):
        conduct(bench.request(folder / "run"), post, should_stop=lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    return next((header, body) for header, body in asked if header["kind"] == "train")


def private(folder, more=""):
    return Direct(bench.clients(folder, more=PRIVACY + more))


def other(body, bit=1):
    """Another w: one number of it is another by its last bits."""
    changed = np.frombuffer(body, np.int32).copy()
    changed[0] ^= bit
    return changed.tobytes()


def test_a_round_is_answered_once(tmp_path, question):
    """The same w gets the same bytes, in whatever attempt; one bit of it changed gets nothing, and no new noise."""
    header, body = question
    post = private(tmp_path)
    first = post.clients[0].answer(header, body)
    assert len(first[1]) == len(body)
    for attempt in range(2, 30):
        reply, payload = post.clients[0].answer({**header, "attempt": attempt}, other(body, attempt))
        assert reply["error"].startswith("round-answered: ")
        assert payload == b""
    post.restart(0)
    assert post.clients[0].answer({**header, "attempt": 99}, body) == first
    told = spent(tmp_path)
    assert (told["rounds"], told["epsilon"], told["delta"]) == (1, 0.1, 1e-6)


def test_rounds_whose_answer_is_no_longer_kept_are_not_answered_again(tmp_path, question):
    header, body = question
    (client, *_) = private(tmp_path).clients
    for round in range(5):
        assert client.answer({**header, "round": round}, other(body, round))[1]
    reply, _ = client.answer({**header, "round": 0, "attempt": 7}, body)
    assert reply["error"].startswith("round-answered: ")
    assert spent(tmp_path)["jobs"] == {"job-1": 4}


@pytest.mark.parametrize("cap", ["max_rounds = 3", "max_epsilon = 0.3", "max_delta = 3e-6"])
def test_the_cap_is_the_clients_own(tmp_path, question, cap):
    """Of all jobs together; what was answered stays answered; nothing is trained beyond it."""
    header, body = question
    post = private(tmp_path, f"{cap}\n")
    answers = []
    for number in range(3):  # another job every time
        task = {**header["task"], "job": f"job-{number}"}
        answers.append(post.clients[0].answer({**header, "task": task}, body))
        assert answers[-1][1]
    post.restart(0)
    for job, round in (("job-0", 1), ("job-2", 4), ("new", 0)):
        reply, payload = post.clients[0].answer(
            {**header, "task": {**header["task"], "job": job}, "round": round, "attempt": 9}, body
        )
        assert reply["error"].startswith("budget-spent: ")
        assert payload == b""
    assert not (tmp_path / "state-0" / "new" / "round-000000").exists()
    again = post.clients[0].answer({**header, "task": {**header["task"], "job": "job-1"}}, body)
    assert again == answers[1]
    assert spent(tmp_path)["rounds"] == 3


def test_a_run_ends_at_the_cap(tmp_path):
    """The server goes on while enough others answer, else the run ends and says why."""
    post = Direct(bench.clients(tmp_path, more=PRIVACY))
    post.paths[2].write_text(post.paths[2].read_text() + "max_rounds = 2\n")
    post.restart(2)
    with pytest.raises(Failed, match=r"round 3: fewer than 3 .*client 2: budget-spent"):
        conduct(bench.request(tmp_path / "run"), post)
    conduct(bench.request(tmp_path / "run", minimum=2), post)
    assert [spent(tmp_path, i)["rounds"] for i in range(3)] == [5, 5, 2]


def test_a_resumed_server_gets_the_kept_answers(tmp_path):
    """Killed when two of three have answered round 3: asked again with the same w they say the same and pay nothing."""

    class Killed(BaseException):
        pass

    heard = {}

    def kill(client, header, reply):
        if header["kind"] == "train" and header["round"] == 2:
            if len(heard) == 2:
                raise Killed
            heard[client] = reply.body
        return [reply]

    post = private(tmp_path)
    post.twist = kill
    run = bench.request(tmp_path / "run")
    with pytest.raises(Killed):
        conduct(run, post)
    again = {}

    def listen(client, header, reply):
        if header["kind"] == "train" and header["round"] == 2:
            again[client] = reply.body
        return [reply]

    post.twist = listen
    conduct(run, post)
    assert heard == {client: again[client] for client in heard}
    assert [spent(tmp_path, i)["rounds"] for i in range(3)] == [5, 5, 5]


def test_what_all_answers_cost_together(tmp_path, question, capsys):
    """T Gaussians with noise z are one with z / sqrt(T), whose epsilon is known (Balle and Wang, ICML 2018, theorem 8);
    the owner is told by `qupel flower audit`."""
    pytest.importorskip("dp_accounting")
    header, body = question
    (client, *_) = private(tmp_path).clients
    for round in range(4):
        client.answer({**header, "round": round}, body)
    z = math.sqrt(2 * math.log(1.25 / 1e-6)) / 0.1 / math.sqrt(4)

    def left(e):
        return stats.norm.cdf(0.5 / z - e * z) - math.exp(e) * stats.norm.cdf(-0.5 / z - e * z) - 4e-6

    together = optimize.brentq(left, 0, 1)
    assert together < 0.4 / 2
    added = "4 rounds answered with noise; added up epsilon 0.4, delta 4e-06"
    assert ledger.spent(tmp_path / "state-0").told() == f"{added}; together, at that delta, epsilon {together:.3g}"
    (tmp_path / "client.toml").write_text((tmp_path / "client-0.toml").read_text())
    watch.show_log(tmp_path, every=False)
    assert f"privacy: {added}; together" in capsys.readouterr().out
    path = tmp_path / "state-0" / LEDGER
    before = {k: v for k, v in json.loads(path.read_text()).items() if k != "squares"}  # of an older version
    path.write_text(json.dumps(before))
    client.answer({**header, "round": 4}, body)
    assert spent(tmp_path)["squares"] is None
    assert (
        ledger.spent(tmp_path / "state-0").told() == "5 rounds answered with noise; added up epsilon 0.5, delta 5e-06"
    )


KILLED = """
import json, os, signal, sys
from pathlib import Path
from qupel.flower import client, ledger
from qupel.flower.worker import open_client
folder = Path(sys.argv[1])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "before it pays":
    ledger.Ledger.pay = die
else:
    real = ledger.Ledger.pay
    ledger.Ledger.pay = lambda *a: (real(*a), die())
header = json.loads((folder / "header.json").read_text())
open_client(folder / "client-0.toml").answer(header, (folder / "w.bin").read_bytes())
"""


@pytest.mark.parametrize("moment", ["before it pays", "before it answers"])
def test_killed_around_the_payment(tmp_path, question, moment):
    """The answer is on disk and has not left: afterwards that very answer is given, and the round is paid for once."""
    header, body = question
    post = private(tmp_path)
    (tmp_path / "header.json").write_text(json.dumps(header))
    (tmp_path / "w.bin").write_bytes(body)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "state-0" / LEDGER).exists() == (moment == "before it answers")
    kept = (tmp_path / "state-0" / "job-1" / "round-000000" / "upload.bin").read_bytes()
    assert post.clients[0].answer({**header, "attempt": 2}, body)[1] == kept
    assert spent(tmp_path)["rounds"] == 1


@pytest.mark.parametrize("damage", [b"", b"{}x", b'{"rounds": -4}', b'{"rounds": 1, "epsilon": NaN}'])
def test_a_damaged_ledger_is_no_fresh_start(tmp_path, question, damage):
    header, body = question
    post = private(tmp_path)
    (tmp_path / "state-0").mkdir()
    (tmp_path / "state-0" / LEDGER).write_bytes(damage)
    reply, payload = post.clients[0].answer(header, body)
    assert reply["error"].startswith("ledger-damaged: ")
    assert payload == b""


def test_a_round_that_fails_is_an_answer(tmp_path, question):
    """Whether it fails depends on the data: that is told once a round, too."""
    header, body = question
    client = private(tmp_path).clients[0]
    broken = np.frombuffer(body, np.float32).copy()
    broken[:] = np.nan
    reply, _ = client.answer(header, broken.tobytes())
    assert reply["error"] == boundary.DECLINED
    for w in (broken.tobytes(), body):
        reply, _ = client.answer({**header, "attempt": 2}, w)
        assert reply["error"].startswith("round-answered: ")
    assert client.answer({**header, "round": 1}, body)[1]  # from the state it had


def test_no_job_can_take_the_ledgers_name(tmp_path, question):
    header, body = question
    reply, _ = private(tmp_path).clients[0].answer({**header, "task": {**header["task"], "job": LEDGER}}, body)
    assert reply["error"] == boundary.DECLINED
    assert [path.name for path in (tmp_path / "state-0").iterdir()] == [audit.LOG]


def test_caps_below_one_round_are_a_mistake(tmp_path):
    with pytest.raises(UserError, match="one round costs"):
        private(tmp_path, "max_epsilon = 0.05\n")


# --- the config's own [privacy]: noise on the sum ---

CENTRAL = bench.config().replace("[model]", "[privacy]\nclip = 0.05\nnoise = {noise}\n{more}[model]", 1)


def central(noise=2.0, more=""):
    return CENTRAL.format(noise=noise, more=more)


def rounds_paid(folder):
    (run,) = json.loads((folder / "privacy.json").read_text())["runs"].values()
    return {int(r): len(sums) for r, sums in run["rounds"].items()}, run


def test_clients_clip_and_the_server_adds_noise_that_no_seed_tells(tmp_path):
    """Every upload is within the clip of its w; two runs of one seed differ; clients are told the clip, no more."""
    pytest.importorskip("dp_accounting")
    ends, moves = [], []
    for name in ("a", "b"):
        post = Direct(bench.clients(tmp_path / name))
        real = post.ask

        def ask(header, body, clients, seconds, real=real):
            for reply in real(header, body, clients, seconds):
                if header["kind"] == "train":
                    upload, w = (np.frombuffer(b, np.float32) for b in (reply.body, body))
                    moves.append(float(np.linalg.norm(upload - w)))
                yield reply

        post.ask = ask
        ends.append(bench.final_w(conduct_in(tmp_path / name, post)))
        told = post.headers[-1]["task"]["phases"][0]["server"]
        assert (told["name"], told["clip"], told["server"]) == ("private", 0.05, None)
    assert max(moves) <= 0.05 * (1 + 1e-3)
    assert not torch.equal(*ends)
    paid, run = rounds_paid(tmp_path / "a" / "run")
    assert paid == dict.fromkeys(range(5), 1)
    assert run["clients"] == {str(i): [5] for i in range(3)}
    lines = [json.loads(text) for text in (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["privacy"]["epsilon"] < lines[-1]["privacy"]["epsilon"]
    assert (tmp_path / "a" / "run" / "noise.key").stat().st_mode & 0o77 == 0


def conduct_in(folder, post, **options):
    target = folder / "run"
    conduct(target if target.exists() else bench.request(target, central()), post, **options)
    return target


def test_a_server_killed_after_paying_pays_no_second_time(tmp_path):
    """Between the sum and the checkpoint; clients give their kept answers, so the sum and its noise are the same."""
    pytest.importorskip("dp_accounting")
    post = Direct(bench.clients(tmp_path))
    counts = []

    def stop():
        counts.append(1)
        if len(counts) in {2, 4}:
            raise KeyboardInterrupt
        return False

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            conduct_in(tmp_path, post, should_stop=stop)
    assert rounds_paid(tmp_path / "run")[0] == dict.fromkeys(range(3), 1)
    conduct_in(tmp_path, post)
    paid, run = rounds_paid(tmp_path / "run")
    assert paid == dict.fromkeys(range(5), 1)
    assert run["clients"] == {str(i): [5] for i in range(3)}


@pytest.mark.parametrize("text", [central(), bench.config()])
def test_what_rounding_left_is_not_added_to_a_clipped_move(tmp_path, text):
    pytest.importorskip("dp_accounting")
    post = Direct(bench.clients(tmp_path))
    conduct(bench.request(tmp_path / "run", text, upload="int8"), post)
    left = [client.job.generations.upto(4, []) for client in post.clients]
    assert all((residual is None) == ("[privacy]" in text) for residual in left)
