"""The work on fluke: its clients run one after the other in one process, which gets both cores as threads.
python fluke_peer.py FOLDER OUT.json"""

import sys
from pathlib import Path

import torch

try:
    import torchvision  # noqa: F401  fluke asks for it
except RuntimeError:  # PyPI's is built for CUDA: with torch for CPUs its operators, unused here, are missing
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.server import Server
from fluke.utils import FederationObserver
from plain import first_state, loss_of, qupel_round
from work import Prepared, now, tell


class Given(Client):
    """fluke's own client on the given batches. Rounds are counted from 1, and `_last_round` is the one before."""

    def __init__(self, prepared: Prepared, index: int) -> None:
        optimizer = OptimizerConfigurator(DDict(name="SGD", lr=prepared.work.eta1))
        super().__init__(index, None, None, optimizer, loss_of, local_epochs=1)
        self.prepared = prepared

    def fit(self, override_local_epochs: int = 0) -> float:
        self.train_set = self.prepared.batches(self.index, self._last_round)
        return super().fit(override_local_epochs)


class QuPeLOnFluke(Given):
    """Algorithm 2: x and centers stay with the client, the model that is sent is w."""

    state = None

    def fit(self, override_local_epochs: int = 0) -> float:
        work, module = self.prepared.work, self.model
        w = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.state = self.state or first_state(module, work.bits)
        x, centers = self.state
        qupel_round(module, x, w, centers, self.prepared.batches(self.index, self._last_round), work)
        module.load_state_dict(w)
        return 0.0


class Times(FederationObserver):
    def __init__(self) -> None:
        self.begun, self.ended = 0.0, []

    def start_round(self, round: int, global_model: torch.nn.Module) -> None:
        self.begun = self.begun or now()

    def end_round(self, round: int) -> None:
        self.ended.append(now())


def main() -> None:
    torch.set_num_threads(2)
    prepared, times = Prepared(Path(sys.argv[1])), Times()
    FlukeENV().set_inmemory(True)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    kind = Given if prepared.work.bits == 32 else QuPeLOnFluke
    clients = [kind(prepared, index) for index in range(prepared.work.clients)]
    server = Server(prepared.module(), None, clients)
    algorithm = FedAVG(len(clients), None, None, clients, server)
    algorithm.set_callbacks(times)
    algorithm.run(prepared.work.rounds, 1.0)
    tell(times.begun, times.ended, server.model)


if __name__ == "__main__":
    main()
