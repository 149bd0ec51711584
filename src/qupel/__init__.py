"""QuPeL: federated learning in which every client ends with its own model, small enough for its own device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qupel.data.clients import Client
    from qupel.run.api import adapt, fit, load
    from qupel.run.fit import Fit
    from qupel.run.settings import Settings
    from qupel.util.errors import UserError

__version__ = "0.2.0"
__all__ = ["Client", "Fit", "Settings", "UserError", "adapt", "fit", "load"]

_HOMES = {
    "Client": "data.clients",
    "Fit": "run.fit",
    "Settings": "run.recipes",
    "UserError": "util.errors",
    "adapt": "run.api",
    "fit": "run.api",
    "load": "run.api",
}


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used: a process that only passes messages on never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qupel' has no attribute {name!r}")
    return getattr(import_module(f"qupel.{_HOMES[name]}"), name)
