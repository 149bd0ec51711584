"""One table for all parts: every registered method x quantizer, server and codec on a tiny federation. Nothing here
names a part: a new file in `qupel.parts` is tested by being there. Every pair of them takes a round; the dearer tests
take each method with two quantizers or servers and each of these with two methods, and all the others where slow tests
run."""

import functools
import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from qupel.core.codebook import Codebook
from qupel.core.schedule import Schedule
from qupel.deploy.file import load, save
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.door import check_trainable
from qupel.engine.inline import Inline
from qupel.engine.rounds import Stopped, run
from qupel.engine.shard import Shard
from qupel.engine.store import DiskStore, MemoryStore
from qupel.engine.workers import Pool, Workers
from qupel.parts.base import Deployed
from qupel.parts.codecs import codecs
from qupel.parts.codecs.base import decode_rows, encode_rows
from qupel.parts.methods import methods
from qupel.parts.methods.base import any_network
from qupel.parts.phase import Phase
from qupel.parts.quantizers import quantizers
from qupel.parts.servers import servers
from qupel.tasks.judge import Judge
from qupel.util.errors import UserError
from tiny import blobs, make_job, mlp, run_inline, same, timeless, wide_mlp
from toy import cover

EVERY = list(itertools.product(methods, quantizers))
COVER = cover(list(methods), list(quantizers))
PAIRS = [pytest.param(*pair, marks=[] if pair in COVER else [pytest.mark.slow]) for pair in EVERY]
SERVED = cover(list(methods), list(servers))
SERVERS = [
    pytest.param(*pair, marks=[] if pair in SERVED else [pytest.mark.slow])
    for pair in itertools.product(methods, servers)
]
WIDTHS = (1, 2, 32)
OVERDONE = {("feddyn", "fedavgm")}  # both carry the past on, and together too far: the loss grows again


def has(cls, name):
    return name in {f.name for f in fields(cls)}


def compose(method, quantizer="prox", server="mean", rounds=3):
    """A quantized round at each client alone, so that every part begins with levels; then the parts in question."""
    cls = methods[method]
    given = {"quantizer": quantizers[quantizer]()} if has(cls, "quantizer") else {}
    warm = Phase(methods["local"](quantizer=quantizers["prox"]()), 1)
    return [warm, Phase(cls(eta1=Schedule(0.1), **given), rounds, servers[server]())]


def job_of(method, quantizer="prox", server="mean", **settings):
    return make_job(compose(method, quantizer, server), sizes=(12, 12, 12, 12), bits=WIDTHS, **settings)


def finish(job, engine, **options):
    """(finished, deployed models) of a run on an engine."""
    finished = run(job, engine, **options)
    return finished, [engine.deployed(job.rounds - 1, finished.w, i) for i in range(len(job.parts))]


def tensors(models):
    return [t for m in models for t in (m.x, *m.codebook.centers, *m.codebook.scales)]


@functools.cache
def undisturbed(method, quantizer, channels=False):
    """The run that others are held against, made once: one process, one by one, and a server that remembers."""
    job = replace(job_of(method, quantizer, "fedavgm", channels=channels), checkpoint_every=1)
    with Inline(job) as engine:
        return job, *finish(job, engine)


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as workers:
        yield workers


@pytest.mark.parametrize("method", methods)
def test_every_pair_takes_a_round(method):
    """In a stack of clients with 2 bits and one with 32."""
    for quantizer in quantizers:
        job = make_job(compose(method, quantizer, rounds=1), sizes=(8, 8, 8), bits=(2, 2, 32), stacked=True)
        finished, models = run_inline(job)
        assert np.isfinite(finished.lines[-1]["test_loss"]), quantizer
        assert finished.lines[-1]["refused"] == [], quantizer
        assert len(models) == 3


@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_it_learns(method, quantizer):
    phases = compose(method, quantizer, rounds=6)
    job = make_job(phases, sizes=(40, 40, 40), bits=WIDTHS, local_steps=8, batch=10, evaluate_every=100)
    finished, _ = run_inline(job)
    first, last = (line["test_loss"] for line in (finished.lines[0], finished.lines[-1]))
    assert np.isfinite(last)
    assert last < first


@pytest.mark.parametrize(("method", "server"), SERVERS)
def test_every_server_takes_every_method(method, server):
    """It ends better than it began; of the pairs in OVERDONE, a known limit, that was so at some time."""
    phases = compose(method, "none", server, rounds=6)
    job = make_job(phases, sizes=(40, 40, 40), bits=(32,), local_steps=8, batch=10, evaluate_every=2, stacked=True)
    finished, _ = run_inline(job)
    first, *losses = (line["test_loss"] for line in finished.lines)
    assert np.isfinite(losses).all()
    assert (min(losses) if (method, server) in OVERDONE else losses[-1]) < first


@pytest.mark.parametrize("method", methods)
def test_what_is_judged_is_what_is_deployed(method):
    """A planted vector: whatever else a state holds, it is what is scored, and what is shipped."""
    planted = torch.linspace(-1, 1, sum(p.numel() for p in mlp().parameters()))
    job = job_of(method)
    cls = type(
        "Planted", (type(job.phases[-1].method),), {"deployed": lambda self, state: Deployed(planted, Codebook())}
    )
    last = job.phases[-1]
    values = {f.name: getattr(last.method, f.name) for f in fields(last.method)}
    job = replace(job, phases=[job.phases[0], replace(last, method=cls(**values))])
    with Inline(job) as engine:
        finished = run(job, engine)
        for client, part in enumerate(job.parts):
            rows = torch.as_tensor(part.test_rows)
            data = job.data.test.inputs[rows], job.data.test.targets[rows]
            expected = Judge(mlp(), job.loss).score(planted, (), [data])
            assert finished.lines[-1]["clients"]["test"][client] == expected.accuracy
            assert torch.equal(engine.deployed(job.rounds - 1, finished.w, client).x, planted)


@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_a_stack_equals_the_loop(method, quantizer):
    job, finished, models = undisturbed(method, quantizer)
    with Inline(replace(job, stacked=True)) as engine:
        other, others = finish(job, engine)
    for a, b in zip((*finished.w, *tensors(models)), (*other.w, *tensors(others)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_two_workers_equal_one(pool, method, quantizer):
    job, finished, models = undisturbed(method, quantizer)
    other, others = finish(job, Workers(pool, job))
    assert same(tensors(models), tensors(others))
    assert same(finished.w, other.w)
    assert timeless(finished.lines) == timeless(other.lines)


@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_killed_and_resumed_equals_undisturbed(tmp_path, method, quantizer):
    """Stopped after every round in turn, each time begun again from the folder alone; every other pair on disk."""
    job, finished, models = undisturbed(method, quantizer)
    store = ("memory", "disk")[EVERY.index((method, quantizer)) % 2]
    for _ in range(job.rounds - 1):
        with Inline(job, store=store) as engine, pytest.raises(Stopped):
            run(job, engine, checkpoints=Checkpoints(tmp_path, "same"), should_stop=lambda: True)
    with Inline(job, store=store) as engine:
        again, others = finish(job, engine, checkpoints=Checkpoints(tmp_path, "same"))
    assert same(tensors(models), tensors(others))
    assert same(finished.w, again.w)
    assert timeless(finished.lines) == timeless(again.lines)


def kept(state):
    """The tensors of a state that do not come anew with every round."""
    found = []
    for value in (getattr(state, f.name) for f in fields(state) if not f.metadata.get("received")):
        if isinstance(value, Codebook):
            value = (*value.centers, *value.scales)
        found += [value] if isinstance(value, torch.Tensor) else value
    return found


@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_a_state_survives_store_and_checkpoint(tmp_path, method, quantizer):
    """After a step: from memory, from disk and from a snapshot comes what was put there, to the bit."""
    job, *_ = undisturbed(method, quantizer)
    shard, part = Shard(job, [1]), job.phases[1].method
    w = part.broadcast(shard.initial)
    batch = shard.steps.batch(1, 0, shard.steps.rows(1, 0)[0])
    state, _ = part.step(shard.state(1, 1, w), shard.problem(1), batch, job.clock(1, 0))
    stores = [MemoryStore(shard.forms), DiskStore(shard.forms, tmp_path), MemoryStore(shard.forms)]
    for store in stores[:2]:
        store.put(1, 1, state)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    stores[1].save(folder, "shard-0")
    stores[2].load(folder, [1])
    for store in stores:
        phase, found = store.get(1, w[0])
        assert phase == 1
        assert type(found) is type(state)
        assert same(kept(found), kept(state))


@pytest.mark.parametrize("method", methods)
def test_unequal_networks_are_accepted_or_refused_with_a_reason(method):
    job = make_job(compose(method)[1:], networks={"wide": wide_mlp()}, network=["", "wide", "", "wide"])
    if not any_network(job.phases[0].method):
        with pytest.raises(UserError, match=f"{method} ties .* client 1 has another network"):
            check_trainable(job)
        return
    check_trainable(job)
    finished, models = run_inline(job)
    assert len({len(m) for m in models}) > 1
    assert np.isfinite(finished.lines[-1]["test_loss"])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("method", "quantizer"), PAIRS)
def test_the_exported_file_gives_the_same_outputs(tmp_path, method, quantizer, channels):
    job, _, models = undisturbed(method, quantizer, channels)
    judge, inputs = Judge(job.module, job.loss), job.data.test.inputs
    for client, model in enumerate(models):
        module = judge.load(model.x, job.calibration(client))
        save(tmp_path / "model.safetensors", module, model.codebook)
        again = load(tmp_path / "model.safetensors").into(mlp(seed=5)).eval()
        with torch.no_grad():
            assert torch.equal(again(inputs), module(inputs)), client
    assert bool(models[0].codebook.scales) == (channels and bool(models[0].codebook))


@pytest.mark.parametrize("codec", codecs)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_codec_carries_rows(codec, rows):
    rng, part = np.random.default_rng(0), codecs[codec]()
    sent = tuple(torch.from_numpy(rng.normal(size=700).astype(np.float32)) for _ in range(rows))
    upload = tuple(w + 0.01 * torch.from_numpy(rng.normal(size=700).astype(np.float32)) for w in sent)
    payload, left = encode_rows(part, upload, sent, (), rng)
    assert len(payload) == rows * part.size(700)
    for got, row in zip(decode_rows(part, payload, sent), upload, strict=True):
        torch.testing.assert_close(got, row, rtol=0, atol=1e-3)
    for got, row, lost in zip(decode_rows(part, payload, sent), upload, left, strict=False):
        torch.testing.assert_close(got + lost, row, rtol=0, atol=1e-6)


def test_a_client_with_one_sample_takes_part():
    data = blobs((1, 12, 12))
    finished, _ = run_inline(make_job(compose("qupel"), data=data, bits=(2,)))
    assert np.isfinite(finished.lines[-1]["test_loss"])
