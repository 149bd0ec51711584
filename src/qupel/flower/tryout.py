"""A federation on one machine, on loopback: `qupel flower up` starts it, `down` ends exactly what `up` started.

DIR/up.json holds ports, and every process by id and start; it is written before anything else happens to a process, so
that `down` finds it whatever became of `up`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from qupel.flower import clean
from qupel.flower.control import Control, Node
from qupel.flower.folder import LOOPBACK, Federation, flower_environment, free_port
from qupel.flower.processes import PID_FILE, Process, end, start
from qupel.flower.trust import admit, warning
from qupel.util.errors import UserError
from qupel.util.files import write_json

SERVER = "superlink"
RETRY_SECONDS = 10.0  # a node that died uncleanly is let in again only after a while


@dataclass
class Running:
    """What runs of a federation on this machine."""

    federation: Federation
    port: int
    node_ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    @classmethod
    def of(cls, federation: Federation) -> Running | None:
        """What `up` noted, None if it is down."""
        path = federation.folder / "up.json"
        if not path.exists():
            return None
        noted = json.loads(path.read_text())
        processes = {name: Process(**p) for name, p in noted["processes"].items()}
        return cls(federation, noted["port"], noted["node_ports"], processes)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def control(self) -> Control:
        return Control(self.address, self.federation.authority)

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive()

    def note(self) -> None:
        processes = {name: asdict(p) for name, p in self.processes.items()}
        noted = {"port": self.port, "node_ports": self.node_ports, "processes": processes}
        write_json(self.federation.folder / "up.json", noted)

    def launch(self, name: str, command: Sequence[str], home: Path) -> None:
        binaries = Path(sys.executable).parent  # Flower starts its own parts by name
        path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        log = self.federation.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        environment = os.environ | flower_environment(home) | {"PATH": path}
        program = sys.executable if command[0] == "python" else str(binaries / command[0])
        command = [program, *command[1:]]
        self.processes[name] = start(name, command, log, environment)
        self.note()

    def launch_server(self) -> None:
        self.launch(SERVER, self.federation.superlink(self.port), self.federation.server / "home")

    def launch_node(self, number: int) -> None:
        name = f"client-{number}"
        port = self.node_ports.setdefault(name, free_port())
        command = self.federation.supernode(number, self.address, port)
        self.launch(name, command, self.federation.client(number) / "home")

    def workers(self) -> list[Process]:
        """The clients' resident workers, which their ClientApps have started."""
        paths = sorted(self.federation.folder.glob(f"clients/*/state/{PID_FILE}"))
        return [Process.noted(f"worker of {path.parent.parent.name}", path) for path in paths]


def up(
    federation: Federation, clients: int, seconds: float = 300.0, tell: Callable[[str], None] = lambda _: None
) -> list[Node]:
    """Start what does not run yet of the server and the first `clients` clients; who is connected at last."""
    if not 1 <= clients <= federation.clients:
        raise UserError(f"--clients {clients}: {federation.folder} was made for 1 to {federation.clients}")
    here = [number for number in range(clients) if f"client-{number}" not in federation.revoked()]
    if warned := warning(federation):
        tell(warned)
    clean.sweep([*clean.of_federation(federation.folder), *clean.of_machine()])
    running = Running.of(federation) or Running(federation, free_port())
    limit = time.monotonic() + seconds
    try:
        if not running.alive(SERVER):
            tell(f"SuperLink on {running.address}")
            running.launch_server()
        with running.control() as control:
            while not control.answers():
                _check(running, SERVER, limit, "the SuperLink")
            admit(federation, control)
            begun: dict[str, tuple[float, str]] = {}  # name -> when it was started, its last activation before that
            while True:
                nodes = {node.name: node for node in control.nodes()}
                missing = []
                for number in here:
                    name = f"client-{number}"
                    since, before = begun.get(name, (-RETRY_SECONDS, ""))
                    if not running.alive(name) and time.monotonic() - since >= RETRY_SECONDS:
                        tell(f"SuperNode of {name}")
                        begun[name] = time.monotonic(), nodes[name].activated
                        running.launch_node(number)
                        missing.append(name)
                    elif nodes[name].status != "online" or nodes[name].activated == before or not running.alive(name):
                        missing.append(name)  # Flower takes a while to see that a node is gone
                if not missing:
                    return list(nodes.values())
                _check(running, SERVER, limit, f"connecting {', '.join(missing)}")
    except KeyboardInterrupt:
        down(federation)
        raise


def _check(running: Running, name: str, limit: float, what: str) -> None:
    """Wait a little; give up when the process is gone or time is over."""
    if not running.alive(name) or time.monotonic() > limit:
        logs = running.federation.folder / "logs"
        raise UserError(f"{what}: it did not start in time; see {logs} and end what runs with `qupel flower down`")
    time.sleep(0.3)


def down(federation: Federation) -> list[str]:
    """End what `up` started and what that has started; the names of what was still alive."""
    running = Running.of(federation)
    if running is None:
        return []
    clients = [p for name, p in running.processes.items() if name != SERVER]
    server = [p for name, p in running.processes.items() if name == SERVER]
    ended = []
    for group in (clients, server, running.workers()):  # clients first: they say goodbye to a server that is there
        ended += [p.name for p in group if p.alive()]
        end(group)
    (federation.folder / "up.json").unlink()
    return ended
