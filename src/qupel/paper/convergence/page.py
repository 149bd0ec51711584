"""What a study found, as a table, and as the page of published results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qupel.report.tables import markdown
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # head, body

_NOTES = {
    1: """F rose: in how many of {steps} steps, first where, by how much at most (up to {tolerance:g} of |F^0| is
rounding); missed: steps short of the sufficient decrease; of bound, of sharper: the largest average of |G|^2 / bound
over all T; slope: of the average, log-log, over the last decade of T (-1 is the steepest there is); held: gradients
and centers stayed within the constants.""",
    2: """T = ..: the average of |G|^2 over a run of T steps; floor: the mean of |G|^2 over the last tenth of the
longest run, and kappa of that run; slope to floor: of average - floor, log-log, over all T; of bound, of sharper: the
largest average / bound over all T; held: gradients and centers stayed within the constants.""",
}


def table(theorem: int, rows: list[Row]) -> Table:
    return _theorem1_table(rows) if theorem == 1 else _theorem2_table(rows)


def _theorem1_table(rows: list[Row]) -> Table:
    head = ["problem", "center prox", "last F", "F rose", "first", "by", "missed", "of bound", "of sharper", "slope"]
    body = [
        [
            r["problem"],
            r["rule"],
            f"{r['F_end']:.4f}",
            str(r["increases"]),
            "-" if r["first_increase"] is None else str(r["first_increase"]),
            f"{r['largest_increase']:.0e}" if r["increases"] else "-",
            str(r["insufficient"]),
            *(f"{r[key]:.0e}" if r["rule"] == "exact" else "-" for key in ("of_bound", "of_sharp")),
            f"{r['slope']:.4f}",
            "yes" if r["constants_hold"] else "no",
        ]
        for r in rows
    ]
    return [*head, "held"], body


def _theorem2_table(rows: list[Row]) -> Table:
    columns = [f"T = {t}" for t in rows[0]["T"]]
    head = ["own data", *columns, "kappa", "floor", "slope to floor", "of bound", "of sharper", "held"]
    body = [
        [
            f"{100 * r['share']:.0f} %",
            *(f"{a:.3g}" for a in r["average"]),
            f"{r['kappa'][-1]:.3g}",
            f"{r['floor']:.3g}",
            "-" if r["slope"] is None else f"{r['slope']:.2f}",
            *(f"{max(a / b for a, b in zip(r['average'], r[key], strict=True)):.0e}" for key in ("bound", "sharp")),
            "yes" if r["constants_hold"] else "no",
        ]
        for r in rows
    ]
    return head, body


def publish(run: Path, target: Path, command: str) -> list[Path]:
    """Copy a finished run's numbers and picture to a folder, and write the page on all that were published there."""
    try:
        told = json.loads((run / "theorem.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{run} holds no finished run of `qupel theory`") from None
    target.mkdir(parents=True, exist_ok=True)
    name = f"theory{told['config']['theorem']}"
    write_atomic(target / f"{name}.json", json.dumps({"command": command, **told}) + "\n")
    shutil.copy(run / "theorem.png", target / f"{name}.png")
    found = [(n, json.loads(raw.read_text())) for n in (1, 2) if (raw := target / f"theory{n}.json").exists()]
    sections = "\n".join(_section(n, study) for n, study in found)
    write_atomic(target / "theory.md", f"# Theorems 1 and 2, measured against their bounds\n\n{sections}")
    return [target / f"{name}.json", target / f"{name}.png", target / "theory.md"]


def _section(theorem: int, study: dict[str, Any]) -> str:
    m, config = study["machine"], study["config"]
    problems = config["problems"].values() if theorem == 1 else [config["problem"]]
    seeds = ", ".join(sorted({str(problem["seed"]) for problem in problems}))
    origin = (
        f"`{study['command']}`; digits, seed {seeds}; {m['cpus']} CPUs ({m['processor']}), "
        f"Python {m['python']}, torch {m['torch']}, commit {m['commit']}; {study['seconds'] / 60:.0f} minutes."
    )
    shown = markdown(*table(theorem, study["rows"]))
    notes = _NOTES[theorem].format(tolerance=study["tolerance"], steps=config["steps"])
    picture = f"![Theorem {theorem}](theory{theorem}.png)"
    return f"## Theorem {theorem}\n\n{origin}\n\n{shown}\n{notes}\n\n{picture}\n"
