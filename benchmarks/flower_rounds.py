"""Seconds a round on Flower, with the resident worker and without it: a federation on loopback, TLS and keys on.

    python benchmarks/flower_rounds.py [--clients 3] [--rounds 12] [--repeats 2]

Wall seconds depend on what else the machine does; CPU seconds, of all processes on the clients' side, hardly do.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from qupel.flower import folder as folders
from qupel.flower.drive import drive
from qupel.flower.server import Request, Terms
from qupel.flower.tryout import SERVER, Running, down, up
from qupel.run import config as configs

CONFIG = """
rounds = {rounds}
evaluate_every = {rounds}
save_models = false
[split]
clients = {clients}
train_per_client = 20
[methods.FedAvg]
recipe = "fedavg"
warmup = 0.0
"""


def cpu_seconds(running: Running) -> float:
    """Of the SuperNodes, everything they have started, and the resident workers."""
    groups = {p.pid for name, p in running.processes.items() if name != SERVER} | {p.pid for p in running.workers()}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            ticks += sum(int(fields[k]) for k in (11, 12, 13, 14))  # its own and its waited-for children's
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(resident: bool, clients: int, rounds: int, place: Path) -> tuple[float, float]:
    """(median wall seconds, mean CPU seconds a client) of a round."""
    config = configs.parse(CONFIG.format(rounds=rounds, clients=clients), "benchmark")
    federation = folders.init(place, clients, "127.0.0.1", 8443, config, "/opt/qupel")
    for number in range(clients):
        path = federation.client(number) / "client.toml"
        path.write_text(path.read_text().replace("resident = true", f"resident = {str(resident).lower()}"))
    try:
        up(federation, clients, seconds=900)
        running = Running.of(federation)
        assert running is not None
        target = place / "runs" / "benchmark"
        target.mkdir(parents=True)
        terms = Terms(clients, clients, deadline=600.0)
        Request(job="benchmark", config=config, label="FedAvg", seed=0, terms=terms).write(target)
        before = cpu_seconds(running)
        drive(federation, running.address, target, "run")
        cpu = cpu_seconds(running) - before
        ends = [json.loads(text)["seconds"] for text in (target / "progress.jsonl").read_text().splitlines()]
        steps = [b - a for a, b in pairwise(ends[1:-1])]  # the first round loads torch, the last one evaluates
        return statistics.median(steps), cpu / clients / (rounds + 2)  # hello and evaluate are messages, too
    finally:
        down(federation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(options.repeats):
        for resident in found:
            with tempfile.TemporaryDirectory() as place:
                found[resident].append(measure(resident, options.clients, options.rounds, Path(place) / "f"))
    size = f"{options.clients} clients, {options.rounds} rounds, {options.repeats} repeats"
    print(f"{size}, load {os.getloadavg()[0]:.1f}")
    print("| | wall seconds a round, each repeat | CPU seconds a message and client, each repeat |\n|---|---|---|")
    for resident, name in ((True, "resident worker"), (False, "everything loaded in every round")):
        wall, cpu = (" / ".join(f"{value:.1f}" for value in values) for values in zip(*found[resident], strict=True))
        print(f"| {name} | {wall} | {cpu} |")
    ratios = [statistics.median(b[k] / a[k] for a, b in zip(found[True], found[False], strict=True)) for k in (0, 1)]
    print(f"| ratio, median of repeats | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
