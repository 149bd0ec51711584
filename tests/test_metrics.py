"""Metrics against scikit-learn and by hand, for outputs of any shape; judging by them; what is said when one fails."""

import importlib
import json
import math
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torch import nn
from torch.nn import functional as F

import qupel
from qupel.core.layout import Layout
from qupel.engine import scores
from qupel.engine.fingerprint import of_job
from qupel.parts.methods.local import Local
from qupel.parts.phase import Phase
from qupel.run import config as configs
from qupel.tasks.judge import Judge, Score, value
from qupel.tasks.metrics import kind_of, metrics, numbers
from qupel.util.errors import UserError
from test_cli import qupel as command
from tiny import make_job, run_inline

assert command  # a fixture

G = torch.Generator().manual_seed(0)
OUTPUTS, LABELS = torch.randn(60, 4, generator=G).mul(2).round(), torch.randint(0, 4, (60,), generator=G)  # with ties
SMOOTH = torch.randn(60, 4, generator=G)  # without
SAID = OUTPUTS.argmax(1)
ASKED = (torch.rand(60, 4, generator=G) > 0.6).float()  # several yes or no questions
NUMBERS = torch.randn(60, 3, generator=G)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("accuracy", OUTPUTS, LABELS, oracle.accuracy_score(LABELS, SAID)),
        ("accuracy", OUTPUTS, ASKED, ((OUTPUTS > 0) == (ASKED > 0)).double().mean()),
        ("macro_f1", OUTPUTS, LABELS, oracle.f1_score(LABELS, SAID, average="macro")),
        ("macro_f1", OUTPUTS, ASKED, oracle.f1_score(ASKED, OUTPUTS > 0, average="macro")),
        ("top1", SMOOTH, LABELS, oracle.accuracy_score(LABELS, SMOOTH.argmax(1))),
        ("top4", OUTPUTS, LABELS, 1.0),
        ("top9", OUTPUTS, LABELS, 1.0),  # more than there are classes
        ("auroc", SMOOTH, LABELS, oracle.roc_auc_score(LABELS, SMOOTH.double().softmax(1), multi_class="ovr")),
        ("auroc", OUTPUTS, ASKED, oracle.roc_auc_score(ASKED, OUTPUTS)),
        ("auroc", OUTPUTS[:, 0], ASKED[:, 0], oracle.roc_auc_score(ASKED[:, 0], OUTPUTS[:, 0])),
        ("auroc", OUTPUTS[:, :1], ASKED[:, 0].long(), oracle.roc_auc_score(ASKED[:, 0], OUTPUTS[:, 0])),
        ("auroc", OUTPUTS[:, :2], LABELS % 2, oracle.roc_auc_score(LABELS % 2, OUTPUTS[:, 1] - OUTPUTS[:, 0])),
        ("auroc", OUTPUTS[:5], torch.full((5,), 2), math.nan),
        ("mae", NUMBERS, OUTPUTS[:, :3], oracle.mean_absolute_error(OUTPUTS[:, :3], NUMBERS)),
        ("rmse", NUMBERS, OUTPUTS[:, :3], math.sqrt(F.mse_loss(NUMBERS, OUTPUTS[:, :3]))),
        ("r2", NUMBERS, OUTPUTS[:, :3], oracle.r2_score(OUTPUTS[:, :3], NUMBERS, multioutput="variance_weighted")),
        ("r2", NUMBERS[:, :1], NUMBERS[:, 1], oracle.r2_score(NUMBERS[:, 1], NUMBERS[:, 0])),  # (n, 1) and (n,)
        ("r2", NUMBERS, torch.ones(60, 3), math.nan),
        ("perplexity", OUTPUTS, LABELS, math.exp(oracle.log_loss(LABELS, OUTPUTS.double().softmax(1)))),
    ],
)
def test_a_metric_is_what_scikit_learn_says(name, outputs, targets, expected):
    assert metrics[name](outputs, targets) == pytest.approx(float(expected), rel=1e-5, nan_ok=True)


def test_top_k_by_hand():
    outputs = torch.tensor([[3.0, 2, 1], [1.0, 2, 3], [2.0, 3, 1]])
    assert [metrics[f"top{k}"](outputs, torch.tensor([1, 0, 0])) for k in (1, 2, 3)] == [0, pytest.approx(2 / 3), 1]
    for name in ("top0", "top", "topk"):
        with pytest.raises(UserError, match="unknown metric"):
            metrics[name]


def test_classes_one_by_one():
    found = metrics["per_class_accuracy"](OUTPUTS, torch.where(LABELS == 2, 0, LABELS))
    assert found[2].isnan()
    named = numbers("per_class_accuracy", found)
    assert list(named) == [f"per_class_accuracy.{k}" for k in range(4)]
    recall = oracle.recall_score(LABELS, SAID, average=None)
    assert metrics["per_class_accuracy"](OUTPUTS, LABELS).tolist() == pytest.approx(recall.tolist())


@pytest.mark.parametrize("name", ["accuracy", "macro_f1", "top2", "auroc", "perplexity", "per_class_accuracy"])
def test_a_sequence_counts_as_its_positions(name):
    """(n, C, length) with labels (n, length) is as (n length, C); what cross entropy ignores, metrics do."""
    outputs, labels = torch.randn(5, 4, 6, generator=G), torch.randint(0, 4, (5, 6), generator=G)
    labels[0, 2:] = -100
    there = labels.flatten() != -100
    flat = outputs.movedim(1, -1).reshape(30, 4)[there], labels.flatten()[there]
    torch.testing.assert_close(metrics[name](outputs, labels), metrics[name](*flat))


def test_nothing_is_stretched():
    """(n, 3) and (n,) would broadcast to nonsense for n = 3."""
    for name in ("mae", "rmse", "r2", "auroc"):
        with pytest.raises(ValueError, match="not alike"):
            metrics[name](torch.zeros(3, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="class labels are needed"):
        metrics["top2"](OUTPUTS, ASKED)


def test_which_way_is_better():
    lower = {name for name, entry in metrics.all().items() if not kind_of(name, entry.part).higher}
    assert lower == {"mae", "rmse", "perplexity"}
    assert kind_of("top3", metrics["top3"]).percent
    assert kind_of("own", lambda y, t: 0).higher


# --- the judge ---


class Late:
    """Streamed: the mean of the targets, and how often it was updated since the last reset."""

    higher_is_better = False
    open: ClassVar[list] = []

    def __init__(self):
        self.seen = []
        Late.open.append(self)

    def update(self, outputs, targets):
        self.seen.append(targets.double().sum() / 10)

    def compute(self):
        return {"mean": sum(self.seen), "batches": len(self.seen)}

    def reset(self):
        self.seen = []


def judged(given, targets=None, module=None, loss=F.cross_entropy, inputs=None):
    module = module or nn.Linear(3, 4)
    targets = torch.arange(10) % 4 if targets is None else targets
    inputs = torch.randn(10, 3, generator=G) if inputs is None else inputs
    judge, x = Judge(module, loss, given), Layout.of(module).flatten(module)
    batches = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    return judge.score(x, [], batches, "client 7"), module(inputs).detach(), (judge, x, batches)


def test_streamed_metrics_start_anew_and_keep_no_outputs():
    given = {"late": Late, "own": Late(), "macro_f1": metrics["macro_f1"]}
    score, outputs, (judge, x, batches) = judged(given)
    again = judge.score(x, [], batches)
    assert again == score
    assert given["own"].seen == []  # the user's object is not touched
    assert score.more["late.batches"] == 2
    assert score.more["own.mean"] == pytest.approx(float((torch.arange(10) % 4).double().mean()))
    assert score.more["macro_f1"] == metrics["macro_f1"](outputs, torch.arange(10) % 4)


def test_accuracy_of_sequences():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4 * 5)

        def forward(self, x):
            return self.layer(x).unflatten(1, (4, 5))

    targets = torch.randint(0, 4, (10, 5), generator=G)
    targets[3] = -100
    score, outputs, _ = judged({}, targets, Sequence())
    assert score.accuracy == pytest.approx(metrics["accuracy"](outputs, targets))
    numbers_only, _, _ = judged({}, torch.randn(10, 4), loss=F.mse_loss)
    assert numbers_only.accuracy is None


def test_torchmetrics_objects_and_classes():
    torchmetrics = pytest.importorskip("torchmetrics")
    given = {
        "f1": torchmetrics.classification.MulticlassF1Score(4, average="macro"),
        "each": torchmetrics.classification.MulticlassAccuracy(4, average=None),
    }
    targets = torch.arange(10) % 4
    score, outputs, _ = judged(given, targets)
    assert score.more["f1"] == pytest.approx(metrics["macro_f1"](outputs, targets), abs=1e-6)
    recall = oracle.recall_score(targets, outputs.argmax(1), average=None, zero_division=0)
    assert [score.more[f"each.{k}"] for k in range(4)] == pytest.approx(recall.tolist(), abs=1e-6)
    regression = torch.randn(10, generator=G)
    one = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    found, said, _ = judged({"mse": torchmetrics.MeanSquaredError}, regression, one, F.mse_loss)
    assert found.more["mse"] == pytest.approx(float(F.mse_loss(said, regression)), rel=1e-5)
    assert not kind_of("mse", torchmetrics.MeanSquaredError).higher
    assert kind_of("f1", given["f1"]).higher

    def digest():
        return of_job(make_job([Phase(Local(), 1)], metrics={"f1": torchmetrics.classification.MulticlassF1Score(4)}))

    assert digest() == digest()


def test_torchmetrics_judges_one_client_at_a_time_on_ranks(tmp_path):
    """In a group of processes it would wait for the others' states at compute()."""
    torchmetrics = pytest.importorskip("torchmetrics")
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        given = torchmetrics.MetricCollection([torchmetrics.classification.MulticlassF1Score(4)])
        gathered = []
        for metric in given.values():
            metric.dist_sync_fn = lambda state, group: gathered.append(state) or [state]
        score, _, _ = judged({"some": given})
        assert list(score.more) == ["some.MulticlassF1Score"]
        assert gathered == []
    finally:
        distributed.destroy_process_group()


def test_every_failing_metric_is_one_line_that_names_it_and_the_client():
    def raises(outputs, targets):
        raise KeyError("lost\nmore")

    class Fails(Late):
        def update(self, outputs, targets):
            raise ValueError("not today")

    cases = [
        (raises, r"metric 'own', client 7: KeyError: 'lost\\nmore' \(outputs and targets \(10, 4\) and \(10,\)\)"),
        (Fails, r"metric 'own', client 7: ValueError: not today \(outputs and targets \(6, 4\) and \(6,\)\)"),
        (lambda y, t: "0.5", "metric 'own', client 7: a number is needed, not str '0.5'"),
        (lambda y, t: None, "metric 'own', client 7: a number is needed, not NoneType None"),
        (lambda y, t: y, r"metric 'own', client 7: a number is needed, not Tensor"),
        (lambda y, t: {"a": "b"}, "metric 'own', client 7: a number is needed, not dict"),
    ]
    for own, says in cases:
        with pytest.raises(UserError, match=f"^{says}") as caught:
            judged({"own": own})
        assert "\n" not in str(caught.value)


def test_a_model_that_diverged_has_no_score():
    module = nn.Linear(3, 4)
    with torch.no_grad():
        module.weight.fill_(math.nan)
    score, _, _ = judged({"own": lambda y, t: oracle.log_loss(t, y)}, module=module)
    assert math.isnan(score.more["own"])


def test_what_a_client_is_judged_by():
    score = Score(0.5, 0.75, 4, {"macro_f1": 0.6, "each.0": 1.0})
    assert [value(score, by) for by in ("", "accuracy", "loss", "macro_f1")] == [0.75, 0.75, 0.5, 0.6]
    assert value(Score(0.5, None, 4)) == 0.5
    with pytest.raises(UserError, match=r"judge_by = 'each': it gives several numbers.*each\.0"):
        value(score, "each")
    with pytest.raises(UserError, match="judge_by = 'accuracy': there are no class labels"):
        value(Score(0.5, None, 4), "accuracy")
    with pytest.raises(UserError, match="judge_by = 'f1' is none of the metrics; allowed: accuracy, loss, macro_f1"):
        make_job([Phase(Local(), 1)], metrics={"macro_f1": metrics["macro_f1"]}, judge_by="f1")
    with pytest.raises(UserError, match="a metric cannot be called 'bits'"):
        make_job([Phase(Local(), 1)], metrics={"bits": metrics["macro_f1"]})


# --- over clients ---


def test_over_clients_by_hand():
    clients = {"count": [1, 3, 0, 4], "test": [0.5, 1.0, None, 0.0], "mae": [2.0, 1.0, None, None]}
    kinds = {"test": kind_of("accuracy", metrics["accuracy"]), "mae": kind_of("mae", metrics["mae"])}
    found = scores.over_clients(clients, kinds)
    assert found["test"]["name"] == "accuracy"
    assert [found["test"][k] for k in ("mean", "weighted", "worst")] == pytest.approx([0.5, 3.5 / 8, 0.0])
    assert found["test"]["spread"] == pytest.approx(np.std([0.5, 1, 0]))
    assert [found["mae"][k] for k in ("mean", "weighted", "worst", "higher")] == [1.5, 1.25, 2.0, False]
    assert scores.over_clients({"count": [0], "test": [None]}, {"test": kinds["test"]}) == {}
    values = np.arange(20.0)
    assert (scores.worst(values), scores.worst(values, higher=False)) == (0.5, 18.5)


def test_a_line_tells_every_clients_metrics():
    job = make_job([Phase(Local(), 2)], bits=(2, 32))
    asked = make_job(
        [Phase(Local(), 2)], bits=(2, 32), judge_by="macro_f1",
        metrics={name: metrics[name] for name in ("macro_f1", "perplexity", "per_class_accuracy")},
    )  # fmt: skip
    plain, line = run_inline(job)[0].lines[-1], run_inline(asked)[0].lines[-1]
    more = [key for key in line["clients"] if key not in ("test", "bits", "bytes", "count")]
    told = {f"{split}_{key}" for split in ("test", "float_test") for key in more}
    assert set(line) - set(plain) == {"over_clients", *told}
    assert "over_clients" not in plain
    assert set(plain["clients"]) == {"test", "bits", "bytes"}
    clients = line["clients"]
    assert clients["test"] == clients["macro_f1"]
    assert line["test"] == line["test_macro_f1"] == pytest.approx(np.mean(clients["macro_f1"]))
    assert clients["count"] == [len(p.test_rows) for p in asked.parts]
    assert line["over_clients"]["test"]["name"] == "macro_f1"
    assert line["over_clients"]["per_class_accuracy.1"]["vector"] == "per_class_accuracy"
    assert not line["over_clients"]["perplexity"]["higher"]
    assert line["over_clients"]["perplexity"]["worst"] == max(clients["perplexity"])
    assert {**plain, "seconds": 0}["test_loss"] == line["test_loss"]  # nothing that is trained changes


def test_many_clients_keep_their_metrics_beside_the_line(tmp_path):
    job = make_job([Phase(Local(), 1)], sizes=(4,) * 201, metrics={"macro_f1": metrics["macro_f1"]})
    line = run_inline(job)[0].lines[-1]
    written = scores.keep(tmp_path, line)
    assert "clients" not in written
    assert written["over_clients"] == line["over_clients"]
    read = [dict(written)]
    scores.attach(tmp_path, read)
    assert read[0]["clients"] == line["clients"]


# --- from a config, and resumed after mending ---

CONFIG = """
rounds = 2
local_steps = 1
evaluate_every = 1
bits = 2
[data]
name = "digits"
limit = 200
[split]
kind = "iid"
clients = 3
[model]
name = "mlp"
[task]
metrics = ["top3", "frail:metric"]
judge_by = "macro_f1"
[methods.Local]
recipe = "local-prox"
warmup = 0.0
finetune = 0.0
"""
FRAIL = """
calls = 0
def metric(outputs, targets):
    global calls
    calls += 1
    if calls > {most}:
        raise RuntimeError("worn out")
    return float(targets.float().mean())
metric.higher_is_better = False
"""


def test_a_metric_that_fails_on_the_way_loses_nothing(command, tmp_path, monkeypatch):
    """One line and exit code 2; after mending the run goes on from its checkpoint."""
    (tmp_path / "own.toml").write_text(CONFIG)

    def run(*words, most):
        (tmp_path / "frail.py").write_text(FRAIL.format(most=most))
        monkeypatch.delitem(sys.modules, "frail", raising=False)
        importlib.invalidate_caches()
        return command("run", "own.toml", "--out", "r", "--workers", "1", *words)

    code, _, err = run(most=0)  # tried before the first step
    assert (code, err.count("\n")) == (2, 1)
    assert "metric 'frail:metric', client 0: RuntimeError: worn out" in err
    assert not (tmp_path / "r").exists()
    code, _, err = run(most=10)  # two tries at the door, 3 clients twice a round (before and after quantization)
    assert (code, err.count("\n")) == (2, 1)
    assert "metric 'frail:metric', client 1: RuntimeError: worn out" in err
    cell = tmp_path / "r/cells/Local-s0"
    assert [p.name for p in (cell / "checkpoints").glob("round-*")] == ["round-000001"]
    code, out, err = run("--resume", most=10**9)
    assert (code, err) == (0, "")
    result = json.loads((cell / "result.json").read_text())
    assert [line["round"] for line in result["lines"]] == [1, 2]
    assert max(map(len, out.splitlines())) <= 80
    assert "macro_f1" in out
    (row,) = json.loads((tmp_path / "r/summary.json").read_text())
    assert set(row["metrics"]) == {"top3", "frail:metric"}
    told = result["lines"][-1]["over_clients"]["top3"]
    assert row["metrics"]["top3"]["weighted"] == pytest.approx(100 * told["weighted"])


def test_settings_without_judge_by_are_those_of_before():
    plain = configs.parse('[methods.A]\nrecipe = "local"\n', "c").model_dump_json()
    assert "judge_by" not in plain
    with pytest.raises(UserError, match=r"task.judge_by: unknown metric 'macro'"):
        configs.parse('[task]\njudge_by = "macro"\n[methods.A]\nrecipe = "local"\n', "c")


def test_fit_judges_by_a_metric():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 20, 4)).astype(np.float32)
    clients = [(a[:12], a[:12].sum(1, keepdims=True), a[12:], a[12:].sum(1, keepdims=True)) for a in x]
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    found = qupel.fit(net, clients, rounds=2, bits=32, method="local", judge_by="mae", metrics=["r2"])
    line = found.metrics[-1]
    assert line["over_clients"]["test"] == line["over_clients"]["mae"]
    with torch.inference_mode():
        said = found.models[1](torch.from_numpy(clients[1][2]))
    assert found.test[1] == pytest.approx(float(np.abs(said.numpy() - clients[1][3]).mean()), rel=1e-5)
