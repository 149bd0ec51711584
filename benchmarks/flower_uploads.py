"""Bytes and accuracy of fp32, fp16 and 8-bit uploads: the local engine with `qupel.flower.wire` in between.

    python benchmarks/flower_uploads.py [CONFIG] [--set KEY=VALUE]

Clients encode and the server decodes exactly as on Flower (tests/test_flower_rounds.py compares the bits), so the
accuracies are those a federation on Flower ends with.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from qupel.data.batches import generator
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import run
from qupel.engine.shard import Trained
from qupel.flower.wire import decode, encode
from qupel.parts.base import Rows
from qupel.run import config as configs
from qupel.run.jobs import build_job, cells

CONFIG = """
seeds = [0, 1, 2]
bits = [2, 3]
rounds = 30
evaluate_every = 30
[split]
train_per_client = 20
[methods.QuPeL]
recipe = "qupel-prox"
warmup = 0.5
"""


class Coded(Inline):
    """The reference engine with every upload sent through a codec; `feedback`: rounding errors go into the next one."""

    def __init__(self, job: Job, codec: str, feedback: bool = True) -> None:
        super().__init__(job)
        self.job, self.codec, self.feedback = job, codec, feedback
        self.residuals: dict[int, Tensor | None] = {}

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        for done in super().train(round, w, clients):
            if done.upload is None:
                yield done
                continue
            rng = generator(self.job.seed, "upload", done.client, round)
            residual = self.residuals.get(done.client) if self.feedback else None
            payload, self.residuals[done.client] = encode(self.codec, done.upload, w, residual, rng)
            yield replace(done, upload=decode(self.codec, payload, w), wire=len(payload))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    config = configs.load(options.config, options.set) if options.config else configs.parse(CONFIG, "", options.set)
    print("| upload | bytes a client a round | test accuracy, mean ± std | each seed |\n|---|---|---|---|")
    kinds = [("fp32", "fp32", True), ("fp16", "fp16", True), ("8 bits", "int8", True)]
    for name, codec, feedback in [*kinds, ("8 bits without error feedback", "int8", False)]:
        tests, sent = [], 0
        for cell in cells(config):
            job = build_job(config, cell)
            with Coded(job, codec, feedback) as engine:
                lines = run(job, engine).lines
            tests.append(100 * lines[-1]["test"])
            sent = max(line["upload_bytes"] for line in lines)
        spread = f"{np.mean(tests):.2f} ± {np.std(tests, ddof=1):.2f}" if len(tests) > 1 else f"{tests[0]:.2f}"
        each = ", ".join(f"{test:.2f}" for test in tests)
        print(f"| {name} | {sent:,} | {spread} | {each} |", flush=True)


if __name__ == "__main__":
    main()
