"""QuPeL: federated learning in which every client ends with its own model, small enough for its own device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qupel.api import Client, Fit, fit, load
    from qupel.errors import UserError
    from qupel.recipes import Settings

__version__ = "0.1.0"
__all__ = ["Client", "Fit", "Settings", "UserError", "fit", "load"]

_HOMES = {"Client": "api", "Fit": "api", "Settings": "recipes", "UserError": "errors", "fit": "api", "load": "api"}


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used: a process that only passes messages on never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qupel' has no attribute {name!r}")
    return getattr(import_module(f"qupel.{_HOMES[name]}"), name)
