"""Clients as the server knows them: how much data they have, and the scores that they tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from qupel.data.partition import Part
from qupel.data.samples import Arrays
from qupel.data.sources import Dataset
from qupel.engine.shard import Judged
from qupel.flower import boundary
from qupel.tasks.judge import Score


def judged_of(heard: boundary.PrivateScores, metrics: Sequence[str] = ()) -> Judged:
    """A client's scores as the loop of rounds takes them; a private client's are not there."""
    if not isinstance(heard, boundary.Scores):
        unsaid = Score(math.nan, None, 0)
        return Judged(heard.client, unsaid, unsaid, unsaid, None, None, None)
    test = score(heard.test, heard.test_loss, metrics, heard.test_metrics)
    test = replace(test, count=min(test.count, 1) * max(1, heard.tested))
    validation = score(heard.validation, heard.validation_loss, metrics, heard.validation_metrics)
    float_test = score(heard.float_test, heard.float_test_loss, metrics, heard.float_test_metrics)
    return Judged(heard.client, test, validation, float_test, heard.bytes, heard.bits, heard.dead)


def score(
    accuracy: float | None, loss: float | None, metrics: Sequence[str] = (), told: Sequence[float | None] = ()
) -> Score:
    """A score has a loss, or it is none: one client without must not make the mean of all NaN."""
    if loss is None:
        return Score(math.nan, None, 0)
    values = [math.nan if v is None else v for v in told] + [math.nan] * len(metrics)
    return Score(loss, accuracy, 1, dict(zip(metrics, values, strict=False)))


def stand_in(samples: int) -> Part:
    """A client's data as the server knows it: how much there is."""
    return Part(np.broadcast_to(np.int64(0), samples), np.empty(0, np.int64))  # no memory, whatever a client says


def nothing(shape: tuple[int, ...], classes: int) -> Dataset:
    """The clients' data as the server knows them."""
    none = Arrays(torch.empty(0, *shape), torch.empty(0, dtype=torch.int64))
    return Dataset("the clients' own", none, none, classes)
