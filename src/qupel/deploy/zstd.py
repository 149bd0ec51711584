"""Optional zstd over a packed file, for transfer (RFC 8878, one frame that states its content size)."""

from __future__ import annotations

from types import ModuleType

from qupel.deploy.header import FormatError
from qupel.util.errors import UserError

MAGIC = b"\x28\xb5\x2f\xfd"
LARGEST = 1 << 30  # bytes a compressed file may unfold to
_FREE, _RATIO = 16 << 20, 1000  # ... and no more than 1000 times its size once beyond 16 MiB


def _library() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise UserError("compressed files need the zstandard package: pip install 'qupel[zstd]'") from None
    return zstandard


def compress(content: bytes) -> bytes:
    return _library().ZstdCompressor(level=19).compress(content)


def decompress(content: bytes) -> bytes:
    """The content of the frame; refuses a frame that hides its size or unfolds to an absurd one before making room."""
    zstandard = _library()
    try:
        size = zstandard.frame_content_size(content)
        if size < 0:
            raise FormatError("a zstd file that does not state its size")
        allowed = min(LARGEST, max(_FREE, _RATIO * len(content)))
        if size > allowed:
            raise FormatError(f"a zstd file of {len(content)} bytes that unfolds to {size}; allowed are {allowed}")
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return reader.decompress(content, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"a broken zstd file ({error})") from None
