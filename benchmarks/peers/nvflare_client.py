"""A client of `nvflare_peer.py`, which NVFlare may start anew for every round: its state waits in a file.
python nvflare_client.py FOLDER STATES"""

import sys
from pathlib import Path

import nvflare.client as flare
import torch
from plain import first_state, qupel_round, sgd_round
from safetensors.torch import load_file, save_file
from work import Prepared


def main(prepared: Prepared, states: Path) -> None:
    torch.set_num_threads(1)
    work, module = prepared.work, prepared.module()
    flare.init()
    client = int(flare.get_site_name().removeprefix("site-")) - 1
    file = states / f"{client}.safetensors"
    while flare.is_running():
        sent = flare.receive()
        if sent is None:
            return
        module.load_state_dict({name.removeprefix("inner."): torch.as_tensor(v) for name, v in sent.params.items()})
        batches = prepared.batches(client, sent.current_round)
        answer = {name: p.detach().clone() for name, p in module.named_parameters()}
        if work.bits == 32:
            sgd_round(module, batches, work.eta1)
            answer = module.state_dict()
        else:
            x, centers = first_state(module, work.bits)
            if sent.current_round:
                known = load_file(file)
                x, centers = (
                    {name: known[f"{kind}{name}"] for name in told} for kind, told in (("x ", x), ("c ", centers))
                )
            qupel_round(module, x, answer, centers, batches, work)
            save_file({f"x {k}": v for k, v in x.items()} | {f"c {k}": v for k, v in centers.items()}, file)
        flare.send(flare.FLModel(params={f"inner.{name}": v for name, v in answer.items()}))


if __name__ == "__main__":
    main(Prepared(Path(sys.argv[1])), Path(sys.argv[2]))
