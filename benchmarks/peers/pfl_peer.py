"""The work on pfl: two processes of torch.distributed, one thread each.   python pfl_peer.py FOLDER OUT.json"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from plain import first_state, loss_of, qupel_round
from work import Prepared, now, tell


class Net(torch.nn.Module):
    """A module as pfl wants it: with its loss and its metrics."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(self.inner(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(inputs, targets)) * len(inputs), len(inputs))}


class QuPeLOnPfl(FederatedAveraging):
    """Algorithm 2: x and centers stay in the process that simulates the user; the change of w is what it sends."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        self.prepared = prepared
        self.states: dict[int, tuple] = {}

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        module, work = model.pytorch_model.inner, self.prepared.work
        round, client = divmod(int(user_dataset.user_id), work.clients)
        w = {name: p.detach().clone() for name, p in module.named_parameters()}
        if client not in self.states:
            self.states[client] = first_state(module, work.bits)
        x, centers = self.states[client]
        qupel_round(module, x, w, centers, self.prepared.batches(client, round), work)
        module.load_state_dict(w)
        return model.get_model_difference(initial_model_state), Metrics()


class Times(TrainingProcessCallback):
    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_train_begin(self, *, model):
        self.begun = now()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ended.append(now())
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    prepared = Prepared(Path(sys.argv[1]))
    work, net = prepared.work, Net(prepared.module())
    order = itertools.count()  # round after round, all clients in turn

    def dataset(user: int) -> PyTorchTensorDataset:
        round, client = divmod(user, work.clients)
        inputs, targets = prepared.samples
        index = torch.from_numpy(prepared.rows[round, client].reshape(-1).copy())
        return PyTorchTensorDataset((inputs.index_select(0, index), targets.index_select(0, index)), user_id=str(user))

    data = FederatedDataset(dataset, lambda: next(order))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    algorithm = FederatedAveraging() if work.bits == 32 else QuPeLOnPfl(prepared)
    times = Times()
    algorithm.run(
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        algorithm_params=NNAlgorithmParams(work.rounds, 10**9, work.clients, None),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.eta1, local_batch_size=work.batch
        ),
        callbacks=[times],
    )
    if os.environ.get("RANK", "0") == "0":
        tell(times.begun, times.ended, net.inner)
    if torch.distributed.is_initialized():  # else one process may find the other gone, and abort
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([*launch, __file__, *sys.argv[1:]]).returncode)
