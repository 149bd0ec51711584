"""How an upload travels, one file a codec."""

from qupel.parts.codecs.base import Codec, codecs

__all__ = ["Codec", "codecs"]
