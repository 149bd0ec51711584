"""The process that runs ONNX files nobody vouches for: `python -m qupel.deploy.confined FD MEMORY SECONDS`.

It loads its libraries, gives up what it does not need (`confine`), and only then looks at a file. What it says goes
through the socket FD in `Frames`; `sandbox` is the other end, which ends it when it is silent for too long. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from qupel.deploy import graphs
from qupel.deploy.header import FormatError
from qupel.deploy.memory import peak, reset_peak, resident, virtual
from qupel.deploy.sessions import library, run, session
from qupel.deploy.timing import stretch

_LARGEST_HEAD = 64 << 20
Header = dict[str, Any]


@dataclass
class Frames:
    """A socket on which both sides send: 4 bytes of length, JSON, and the `size` bytes that it tells of."""

    stream: socket.socket
    end: float | None = None  # time.monotonic() at which waiting ends

    def send(self, header: Header, body: bytes = b"") -> None:
        head = json.dumps({**header, "size": len(body)}).encode()
        self._wait()
        self.stream.sendall(len(head).to_bytes(4, "little") + head)
        self.stream.sendall(body)

    def receive(self, most: int) -> tuple[Header, bytearray]:
        """Raises EOFError when the other side is gone, TimeoutError at the end of the time."""
        length = int.from_bytes(self._read(4), "little")
        if length > _LARGEST_HEAD:
            raise EOFError
        header = json.loads(self._read(length))
        if not 0 <= header["size"] <= most:
            raise EOFError
        return header, self._read(header["size"])

    def _wait(self) -> None:
        if self.end is not None:
            self.stream.settimeout(max(0.001, self.end - time.monotonic()))

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while len(view):
            self._wait()
            count = self.stream.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return content


def confine(memory: int) -> None:
    """From here on: so much more memory, no file written, no core dump."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)]
    if (used := virtual()) is not None:
        limits.append((resource.RLIMIT_AS, used + memory))
    for kind, most in limits:
        with contextlib.suppress(OSError, ValueError):  # a stricter limit stands already
            resource.setrlimit(kind, (most, most))


def _more_time(seconds: float) -> None:
    """Processor time for the next task, also should the other end no longer be there to watch the clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + 2
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FormatError("not a file")
            if status.st_size > graphs.LARGEST_FILE:
                raise FormatError(f"{status.st_size:,} bytes; allowed are {graphs.LARGEST_FILE:,}")
            return file.read(graphs.LARGEST_FILE + 1)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}") from None


class Server:
    """Answers the tasks of one `sandbox.Sandbox`."""

    def __init__(self) -> None:
        self.session: Any = None
        self.before = resident()

    def open(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        """A session of a file, and the metadata in it."""
        self.session = None
        self.before = resident()
        reset_peak()
        model = graphs.parse(read_file(task["path"]))
        graphs.check_sizes(model)
        about = graphs.about(model)
        content = model.SerializeToString()
        del model
        threads = task["threads"] or min(4, os.cpu_count() or 1)  # every thread takes address space
        self.session = session(content, keep_packed=task["keep_packed"], threads=threads)
        return {"about": about}, b""

    def read(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        """The tensors of a file: name, dtype and shape of each in the header, the numbers one after the other."""
        from onnx import numpy_helper

        model = graphs.parse(read_file(task["path"]))
        arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        shapes = [
            [node.output[0], node.input[1]]
            for node in model.graph.node
            if node.op_type == "Reshape" and len(node.output) == 1 and len(node.input) == 2
        ]
        told = [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()]
        head = {"about": graphs.about(model), "tensors": told, "reshapes": shapes}
        return head, b"".join(a.tobytes() for a in arrays.values())

    def run(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        inputs, start = [], 0
        for dtype, shape in task["inputs"]:
            size = int(np.prod(shape, dtype=np.int64))
            inputs.append(np.frombuffer(body, dtype, size, start).reshape(shape))
            start += inputs[-1].nbytes
        outputs = run(self.session, inputs)
        return {"shape": list(outputs.shape)}, outputs.tobytes()

    def stretch(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        inputs = [np.zeros(shape, dtype) for dtype, shape in task["inputs"]]
        return stretch(lambda: run(self.session, inputs), task["seconds"])._asdict(), b""

    def memory(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        return {"before": self.before, "peak": peak()}, b""

    def answer(self, task: Header, body: bytearray) -> tuple[Header, bytes]:
        try:
            return getattr(self, task["do"])(task, body)
        except FormatError as error:
            return {"error": str(error)[:500]}, b""
        except MemoryError:
            return {"error": "it needs more memory than it may have"}, b""
        except Exception as error:  # whatever a hostile file makes a library raise
            return {"error": f"it cannot be read ({type(error).__name__}: {str(error)[:120]})"}, b""


def main() -> None:
    for name in ("onnx.shape_inference", "onnxruntime"):  # before the limits hold
        library(name)
    number, memory, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    frames = Frames(socket.socket(fileno=number))
    confine(memory)
    server = Server()
    frames.send({"ready": True})
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task, body = frames.receive(graphs.LARGEST_TENSOR)
            _more_time(seconds)
            answer = server.answer(task, body)
            try:
                frames.send(*answer)
            except (TypeError, ValueError):  # something in it is not JSON; nothing has been sent
                frames.send({"error": "what is in it cannot be told"})


if __name__ == "__main__":
    main()
