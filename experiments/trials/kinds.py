"""The default recipe on made-up federations of many kinds: is it ever below Local at the same bits?

    python experiments/trials/kinds.py [KIND ...] [--seeds 100 101] [--rounds 30] [--held 0.2]

No setting is touched (--held: but this one, of QuPeL). One line a kind and seed: QuPeL and Local (2, 3 bits; half of
the clients each) and FedAvg's shared model, mean test accuracy over clients in percent. The data are drawn by the seed.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import nn

import qupel

CLIENTS = 12


def mlp(inputs, classes, hidden=64):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def conv1d(channels, length, classes):
    return nn.Sequential(
        nn.Conv1d(channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Flatten(), nn.Linear(32 * (length // 4), 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


def sines(rng, samples, classes=6, length=64, noise=0.8, shift=0.25, gain=0.5):
    """A class is a frequency; every person has a stretch of time and a gain of its own, and some noise."""
    x, y = [], []
    stretch, loud = 1 + shift * rng.standard_normal(), np.exp(gain * rng.standard_normal())
    for _ in range(2 * samples):
        k, phase = rng.integers(classes), rng.uniform(0, 2 * np.pi)
        t = np.arange(length) / length
        wave = loud * np.sin(2 * np.pi * (2 + k) * stretch * t + phase) + noise * rng.standard_normal(length)
        x.append(wave)
        y.append(k)
    return np.asarray(x, np.float32), np.asarray(y)


def halves(x, y):
    n = len(x) // 2
    return x[:n], y[:n], x[n:], y[n:]


def signals(rng, samples=60, **how):
    return [halves(*sines(rng, samples, **how)) for _ in range(CLIENTS)]


def clusters(rng, samples=60, inputs=20, classes=5, apart=0.0, own=1.0, scale=1.0):
    """Gaussian classes: centers that all share, plus centers of one's own. own = 0: no differences."""
    common = rng.standard_normal((classes, inputs))
    clients = []
    for _ in range(CLIENTS):
        mine = common + own * rng.standard_normal((classes, inputs))
        y = rng.integers(classes, size=2 * samples)
        x = mine[y] + 1.5 * rng.standard_normal((2 * samples, inputs)) + apart * rng.standard_normal(inputs)
        clients.append(halves((scale * x).astype(np.float32), y))
    return clients


def table(load, rng, clients=6):
    """A small table of scikit-learn, dealt out; columns of very different size."""
    x, y = load(return_X_y=True)
    order = rng.permutation(len(x))
    return [halves(x[order[i::clients]].astype(np.float32), y[order[i::clients]]) for i in range(clients)]


def digits(rng, samples=30, classes=10, permuted=False):
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    clients = []
    for _ in range(CLIENTS):
        kept = rng.choice(10, classes, replace=False)
        rows = rng.permutation(np.flatnonzero(np.isin(y, kept)))[: 2 * samples]
        labels = rng.permutation(10)[y[rows]] if permuted else y[rows]
        clients.append(halves(x[rows], labels))
    return clients


KINDS = {
    "signals, MLP": (signals, mlp(64, 6)),
    "signals, 1-D CNN": (lambda rng: [(a[:, None], b, c[:, None], d) for a, b, c, d in signals(rng)], conv1d(1, 64, 6)),
    "signals, 20 samples": (lambda rng: signals(rng, 20), mlp(64, 6)),
    "signals, 500 samples": (lambda rng: signals(rng, 500), mlp(64, 6)),
    "signals, no differences": (lambda rng: signals(rng, shift=0.0, gain=0.0), mlp(64, 6)),
    "signals, tiny inputs": (lambda rng: [(a / 50, b, c / 50, d) for a, b, c, d in signals(rng)], mlp(64, 6)),
    "clusters, no differences": (lambda rng: clusters(rng, own=0.0), mlp(20, 5)),
    "clusters, own centers": (clusters, mlp(20, 5)),
    "clusters, mostly own": (lambda rng: clusters(rng, own=4.0), mlp(20, 5)),
    "clusters, moved": (lambda rng: clusters(rng, own=0.3, apart=3.0), mlp(20, 5)),
    "clusters x 100": (lambda rng: clusters(rng, scale=100.0), mlp(20, 5)),
    "signals, small differences": (lambda rng: signals(rng, shift=0.03), mlp(64, 6)),
    "signals, medium differences": (lambda rng: signals(rng, shift=0.1), mlp(64, 6)),
    "wine": (lambda rng: table(load_wine, rng), mlp(13, 3)),
    "breast cancer": (lambda rng: table(load_breast_cancer, rng), mlp(30, 2)),
    "digits, 2 classes each": (lambda rng: digits(rng, classes=2), mlp(64, 10)),
    "digits, all classes": (digits, mlp(64, 10)),
    "digits, labels permuted": (lambda rng: digits(rng, permuted=True), mlp(64, 10)),
}


def scores(kind, seed, rounds, held):
    make, net = KINDS[kind]
    clients = make(np.random.default_rng(seed))
    torch.manual_seed(seed)
    for layer in net.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    bits = [2 + k % 2 for k in range(len(clients))]
    found, settings = {}, qupel.Settings(held=held) if held is not None else None
    for method in ("qupel", "local", "fedavg"):
        fit = qupel.fit(
            net, clients, method=method, bits=32 if method == "fedavg" else bits, rounds=rounds, seed=seed, quiet=True,
            engine="inline", evaluate_every=rounds, settings=settings if method == "qupel" else None,
        )  # fmt: skip
        test = 100 * np.asarray(fit.test)
        found[method] = [test.mean(), test[::2].mean(), test[1::2].mean()]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--held", type=float, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("kind | seed | QuPeL (2, 3 bits) | Local | FedAvg | QuPeL - Local")
    for kind in asked.kinds or KINDS:
        for seed in asked.seeds:
            s = scores(kind, seed, asked.rounds, asked.held)
            told = [f"{v[0]:.1f} ({v[1]:.1f}, {v[2]:.1f})" for v in (s["qupel"], s["local"])]
            print(f"{kind} | {seed} | {told[0]} | {told[1]} | {s['fedavg'][0]:.1f} | "
                  f"{s['qupel'][0] - s['local'][0]:+.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
