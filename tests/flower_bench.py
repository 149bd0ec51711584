"""Federations for the tests of `qupel.flower`: real clients and the real server, with the post in one process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from qupel.flower.client import Client
from qupel.flower.post import Reply, body_for
from qupel.flower.server import Request, Terms
from qupel.flower.task import load_client
from qupel.run import config as configs

BITS = (1, 32, 3, 2, 2, 4)
SPLIT = """[split]
clients = {count}
train_per_client = 20
test_per_client = 12
"""


def config(count: int = 3, model: str = "mlp") -> str:
    """A federation of all three phases, with momentum, so that a state is x, centers and memory."""
    return f"""
rounds = 5
local_steps = 3
batch = 8
evaluate_every = 2
bits = {list(BITS[:count])}
[model]
name = "{model}"
{SPLIT.format(count=count)}
[methods.QuPeL]
recipe = "qupel-prox"
warmup = 0.4
finetune = 0.2
optimizer = "momentum"
init = "quantile"
"""


def clients(folder: Path, count: int = 3, more: str = "") -> list[Path]:
    """Config files of clients that share digits out, with bits of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"client-{i}.toml" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_text(f'client = {i}\nbits = {BITS[i]}\nstate = "state-{i}"\n{SPLIT.format(count=count)}{more}')
    return paths


def request(folder: Path, text: str = "", job: str = "job-1", **terms) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"clients": 3, "minimum": 3, "deadline": 5.0, "patience": 1.0} | terms
    described = configs.parse(text or config(), "test")
    Request(job=job, config=described, label="QuPeL", seed=0, terms=Terms(**settings)).write(folder)
    return folder


Twist = Callable[[int, dict, Reply], Sequence[Reply]]


class Direct:
    """Questions and answers without a network. `twist` may change, drop or repeat an answer; `gone` are offline."""

    def __init__(self, paths: Sequence[Path], twist: Twist | None = None) -> None:
        self.paths = list(paths)
        self.clients = [Client(load_client(path)) for path in paths]
        self.twist = twist or (lambda client, header, reply: [reply])
        self.gone: set[int] = set()
        self.headers: list[dict] = []
        self.asked: list[tuple[str, int | None, int]] = []

    def restart(self, client: int) -> None:
        """The client's worker dies; a new one has what is on disk."""
        self.clients[client] = Client(load_client(self.paths[client]))

    def present(self) -> list[int]:
        return [i for i in range(len(self.clients)) if i not in self.gone]

    def ask(self, header: dict, body, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        for i in reversed(clients):  # answers come in any order
            self.headers.append(header)
            self.asked.append((header["kind"], header.get("round"), i))
            yield from self.twist(i, header, Reply(i, *self.clients[i].answer(header, body_for(i, body))))


def models(folder: Path, job: str = "job-1", count: int = 3) -> list[bytes]:
    """What the clients exported, byte for byte."""
    return [(folder / f"state-{i}" / job / "model.safetensors").read_bytes() for i in range(count)]


def final_w(folder: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray((folder / "w.bin").read_bytes()), dtype=torch.float32)
