"""The work on Flower's simulation engine: two Ray actors, one thread each.   python flower_peer.py FOLDER OUT.json"""

import os
import sys
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain import first_state, qupel_round, sgd_round
from work import Prepared, now, tell

client_app = ClientApp()
server_app = ServerApp()
_loaded: list[tuple] = []  # what stays in an actor between messages


def loaded() -> tuple[Prepared, torch.nn.Module]:
    if not _loaded:
        torch.set_num_threads(1)
        prepared = Prepared(Path(os.environ["QUPEL_BENCH_FOLDER"]))
        _loaded.append((prepared, prepared.module()))
    return _loaded[0]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    prepared, module = loaded()
    work = prepared.work
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
    batches = prepared.batches(client, round)
    if work.bits == 32:
        sgd_round(module, batches, work.eta1)
        answer = module.state_dict()
    else:
        answer = {name: p.detach().clone() for name, p in module.named_parameters()}
        if "x" in context.state:
            x, centers = (dict(context.state[key].to_torch_state_dict()) for key in ("x", "centers"))
        else:
            x, centers = first_state(module, work.bits)
        qupel_round(module, x, answer, centers, batches, work)
        context.state["x"], context.state["centers"] = ArrayRecord(x), ArrayRecord(centers)
    records = {"arrays": ArrayRecord(answer), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(records), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    prepared = Prepared(Path(os.environ["QUPEL_BENCH_FOLDER"]))
    times: list[float] = []

    def note(round: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(now())  # round 0 is the first model: the rounds begin
        return MetricRecord({})

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=prepared.work.clients)
    module = prepared.module()
    first = ArrayRecord(module.state_dict())
    config = ConfigRecord({})
    result = strategy.start(grid, first, prepared.work.rounds, train_config=config, evaluate_fn=note)
    module.load_state_dict(result.arrays.to_torch_state_dict())
    tell(times[0], times[1:], module)


if __name__ == "__main__":
    os.environ["QUPEL_BENCH_FOLDER"] = sys.argv[1]
    work = Prepared(Path(sys.argv[1])).work
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=resources)
