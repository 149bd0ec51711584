"""What may leave a client: a closed list, per question and privacy. An answer is encoded here and nowhere else.

Every field has a rule, checked on both sides: at the client before anything is sent (thrice: when the answer is made,
when it is encoded, when the process that talks to Flower passes it on), at the server before anything is believed.
What is not on the list has no field to travel in. Texts are sentences of `SENTENCES`, with whole numbers in the places
of `{}` and hashes in those of `{hash}`; any other text stays in the client's own log. docs/deploy.md has this list as a
table; a test compares them.

Nothing but the standard library: the process that passes an answer on must start fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from qupel.flower.frames import Header

MOST_TEXT = 300  # characters of somebody else's that reach a log or a terminal
MOST_INPUTS, MOST_CLASSES = 2**24, 2**20  # numbers in an input; with more, no server could build a model
MOST_LOSS = 1e30
MOST_METRICS = 100
HASH = "[0-9a-f]{16}"
JOB = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"

FAILED = "it could not answer; its own log says why"
DECLINED = "it declined; its own log says why"
NO_WORKER = "its worker did not start; its own log says why"
NO_QUESTION = "not a question this client understands"
NO_CLASSES = "its data have no classes"
NOT_ALLOWED = "the job names a module that its client.toml does not allow; its own log says which"
REFUSALS = {  # of a private client (`ledger`)
    "round-answered": "a private client answers a round once, and has answered this one",
    "budget-spent": "a private client answers within its own max_rounds, max_epsilon and max_delta, which are spent",
    "ledger-damaged": "a private client that cannot read what it has spent (_privacy.json) answers nothing",
}
POLICY = {  # of a client's own policy (`policy`), by its key; `sum`: of the protocol itself
    "methods": "policy: its client.toml does not allow the job's methods",
    "networks": "policy: its client.toml does not allow the job's network",
    "rounds": "policy: its client.toml does not allow so many rounds",
    "secure": "policy: its client.toml allows only jobs with secure aggregation",
    "least": "policy: a sum of fewer clients than it allows",
    "epsilon": "policy: its client.toml asks for stronger privacy",
    "sum": "policy: a secure sum that does not keep to its rules",
}
OPENED = "sum-opened: a client helps to open one sum of a round, and has done so"
NO_SUM = "it takes no part in this sum"
NOT_RESIDENT = "secure sums need resident = true in its client.toml"
NO_LOG = "log-damaged: a client that cannot write its log (_audit.jsonl) answers nothing"
LAYOUT = "the server's network has layout {hash}, this client's {hash}"
REMOVED = "this client has removed its states of this job, which nobody had asked for in long"
SENTENCES = (
    FAILED,
    DECLINED,
    NO_WORKER,
    NO_QUESTION,
    NO_CLASSES,
    NOT_ALLOWED,
    "the server speaks protocol {}, this client {}",
    "client {} in a job for {} clients, numbered from 0",
    LAYOUT,
    "the server's model has {} parameters, this client's {}",
    "round {} is over: this client is at round {}",
    "cannot go back to round {}: of the past, round {} is kept",
    *(f"{code}: {text}" for code, text in REFUSALS.items()),
    REMOVED,
    *POLICY.values(),
    OPENED,
    NO_SUM,
    NOT_RESIDENT,
    NO_LOG,
)
OVERSIZE = "its file has {} bytes, over its budget of {}"
DIVERGED = "round {}: its training met numbers that are not finite"
TOLD_BY_DATA = (OVERSIZE, DIVERGED)  # they depend on the data: a private client does not say them


class Unspeakable(ValueError):
    """An answer, or a part of one, that is not on the list."""


# --- rules ---


@dataclass(frozen=True)
class Rule:
    """What a field may hold, in words and as a check."""

    words: str
    holds: Callable[[Any], bool]


def whole(low: int, high: int, words: str) -> Rule:
    return Rule(words, lambda v: type(v) is int and low <= v <= high)


def real(low: float, high: float, words: str) -> Rule:
    return Rule(words, lambda v: type(v) in (int, float) and low <= v <= high)  # NaN is not within anything


def maybe(rule: Rule) -> Rule:
    return Rule(f"{rule.words}, or nothing", lambda v: v is None or rule.holds(v))


def sentence(allowed: tuple[str, ...]) -> Rule:
    places = {r"\{\}": "[0-9]{1,10}", r"\{hash\}": HASH}
    patterns = []
    for text in map(re.escape, allowed):
        for place, what in places.items():
            text = text.replace(place, what)
        patterns.append(re.compile(text))
    return Rule("a sentence of the list", lambda v: type(v) is str and any(p.fullmatch(v) for p in patterns))


def _is_shape(value: Any) -> bool:
    sizes = type(value) is tuple and 1 <= len(value) <= 8 and all(type(v) is int and v >= 1 for v in value)
    return sizes and math.prod(value) <= MOST_INPUTS


CLIENT = whole(0, 2**31 - 1, "a whole number from 0")
ROUND = whole(0, 2**31 - 1, "a whole number from 0")
COUNT = whole(1, 2**31 - 1, "a whole number from 1 to 2^31 - 1")
TESTED = whole(0, 2**31 - 1, "a whole number from 0 to 2^31 - 1")
CLASSES = whole(1, MOST_CLASSES, "a whole number from 1 to 2^20")
SIZE = whole(0, 2**40, "a whole number from 0 to 2^40")
BITS = real(0, 64, "a number from 0 to 64")
LOSS = maybe(real(-MOST_LOSS, MOST_LOSS, "a number of size up to 1e30"))
ACCURACY = maybe(real(0, 1, "a number from 0 to 1"))
NAME = Rule("the job's name", lambda v: type(v) is str and re.fullmatch(JOB, v) is not None)
SHAPE = Rule("1 to 8 whole numbers from 1 with a product up to 2^24", _is_shape)


LAYOUT_HASH = maybe(Rule("16 hexadecimal digits", lambda v: type(v) is str and re.fullmatch(HASH, v) is not None))
METRICS = Rule(
    f"up to {MOST_METRICS} numbers of size up to 1e30, or nothing for one",
    lambda v: type(v) is tuple and len(v) <= MOST_METRICS and all(map(LOSS.holds, v)),
)


def say(rule: Rule, meaning: str, **default: Any) -> Any:
    return field(metadata={"rule": rule, "meaning": meaning}, **default)


# --- answers ---


@dataclass(frozen=True)
class Answer:
    def __post_init__(self) -> None:
        for f in fields(self):
            value, rule = getattr(self, f.name), f.metadata["rule"]
            if not rule.holds(value):
                raise Unspeakable(f"{f.name} = {printable(repr(value), 40)}: allowed is {rule.words}")


@dataclass(frozen=True)
class Pong(Answer):
    """To a ping: nothing."""


@dataclass(frozen=True)
class Hello(Answer):
    client: int = say(CLIENT, "its number")
    samples: int = say(COUNT, "training samples")
    shape: tuple[int, ...] = say(SHAPE, "shape of an input")
    classes: int = say(CLASSES, "classes that there are in all")
    layout: str | None = say(LAYOUT_HASH, "hash of the network's names and shapes", default=None)


@dataclass(frozen=True)
class PrivateUpdate(Answer):
    client: int = say(CLIENT, "its number")
    job: str = say(NAME, "the job asked for")
    round: int = say(ROUND, "the round asked for")
    samples: int = say(COUNT, "training samples")


@dataclass(frozen=True)
class Update(PrivateUpdate):
    loss: float | None = say(LOSS, "mean training loss of the round, f(x)")
    loss_quantized: float | None = say(LOSS, "the same of the quantized model, f(Q(x))")


@dataclass(frozen=True)
class Stage(Answer):
    """Of a secure sum, with its body (`secagg`)."""

    client: int = say(CLIENT, "its number")
    job: str = say(NAME, "the job asked for")
    round: int = say(ROUND, "the round asked for")


@dataclass(frozen=True)
class PrivateScores(Answer):
    client: int = say(CLIENT, "its number")
    round: int = say(ROUND, "the round asked for")


@dataclass(frozen=True)
class Scores(PrivateScores):
    test: float | None = say(ACCURACY, "accuracy of its deployed model on its test data")
    test_loss: float | None = say(LOSS, "loss of the same")
    validation: float | None = say(ACCURACY, "accuracy on its validation data")
    validation_loss: float | None = say(LOSS, "loss of the same")
    float_test: float | None = say(ACCURACY, "test accuracy before quantization")
    float_test_loss: float | None = say(LOSS, "loss of the same")
    bytes: int = say(SIZE, "size of its model")
    bits: float = say(BITS, "mean bits of a quantized weight")
    dead: int = say(SIZE, "centers without a weight")
    tested: int = say(TESTED, "its test samples", default=0)
    test_metrics: tuple[float | None, ...] = say(METRICS, "the job's metrics on its test data", default=())
    validation_metrics: tuple[float | None, ...] = say(METRICS, "the same on its validation data", default=())
    float_test_metrics: tuple[float | None, ...] = say(METRICS, "the same before quantization", default=())


@dataclass(frozen=True)
class PrivateExport(Answer):
    client: int = say(CLIENT, "its number")
    round: int = say(ROUND, "the round asked for")


@dataclass(frozen=True)
class Export(PrivateExport):
    bytes: int = say(SIZE, "size of the file it wrote on its own disk")
    test: float | None = say(ACCURACY, "accuracy of that model on its test data")


@dataclass(frozen=True)
class Adapted(Export):
    shared: float | None = say(ACCURACY, "accuracy of the shared model, as it is, on the same data")


@dataclass(frozen=True)
class PrivateRefusal(Answer):
    error: str = say(sentence(SENTENCES), "why there is no answer")


@dataclass(frozen=True)
class Refusal(Answer):
    error: str = say(sentence(SENTENCES + TOLD_BY_DATA), "why there is no answer")


SECURE_STAGES = ("share", "mask", "open")  # after `train`, whose body are then keys
LEAVES: dict[tuple[str, bool], type[Answer]] = {
    ("ping", False): Pong,
    ("ping", True): Pong,
    ("hello", False): Hello,
    ("hello", True): Hello,
    ("train", False): Update,
    ("train", True): PrivateUpdate,
    **{(kind, private): Stage for kind in SECURE_STAGES for private in (False, True)},
    ("evaluate", False): Scores,
    ("evaluate", True): PrivateScores,
    ("export", False): Export,
    ("export", True): PrivateExport,
    ("adapt", False): Adapted,
    ("adapt", True): PrivateExport,
}
LISTS = {"shape", "test_metrics", "validation_metrics", "float_test_metrics"}
WITH_BODY = (Update, PrivateUpdate, Stage)  # the upload: rows in the job's codec, their shares; where private, noised


# --- out of a client ---


def told(kind: object, private: bool, answer: Answer, body: bytes = b"") -> tuple[Header, bytes]:
    """An answer as it is sent to a question; raises `Unspeakable` for one that this question does not allow."""
    allowed = (LEAVES.get((str(kind), private)), PrivateRefusal if private else Refusal)
    if type(answer) not in allowed or (body and type(answer) not in WITH_BODY):
        raise Unspeakable(f"{type(answer).__name__} with {len(body)} bytes is no answer to {str(kind)[:20]}")
    answer.__post_init__()  # frozen is a promise, not a lock
    values = {f.name: getattr(answer, f.name) for f in fields(answer)}
    return {name: list(v) if type(v) is tuple else v for name, v in values.items()}, body


def refused(kind: object, private: bool, text: str, otherwise: str = DECLINED) -> tuple[Header, bytes]:
    """A refusal with this text if that may be said, else with another one that may."""
    refusal = PrivateRefusal if private else Refusal
    try:
        return told(kind, private, refusal(text))
    except Unspeakable:
        return told(kind, private, refusal(otherwise))


def passed_on(kind: object, private: bool, header: Header, body: bytes) -> tuple[Header, bytes]:
    """What a worker answered, checked once more: it may be an older one that knows no list."""
    if "error" in header:
        return refused(kind, private, str(header["error"]), FAILED)
    return told(kind, private, heard(kind, header), body)


# --- into the server ---


def heard(kind: object, header: Header) -> Answer:
    """The answer in a header that may hold anything; raises `Unspeakable` for what is not on the list."""
    for private in (False, True):
        cls = LEAVES.get((str(kind), private))
        if cls is not None and set(header) == {f.name for f in fields(cls)}:
            return cls(**{k: tuple(v) if k in LISTS and type(v) is list else v for k, v in header.items()})
    names = ", ".join(sorted(map(str, header)))
    raise Unspeakable(f"its fields are {printable(names, 120) or 'none'}, and those are no answer to {str(kind)[:20]}")


def printable(text: object, most: int = MOST_TEXT) -> str:
    """Somebody else's text for a log or a terminal: one line, cut, without escape, control or invisible characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])
