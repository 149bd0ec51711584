"""Plans for a budget: the predicted size is the real one, or bounds it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel import models
from qupel.codebook import start_codebook
from qupel.deploy import About
from qupel.deploy.budget import Planner, file_bytes, parse_size, plan_budget, relative_errors
from qupel.deploy.file import dumps, pack_model
from qupel.errors import UserError
from qupel.flat import Layout


def real_bytes(module, levels, about, rest="fp32"):
    layout = Layout.of(module)
    x = layout.flatten(module)
    codebook = start_codebook(layout, x, levels, "quantile")
    layout.load(module, codebook.hard(x))
    return len(dumps(pack_model(module, codebook, about, rest)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 256), min_size=4, max_size=4),
    st.sampled_from(["fp32", "fp16"]),
    st.text("abü", max_size=9),
)
def test_the_prediction_is_exact(counts, rest, client):
    torch.manual_seed(0)
    module = torch.nn.Sequential(models.mlp(9, (70, 7, 3), 3), torch.nn.BatchNorm1d(3))
    levels = {name: m for name, m in zip(Layout.of(module).weights, counts, strict=True) if m}
    about = About("", (9,), 3, client=client)
    assert file_bytes(module, levels, about, rest) == real_bytes(module, levels, about, rest)


@pytest.mark.parametrize("name", ["digits_cnn", "resnet20"])
def test_plans_fit_and_real_files_fit(name):
    torch.manual_seed(0)
    shape = (1, 8, 8) if name == "digits_cnn" else (3, 32, 32)
    module = models.build(name, shape, 10, seed=0)
    about = About(name, shape, 10, tuple("0123456789"), client="client-007", extra={"accuracy": 0.512})
    planner = Planner(module)
    smallest, before = planner.bytes(1), None
    for factor in (1, 1.1, 1.7, 2.9, 40):
        plan = planner.fit(int(smallest * factor))
        assert plan.uniform_bytes <= plan.budget
        assert plan.bytes <= plan.budget
        assert plan.error <= plan.uniform_error
        assert real_bytes(models.build(name, shape, 10, seed=0), plan.levels(), about) <= plan.bytes
        assert before is None or plan.error <= before.error
        before = plan
    assert plan.uniform == 32
    assert plan.levels() == {}
    with pytest.raises(UserError, match=rf"even 1 bit takes {smallest:,}; raise it, or quantize the first"):
        planner.fit(smallest - 1)


def test_sensitive_layers_get_more_bits():
    torch.manual_seed(0)
    module = models.mlp(16, (64, 64, 64), 4)
    first, second = Layout.of(module).default_layers()
    weights = dict(module.named_parameters())
    weights[first].data.sign_()  # two values: one bit is exact
    plan = plan_budget(module, Planner(module).bytes(2) + 64)
    assert plan.bits[first] == 1
    assert plan.bits[second] > 2
    assert plan.error < plan.uniform_error


def test_the_search_counts_the_bytes_of_codebooks():
    """One more bit costs 160 weights 20 bytes of codes and 8 of centers, 400 weights 50 and 8. The larger layer's error
    falls less for every byte of codes and more for every byte in all: it is widened, where there is room for one."""
    module = models.mlp(16, (10, 40), 2)
    small, large, _ = Layout.of(module).weights
    assert [module.get_parameter(name).numel() for name in (small, large)] == [160, 400]
    planner = Planner(module, layers=[small, large])
    fine = dict.fromkeys((2, 3, 4, 5, 6, 7, 8, 32), 0.0)
    planner.errors = {small: {1: 0.44, **fine}, large: {1: 1.0, **fine}}
    one_of_them = max(planner.bytes({small: 1, large: 2}), planner.bytes({small: 2, large: 1}))
    assert planner.bytes({small: 2, large: 2}) > one_of_them
    assert planner.fit(one_of_them).bits == {small: 1, large: 2}


def test_errors_fall_with_bits():
    errors = relative_errors(torch.randn(50, 50))
    values = [errors[b] for b in (1, 2, 3, 4, 5, 6, 7, 8, 32)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(0.363, abs=0.03)  # 1 - 2/pi: two levels for a Gaussian
    assert values[-1] == 0


def test_sizes():
    assert parse_size("96KiB") == 98_304
    assert parse_size(" 1.5 MB") == 1_500_000
    assert parse_size("70000") == 70_000
    for bad in ("", "KiB", "-3", "3 parsecs", "0", "1e5"):
        with pytest.raises(UserError, match="size"):
            parse_size(bad)
