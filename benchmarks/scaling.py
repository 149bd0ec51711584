"""How cost grows: time and memory of a round against clients, parameters, bits, local steps, processes, Flower's nodes.

    python benchmarks/scaling.py [CURVE ...] [--out FOLDER]

Each point is written to scaling.json when it is measured; those that are there are not measured again unless their
curve is named. The page and the picture are made of what is there. Seconds are CPU
time of the process, medians over rounds, which other load hardly moves; of worker processes, ranks and nodes wall time.
Memory is the peak of a process of its own, without its data.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import flower_rounds
import many_clients
from qupel.core.codebook import plan_bits
from qupel.core.layout import Layout
from qupel.engine import group
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import enter, one_round
from qupel.engine.workers import Pool
from qupel.run import config as configs
from qupel.run.experiment import engine_for
from qupel.run.jobs import Cell, build_job
from qupel.util.files import write_atomic, write_json
from qupel.util.machine import machine

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COHORT, ROUNDS = 10, 5
Point = dict[str, float]

PROCESSES = """
local_steps = 10
[split]
clients = 20
[model]
name = "digits_cnn"
[methods.QuPeL]
phases = [{ method = "qupel", rounds = 100 }]
"""


def by_clients(clients: int) -> Job:
    """10 of so many a round."""
    job = many_clients.job_of(max(clients, many_clients.COHORT), "qupel")
    return replace(job, parts=job.parts[:clients], plans=job.plans[:clients], sample=min(1.0, COHORT / clients))


def by_parameters(size: int) -> Job:
    """64 - h - h - 10 with about so many parameters."""
    wide = round((-75 + math.sqrt(75**2 + 4 * (size - 10))) / 2)  # h^2 + 76 h + 10
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10)
    )
    job = by_clients(COHORT)
    return replace(job, module=net, plans=[plan_bits(Layout.of(net), 2)] * COHORT, stacked=False)


def by_bits(bits: int) -> Job:
    job = by_clients(COHORT)
    return replace(job, plans=[plan_bits(Layout.of(job.module), bits)] * COHORT)


def by_steps(steps: int) -> Job:
    return replace(by_clients(COHORT), local_steps=steps)


JOBS: dict[str, tuple[Callable[[int], Job], Sequence[int]]] = {
    "clients": (by_clients, (10, 100, 1_000, 10_000, 100_000)),
    "parameters": (by_parameters, (10_000, 100_000, 1_000_000, 10_000_000)),
    "bits": (by_bits, (1, 2, 3, 4, 6, 8)),
    "local steps": (by_steps, (1, 3, 10, 30, 100)),
}


def round_of(job: Job) -> Point:
    """CPU seconds of a round, states on disk, and memory above the data."""
    with tempfile.TemporaryDirectory() as scratch, Inline(job, store="disk", scratch=Path(scratch)) as engine:
        shared, took = many_clients.beginning(job), []
        for r in range(ROUNDS + 1):
            start = time.process_time()
            shared, *_ = one_round(job, engine, r, shared)
            took.append(time.process_time() - start)
    return {"seconds": statistics.median(took[1:]), "memory": many_clients.above_data(job) / 1e6}


def processes(how: str) -> Callable[[int], Point]:
    """Wall seconds of a round of 20 clients (digits, digits_cnn, 10 steps) on so many workers or ranks."""

    def measure(count: int) -> Point:
        config, cell = configs.parse(PROCESSES, "benchmark"), Cell("QuPeL", 0)
        job = build_job(config, cell)
        with ExitStack() as stack:
            crew = stack.enter_context(Pool(count) if how == "workers" else group.start(count)) if count > 1 else None
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(engine_for(config, cell, job, crew, count, folder))
            shared, took = enter(job.phases[0], (Layout.of(job.module).flatten(job.module),)), []
            for r in range(ROUNDS + 1):
                start = time.monotonic()
                shared, *_ = one_round(job, engine, r, shared)
                took.append(time.monotonic() - start)
        return {"seconds": statistics.median(took[1:])}

    return measure


def flower(nodes: int) -> Point:
    """Wall seconds of a round of FedAvg (digits, 20 samples a client) over so many SuperNodes on loopback, with TLS;
    and CPU seconds of a node's side."""
    with tempfile.TemporaryDirectory() as place:
        wall, cpu = flower_rounds.measure(True, nodes, 6, Path(place) / "f")
    return {"seconds": wall, "cpu": cpu}


OTHERS: dict[str, tuple[Callable[[int], Point], Sequence[int]]] = {
    "workers": (processes("workers"), (1, 2)),
    "ranks": (processes("ranks"), (1, 2)),
    "Flower nodes": (flower, (3, 6, 12, 24)),
}
LIMITS = {  # what a reader should know, too, beyond what was measured
    "clients": "memory, some 8 kB a client: who has which rows above all. Clients that do not take part cost no time; "
    "why a round among many took less than one among few was not looked into. [many_clients.json](many_clients.json) "
    "has 100,000 clients that all have a state",
    "parameters": "the clients' passes; a state has 4 bytes a parameter. Why the last factor of ten costs more than "
    "ten was not looked into",
    "bits": "the centers, 64 and 256 of them at 6 and 8 bits; up to 4 bits they do not show",
    "local steps": "the steps themselves",
    "workers": "the number of cores, here 2",
    "ranks": "the number of cores, here 2; uploads go to rank 0",
    "Flower nodes": "on one machine its cores: all nodes compute on the same two",
}


def slope(points: dict[str, Point], what: str) -> float:
    """Of log(what) against log(size), least squares."""
    sizes = np.log([float(size) for size in points])
    return float(np.polyfit(sizes, np.log([point[what] for point in points.values()]), 1)[0])


def measure(name: str, size: int) -> Point:
    """A point of a curve; of a job in a process of its own."""
    if name in OTHERS:
        return OTHERS[name][0](size)
    point: Point = many_clients.told_by([__file__, "--point", name, str(size)])
    return point


# --- a million devices, on paper ---

DEVICES, A_ROUND = 1_000_000, 1_000
ASSUMED = {
    "uplink of a device, Mbit/s": 5.0,
    "link of the server, Gbit/s": 1.0,
    "seconds of a device's local steps": 60.0,
    "seconds until the slowest of a cohort is there": 120.0,
}


def million(parameters: int = 1_000_000) -> dict[str, float]:
    """A round of 1,000 of a million devices, float32 both ways. The server adds an upload, looks at its norm and
    adds it in float64: its CPU seconds are measured here on vectors of that size."""
    w, total = torch.zeros(parameters), torch.zeros(parameters, dtype=torch.float64)
    took = []
    for _ in range(20):
        upload = torch.randn(parameters)
        start = time.process_time()
        float(torch.dist(upload, w))
        total += upload
        took.append(time.process_time() - start)
    adding = A_ROUND * statistics.median(took)
    bytes_a_round = 2 * A_ROUND * 4 * parameters
    link = 8 * bytes_a_round / 2 / (1e9 * ASSUMED["link of the server, Gbit/s"])
    device = 8 * 4 * parameters / (1e6 * ASSUMED["uplink of a device, Mbit/s"])
    waiting = ASSUMED["seconds of a device's local steps"] + ASSUMED["seconds until the slowest of a cohort is there"]
    seconds = 2 * link + device + waiting + adding
    return {
        "parameters": parameters,
        "GB a round": bytes_a_round / 1e9,
        "server's seconds of adding": adding,
        "seconds on the server's link, each way": link,
        "seconds of a device's upload": device,
        "seconds a round": seconds,
        "rounds a day": 86_400 / seconds,
        "days until a device is drawn once on average": DEVICES / A_ROUND / (86_400 / seconds),
        "GB of states if the server kept them (it does not: each device keeps its own)": 4 * parameters * DEVICES / 1e9,
    }


# --- page and picture ---


PAGE = """# How cost grows

`python benchmarks/scaling.py`, {cpus} CPUs ({processor}), torch {torch}. A round of {cohort} clients of 100 samples,
5 steps with batches of 20, QuPeL at 2 bits, an MLP of 50,826 parameters, in one process with one thread, states on
disk, unless a curve says otherwise. Seconds are CPU time of that process, which other load hardly moves, medians of 5
rounds; of workers, ranks and nodes they are wall time. Memory is the peak of the process without its data. `load`: the
machine's when a point was over. The slope is that of log(seconds) against log(size): 0 is free, 1 in proportion.
Numbers: [scaling.json](scaling.json).

![seconds a round against each size, log-log](scaling.png)

{curves}
## A million devices, on paper

{cohort_of_million:,} of {devices:,} devices take part in a round, w and uploads are float32.
{assumed}
What the server does to an upload (its norm, its sum in float64) is measured on vectors of this size, one core; all else
is arithmetic. It was not run.

| | |
|---|---|
{million}
"""
HEADS = {"seconds": "s", "memory": "MB", "cpu": "CPU s of a node", "load": "load"}


def page(found: dict[str, Any]) -> str:
    told = ((what, short(value)) for what, value in found["million"].items())
    assumed = "; ".join(f"{what} {value:g}" for what, value in ASSUMED.items())
    return PAGE.format(
        **found["machine"],
        cohort=COHORT,
        curves="\n".join(section(name, points) for name, points in found["curves"].items()),
        cohort_of_million=A_ROUND,
        devices=DEVICES,
        assumed=textwrap.fill(f"Assumed: {assumed}.", 120),
        million="\n".join(f"| {what} | {value} |" for what, value in told),
    )


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def section(name: str, points: dict[str, Point]) -> str:
    keys = [key for key in HEADS if all(key in point for point in points.values())]
    steep = ", ".join(f"of {key} {slope(points, key):+.2f}" for key in keys if key != "load")
    told = textwrap.fill(f"Slope {steep}. The limit: {LIMITS[name]}.", 120, break_long_words=False)
    head = f"## {name[0].upper()}{name[1:]}\n\n{told}\n\n"
    rows = [[name, *(HEADS[key] for key in keys)], ["---"] * (len(keys) + 1)]
    rows += [[f"{int(size):,}", *(short(point[key]) for key in keys)] for size, point in points.items()]
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def picture(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    curves = found["curves"]
    figure, axes = plt.subplots(2, 4, figsize=(13, 5.6), constrained_layout=True)
    for place, (name, points) in zip(axes.flat, curves.items(), strict=False):
        sizes = [int(size) for size in points]
        place.loglog(sizes, [p["seconds"] for p in points.values()], "o-", color="#2563a6")
        place.set_title(f"{name}: slope {slope(points, 'seconds'):+.2f}", fontsize=10)
        place.set_xlabel(name)
        place.set_ylabel("seconds a round")
        low, high = min(p["seconds"] for p in points.values()), max(p["seconds"] for p in points.values())
        if high < 10 * low:
            middle = 10 ** round(math.log10(math.sqrt(low * high)))
            place.set_ylim(min(low, middle / 10) / 1.5, max(high, 10 * middle) * 1.5)
        place.set_xticks(sizes, [f"{size:,}" if size < 1000 else f"{size:.0e}".replace("e+0", "e") for size in sizes])
        place.xaxis.set_minor_locator(NullLocator())
        place.yaxis.set_minor_formatter(NullFormatter())
        place.grid(alpha=0.3, which="major")
    for place in axes.flat[len(curves) :]:
        place.axis("off")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", help="measure these anew")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.curves) - {*JOBS, *OTHERS}:
        parser.error(f"no curves: {unknown}; there are {[*JOBS, *OTHERS]}")
    torch.set_num_threads(1)
    if options.point:
        name, size = options.point
        print(json.dumps(round_of(JOBS[name][0](int(size)))))
        return
    path = options.out / "scaling.json"
    found = json.loads(path.read_text()) if path.exists() else {"curves": {}}
    for name, (_, sizes) in (JOBS | OTHERS).items():
        known = {} if name in options.curves else found["curves"].get(name, {})
        for size in sizes:
            if str(size) not in known:
                known[str(size)] = {**measure(name, size), "load": os.getloadavg()[0]}
                print(name, size, known[str(size)], flush=True)
                found["curves"][name] = known
                write_json(path, {**found, "machine": machine()})
    found["curves"] = {name: found["curves"][name] for name in JOBS | OTHERS}
    found |= {"million": million(), "assumed": ASSUMED, "machine": machine()}
    write_json(path, found)
    write_atomic(options.out / "scaling.md", page(found))
    picture(found, options.out / "scaling.png")


if __name__ == "__main__":
    sys.exit(main())
