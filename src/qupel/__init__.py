"""QuPeL: federated learning in which every client ends with its own model, small enough for its own device."""

__version__ = "0.1.0"
