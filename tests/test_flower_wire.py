"""Uploads on the wire: what is exact, what is unbiased, what is kept for the next time, what noise is added."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.algorithms import Phase
from qupel.errors import UserError
from qupel.flower.task import Task
from qupel.flower.wire import BLOCK, decode, encode, noise_deviation, privatize, wire_bytes
from qupel.recipes import RECIPES, Budget, Settings

CODECS = ("fp32", "fp16", "int8")


def vectors(size: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=g)
    return w, w + 0.01 * torch.randn(size, generator=g)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3000])
def test_size_and_error(codec, size):
    w, upload = vectors(size)
    payload, _ = encode(codec, upload, w, None, np.random.default_rng(0))
    assert len(payload) == wire_bytes(codec, size)
    back = decode(codec, payload, w)
    step = (upload - w).abs().max() / 127 if codec == "int8" else 2**-11 * (upload - w).abs().max()
    assert float((back - upload).abs().max()) <= (0 if codec == "fp32" else float(step) * 1.01 + 1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=300))
def test_fp32_carries_every_bit(values):
    upload = torch.tensor(values, dtype=torch.float32)
    payload, left = encode("fp32", upload, torch.zeros(len(values)), None, np.random.default_rng(0))
    assert left is None
    back = decode("fp32", payload, torch.zeros(len(values)))
    assert back.numpy().tobytes() == upload.numpy().tobytes()


def test_rounding_to_8_bits_is_unbiased():
    """The mean of many encodings of one vector is the vector, within five standard errors at every coordinate."""
    w, upload = vectors(2 * BLOCK)
    rng, n = np.random.default_rng(1), 4000
    total = sum(decode("int8", encode("int8", upload, w, None, rng)[0], w).double() - w.double() for _ in range(n))
    difference = (upload - w).double()
    scale = difference.reshape(2, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / 127
    error = (total / n - difference).abs()
    assert float((error / scale).max()) < 5 * 0.5 / math.sqrt(n)


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600), st.integers(0, 2**32))
def test_codes_of_any_difference_are_within_a_step(values, seed):
    v = torch.tensor(values, dtype=torch.float32)
    zero = torch.zeros(len(v))
    payload, left = encode("int8", v, zero, None, np.random.default_rng(seed))
    blocks = torch.nn.functional.pad(v, (0, -len(v) % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.abs().amax(1).repeat_interleave(BLOCK)[: len(v)] / 127
    assert bool((left.abs() <= scale * 1.0001 + 1e-44).all())
    assert torch.equal(left, v - decode("int8", payload, zero))


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_error_feedback(codec):
    """What was sent in all plus what is left is what should have been sent in all: nothing is ever lost."""
    w, residual, rng = torch.zeros(700), None, np.random.default_rng(0)
    wanted, sent = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for seed in range(50):
        _, upload = vectors(700, seed)
        payload, residual = encode(codec, upload, w, residual, rng)
        wanted += upload.double()
        sent += decode(codec, payload, w).double()
    assert float((sent + residual.double() - wanted).abs().max()) < 1e-4
    assert float(residual.abs().max()) < 0.1


def test_what_is_beyond_float16_stays_for_later():
    upload = torch.tensor([1e6, -1e6, 1.0])
    payload, left = encode("fp16", upload, torch.zeros(3), None, np.random.default_rng(0))
    assert torch.equal(decode("fp16", payload, torch.zeros(3)) + left, upload)


@pytest.mark.parametrize("codec", CODECS)
def test_a_wrong_length_is_refused(codec):
    w, upload = vectors(100)
    payload, _ = encode(codec, upload, w, None, np.random.default_rng(0))
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(UserError, match="upload has"):
            decode(codec, wrong, w)


@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_of_the_right_length_decode(codec):
    """Numbers or not: no warning, no error; what is not finite is screened afterwards."""
    rng = np.random.default_rng(0)
    w = torch.zeros(300)
    for fill in (None, b"\xff", b"\x7f\x80", b"\0\0\x80\x7f"):
        size = wire_bytes(codec, 300)
        payload = rng.bytes(size) if fill is None else (fill * size)[:size]
        assert decode(codec, payload, w).shape == (300,)


# --- local differential privacy ---


def test_privacy_clips_and_adds_the_noise_it_says():
    """Clipping as Flower's own mod does it; the noise has the mechanism's deviation and no bias."""
    from flwr.supercore.differential_privacy import compute_clip_model_update

    w, upload = vectors(5000)
    upload = w + 100 * (upload - w)
    theirs = [upload.numpy().copy()]
    compute_clip_model_update(theirs, [w.numpy()], 1.5)
    quiet = privatize(upload, w, 1.5, 0.0, np.random.default_rng(0))
    assert torch.allclose(quiet, torch.from_numpy(theirs[0]), atol=1e-6)
    assert float((quiet - w).norm()) == pytest.approx(1.5, rel=1e-4)
    inside = w + (upload - w) / 1e4
    assert torch.allclose(privatize(inside, w, 1.5, 0.0, np.random.default_rng(0)), inside, atol=1e-7)
    deviation = noise_deviation(0.5, 1e-5, 3.0)
    assert deviation == pytest.approx(3.0 * math.sqrt(2 * math.log(1.25e5)) / 0.5)
    noise = privatize(upload, w, 1.5, deviation, np.random.default_rng(1)) - quiet
    assert float(noise.std()) == pytest.approx(deviation, rel=0.05)
    assert abs(float(noise.mean())) < 4 * deviation / math.sqrt(5000)


# --- the task ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_survives_the_wire(recipe):
    """Phases arrive as they were sent, to the last bit of every number."""
    known = {k: v for k, v in RECIPES[recipe].defaults.items() if k in Settings.model_fields}
    phases = RECIPES[recipe].phases(Settings(**known), Budget(30, 10, 7))
    described = {
        "job": "a", "label": "l", "seed": 0, "model": "mlp", "shape": [4], "classes": 2, "clients": 1,
        "phases": [{"rounds": p.rounds, "method": asdict(p.method)} for p in phases],
        "local_steps": 1, "batch": 1, "epoch_steps": 1,
    }  # fmt: skip
    sent = Task.model_validate_json(json.dumps(described))
    came = Task.model_validate_json(json.dumps(json.loads(sent.model_dump_json())))
    assert [Phase(p.method, p.rounds) for p in came.phases] == phases


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 200])
def test_a_job_cannot_name_another_folder(name):
    with pytest.raises(ValueError, match="job"):
        Task(job=name, label="l", seed=0, model="mlp", shape=(4,), classes=2, clients=1, phases=(), local_steps=1,
             batch=1, epoch_steps=1)  # fmt: skip
