"""The EMG models of the leaderboard on recordings that were made later.

    python experiments/emg_later.py runs/leaderboard/emg      judge the model files of the cells that have them; cells
                                                              that were judged before and are not there stay
    python experiments/emg_later.py                           the page alone, from docs/results/emg_later.json

18 of the 40 people have two later recordings (`later_*` of emg.npz). No method saw them, and no model is adapted.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qupel.data import npz
from qupel.data.natural import find_file
from qupel.deploy.predict import open_model
from qupel.report.runs import place, read_result
from qupel.report.significance import WORDS, mark, over_seeds, seed_difference
from qupel.util.files import write_atomic

RESULTS = Path(__file__).parents[1] / "docs" / "results"
REFERENCE = "qupel"


def judge(run: Path) -> list[dict[str, Any]]:
    """Each finished cell with the accuracy of its people's files on their own later recordings."""
    arrays = npz.read(find_file("emg", None, ("emg",), ("emg.npz",)), lambda names: [n for n in names if "_" in n])
    everyone = np.unique(arrays["train_groups"])
    inputs, targets, owners = (arrays[f"later_{what}"] for what in ("inputs", "targets", "groups"))
    people = np.unique(owners).tolist()
    found = []
    for path in sorted(p for p in run.glob("cells/*/result.json") if (p.parent / "models").exists()):
        result, scores = read_result(path), []
        for person in people:
            client = int(np.flatnonzero(everyone == person)[0])
            model = open_model(path.parent / "models" / f"client-{client:03}.safetensors")
            mine = owners == person
            outputs = model.run(model.ready(torch.from_numpy(inputs[mine].astype(np.float32))))
            scores.append(float((np.asarray(outputs).argmax(1) == targets[mine]).mean()))
        test = result["lines"][-1]["clients"]["test"]
        same_day = [test[int(np.flatnonzero(everyone == person)[0])] for person in people]
        found.append({"label": result["label"], "seed": result["seed"], "later": scores, "test": same_day})
        print(result["label"], result["seed"], f"{100 * np.mean(scores):.1f}", flush=True)
    return found


def rows(cells: list[dict[str, Any]]) -> list[str]:
    """By bits, best first: later, the same people's test, and the reference at the same bits minus the method."""
    by: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for cell in cells:
        method, bits = place(cell["label"])
        by.setdefault(bits, {}).setdefault(method, {})[cell["seed"]] = cell
    lines = []
    for bits, methods in sorted(by.items(), key=lambda item: -int(item[0].split()[0])):
        means = {m: np.array([np.mean(c["later"]) for c in seeds.values()]) for m, seeds in methods.items()}
        for method in sorted(means, key=lambda m: -means[m].mean()):
            seeds, ours = methods[method], methods.get(REFERENCE, {})
            spread = f" ± {100 * means[method].std(ddof=1):.1f}" if len(seeds) > 1 else ""
            same = 100 * np.mean([np.mean(c["test"]) for c in seeds.values()])
            paired = {s: seed_difference(ours[s]["later"], c["later"]) for s, c in seeds.items() if s in ours}
            gain = None if method == REFERENCE else over_seeds(paired)
            told = f"{100 * gain.mean:+.1f}{mark(gain.p)}" if gain else ""
            wide = f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}" if gain and gain.low is not None else ""
            lines.append(
                f"| {bits} | {method} | {100 * means[method].mean():.1f}{spread} | {same:.1f} | {told} | {wide} |"
            )
    return lines


def page(cells: list[dict[str, Any]]) -> str:
    seeds = sorted({cell["seed"] for cell in cells})
    return f"""# EMG, recordings made later

`python experiments/emg_later.py RUN/emg` after `qupel compare experiments/leaderboard.toml --only emg --out RUN`;
seeds {seeds}. The [leaderboard](../leaderboard.md)'s model files of the {len(cells[0]["later"])} people who were
recorded again, on these two later recordings. No method saw them, nothing is adapted. first time: these people's
accuracy on the fourth of the first recordings, as on the leaderboard. gain: {REFERENCE} at the same bits minus the
method, in points, with its 95 % interval; * p < 0.05, ** p < 0.01, *** p < 0.001 ({WORDS}). All
seeds have the same people.

| bits | method | later % | first time % | gain | 95 % interval |
|---|---|---|---|---|---|
{chr(10).join(rows(cells))}

`python experiments/emg_later.py` makes this page from [the numbers](emg_later.json).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run directory with the files of its models")
    parser.add_argument("--to", type=Path, default=RESULTS)
    options = parser.parse_args()
    numbers = options.to / "emg_later.json"
    if options.run is not None:
        before = json.loads(numbers.read_text()) if numbers.exists() else []
        cells = {(cell["label"], cell["seed"]): cell for cell in [*before, *judge(options.run)]}
        write_atomic(numbers, json.dumps([cells[key] for key in sorted(cells)]) + "\n")
    write_atomic(options.to / "emg_later.md", page(json.loads(numbers.read_text())))


if __name__ == "__main__":
    main()
