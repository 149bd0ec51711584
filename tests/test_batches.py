"""Addressed randomness, batches and the transform, each against an obviously correct slow version."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.data.batches import Transform, batch, chunks, generator, rows
from qupel.data.sources import Arrays, from_arrays, load
from qupel.util.errors import UserError


def images(n=7, channels=3, height=8, width=6, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, channels, height, width), dtype=np.uint8))


def test_generator_is_stable_over_versions():
    assert generator(0, "batches", 3, 17).integers(0, 1000, 4).tolist() == [306, 402, 447, 529]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=3), st.text(max_size=5))
@settings(max_examples=50, deadline=None)
def test_every_address_has_its_own_numbers(seed, address, purpose):
    def draw(*where):
        return tuple(generator(*where).integers(0, 2**63, 3).tolist())

    here = draw(seed, purpose, *address)
    assert draw(seed, purpose, *address) == here
    others = [(seed, purpose + "x", *address), (seed, purpose, *address, 0), ((seed + 1) % 2**64, purpose, *address)]
    others += [(seed, purpose, *address[:i], (a + 2**32) % 2**64, *address[i + 1 :]) for i, a in enumerate(address)]
    assert here not in {draw(*other) for other in others}


@pytest.mark.parametrize("number", [-1, 2**64])
def test_impossible_address(number):
    with pytest.raises(UserError, match=r"allowed are 0 to 2\^64 - 1"):
        generator(number, "batches")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_each_epoch_of_the_stream_covers_every_sample_once(count, size, epochs, client, seed):
    fits = min(size, count)
    steps = -(-epochs * count // fits)
    stream = [rows(seed, client, step, count, size) for step in range(steps)]
    assert all(part.dtype == np.int64 and len(part) == fits for part in stream)
    flat = np.concatenate(stream)
    for epoch in range(epochs):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_every_epoch_has_an_order_of_its_own():
    """40 samples in batches of 10: five epochs, five orders, and batches of other company."""
    epochs = [[rows(0, 1, 4 * epoch + k, 40, 10) for k in range(4)] for epoch in range(5)]
    assert len({np.concatenate(parts).tobytes() for parts in epochs}) == 5
    assert len({frozenset(part.tolist()) for parts in epochs for part in parts}) == 20


def test_rows_do_not_depend_on_the_order_of_calls():
    addresses = [(seed, client, step) for seed in range(2) for client in range(90) for step in (0, 3, 17)]
    forward = {a: rows(*a, 25, 10) for a in addresses}
    for a in reversed(addresses):
        assert (rows(*a, 25, 10) == forward[a]).all()
    assert (forward[0, 1, 0] != forward[0, 2, 0]).any()
    assert (forward[0, 1, 0] != forward[1, 1, 0]).any()
    assert (forward[0, 1, 0] != forward[0, 1, 3]).any()


def test_writing_into_a_batch_leaves_the_stream_alone():
    first = rows(0, 0, 0, 30, 10)
    kept = first.copy()
    first[:] = -1
    assert (rows(0, 0, 0, 30, 10) == kept).all()


@pytest.mark.parametrize(("step", "count", "size"), [(0, 0, 1), (0, 5, 0), (-1, 5, 1)])
def test_impossible_batch(step, count, size):
    with pytest.raises(UserError, match="allowed are at least 1, 1 and 0"):
        rows(0, 0, step, count, size)


def test_normalization():
    x, mean, std = images(), torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    out = Transform(mean, std).apply(x)
    expected = (x.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(Transform().apply(x), x.float() / 255)


def test_float_inputs_are_kept_and_never_aliased():
    x = torch.randn(4, 5)
    out = Transform().apply(x)
    assert torch.equal(out, x)
    out.zero_()
    assert x.abs().sum() > 0
    scaled = Transform(torch.arange(5.0), torch.full((5,), 2.0)).apply(x)
    torch.testing.assert_close(scaled, (x - torch.arange(5.0)) / 2)


@given(
    st.integers(1, 5), st.sampled_from([1, 3]), st.integers(1, 7), st.integers(1, 7), st.integers(0, 4), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_crop_and_flip_equal_a_loop_over_images(n, channels, height, width, pad, flip):
    x = images(n, channels, height, width)
    mean, std = torch.full((channels,), 0.4), torch.full((channels,), 0.2)
    out = Transform(mean, std, augment=True, pad=pad, flip=flip).apply(x, generator(0, "augment", 1, 2))

    rng = generator(0, "augment", 1, 2)
    tops, lefts = rng.integers(0, 2 * pad + 1, (2, n))
    mirrored = rng.random(n) < 0.5 if flip else [False] * n
    plain = Transform(mean, std).apply(x)
    for i in range(n):
        framed = torch.zeros(channels, height + 2 * pad, width + 2 * pad)
        framed[:, pad : pad + height, pad : pad + width] = plain[i]
        crop = framed[:, tops[i] : tops[i] + height, lefts[i] : lefts[i] + width]
        assert torch.equal(out[i], crop.flip(2) if mirrored[i] else crop)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_is_random_in_training_and_absent_in_evaluation():
    x = images(40)
    transform = Transform(augment=True)
    assert torch.equal(transform.apply(x), Transform().apply(x))
    first, second = (transform.apply(x, generator(0, "augment", 0, step)) for step in range(2))
    assert not torch.equal(first, second)
    still = Transform(augment=True, pad=0).apply(x, generator(0, "augment"))
    mirrored = (still == Transform().apply(x).flip(3)).flatten(1).all(1)
    kept = (still == Transform().apply(x)).flatten(1).all(1)
    assert (mirrored | kept).all()
    assert 8 < mirrored.sum() < 32


def test_transform_of_a_dataset():
    dataset = load("digits")
    transform = Transform.of(dataset, augment=True)
    assert (transform.mean, transform.flip, transform.augment) == (None, False, True)
    own = from_arrays(images(), torch.zeros(7, dtype=torch.int64), images(), torch.zeros(7, dtype=torch.int64))
    normal = Transform.of(own).apply(own.train.inputs)
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.square().mean((0, 2, 3)), torch.ones(3))


def test_augmenting_what_is_no_image():
    flat = from_arrays(np.zeros((4, 5)), np.zeros(4, int), np.zeros((4, 5)), np.zeros(4, int), name="flat")
    with pytest.raises(UserError, match=r"flat has inputs of shape \(5,\); only images"):
        Transform.of(flat, augment=True)
    with pytest.raises(UserError, match=r"inputs of shape \(5,\); only images"):
        Transform(augment=True).apply(flat.train.inputs, generator(0, "augment"))


def test_transform_refuses_half_a_normalization():
    with pytest.raises(UserError, match="give both or none"):
        Transform(mean=torch.zeros(3))
    with pytest.raises(UserError, match="pad -1: at least 0"):
        Transform(pad=-1)


def test_batch_and_chunks():
    arrays = Arrays(images(7), torch.arange(7))
    inputs, targets, _ = batch(arrays, np.array([5, 0, 5]), Transform())
    assert targets.tolist() == [5, 0, 5]
    assert torch.equal(inputs[0], Transform().apply(arrays.inputs[5:6])[0])
    parts = list(chunks(arrays, 3, Transform(augment=True)))
    assert [len(part[1]) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part[0] for part in parts]), Transform().apply(arrays.inputs))
    assert torch.cat([part[1] for part in parts]).tolist() == list(range(7))
    with pytest.raises(UserError, match="at least 1"):
        list(chunks(arrays, 0, Transform()))
