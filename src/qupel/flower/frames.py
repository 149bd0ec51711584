"""Messages on a local socket: two lengths, a JSON header, raw bytes. Nothing but the standard library: the process that
passes a message on must start fast."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Header = dict[str, Any]
SOCKET = "worker.sock"
BYTES = "qupel.bytes"  # how an upload is packed in a Flower array: not at all
LARGEST_HEADER, LARGEST_BODY = 2**20, 2**34
DEEPEST_HEADER = 32
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_LENGTHS = struct.Struct("!QQ")


def send(connection: socket.socket, header: Header, body: bytes = b"") -> None:
    head = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(head), len(body)) + head)
    if body:  # sending nothing is not nothing: by now the other side may have answered and left, and that is an error
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Header, bytes]:
    head, body = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if head > LARGEST_HEADER or body > LARGEST_BODY:
        raise ConnectionError(f"a message of {head} + {body} bytes is not one of ours")
    header = table(_exactly(connection, head))
    return header, bytes(_exactly(connection, body))


def table(text: str | bytes | bytearray, largest: int = LARGEST_HEADER, deepest: int = DEEPEST_HEADER) -> Header:
    """A JSON table out of a text that may be anything; raises ValueError. Size and depth are looked at before it is
    parsed: a parser that goes down with every bracket can be made to go down too far."""
    if len(text) > largest:
        raise ValueError(f"a header of {len(text)} bytes; {largest} are allowed")
    text = text if isinstance(text, str) else text.decode()
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > deepest:
            raise ValueError(f"a header of more than {deepest} brackets within one another")
    header = json.loads(text, parse_int=_short_integer)
    if not isinstance(header, dict):
        raise ValueError("a header that is no table")
    return header


def _short_integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise ConnectionError("the connection ended within a message")
        done += count
    return buffer


def ask(folder: Path, header: Header, body: bytes = b"") -> tuple[Header, bytes]:
    """One question to the worker that listens in a folder, and its answer; not later than the server waits for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(header.get("seconds"))
        with inside(folder):
            connection.connect(SOCKET)
        send(connection, header, body)
        return receive(connection)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Within a folder, for a socket's name: an absolute one must fit into 107 bytes."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)
