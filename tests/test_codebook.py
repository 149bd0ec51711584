"""Codebooks: what is quantized, with how many bits, and what that costs."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qupel.core.codebook import (
    Codebook,
    Layer,
    Plan,
    channel_scales,
    mean_bits,
    model_bytes,
    plan_bits,
    start_codebook,
)
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


# --- scales: every output channel in its own units ---


@pytest.fixture
def network():
    """A convolution, whose weights lie channels_last in the vector, and a linear layer are quantized: 2 and 3 bits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 6), nn.Linear(6, 2)
        )  # fmt: skip


def scaled(network, how="range"):
    layout = Layout.of(network)
    x = layout.flatten(network)
    return layout, x, start_codebook(layout, x, plan_bits(layout, {"1": 2, "3": 3}, channels=True), how)


def test_a_plan_has_channels_or_not(layout):
    plain, channels = plan_bits(layout, 2), plan_bits(layout, 2, channels=True)
    assert (plain.channels, channels.channels) == (False, True)
    assert dict(plain) == dict(channels)
    assert plain.key != channels.key
    assert plan_bits(layout, 2).key == plain.key
    assert not plan_bits(layout, 32, channels=True).channels  # full precision has nothing to scale
    assert plan_bits(layout, 32, channels=True).key == Plan().key
    for again in (pickle.loads(pickle.dumps(channels)), copy.deepcopy(channels), copy.copy(channels)):
        assert again.key == channels.key
        assert isinstance(again, Plan)
    assert hash(channels.key) is not None


@pytest.mark.parametrize("how", ["paper", "range", "kmeans", "quantile"])
def test_scales_are_the_channels_means_and_centers_lie_on_scaled_weights(network, how):
    _, x, book = scaled(network, how)
    assert [s.shape for s in book.scales] == [(5,), (6,)]
    weights = [network[1].weight.detach(), network[3].weight.detach()]
    for layer, weight in zip(book.layers, weights, strict=True):
        each = torch.stack([channel.abs().mean() for channel in weight])  # o is the parameter's first index
        torch.testing.assert_close(layer.scale, each)
        units = weight / layer.scale.view(-1, *[1] * (weight.ndim - 1))
        torch.testing.assert_close(layer.of(x), layer.slot.flat(units))
        torch.testing.assert_close(layer.centers, init_centers(layer.of(x), how=how, levels=len(layer.centers)))


def test_q_by_channel_is_the_nearest_level_of_the_channel(network):
    """Brute force over s_o c_j, weight by weight, in float64."""
    layout, x, book = scaled(network)
    before, q = x.clone(), book.hard(x)
    assert torch.equal(x, before)
    weights = {"1.weight": network[1].weight.detach(), "3.weight": network[3].weight.detach()}
    for layer in book.layers:
        found, weight = layer.slot.view(q), weights[layer.slot.name]
        for o, channel in enumerate(weight):
            levels = (layer.scale[o] * layer.centers).double()  # (m,)
            distance = (channel.double().flatten()[:, None] - levels).abs()
            torch.testing.assert_close(
                found[o].double().flatten(), levels[distance.argmin(1)], rtol=1e-6, atol=1e-7
            )  # fmt: skip
            assert len(found[o].unique()) <= len(levels)
    free = book.free(layout.size).bool()
    assert torch.equal(q[free], x[free])
    assert not torch.equal(q, x)
    assert torch.equal(book.hard(q), q)
    near = book.nearest(x)
    assert torch.equal(near.q, q)
    assert torch.equal(book.pick(x, book.assign(x)), q)
    torch.testing.assert_close(book.map(x, lambda u, c: c[(u[:, None] - c).abs().argmin(1)]), q)


def test_scales_of_one_are_no_scales(network):
    """To the bit, in everything."""
    layout, x, book = scaled(network)
    plain = start_codebook(layout, x, plan_bits(layout, {"1": 2, "3": 3}), "range")
    ones = Codebook(plain.slots, plain.centers, tuple(torch.ones_like(s) for s in book.scales))
    assert torch.equal(plain.hard(x), ones.hard(x))
    assert all(torch.equal(a, b) for a, b in zip(plain.assign(x), ones.assign(x), strict=True))
    assert torch.equal(plain.map(x, lambda u, c: u + c[0]), ones.map(x, lambda u, c: u + c[0]))
    for a, b in zip(plain.layers, ones.layers, strict=True):
        assert torch.equal(a.of(x), b.of(x))
        assert torch.equal(a.pulled(x), b.pulled(x))
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        a.put_gradient(y, a.of(x))
        b.put_gradient(z, b.of(x))
        assert torch.equal(y, z)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 7), st.sampled_from([None, 1, 3]))
def test_a_layer_in_units_and_back(seed, channels, width, clients):
    """of and put, pulled and put_gradient are inverse; df/du is autograd's; nothing outside the layer is touched."""
    g = torch.Generator().manual_seed(seed)
    n = channels * width
    slot = Layout.of(nn.Sequential(nn.Linear(2, 1), nn.Linear(width, channels), nn.Linear(1, 1)))["1.weight"]
    shape = () if clients is None else (clients,)
    x = torch.randn(*shape, slot.stop + 4, generator=g, dtype=torch.float64)
    scale = torch.rand(*shape, channels, generator=g, dtype=torch.float64) + 0.1
    layer = Layer(slot, torch.zeros(*shape, 2).double(), scale)
    u = layer.of(x)
    assert u.shape == (*shape, n)
    wide = scale.repeat_interleave(width, -1)
    torch.testing.assert_close(u * wide, x[..., slot.slice])
    y = torch.full_like(x, 7.0)
    layer.put(y, u)
    torch.testing.assert_close(y[..., slot.slice], x[..., slot.slice])
    outside = torch.ones(x.shape[-1], dtype=torch.bool)
    outside[slot.slice] = False
    assert bool((y[..., outside] == 7).all())
    leaf = u.clone().requires_grad_()
    (torch.sin(leaf * wide)).sum().backward()  # f(x) = sum sin x at x = s u
    gradient = torch.zeros_like(x)
    gradient[..., slot.slice] = torch.cos(x[..., slot.slice])
    torch.testing.assert_close(layer.pulled(gradient), leaf.grad)
    back = torch.zeros_like(x)
    layer.put_gradient(back, layer.pulled(gradient))
    torch.testing.assert_close(back, gradient)


def test_a_stack_has_scales_of_each_client(network):
    layout, x, _ = scaled(network)
    g = torch.Generator().manual_seed(1)
    models = [x + 0.1 * torch.randn(layout.size, generator=g) for _ in range(3)]
    plan = plan_bits(layout, {"1": 2, "3": 3}, channels=True)
    books = [start_codebook(layout, v, plan, "kmeans") for v in models]
    stack = Codebook(
        books[0].slots,
        tuple(torch.stack(c) for c in zip(*(b.centers for b in books), strict=True)),
        tuple(torch.stack(s) for s in zip(*(b.scales for b in books), strict=True)),
    )
    each = torch.stack([b.hard(v) for b, v in zip(books, models, strict=True)])
    assert torch.equal(stack.hard(torch.stack(models)), each)


def test_a_channel_of_zeros_has_scale_one(network):
    layout, x, _ = scaled(network)
    slot = layout["3.weight"]
    slot.view(x)[2] = 0
    s = channel_scales(x[slot.slice], slot)
    assert s[2] == 1
    assert bool((s > 0).all())
    book = start_codebook(layout, x, plan_bits(layout, {"3": 2}, channels=True), "range")
    assert bool(torch.isfinite(book.hard(x)).all())


def test_scales_go_where_centers_go(network):
    _, _, book = scaled(network)
    assert book.with_centers(c + 1 for c in book.centers).scales is book.scales
    double = book.to(torch.float64)
    assert {t.dtype for t in (*double.centers, *double.scales)} == {torch.float64}
    assert [layer.scale is s for layer, s in zip(book.layers, book.scales, strict=True)] == [True, True]
    assert [layer.scale for layer in Codebook(book.slots, book.centers).layers] == [None, None]


def test_bytes_count_the_scales(network):
    layout, _, book = scaled(network)
    plain = Codebook(book.slots, book.centers)
    assert model_bytes(layout.size, book) == model_bytes(layout.size, plain) + 4 * (5 + 6)
    assert mean_bits(book) == mean_bits(plain)
