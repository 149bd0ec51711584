"""The Flower ServerApp: our own loop over Flower's grid. Only Flower imports this file."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_object_body

from qupel.engine.rounds import Failed, Progress, Stopped
from qupel.engine.scores import short
from qupel.flower import frames
from qupel.flower.boundary import SECURE_STAGES, printable
from qupel.flower.frames import Header
from qupel.flower.post import Bodies, Reply, body_for
from qupel.flower.processes import Process
from qupel.flower.server import adapt, conduct, export, open_fleet
from qupel.util.errors import UserError
from qupel.util.files import write_json

log = logging.getLogger("flwr")
app = ServerApp()
POLL_SECONDS = 0.2
PING_SECONDS = 60.0  # of silence
PULL_SECONDS = 1.0  # to fetch one answer before others are looked at
MOST_REPEATED = 2**28  # bytes of an array whose chunks are repeated
LARGEST_ANSWER, DEEPEST_ANSWER = 2**14, 2  # bytes and brackets of an answer's header; ours have under 1,000 and 2
# of our questions; the others are Flower's own: train, evaluate
MESSAGE_TYPES = {"hello": "query.hello", "ping": "query.hello", "export": "query.export", "adapt": "query.export"}
MESSAGE_TYPES |= dict.fromkeys(SECURE_STAGES, "query.secure")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or export what RUN/request.json asks for; RUN/end.json says how it ended."""
    folder, mode = Path(str(context.run_config["run"])), context.run_config["mode"]
    torch.set_num_threads(1)
    alone(folder)
    post = FlowerPost(grid)
    began = time.monotonic()

    def tell(progress: Progress) -> None:
        told = {**asdict(progress), "seconds": time.monotonic() - began}
        told["line"] = progress.line and short(progress.line)
        with (folder / "progress.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")

    try:
        if mode == "export":
            export(folder, open_fleet(folder, post))
        elif mode == "adapt":
            adapt(folder, open_fleet(folder, post))
        else:
            conduct(folder, post, tell, should_stop=(folder / "stop").exists)
        ended = {"state": "done", "message": ""}
    except Stopped as e:
        ended = {"state": "stopped", "message": str(e)}
    except (UserError, Failed, OSError) as e:
        ended = {"state": "failed", "message": str(e)}
    except BaseException as e:
        ended = {"state": "broken", "message": f"{type(e).__name__}: {e}"}
        raise
    finally:
        write_json(folder / "end.json", {"run": context.run_id, **ended})


def alone(folder: Path) -> None:
    """One server a run folder, the newest: one that has outlived its SuperLink does not go on beside it."""
    path = folder / "server.json"
    if path.exists():
        Process.noted("server", path).kill()
    Process.here("server").note(path)


class FlowerPost:
    """Questions as Flower messages. A client is known by the name its key was registered under: client-<number>.

    A run that ends while a SuperNode fetches a message of it, as when the server is killed, leaves that SuperNode (of
    flwr 1.41) with an answer to nobody, and one answer behind for good: it sends what there is when the next message
    has come, and no sooner. Hence a ping, once, to those who are silent. Starting the SuperNode again cures it.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> list[int]:
        return sorted(self._nodes())

    def _nodes(self) -> dict[int, int]:
        """Client -> node. Of two nodes with one name, the one that was registered first."""
        nodes: dict[int, int] = {}
        for node in sorted(self.grid.get_nodes(), key=lambda n: (n.registered_at, n.node_id)):
            if named := re.fullmatch(r"client-(\d+)", node.name):
                nodes.setdefault(int(named[1]), node.node_id)
        return nodes

    def ask(self, header: Header, body: Bodies, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        begin = time.monotonic()
        nodes = {client: node for client, node in self._nodes().items() if client in set(clients)}
        waiting = self._push(header, body, nodes, seconds)
        pinged = False
        pulls = Pulls(self.grid)
        while waiting and time.monotonic() < begin + seconds:
            for asked, client in list(waiting.items()):
                reply = pulls.look(asked, client)
                if reply is not None:
                    del waiting[asked]
                    yield reply
            if not pinged and time.monotonic() > begin + min(PING_SECONDS, seconds / 2):
                pinged = True
                self._push({"kind": "ping"}, b"", {client: nodes[client] for client in waiting.values()}, seconds)
            if waiting:
                time.sleep(POLL_SECONDS)

    def _push(self, header: Header, body: Bodies, nodes: dict[int, int], seconds: float) -> dict[str, int]:
        """Send a question to these clients' nodes; number of the message -> client."""
        kind = MESSAGE_TYPES.get(header["kind"], str(header["kind"]))
        messages = []
        for client, node in nodes.items():
            content = RecordDict({"question": ConfigRecord({"header": json.dumps(header)})})
            if part := body_for(client, body):
                content["arrays"] = ArrayRecord({"w": Array(np.frombuffer(part, np.uint8))})
            messages.append(Message(content, node, kind, ttl=seconds + 30, group_id=str(header.get("round", ""))))
        return dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}


# --- one answer ---


class Pulls:
    """Answers, fetched one by one. Flower unpacks them on the way, and where it cannot, a batch is lost as a whole: one
    client's broken answer would take the others' with it. One that is announced and never comes blocks its own thread
    only."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.begun: dict[str, tuple[threading.Thread, list[Reply | httpx.HTTPError]]] = {}

    def look(self, asked: str, client: int) -> Reply | None:
        """The answer if it is there."""
        patience = 0.0
        if asked not in self.begun:
            found: list[Reply | httpx.HTTPError] = []
            thread = threading.Thread(target=lambda: found.extend(pull(self.grid, asked, client)), daemon=True)
            self.begun[asked] = thread, found
            patience = PULL_SECONDS
            thread.start()
        thread, found = self.begun[asked]
        thread.join(patience)
        if thread.is_alive():
            return None
        del self.begun[asked]
        first = found[0] if found else None
        if isinstance(first, httpx.HTTPError):
            raise first
        return first


def pull(grid: Grid, asked: str, client: int) -> list[Reply | httpx.HTTPError]:
    """A client's answer, whatever that is; none while there is none; or what is wrong with the SuperLink."""
    try:
        return [read(client, message, asked) for message in grid.pull_messages([asked])]
    except httpx.HTTPError as e:
        return [e]
    except Exception as e:
        return [unreadable(client, e)]


def read(client: int, message: Message, asked: str) -> Reply:
    """A reply out of a message, whatever it holds: it may name a question that another client was asked."""
    try:
        if message.metadata.reply_to_message_id != asked:
            raise ValueError("it answers another question")
        if message.has_error():
            return Reply(client, {"error": f"error {message.error.code}: {printable(message.error.reason)}"})
        content = message.content
        header = frames.table(str(content.config_records["answer"]["header"]), LARGEST_ANSWER, DEEPEST_ANSWER)
        return Reply(client, header, upload_of(content) if "arrays" in content else b"")
    except Exception as e:
        return unreadable(client, e)


def upload_of(content: RecordDict) -> bytes:
    """The bytes as they were sent: no array format with a header of its own is read."""
    array = content.array_records["arrays"]["upload"]
    if (array.dtype, array.shape, array.stype) != ("uint8", (len(array.data),), frames.BYTES):
        raise ValueError("its upload is not plain bytes")
    return array.data


def unreadable(client: int, error: Exception) -> Reply:
    return Reply(client, {"error": f"an answer that cannot be read: {printable(repr(error), 100)}"})


_inflate = Array.inflate


def _bounded(content: bytes, children: dict[str, Any] | None = None) -> Array:
    """Flower's own, for arrays that are not much longer than what was sent: their headers may name a chunk a million
    times."""
    named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    sent = [len(chunk.data) for chunk in (children or {}).values()]
    if len(named) > len(sent) and len(named) * max(sent, default=0) > MOST_REPEATED:
        raise ValueError(f"an array of {len(named)} chunks, of which {len(sent)} were sent")
    return _inflate(content, children)


Array.inflate = staticmethod(_bounded)  # type: ignore[method-assign,assignment]
