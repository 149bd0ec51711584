"""The Flower ClientApp: every message is passed on to the client's resident worker. Only Flower imports this file."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from qupel.flower import frames, thin

app = ClientApp()


@app.train()
@app.evaluate()
@app.query("hello")
@app.query("export")
@app.query("secure")
def answer(message: Message, context: Context) -> Message:
    try:
        asked = message.content
        header = frames.table(str(asked["question"]["header"]))
        body = asked.array_records["arrays"]["w"].numpy().tobytes() if "arrays" in asked else b""
        reply, payload = thin.forward(Path(str(context.node_config["config"])), header, body)
    except Exception as e:
        reply, payload = thin.failed(e)
    content = RecordDict({"answer": ConfigRecord({"header": json.dumps(reply)})})
    if payload:
        content["arrays"] = ArrayRecord({"upload": Array("uint8", (len(payload),), frames.BYTES, payload)})
    return Message(content=content, reply_to=message)
