"""Post-training quantization, the honest floor: train at full precision, place the centers at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, nearest_levels, quantizers
from qupel.tasks.task import Batch, Task


@quantizers.register("afterwards")
@dataclass(frozen=True)
class Afterwards:
    """Steps on f alone; what ships is Q_c(x) with c placed on the trained layer.

    init: `range` (nearest point of the min-max grid), `kmeans`, `aciq` (an even grid that clips where a Laplace
    distribution asks for it: Banner, Nahshan, Soudry, NeurIPS 2019), ...
    """

    init: Literal["range", "kmeans", "quantile", "paper", "aciq"] = "kmeans"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, start_codebook(layout, before.x, plan, self.init)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        return descend_at(x, task, batch)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        pairs = ((layer.of(x), len(layer.centers)) for layer in codebook.layers)
        return nearest_levels(x, codebook.with_centers(init_centers(u, how=self.init, levels=m) for u, m in pairs))
