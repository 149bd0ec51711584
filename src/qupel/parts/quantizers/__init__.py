"""How weights and levels meet, one file a quantizer. Each works inside every method."""

from qupel.parts.quantizers.base import Descent, Quantizer, quantizers

__all__ = ["Descent", "Quantizer", "quantizers"]
