"""README and docs say what the committed numbers say: pages made again from their JSON, README's tables and sentences
from the same. A number that is edited, or one that no file has, fails."""

import csv
import importlib.util
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from qupel.core.optim import Adam
from qupel.core.prox import prox_weights
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock, Schedule
from qupel.paper import published as paper
from qupel.paper.reproduce import plan
from qupel.paper.reproduce.publish import rewrite
from qupel.parts.base import State
from qupel.report import later, leaderboard, networks, tables
from qupel.report.significance import over_seeds, seed_difference
from qupel.run.recipes import find
from qupel.run.settings import Length, Settings
from qupel.tasks.judge import Judge
from qupel.tasks.task import ModuleTask, Problem

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TABLES = ("table1-small", "table2-small", "table3-small")
PAGES = ("demo", "safe", "mnist_federation", "cifar10_federation", "cifar10_recipe")
PAGES += ("mnist_training", "resnet20", "mnist_writers", "roles", "quped_cifar10", "quped_emg")
PAGES += ("passes", "safe_roles")
NUMBER = re.compile(r"\d+\.\d+")


def script(name):
    """An experiment as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


publish = script("publish")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def plain(text):
    return " ".join(text.split())


# --- pages ---


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_its_numbers(name):
    raw = read(name)
    assert (RESULTS / f"{name}.md").read_text() == publish.page(name, raw)
    for part in raw.values():
        if "cells" not in part:
            assert all(row["p"] is None for row in part["rows"])  # no p without the numbers it comes from
            continue
        for row, again in zip(part["rows"], publish.rows(part["cells"]), strict=True):
            assert row.pop("by_bits") == pytest.approx(again.pop("by_bits"))
            assert row == pytest.approx(again)


@pytest.mark.parametrize("name", ["dp_writers", "emg_later", "late", "robust", "secure"])
def test_a_page_of_an_experiment_is_made_of_its_numbers(name):
    found = read(name)
    more = (30, len(found["mean"]["none"])) if name == "robust" else ()
    assert (RESULTS / f"{name}.md").read_text() == script(name).page(found, *more)


def test_the_leaderboard_is_made_of_its_numbers(tmp_path):
    docs = RESULTS.parent
    for path in leaderboard.publish(docs / leaderboard.NUMBERS, tmp_path):
        assert path.read_text() == (docs / path.name).read_text()


def test_one_slow_client_costs_asynchronous_rounds_at_most_half_the_time():
    late, curves = script("late"), read("late")["curves"]
    for goal in late.GOALS:
        for sync, other in zip(*(curves[mode].values() for mode in late.MODES), strict=True):
            assert late.reached(other, goal) <= late.reached(sync, goal) / 2


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_paper_is_made_of_its_numbers(name, tmp_path):
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    rewrite(tmp_path / f"{name}.json")
    for suffix in (".md", ".tex"):
        assert (tmp_path / name).with_suffix(suffix).read_text() == (RESULTS / name).with_suffix(suffix).read_text()
    made, kept = (csv.reader(io.StringIO((at / f"{name}.csv").read_text())) for at in (tmp_path, RESULTS))
    for row, other in zip(made, kept, strict=True):
        assert [_value(v) for v in row] == pytest.approx([_value(v) for v in other])


def _value(text):
    try:
        return float(text)
    except ValueError:
        return text


def test_a_run_is_published_with_every_client_and_made_again_from_that(tmp_path):
    from made_runs import result, write_run

    cells = [{**result(label, seed), "files": [1000 + seed] * 20} for label in ("A", "B") for seed in range(3)]
    for c in cells:
        c["machine"] |= {"processor": "p", "torch": "2"}
    raw = {"r": publish.section(write_run(tmp_path / "r", cells))}
    publish.write("r", raw, tmp_path)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept == raw
    assert (tmp_path / "r.md").read_text() == publish.page("r", kept)
    assert [c["lines"][-1]["clients"]["test"] for c in kept["r"]["cells"]] == [
        pytest.approx(c["lines"][-1]["clients"]["test"]) for c in cells
    ]
    (row,) = (r for r in publish.rows(kept["r"]["cells"]) if r["label"] == "B")
    (full,) = (r for r in tables.rows(cells) if r.label == "B")
    assert (row["gain"], row["low"], row["p"], row["file_bytes"]) == pytest.approx(
        (full.gain, full.low, full.p, full.file_bytes)
    )
    shutil.rmtree(tmp_path / "r" / "cells" / "000")
    with pytest.raises(SystemExit, match="5 of 6 cells are done"):
        publish.section(tmp_path / "r")


# --- README ---


def rows(name, run=None):
    """label -> row of a page, as the library has it."""
    found = read(name)[run or name]["rows"]
    return {r["label"]: tables.Row(**{**r, "by_bits": {float(b): v for b, v in r["by_bits"].items()}}) for r in found}


def columns(name, wanted):
    """Lines of a page's table, these columns of it."""
    head, body = tables.federation_table(list(rows(name).values()))
    keep = [head.index(w) for w in wanted if w in head]
    lines = tables.markdown([head[k] for k in keep], [[cells[k] for k in keep] for cells in body]).splitlines()
    return [plain(line) for line in lines]


def demo_claims():
    found = rows("demo")
    head, body = tables.federation_table(list(found.values()))
    cell = next(c for c in read("demo")["demo"]["cells"] if c["label"] == "QuPeL")
    full = found["FedAvg"].file_bytes
    sizes = dict(zip(cell["lines"][-1]["clients"]["bits"], cell["files"], strict=True))
    words = {15: "fifteenth", 10: "tenth"}
    two, three = (words[round(full / sizes[bits])] for bits in (2.0, 3.0))
    told = [plain(line) for line in tables.markdown(head, body).splitlines()]
    told.append(f"A 2-bit file is a {two} of the full-precision one, a 3-bit file a {three}.")
    count = {5: "five"}[found["QuPeL"].seeds]
    small = [row for row in found.values() if row.file_bytes and row.file_bytes < full / 10]
    assert len(small) == 4
    assert all(row.gain > 0 and row.p < 0.05 for row in [*small[1:], found["FedAvg"]])
    assert found["FedAvg + tuning"].p >= 0.05
    told.append("QuPeL ends above everything of its size, and above the shared model;")
    told.append(f"{count} seeds of this tiny task do not tell it from a full-precision copy of the shared model")
    return told


def mnist_claims():
    one, after = rows("mnist_training"), rows("mnist_training", "mnist_afterwards")
    f, seeds = rows("mnist_federation"), one["full precision"].seeds

    def gain(label):
        r = f[label]
        return f"{r.gain:+.1f}", f"{r.low:+.1f} to {r.high:+.1f}"

    (local, local_ends), (shared, shared_ends), (tuned, tuned_ends) = map(gain, ("Local", "FedAvg", "FedAvg + tuning"))
    times = {12: "twelve"}[round(f["FedAvg + tuning"].file_bytes / f["QuPeL"].file_bytes)]
    return [
        f"half 2 and half 3 bits, {f['QuPeL'].seeds} seeds ([page](docs/results/mnist_federation.md)): "
        f"QuPeL {f['QuPeL'].mean:.1f}, Local {f['Local'].mean:.1f} (gain {local}, 95 % interval {local_ends}), "
        f"FedAvg {f['FedAvg'].mean:.1f} ({shared}, {shared_ends}); FedAvg + tuning at full precision, "
        f"with files {times} times as large, {f['FedAvg + tuning'].mean:.1f} ({tuned}, {tuned_ends}).",
        f"an MLP trained in one place, {seeds} seeds ([page](docs/results/mnist_training.md)): "
        f"full precision {one['full precision'].mean:.1f}; "
        f"at 2 bits learned centers {one['learned centers, 2 bits'].mean:.1f}, "
        f"BinaryRelax {one['BinaryRelax, 2 bits'].mean:.1f}, "
        f"k-means afterwards {after['k-means afterwards, 2 bits'].mean:.1f}; "
        f"at 1 bit learned centers {one['learned centers, 1 bit'].mean:.1f}, "
        f"BinaryRelax {one['BinaryRelax, 1 bit'].mean:.1f}, ProxQuant {one['ProxQuant, 1 bit'].mean:.1f}, "
        f"k-means afterwards {after['k-means afterwards, 1 bit'].mean:.1f}.",
    ]


def speed_claims():
    steps = {(s["model"], s["bits"]): s["QuPeL"] for s in read("speed")["steps"]}
    peers = read("benchmarks")["QuPeL 2 bits, MLP, 1,000 clients"]["peers"]
    ratio = peers["pfl"]["round"] / peers["QuPeL"]["round"]

    def ends(name):
        shares = [f["of floor"] for f in read("formats")["formats"] if f["format"] == name]
        return f"{min(shares):.2f} to {max(shares):.2f}"

    return [
        f"Packed files are {ends('packed')} times what bits, centers and the unquantized rest take at least, "
        f"ONNX {ends('ONNX')}, Core ML {ends('Core ML')} (cnn5 and ResNet-20",
        f"it takes {steps['cnn5', 2]:.2f} of two plain training passes for cnn5, "
        f"{steps['resnet20', 2]:.2f} for ResNet-20, {steps['digits_cnn', 2]:.2f} for the tiny digits_cnn",
        f"For a round of 1,000 small clients pfl takes {ratio:.1f} times as long",
    ]


def readme_claims():
    cifar = columns("cifar10_recipe", ["method", "accuracy %", "file", "floor"])
    seeds = {r.seeds for r in rows("cifar10_recipe").values()}
    head = f"1,500 steps, {seeds.pop()} seeds ([page](docs/results/cifar10_recipe.md)):"
    told = [
        *speed_claims(),
        *demo_claims(),
        head,
        *cifar,
        cifar_claim(),
        safe_claim(),
        leaderboard_claim(),
        quped_claim(),
    ]
    return [*told, *mnist_claims(), writers_claim()]


def quped_claim():
    """Above Local, told apart on CIFAR-10 only; below it for one network; not above QuPeL with one network for all."""
    c, e = rows("quped_cifar10"), rows("quped_emg")
    c_one, e_one = c["QuPeL, small_cnn for all"], e["QuPeL, cnn1d for all"]
    alone = {
        g.network: g.first.mean
        for name in ("quped_cifar10", "quped_emg")
        for g in networks.groups(read(name)[name]["cells"])
        if g.label == "Local" and g.bits is None
    }
    assert len(alone) == 6
    assert [network for network, gain in alone.items() if gain < 0] == ["tcn"]
    assert c["Local"].p < 0.05 < e["Local"].p
    assert max(c_one.gain, e_one.gain) < 0

    def told(row):
        return f"{row.gain:+.1f}, 95 % interval {row.low:+.1f} to {row.high:+.1f}"

    return (
        f"CIFAR-10 ([page](docs/results/quped_cifar10.md)) QuPeD {c['QuPeD'].mean:.1f}, each client alone with the "
        f"same network and bits {c['Local'].mean:.1f} ({told(c['Local'])}); EMG of 40 people "
        f"([page](docs/results/quped_emg.md)) {e['QuPeD'].mean:.1f} and {e['Local'].mean:.1f} ({told(e['Local'])}, "
        f"not told apart), where the smallest network, tcn, ends {-alone['tcn']:.1f} below what it reaches alone. One "
        f"network for all under QuPeL, where every device can run it, reaches {c_one.mean:.1f} and {e_one.mean:.1f}."
    )


def safe_claim():
    found = [rows("safe", run) for run in read("safe")]
    gains = [each["Local"].gain for each in found]
    assert [each["Local"].p < 0.05 for each in found] == [True] * 6
    assert [each["FedAvg"].p < 0.05 for each in found] == [False] + [True] * 5
    for each in found:
        assert min(each["Local"].gain, each["FedAvg"].gain) > 0
        assert all(each["QuPeL"].by_bits[bits] > each["Local"].by_bits[bits] for bits in (2.0, 3.0))
    assert (len(found), {each["QuPeL"].seeds for each in found}) == (6, {3})
    return (
        f"on six federations of 30 rounds ([page](docs/results/safe.md)), QuPeL ends above Local at the same bits by "
        f"{min(gains):.1f} to {max(gains):.1f} points, {np.mean(gains):.1f} on average, both at 2 and at 3 bits, and "
        f"above FedAvg's shared model on each (p < 0.05 over three seeds in eleven of the twelve comparisons; the "
        f"other is FedAvg on digits)."
    )


def leaderboard_claim():
    board = json.loads((RESULTS.parent / leaderboard.NUMBERS).read_text())
    found = board["federations"]
    assert (set(found), len(board["methods"])) == (
        {"cifar10-classes", "cifar10-dirichlet", "emg", "mnist-writers", "roles"},
        17,
    )
    assert all(f["missing"] == 0 and {c["seeds"] for c in f["cells"]} == {3} for f in found.values())
    above = []
    for title, federation in found.items():
        compared = [c for c in federation["cells"] if c["gain"] is not None]
        assert {c["bits"] for c in compared} == {32, 3, 2, 1}
        above += [(title, c) for c in compared if c["gain"] < 0]
        if title.startswith("cifar10"):
            assert all(c["gain"] > 0 and c["p"] < 0.05 for c in compared)
    assert {title for title, _ in above} == {"mnist-writers", "roles"}
    assert {c["method"] for _, c in above} == {"feddyn", "fedavgm + tuning", "ditto"}
    assert min(c["p"] for _, c in above) > 0.05
    assert 2 not in {c["bits"] for _, c in above}
    cases = {3: "three", 4: "four", 5: "five"}[len(above)]
    return (
        "On CIFAR-10, by classes and by Dirichlet(0.3), QuPeL ends above every other at every width (p < 0.05). On EMG "
        "of 40 people, MNIST by writer and Shakespeare's roles nobody ends above it at 2 bits; at other widths FedDyn, "
        f"FedAvgM + tuning or Ditto do in {cases} cases on the writers and roles, by "
        f"{-min(c['gain'] for _, c in above):.1f} points at most, none told apart."
    )


def writers_claim():
    cells = read("mnist_writers")["mnist_writers"]["cells"]
    found = {r.label: r for r in later.rows(cells)}
    ours, shared, alone, tuned = (found[label] for label in ("QuPeL", "FedAvg", "Local", "FedAvg + tuning"))
    assert max(shared.first.gain.p, alone.first.gain.p) < 0.05 < tuned.first.gain.p
    each = {
        k: 100 * np.mean([c["unseen"]["test"] for c in cells if c["label"] == k], axis=0) for k in ("QuPeL", "FedAvg")
    }
    over_writers = stats.ttest_1samp(each["QuPeL"] - each["FedAvg"], 0)
    low, high = over_writers.confidence_interval()
    assert shared.adapting.clients == (0, shared.clients, 0)  # FedAvg ships its shared model as it is
    times = round(shared.file_bytes / ours.file_bytes)
    g = shared.first.gain
    return (
        f"{ours.clients} others join later ([page](docs/results/mnist_writers.md)): adapted at 2 bits their models "
        f"reach {ours.mean:.1f}, FedAvg's shared model at full precision, in a file {times} times as large, "
        f"{shared.mean:.1f} on the same digits (gain {g.mean:+.1f}, 95 % interval {g.low:+.1f} to {g.high:+.1f}, "
        f"p = {g.p:.3f} over seeds, which all have the same writers; over these writers {low:+.1f} to {high:+.1f}, "
        f"p = {over_writers.pvalue:.3f}), 2-bit models trained alone {alone.mean:.1f}. Full-precision tuning of the "
        f"shared model, {tuned.mean:.1f}, is not told apart from {ours.mean:.1f}."
    )


def cifar_claim():
    found = rows("cifar10_recipe")
    plain, tricks = found["FedAvg + tuning"], found["FedAvgM + tuning"]
    small = found["FedAvgM + tuning, then 2 bits"]
    assert max(plain.p, small.p) < 0.05 < tricks.p
    times = {12: "twelve"}[round(plain.file_bytes / found["QuPeL, 2 bits"].file_bytes)]

    def told(row):
        return f"{row.gain:+.1f}, 95 % interval {row.low:+.1f} to {row.high:+.1f}"

    return (
        f"At 2 bits QuPeL ends above FedAvg + tuning ({told(plain)}), whose files are {times} times as large, "
        f"and above the best method quantized afterwards to 2 bits ({told(small)}); it is not told from "
        f"full-precision tuning with the same momentum and prior ({told(tricks)})."
    )


VERSIONS = ("Python 3.11 or newer", "(torch 2.13, CPU)")


def problems(readme):
    """What README says otherwise than the committed numbers, and numbers that these claims do not cover."""
    said = plain(re.sub(r"```.*?```", "", readme, flags=re.S))
    claims = [plain(c) for c in readme_claims()]
    rest = said
    for text in (*sorted(claims, key=len, reverse=True), *VERSIONS):
        rest = rest.replace(text, "")
    return [f"not in README: {c}" for c in claims if c not in said] + [f"in no file: {n}" for n in NUMBER.findall(rest)]


def test_readme_says_what_the_files_say():
    assert problems((ROOT / "README.md").read_text()) == []


def test_every_number_of_readme_is_checked():
    """Change any number with a decimal point, outside of code: it is noticed."""
    readme = (ROOT / "README.md").read_text()
    code = [m.span() for m in re.finditer(r"```.*?```", readme, flags=re.S)]
    found = [m for m in NUMBER.finditer(readme) if not any(a <= m.start() < b for a, b in code)]
    assert len(found) > 60
    for m in found:
        last = str((int(m[0][-1]) + 1) % 10)
        assert problems(readme[: m.end() - 1] + last + readme[m.end() :]), m[0]


# --- other pages ---


def test_what_method_md_says_of_the_code():
    """Each deviation that the page names, in the code."""
    said = plain((ROOT / "docs" / "method.md").read_text())
    printed = find("qupel-paper")
    phases = printed.phases(Settings(**printed.defaults), Length(rounds=7, local_steps=2, epoch_steps=2))
    main, tail = (p.method for p in phases)
    assert main.as_printed
    x, w = torch.tensor([1.0, 2.0]), torch.zeros(2)
    still = replace(tail, eta1=Schedule(0.0), optimizer=Adam())
    before = State(x, w, memory=tuple(torch.full_like(m, 3) for m in Adam().memory(x)))
    task = ModuleTask(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss)
    state = still.start(before, {}, Problem(task, task))
    assert all(not m.any() for m in state.memory)
    assert "the optimizer's memory (momentum, Adam) starts anew" in said
    state, _ = still.step(state, Problem(task, task), (torch.ones(3, 1), torch.ones(3, 1)), Clock(0, 2, 2))
    assert torch.equal(state.w, 0.125 * x)  # toward x: the corrected sign
    assert "so w goes on there with the corrected sign" in said
    weights = torch.tensor([-3.0, -1.0, 2.0, 6.0])
    assert init_centers(weights, 1, "paper").tolist() == [-2, 4]
    assert "1 bit: the mean of its negative and the mean of its positive weights" in said
    assert prox_weights(torch.tensor([0.5]), torch.tensor([0.0, 2.0]), 0.2).tolist() == pytest.approx([0.4])
    assert "the 1/2 of R above" in said
    assert all(plan.build("table1", scale, 1).data.augment for scale in ("small", "paper"))
    assert "random flip and crop (`data.augment`), at the scales `small` and `paper`" in said
    judge = Judge(torch.nn.BatchNorm1d(1), torch.nn.functional.mse_loss)
    data = torch.tensor([[1.0], [3.0]])
    found = judge.load(torch.ones(2), [(data, data)])
    assert (found.running_mean.item(), found.training) == (2.0, False)
    assert "measured on the deployed, quantized model with each client's own training data" in said


def test_the_page_on_the_paper_has_the_tables_numbers():
    """Rows of paper.md against the grids, and the comparisons that its text makes."""
    said = plain((RESULTS / "paper.md").read_text())
    raw = {name: read(name) for name in TABLES}
    grids = {}
    for name, about in raw.items():
        done = [{**c, "data_note": "", "lines": [{"clients": c["clients"]}]} for c in about["cells"]]
        grids[name] = paper.grid(about["table"], done, about["rows"])
    g = grids["table2-small"]
    cells = {row: g.cells[g.rows.index(row)] for row in g.rows}
    for name, row in (("Local, here", paper.LOCAL), ("QuPeL, paper's method, here", paper.QUPEL)):
        assert f"| {name} | " + " | ".join(short(c.mean) for c in cells[row]) + " |" in said
    assert "| **QuPeL, our recipe** | " + " | ".join(f"**{short(c.mean)}**" for c in cells[paper.OURS]) + " |" in said
    for row in (paper.QUPEL, paper.OURS):
        assert "| minus Local, here | " + " | ".join(f"{c.gain:+.1f}" for c in cells[row]) + " |" in said
    assert [c.p < 0.05 for c in cells[paper.QUPEL]].count(True) == 4
    assert "below 0.05 in four columns of six" in said
    assert max(c.p for c in cells[paper.OURS][1:]) < 0.01
    assert "every quantized one: p < 0.01" in said
    full = cells[paper.OURS][0]
    assert f"the interval is {full.low:.1f} to {full.high:+.1f}, so that three seeds do not show it" in said
    tuned = compare(raw["table2-small"], f"{paper.OURS} @ 32 bits", f"{paper.TUNED} @ 32 bits")
    assert f"is {tuned.mean:.1f} above it ({tuned.low:.1f} to {tuned.high:.1f}, p = {tuned.p:.2f})" in said
    g = grids["table3-small"]
    for name, row in (("paper's method, here", paper.QUPEL), ("our recipe, here", paper.OURS)):
        shown = [f"{c.gain:+.2f} [{c.low:+.2f}, {c.high:+.2f}]" for c in g.cells[g.rows.index(row)][1:]]
        assert f"| {name} | " + " | ".join(shown) + " |" in said
    g = grids["table1-small"]
    for row, cells in zip(g.rows, g.cells, strict=True):
        bold = "**" if "our recipe" in row else ""
        assert f"| {bold}{row}{bold} | {bold}{short(cells[0].mean)}{bold} | " in said
        assert f"| {bold}{short(cells[1].mean)}{bold} | " in said


def short(value):
    """One digit; 60.55 is 60.6 although its binary fraction is a little less."""
    return f"{value + 1e-9:.1f}"


def compare(raw, ours, others):
    a, b = ({c["seed"]: c["clients"]["test"] for c in raw["cells"] if c["label"] == label} for label in (ours, others))
    return over_seeds({seed: 100 * seed_difference(a[seed], b[seed]) for seed in a})


def test_the_page_on_speed_has_its_numbers():
    said = (RESULTS / "speed.md").read_text()
    for s in read("speed")["steps"]:
        line = rf"\| {s['model']}(, batch {s['batch']})? \| {s['bits']} \| {s['two passes ms']} ms \| "
        assert re.search(line + rf"{s['Algorithm 1']:.3f} \| {s['QuPeL']:.3f} \|", said), s


def test_the_page_on_large_data_has_its_numbers():
    said = (RESULTS / "data.md").read_text()
    for r in read("data")["runs"]:
        assert f"| `{r['command']}` | {r['peak_GB']:.2f} GB | " in said
        assert f" | {r['seconds']:.0f} s |" in said
        assert r["file_GB"] > 19.9
        assert r["peak_GB"] + r["workers"] * r["worker_peak_GB"] < 2
