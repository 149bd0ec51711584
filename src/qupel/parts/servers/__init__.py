"""How uploads become the next w, one file a server. Each works with every method."""

from qupel.parts.servers.base import Covering, Server, ServerState, Sum, add, covering, servers, sums

__all__ = ["Covering", "Server", "ServerState", "Sum", "add", "covering", "servers", "sums"]
