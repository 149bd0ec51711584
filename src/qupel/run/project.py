"""`qupel new DIR`: a small project of one's own, which runs at once. Every file is a start to write over."""

from pathlib import Path

from qupel.util.errors import UserError
from qupel.util.files import write_atomic

NETS = '''\
"""The network: any nn.Module that is built with the shape of one input, the number of classes and its settings."""

from torch import nn


class Net(nn.Sequential):
    """A 1-D CNN. Settings come from `args` in federation.toml; layers between the first and the last are quantized."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        super().__init__(
            nn.Conv1d(shape[0], width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(width, 2 * width, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(8 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, classes),
        )
'''

DATA = '''\
"""The data: a function without arguments that returns a data set. Here six people draw three waves, each in a way of
its own, made up so that sharing helps, which is evidence of nothing; read your files instead. Groups say whose a sample
is."""

import numpy as np

from qupel.data.sources import Dataset, from_arrays

PEOPLE, CLASSES, LENGTH = 6, 3, 32


def load() -> Dataset:
    rng = np.random.default_rng(0)
    train, test = (waves(rng, PEOPLE * count) for count in (15, 40))
    return from_arrays(*train[:2], *test[:2], train_groups=train[2], test_groups=test[2], classes=CLASSES)


def waves(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """inputs float32 (n, 2, LENGTH), targets (n,), people (n,)."""
    people, targets = np.arange(n) % PEOPLE, rng.integers(0, CLASSES, n)
    turn = (people * 0.2 + targets * 2.1)[:, None] + np.linspace(0, 6, LENGTH) * (1 + targets[:, None] / 4)
    inputs = np.stack([np.sin(turn), np.cos(turn * (1 + people[:, None] / 20))], 1)
    return (inputs + rng.normal(0, 1.3, inputs.shape)).astype(np.float32), targets, people
'''

METRICS = '''\
"""Metrics: functions of all outputs and targets of a client's test data."""

from torch import Tensor


def worst_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """The accuracy in the class that is recognized worst. outputs (n, classes), targets (n,)."""
    right = (outputs.argmax(1) == targets).double()
    return min(right[targets == label].mean() for label in targets.unique())
'''

CONFIG = """\
seeds = [0, 1]
bits = [2, 3, 32]               # of clients 0, 1, 2, and again from the first; 32: full precision
rounds = 20
local_steps = 5
[data]
name = "my_data:load"
[split]
kind = "groups"                 # a client for each person
[model]
name = "my_nets:Net"
args = {width = 16}
[task]
metrics = ["my_metrics:worst_class"]
[methods.QuPeL]
recipe = "qupel"
[methods.Local]
recipe = "local"
"""

TEST = '''\
"""python -m pytest"""

from pathlib import Path

import torch
from my_data import load
from my_metrics import worst_class
from my_nets import Net

from qupel.run import config, experiment

HERE = Path(__file__).parent


def test_the_network_takes_the_data():
    data = load()
    net = Net(tuple(data.train.inputs.shape[1:]), data.classes)
    assert net(data.train.inputs[:5]).shape == (5, data.classes)


def test_the_metric_is_that_of_the_worst_class():
    outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert worst_class(outputs, torch.tensor([0, 0, 1, 1])) == 0.5


def test_the_federation_learns(tmp_path):
    found = config.load(HERE / "federation.toml", ["seeds=[0]", "rounds=10"])
    for result in experiment.run_experiment(found, tmp_path / "run"):
        assert result["lines"][-1]["test"] > 0.5  # by chance a third
'''

README = """\
# A federation of one's own

| file | what |
|---|---|
| my_nets.py | the network |
| my_data.py | the data, and whose it is |
| my_metrics.py | a metric beside loss and accuracy |
| federation.toml | clients, bits, rounds, methods to compare |
| test_project.py | tests of all four |

```
python -m pytest                                  # a few seconds
qupel split federation.toml                       # who has what
qupel run federation.toml --out runs/first        # also --workers 2, --engine ranks
qupel report runs/first --open
qupel export runs/first --cell QuPeL-s0 --all --to onnx   # one file a client, for its device
```

## The same on Flower

As a try-out on one machine (`pip install 'qupel[flower]'`), a client for each person, with the bits of `qupel run`:

```
qupel flower init fleet --clients 6 --config federation.toml
qupel flower up fleet
qupel flower run fleet federation.toml --cell QuPeL-s0 --name first
qupel flower down fleet                           # also after a change of a module: clients keep what they have loaded
```

Every client's `client.toml` then has `allow = ["my_metrics", "my_nets"]`, and where these modules are. On machines of
their own, clients need the modules beside `client.toml`, and each owner says so there: a job that names any other is
declined before anything is imported. What a metric tells of a client's data is one number.
"""

FILES = {
    "my_nets.py": NETS,
    "my_data.py": DATA,
    "my_metrics.py": METRICS,
    "federation.toml": CONFIG,
    "test_project.py": TEST,
    "README.md": README,
    ".gitignore": "runs/\nfleet/\n__pycache__/\n",
}


def write_project(folder: Path) -> list[str]:
    """Write the files and return their names; a folder with anything in it is left as it is."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; give the name of a new one")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        write_atomic(folder / name, text)
    return list(FILES)
