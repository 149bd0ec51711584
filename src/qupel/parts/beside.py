"""A model that a client trains alone, beside the shared one, until it is known which is better."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from qupel.core.codebook import Codebook
from qupel.core.optim import Memory
from qupel.parts.base import Quantized, Rows, State


@dataclass(frozen=True, kw_only=True)
class HedgedState(State):
    """alone: 1 where the client goes its own way (..., 1). first: what w lost on the client's first batch (..., 1).
    evidence: what samples held back say of going alone (..., 5). v: until clients have chosen, the model trained alone,
    with its levels and `memory`, which is then that of x; the shared optimizer's is `shared_memory`."""

    alone: Tensor
    first: Tensor
    evidence: Tensor
    v: Rows = ()
    v_codebook: Codebook = field(default_factory=Codebook)
    shared_memory: Memory = ()

    @property
    def beside(self) -> Quantized:
        return self.v[0], self.v_codebook, self.memory

    def with_beside(self, v: Tensor, codebook: Codebook, memory: Memory) -> HedgedState:
        return replace(self, v=(v,), v_codebook=codebook, memory=memory)
