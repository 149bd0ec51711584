"""ONNX files in a process of their own with little memory and time: whatever is in the file, this process goes on.

Every file is run like that unless its user vouches for it (`--trust`): that a file says it is ours proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qupel
from qupel.deploy import graphs
from qupel.deploy.confined import Frames, Header
from qupel.deploy.header import FormatError
from qupel.deploy.sessions import library
from qupel.deploy.timing import Stretch
from qupel.util.errors import UserError

HINT = "a file that you trust is run without limits with --trust"
_START_SECONDS = 120.0  # loading the libraries on a busy machine; no file has been looked at yet
_DTYPES = {"<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "<u8", "<u4", "<u2", "|i1", "|u1", "|b1"}


@dataclass(frozen=True)
class Limits:
    """Of the process: bytes beyond what it has before it opens a file, and seconds for a task: to open, to run once."""

    memory: int = 10**9
    seconds: float = 5.0


DEFAULT = Limits()


class Sandbox:
    """A confined process and the one file that it has open. `path` is said in errors."""

    def __init__(self, path: str | os.PathLike[str], limits: Limits = DEFAULT) -> None:
        for name in ("onnx", "onnxruntime"):
            library(name)
        self.path, self.limits = Path(path), limits
        mine, its = socket.socketpair()
        root = str(Path(qupel.__file__).parents[1])
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}  # arenas take address space, which is limited
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        given = map(str, (its.fileno(), limits.memory, limits.seconds))
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "qupel.deploy.confined", *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=environment,
            )
        self.frames = Frames(mine, time.monotonic() + _START_SECONDS)
        self.close = weakref.finalize(self, _end, self.process, mine)
        try:
            self.frames.receive(0)
        except (EOFError, ConnectionError, TimeoutError, ValueError):
            self.close()
            raise UserError(f"{path}: the process that would run it did not start") from None

    def ask(self, do: str, body: bytes = b"", **task: Any) -> tuple[Header, bytearray]:
        self.frames.end = time.monotonic() + self.limits.seconds
        try:
            self.frames.send({"do": do, **task}, body)
            answer, content = self.frames.receive(2 * graphs.LARGEST_FILE)
        except TimeoutError:
            self.close()
            raise FormatError(f"{self.path}: not done after {self.limits.seconds:g} s; {HINT}") from None
        except (EOFError, ConnectionError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it is ending: how?
            self.close()
            raise FormatError(f"{self.path}: the process that ran it {self._how()}; {HINT}") from None
        if "error" in answer:
            raise FormatError(f"{self.path}: {answer['error']}; {HINT}")
        return answer, content

    def _how(self) -> str:
        code = self.process.returncode
        if code == -signal.SIGXCPU:
            return "took too much processor time"
        return f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"

    def _file(self) -> str:
        if not self.path.is_file():
            raise UserError(f"{self.path} cannot be read: no such file")
        return str(self.path.absolute())

    def open(self, *, keep_packed: bool = False, threads: int | None = None) -> str | None:
        """Load the file; returns our metadata in it."""
        told, _ = self.ask("open", path=self._file(), keep_packed=keep_packed, threads=threads)
        return told["about"]

    def run(self, *inputs: np.ndarray) -> np.ndarray:
        """Outputs (n, ...) of inputs (n, ...), float32 or int64, some rows at a time."""
        count, size = len(inputs[0]), sum(x[:1].nbytes for x in inputs)
        rows = max(1, min(graphs.BATCH, graphs.LARGEST_TENSOR // 4 // max(1, size)))
        parts = [self._run([x[start : start + rows] for x in inputs]) for start in range(0, count, rows)]
        return np.concatenate(parts)

    def _run(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        told, content = self.ask("run", b"".join(x.tobytes() for x in inputs), inputs=_kinds(inputs))
        outputs, count = _array(content, "<f4", told["shape"]), len(inputs[0])
        if len(outputs) != count:
            raise FormatError(f"{self.path}: {count} inputs, but outputs of shape {outputs.shape}")
        return outputs

    def stretch(self, inputs: Sequence[np.ndarray], seconds: float) -> Stretch:
        """What runs on zeros of these inputs' shapes and types cost, measured in there."""
        told, _ = self.ask("stretch", inputs=_kinds(inputs), seconds=seconds)
        return Stretch(told["seconds"], told["joules"])

    def memory(self) -> tuple[int, int]:
        """Bytes of the process before it opened the file, and the most it had since."""
        told, _ = self.ask("memory")
        return told["before"], told["peak"]

    def read(self) -> tuple[str | None, dict[str, np.ndarray], dict[str, str]]:
        """Our metadata, the tensors in the file, and which tensor is the shape of each reshaped one."""
        told, content = self.ask("read", path=self._file())
        arrays, start = {}, 0
        for name, dtype, shape in told["tensors"]:
            size = int(np.prod(shape, dtype=np.int64)) * int(dtype[2])
            arrays[name] = _array(content[start : start + size], dtype, shape)
            start += size
        return told["about"], arrays, dict(told["reshapes"])


def _kinds(inputs: Sequence[np.ndarray]) -> list[tuple[str, tuple[int, ...]]]:
    return [(x.dtype.str, x.shape) for x in inputs]


def _array(content: bytearray, dtype: str, shape: list[int]) -> np.ndarray:
    if dtype not in _DTYPES:
        raise FormatError(f"numbers of type {dtype[:10]!r}")
    return np.frombuffer(content, dtype).reshape(shape)


def _end(process: subprocess.Popen[bytes], stream: socket.socket) -> None:
    stream.close()
    process.kill()
    process.wait()
