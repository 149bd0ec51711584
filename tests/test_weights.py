"""What metrics tell of weights and centers: by hand, at the right clients and rounds, and without touching anything."""

import json

import pytest
import torch

from qupel.core.codebook import Codebook, Plan, plan_bits
from qupel.core.layout import Layout
from qupel.engine.weights import BINS, histogram, shown_clients, told
from qupel.parts.base import Deployed
from tiny import local, make_job, mlp, recipe, run_inline

LAYER = "2.weight"  # of tiny.mlp


def test_the_histogram_counts_every_weight_once():
    x = torch.linspace(-1, 3, 1001)  # 4 / 1000 apart: five to a bin of 4 / 200
    q = torch.where(x < 1, -1.0, 3.0)
    found = histogram(x, q)
    assert (found["low"], found["high"]) == (-1, 3)
    assert len(found["counts"]) == BINS
    assert sum(found["counts"]) == 1001
    assert all(4 <= n <= 6 for n in found["counts"])
    assert found["on"] == pytest.approx(2 / 1001, rel=1e-4)  # the two ends


def test_a_layer_of_equal_weights_is_one_bin():
    found = histogram(torch.full((7,), 0.5), torch.full((7,), 0.5))
    assert found == {"low": 0.5, "high": 0.5, "on": 1.0, "counts": [7]}


def test_one_client_of_each_plan_is_shown():
    layout = Layout.of(mlp())
    plans = [plan_bits(layout, b) for b in (32, 2, 3, 2, 32, 3, 1)]
    assert shown_clients(plans) == {1, 2, 6}
    assert shown_clients([Plan({"a": k}) for k in range(1, 100)]) == set(range(6))  # not thousands
    assert shown_clients([Plan(), Plan()]) == set()


def test_told_reads_and_never_writes():
    layout = Layout.of(mlp())
    x = layout.flatten(mlp())
    codebook = Codebook((layout[LAYER],), (torch.tensor([-0.123456789, 0.2]),))
    model = Deployed(codebook.hard(x), codebook)
    before = x.clone(), model.x.clone()
    found = told(4, x, model, with_weights=True)
    assert torch.equal(x, before[0])
    assert torch.equal(model.x, before[1])
    assert (found["client"], found["bits"]) == (4, 1.0)
    assert found["centers"] == {LAYER: [-0.12346, 0.2]}  # five digits
    assert sum(found["histograms"][LAYER]["counts"]) == 64
    assert "histograms" not in told(4, x, model, with_weights=False)
    assert "histograms" not in told(4, model.x, model, with_weights=True)  # all on their centers: nothing to see
    assert told(4, x, Deployed(x, Codebook()), with_weights=True) is None
    wide = Codebook((layout[LAYER],), (torch.linspace(-1, 1, 32),))
    assert told(4, x, Deployed(wide.hard(x), wide), with_weights=True) is None


def test_a_run_tells_its_centers_and_once_its_weights():
    job = make_job(recipe(warmup=2, main=4, tuning=2), bits=(1, 2, 32), evaluate_every=1)
    finished, models = run_inline(job)
    by_round = {line["round"]: line.get("weights", []) for line in finished.lines}
    assert [r for r, told in by_round.items() if told] == [3, 4, 5, 6, 7, 8]  # FedAvg has no centers
    assert all([w["client"] for w in told] == [0, 1] for r, told in by_round.items() if r > 2)
    assert [r for r, told in by_round.items() if any("histograms" in w for w in told)] == [6]  # before fine-tuning
    for told_of, model in zip(by_round[8], models[:2], strict=True):
        centers = told_of["centers"][LAYER]
        assert centers == pytest.approx(model[-len(centers) :].tolist(), rel=1e-4)
    assert json.loads(json.dumps(finished.lines)) == finished.lines  # plain numbers


def test_full_precision_tells_nothing():
    finished, _ = run_inline(make_job(local(), bits=(32,)))
    assert all("weights" not in line for line in finished.lines)
