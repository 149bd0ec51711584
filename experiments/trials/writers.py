"""Ways to adapt a shared model to writers who join later, each from the same model of experiments/trials/writers.toml.

python experiments/trials/writers.py runs/trial
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import others

from qupel.core.codebook import plan_bits
from qupel.core.layout import Layout
from qupel.data import partition
from qupel.data.clients import pool
from qupel.parts.phase import phase_from
from qupel.run.adapt import adapt_clients, find_origin, read_origin

SEED, UNSEEN, STEPS = 100, 50, 10
EPOCH = 4  # steps


def cosine(start, rounds, done=0):
    return {"start": start, "cosine": rounds * STEPS / EPOCH, "offset": done * STEPS / EPOCH}


def plain(eta, rounds):
    return [{"method": "local", "rounds": rounds, "eta1": cosine(eta, rounds)}]


def learned(quantizer, eta, rounds, pull=0.0):
    """Levels by this quantizer, then a fifth of the rounds with frozen assignments (not for lsq, which has none)."""
    main = rounds if quantizer == "lsq" else rounds * 4 // 5
    found = []
    for name, length, done in ((quantizer, main, 0), ("frozen", rounds - main, main)):
        part = {"name": name}
        if name == "frozen":
            part |= {"eta2": cosine(eta, rounds, done), "center_gradient": "mean"}
        method = {"method": "qupel", "lambda_p": cosine(pull, rounds, done), "coupling": 0.125} if pull else {}
        if name == "frozen" and pull:
            method["enters"] = "free"
        phase = {"method": "local", "rounds": length, "eta1": cosine(eta, rounds, done), "quantizer": part} | method
        found += [phase] if length else []
    return found


def main():
    origin = read_origin(find_origin(Path(sys.argv[1]), "FedAvg, momentum"))
    everyone = others.load("mnist_writers", 100, 150, "writers")
    names = list(everyone)
    _, late = partition.leave_out(range(len(names)), UNSEEN, SEED)
    data = pool({names[i]: everyone[names[i]] for i in late})
    tried = [(f"full precision, eta {e}, {n} rounds", 32, plain(e, n)) for e in (0.03, 0.1) for n in (5, 10, 20)]
    for q, e, n in product(("ste", "lsq"), (0.05, 0.1, 0.2), (10, 20)):
        tried.append((f"{q}, eta {e}, {n} rounds", 2, learned(q, e, n)))
    for pull in (0.2, 0.5, 2.0):
        tried.append((f"ste, eta 0.1, 10 rounds, lambda_p {pull}", 2, learned("ste", 0.1, 10, pull)))
    for label, bits, tables in tried:
        phases = [origin.job.phases[0], *(phase_from(table, label) for table in tables)]
        now = replace(origin, job=replace(origin.job, phases=phases, stacked=True))
        plans = [plan_bits(Layout.of(origin.job.module), bits, origin.layers, origin.channels)] * UNSEEN
        told = adapt_clients(now, data, partition.by_owner(data), plans, data.owners).told()
        print(f"{label:45} {100 * np.mean(told['test']):.2f}  shared {100 * np.mean(told['global']):.2f}", flush=True)


if __name__ == "__main__":
    main()
