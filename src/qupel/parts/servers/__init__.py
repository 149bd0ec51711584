"""How uploads become the next w, one file a server. Each works with every method."""

from qupel.parts.servers.base import Server, ServerState, Sum, add, servers

__all__ = ["Server", "ServerState", "Sum", "add", "servers"]
