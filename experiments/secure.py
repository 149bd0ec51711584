"""Digits on Flower with TLS: a run with --secure in which clients are killed on the way, beside plain ones.

    python experiments/secure.py [--runs plain secure killed] [--clients 20] [--rounds 10] [--kill 2]
    python experiments/secure.py --here --seeds 0 1 2 3 4
    python experiments/secure.py --page

Starts a federation on loopback, with node keys, for each of three runs: plain; secure, with clients killed (with their
workers, when a third and when two thirds of the rounds are done); plain, with the same ones killed. 40 minutes for 20
clients on two cores. --here: the same clients and server with the post in this process, some minutes a seed; who is
killed goes when it is asked to train, of a secure round to mask. --page: docs/results/secure.md from secure.json, which
each run is added to (`benchmarks/secure.py --out` adds its own part).
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from qupel.engine.rounds import Progress
from qupel.flower import folder as folders
from qupel.flower.drive import drive
from qupel.flower.frames import Header
from qupel.flower.post import Bodies, Reply, body_for
from qupel.flower.replay import replay
from qupel.flower.server import Request, Terms, conduct
from qupel.flower.tryout import Running, down, up
from qupel.flower.worker import open_client
from qupel.run import config as configs
from qupel.run.sections import SecureConfig
from qupel.util.files import write_json
from qupel.util.machine import machine

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RUNS = ("plain", "secure", "killed")
DEADLINE = 120.0  # of a question: so long the server waits for a client that has been killed
CONFIG = """
rounds = {rounds}
evaluate_every = {rounds}
save_models = false
bits = [2, 3]
[split]
clients = {clients}
[methods.QuPeL]
recipe = "qupel"
"""


def kill(running: Running, number: int) -> None:
    """A client's SuperNode and its worker, at once."""
    names = {f"client-{number}", f"worker of client-{number}"}
    for process in [*running.processes.values(), *running.workers()]:
        if process.name in names and process.alive():
            os.killpg(process.pid, signal.SIGKILL)


def killer(running: Running, target: Path, victims: dict[int, int], killed: dict[int, int]) -> None:
    """victims: client -> rounds done when it goes, in the midst of the next one."""
    while set(victims) - set(killed) and not (target / "end.json").exists():
        path = target / "progress.jsonl"
        done = len(path.read_text().splitlines()) if path.exists() else 0
        for client, rounds in victims.items():
            if client not in killed and done >= rounds:
                time.sleep(5)
                kill(running, client)
                killed[client] = done + 1
        time.sleep(1)


class Here:
    """The post in this process. victims: client -> the round in which it goes."""

    def __init__(self, federation: folders.Federation, victims: dict[int, int]) -> None:
        self.clients = [open_client(federation.client(i) / "client.toml") for i in range(federation.clients)]
        self.victims, self.gone = victims, dict[int, int]()

    def present(self) -> list[int]:
        return [i for i in range(len(self.clients)) if i not in self.gone]

    def ask(self, header: Header, body: Bodies, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        for i in clients:
            last = "mask" if "session" in header else "train"
            if header["kind"] == last and header["round"] + 1 == self.victims.get(i):
                self.gone[i] = self.victims[i]
            if i not in self.gone:
                yield Reply(i, *self.clients[i].answer(header, body_for(i, body)))


def measure(place: Path, name: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run, in a federation of its own: test accuracy of each client, seconds and bytes of a round."""
    clients, rounds = given.clients, given.rounds
    config = configs.parse(CONFIG.format(rounds=rounds, clients=clients), "experiment")
    federation = folders.init(place / name, clients, "127.0.0.1", 8443, config, "/opt/qupel")
    secure = SecureConfig() if name == "secure" else None
    terms = Terms(clients, clients * 2 // 3 + 1, DEADLINE, 900.0, secure=secure, audit=True)
    target, killed = federation.folder / "runs" / name, dict[int, int]()
    target.mkdir(parents=True)
    Request(job=f"{name}-1", config=config, label="QuPeL", seed=seed, terms=terms).write(target)
    kills = 0 if name == "plain" else given.kill
    victims = {1 + 7 * k: rounds * (k + 1) // (kills + 1) for k in range(kills)}
    if given.here:
        post, began = Here(federation, {client: done + 1 for client, done in victims.items()}), time.monotonic()

        def note(progress: Progress) -> None:
            with (target / "progress.jsonl").open("a") as file:
                told = {"round": progress.round, "refused": progress.refused, "line": bool(progress.line)}
                file.write(json.dumps(told | {"seconds": time.monotonic() - began}) + "\n")

        conduct(target, post, note)
        return outcome(target, post.gone, clients)
    try:
        up(federation, clients, seconds=1200)
        running = Running.of(federation)
        assert running is not None
        watcher = threading.Thread(target=killer, args=(running, target, victims, killed), daemon=True)
        watcher.start()
        tell = lambda line: print(name, line["round"], line["refused"], f"{line['seconds']:.0f} s", flush=True)  # noqa: E731
        drive(federation, running.address, target, "run", tell)
    finally:
        down(federation)
    return outcome(target, killed, clients)


def outcome(target: Path, killed: dict[int, int], clients: int) -> dict[str, Any]:
    progress, lines = (
        [json.loads(line) for line in (target / name).read_text().splitlines()]
        for name in ("progress.jsonl", "metrics.jsonl")
    )
    rounds = [(b["seconds"] - a["seconds"], b) for a, b in pairwise(progress)]
    shared = next(line for line in reversed(lines) if line["upload_bytes"])  # the last phases send nothing
    usual = [
        seconds
        for seconds, line in rounds
        if line["round"] <= shared["round"] and line["round"] not in killed.values() and not line["line"]
    ]
    return {
        "shared_rounds": shared["round"],
        "shared": scores_of(shared, clients),
        "test": scores_of(lines[-1], clients),
        "killed": {str(client): round for client, round in killed.items()},
        "refused": [f"round {line['round']}, {text}" for line in progress for text in line["refused"]],
        "round_seconds": [s for s, _ in rounds],  # from the second one on
        "seconds_a_round": statistics.median(usual or [s for s, _ in rounds]),
        "upload_bytes": shared["upload_bytes"],
        "replayed": replay(target)[1],
        "load": os.getloadavg()[1],
    }


def scores_of(line: dict[str, Any], clients: int) -> dict[str, float]:
    """Test accuracy by client."""
    told = line["clients"]
    return {str(i): value for i, value in zip(told.get("number", range(clients)), told["test"], strict=True)}


# --- the page ---


def accuracies(runs: dict[str, Any], key: str = "test") -> dict[str, float]:
    """Test accuracy in per cent of each run that has it, of the clients that all of them have."""
    told = {name: run[key] for name, run in runs.items() if key in run}
    everywhere = set.intersection(*map(set, told.values()))
    return {name: 100 * statistics.mean(scores[i] for i in sorted(everywhere)) for name, scores in told.items()}


def page(found: dict[str, Any]) -> str:
    told, lines = found["flower"], []
    runs = told["runs"]
    early, late = accuracies(runs, "shared"), accuracies(runs)
    names = {"plain": "plain", "secure": "`--secure`, two killed", "killed": "plain, the same two killed"}
    for name, run in runs.items():
        end = f"{late[name]:.1f}" if name in late else run["ended"]
        cells = [f"{early[name]:.1f}", end, f"{run['seconds_a_round']:.0f}", f"{run['upload_bytes']:,}"]
        lines.append(f"| {names[name]} | {' | '.join(cells)} |")
    here = {seed: (accuracies(each, "shared"), accuracies(each)) for seed, each in found["here"]["seeds"].items()}
    gaps = {
        name: [tuple(s["secure"] - s[name] for s in both) for both in here.values()] for name in ("plain", "killed")
    }
    seeds = [
        f"| {seed} | " + " | ".join(f"{scores[name]:.1f}" for scores in both for name in RUNS) + " |"
        for seed, both in here.items()
    ]
    spread = {
        name: [f"{statistics.mean(d):+.2f} ± {statistics.stdev(d):.2f}" for d in zip(*pairs, strict=True)]
        for name, pairs in gaps.items()
    }
    post, on = found["post"], told["machine"]
    costs = [
        f"| {r['clients']:,} | {r['neighbours']} | {r['drop']} | {r['client_seconds']:.2f} | {r['server_seconds']:.1f} "
        f"| {r['sent']:.2f} | {r['got']:.2f} |"
        for r in post["rows"]
    ]
    given_up = [f"| {r['clients']:,} | " + " | ".join(f"{p:.1g}" for p in r["lost"]) + " |" for r in post["rows"]]
    refused = "\n".join(f"- {text}" for text in runs["secure"]["refused"])
    left = len(runs["secure"]["test"])
    rounds = " and ".join(str(r) for r in runs["secure"]["killed"].values())
    return f"""# Secure sums, measured

{on["cpus"]} CPUs ({on["processor"]}), Python {on["python"]}, torch {on["torch"]}. [What `--secure` does](../secure.md).

## On Flower, with TLS

`python experiments/secure.py`: digits, {told["clients"]} clients with 2 and 3 bits, {told["rounds"]} rounds of the
default recipe on one machine, a SuperNode, a worker and a key each, seed 0. The first
{runs["secure"]["shared_rounds"]} rounds have a sum; in the others clients make their models personal, alone. Two
clients are killed (SIGKILL) in rounds {rounds} of the secure run. Accuracy: at the {left} clients that are left, of the
shared model as they would ship it after the last sum, and of their own at the end. Seconds: wall time of a round with a
sum in which nobody is killed and nothing is judged, median. Bytes: what a client sends in such a round, keys and shares
included.

| run | after the last sum, % | at the end, % | seconds a round | bytes a client |
|---|---|---|---|---|
{chr(10).join(lines)}

A client that is killed costs its round the time until Flower misses it, or the deadline, {told["deadline"]:.0f} s; from
the next on it is not asked. The server's log was replayed to the same bits of w. Refused in the secure run:

{refused}

{told.get("remark", "")}

## The same in one process, several seeds

`python experiments/secure.py --here --seeds {" ".join(here)}`: the same clients, server, rounds and kills, Flower
replaced by a call. {left} clients with 20 test images each: an image is {100 / left / 20:.2f} points.

| | after the last sum | | | at the end | | |
|---|---|---|---|---|---|---|
| seed | plain | secure, two killed | plain, two killed | plain | secure, two killed | plain, two killed |
{chr(10).join(seeds)}

Secure minus plain {spread["plain"][0]} after the last sum and {spread["plain"][1]} at the end; minus plain with the
same two killed {spread["killed"][0]} and {spread["killed"][1]} (mean ± std over seeds). Personal models hardly depend
on the last bits of w: the first three columns tell more.

## What a sum costs

`python benchmarks/secure.py`: {post["numbers"]:,} numbers of {post["bits"]} bits, keys as on Flower, the post in one
process. CPU seconds of a round, median over clients, and of the server; bytes of a client against those of fp32.

| clients | neighbours | drop out | s a client | s server | sends | gets |
|---|---|---|---|---|---|---|
{chr(10).join(costs)}

The chance, at most, that a round is given up if so many drop out at random:

| clients | {" | ".join(f"{drop:.0%}" for drop in post["drops"])} |
|---{"|---" * len(post["drops"])}|
{chr(10).join(given_up)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "secure.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    if given.page:
        given.out.with_suffix(".md").write_text(page(found))
        return
    told = {"clients": given.clients, "rounds": given.rounds, "deadline": DEADLINE, "machine": machine()}
    part = found.setdefault("here" if given.here else "flower", {})
    part |= told
    for seed in given.seeds:
        runs = part.setdefault("seeds", {}).setdefault(str(seed), {}) if given.here else part.setdefault("runs", {})
        for name in given.runs:
            with tempfile.TemporaryDirectory() as place:
                runs[name] = measure(Path(place), name, given, seed)
            write_json(given.out, found)
        print(seed, {name: round(value, 2) for name, value in accuracies(runs).items()}, flush=True)


if __name__ == "__main__":
    main()
