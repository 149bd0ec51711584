"""One file a method, each reads like its paper's listing. `Phase`s of methods make a run."""

from __future__ import annotations

from dataclasses import dataclass

from qupel.algorithms.base import Deployed, Method, State
from qupel.algorithms.binaryrelax import BinaryRelax
from qupel.algorithms.fedavg import FedAvg
from qupel.algorithms.finetune import FineTune
from qupel.algorithms.local import Local
from qupel.algorithms.posttraining import PostTraining
from qupel.algorithms.proxquant import ProxQuant
from qupel.algorithms.quantizer import Quantizer
from qupel.algorithms.qupel import QuPeL

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
