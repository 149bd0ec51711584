"""Optional zstd over a packed file, for transfer (RFC 8878, one frame that states its content size)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from qupel.deploy.header import FormatError
from qupel.util.errors import UserError

MAGIC = b"\x28\xb5\x2f\xfd"
LARGEST = 1 << 30  # bytes a compressed file may unfold to
_FREE, _RATIO = 16 << 20, 1000  # ... and no more than 1000 times its size once beyond 16 MiB
_WINDOW = 1 << 27


def _library() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise UserError("compressed files need the zstandard package: pip install 'qupel[zstd]'") from None
    return zstandard


def compress(content: bytes) -> bytes:
    return _library().ZstdCompressor(level=19).compress(content)


@contextmanager
def _broken() -> Iterator[ModuleType]:
    zstandard = _library()
    try:
        yield zstandard
    except zstandard.ZstdError as error:
        raise FormatError(f"a broken zstd file ({error})") from None


def content_size(content: bytes) -> int:
    """What the frame says it unfolds to; a frame that hides its size or states an absurd one is refused."""
    with _broken() as zstandard:
        size: int = zstandard.frame_content_size(content)
    if size < 0:
        raise FormatError("a zstd file that does not state its size")
    allowed = min(LARGEST, max(_FREE, _RATIO * len(content)))
    if size > allowed:
        raise FormatError(f"a zstd file of {len(content)} bytes that unfolds to {size}; allowed are {allowed}")
    return size


def beginning(content: bytes, size: int) -> bytes:
    """The first bytes of the content, without room for the rest of it."""
    with _broken() as zstandard, zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(content) as reader:
        start: bytes = reader.read(size)
    if len(start) < size:
        raise FormatError("a broken zstd file (cut short)")
    return start


def decompress(content: bytes) -> bytes:
    """The content of the frame, which has exactly `content_size` bytes."""
    with _broken() as zstandard:
        whole: bytes = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompress(content, allow_extra_data=False)
        return whole
