"""Losses by name. Any function (outputs, targets) -> mean loss over the batch works in their place."""

from __future__ import annotations

from torch.nn import functional as F

from qupel.tasks.task import Loss
from qupel.util.registry import Registry

losses: Registry[Loss] = Registry("loss")
losses.register("cross_entropy", about="class labels (n,), outputs (n, classes)")(F.cross_entropy)
losses.register("mse", about="mean squared error of numbers")(F.mse_loss)
losses.register("mae", about="mean absolute error of numbers")(F.l1_loss)
losses.register("huber", about="squared near 0, absolute beyond 1")(F.huber_loss)
losses.register("bce", about="several yes-or-no labels, 0 or 1; outputs are logits")(F.binary_cross_entropy_with_logits)
