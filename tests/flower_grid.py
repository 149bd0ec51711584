"""Flower's grid in this process: messages are taken apart by Flower's own code, carried as bytes, and put together
again, as between a SuperNode and the server. What is carried may be looked at, and changed."""

import itertools
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Objects = dict[str, bytes]


def within_a_run(monkeypatch) -> None:
    """Flower makes messages only within a run."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def taken_apart(message: Message) -> tuple[str, Objects]:
    return message.object_id, {key: value.deflate() for key, value in get_all_nested_objects(message).items()}


class Grid:
    """`answer` is what a client's ClientApp does; `twist` may change the objects of its answer: (client, objects)."""

    def __init__(
        self,
        count: int,
        answer: Callable[[int, Message], Message],
        twist: Callable[[int, Objects], Objects] = lambda client, objects: objects,
    ) -> None:
        self.count, self.answer, self.twist = count, answer, twist
        self.numbers = itertools.count()
        self.waiting: dict[str, Message] = {}
        self.sent: list[tuple[Message, int, Message, Objects]] = []  # question, client, answer, every byte of it

    def get_nodes(self):
        return [SimpleNamespace(name=f"client-{i}", node_id=i + 1, registered_at="") for i in range(self.count)]

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        for message in messages:
            number = f"question-{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = number
            self.waiting[number] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: Sequence[str]) -> list[Message]:
        """Put together when they are gone from here, all or none: as Flower does it."""
        found = []
        for question in [self.waiting.pop(number) for number in ids if number in self.waiting]:
            client = question.metadata.dst_node_id - 1
            reply = self.answer(client, question)
            root, objects = taken_apart(reply)
            self.sent.append((question, client, reply, objects))
            found.append((root, self.twist(client, dict(objects))))
        return [inflate_object_from_contents(root, objects) for root, objects in found]


def header_of(question: Message) -> dict:
    return json.loads(question.content["question"]["header"])
