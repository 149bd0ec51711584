"""One client ten times slower than the others: seconds until w is so good, in synchronous and in asynchronous rounds.

python experiments/late.py              # writes docs/results/late.md and late.json; four minutes

Real clients and the real server, with the post in this process. A client sleeps in place of a slow machine or network,
`NAP` seconds a round, the last one ten times as long; all of them at the same time. Synchronous rounds have no deadline
that anybody misses.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch

from qupel.core.layout import Layout
from qupel.flower import folder as folders
from qupel.flower.frames import Header
from qupel.flower.post import Bodies, Reply, body_for
from qupel.flower.server import Request, Terms, conduct
from qupel.flower.worker import open_client
from qupel.run import config as configs
from qupel.run.jobs import Cell, build_job
from qupel.util.files import write_atomic

CLIENTS, NAP, SLOWER = 10, 0.5, 10
GOALS = (0.7, 0.8, 0.85)
MODES = {"synchronous": {"buffer": 0, "rounds": 15}, "asynchronous": {"buffer": 5, "rounds": 40}}
CONFIG = """
rounds = {rounds}
local_steps = 5
batch = 20
evaluate_every = {rounds}
save_models = false
bits = 32
[split]
clients = {clients}
[model]
name = "mlp"
args = {{hidden = [64]}}
[methods.FedAvg]
method = "fedavg"
eta1 = 0.2
"""


class Sleepy:
    """The post in this process; `sent`: (seconds since the first question, w) for each w, when clients are first asked
    with it."""

    def __init__(self, federation: folders.Federation) -> None:
        self.clients = [open_client(federation.client(i) / "client.toml") for i in range(federation.clients)]
        self.sent: dict[int, tuple[float, bytes]] = {}
        self.busy: list[threading.Thread] = []
        self.one_at_a_time, self.began = threading.Lock(), 0.0

    def present(self) -> list[int]:
        return list(range(len(self.clients)))

    def ask(self, header: Header, body: Bodies, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        if header["kind"] == "train":
            self.began = self.began or time.monotonic()
            self.sent.setdefault(header["round"], (time.monotonic() - self.began, body_for(clients[0], body)))
        replies: Queue[Reply] = Queue()

        def answer(client: int) -> None:
            if header["kind"] == "train":
                time.sleep(NAP * (SLOWER if client == len(self.clients) - 1 else 1))
            with self.one_at_a_time:
                replies.put(Reply(client, *self.clients[client].answer(header, body_for(client, body))))

        for client in clients:
            self.busy.append(threading.Thread(target=answer, args=(client,), daemon=True))
            self.busy[-1].start()
        for _ in clients:
            yield replies.get()


def measure(mode: str, seed: int) -> list[tuple[float, float]]:
    """(seconds, accuracy of w on all test data) of every w that was sent."""
    buffer, rounds = MODES[mode]["buffer"], MODES[mode]["rounds"]
    config = configs.parse(CONFIG.format(rounds=rounds, clients=CLIENTS), "late")
    with tempfile.TemporaryDirectory() as place:
        federation = folders.init(Path(place) / "f", CLIENTS, "127.0.0.1", 8443, config, "/opt/qupel")
        target = federation.folder / "runs" / "run"
        target.mkdir(parents=True)
        terms = Terms(CLIENTS, CLIENTS, 600.0, 600.0, buffer=buffer)
        Request(job="run-1", config=config, label="FedAvg", seed=seed, terms=terms).write(target)
        post = Sleepy(federation)
        conduct(target, post)
        for thread in post.busy:  # whose answer no round waited for
            thread.join()
    job = build_job(config, Cell("FedAvg", seed))
    layout, test = Layout.of(job.module), job.data.test
    found = []
    for _, (seconds, w) in sorted(post.sent.items()):
        layout.load(job.module, torch.from_numpy(np.frombuffer(w, np.float32).copy()))
        with torch.no_grad():
            right = (job.module(test.inputs).argmax(1) == test.targets).float().mean()
        found.append((seconds, float(right)))
    return found


def reached(curve: Sequence[tuple[float, float]], goal: float) -> float:
    """Seconds until w is as good as the goal."""
    return next(seconds for seconds, accuracy in curve if accuracy >= goal)


def page(told: dict[str, Any]) -> str:
    curves, lines = told["curves"], []
    for goal in GOALS:
        times = {mode: [reached(curve, goal) for curve in curves[mode].values()] for mode in MODES}
        ratio = [late / sync for sync, late in zip(times["synchronous"], times["asynchronous"], strict=True)]
        shown = [", ".join(f"{t:.1f}" for t in times[mode]) for mode in MODES]
        lines.append(
            f"| {goal:.0%} | {shown[0]} | {shown[1]} | {statistics.mean(ratio):.2f} (up to {max(ratio):.2f}) |"
        )
    buffer, seeds = MODES["asynchronous"]["buffer"], ", ".join(curves["synchronous"])
    return f"""# One client ten times slower than the others

`python experiments/late.py`: digits, {CLIENTS} clients with 4 classes each, FedAvg, an MLP, 5 local steps a round; real
clients and the real server, with the post in one process. A client sleeps {NAP} s a round in place of a slow machine,
one of them {NAP * SLOWER:.0f} s. Synchronous rounds wait for all; asynchronous ones (`--mode async --buffer {buffer}`)
for {buffer} uploads. Wall seconds until w has so much accuracy on all clients' test data, seeds {seeds}:

| accuracy | synchronous | asynchronous | ratio, mean |
|---|---|---|---|
{chr(10).join(lines)}

Load average at the end {told["load"]:.1f} on two cores. Every w with its time and accuracy is in the JSON file beside
this page. A first measurement, with sleeps of 0.3 and 3 s while twenty other processes computed, gave ratios of 0.49 to
0.60 in the mean, up to 0.79: it is waiting that is saved, and there it was computing that took the time.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[1] / "docs" / "results")
    given = parser.parse_args()
    curves: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    for seed in given.seeds:
        for mode in MODES:
            curves[mode][str(seed)] = curve = measure(mode, seed)
            best = max(accuracy for _, accuracy in curve)
            print(seed, mode, f"{curve[-1][0]:.1f} s, best {best:.3f}", flush=True)
    told = {"curves": curves, "load": os.getloadavg()[1]}
    write_atomic(given.to / "late.md", page(told))
    write_atomic(given.to / "late.json", json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
