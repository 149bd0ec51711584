"""Who is better alone: what a client's few held-back samples say, shrunk to what those of all clients say.

The gain of a client's own model is e, the mean over its samples of

    (loss of the shared model, tuned there - loss of its own) / the first loss of all,     each at most the first loss

A model that is wrong and sure of it loses without bound: no sample counts for more than all did at first. Few samples
say little of one client. With the clients' means m of e, m_2 of e^2 and s of e's variance, a client takes for its gain

    (t e + s m) / (t + s),     t = max(m_2 - m^2 - 2 s, 0), how much clients differ

(empirical Bayes; James and Stein, 1961): its own e where clients differ by clearly more than chance, which alone makes
m_2 - m^2 = s, else their mean. Of a dozen clients it is often half as large again: hence twice s.

Where both seem alike it goes alone, which is what it would be without the others: it stays where sharing is better by a
part of a client's standard error. With a handful of samples that error says little, and few samples are best shared:
then it leaves only where going alone is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from qupel.parts.base import Rows

MARGIN = 0.01  # what going alone must be worth: those who stay gain a little more in what is to come;
SURE = 0.2  # less so many of a client's standard errors: who is not sure goes
FEW = 5  # samples; with fewer that is
DOUBT = 0.1  # at least so many of them instead: who is not sure stays


def gain(shared: Sequence[float], own: Sequence[float], first: float) -> Tensor:
    """(e, e^2, the variance of e, 1, whether these are more than a few) of the losses on the samples held back, in
    float64 (5,)."""
    units = (torch.tensor(losses, dtype=torch.float64) / first for losses in (shared, own))
    together, apart = (losses.nan_to_num(nan=1.0).clamp(max=1.0) for losses in units)
    gains = together - apart  # (n,)
    e, one = gains.mean(), torch.ones((), dtype=torch.float64)
    variance = gains.var() / len(gains) if len(gains) > 1 else one
    return torch.stack((e, e**2, variance, one, one if len(gains) >= FEW else 0 * one))


def nothing(like: Tensor) -> Tensor:
    """The evidence of a client without such samples (..., 5), `like` being (..., 1)."""
    return torch.cat((torch.zeros_like(like),) * 5, -1)


def alone_by_itself(evidence: Tensor) -> Tensor:
    """1 where a client that nobody tells anything is better alone (..., 1): e is above its own standard error."""
    e, _, variance, _, _ = evidence.split(1, -1)
    return (e > variance.sqrt()).to(evidence)


def sent(evidence: Tensor, x: Tensor) -> Rows:
    """What goes with x (..., d): rows x and the evidence, which is all zeros of a client without such samples. Whether
    they are more than a few is for the client alone."""
    row = torch.zeros_like(x)
    row[..., :4] = evidence[..., : min(4, row.shape[-1])]
    return x, row


def choice(evidence: Tensor, told: Tensor, before: Tensor) -> Tensor:
    """1 where a client is better alone (..., 1), of its evidence (..., 5) and the clients' means of that, which begin a
    row (..., d); where nobody told, all zeros, it is what it was before."""
    e, _, _, known, enough = evidence.split(1, -1)
    *sums, share = pad(told[..., :4], (0, max(0, 4 - told.shape[-1]))).split(1, -1)
    m, m_2, s = (part / share for part in sums)  # the means over those who have such samples
    t = (m_2 - m**2 - 2 * s).clamp(min=0)
    shrunk = torch.where(known > 0, (t * e + s * m) / (t + s), m)
    margin = torch.where(enough > 0, MARGIN - SURE * s.sqrt(), (DOUBT * s.sqrt()).clamp(min=MARGIN))
    return torch.where((share > 0) & (s > 0), (shrunk > margin).to(before), before)
