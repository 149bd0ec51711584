"""A whole study: every run of a config, what it says of the theorem, its table, numbers and picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qupel.paper.convergence import picture
from qupel.paper.convergence.config import Theorem1, Theorem2, TheoryConfig
from qupel.paper.convergence.page import Row, table
from qupel.paper.convergence.problem import build
from qupel.paper.convergence.run import TOLERANCE, Measured, run_theorem1, run_theorem2
from qupel.paper.theory import theorem1_bound, theorem1_sharp, theorem2_bound, theorem2_sharp
from qupel.report.tables import markdown
from qupel.util.files import write_atomic, write_json
from qupel.util.machine import machine

Watch = Callable[[str, int], None]  # (which run, steps made since the last call)
_POINTS = 120  # of a curve in the numbers that are written
_BATCH = 50  # steps between two calls of a watcher


def total_steps(config: TheoryConfig) -> int:
    if isinstance(config, Theorem1):
        return config.steps * len(config.rules) * len(config.problems)
    return sum(config.steps) * len(config.shares)


def study(
    config: TheoryConfig, folder: Path, watch: Watch = lambda name, steps: None
) -> tuple[list[str], list[list[str]]]:
    """Run it all; write theorem.json, theorem.md, theorem.png and theorem.svg; return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    where, began = machine(), time.monotonic()
    if isinstance(config, Theorem1):
        rows = theorem1_rows(config, watch)
        picture.theorem1_picture(rows, folder / "theorem")
    else:
        rows = theorem2_rows(config, watch)
        picture.theorem2_picture(rows, folder / "theorem")
    told = {"config": config.model_dump(), "tolerance": TOLERANCE, "machine": where}
    write_json(folder / "theorem.json", {**told, "seconds": round(time.monotonic() - began), "rows": rows})
    head, body = table(config.theorem, rows)
    write_atomic(folder / "theorem.md", markdown(head, body))
    return head, body


def _teller(watch: Watch, name: str) -> Callable[[int], None]:
    watch(name, 0)

    def tell(t: int) -> None:
        if t % _BATCH == 0:
            watch(name, _BATCH)

    return tell


# --- Theorem 1 ---


def theorem1_rows(config: Theorem1, watch: Watch) -> list[Row]:
    rows = []
    for name, settings in config.problems.items():
        problem = build(settings)
        for rule in config.rules:
            m = run_theorem1(problem, config.steps, rule, _teller(watch, f"{name}, {rule}"))
            rows.append({"problem": name, "rule": rule, **theorem1_row(m, settings.center_bound)})
    return rows


def theorem1_row(m: Measured, center_bound: float) -> Row:
    T = np.arange(1, len(m.G2) + 1)
    fallen = m.objective[0] - m.objective[1:]  # F^0 - F^T (T,)
    bound, sharp = (
        np.array([b(m.steps, t, d) for t, d in enumerate(fallen.tolist(), 1)]) for b in (theorem1_bound, theorem1_sharp)
    )
    rises, average = m.increases > 0, m.average
    shown = np.unique(np.geomspace(1, len(T), _POINTS).round().astype(int)) - 1
    return {
        "L_x": m.steps.L_x,
        "L_c": m.steps.L_c,
        "eta1": m.steps.eta1,
        "eta2": m.steps.eta2,
        "slope_x": m.slope_x,
        "slope_c": m.slope_c,
        "constants_hold": m.held(center_bound),
        "largest_center": m.largest_center,
        "F_start": m.objective[0],
        "F_end": m.objective[-1],
        "increases": int(rises.sum()),
        "first_increase": int(rises.argmax()) + 1 if rises.any() else None,
        "largest_increase": float(m.increases.max()),
        "insufficient": int((m.missing > 0).sum()),
        "of_bound": float((average / bound).max()) if (bound > 0).all() else None,
        "of_sharp": float((average / sharp).max()) if (sharp > 0).all() else None,
        "slope": float(np.log10(average[-1] / average[len(T) // 10 - 1]) / np.log10(len(T) / (len(T) // 10))),
        "curve": {
            "T": T[shown].tolist(),
            "average": average[shown].tolist(),
            "bound": bound[shown].tolist(),
            "sharp": sharp[shown].tolist(),
            "objective": m.objective[1:][shown].tolist(),
            "increases": np.cumsum(rises)[shown].tolist(),
        },
    }


# --- Theorem 2 ---


def theorem2_rows(config: Theorem2, watch: Watch) -> list[Row]:
    rows = []
    for share in config.shares:
        problem = build(config.problem, [share] * config.clients)
        name = f"{100 * share:.0f} % own data"
        runs = [
            run_theorem2(problem, T, config.tau, config.lambda_p, _teller(watch, f"{name}, T = {T}"))
            for T in config.steps
        ]
        rows.append({"share": share, "T": list(config.steps), **theorem2_row(runs, config.problem.center_bound)})
    return rows


def theorem2_row(runs: list[Measured], center_bound: float) -> Row:
    last = runs[-1]
    floor = float(last.G2[-max(1, len(last.G2) // 10) :].mean())  # what |G|^2 ends at in the longest run
    row: Row = {"average": [], "kappa": [], "bound": [], "sharp": []}
    for m in runs:
        kappa, fallen, T = float(m.kappa.max(0).mean()), m.objective[0] - m.objective[-1], len(m.G2)
        row["average"].append(float(m.average[-1]))
        row["kappa"].append(kappa)
        row["bound"].append(theorem2_bound(m.steps, T, fallen, kappa))
        row["sharp"].append(theorem2_sharp(m.steps, T, fallen, kappa))
    lengths, above = np.array([len(m.G2) for m in runs]), np.array(row["average"]) - floor
    return {
        **row,
        "floor": floor,
        "slope": float(np.polyfit(np.log(lengths), np.log(above), 1)[0]) if (above > 0).all() else None,
        "L_x": last.steps.L_x,
        "L_c": last.steps.L_c,
        "slope_x": max(m.slope_x for m in runs),
        "slope_c": max(m.slope_c for m in runs),
        "largest_center": max(m.largest_center for m in runs),
        "constants_hold": all(m.held(center_bound) for m in runs),
    }
