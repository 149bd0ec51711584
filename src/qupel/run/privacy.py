"""From the privacy section of a config to a job that sends with privacy, and to the ledger that counts it."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path

from qupel.engine.accounting import Budget, noise_for
from qupel.engine.job import Job
from qupel.engine.ledger import FILE as LEDGER
from qupel.engine.ledger import Ledger, planned
from qupel.parts.servers.private import Private
from qupel.run.config import Config
from qupel.run.sections import PrivacyConfig
from qupel.util.errors import UserError
from qupel.util.files import write_json


def with_privacy(job: Job, privacy: PrivacyConfig) -> Job:
    """A job whose phases send with privacy; where only a target is given, with the noise that it needs."""
    expected = job.participation * len(job.parts)
    try:
        covers = [Private(privacy.clip, privacy.noise or 1.0, privacy.kind, expected, p.server) for p in job.phases]
    except ValueError as e:
        raise UserError(f"privacy: {e}") from None
    budget = Budget(privacy.delta, privacy.target_epsilon)

    def made(noise: float) -> Job:
        phases = [replace(p, server=replace(c, noise=noise)) for p, c in zip(job.phases, covers, strict=True)]
        return replace(job, phases=phases, budget=budget)

    if privacy.noise is not None or not planned(made(1.0)):
        return made(privacy.noise or 1.0)
    assert privacy.target_epsilon is not None
    return made(noise_for(privacy.target_epsilon, privacy.delta, lambda noise: planned(made(noise))))


def open_ledger(config: Config, job: Job, folder: Path, run: str) -> Ledger | None:
    """The ledger of a private job: in its folder, or in a file of several runs, in which it has a name of its own."""
    if job.budget is None:
        return None
    shared = config.privacy.ledger if config.privacy else None
    if shared is None:
        return Ledger(folder / LEDGER, run, job)
    name = folder / "ledger-name.json"
    if not name.exists():
        write_json(name, f"{run}-{secrets.token_hex(8)}")
    return Ledger(shared, json.loads(name.read_text()), job)


def counted(config: Config, folder: Path) -> Config:
    """A private config whose ledger is the folder's, of all runs in it, unless it names another."""
    if config.privacy is None or config.privacy.ledger is not None:
        return config
    own = config.privacy.model_copy(update={"ledger": folder / "privacy.json"})
    return config.model_copy(update={"privacy": own})
