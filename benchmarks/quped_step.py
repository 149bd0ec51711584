"""What a QuPeD step costs: against its bare passes, forward and backward of x, Q(x) and w by plain PyTorch; in one
process, interleaved, medians of many, for clients whose network is not the shared one.

    python benchmarks/quped_step.py [--steps 40] [--threads 1] [--only cnn5]

At most LIMIT times the passes; `--quick` makes few steps and fails past it.
"""

import argparse
import sys

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import plan_bits
from qupel.core.schedule import Clock
from qupel.parts.base import State
from qupel.parts.methods.quped import QuPeD
from qupel.tasks import zoo
from qupel.tasks.task import ModuleTask, Problem
from qupel.util.machine import keep_memory
from step_cost import bare_pass, interleaved

LIMIT = 1.1
WORK = {  # own network -> shared network, shape of an input, batch
    "cnn5": ("small_cnn", (3, 32, 32), 50),
    "resnet20": ("small_cnn", (3, 32, 32), 64),
    "mobilenet": ("small_cnn", (3, 32, 32), 50),
    "small_cnn": ("cnn5", (3, 32, 32), 50),
}


def ratios(name: str, bits: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the bare passes, and a step of each reading over them."""
    shared, shape, size = WORK[name]
    modules = [zoo.build(n, shape, 10, seed=0).to(memory_format=torch.channels_last) for n in (name, shared)]
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((size, *shape), dtype=np.float32))
    inputs = inputs.to(memory_format=torch.channels_last)
    targets = torch.from_numpy(rng.integers(0, 10, size))
    own, other = (ModuleTask(m, nn.functional.cross_entropy) for m in modules)
    x, w = (task.layout.flatten(m) for task, m in zip((own, other), modules, strict=True))
    problem, plan = Problem(own, other), plan_bits(own.layout, bits)
    methods = {reading: QuPeD(reading=reading) for reading in ("distill", "mutual")}
    held = {k: m.start(State(x, w), plan, problem) for k, m in methods.items()}
    count = dict.fromkeys(methods, 0)

    def stepper(kind: str):
        def once() -> None:
            clock = Clock(count[kind], 1000, 10)
            held[kind], _ = methods[kind].step(held[kind], problem, (inputs, targets), clock)
            count[kind] += 1

        return once

    of_x, of_w = (bare_pass(m, inputs, targets) for m in modules)

    def passes() -> None:
        of_x()
        of_x()
        of_w()

    found = interleaved({"passes": passes, **{k: stepper(k) for k in methods}}, repeats)
    return {"passes": found["passes"], **{k: found[k] / found["passes"] for k in methods}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=WORK)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_memory()
    past = []
    print(f"{'own / shared':24s} bits  passes ms  distill  mutual")
    for name in [given.only] if given.only else WORK:
        for bits in (2,) if given.quick else (2, 3):
            r = ratios(name, bits, 10 if given.quick else given.steps)
            pair = f"{name} / {WORK[name][0]}"
            print(f"{pair:24s} {bits:4d} {r['passes']:10.1f} {r['distill']:8.3f} {r['mutual']:7.3f}", flush=True)
            past += [pair] if max(r["distill"], r["mutual"]) > LIMIT else []
    if given.quick and past:
        sys.exit(f"past {LIMIT}: {', '.join(past)}")


if __name__ == "__main__":
    main()
