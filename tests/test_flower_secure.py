"""Secure rounds with the federation's own code, client and server, the post in this process; and clients that do not
trust their server: what is outside of their policy is refused, and logged."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import flower_bench as bench
from flower_bench import Direct
from qupel.engine.rounds import Failed, Stopped
from qupel.flower import audit, boundary, chain, peers
from qupel.flower.masking import OPENED
from qupel.flower.replay import replay
from qupel.flower.server import as_bytes, conduct, open_fleet
from qupel.parts.base import vector
from qupel.parts.servers import servers
from qupel.parts.servers.base import sums
from qupel.run.config import parse
from qupel.run.experiment import run_experiment
from qupel.run.sections import SecureConfig
from qupel.util.errors import UserError

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from qupel.flower.secagg import Party, pack, signed_text, unpack

SECURE = SecureConfig(clip=0.5, bits=32)
LIGHT = f"""
rounds = 5
local_steps = 1
batch = 4
evaluate_every = 5
save_models = false
[model]
name = "mlp"
args = {{hidden = [8, 8]}}
{bench.SPLIT.format(count=5)}
[methods.QuPeL]
method = "fedavg"
"""
PERSONAL = LIGHT.replace('"fedavg"', '"qupel"').replace("local_steps = 1", "local_steps = 3")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def keys(folder: Path, count: int) -> None:
    """As `qupel flower init` makes them."""
    public = {}
    for i in range(count):
        key = ec.generate_private_key(ec.SECP384R1())
        (folder / f"keys-{i}").mkdir(parents=True, exist_ok=True)
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        (folder / f"keys-{i}" / "key").write_bytes(private)
        known = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        public[f"client-{i}"] = known.decode()
    for i in range(count):
        peers.write(folder / f"keys-{i}" / "peers", public)


def federation(folder: Path, count: int = 5, more: str = "") -> Direct:
    paths = bench.clients(folder, count, more)
    for i, path in enumerate(paths):
        path.write_text(f'keys = "keys-{i}"\n{path.read_text()}')
    keys(folder, count)
    return Direct(paths)


def request(folder: Path, count: int = 5, minimum: int = 3, text: str = "", **terms) -> Path:
    return bench.request(folder, text or LIGHT, clients=count, minimum=minimum, **({"secure": SECURE} | terms))


def lines(folder: Path, client: int) -> list[dict]:
    return [line.entry for line in chain.read(folder / f"state-{client}" / audit.LOG)]


def told(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


# --- whole runs ---


def test_a_secure_run_ends_where_the_plain_one_does(tmp_path):
    """32 bits: as far as fixed point tells. And the server has seen no upload: what came is no client's vector."""
    text = PERSONAL.replace("args = {hidden = [8, 8]}", "")
    plain = conduct(request(tmp_path / "plain", text=text, secure=None), Direct(bench.clients(tmp_path / "clients", 5)))
    post, bodies = federation(tmp_path / "s"), []

    def see(client, header, reply):
        if header["kind"] == "mask":
            bodies.append((client, header["round"], reply.body))
        return [reply]

    post.twist = see
    finished = conduct(request(tmp_path / "run", text=text), post)
    assert torch.allclose(vector(finished.w), vector(plain.w), atol=1e-4)
    assert not torch.equal(vector(finished.w), vector(plain.w))
    assert len(bodies) == 5 * 5
    for client, round, body in bodies[:2]:
        kept = (tmp_path / "s" / f"state-{client}" / "job-1").glob(f"round-{round:06d}/upload.bin")
        assert all(np.frombuffer(body, np.uint8)[:400].tobytes() != path.read_bytes()[:400] for path in kept)
        counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
        assert counts.min() > 0.7 * counts.mean()
    assert told(tmp_path / "run")[-1]["upload_bytes"] > 5 * len(vector(finished.w))  # 35 bits are five bytes
    assert told(tmp_path / "run")[-1]["refused"] == []


@pytest.mark.parametrize("kind", ["train", "share", "mask", "open"])
def test_a_client_that_goes_in_a_round_and_comes_back(tmp_path, kind):
    """Its worker dies at a stage of the second round: the others' sum is opened, and it takes part in the next one."""
    post = federation(tmp_path)
    seen = []

    def die(client, header, reply):
        if (client, header.get("round"), header["kind"]) == (2, 1, kind) and not seen:
            seen.append(1)
            post.restart(2)
            return []
        return [reply]

    post.twist = die
    fleet = open_fleet(request(tmp_path / "run", minimum=4), post)
    w = (torch.zeros(fleet.size),)
    list(fleet.train(0, w, range(5)))
    done = {d.client: d for d in fleet.train(1, w, range(5))}
    assert seen
    assert done[-1].share == (5 if kind == "open" else 4)
    kept = [tmp_path / f"state-{i}/job-1/round-000001/upload.bin" for i in range(5) if kind == "open" or i != 2]
    total = sum(np.frombuffer(path.read_bytes()[:-4], "<i4").astype(np.int64) for path in kept)
    expected = torch.from_numpy(total * (0.5 / (2**31 - 1)) / len(kept)).float()
    assert torch.equal(done[-1].upload.rows[0], expected)  # of their own integers, bit for bit
    assert (done[2].fault is None) == (kind == "open")  # who has masked is in the sum
    again = {d.client: d for d in fleet.train(2, w, range(5))}
    assert again[-1].share == 5


@pytest.mark.parametrize("kind", ["train", "share", "mask", "open"])
def test_a_client_that_is_ill_three_times_is_left_alone(tmp_path, kind):
    """At whatever stage it fails: named, not asked for five rounds, also by a server that is stopped meanwhile, then
    asked again, and well. Who fails when the sum is opened is in it all the same."""
    post, rounds = federation(tmp_path), []
    sick = lambda client, header: (client, header["kind"]) == (2, kind) and header["round"] < 3  # noqa: E731
    post.twist = lambda client, header, reply: [] if sick(client, header) else [reply]
    folder = request(tmp_path / "run", text=LIGHT.replace("rounds = 5", "rounds = 10"), audit=True)
    with pytest.raises(Stopped):
        conduct(folder, post, watch=lambda p: rounds.append(p.round), should_stop=lambda: len(rounds) == 5)
    conduct(folder, post)
    assert [r for asked, r, client in post.asked if (asked, client) == ("train", 2)] == [0, 1, 2, 8, 9]
    refused = [text for line in told(folder) for text in line["refused"]]
    assert len(refused) == 3
    assert all(text.startswith(f"client 2: no answer before the deadline ({kind})") for text in refused)
    assert refused[2].endswith("3 times in a row: left alone until round 9")
    logged = [line.entry for line in chain.read(folder / "audit.jsonl")]
    sums = [c["share"] for entry in logged for c in entry.get("clients", []) if c["client"] == -1]
    assert sums == [5 if kind == "open" else 4] * 3 + [4] * 5 + [5] * 2


@pytest.mark.parametrize("kind", ["mask", "open"])
def test_who_is_needed_for_a_sum_is_asked_however_ill(tmp_path, kind):
    """Two of five fail for ever: four are needed, or four must open. Rounds are given up, and nobody is left alone."""
    post = federation(tmp_path)
    post.twist = lambda client, header, reply: [] if client < 2 and header["kind"] == kind else [reply]
    with pytest.raises(Failed, match="6 rounds in a row were given up"):
        conduct(request(tmp_path / "run", minimum=4, text=LIGHT.replace("rounds = 5", "rounds = 9")), post)
    asked = {(r, client) for kind, r, client in post.asked if kind == "train"}
    assert asked == {(r, client) for r in range(6) for client in range(5)}


def test_the_mean_is_that_of_the_clients_integers(tmp_path):
    """What the loop gets is the mean of what the clients have on their own disks."""
    post = federation(tmp_path)
    fleet = open_fleet(request(tmp_path / "run"), post)
    w = (torch.full((fleet.size,), 0.01),)
    done = {d.client: d for d in fleet.train(0, w, range(5))}
    kept = [tmp_path / f"state-{i}/job-1/round-000000/upload.bin" for i in range(5)]
    total = sum(np.frombuffer(path.read_bytes()[:-4], "<i4").astype(np.int64) for path in kept)
    expected = w[0].double() + torch.from_numpy(total * (0.5 / (2**31 - 1)) / 5)
    assert torch.equal(done[-1].upload.rows[0], expected.float())
    assert done[-1].upload.shares is None


def test_below_the_minimum_a_round_is_given_up_and_the_run_goes_on(tmp_path):
    post = federation(tmp_path)
    opened = []

    def silent(client, header, reply):
        if header["kind"] == "open":
            opened.append(header["round"])
        return [] if header["kind"] == "mask" and header["round"] == 1 and client < 2 else [reply]

    post.twist = silent
    conduct(request(tmp_path / "run", minimum=4), post)
    assert set(opened) == {0, 2, 3, 4}
    refused = [text for line in told(tmp_path / "run") for text in line["refused"]]
    assert "the sum: round 2 is given up, w stays: 3 clients are left, 4 are needed" in refused
    (one,) = {text for text in refused if text.startswith("client 0")}
    assert one == "client 0: no answer before the deadline (mask)"


def test_rounds_that_are_given_up_for_ever_end_the_run(tmp_path):
    post = federation(tmp_path)
    post.twist = lambda client, header, reply: [] if header["kind"] == "share" else [reply]
    text = LIGHT.replace("rounds = 5", "rounds = 9")
    with pytest.raises(Failed, match="6 rounds in a row were given up"):
        conduct(request(tmp_path / "run", text=text), post)


def test_a_client_helps_to_open_one_sum_of_a_round(tmp_path):
    """A server that is killed when it has the shares, and asks for the round again, does not get a second sum."""
    post = federation(tmp_path)

    class Killed(BaseException):
        pass

    def kill(client, header, reply):
        if header["kind"] == "open" and header["round"] == 1 and client == 0 and not (tmp_path / "dead").exists():
            (tmp_path / "dead").touch()
            raise Killed
        return [reply]

    post.twist = kill
    folder = request(tmp_path / "run")
    with pytest.raises(Killed):
        conduct(folder, post)
    assert json.loads((tmp_path / "state-3/job-1" / OPENED).read_text()) == {"round": 1}
    for i in range(5):
        post.restart(i)
    finished = conduct(folder, post)
    refused = [text for line in told(folder) for text in line["refused"]]
    assert f"client 3: {boundary.OPENED}" in refused
    assert sum("round 2 is given up" in text for text in refused) == 1
    assert len(finished.lines) == len(told(folder))
    assert finished.lines[-1]["round"] == 5
    assert any(line.get("refused") == boundary.OPENED for line in lines(tmp_path, 3))


def test_a_secure_job_is_never_answered_without_masks(tmp_path):
    """A server that has keys, and asks for the same round once more as if the job were a plain one."""
    post = federation(tmp_path)
    post.twist = lambda client, header, reply: [] if header["kind"] == "share" else [reply]
    fleet = open_fleet(request(tmp_path / "run"), post)
    w = (torch.zeros(fleet.size),)
    list(fleet.train(0, w, range(5)))
    fleet.task, fleet.sums = fleet.task.model_copy(update={"secure": None}), None
    replies = list(fleet.ask("train", 0, as_bytes(w), range(5)))
    assert {(r.header.get("error"), r.body) for r in replies} == {(boundary.POLICY["secure"], b"")}


def test_a_client_with_a_wrong_key_is_named_where_the_server_knows_the_keys(tmp_path):
    post = federation(tmp_path)
    keys(tmp_path / "other", 5)
    (tmp_path / "keys-4/key").write_bytes((tmp_path / "other/keys-4/key").read_bytes())
    fleet = open_fleet(request(tmp_path / "run"), post)
    fleet.peers = tmp_path / "keys-0"
    done = {d.client: d for d in fleet.train(0, (torch.zeros(fleet.size),), range(5))}
    assert done[4].fault == "its keys are not signed with its key of the federation"
    assert done[-1].share == 4


@pytest.mark.parametrize("at", [0, 32])
def test_a_client_with_keys_that_nobody_can_agree_with_is_named(tmp_path, monkeypatch, at):
    """Points of small order, well signed: the others could not answer, and would be left out in its place."""
    real = Party.advertise

    def advertise(self):
        advert = real(self)
        if self.client != 4:
            return advert
        keys = advert[:at] + bytes(32) + advert[at + 32 : 96]
        return keys + self.sign(signed_text(4, keys, self.rules))

    monkeypatch.setattr(Party, "advertise", advertise)
    fleet = open_fleet(request(tmp_path / "run"), federation(tmp_path))
    fleet.peers = tmp_path / "keys-0"
    done = {d.client: d for d in fleet.train(0, (torch.zeros(fleet.size),), range(5))}
    assert {i: d.fault for i, d in done.items() if d.fault} == {4: "its keys cannot be used"}
    assert done[-1].share == 4


def test_a_stopped_run_goes_on(tmp_path):
    folder, post, rounds = request(tmp_path / "run"), federation(tmp_path), []
    with pytest.raises(Stopped):
        conduct(folder, post, watch=lambda p: rounds.append(p.round), should_stop=lambda: len(rounds) == 1)
    conduct(folder, post, watch=lambda p: rounds.append(p.round))
    assert rounds == [1, 2, 3, 4, 5]
    assert all(line["refused"] == [] for line in told(folder))


@pytest.mark.parametrize("method", ["scaffold", "ifca"])
def test_rows_and_shares_add_up_as_in_a_plain_run(tmp_path, method):
    """Methods that send several rows, or rows that count by a share."""
    text = LIGHT.replace('"fedavg"', f'"{method}"').replace("rounds = 5", "rounds = 2")
    plain = conduct(request(tmp_path / "plain", text=text, secure=None), Direct(bench.clients(tmp_path / "clients", 5)))
    finished = conduct(
        request(tmp_path / "run", text=text, secure=SecureConfig(clip=4.0, bits=32)), federation(tmp_path)
    )
    assert len(finished.w) == len(plain.w) > 1
    assert torch.allclose(vector(finished.w), vector(plain.w), atol=1e-4)


def test_a_private_client_takes_part(tmp_path):
    """Noise, then fixed point, then masks; it pays as it does without."""
    private = "[privacy]\nclip = 0.5\nepsilon = 0.5\ndelta = 1e-5\n"
    conduct(request(tmp_path / "run"), federation(tmp_path, more=private))
    spent = json.loads((tmp_path / "state-1/_privacy.json").read_text())
    assert spent["rounds"] == 5
    assert all(line["refused"] == [] for line in told(tmp_path / "run"))


def covered(text: str) -> str:
    return LIGHT.replace("[model]", f"[privacy]\n{text}\n[model]", 1)


@pytest.mark.parametrize("how", ["privacy", "norm bound"])
def test_fixed_point_makes_no_move_longer_than_the_clip_that_is_counted(tmp_path, how):
    """A move as long as the clip, rounded at random to sixteen coarse bits, may become longer."""
    secure = SecureConfig(clip=1.0, bits=16)
    text = (
        covered("clip = 0.01\nnoise = 2")
        if how == "privacy"
        else f'{LIGHT}server = {{name = "private", clip = 0.01}}\n'
    )
    text = text.replace("[methods.QuPeL]", "[methods.QuPeL]\neta1 = 5.0")
    fleet = open_fleet(request(tmp_path / "run", text=text, secure=secure), federation(tmp_path))
    list(fleet.train(0, (torch.full((fleet.size,), 0.01),), range(5)))
    step, least = 1.0 / (2**15 - 1), []
    for i in range(5):
        kept = np.frombuffer((tmp_path / f"state-{i}/job-1/round-000000/upload.bin").read_bytes()[:-4], "<i2")
        least.append(float(np.linalg.norm(kept * step)))
    assert max(least) <= 0.01
    assert min(least) > 0.01 - 2 * step * np.sqrt(fleet.size)  # they were clipped


def test_shared_noise_is_whole_in_the_sum_or_the_run_says_why(tmp_path):
    """Ten clips of noise on the sum of five, each of which adds its part; cut at secure.clip it would be less."""
    text = covered('kind = "shared"\nclip = 0.01\nnoise = 10')
    said = r"secure.clip = 0.2: it would cut the clients' noise, of deviation 0.0447; 0.368 and more keep it whole"
    folder = request(tmp_path / "cut", text=text, secure=SecureConfig(clip=0.2))
    with pytest.raises(UserError, match=said):
        conduct(folder, federation(tmp_path / "a"))
    secure = SecureConfig(clip=0.5, bits=32)
    fleet = open_fleet(request(tmp_path / "run", text=text, secure=secure), federation(tmp_path / "b"))
    done = {d.client: d for d in fleet.train(0, (torch.zeros(fleet.size),), range(5))}
    moved = 5 * done[-1].upload.rows[0]
    assert float(moved.std()) == pytest.approx(0.1, rel=5 / np.sqrt(2 * fleet.size))


def test_rounding_that_is_as_large_as_a_private_move_is_refused(tmp_path):
    folder = request(tmp_path / "run", text=covered("clip = 0.001\nnoise = 2"), secure=SecureConfig(clip=1.0))
    with pytest.raises(UserError, match="rounding to 16 bits may move an upload by more than half of its clip"):
        conduct(folder, federation(tmp_path))


# --- what cannot be combined ---


def test_servers_that_need_more_than_a_sum_are_refused(tmp_path):
    able = {name for name in servers if sums(servers[name]())}
    assert {"mean", "fedavgm", "fedadam"} <= able
    assert not {"median", "trimmed", "normbound", "krum"} & able
    text = f'{LIGHT}server = "median"\n'
    with pytest.raises(
        UserError, match="server 'median' looks at uploads one by one, and with secure there is only their sum"
    ):
        conduct(request(tmp_path / "run", text=text), federation(tmp_path))


def test_what_else_does_not_go_together_says_so(tmp_path):
    with pytest.raises(UserError, match="weighted = true: with secure every client counts once"):
        conduct(request(tmp_path / "a", text=f"weighted = true\n{LIGHT}"), federation(tmp_path))
    with pytest.raises(UserError, match="--upload int8: with secure"):
        conduct(request(tmp_path / "b", upload="int8"), Direct([tmp_path / f"client-{i}.toml" for i in range(5)]))
    with pytest.raises(UserError, match="secure: it is for machines that do not trust each other"):
        run_experiment(parse(f"{LIGHT}[secure]\n", "test"), tmp_path / "c")


def test_a_client_without_memory_says_so(tmp_path):
    post = federation(tmp_path, more="")
    for path in post.paths:
        path.write_text("resident = false\n" + path.read_text())
    post = Direct(post.paths)
    fleet = open_fleet(request(tmp_path / "run"), post)
    done = list(fleet.train(0, (torch.zeros(fleet.size),), range(5)))
    assert {d.fault for d in done if d.client >= 0} == {boundary.NOT_RESIDENT}


# --- a client that does not trust its server ---


POLICIES = {
    "methods": ('methods = ["fedavg", "local"]', "qupel"),
    "rounds": ("rounds = 4", "5 rounds"),
    "secure": ("secure = true", "a job without secure aggregation"),
    "epsilon": ("epsilon = 0.5", "[privacy] is none"),
}


@pytest.mark.parametrize("key", POLICIES)
def test_a_job_outside_of_the_policy_is_refused_and_logged(tmp_path, key):
    """By one client of three; the others go on without it."""
    post = Direct(bench.clients(tmp_path))
    policy, why = POLICIES[key]
    post.paths[1].write_text(f"{post.paths[1].read_text()}[policy]\n{policy}\n")
    post.restart(1)
    fleet = open_fleet(bench.request(tmp_path / "run", PERSONAL, minimum=2), post)
    done = {d.client: d.fault for d in fleet.train(0, (torch.zeros(fleet.size),), range(3))}
    assert done == {0: None, 1: boundary.POLICY[key], 2: None}
    logged = [line for line in lines(tmp_path, 1) if "refused" in line]
    assert {(line["refused"], line["why"]) for line in logged} == {(boundary.POLICY[key], why)}
    assert not list((tmp_path / "state-1").glob("job-1/round-*"))


def test_another_network_is_refused_at_hello_and_in_a_job(tmp_path):
    post = Direct(bench.clients(tmp_path))
    post.paths[1].write_text(f'{post.paths[1].read_text()}[policy]\nnetworks = ["digits_cnn"]\n')
    post.restart(1)
    folder = bench.request(tmp_path / "run", minimum=2)
    fleet = open_fleet(folder, post)
    left_out = json.loads((folder / "clients.json").read_text())["left_out"]
    assert left_out == {"1": boundary.POLICY["networks"]}
    (done,) = [d for d in fleet.train(0, (torch.zeros(fleet.size),), range(3)) if d.client == 1]
    assert done.fault == boundary.POLICY["networks"]
    assert [line["asked"] for line in lines(tmp_path, 1) if "refused" in line] == ["hello", "train"]
    layout = fleet.task.layout
    post.paths[1].write_text(post.paths[1].read_text().replace('"digits_cnn"', f'"{layout}"'))
    post.restart(1)
    (done,) = [d for d in fleet.train(1, (torch.zeros(fleet.size),), range(3)) if d.client == 1]
    assert done.fault is None


def test_a_sum_of_two_is_refused_and_logged(tmp_path):
    """A server that lets three clients begin, and then asks each to mask, or to open, as if there were two."""
    post = federation(tmp_path)
    fleet = open_fleet(request(tmp_path / "run"), post)
    ask = fleet.ask

    def fewer(kind, round, body, clients, **more):
        if kind == at:
            body = {i: pack({j: v for j, v in unpack(b).items() if j in {i, 0, 1}}) for i, b in body.items()}
        return ask(kind, round, body, clients, **more)

    fleet.ask = fewer
    for round, at in enumerate(("share", "mask", "open")):
        done = list(fleet.train(round, (torch.zeros(fleet.size),), range(5)))
        assert done[-2].fault.startswith(f"round {round + 1} is given up")
        logged = [line for line in lines(tmp_path, 0) if line.get("refused") == boundary.POLICY["least"]]
        assert {line["asked"] for line in logged if line["round"] == round} == {at}
        assert all(line["why"].startswith("a sum of 2 clients; at least") for line in logged)
    assert json.loads((tmp_path / "state-0/job-1" / OPENED).read_text()) == {"round": -1}


def test_a_client_may_ask_for_larger_sums(tmp_path):
    post = federation(tmp_path, more="[policy]\nleast = 6\n")
    fleet = open_fleet(request(tmp_path / "run"), post)
    done = list(fleet.train(0, (torch.zeros(fleet.size),), range(5)))
    assert {d.fault for d in done if d.client >= 0} == {boundary.POLICY["least"]}
    assert lines(tmp_path, 2)[-1]["why"] == "a sum of 5 clients; at least 6 are needed"


def test_a_server_that_invents_a_client_is_refused(tmp_path):
    """Client 4's place is taken by somebody with a key that the others do not know."""
    post = federation(tmp_path)
    other = tmp_path / "other"
    keys(other, 5)
    (tmp_path / "keys-4/key").write_bytes((other / "keys-4/key").read_bytes())
    fleet = open_fleet(request(tmp_path / "run"), post)
    done = {d.client: d for d in fleet.train(0, (torch.zeros(fleet.size),), range(5))}
    assert [done[i].fault for i in range(4)] == [boundary.POLICY["sum"]] * 4
    assert "which that client has not signed" in lines(tmp_path, 0)[-1]["why"]


def test_the_peers_file_is_read_strictly(tmp_path):
    keys(tmp_path, 2)
    path = tmp_path / "keys-0/peers"
    assert sorted(peers.read(path)) == [0, 1]
    good = path.read_text().splitlines()
    wrong = {
        "client-0 ssh-rsa AAAA": "line 1",
        f"{good[0]}\n{good[0]}": "line 2",
        f"{good[0]}\nclient-7{good[0][8:]}": "one key for two",
    }
    for text, why in wrong.items():
        path.write_text(text)
        with pytest.raises(UserError, match=why):
            peers.read(path)
    path.unlink()
    with pytest.raises(UserError, match="renew"):
        peers.read(path)


# --- logs ---


def test_the_log_has_every_answer_before_it_leaves(tmp_path):
    """Count and hash of every byte, of all kinds of answers, as the server got them."""
    post, left = Direct(bench.clients(tmp_path)), []

    def see(client, header, reply):
        if client == 0:
            told = json.dumps(reply.header).encode() + reply.body
            left.append((header["kind"], header.get("round"), len(told), hashlib.sha256(told).hexdigest()))
            assert lines(tmp_path, 0)[-1]["left_hash"] == left[-1][3]
        return [reply]

    post.twist = see
    text = LIGHT.replace("save_models = false", "").replace("clients = 5", "clients = 3")
    conduct(bench.request(tmp_path / "run", text), post)
    assert [(e["asked"], e["round"], e["left"], e["left_hash"]) for e in lines(tmp_path, 0)] == left
    account = audit.accounts(chain.read(tmp_path / "state-0" / audit.LOG))["job-1"]
    assert account.rounds == {0, 1, 2, 3, 4}
    assert account.refused == {}
    assert account.left == sum(size for kind, _, size, _ in left if kind != "hello")


def test_a_client_that_cannot_write_its_log_answers_nothing(tmp_path):
    post = Direct(bench.clients(tmp_path))
    (tmp_path / "state-0").mkdir()
    (tmp_path / "state-0" / audit.LOG).write_text("not a log\n")
    fleet = open_fleet(bench.request(tmp_path / "run", minimum=2), post)
    done = {d.client: d for d in fleet.train(0, (torch.zeros(fleet.size),), range(3))}
    assert done[0].fault == boundary.NO_LOG
    assert done[1].fault is None


@pytest.mark.parametrize("terms", [{}, {"upload": "int8"}, {"secure": SECURE}], ids=["fp32", "int8", "secure"])
def test_a_run_is_replayed_to_the_same_bits(tmp_path, terms):
    """Also one that was killed within a round and went on; and a server that did something else is found out."""
    secure = "secure" in terms
    post = federation(tmp_path)

    class Killed(BaseException):
        pass

    def kill(client, header, reply):
        stage = "mask" if secure else "train"
        if header["kind"] == stage and header["round"] == 2 and client == 0 and not (tmp_path / "dead").exists():
            (tmp_path / "dead").touch()
            raise Killed
        return [reply]

    post.twist = kill
    folder = request(tmp_path / "run", audit=True, **({"secure": None} | terms))
    with pytest.raises(Killed):
        conduct(folder, post)
    finished = conduct(folder, post)
    rounds, found = replay(folder)
    assert (rounds, found) == (5, hashlib.sha256(vector(finished.w).numpy().tobytes()).hexdigest())
    if secure:  # a sum a round, of eight bytes a number, and nothing of any client
        assert {path.stat().st_size for path in (folder / "audit").glob("*.bin")} == {8 * (len(finished.w[0]) + 1)}
    w = np.fromfile(folder / "w.bin", np.float32)
    (w + np.float32(1e-3)).tofile(folder / "w.bin")
    with pytest.raises(UserError, match=r"w.bin is .* replayed it is"):
        replay(folder)


def test_a_private_run_is_replayed_to_the_same_bits(tmp_path):
    """Also where a round was made again to another sum, which had noise of its own: the ledger says which."""
    post, rounds = federation(tmp_path), []

    def stop():
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    away = (0, "train", 1)
    post.twist = lambda i, header, reply: [] if (i, header["kind"], header.get("round")) == away else [reply]
    folder = request(tmp_path / "run", text=covered("clip = 0.1\nnoise = 2"), secure=None, audit=True)
    with pytest.raises(KeyboardInterrupt):
        conduct(folder, post, should_stop=stop)
    away = ()
    finished = conduct(folder, post)
    ledger = folder / "privacy.json"
    (run,) = json.loads(ledger.read_text())["runs"].values()
    assert [len(sums) for sums in run["rounds"].values()] == [1, 2, 1, 1, 1]
    before = ledger.read_bytes()
    assert replay(folder) == (5, hashlib.sha256(vector(finished.w).numpy().tobytes()).hexdigest())
    assert ledger.read_bytes() == before
    for name in ("privacy.json", "noise.key"):
        (folder / name).rename(folder / "away")
        with pytest.raises(UserError, match=f"{name} is missing"):
            replay(folder)
        (folder / "away").rename(folder / name)


def test_a_server_that_changes_what_it_was_sent_is_found_out(tmp_path):
    folder = request(tmp_path / "run", secure=None, audit=True)
    post = federation(tmp_path)
    conduct(folder, post)
    log, uploads = folder / "audit.jsonl", folder / "audit/round-000001.bin"
    # another upload in its place
    good = uploads.read_bytes()
    uploads.write_bytes(good[:-4] + b"\0\0\0\0")
    with pytest.raises(UserError, match="is not what the log names"):
        replay(folder)
    uploads.write_bytes(good)
    # a line of the log changed, or taken out
    text = log.read_text().splitlines(keepends=True)
    log.write_text("".join(text[:2] + text[3:]))
    with pytest.raises(UserError, match="line 3: it, or one before it, was changed"):
        replay(folder)
    # all hashes made anew around another upload: then the next w is not what was sent
    lied = np.frombuffer(good, np.float32).copy()
    lied[:10] += 0.5
    uploads.write_bytes(lied.tobytes())
    log.unlink()
    for entry in [json.loads(line)["entry"] for line in text]:
        if entry.get("round") == 1:
            entry["file"] = hashlib.sha256(lied.tobytes()).hexdigest()
        chain.append(log, entry)
    with pytest.raises(UserError, match=r"round 3: the server sent .* replayed it is"):
        replay(folder)
