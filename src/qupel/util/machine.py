"""What a number was measured on: cores, device, package versions, the commit of this code; and how memory is kept."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from qupel.util.errors import UserError


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What a number was measured on, and the code that measured it."""
    head = {"python": platform.python_version(), "cpus": available_cpus(), "processor": platform.machine()}
    return {**head, **versions(), "commit": commit()}


def versions() -> dict[str, str]:
    """Of the packages that a run's bits depend on."""
    return {name: version(name) for name in ("qupel", "torch", "numpy")}


def commit() -> str | None:
    """The git commit of this package, with -dirty where files differ from it; None where it is not from git."""
    here = Path(__file__)
    told = []
    for question in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run(["git", *question], cwd=here.parent, capture_output=True, text=True)
        except OSError:
            return None
        if done.returncode:
            return None
        told.append(done.stdout.strip())
    return told[-1]


def check_device(name: str) -> torch.device:
    """The device of this name; one line where this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r}: allowed are cpu, cuda and cuda:N") from None
    if device.type not in {"cpu", "cuda"}:
        raise UserError(f"device {name!r}: allowed are cpu, cuda and cuda:N")
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise UserError(f"device {name!r}: torch {torch.__version__} finds {found} CUDA devices here; allowed: cpu")
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory() -> None:
    """For a process that only trains: what is freed stays with it instead of going back to the system. A pass asks for
    the same large blocks again and again, and fresh pages cost a ResNet's pass a tenth of its time. Where the C library
    has no such switch (only glibc has) nothing changes."""
    keep, at_once = -1, -3  # glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    try:
        library = ctypes.CDLL(None)
        library.mallopt(at_once, 2**30)
        library.mallopt(keep, 2**31 - 1)
    except (OSError, AttributeError, TypeError):
        pass
