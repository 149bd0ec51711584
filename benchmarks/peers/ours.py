"""The work on our own engine: two workers, one thread each, loop or stacks as the engine chooses.
python ours.py FOLDER OUT.json"""

import sys
from pathlib import Path

import numpy as np
import torch
from work import SEED, Prepared, now, tell

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.data import sources
from qupel.data.partition import Part
from qupel.engine.choice import settled
from qupel.engine.job import Job
from qupel.engine.rounds import enter, one_round
from qupel.engine.workers import Pool, Workers
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.prox import Prox


def job_of(prepared: Prepared) -> Job:
    work, module = prepared.work, prepared.module()
    inputs, targets = prepared.samples
    layout = Layout.of(module)
    if work.bits == 32:
        method, plan = FedAvg(eta1=Schedule(work.eta1)), Plan()
    else:
        quantizer = Prox(eta2=Schedule(work.eta2), lam=Schedule(work.lam), init="range")
        pull = Schedule(work.lambda_p)
        method = QuPeL(eta1=Schedule(work.eta1), lambda_p=pull, coupling=work.share, quantizer=quantizer)
        plan = plan_bits(layout, work.bits)
    return Job(
        module=module,
        loss=torch.nn.functional.cross_entropy,
        data=sources.from_arrays(inputs, targets, inputs[:1], targets[:1]),
        parts=[Part(rows, np.array([0])) for rows in np.load(prepared.folder / "owned.npy")],
        plans=[plan] * work.clients,
        phases=[Phase(method, work.rounds)],
        seed=SEED,
        local_steps=work.steps,
        batch=work.batch,
    )


def main() -> None:
    prepared = Prepared(Path(sys.argv[1]))
    job, choice = settled(job_of(prepared), "auto", None)
    print(choice)
    layout = Layout.of(job.module)
    shared = enter(job.phases[0], (layout.flatten(job.module),))
    with Pool(2) as pool:
        engine = Workers(pool, job)
        begun, ended = now(), []
        for k in range(prepared.work.rounds):
            shared, *_ = one_round(job, engine, k, shared)
            ended.append(now())
    layout.load(job.module, shared.w[0])
    tell(begun, ended, job.module)


if __name__ == "__main__":
    main()
