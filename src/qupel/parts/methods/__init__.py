"""One file a method, each reads like its paper's listing. `Phase`s of methods make a run."""

from __future__ import annotations

from dataclasses import dataclass

from qupel.parts.methods.base import Deployed, Method, State
from qupel.parts.methods.binaryrelax import BinaryRelax
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.finetune import FineTune
from qupel.parts.methods.local import Local
from qupel.parts.methods.posttraining import PostTraining
from qupel.parts.methods.proxquant import ProxQuant
from qupel.parts.methods.quantizer import Quantizer
from qupel.parts.methods.qupel import QuPeL

AnyMethod = QuPeL | Local | FedAvg | FineTune | ProxQuant | BinaryRelax | PostTraining


@dataclass(frozen=True)
class Phase:
    """A method and how many rounds it runs. The next phase's `start` converts the state."""

    method: AnyMethod
    rounds: int


__all__ = [
    "AnyMethod",
    "BinaryRelax",
    "Deployed",
    "FedAvg",
    "FineTune",
    "Local",
    "Method",
    "Phase",
    "PostTraining",
    "ProxQuant",
    "QuPeL",
    "Quantizer",
    "State",
]
