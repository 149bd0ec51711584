"""A comparison: what its file becomes, a search that sees no test data, runs that stop and go on, the page."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

import browser as chromium
from qupel.core.quantize import init_centers
from qupel.deploy.file import load
from qupel.engine.rounds import Stopped
from qupel.report import leaderboard
from qupel.report.figures import leaderboard_picture
from qupel.report.runs import place
from qupel.run import compare, config, jobs
from qupel.run.commands import leaderboard as command
from qupel.run.comparing import How, run_comparison, show_progress
from qupel.run.experiment import run_experiment
from qupel.util.errors import UserError

ROOT = Path(__file__).parent.parent
FILE = """
seeds = [0, 1, 2]
bits = [32, 2]
[settings]
finetune = 0.25
[search]
trials = 2
settings = {{eta1 = [0.02, 0.2]}}
[federations.drawn]
rounds = 4
local_steps = 4
batch = 10
evaluate_every = 2
vectorize = "off"
data = {{name = {data!r}}}
split = {{clients = 4, classes = 3, unseen = 1}}
model = {{name = "mlp", args = {{hidden = [12, 12]}}}}
[methods.qupel]
recipe = "qupel-prox"
warmup = 0.5
[methods.fedavgm]
recipe = "fedavg"
server = "fedavgm"
afterwards = "kmeans"
[methods.ditto]
method = "ditto"
bits = [32]
search = [{{"method.lambda_p" = 0.1}}, {{eta1 = 1e30}}]
"""


def draw(path: Path, permuted: bool = False) -> Path:
    """Four classes in six dimensions; permuted: other test labels."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 240), ("test", 160)):
        y = np.arange(n) % 4
        x = rng.standard_normal((n, 6)) + 1.5 * np.eye(6)[y]
        arrays |= {f"{split}_inputs": x.astype(np.float32), f"{split}_targets": y}
    if permuted:
        arrays["test_targets"] = np.random.default_rng(1).permutation(arrays["test_targets"])
    np.savez(path, **arrays)
    return path


def parse(data: Path, text: str = FILE) -> compare.Comparison:
    return compare.parse(text.format(data=str(data)), "file.toml")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "drawn.npz")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "run"
    run_comparison(parse(data), out)
    return out


@pytest.fixture(scope="module")
def board(run) -> dict:
    return json.loads((run / leaderboard.NUMBERS).read_text())


def timeless(value):
    """Without what depends on when and how fast."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "finished")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


# --- the file ---


def test_every_method_has_its_cells(data):
    c = parse(data)
    made = c.config("drawn", c.methods_of("drawn"), {"qupel": {"eta1": 0.5}, "ditto": {"method.lambda_p": 3.0}})
    assert list(made.methods) == [
        "qupel @ 32 bits", "qupel @ 2 bits", "fedavgm @ 32 bits", "fedavgm @ 2 bits", "ditto @ 32 bits",
    ]  # fmt: skip
    assert {k: m.bits for k, m in made.methods.items()} == {k: int(place(k)[1].split()[0]) for k in made.methods}
    assert {k: m.of for k, m in made.methods.items() if m.of} == {"fedavgm @ 2 bits": "fedavgm @ 32 bits"}
    assert {m.eta1 for k, m in made.methods.items() if place(k)[0] == "qupel"} == {0.5}
    assert made.methods["ditto @ 32 bits"].method == {"name": "ditto", "lambda_p": 3.0}
    assert {m.finetune for m in made.methods.values()} == {0.25}  # [settings]
    assert len(jobs.cells(made)) == 5 * 3
    servers = [p.server.momentum for p in jobs.build_job(made, jobs.Cell("fedavgm @ 32 bits", 0)).phases]
    assert servers == [0.9]


def test_every_method_has_as_many_trials_and_none_sees_test_data(data):
    c = parse(data)
    made, tried = c.trials("drawn", c.methods_of("drawn"))
    assert {name: len(settings) for name, settings in tried.items()} == {"qupel": 2, "fedavgm": 2, "ditto": 2}
    assert tried["qupel"] == [{"eta1": 0.02}, {"eta1": 0.2}]
    assert made.seeds == (100,)
    assert not set(made.seeds) & set(c.sheet.seeds)
    parts, joining = jobs.split_clients(made, jobs.data_of(made), 100)
    assert not joining
    assert [len(p.test_rows) for p in parts] == [0] * 3
    assert min(len(p.validation_rows) for p in parts) > 0


def test_trials_may_be_shorter(data):
    c = parse(data, FILE.replace("trials = 2", "trials = 2\nrounds = 0.5"))
    assert c.trials("drawn", c.methods_of("drawn"))[0].rounds == 2
    assert c.config("drawn", c.methods_of("drawn"), {}).rounds == parse(data).trials("drawn", ["qupel"])[0].rounds == 4


def test_a_grid_is_a_product(data):
    text = FILE.replace("trials = 2", "trials = 4").replace(
        "eta1 = [0.02, 0.2]", "eta1 = [1.0, 2.0], finetune = [0, 0.5]"
    )
    c = parse(data, text.replace("[methods.ditto]", "[methods.other]").replace("search = [", "#"))
    _, tried = c.trials("drawn", ["qupel"])
    pairs = {(s["eta1"], s["finetune"]) for s in tried["qupel"]}
    assert pairs == {(1.0, 0), (1.0, 0.5), (2.0, 0), (2.0, 0.5)}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "trials = 2",
            "trials = 3",
            "methods.qupel.search has 2 settings; every method has the same number of trials, 3",
        ),
        ("seeds = [0, 1, 2]", "seeds = [0, 100]", "search.seed = 100 is one of the seeds"),
        ("[methods.ditto]", "[methods.search]", "'search': a name is"),
        ("[methods.ditto]", "[methods.drawn]", "'drawn': a name is"),
        ("seeds = [0, 1, 2]", 'reference = "nobody"', "reference = 'nobody'; allowed: qupel, fedavgm, ditto"),
        ("rounds = 4", "runds = 4", "drawn: runds: unknown key 'runds'; did you mean 'rounds'"),
        ("rounds = 4", 'rounds = 4\nonly = ["x"]', "federations.drawn.only: 'x' is no method"),
        ('afterwards = "kmeans"', 'afterwards = "magic"', "methods.fedavgm: afterwards: "),
        ('method = "ditto"', 'method = "dito"', "unknown method 'dito'"),
        ("bits = [32, 2]", "bits = [32, 9]", "allowed are 1 to 8"),
    ],
)
def test_mistakes_are_found_before_anything_runs(data, before, after, said):
    assert before in FILE
    with pytest.raises((UserError, ValueError), match=re.escape(said)):
        parse(data, FILE.replace(before, after))


def test_a_part_is_named_by_words(data):
    c = parse(data)
    part = compare.Part.of(c, ["drawn", "qupel", "2 bits", "seed 1"])
    assert part.has("qupel @ 2 bits", 1)
    assert not [
        cell for cell in (("qupel @ 32 bits", 1), ("qupel @ 2 bits", 0), ("ditto @ 2 bits", 1)) if part.has(*cell)
    ]
    with pytest.raises(UserError, match="--only 'seed 7': allowed are drawn, qupel"):
        compare.Part.of(c, ["seed 7"])


def test_the_committed_leaderboard_is_in_order():
    c = compare.load(ROOT / "experiments" / "leaderboard.toml")
    assert len(c.sheet.federations) == 5
    assert {"qupel", "local", "fedavgm + tuning", "scaffold", "pfedme", "feddyn"} <= set(c.sheet.methods)
    for federation in c.sheet.federations:
        assert {len(t) for t in c.trials(federation, c.methods_of(federation))[1].values()} == {c.sheet.search.trials}


def test_the_example_of_the_docs_is_in_order():
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "comparing.md").read_text(), re.S)
    c = compare.parse(text, "docs")
    assert len(jobs.cells(c.config("writers", c.methods_of("writers"), {}))) == 3 * 4 * 3
    assert {len(t) for t in c.trials("writers", c.methods_of("writers"))[1].values()} == {4}


# --- the search ---


def test_permuted_test_labels_change_no_choice(run, tmp_path):
    other = tmp_path / "drawn.npz"
    draw(other, permuted=True)
    run_comparison(parse(other), tmp_path / "run", only=["seed 0", "32 bits"])
    mine, theirs = (leaderboard.choices(folder / "drawn") for folder in (run, tmp_path / "run"))
    assert mine == theirs  # every trial's score, to the last bit
    logs = [log for log in (run / "search").rglob("metrics.jsonl") if "ditto-trial-2" not in str(log)]
    lines = [json.loads(text) for log in logs for text in log.read_text().splitlines()]
    assert len(lines) >= 5 * 2
    for line in lines:
        assert line["validation"] > 0
        assert not [key for key in line if key.startswith(("test", "float_test"))]
        assert set(line["clients"]["test"]) == {None}
    scores = [
        json.loads((folder / "drawn/cells/qupel-32-bits-s0/result.json").read_text())["lines"][-1]["test"]
        for folder in (run, tmp_path / "run")
    ]
    assert scores[0] - scores[1] > 0.2  # test data are looked at afterwards


def test_the_best_trial_is_chosen_and_one_that_fails_is_not(run, board):
    chosen = leaderboard.choices(run / "drawn")
    for name, told in chosen.items():
        logs = [run / f"search/drawn/cells/{name}-trial-{k}-s100/metrics.jsonl" for k in (1, 2)]
        reached = [json.loads((log.read_text().splitlines() or ["{}"])[-1]).get("validation", -1) for log in logs]
        assert [-1 if t["validation"] is None else t["validation"] for t in told["trials"]] == reached
        assert told["settings"] == told["trials"][int(np.argmax(reached))]["settings"]
    assert chosen["ditto"]["trials"][1]["validation"] is None
    assert "the loss is nan" in leaderboard.failures(run / "search" / "drawn")["ditto-trial-2-s100"]
    assert board["federations"]["drawn"]["search"] == chosen
    methods = json.loads((run / "drawn/config.json").read_text())["methods"]
    for label in methods:
        told = chosen[place(label)[0]]["settings"]
        assert methods[label]["eta1"] == told.get("eta1", 0.1)


# --- quantized afterwards ---


def test_quantized_afterwards_is_k_means_of_every_client_s_model(run, data):
    cells, arrays = run / "drawn/cells", np.load(data)
    told = json.loads((cells / "fedavgm-2-bits-s1/result.json").read_text())
    before = json.loads((cells / "fedavgm-32-bits-s1/result.json").read_text())
    c = parse(data)
    whole = c.config("drawn", ["fedavgm"], {})
    parts, joining = jobs.split_clients(whole, jobs.data_of(whole), 1)
    for who, some, scores in (
        ("client", parts, told["lines"][-1]["clients"]["test"]),
        ("unseen", joining, told["unseen"]["test"]),
    ):
        assert len(some) == len(scores) > 0
        for i, (part, score) in enumerate(zip(some, scores, strict=True)):
            file = f"models/{who}-{i:03d}.safetensors"
            small, full = (load(cells / f"fedavgm-{bits}-s1" / file) for bits in ("2-bits", "32-bits"))
            (layer,) = small.layers
            weights = torch.tensor(full.rest[layer.name])
            centers = init_centers(weights.flatten(), how="kmeans", levels=4)
            nearest = centers[(weights.flatten()[:, None] - centers).abs().argmin(1)].reshape(weights.shape)
            assert torch.equal(torch.tensor(layer.weights()), nearest)
            rest = {k: torch.tensor(v) for k, v in small.rest.items()}
            assert all(np.array_equal(v, full.rest[k]) for k, v in small.rest.items())
            x = torch.tensor(arrays["test_inputs"][part.test_rows])
            for name in ("1", "3", "5"):  # linear layers of the network
                weight = nearest if layer.name == f"{name}.weight" else rest[f"{name}.weight"]
                x = F.linear(x if name == "1" else torch.relu(x), weight, rest[f"{name}.bias"])
            assert float((x.argmax(1) == torch.tensor(arrays["test_targets"][part.test_rows])).double().mean()) == score
    assert told["lines"][:-1] == before["lines"][:-1]
    assert told["lines"][-1]["float_test"] == before["lines"][-1]["test"]
    assert told["files"] != before["files"]


def test_fedavg_quantized_afterwards_is_fedavg_with_that_quantizer(data, tmp_path):
    """A reduction: the steps are the same, so it makes no difference when the centers are placed."""
    text = f"""
    bits = 32
    rounds = 3
    batch = 10
    vectorize = "off"
    data = {{name = {str(data)!r}, standardize = "client"}}
    split = {{clients = 4, classes = 3}}
    model = {{name = "mlp", args = {{hidden = [12, 12]}}}}
    [methods.late]
    of = "whole"
    afterwards = "range"
    bits = [2, 3]
    [methods.whole]
    method = "fedavg"
    [methods.with]
    method = "fedavg"
    quantizer = {{name = "afterwards", init = "range"}}
    bits = [2, 3]
    """
    results = {r["label"]: r for r in run_experiment(config.parse(text, "test"), tmp_path / "run")}
    late, with_it = results["late"], results["with"]
    for key in ("test", "test_loss", "bits", "model_bytes", "clients"):
        assert late["lines"][-1][key] == with_it["lines"][-1][key]
    assert late["files"] == with_it["files"]
    assert late["fingerprint"] != results["whole"]["fingerprint"]


def test_only_full_precision_is_quantized_afterwards(data, tmp_path):
    text = f"data = {{name = {str(data)!r}}}\nmodel = {{name = 'mlp'}}\nsplit = {{clients = 4, classes = 3}}\n"
    text += '[methods.A]\nrecipe = "local"\nbits = 3\n[methods.B]\nof = "A"\nbits = 2'
    with pytest.raises(UserError, match=r"methods.B.of = 'A': its models are quantized; give it bits = 32"):
        run_experiment(config.parse(text, "test"), tmp_path / "run")


# --- runs that stop, go on and grow ---


def test_a_comparison_that_was_stopped_and_grew_is_the_same(run, board, data, tmp_path, capsys):
    c, out, looks = parse(data), tmp_path / "run", iter(range(100))
    run_comparison(c, out, only=["fedavgm", "seed 1"])
    with pytest.raises(UserError, match="already holds a comparison; add --resume"):
        run_comparison(c, out)
    with pytest.raises(Stopped):
        run_comparison(c, out, resume=True, how=How(should_stop=lambda: next(looks) > 22))
    done = len(list(out.rglob("result.json")))
    show_progress(c, out)
    told = re.findall(r"(\d+) of (\d+) cells done", capsys.readouterr().out)
    assert [int(cells) for _, cells in told] == [6, 15]
    assert sum(int(n) for n, _ in told) == done
    run_comparison(c, out, resume=True)
    assert done < len(list(out.rglob("result.json"))) == len(list(run.rglob("result.json")))
    assert timeless(json.loads((out / leaderboard.NUMBERS).read_text())) == timeless(board)
    with pytest.raises(UserError, match="other settings of the federation"):
        run_comparison(parse(data, FILE.replace("rounds = 4", "rounds = 5")), out, resume=True)
    with pytest.raises(UserError, match="other settings of 'qupel @ trial 1'"):
        run_comparison(parse(data, FILE.replace("warmup = 0.5", "warmup = 0.25")), out, resume=True)


# --- the numbers, and the page made of them ---


def test_a_cell_s_numbers_are_those_of_its_runs(run, board):
    cells = {(c["method"], c["bits"]): c for c in board["federations"]["drawn"]["cells"]}
    assert set(cells) == {("qupel", 32), ("qupel", 2), ("fedavgm", 32), ("fedavgm", 2), ("ditto", 32)}
    for (method, bits), cell in cells.items():
        results = [
            json.loads((run / f"drawn/cells/{method}-{bits}-bits-s{seed}/result.json").read_text()) for seed in range(3)
        ]
        scores = [100 * np.array(r["lines"][-1]["clients"]["test"]) for r in results]
        means = [s.mean() for s in scores]
        assert (cell["mean"], cell["std"]) == pytest.approx((np.mean(means), np.std(means, ddof=1)))
        assert cell["worst"] == pytest.approx(np.mean([s.min() for s in scores]))  # of three clients
        assert cell["unseen"] == pytest.approx(100 * np.mean([r["unseen"]["test"] for r in results]))
        assert cell["file_bytes"] == np.mean([r["files"] for r in results])
        size = 6 * 12 + 12 + 12 * 12 + 12 + 12 * 4 + 4
        assert cell["sent_bytes"] == 4 * size * 4  # rounds, for all of these methods
        ours = cells["qupel", bits]
        if method != "qupel":
            pairs = [[c["by_seed"][str(seed)] for seed in range(3)] for c in (ours, cell)]
            assert cell["gain"] == pytest.approx(ours["mean"] - cell["mean"])
            assert cell["p"] == pytest.approx(stats.ttest_rel(*pairs).pvalue)
        assert cell["command"].endswith(f"--only drawn --only {method} --only '{bits} bits'")


def made_board(gains: dict[str, tuple[float, float | None]]) -> dict:
    base = {"mean": 80.0, "bits": 2, "afterwards": None, "gain": None, "p": None}
    cells = [{**base, "method": "qupel"}]
    cells += [{**base, "method": m, "mean": 80 - g, "gain": g, "p": p} for m, (g, p) in gains.items()]
    return {"measure": {"name": "accuracy", "higher": True, "percent": True}, "cells": cells}


BY = "by {:.1f} points ({})"


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({"a": (1.0, 0.5)}, "No other method ends above qupel at 2 bits (80.0 %)."),
        (
            {"a": (-1.5, 0.01), "b": (-0.5, 0.3)},
            f"At 2 bits a ends above qupel {BY.format(1.5, 'p = 0.01')}, b {BY.format(0.5, 'not significant')}.",
        ),
        (
            {m: (-1.0 - k, None) for k, m in enumerate("abcde")},
            f"At 2 bits e ends above qupel {BY.format(5, 'not tested')}, d {BY.format(4, 'not tested')}, "
            f"c {BY.format(3, 'not tested')}, 2 more do.",
        ),
    ],
)
def test_a_sentence_says_where_another_method_wins(gains, said):
    assert leaderboard.sentence(made_board(gains), "qupel") == said


def test_the_overview_has_the_best_rival_at_every_width(board):
    head, rows = leaderboard.overview(board)
    assert head[:4] == ["federation", "bits", board["reference"], "the best other"]
    for title, federation in board["federations"].items():
        for bits in {c["bits"] for c in federation["cells"]}:
            here = [c for c in federation["cells"] if c["bits"] == bits]
            best = max((c for c in here if c["gain"] is not None), key=lambda c: c["mean"], default=None)
            if best is not None:
                row = next(r for r in rows if r[:2] == [title, leaderboard.shown_bits(bits)])
                assert row[3] == leaderboard.name(best)
    assert rows
    alone = copy.deepcopy(board)
    for federation in alone["federations"].values():
        federation |= {"cells": [c for c in federation["cells"] if c["gain"] is None], "said": ""}
    text = leaderboard.markdown(alone)  # nobody to compare with
    assert "the best other" not in text
    assert "****" not in text


def test_the_picture_has_the_reference_and_its_best_rivals(board, tmp_path):
    federation = board["federations"]["drawn"]
    told = [t for t in leaderboard.by_width(federation, board["reference"]) if t[1] is not None and t[2]]
    panel, legend, *_ = leaderboard_picture(board).axes
    assert (panel.get_title(), panel.get_xscale()) == ("drawn", "log")
    lines = [line.get_xydata().tolist() for line in panel.lines]
    for cells in ([t[1] for t in told], [t[2][0] for t in told]):
        assert [[leaderboard.shipped(c), c["mean"]] for c in cells] in lines
    dots = panel.collections[-1].get_offsets().tolist()
    assert dots == [[leaderboard.shipped(c), c["mean"]] for t in told for c in t[2][1:]]
    assert [text.get_text() for text in panel.texts] == [str(t[1]["bits"]) for t in told]
    assert len(legend.get_legend().get_texts()) == 3
    source = tmp_path / "board.json"
    source.write_text(json.dumps(board))
    command(source, tmp_path, picture=tmp_path / "board.svg")
    assert "<svg" in (tmp_path / "board.svg").read_text()
    with pytest.raises(UserError, match=r"board.gif: allowed are .png, .svg and .pdf"):
        command(source, tmp_path / "none", picture=tmp_path / "board.gif")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("rounds", "said"), [(0.5, "4 trials each of 50% of the rounds, on"), (1.0, "4 trials each, on")]
)
def test_the_page_says_how_long_trials_were(rounds, said):
    searched = {"trials": 4, "rounds": rounds, "validation": 0.25, "seed": 100}
    assert said in leaderboard.search_words({"search": searched})


class Cells(HTMLParser):
    """The values of a sortable table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if "data-value" in dict(attrs):
            self.rows[-1].append(dict(attrs)["data-value"])


def test_page_and_markdown_have_the_numbers_of_the_json(run, board, tmp_path):
    cells = board["federations"]["drawn"]["cells"]
    rows = [row for row in Cells((run / leaderboard.PAGE).read_text()).rows if row]
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        keys = ("bits", "mean", "worst", "unseen", "file_bytes", "sent_bytes", "seconds", "seeds", "gain", "low", "p")
        assert [float(v) if v else None for v in row[1:]] == [cell[key] for key in keys]
    text = (run / leaderboard.TEXT).read_text()
    for cell in cells:
        assert f"{cell['mean']:.1f} ± {cell['std']:.1f}" in text
    assert board["federations"]["drawn"]["said"] in text
    assert leaderboard.WORDS in text
    for path in leaderboard.publish(run / leaderboard.NUMBERS, tmp_path):  # from the numbers alone
        assert path.read_text() == (run / path.name).read_text()


@pytest.fixture(scope="module")
def window():
    if why := chromium.missing():
        pytest.skip(why)
    found = chromium.Browser()
    yield found
    found.close()


def test_columns_are_sorted_by_a_click(window, run, board):
    window.open(run / leaderboard.PAGE)
    column = (
        "return [...document.querySelectorAll('table.sortable tbody tr')].map(r => r.cells[arguments[0]].dataset.value)"
    )
    head = "return [...document.querySelectorAll('table.sortable thead th')].map(h => h.innerText.trim())"
    at = window.run(head).index("accuracy %")
    means = [c["mean"] for c in board["federations"]["drawn"]["cells"]]
    button = f"table.sortable thead th:nth-child({at + 1}) button"
    for descending in (True, False, True):
        window.click(button)
        assert [float(v) for v in window.run(column, at)] == sorted(means, reverse=descending)
    window.click("table.sortable thead th:nth-child(1) button")
    names = window.run(column, 0)
    assert names == sorted(names)
    gain = window.run(head).index("gain")
    window.click(f"table.sortable thead th:nth-child({gain + 1}) button")
    assert window.run(column, gain)[-2:] == ["", ""]  # what has none comes last
    dots = "return document.querySelectorAll('.chart circle.dot').length"
    rows = "return document.querySelectorAll('table.sortable tbody tr:not([hidden])').length"
    assert window.run(dots) == window.run(rows) == len(means)
    window.click(".switches button[data-kind='variant'][data-index='0']")  # full precision
    assert window.run(dots) == window.run(rows) == 2
    window.click(".switches button[data-kind='family'][data-index='0']")  # qupel
    assert window.run(dots) == window.run(rows) == 1
    assert window.requests() == [(run / leaderboard.PAGE).resolve().as_uri()]
    assert window.logs("browser") == []


@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_fits_a_phone(window, run, width):
    window.open(run / leaderboard.PAGE, width=width, height=844, dark=width == 390)
    assert window.run("return document.documentElement.scrollWidth") == width
