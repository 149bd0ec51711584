"""Uploads as bytes: what is exact, what is unbiased, what is kept for the next time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.parts.codecs import codecs
from qupel.parts.codecs.base import decode_rows, encode_rows
from qupel.parts.codecs.fixed import Fixed
from qupel.parts.codecs.fp16 import Float16
from qupel.parts.codecs.fp32 import Float32
from qupel.parts.codecs.int8 import BLOCK, Int8
from qupel.util.errors import UserError
from toy import every, name

all_codecs = pytest.mark.parametrize("codec", every(codecs), ids=name)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def vectors(size: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=g)
    return w, w + 0.01 * torch.randn(size, generator=g)


# --- every codec ---


@all_codecs
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3000])
def test_size(codec, size):
    w, upload = vectors(size)
    payload, left = codec.encode(upload, w, None, rng())
    assert len(payload) == codec.size(size)
    back = codec.decode(payload, w)
    assert (back.shape, back.dtype) == (upload.shape, upload.dtype)
    assert left is None or left.shape == upload.shape


@all_codecs
def test_a_wrong_length_is_refused(codec):
    w, upload = vectors(100)
    payload, _ = encode_rows(codec, (upload,), (w,), (), rng())
    for wrong in (payload[:-1], payload + b"\0", b"", payload * 2):
        with pytest.raises(UserError, match=f"upload has {len(wrong)} bytes; 1 x 100 numbers take {codec.size(100)}"):
            decode_rows(codec, wrong, (w,))


@all_codecs
def test_rows_travel_one_after_the_other(codec):
    """Several rows are what each of them alone is, with the same random numbers; so are their residuals."""
    pairs = [vectors(300, seed) for seed in range(3)]
    sent, rows = tuple(w for w, _ in pairs), tuple(u for _, u in pairs)
    residuals: tuple = ()
    one_by_one: list = [None] * 3
    together, alone = rng(), rng()
    for _ in range(2):  # the second time with what the first one left
        payload, residuals = encode_rows(codec, rows, sent, residuals, together)
        each = [codec.encode(u, w, left, alone) for u, w, left in zip(rows, sent, one_by_one, strict=True)]
        one_by_one = [left for _, left in each]
        assert payload == b"".join(p for p, _ in each)
        kept = [left for left in one_by_one if left is not None]
        assert all(torch.equal(a, b) for a, b in zip(residuals, kept, strict=True))
        found = decode_rows(codec, payload, sent)
        expected = [codec.decode(p, w) for (p, _), w in zip(each, sent, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@all_codecs
def test_encoding_writes_into_nothing(codec):
    w, upload = vectors(700)
    left = 0.001 * vectors(700, 1)[0]
    copies = [t.clone() for t in (w, upload, left)]
    payload, _ = codec.encode(upload, w, left, rng())
    codec.decode(payload, w).add_(1)  # nor is what comes back tied to what went out
    assert all(torch.equal(a, b) for a, b in zip((w, upload, left), copies, strict=True))


# --- what is lost ---


@pytest.mark.parametrize(("codec", "step"), [(Float32(), 0.0), (Float16(), 2**-11), (Int8(), 1 / 127)], ids=str)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3000])
def test_error(codec, step, size):
    w, upload = vectors(size)
    payload, left = codec.encode(upload, w, None, rng())
    back = codec.decode(payload, w)
    most = step * float((upload - w).abs().max())
    assert float((back - upload).abs().max()) <= (most * 1.01 + 1e-6 if step else 0)
    if left is not None:
        torch.testing.assert_close(back + left, upload, rtol=0, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=300))
def test_fp32_carries_every_bit(values):
    upload = torch.tensor(values, dtype=torch.float32)
    zeros = torch.zeros(len(values))
    payload, left = Float32().encode(upload, zeros, None, rng())
    assert left is None
    assert Float32().decode(payload, zeros).numpy().tobytes() == upload.numpy().tobytes()


def test_fp32_of_a_row_of_a_stack():
    """A view with strides, as engines have them."""
    column = torch.arange(12.0).view(4, 3)[:, 1]
    payload, _ = Float32().encode(column, torch.zeros(4), None, rng())
    assert torch.equal(Float32().decode(payload, torch.zeros(4)), column)


def test_rounding_to_8_bits_is_unbiased():
    """The mean of many encodings of one vector is the vector, within five standard errors at every coordinate."""
    w, upload = vectors(2 * BLOCK)
    codec, draws, n = Int8(), rng(1), 4000
    total = sum(codec.decode(codec.encode(upload, w, None, draws)[0], w).double() - w.double() for _ in range(n))
    difference = (upload - w).double()
    scale = difference.reshape(2, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / 127
    error = (total / n - difference).abs()
    assert float((error / scale).max()) < 5 * 0.5 / math.sqrt(n)


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600), st.integers(0, 2**32))
def test_codes_of_any_difference_are_within_a_step(values, seed):
    v = torch.tensor(values, dtype=torch.float32)
    zero = torch.zeros(len(v))
    payload, left = Int8().encode(v, zero, None, rng(seed))
    blocks = torch.nn.functional.pad(v, (0, -len(v) % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.abs().amax(1).repeat_interleave(BLOCK)[: len(v)] / 127
    assert bool((left.abs() <= scale * 1.0001 + 1e-44).all())
    assert torch.equal(left, v - Int8().decode(payload, zero))


@pytest.mark.parametrize("codec", [Float16(), Int8(), Fixed(5.0), Fixed(5.0, 32)], ids=str)
def test_error_feedback(codec):
    """What was sent in all plus what is left is what should have been sent in all: nothing is ever lost."""
    w, residual, draws = torch.zeros(700), None, rng()
    wanted, sent = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for seed in range(50):
        _, upload = vectors(700, seed)
        payload, residual = codec.encode(upload, w, residual, draws)
        wanted += upload.double()
        sent += codec.decode(payload, w).double()
    assert float((sent + residual.double() - wanted).abs().max()) < 1e-4
    assert float(residual.abs().max()) < 0.1


@pytest.mark.parametrize("bits", [16, 32])
def test_fixed_point(bits):
    """One public step: codes are within it, unbiased, and add up exactly; what is beyond the clip stays for later."""
    codec, v, zero = Fixed(0.5, bits), torch.tensor([0.1, -0.3, 0.5, -0.5, 0.0, 3.0, -7.0]), torch.zeros(7)
    made = [codec.encode(v, zero, None, rng(seed)) for seed in range(2000 if bits == 16 else 20)]
    assert len(made[0][0]) == codec.size(7) == 7 * bits // 8
    codes = np.stack([codec.integers(payload) for payload, _ in made])  # (n, 7)
    assert codes.max() == codec.most == 2 ** (bits - 1) - 1
    assert codes.min() == -codec.most
    exact = v.double().clamp(-0.5, 0.5).numpy() / codec.step
    assert np.abs(codes - exact).max() < 1 + 1e-6
    assert np.abs(codes.mean(0) - exact).max() < 5 * 0.5 / math.sqrt(len(made))
    assert codes[:, 4].any() == 0  # nothing stays nothing
    payload, left = made[0]
    assert torch.allclose(codec.decode(payload, zero) + left, v)
    assert left[5:].tolist() == pytest.approx([2.5, -6.5])


@pytest.mark.parametrize("wrong", [{"clip": 0.0}, {"clip": math.nan}, {"bits": 8}])
def test_fixed_point_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Fixed(**wrong)


def test_what_is_beyond_float16_stays_for_later():
    upload = torch.tensor([1e6, -1e6, 1.0])
    payload, left = Float16().encode(upload, torch.zeros(3), None, rng())
    assert torch.equal(Float16().decode(payload, torch.zeros(3)) + left, upload)
    assert left[:2].abs().min() > 9e5


def test_bytes_a_number():
    assert [codec.size(100_000) / 100_000 for codec in (Float32(), Float16())] == [4, 2]
    assert Int8().size(100_000) / 100_000 == pytest.approx(1.02, abs=0.005)
