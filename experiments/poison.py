"""One client of six sends poison: how runs end with the guard (upload_bound, rollback) and without.

python experiments/poison.py            # writes docs/results/poison.md and poison.json; some minutes
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.rounds import Engine, Failed, run
from qupel.engine.shard import Trained
from qupel.parts.base import Rows
from qupel.run import config as configs
from qupel.run.jobs import Cell, build_job
from qupel.util.files import write_atomic

CONFIG = """
rounds = 40
evaluate_every = 5
bits = [2, 3, 32]
[split]
clients = 6
train_per_client = 60
[model]
name = "mlp"
[methods.QuPeL]
recipe = "qupel-prox"
[methods.FedAvg]
recipe = "fedavg"
"""
POISONER = 1
ONCE = 12  # the round of what is sent once

Poison = Callable[[int, Tensor, Tensor], Tensor]  # round, a row of the upload (d,), of w (d,) -> what is sent


def noise(round: int, u: Tensor, w: Tensor) -> Tensor:
    return w + torch.randn(len(w), generator=torch.Generator().manual_seed(round))


POISONS: dict[str, Poison] = {
    "none": lambda round, u, w: u,
    "sign flip": lambda round, u, w: 2 * w - u,
    "x 100": lambda round, u, w: 100 * u,
    "move x 100": lambda round, u, w: w + 100 * (u - w),
    "move x -10": lambda round, u, w: w - 10 * (u - w),
    "noise": noise,
    "1e30 once": lambda round, u, w: torch.full_like(u, 1e30) if round == ONCE else u,
    "1e30 in the first round": lambda round, u, w: torch.full_like(u, 1e30) if round == 0 else u,
}


class Poisoned:
    """An engine whose client `POISONER` sends what `poison` makes of its upload."""

    def __init__(self, engine: Engine, poison: Poison) -> None:
        self.engine, self.poison = engine, poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        for done in self.engine.train(round, w, clients):
            if done.client == POISONER and done.upload is not None:
                rows = tuple(self.poison(round, u, sent) for u, sent in zip(done.upload.rows, w, strict=True))
                done = replace(done, upload=replace(done.upload, rows=rows))
            yield done


def one(label: str, poison: Poison, bound: float, rounds: int) -> dict[str, Any]:
    """How a run ends: the honest clients' mean accuracy, refusals, rollbacks."""
    config = configs.parse(CONFIG, "poison", [f"upload_bound={bound}", f"rounds={rounds}"])
    job = build_job(config, Cell(label, 0))
    notes: list[str] = []
    refused = 0

    def watch(progress: Any) -> None:
        nonlocal refused
        refused += len(progress.refused)
        notes.extend(f"round {progress.round}: {note}" for note in progress.notes)

    with tempfile.TemporaryDirectory() as folder, Inline(job) as engine:
        try:
            finished = run(job, Poisoned(engine, poison), checkpoints=Checkpoints(Path(folder), "p"), watch=watch)
        except Failed as e:
            return {"ended": f"failed: {e}", "refused": refused, "rollbacks": notes}
    honest = [v for i, v in enumerate(finished.lines[-1]["clients"]["test"]) if i != POISONER]
    loss = finished.lines[-1].get("train_loss", math.nan)
    numbers = [loss, *(float(row.abs().max()) for row in finished.w), *honest]
    ended = "finished" if all(map(math.isfinite, numbers)) else "finished, not finite"
    return {"ended": ended, "honest": sum(honest) / len(honest), "refused": refused, "rollbacks": notes}


def table(found: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    yield "| one client of six sends | method | guarded: accuracy %, refused, rollbacks | upload_bound = 0 |"
    yield "|---|---|---|---|"
    for poison, methods in found.items():
        for label, runs in methods.items():
            on, off = runs["on"], runs["off"]
            said = [f"{100 * r['honest']:.1f}" if "honest" in r else r["ended"].split(":")[0] for r in (on, off)]
            yield f"| {poison} | {label} | {said[0]}, {on['refused']}, {len(on['rollbacks'])} | {said[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[1] / "docs" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, poison in POISONS.items():
        for label in ("QuPeL", "FedAvg"):
            runs = {k: one(label, poison, bound, options.rounds) for k, bound in (("on", 50), ("off", 0))}
            found.setdefault(name, {})[label] = runs
            for k, r in runs.items():
                print(name, label, k, r["ended"], r.get("honest"), r["refused"], r["rollbacks"], flush=True)
    text = f"""# Poison: one client of six

`python experiments/poison.py`: digits, an MLP, 6 clients with 60 samples, {options.rounds} rounds, one seed. Client
{POISONER} trains honestly and sends something else. Accuracy is the mean of the five honest clients' shipped models
after the last round; "refused" counts uploads and new w that were not taken. With `upload_bound = 0` nothing is bounded
and nothing goes back. The lines of the rollbacks are in poison.json.

{chr(10).join(table(found))}

Every guarded run ends with finite numbers. The bound and the rollback keep one client from ruining the run; they are no
defence against one that stays within what is usual.
"""
    write_atomic(options.to / "poison.md", text)
    write_atomic(options.to / "poison.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
