"""Recipes: from a few settings to the phases of a run. Anything a recipe makes can also be written out as phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from qupel.core.optim import SGD, Adam, Optimizer
from qupel.core.schedule import Schedule
from qupel.parts.methods import methods
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.hedged import Hedged
from qupel.parts.methods.local import Local
from qupel.parts.methods.quped import QuPeD
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers import Quantizer, quantizers
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.parts.servers import servers
from qupel.run.settings import Length, Settings, split_rounds, stages
from qupel.util.errors import UserError
from qupel.util.registry import Registry


def _tail(s: Settings, b: Length, done: int, rounds: int, tie: Schedule | None, eta2: Schedule) -> list[Phase]:
    """The fine-tuning phase, its schedules going on where the phase before it stopped."""
    if rounds == 0:
        return []
    epochs = b.epochs(done)
    eta1, optimizer = s.x_schedule(b).later(epochs), s.x_optimizer(b)
    frozen = Frozen(eta2.later(epochs), s.center_gradient, s.clip)
    if tie is None:
        return [Phase(Local(eta1, optimizer, frozen), rounds)]
    method = QuPeL(eta1, lambda_p=tie, coupling=s.coupling, optimizer=optimizer, quantizer=frozen, enters="free")
    return [Phase(method, rounds)]


def qupel(s: Settings, b: Length) -> list[Phase]:
    """Shared with server momentum, beside a model of one's own; the same quantized, and who is better alone is asked;
    then personal, with the pull to w and the client's label prior; then fine-tuning."""
    first, shared, own, last = stages(s, b.rounds)
    asked = min(shared, 2) if s.held else 0
    eta1, alone, levels = s.x_schedule(b), s.alone_schedule(b), s.center_schedule(b)

    def method(stage: Literal["both", "asked", "own"], done: int, quantizer: Quantizer) -> Hedged:
        rate, alone_rate = (f.later(b.epochs(done)) for f in (eta1, alone))
        tie = s.tie(own + last, b).later(b.epochs(done - first - shared)) if stage == "own" else Schedule()
        return Hedged(stage, rate, s.x_optimizer(b), alone_rate, Adam(), tie, quantizer)

    ask, hand_over, tune = first + shared - asked, first + shared, b.rounds - last
    return [
        Phase(method("both", 0, NoQuantizer()), first, s.w_server(), held=s.held),
        Phase(method("both", first, s.meeting(levels, b, first)), shared - asked, s.w_server(), held=s.held),
        Phase(method("asked", ask, s.meeting(levels, b, ask)), asked, s.w_server()),
        Phase(method("own", hand_over, s.meeting(levels, b, hand_over)), own, prior=s.prior),
        Phase(method("own", tune, s.fixed(levels, b, tune)), last, prior=s.prior),
    ]


def local(s: Settings, b: Length) -> list[Phase]:
    """What `qupel` is for those who are alone: Adam at full precision, then straight through, then fine-tuning."""
    first, shared, own, last = stages(s, b.rounds)
    alone, levels = s.alone_schedule(b), s.center_schedule(b)

    def phase(done: int, rounds: int, quantizer: Quantizer) -> Phase:
        return Phase(Local(alone.later(b.epochs(done)), Adam(), quantizer), rounds)

    return [
        phase(0, first, NoQuantizer()),
        phase(first, shared + own, s.meeting(levels, b, first)),
        phase(b.rounds - last, last, s.fixed(levels, b, b.rounds - last)),
    ]


def quped(s: Settings, b: Length) -> list[Phase]:
    """`qupel` for clients with networks of their own: taught by w, which learns beside them, and shared with those who
    have the same network; quantized the same way; then personal, with the client's label prior. `share = "nothing"`:
    Adam, as for all that is trained alone."""
    if s.lambda_p > 1:
        raise UserError(f"lambda_p = {s.lambda_p}: of quped it is a share, allowed are 0 to 1")
    first, shared, own, last = stages(s, b.rounds)
    alone = s.share == "nothing"
    eta1, levels = s.alone_schedule(b) if alone else s.x_schedule(b), s.center_schedule(b)
    optimizer: Optimizer = Adam() if alone else s.x_optimizer(b)

    def taught(done: int, quantizer: Quantizer) -> QuPeD:
        x, w = (f.later(b.epochs(done)) for f in (eta1, s.x_schedule(b)))
        how = QuPeD(x, w, Schedule(s.lambda_p), s.reading, s.temperature, share=s.share, pull=1.0)
        return replace(how, optimizer=optimizer, quantizer=quantizer)

    def personal(done: int, quantizer: Quantizer) -> Local:
        return Local(eta1.later(b.epochs(done)), optimizer, quantizer)

    at, end = first + shared, b.rounds - last
    return [
        Phase(taught(0, NoQuantizer()), first, s.w_server()),
        Phase(taught(first, s.meeting(levels, b, first)), shared, s.w_server()),
        Phase(personal(at, s.meeting(levels, b, at)), own, prior=s.prior),
        Phase(personal(end, s.fixed(levels, b, end)), last, prior=s.prior),
    ]


def qupel_prox(s: Settings, b: Length) -> list[Phase]:
    """FedAvg warm-up (if any), then QuPeL, then fine-tuning."""
    first, main, last = split_rounds(s, b)
    eta1, eta2, skipped = s.x_schedule(b), s.center_schedule(b), b.epochs(first)
    phases = [Phase(FedAvg(eta1=eta1, optimizer=s.x_optimizer(b)), first)] if first else []
    tie = s.tie(main + last, b)
    method = QuPeL(
        eta1=eta1.later(skipped),
        lambda_p=tie,
        coupling=s.coupling,
        optimizer=s.x_optimizer(b),
        quantizer=s.learned_centers(eta2.later(skipped)),
        as_printed=s.as_printed,
    )
    return [*phases, Phase(method, main), *_tail(s, b, first + main, last, tie.later(b.epochs(main)), eta2)]


def local_prox(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then Algorithm 1 at each client, then fine-tuning; plain training for 32 bits."""
    first, main, last = split_rounds(s, b)
    eta1, eta2, skipped = s.x_schedule(b), s.center_schedule(b), b.epochs(first)
    method = Local(
        eta1=eta1.later(skipped), optimizer=s.x_optimizer(b), quantizer=s.learned_centers(eta2.later(skipped))
    )
    return [*_alone(s, b, first), Phase(method, main), *_tail(s, b, first + main, last, None, eta2)]


def _alone(s: Settings, b: Length, rounds: int) -> list[Phase]:
    """Plain training at full precision, the warm-up of methods that do not communicate."""
    plain = Local(eta1=s.x_schedule(b), optimizer=s.x_optimizer(b), quantizer=NoQuantizer())
    return [Phase(plain, rounds)] if rounds else []


def fedavg(s: Settings, b: Length) -> list[Phase]:
    """FedAvg all the way."""
    return [Phase(FedAvg(eta1=s.x_schedule(b), optimizer=s.x_optimizer(b)), b.rounds)]


def fedavg_finetune(s: Settings, b: Length) -> list[Phase]:
    """FedAvg, then local steps at full precision for the `finetune` share of the rounds."""
    last = round(s.finetune * b.rounds)
    tuning = Local(s.x_schedule(b).later(b.epochs(b.rounds - last)), s.x_optimizer(b))
    shared = FedAvg(eta1=s.x_schedule(b), optimizer=s.x_optimizer(b))
    return [Phase(shared, b.rounds - last), Phase(tuning, last, prior=s.prior)]


def proxquant(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then ProxQuant, then fine-tuning of what is not quantized."""
    first, main, last = split_rounds(s, b)
    eta1 = s.x_schedule(b).later(b.epochs(first))
    quantizer = ProxQuant(lam=s.pull(), scale=s.scale, init=s.init)
    method = Local(eta1=eta1, optimizer=s.x_optimizer(b), quantizer=quantizer)
    return [*_alone(s, b, first), Phase(method, main), *_tail(s, b, first + main, last, None, Schedule())]


def binaryrelax(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then BinaryRelax: relaxed, and hard for the `finetune` share of the rounds."""
    first, main, last = split_rounds(s, b)
    eta1, optimizer = s.x_schedule(b), s.x_optimizer(b)
    relaxed = Local(eta1.later(b.epochs(first)), optimizer, BinaryRelax())
    hard = Local(eta1.later(b.epochs(first + main)), optimizer, BinaryRelax(lam=Schedule(math.inf)))
    return [*_alone(s, b, first), Phase(relaxed, main), *([Phase(hard, last)] if last else [])]


def _posttraining(init: Literal["range", "kmeans"]) -> Callable[[Settings, Length], list[Phase]]:
    def recipe(s: Settings, b: Length) -> list[Phase]:
        return [Phase(Local(s.x_schedule(b), s.x_optimizer(b), Afterwards(init)), b.rounds)]

    return recipe


@dataclass(frozen=True)
class Recipe:
    """Phases from settings, the settings that belong to it, and what it is."""

    phases: Callable[[Settings, Length], list[Phase]]
    about: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: bool = False  # a published setting: only the method's own table changes it, not [settings]
    bits: int | None = None  # the clients' bits unless its own are given; none: those of the run


recipes: Registry[Recipe] = Registry("recipe")


def compose(method: str | dict[str, Any], quantizer: Any, server: Any, settings: Settings, length: Length) -> Phase:
    """One method for all rounds, with a quantizer and a server; what its table leaves out comes from the settings."""
    table = {"name": method} if isinstance(method, str) else dict(method)
    made: Any = methods.build(table, "method")
    own = {f.name for f in fields(made)} - set(table)
    if quantizer is not None and "quantizer" not in own:
        why = "has one in its table" if "quantizer" in table else "has no field for one"
        raise UserError(f"quantizer: method {table['name']} {why}")
    given: dict[str, Any] = {"eta1": settings.x_schedule(length), "optimizer": settings.x_optimizer(length)}
    fill = {k: v for k, v in given.items() if k in own and isinstance(getattr(made, k), Schedule | SGD | Adam)}
    if quantizer is not None:
        fill["quantizer"] = quantizers.build(quantizer, "quantizer")
    return Phase(replace(made, **fill), length.rounds, servers.build(server or "mean", "server"))


def find(name: str) -> Recipe:
    """A recipe by its name; a function of your own, "module:name", is one without defaults."""
    found: Any = recipes[name]
    return found if isinstance(found, Recipe) else Recipe(found)


def _recipe(
    name: str,
    about: str,
    phases: Callable[[Settings, Length], list[Phase]],
    defaults: Mapping[str, object] = MappingProxyType({}),
    *,
    fixed: bool = False,
    bits: int | None = None,
) -> None:
    recipes.register(name, about=about)(Recipe(phases, about, defaults, fixed, bits))


_PAPER: dict[str, object] = {
    "travel": None,
    "lambda_growth": 1e-6,
    "eta2": 1e-4,
    "eta2_drops": (120, 180),
    "lambda_p": 0.025,
}
_PAPER |= {"optimizer": "sgd", "gradient_clip": None}
_PAPER |= {"eta1": 0.1, "eta1_cosine": False, "eta1_decay": 0.99, "weight_decay": 1e-4, "coupling": 0.125}
_PAPER |= {"let_go": False, "init": "paper", "center_gradient": "sum", "follow": None, "warmup": 0.0, "finetune": 1 / 7}

# Training in one place (Table 1); lambda_p and coupling have no meaning there.
_PAPER_TRAINING = _PAPER | {"optimizer": "adam", "eta1": 0.01, "eta1_decay": 1.0, "weight_decay": 0.0}
_PAPER_TRAINING |= {"lambda_growth": 1e-4, "eta2_drops": (80, 140), "finetune": 1 / 3}
_PRINTED = _PAPER | {"rule": "paper", "as_printed": True}

_PROX: dict[str, object] = {"optimizer": "sgd", "gradient_clip": None}  # as they were published
_ALONE: dict[str, object] = {"warmup": 0.5} | _PROX
_TAUGHT: dict[str, object] = {"lambda_p": 0.3}

_TUNING: dict[str, object] = {"prior": 0.0}  # the usual one; it may be given
_SHARED: dict[str, object] = {"lambda_p": 0.2}

_recipe("qupel", "QuPeL as we run it: shared, quantized while shared, personal; alone where better", qupel, _SHARED)
_recipe("local", "each client alone, straight through (bits = 32: plain training)", local)
_recipe("qupel-prox", "FedAvg, then QuPeL by proximal steps, then fine-tuning", qupel_prox, _PROX)
_recipe("local-prox", "Algorithm 1 at each client alone (bits = 32: plain training)", local_prox, _ALONE)
_recipe("qupel-corrected", "QuPeL with the paper's settings and corrected signs", qupel_prox, _PAPER, fixed=True)
_recipe("qupel-paper", "QuPeL exactly as printed, wrong signs included", qupel_prox, _PRINTED, fixed=True)
_recipe("local-corrected", "Algorithm 1 at each client with the paper's settings", local_prox, _PAPER, fixed=True)
_recipe("training-corrected", "Algorithm 1 as in Table 1 of the paper", local_prox, _PAPER_TRAINING, fixed=True)
_recipe("quped", "QuPeD: clients with networks of their own, tied by what they predict", quped, _TAUGHT)
_recipe("fedavg", "one shared full-precision model", fedavg, bits=32)
_recipe("fedavg-finetune", "FedAvg, then local steps at full precision", fedavg_finetune, _TUNING, bits=32)
_recipe("proxquant", "ProxQuant: weights pulled to fixed centers", proxquant, _ALONE)
_recipe("binaryrelax", "BinaryRelax: a latent model slides to its quantization", binaryrelax, _ALONE)
_recipe("ptq-range", "post-training: nearest point of a min-max grid", _posttraining("range"), _PROX)
_recipe("ptq-kmeans", "post-training: k-means centers", _posttraining("kmeans"), _PROX)
