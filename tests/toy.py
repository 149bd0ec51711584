"""A federation of eight numbers: a task that is a function of the vector, and an example of every registered part."""

import math
import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout, Slot
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import State
from qupel.parts.methods.local import Local
from qupel.parts.servers import add
from qupel.parts.servers.mean import Mean
from qupel.tasks.task import Evaluated, Problem
from qupel.util.registry import REGISTRIES, Registry

T, U = TypeVar("T"), TypeVar("U")

# A model of 8 numbers; 1..6 are the quantized layer "q", two channels of three. f(v) = sum_k a_k (v_k - b_k)^2 / 2 -
# everything in float64.
LAYER = Slot("q", (2, 3), 1, 7)
LAYOUT = Layout((Slot("first", (1,), 0, 1), LAYER, Slot("last", (1,), 7, 8)), ("first", "q", "last"))
A = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.25, 2.0]).double()
B = torch.tensor([0.5, -1.0, 0.25, 1.0, 0.0, -0.5, 2.0, 1.0]).double()
X = torch.tensor([0.1, -0.9, 0.3, 0.8, 0.05, -0.4, 1.4, -0.2]).double()
W = torch.tensor([0.0, -1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 0.0]).double()
C = torch.tensor([-0.8, 0.1, 1.0]).double()
CLOCK = Clock(7, 40, 4)  # epoch 2
QUANTIZED = range(1, 7)
BATCH = (torch.zeros(1, 1), torch.zeros(1, 1))  # of one client or a stack; the toys look at no data
PLAN, CHANNELS = Plan({"q": 4}), Plan({"q": 4}, channels=True)
STILL = {"lam": Schedule(0.0), "lam_c": Schedule(0.0)}  # no prox
S = torch.tensor([0.5, 2.0]).double()  # scales of the two channels
WIDE = S.repeat_interleave(3)  # of each weight (6,)


def local(quantizer, **settings):
    return Local(**{"eta1": Schedule(0.1)} | settings, quantizer=quantizer)


def quadratic(v: Tensor) -> Tensor:
    return (A * (v - B) ** 2).sum(-1) / 2


def wavy(v: Tensor) -> Tensor:
    """Not separable from its gradient by luck."""
    return quadratic(v) + torch.sin(v).sum(-1)


@dataclass(frozen=True)
class Toy:
    """The task of a function f (..., d) -> (...) that looks at no data; its outputs are the vector."""

    f: Callable[[Tensor], Tensor] = quadratic
    layout: Layout = LAYOUT

    def gradient(self, x, batch, slots=None, *, loss=None, given=()) -> Evaluated:
        v = x.detach().clone().requires_grad_()
        values = self.f(v)
        (g,) = torch.autograd.grad(values.sum(), v)
        return Evaluated(g, values.item() if x.ndim == 1 else values.detach(), v.detach())

    def outputs(self, x, inputs) -> Tensor:
        return x

    def value(self, x, batch):
        return self.gradient(x, batch).loss


def problem(f: Callable[[Tensor], Tensor] = quadratic, layout: Layout = LAYOUT) -> Problem:
    task = Toy(f, layout)
    return Problem(task, task)


QUADRATIC = problem()


def gradient(v: Tensor) -> Tensor:
    """Of the quadratic."""
    return A * (v - B)


def state(x=X, w=W, c=C, memory=()) -> State:
    return State(x.clone(), w.clone(), Codebook((LAYER,), (c.clone(),)) if c is not None else Codebook(), memory)


def entered(method, plan: Plan = PLAN, x=X, w=W, f: Problem = QUADRATIC):
    """A client of this plan at the start of a round; the phase before left it levels, which `frozen` goes on with."""
    before = State(x.clone(), w.clone(), start_codebook(LAYOUT, x, plan, "range"))
    return method.receive(method.start(before, plan, f), method.broadcast(w.clone()))


def stepped(method, s, f: Problem = QUADRATIC, clock: Clock = CLOCK):
    """The state after a step."""
    return method.step(s, f, BATCH, clock)[0]


def shifted(k: int) -> Problem:
    """The quadratic of client k, with its minimum elsewhere."""
    return problem(lambda v: (A * (v - B - k) ** 2).sum(-1) / 2)


def federated(method, rounds: int, steps: int, w=W, problems=None, server=Mean(), clock: Clock = CLOCK):
    """(what is sent after each round, states that received it): the clients' quadratics and a server."""
    problems = [shifted(k) for k in range(3)] if problems is None else problems
    rows = method.broadcast(w.clone())
    models = getattr(method, "models", len(rows))
    memory = server.start(rows[:models])
    states = [method.start(state(x=w, w=w, c=None), Plan(), p) for p in problems]
    seen, sent = [], rows
    for _ in range(rounds):
        so_far, beside = None, None
        for k, p in enumerate(problems):
            s = method.receive(states[k], sent)
            for step in range(steps):
                s = stepped(method, s, p, replace(clock, step=step))
            states[k], upload = s, method.upload(s)
            if upload is not None:
                so_far = server.add(so_far, upload.part(slice(models)), 1.0)
                beside = add(beside, upload.part(slice(models, None)), 1.0)
        if so_far is not None:
            new, memory = server.finish(rows[:models], so_far, memory)
            rows = (*new, *beside.mean(rows[models:]))
        sent = (*server.send(rows[:models], memory), *rows[models:])
        seen.append(sent)
    return seen, [method.receive(s, sent) for s in states]


def tensors(s: Any) -> list[Tensor]:
    """All of a state, in the order of its fields."""
    if isinstance(s, Tensor):
        return [s]
    if isinstance(s, tuple):
        return [t for part in s for t in tensors(part)]
    return [t for f in fields(s) for t in tensors(getattr(s, f.name))] if is_dataclass(s) else []


def together(parts: list[Any]) -> Any:
    """The states of k clients as one state of a stack."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack(parts)
    if isinstance(first, Slot):
        return first
    if isinstance(first, tuple):
        return tuple(together(list(each)) for each in zip(*parts, strict=True))
    return replace(first, **{f.name: together([getattr(p, f.name) for p in parts]) for f in fields(first)})


def close(got, expected) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def nearest(v: float, c: list[float]) -> int:
    return min(range(len(c)), key=lambda j: (abs(v - c[j]), j))


def prox_weight(y, c, t):
    q = c[nearest(y, c)]
    return q + math.copysign(max(abs(y - q) - t / 2, 0.0), y - q)


def exact_center(mu, xs, kappa):
    n = len(xs)
    return statistics.median([*xs, *(mu + kappa * (n - 2 * k) for k in range(n + 1))])


# --- an example of every registered part ---


def every(registry: Registry) -> list[Any]:
    """One of each registered part, with its defaults where it has them."""
    return [plain(entry.part) for entry in registry.all().values()]


def cover(firsts: Sequence[T], seconds: Sequence[U]) -> list[tuple[T, U]]:
    """Pairs in which each of the firsts meets two of the seconds, and each of the seconds two of the firsts."""
    ways = [(k, k + shift) for k in range(max(len(firsts), len(seconds))) for shift in (0, 1)]
    return [(firsts[i % len(firsts)], seconds[j % len(seconds)]) for i, j in ways]


def name(part: Any) -> str:
    """For the ids of tests."""
    return type(part).__name__


@cache
def examples(cls: type) -> tuple[Any, ...]:
    """Instances of a dataclass: its defaults, then each of its fields at other values of the field's type."""
    first = plain(cls)
    return first, *_variants(first, get_type_hints(cls))


def plain(cls: type) -> Any:
    """An instance of a dataclass with its defaults."""
    needed = [f for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
    return cls(**{f.name: next(_values(get_type_hints(cls)[f.name])) for f in needed})


def _variants(first: Any, hints: dict[str, Any]) -> Iterator[Any]:
    for f in fields(first):
        for value in _values(hints[f.name]) if f.init else ():
            try:
                yield replace(first, **{f.name: value})
            except ValueError:  # a part's own checks
                continue


def _values(hint: Any) -> Iterator[Any]:
    for choice in get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,):
        held = next((r for r in REGISTRIES.values() if r.protocol is not None and r.protocol is choice), None)
        if held is not None:
            yield from every(held)
        elif is_dataclass(choice):
            yield from examples(choice)
        elif get_origin(choice) is Literal:
            yield from get_args(choice)
        elif get_origin(choice) is tuple:
            yield tuple(v for _ in range(2) for v in _values(get_args(choice)[0]))
        else:
            yield from {float: (0.375, 1e-7), int: (3,), bool: (True, False), type(None): (None,)}.get(choice, ())
