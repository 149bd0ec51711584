"""Quantized afterwards: the finished full-precision models of one cell as another cell's, at the size of its bits.

Nothing is trained. Centers are placed on every client's own model, BatchNorm's statistics are measured anew on what
came out, and it is judged and saved as every other model is.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qupel.core.codebook import Plan, start_codebook
from qupel.core.layout import Layout
from qupel.data.partition import Part
from qupel.deploy.file import load
from qupel.engine import scores
from qupel.engine.checkpoint import Since
from qupel.engine.inline import Inline
from qupel.engine.job import Job, standardized
from qupel.engine.rounds import metrics
from qupel.engine.shard import Judged
from qupel.parts.base import Deployed, State
from qupel.parts.methods.local import Local
from qupel.parts.phase import Phase
from qupel.parts.quantizers.frozen import Frozen
from qupel.report.runs import read_result
from qupel.run.adapt import Adapted
from qupel.run.config import Config
from qupel.run.folder import covered, result_file, write_models
from qupel.run.jobs import (
    Cell,
    build_job,
    build_plans,
    client_names,
    fingerprint,
    source_of,
    split_clients,
)
from qupel.run.networks import network_names

HERE = ("bits", "model_bytes", "dead_centers", "clients", "over_clients")  # of a line; and its scores


def quantize_cell(config: Config, cell: Cell, out: Path) -> dict[str, Any]:
    """The result of a cell that is another one's, quantized; its models are written beside it. Of the other's lines all
    stay but the last, which tells what ships now."""
    began = time.monotonic()
    source = source_of(config, cell)
    assert source is not None
    taken, folder = result_file(out, source).parent, result_file(out, cell).parent
    result, job = read_result(taken / "result.json"), build_job(config, cell)
    key = fingerprint(config, cell, job.phases)
    how = config.methods[cell.label].afterwards or "kmeans"
    job = replace(job, phases=[Phase(Local(quantizer=Frozen()), 1)])  # ships the nearest levels
    (folder / "models").mkdir(exist_ok=True)
    judged, models = _quantized(job, how, taken / "models", "client")
    line = metrics(job, 0, judged, Since(), 0, 0)
    told = {k: v for k, v in line.items() if k in HERE or k.startswith(("test", "validation", "float_test"))}
    last = {**result["lines"][-1], **told, "quantizer": "afterwards"}
    quantized = list(dict.fromkeys(name for plan in job.plans for name in plan))
    result |= {
        "label": cell.label,
        "fingerprint": key,
        "of": source.label,
        "method": json.loads(config.methods[cell.label].model_dump_json()),
        "quantized": quantized,
        "precision": "; ".join(dict.fromkeys(map(str, covered(job)))),
        "files": write_models(config, cell, job, models, last["clients"]["test"], folder / "models", "client"),
        "lines": [*result["lines"][:-1], scores.keep(folder, last)],
    }
    if "unseen" in result:
        result["unseen"] |= _unseen(config, cell, job, how, taken, folder, result["unseen"]["global"])
    spent = time.monotonic() - began
    result["lines"][-1]["seconds"] += spent
    return {**result, "seconds": result["seconds"] + spent}


def _quantized(job: Job, how: str, models: Path, prefix: str) -> tuple[list[Judged], list[Deployed]]:
    """The clients' models from their files, with levels placed by `how`; judged, and as they ship. A model that many
    share has its levels placed once."""
    modules, clients = copy.deepcopy(job.modules), range(len(job.parts))
    layouts = {name: Layout.of(module) for name, module in modules.items()}
    before: dict[object, State] = {}  # network and plan -> the last one
    with Inline(replace(job, diagnostics=None, stacked=False)) as engine:
        for client in clients:
            plan, name = job.plans[client], job.network_of(client)
            layout, packed = layouts[name], load(models / f"{prefix}-{client:03d}.safetensors")
            x = layout.flatten(packed.into(modules[name]))  # (d,)
            known = before.get((name, plan.key))
            if known is None or not torch.equal(known.x, x):
                known = before[name, plan.key] = State(x, x, start_codebook(layout, x, plan, how))
            engine.shard.store.put(client, 0, known)
        w = (torch.zeros(layouts[""].size),)  # nobody looks at it
        judged = sorted(engine.evaluate(0, w, clients), key=lambda j: j.client)
        return judged, [engine.deployed(0, w, client) for client in clients]


def _unseen(
    config: Config, cell: Cell, job: Job, how: str, taken: Path, folder: Path, plain: Sequence[float | None]
) -> dict[str, Any]:
    """The same for the models of clients that were kept out of training. plain: what the shared model says there."""
    began = time.monotonic()
    parts: Sequence[Part] = split_clients(config, job.data, cell.seed)[1]
    plans: Sequence[Plan] = build_plans(config, cell, job.modules, job.data, len(parts))
    names = client_names(config, job.data, parts) or [f"unseen {i}" for i in range(len(parts))]
    network = network_names(config, cell, len(parts)) if job.networks else ()
    job = replace(job, parts=parts, plans=plans, names=names, network=network, transforms=())
    job = standardized(job, "client") if config.data.standardize == "client" else job
    judged, models = _quantized(job, how, taken / "models", "unseen")
    told = Adapted(job, models, judged, [], {}, time.monotonic() - began).told() | {"global": list(plain)}
    return told | {"files": write_models(config, cell, job, models, told["test"], folder / "models", "unseen")}
