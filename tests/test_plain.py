"""Our engine against FedAvg and QuPeL as one writes them in plain PyTorch (benchmarks/peers/plain.py): parameters by
name, autograd's own .grad, argmin over distances, the median of all candidates. Nothing is shared but the data."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers"))
from ours import job_of
from plain import first_state, qupel_round, sgd_round
from work import Prepared, Work, prepare

from qupel.core.layout import Layout
from qupel.engine.inline import Inline
from qupel.engine.rounds import one_round
from tiny import beginning

ROUNDS = 3


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 32])
def test_rounds_are_those_of_plain_pytorch(tmp_path, bits, stacked):
    work = Work("mlp", clients=4, rounds=ROUNDS, steps=5, batch=6, samples=14, bits=bits, lam=0.5, eta2=1e-2)
    prepare(work, tmp_path, None)
    prepared = Prepared(tmp_path)
    job = replace(job_of(prepared), stacked=stacked)
    module = prepared.module()
    layout = Layout.of(module)
    shared, expected = beginning(job), layout.flatten(module)
    states = [first_state(module, bits) for _ in range(work.clients)] if bits < 32 else []
    with Inline(job) as engine:
        for r in range(ROUNDS):
            shared, *_ = one_round(job, engine, r, shared)
            uploads = []
            for client in range(work.clients):
                layout.load(module, expected)
                batches = prepared.batches(client, r)
                if bits == 32:
                    sgd_round(module, batches, work.eta1)
                else:
                    own = {name: p.detach().clone() for name, p in module.named_parameters()}
                    x, centers = states[client]
                    qupel_round(module, x, own, centers, batches, work)
                    module.load_state_dict(own)
                uploads.append(layout.flatten(module))
            expected = torch.stack(uploads).double().mean(0).float()
            torch.testing.assert_close(shared.w[0], expected, rtol=1e-4, atol=1e-6)
        for client, (x, centers) in enumerate(states):
            state = engine.shard.state(client, 0, shared.w)
            for slot in layout.slots:
                torch.testing.assert_close(slot.view(state.x), x[slot.name], rtol=1e-3, atol=1e-5)
            for slot, c in state.codebook:
                torch.testing.assert_close(c, centers[slot.name], rtol=1e-4, atol=1e-6)
