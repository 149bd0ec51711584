"""The Flower ClientApp: every message is passed on to the client's resident worker. Only Flower imports this file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from qupel.flower.thin import forward

app = ClientApp()


@app.train()
@app.evaluate()
@app.query("hello")
@app.query("export")
def answer(message: Message, context: Context) -> Message:
    asked = message.content
    header = json.loads(str(asked["question"]["header"]))
    body = asked.array_records["arrays"]["w"].numpy().tobytes() if "arrays" in asked else b""
    reply, payload = forward(Path(str(context.node_config["config"])), header, body)
    content = RecordDict({"answer": ConfigRecord({"header": json.dumps(reply)})})
    if payload:
        content["arrays"] = ArrayRecord({"upload": Array(np.frombuffer(payload, np.uint8))})
    return Message(content=content, reply_to=message)
