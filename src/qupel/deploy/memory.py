"""Resident memory of this process, in bytes. Exact on Linux; elsewhere the peak since the process began."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _field(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.M) if _STATUS.exists() else None
    return int(found[1]) * 1024 if found else None


def peak() -> int:
    """The most this process has had since `reset_peak`, or since it began."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _field("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def resident() -> int:
    """What it has now; where the system does not tell, its peak."""
    return _field("VmRSS") or peak()


def virtual() -> int | None:
    """Address space, where the system tells."""
    return _field("VmSize")


def reset_peak() -> None:
    """Begin anew with the peak, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
