"""The Flower ServerApp: our own loop over Flower's grid. Only Flower imports this file."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from qupel.engine.rounds import Failed, Progress, Stopped
from qupel.engine.scores import short
from qupel.flower.frames import Header
from qupel.flower.processes import Process
from qupel.flower.server import Reply, conduct, export, open_fleet
from qupel.util.errors import UserError
from qupel.util.files import write_json

log = logging.getLogger("flwr")
app = ServerApp()
POLL_SECONDS = 0.2
PING_SECONDS = 60.0  # of silence
# of our questions; the others are Flower's own: train, evaluate
MESSAGE_TYPES = {"hello": "query.hello", "ping": "query.hello", "export": "query.export"}


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

    def ask(self, header: Header, body: bytes, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        begin = time.monotonic()
        nodes = {client: node for client, node in self._nodes().items() if client in set(clients)}
        waiting = self._push(header, body, nodes, seconds)
        pinged = False
        while waiting and time.monotonic() < begin + seconds:
            for message in self.grid.pull_messages(list(waiting)):
                asked = message.metadata.reply_to_message_id
                if asked in waiting:
                    yield read(waiting.pop(asked), message)
            if not pinged and time.monotonic() > begin + min(PING_SECONDS, seconds / 2):
                pinged = True
                self._push({"kind": "ping"}, b"", {client: nodes[client] for client in waiting.values()}, seconds)
            if waiting:
                time.sleep(POLL_SECONDS)

    def _push(self, header: Header, body: bytes, nodes: dict[int, int], seconds: float) -> dict[str, int]:
        """Send a question to these clients' nodes; number of the message -> client."""
        kind = MESSAGE_TYPES.get(header["kind"], str(header["kind"]))
        messages = []
        for node in nodes.values():
            content = RecordDict({"question": ConfigRecord({"header": json.dumps(header)})})
            if body:
                content["arrays"] = ArrayRecord({"w": Array(np.frombuffer(body, np.float32))})
            messages.append(Message(content, node, kind, ttl=seconds + 30, group_id=str(header.get("round", ""))))
        return dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}


def read(client: int, message: Any) -> Reply:
    """A reply out of a message, whatever it holds."""
    if message.has_error():
        return Reply(client, {"error": f"error {message.error.code}: {message.error.reason}"})
    try:
        content = message.content
        header = json.loads(content["answer"]["header"])
        if not isinstance(header, dict):
            raise TypeError("its header is no table")
        body = content["arrays"]["upload"].numpy().tobytes() if "arrays" in content else b""
    except (KeyError, TypeError, ValueError, AttributeError, EOFError) as e:
        return Reply(client, {"error": f"an answer that cannot be read: {e!r:.100}"})
    return Reply(client, header, body)
