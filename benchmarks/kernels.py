"""Median time in ms, one thread, of what runs over every weight at every step.

python benchmarks/kernels.py [--large]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from qupel.core.prox import prox_centers, prox_weights
from qupel.core.quantize import assign, center_gradient, hard, init_centers
from qupel.util.machine import keep_memory


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def measure(n: int, m: int, piled: float, repeats: int) -> dict[str, float]:
    """Weights N(0, 0.05^2), a share of them exactly on their center; k-means centers after a small gradient step."""
    generator = torch.Generator().manual_seed(0)
    x = 0.05 * torch.randn(n, generator=generator)  # (n,)
    centers = init_centers(x[:100_000], how="kmeans", levels=m)  # (m,)
    x = torch.where(torch.rand(n, generator=generator) < piled, hard(x, centers), x)
    upstream = torch.randn(n, generator=generator)  # (n,)
    mu = centers + 1e-3 * torch.randn(m, generator=generator)  # (m,)
    codes, q = assign(x, centers), hard(x, centers)  # (n,)
    kernels: dict[str, Callable[[], object]] = {
        "assign": lambda: assign(x, centers),
        "hard": lambda: hard(x, centers),
        "prox_weights": lambda: prox_weights(x, centers, 1e-3),
        "with Q_c(x)": lambda: prox_weights(x, centers, 1e-3, q=q),
        "center_gradient": lambda: center_gradient(upstream, codes, m),
        "prox_centers": lambda: prox_centers(mu, centers, x, 1e-7),
    }
    return {name: milliseconds(work, repeats) for name, work in kernels.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 10,000,000 weights")
    sizes = [1_000_000, 10_000_000] if parser.parse_args().large else [1_000_000]
    torch.set_num_threads(1)
    keep_memory()  # as a worker does
    header = True
    for n in sizes:
        for piled in (0.0, 0.9):
            for m in (2, 4, 8):
                times = measure(n, m, piled, repeats=21 if n <= 1_000_000 else 5)
                if header:
                    print(f"{'weights':>11} {'on center':>9} {'m':>2}", *(f"{name:>16}" for name in times))
                    header = False
                print(f"{n:>11,} {piled:>9.0%} {m:>2}", *(f"{value:>16.2f}" for value in times.values()))


if __name__ == "__main__":
    main()
