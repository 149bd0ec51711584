"""The SuperLink's control interface. It is what Flower's own command line calls; the one place that knows it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qupel.util.errors import UserError


@dataclass(frozen=True)
class Node:
    name: str
    status: str  # registered, online, offline
    activated: str  # when it last connected
    number: int  # Flower's


class Control:
    """Register clients, see who is connected, start and stop runs. Use as a context manager."""

    def __init__(self, address: str, authority: Path) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self.address = address
        self.client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()

    def answers(self) -> bool:
        """Whether the SuperLink is up."""
        import httpx

        try:
            self.nodes()
        except httpx.HTTPError:
            return False
        return True

    def check(self) -> None:
        if not self.answers():
            where = f"no SuperLink answers on {self.address}"
            raise UserError(f"{where}; start it with `qupel flower up` or server/start.sh, or give its --server")

    def nodes(self) -> list[Node]:
        from flwr.proto.control_pb2 import ListNodesRequest

        found = self.client.ListNodes(ListNodesRequest()).nodes_info
        nodes = (Node(n.name, n.status, n.last_activated_at, n.node_id) for n in found)
        return sorted(nodes, key=lambda n: n.name)

    def register(self, key: Path, name: str) -> None:
        """Let the client with this public key in, under this name."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        public = load_ssh_public_key(key.read_bytes())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise UserError(f"{key} is no ECDSA key; `qupel flower init` makes the right ones")
        self.client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name))

    def unregister(self, node: Node) -> None:
        """Refuse this node from now on; Flower never takes its key again."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.number))

    def start(self, app: Path, settings: dict[str, Any]) -> int:
        """Start the app of this bundle with these settings; the run's number."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = app.read_bytes()
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(settings))
        return int(self.client.StartRun(request).run_id)

    def status(self, run: int) -> str:
        """pending, starting, running, or finished with its reason."""
        from flwr.proto.control_pb2 import ListRunsRequest

        found = self.client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        status = found[run].status if run in found else None
        return f"{status.status} {status.sub_status} {status.details}".strip() if status else "unknown"

    def stop(self, run: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        self.client.StopRun(StopRunRequest(run_id=run))
