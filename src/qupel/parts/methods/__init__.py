"""How a client's models are tied to the others', one file a method, each reads like its paper's listing."""

from qupel.parts.methods.base import Method, methods

__all__ = ["Method", "methods"]
