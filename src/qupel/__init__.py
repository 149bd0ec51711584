"""QuPeL: federated learning in which every client ends with its own model, small enough for its own device."""

from qupel.api import Client, Fit, fit
from qupel.errors import UserError
from qupel.recipes import Settings

__version__ = "0.1.0"
__all__ = ["Client", "Fit", "Settings", "UserError", "fit"]
