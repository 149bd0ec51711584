"""The work on NVFlare's simulator. Up to 20 clients have a process each, which stays (300 MB); of more, two at a time
are started for every round. The log tells when rounds begin.   python nvflare_peer.py FOLDER OUT.json"""

import re
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from work import Prepared, tell

TIME = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})"  # at the head of an entry, whose text is centered below a rule
STAY = 20
ENTRY = re.compile(TIME + r"[^\n]*\n[-=]+\n *(?:Round \d+ started|Finished FedAvg)\.")


class Net(torch.nn.Module):
    """The first model, as the server makes it: from a name and words."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.inner = Prepared(Path(folder)).module()


def times(log: str) -> list[float]:
    """When each round began, and when the last one ended."""
    found = (datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f") for text in ENTRY.findall(log))
    return [moment.timestamp() for moment in found]


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    work = Prepared(folder).work
    processes = work.clients if work.clients <= STAY else 2
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "states").mkdir()
        recipe = FedAvgRecipe(
            name="work",
            model={"class_path": "nvflare_peer.Net", "args": {"folder": str(folder)}},
            min_clients=work.clients,
            num_rounds=work.rounds,
            train_script=str(Path(__file__).with_name("nvflare_client.py")),
            train_args=f"{folder} {place}/states",
        )
        run = recipe.execute(SimEnv(num_clients=work.clients, num_threads=processes, workspace_root=place))
        begun, *ended = times((Path(run.get_result()) / "server" / "log.txt").read_text())
        net = Net(str(folder))
        (file,) = Path(place).rglob("FL_global_model.pt")
        told = torch.load(file, weights_only=True)
        net.load_state_dict(told.get("model", told))
        tell(begun, ended, net.inner)


if __name__ == "__main__":
    main()
