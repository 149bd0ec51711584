"""Codebooks: what is quantized, with how many bits, and what that costs."""

import pytest
import torch
from torch import nn

from qupel.core.codebook import Codebook, mean_bits, model_bytes, plan_bits, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import init_centers
from qupel.tasks.zoo import cnn5
from qupel.util.errors import UserError


@pytest.fixture
def layout():
    sizes = [(3, 4), (4, 5), (5, 6), (6, 2)]  # weights 12, 20, 30, 12; the middle two are quantized by default
    return Layout.of(nn.Sequential(*(nn.Linear(a, b) for a, b in sizes)))


def test_plan(layout):
    assert plan_bits(layout, 2) == {"1.weight": 4, "2.weight": 4}
    assert plan_bits(layout, 32) == {}
    assert plan_bits(layout, 3, ["3", "0.weight"]) == {"3.weight": 8, "0.weight": 8}
    assert plan_bits(layout, {"1": 1, "2": 32, "3.weight": 8}) == {"1.weight": 2, "3.weight": 256}
    assert plan_bits(layout, {}) == {}


@pytest.mark.parametrize("bits", [0, -1, 9, 16, 31, 33])
def test_bits_out_of_range(layout, bits):
    with pytest.raises(UserError, match=f"bits = {bits}.*1 to 8, and 32"):
        plan_bits(layout, bits)
    with pytest.raises(UserError, match=r"2\.weight"):
        plan_bits(layout, {"2": bits})


def test_a_plan_for_a_layer_that_is_not_there(layout):
    with pytest.raises(UserError, match="'9'"):
        plan_bits(layout, {"9": 2})


def test_start_places_the_centers_of_each_layer_on_that_layer(layout):
    torch.manual_seed(0)
    x = torch.randn(layout.size)
    for how in ("paper", "range", "kmeans", "quantile"):
        book = start_codebook(layout, x, plan_bits(layout, {"1": 1, "2": 2}), how)
        assert [len(c) for c in book.centers] == [2, 4]
        for slot, c in book:
            assert torch.equal(c, init_centers(x[slot.slice], how=how, levels=len(c)))


def test_hard_touches_quantized_layers_only(layout):
    torch.manual_seed(0)
    x = torch.randn(layout.size)
    before = x.clone()
    book = start_codebook(layout, x, plan_bits(layout, 2), "range")
    q = book.hard(x)
    assert torch.equal(x, before)
    free = book.free(layout.size).bool()
    assert free.sum() == layout.size - 50
    assert torch.equal(q[free], x[free])
    for slot, c in book:
        distances = (x[slot.slice, None] - c).abs()
        assert torch.equal(q[slot.slice], c[distances.argmin(1)])
        assert not free[slot.slice].any()
    assert torch.equal(book.hard(q), q)
    assert torch.equal(book.nearest(x, book.assign(x)).q, q)
    assert torch.equal(book.map(x, lambda v, c: v + c[0]), torch.where(free, x, book.map(x, lambda v, c: v + c[0])))


def test_no_codebook_is_full_precision(layout):
    x = torch.randn(layout.size)
    book = Codebook()
    assert not book
    assert torch.equal(book.hard(x), x)
    assert book.free(layout.size).all()
    assert mean_bits(book) == 32
    assert model_bytes(layout.size, book) == 4 * layout.size


def test_bytes_by_hand(layout):
    x = torch.randn(layout.size)
    book = start_codebook(layout, x, plan_bits(layout, {"1": 3, "2": 1}), "range")
    # 20 weights x 3 bits = 7.5 -> 8 bytes and 8 centers; 30 weights x 1 bit = 3.75 -> 4 bytes and 2 centers
    assert model_bytes(layout.size, book) == 8 + 4 * 8 + 4 + 4 * 2 + 4 * (layout.size - 50)
    assert mean_bits(book) == (20 * 3 + 30 * 1) / 50


def test_bytes_of_the_papers_cnn_at_two_bits():
    module = cnn5()
    layout = Layout.of(module)
    book = start_codebook(layout, layout.flatten(module), plan_bits(layout, 2), "range")
    assert model_bytes(layout.size, book) == 790_528 * 2 // 8 + 3 * 4 * 4 + 4 * (797_962 - 790_528)
