"""What choosing who goes alone loses against Local, by how sure a client must be that sharing is better.

    python experiments/trials/choice.py RUNS.jsonl [--seeds 201 202] [--kinds KIND ...]    run, and add to the file
    python experiments/trials/choice.py RUNS.jsonl --only-rules                            what is there

Made-up federations (`kinds.py`), samples held back as usual: each once with all clients forced to stay, and once
as Local, with the losses of w and v on every sample that was held back. Then, for so many standard errors of a client,
what would have been chosen, and how far the result is from Local, in points: docs/results/tried.md.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from kinds import KINDS

import qupel
from qupel.parts import evidence
from qupel.parts.methods import hedged

ROUNDS = 30


def forced(kind, seed):
    """The clients' scores when all stay, as Local, and per client (losses of w, losses of v, first loss)."""
    make, net = KINDS[kind]
    clients, told = make(np.random.default_rng(seed)), []
    torch.manual_seed(seed)
    for layer in net.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()

    def seen(shared, own, first):
        told.append(([float(v) for v in shared], [float(v) for v in own], first))
        return evidence.gain(shared, own, first)

    hedged.choice, hedged.gain = (lambda found, means, before: torch.zeros_like(before)), seen
    bits = [2 + k % 2 for k in range(len(clients))]
    how = {"bits": bits, "rounds": ROUNDS, "seed": seed, "quiet": True, "engine": "inline", "evaluate_every": ROUNDS}
    stay = qupel.fit(net, clients, settings=qupel.Settings(held=0.2), **how).test
    told = told[: len(clients)]
    return {"stay": list(stay), "local": list(qupel.fit(net, clients, method="local", **how).test), "held": told}


def above_local(run, sure):
    """Points above Local, the mean over the clients."""
    evidence.SURE = sure
    found = torch.stack([evidence.gain(shared, own, first) for shared, own, first in run["held"]]).float()
    goes = evidence.choice(found, found.mean(0).expand_as(found), torch.zeros(len(found), 1))[:, 0].numpy()
    return 100 * (np.where(goes, run["local"], run["stay"]).mean() - np.mean(run["local"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[201, 202])
    parser.add_argument("--only-rules", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for kind, seed in [] if asked.only_rules else [(k, s) for k in asked.kinds for s in asked.seeds]:
        with asked.runs.open("a") as file:
            print(json.dumps({"kind": kind, "seed": seed, **forced(kind, seed)}), file=file)
    runs = [json.loads(line) for line in asked.runs.read_text().splitlines()]
    for sure in (0.0, 0.1, 0.2, 0.25, 0.3, 0.4):
        above = np.array([above_local(run, sure) for run in runs])
        below = np.maximum(-above, 0)
        worst = ", ".join(f"{v:.1f}" for v in sorted(below)[:-4:-1])
        told = f"{below.mean():.2f} below Local, worst {worst}; {above.mean():+.2f} in the mean"
        print(f"{sure:.2f} standard errors: {told}")


if __name__ == "__main__":
    main()
