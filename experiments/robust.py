"""What servers make of clients that attack: accuracy under none, sign flip, x 100 and label flip, at 10 and 30 % of 20.

python experiments/robust.py            # writes docs/results/robust.md and robust.json; some minutes on one core
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.data.batches import generator
from qupel.data.sources import Arrays
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Failed, run
from qupel.engine.shard import Trained
from qupel.parts.base import Rows
from qupel.parts.servers import servers, sums
from qupel.run import config as configs
from qupel.run.jobs import Cell, build_job
from qupel.util.files import write_atomic

CLIENTS = 20
CONFIG = f"""
rounds = 30
local_steps = 10
evaluate_every = 30
upload_bound = 0
[split]
kind = "iid"
clients = {CLIENTS}
[model]
name = "mlp"
[methods.FedAvg]
recipe = "fedavg"
"""
SERVERS = {  # of those with a share to set: what 30 % needs
    "mean": "mean",
    "norm bound": "normbound",
    "trimmed mean": {"name": "trimmed", "trim": 0.3},
    "median": "median",
    "multi-Krum": {"name": "krum", "bad": 0.3},
}
Attack = Callable[[Tensor, Tensor], Tensor]  # a row of an honest upload (d,), of w (d,) -> what is sent
ATTACKS: dict[str, Attack | None] = {
    "sign flip": lambda u, w: 2 * w - u,
    "x 100": lambda u, w: w + 100 * (u - w),
    "label flip": None,  # trained honestly on labels c -> 9 - c
}


class Attacked:
    """An engine some of whose clients send what an attack makes of their uploads."""

    def __init__(self, engine: Engine, attack: Attack, bad: Sequence[int]) -> None:
        self.engine, self.attack, self.bad = engine, attack, set(bad)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        for done in self.engine.train(round, w, clients):
            if done.client in self.bad and done.upload is not None:
                rows = tuple(self.attack(u, sent) for u, sent in zip(done.upload.rows, w, strict=True))
                done = replace(done, upload=replace(done.upload, rows=rows))
            yield done


def flipped(job: Job, bad: Sequence[int]) -> Job:
    """A job in which these clients' training labels are c -> classes - 1 - c."""
    rows = np.concatenate([job.parts[i].train_rows for i in bad])
    targets = job.data.train.targets.clone()
    targets[rows] = (job.data.classes or 0) - 1 - targets[rows]
    return replace(job, data=replace(job.data, train=Arrays(job.data.train.inputs, targets)))


def honest(job: Job, name: str, share: float) -> float | None:
    """Mean test accuracy of the honest clients after the last round, of the shared model; None: numbers were lost."""
    bad = sorted(generator(job.seed, "attackers").permutation(CLIENTS)[: round(share * CLIENTS)].tolist())
    attack = ATTACKS.get(name)
    if name == "label flip":
        job = flipped(job, bad)
    with Inline(replace(job, stacked=True)) as engine:
        try:
            finished = run(job, Attacked(engine, attack, bad) if attack else engine)
        except Failed:
            return None
    scores = [v for i, v in enumerate(finished.lines[-1]["clients"]["test"]) if i not in bad]
    return sum(scores) / len(scores)


def measure(server: Any, name: str, share: float, seeds: int, rounds: int) -> list[float | None]:
    found = []
    for seed in range(seeds):
        config = configs.parse(CONFIG, "robust", [f"rounds={rounds}", f"evaluate_every={rounds}"])
        job = build_job(config, Cell("FedAvg", seed))
        phases = [replace(p, server=servers.build(server, "server")) for p in job.phases]
        found.append(honest(replace(job, phases=phases), name, share))
    return found


def said(values: Sequence[float | None]) -> str:
    known = [100 * v for v in values if v is not None]
    if len(known) < len(values):
        return "lost"
    return f"{statistics.mean(known):.1f} ± {statistics.stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"


def table(found: dict[str, dict[str, list[float | None]]]) -> Iterator[str]:
    columns = list(next(iter(found.values())))
    yield f"| server | needs more than the sum | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for label, values in found.items():
        alone = "no" if sums(servers.build(SERVERS[label], "server")) else "yes"
        yield f"| {label} | {alone} | {' | '.join(map(said, values.values()))} |"


def page(found: dict[str, dict[str, list[float | None]]], rounds: int, seeds: int) -> str:
    return f"""# Servers under attack

`python experiments/robust.py`: digits, an MLP, FedAvg, {CLIENTS} clients with equal shares of the data, {rounds}
rounds of 10 steps, {seeds} seeds. 10 or 30 % of the clients attack in every round: *sign flip* sends w minus its move,
*x 100* w plus a hundred times its move, *label flip* trains honestly on labels c -> 9 - c. Test accuracy of the shared
model at the honest clients after the last round, %, mean ± std over seeds; "lost": its numbers were not finite. The
guard (`upload_bound`) is off, so that the servers alone are seen. Trimmed mean cuts 30 % at each end, multi-Krum takes
30 % to be bad, whether they are or not; the norm bound is the median of the round's lengths.

{chr(10).join(table(found))}

A server that needs more than the sum of the uploads cannot be had with secure aggregation. A norm bound can, if clients
bound their own moves (`server = "private"` with a clip and no noise): then it is as good as the clients' word.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[1] / "docs" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("none", 0.0), *((name, share) for name in ATTACKS for share in (0.1, 0.3))]
    found: dict[str, dict[str, list[float | None]]] = {}
    for label, server in SERVERS.items():
        for name, share in cases:
            column = f"{name}, {100 * share:.0f} %" if share else name
            scores = measure(server, name, share, options.seeds, options.rounds)
            found.setdefault(label, {})[column] = scores
            print(label, column, said(scores), flush=True)
    write_atomic(options.to / "robust.md", page(found, options.rounds, options.seeds))
    write_atomic(options.to / "robust.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
