"""Models as files a device can use: packed containers, ONNX, Core ML."""

from qupel.deploy.about import About
from qupel.deploy.file import load, save
from qupel.deploy.header import FormatError
from qupel.deploy.packed import Packed

__all__ = ["About", "FormatError", "Packed", "load", "save"]
