"""What choosing who goes alone loses against Local, by how many samples judge and what going must be worth.

    python experiments/trials/choice.py RUNS.jsonl [--seeds 201 202] [--kinds KIND ...]    run, and add to the file
    python experiments/trials/choice.py RUNS.jsonl --only-rules                            what is there

Made-up federations (`kinds.py`), samples held back as usual: each once with all clients forced to stay, and once
as Local, with the losses of w and v on every sample that was held back. Then, for shares of these and margins, what the
means of the gain would have chosen, and how far the result is below Local, in points: docs/results/tried.md.
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

ROUNDS, DRAWS = 30, 20


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


def below_local(run, share, margin, rng):
    """Points below Local, the mean over draws of a share of the samples."""
    lost = []
    for _ in range(DRAWS if share < 1 else 1):
        found = []
        for shared, own, first in run["held"]:
            rows = rng.permutation(len(shared))[: max(2, round(share * len(shared)))]
            found.append(evidence.gain([shared[i] for i in rows], [own[i] for i in rows], first))
        means = torch.stack(found).mean(0).float()
        before = torch.zeros(1)
        evidence.MARGIN = margin
        goes = [bool(evidence.choice(each.float(), means, before)) for each in found]
        result = np.where(goes, run["local"], run["stay"])
        lost.append(100 * (np.mean(run["local"]) - result.mean()))
    return max(np.mean(lost), 0.0)


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
    for margin in (0.02, 0.01, 0.0, -0.02):
        for share in (1.0, 0.5):
            rng = np.random.default_rng(0)
            lost = [below_local(run, share, margin, rng) for run in runs]
            what = f"margin {margin:+.2f}, {share:.0%} of what was held back"
            print(f"{what}: {np.mean(lost):.2f} below Local, worst {max(lost):.1f}")


if __name__ == "__main__":
    main()
