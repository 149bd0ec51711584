"""Digits on Flower with TLS: a run with --secure in which clients are killed on the way, beside plain ones.

    python experiments/secure.py [--clients 20] [--rounds 10] [--kill 2] [--here] [--out FILE.json]

Starts a federation on loopback, with node keys, for each of three runs: plain; plain, with clients killed (with their
workers, when a third and when two thirds of the rounds are done); secure, with the same ones killed. An hour for 20
clients on two cores. --here: the same clients and server with the post in this process, some minutes; who is killed
goes when it is asked to train, of a secure round to mask.
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


def measure(place: Path, name: str, clients: int, rounds: int, kills: int, here: bool = False) -> dict[str, Any]:
    """One run, in a federation of its own: test accuracy of each client, seconds and bytes of a round."""
    config = configs.parse(CONFIG.format(rounds=rounds, clients=clients), "experiment")
    federation = folders.init(place / name, clients, "127.0.0.1", 8443, config, "/opt/qupel")
    secure = SecureConfig() if name == "secure" else None
    terms = Terms(clients, clients * 2 // 3 + 1, 400.0, 900.0, secure=secure, audit=True)
    target, killed = federation.folder / "runs" / name, dict[int, int]()
    target.mkdir(parents=True)
    Request(job=f"{name}-1", config=config, label="QuPeL", seed=0, terms=terms).write(target)
    victims = {1 + 7 * k: rounds * (k + 1) // (kills + 1) for k in range(kills if name != "plain" else 0)}
    if here:
        post, began = Here(federation, {client: done + 1 for client, done in victims.items()}), time.monotonic()

        def note(progress: Progress) -> None:
            with (target / "progress.jsonl").open("a") as file:
                told = {"round": progress.round, "refused": progress.refused, "seconds": time.monotonic() - began}
                file.write(json.dumps(told) + "\n")

        conduct(target, post, note)
        return outcome(target, post.gone, clients)
    try:
        up(federation, clients, seconds=1200)
        running = Running.of(federation)
        assert running is not None
        watcher = threading.Thread(target=killer, args=(running, target, victims, killed), daemon=True)
        watcher.start()
        drive(federation, running.address, target, "run", lambda line: print(name, line["round"], line["refused"]))
    finally:
        down(federation)
    return outcome(target, killed, clients)


def outcome(target: Path, killed: dict[int, int], clients: int) -> dict[str, Any]:
    progress = [json.loads(line) for line in (target / "progress.jsonl").read_text().splitlines()]
    seconds = [b["seconds"] - a["seconds"] for a, b in pairwise(progress)]
    whole = [s for s, line in zip(seconds, progress[1:], strict=True) if line["round"] not in killed.values()]
    last = json.loads((target / "metrics.jsonl").read_text().splitlines()[-1])
    numbers = last["clients"].get("number", list(range(clients)))
    return {
        "test": dict(zip(numbers, last["clients"]["test"], strict=True)),
        "killed": {str(client): f"in round {round}" for client, round in killed.items()},
        "refused": sorted({text for line in progress for text in line["refused"]}),
        "seconds_a_round": statistics.median(whole[:-1]),  # the last one is also judged
        "upload_bytes": last["upload_bytes"],
        "replayed": replay(target)[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        options = (given.clients, given.rounds, given.kill, given.here)
        runs = {name: measure(Path(place), name, *options) for name in ("plain", "killed", "secure")}
    both = sorted(set.intersection(*(set(run["test"]) for run in runs.values())))
    for run in runs.values():
        run["accuracy"] = 100 * statistics.mean(run["test"][i] for i in both)
        run["test"] = {str(i): value for i, value in run["test"].items()}
    result = {"clients": given.clients, "rounds": given.rounds, "judged": len(both), **runs}
    for name in ("plain", "killed"):
        result[f"secure minus {name}"] = runs["secure"]["accuracy"] - runs[name]["accuracy"]
    print(json.dumps(result, indent=1))
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
