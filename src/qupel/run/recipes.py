"""Recipes: from a few settings to the phases of a run. Anything a recipe makes can also be written out as phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qupel.core.optim import SGD, Adam, Optimizer
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.parts.methods import methods
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.hedged import Hedged
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers import Quantizer, quantizers
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.parts.quantizers.ste import StraightThrough
from qupel.parts.servers import Server, servers
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.parts.servers.mean import Mean
from qupel.util.errors import UserError
from qupel.util.registry import Registry


@dataclass(frozen=True)
class Length:
    """How long a run is: rounds of `local_steps` steps, `epoch_steps` of which make an epoch."""

    rounds: int
    local_steps: int
    epoch_steps: float

    def epochs(self, rounds: int) -> float:
        return rounds * self.local_steps / self.epoch_steps


class Settings(BaseModel):
    """What recipes are made of. The defaults are what was found best on validation data (docs/results).

    >>> import qupel
    >>> qupel.Settings(eta1=0.05, finetune=0.2).eta1
    0.05
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # the x step
    eta1: float = Field(0.1, gt=0, description="step size of the model")
    eta1_decay: float = Field(1.0, gt=0, le=1, description="factor on eta1 per epoch")
    eta1_cosine: bool = Field(True, description="eta1 falls to 0 along a half cosine over the whole run")
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    weight_decay: float = Field(0.0, ge=0, description="of x only")
    # weights meet centers
    travel: float | None = Field(1.0, ge=0, description="total prox travel in half-gaps; or give lambda_growth")
    lambda_growth: float | None = Field(None, ge=0, description="lambda(t) = lambda_growth * epoch, as in the paper")
    mode: Literal["hard", "soft"] = "hard"
    sharpness: float = Field(8.0, gt=0, description="P times the gap between centers, soft mode")
    # centers
    eta2: float | None = Field(None, ge=0, description="step size of the centers; none: that of the model")
    eta2_drops: tuple[int, ...] = Field((), description="epochs after which eta2 falls tenfold")
    center_gradient: Literal["sum", "mean"] = "mean"
    clip: float | None = Field(None, gt=0, description="bound on every center gradient")
    follow: float | None = Field(0.05, ge=0, description="center prox in half-gaps a step; none: the paper's lambda")
    rule: Literal["exact", "first_order", "paper"] = Field("exact", description="the center prox")
    init: Literal["paper", "range", "kmeans", "quantile"] = "kmeans"
    carry: bool = Field(False, description="weights on a center move with it")
    scale: Literal["layer", "one"] = Field("layer", description="ProxQuant's centers at 1 bit: ± mean |x| or ± 1")
    # the federation
    lambda_p: float = Field(2.0, ge=0, description="pull between personal and global model")
    coupling: float = Field(0.125, ge=0, description="eta3 * lambda_p, the share of x that enters w a step")
    let_go: bool = Field(True, description="lambda_p falls to 0 along a half cosine after the warm-up")
    as_printed: bool = Field(False, description="the w step and the synchronization as the paper prints them")
    # sharing that knows when to stop (recipes qupel and local)
    server_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the server while w is shared")
    fails: float = Field(0.8, ge=0, description="a client is alone where w keeps more than this of its first loss")
    alone_eta1: float = Field(0.003, gt=0, description="step size of Adam for a model that is trained alone")
    prior: float = Field(0.5, ge=0, description="pseudo-counts of the label prior of personal models; 0: none")
    # phases, as shares of the rounds
    warmup: float = Field(0.8, ge=0, lt=1, description="full precision first")
    shared_levels: float = Field(0.2, ge=0, lt=1, description="then quantized while still shared")
    finetune: float = Field(0.1, ge=0, lt=1, description="fixed assignments last")

    def x_optimizer(self) -> Optimizer:
        if self.optimizer == "adam":
            return Adam(weight_decay=self.weight_decay)
        return SGD(momentum=0.9 if self.optimizer == "momentum" else 0.0, weight_decay=self.weight_decay)

    def x_schedule(self, length: Length) -> Schedule:
        cosine = length.epochs(length.rounds) if self.eta1_cosine else 0
        return Schedule(self.eta1, decay=self.eta1_decay, cosine=cosine)

    def center_schedule(self, length: Length) -> Schedule:
        """With the mean gradient and the model's own schedule a center moves as its average weight would."""
        return self.x_schedule(length) if self.eta2 is None else Schedule(self.eta2, drops=self.eta2_drops)

    def alone_schedule(self, length: Length) -> Schedule:
        return replace(self.x_schedule(length), start=self.alone_eta1)

    def straight(self, levels: Schedule, length: Length, done: int) -> StraightThrough:
        return StraightThrough(levels.later(length.epochs(done)), init=self.init)

    def fixed(self, levels: Schedule, length: Length, done: int) -> Frozen:
        return Frozen(levels.later(length.epochs(done)), self.center_gradient, self.clip)

    def pull(self) -> Schedule | Travel:
        if self.lambda_growth is not None:
            return Schedule(growth=self.lambda_growth)
        return Travel(self.travel or 0.0)

    def steps_per_round(self, tau: int) -> int:
        """The paper's listing synchronizes instead of stepping when tau divides t: tau - 1 steps a round."""
        return tau - 1 if self.as_printed else tau

    def tie(self, rounds: int, length: Length) -> Schedule:
        """lambda_p over the last `rounds` rounds of a run."""
        return Schedule(self.lambda_p, cosine=length.epochs(rounds) if self.let_go else 0)

    def learned_centers(self, eta2: Schedule) -> Prox:
        return Prox(
            eta2=eta2,
            lam=self.pull(),
            lam_c=None if self.follow is None else Follow(self.follow),
            mode=self.mode,
            sharpness=self.sharpness,
            rule=self.rule,
            center_gradient=self.center_gradient,
            clip=self.clip,
            carry=self.carry,
            init=self.init,
        )


def split_rounds(s: Settings, b: Length) -> tuple[int, int, int]:
    """Rounds of warm-up, main phase and fine-tuning."""
    first = round(s.warmup * b.rounds)
    last = round(s.finetune * b.rounds)
    if first + last >= b.rounds:
        raise UserError(f"warmup {s.warmup} and finetune {s.finetune} leave no round of {b.rounds} to the main phase")
    return first, b.rounds - first - last, last


def _tail(s: Settings, b: Length, done: int, rounds: int, tie: Schedule | None, eta2: Schedule) -> list[Phase]:
    """The fine-tuning phase, its schedules going on where the phase before it stopped."""
    if rounds == 0:
        return []
    epochs = b.epochs(done)
    eta1, optimizer = s.x_schedule(b).later(epochs), s.x_optimizer()
    frozen = Frozen(eta2.later(epochs), s.center_gradient, s.clip)
    if tie is None:
        return [Phase(Local(eta1, optimizer, frozen), rounds)]
    method = QuPeL(eta1, lambda_p=tie, coupling=s.coupling, optimizer=optimizer, quantizer=frozen, enters="free")
    return [Phase(method, rounds)]


def stages(rounds: int, *shares: float) -> list[int]:
    """Rounds of each stage and of the last but one, which has what the shares leave and at least one round.

    >>> stages(30, 0.5, 0.2, 0.1), stages(1, 0.5, 0.2, 0.1)
    ([15, 6, 6, 3], [0, 0, 1, 0])
    """
    if sum(shares) >= 1:
        raise UserError(f"shares of the rounds {', '.join(map(str, shares))} leave none to the personal phase")
    *first, last = (int(share * rounds + 0.5) for share in shares)
    first = [max(0, min(n, rounds - 1 - sum(first[:k]))) for k, n in enumerate(first)]
    last = min(last, rounds - 1 - sum(first))
    return [*first, rounds - sum(first) - last, last]


def qupel(s: Settings, b: Length) -> list[Phase]:
    """Shared with server momentum, beside a model of one's own; quantized while shared among those whom that helps;
    then personal, with the pull to w and the client's label prior; then fine-tuning."""
    first, shared, own, last = stages(b.rounds, s.warmup, s.shared_levels, s.finetune)
    eta1, alone, levels = s.x_schedule(b), s.alone_schedule(b), s.center_schedule(b)
    server: Server = FedAvgM(s.server_momentum, nesterov=True) if s.server_momentum else Mean()

    def method(stage: Literal["both", "chosen", "own"], done: int, quantizer: Quantizer) -> Hedged:
        rate, alone_rate = (f.later(b.epochs(done)) for f in (eta1, alone))
        tie = s.tie(own + last, b).later(b.epochs(done - first - shared)) if stage == "own" else Schedule()
        return Hedged(stage, rate, s.x_optimizer(), alone_rate, Adam(), tie, s.fails, quantizer)

    return [
        Phase(method("both", 0, NoQuantizer()), first, server),
        Phase(method("chosen", first, s.straight(levels, b, first)), shared, server),
        Phase(method("own", first + shared, s.straight(levels, b, first + shared)), own, prior=s.prior),
        Phase(method("own", b.rounds - last, s.fixed(levels, b, b.rounds - last)), last, prior=s.prior),
    ]


def local(s: Settings, b: Length) -> list[Phase]:
    """What `qupel` is for those who are alone: Adam at full precision, then straight through, then fine-tuning."""
    first, shared, own, last = stages(b.rounds, s.warmup, s.shared_levels, s.finetune)
    alone, levels = s.alone_schedule(b), s.center_schedule(b)

    def phase(done: int, rounds: int, quantizer: Quantizer) -> Phase:
        return Phase(Local(alone.later(b.epochs(done)), Adam(), quantizer), rounds)

    straight = s.straight(levels, b, first)
    fixed = s.fixed(levels, b, b.rounds - last)
    return [
        phase(0, first, NoQuantizer()),
        phase(first, shared + own, straight),
        phase(b.rounds - last, last, fixed),
    ]


def qupel_prox(s: Settings, b: Length) -> list[Phase]:
    """FedAvg warm-up (if any), then QuPeL, then fine-tuning."""
    first, main, last = split_rounds(s, b)
    eta1, eta2, skipped = s.x_schedule(b), s.center_schedule(b), b.epochs(first)
    phases = [Phase(FedAvg(eta1=eta1, optimizer=s.x_optimizer()), first)] if first else []
    tie = s.tie(main + last, b)
    method = QuPeL(
        eta1=eta1.later(skipped),
        lambda_p=tie,
        coupling=s.coupling,
        optimizer=s.x_optimizer(),
        quantizer=s.learned_centers(eta2.later(skipped)),
        as_printed=s.as_printed,
    )
    return [*phases, Phase(method, main), *_tail(s, b, first + main, last, tie.later(b.epochs(main)), eta2)]


def local_prox(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then Algorithm 1 at each client, then fine-tuning; plain training for 32 bits."""
    first, main, last = split_rounds(s, b)
    eta1, eta2, skipped = s.x_schedule(b), s.center_schedule(b), b.epochs(first)
    method = Local(
        eta1=eta1.later(skipped), optimizer=s.x_optimizer(), quantizer=s.learned_centers(eta2.later(skipped))
    )
    return [*_alone(s, b, first), Phase(method, main), *_tail(s, b, first + main, last, None, eta2)]


def _alone(s: Settings, b: Length, rounds: int) -> list[Phase]:
    """Plain training at full precision, the warm-up of methods that do not communicate."""
    plain = Local(eta1=s.x_schedule(b), optimizer=s.x_optimizer(), quantizer=NoQuantizer())
    return [Phase(plain, rounds)] if rounds else []


def fedavg(s: Settings, b: Length) -> list[Phase]:
    """FedAvg all the way."""
    return [Phase(FedAvg(eta1=s.x_schedule(b), optimizer=s.x_optimizer()), b.rounds)]


def fedavg_finetune(s: Settings, b: Length) -> list[Phase]:
    """FedAvg, then local steps at full precision for the `finetune` share of the rounds."""
    last = round(s.finetune * b.rounds)
    tuning = Local(s.x_schedule(b).later(b.epochs(b.rounds - last)), s.x_optimizer())
    shared = FedAvg(eta1=s.x_schedule(b), optimizer=s.x_optimizer())
    return [Phase(shared, b.rounds - last), Phase(tuning, last, prior=s.prior)]


def proxquant(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then ProxQuant, then fine-tuning of what is not quantized."""
    first, main, last = split_rounds(s, b)
    eta1 = s.x_schedule(b).later(b.epochs(first))
    quantizer = ProxQuant(lam=s.pull(), scale=s.scale, init=s.init)
    method = Local(eta1=eta1, optimizer=s.x_optimizer(), quantizer=quantizer)
    return [*_alone(s, b, first), Phase(method, main), *_tail(s, b, first + main, last, None, Schedule())]


def binaryrelax(s: Settings, b: Length) -> list[Phase]:
    """Full precision first, then BinaryRelax: relaxed, and hard for the `finetune` share of the rounds."""
    first, main, last = split_rounds(s, b)
    eta1, optimizer = s.x_schedule(b), s.x_optimizer()
    relaxed = Local(eta1.later(b.epochs(first)), optimizer, BinaryRelax())
    hard = Local(eta1.later(b.epochs(first + main)), optimizer, BinaryRelax(lam=Schedule(math.inf)))
    return [*_alone(s, b, first), Phase(relaxed, main), *([Phase(hard, last)] if last else [])]


def _posttraining(init: Literal["range", "kmeans"]) -> Callable[[Settings, Length], list[Phase]]:
    def recipe(s: Settings, b: Length) -> list[Phase]:
        return [Phase(Local(s.x_schedule(b), s.x_optimizer(), Afterwards(init)), b.rounds)]

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
    given: dict[str, Any] = {"eta1": settings.x_schedule(length), "optimizer": settings.x_optimizer()}
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
_PAPER |= {"eta1": 0.1, "eta1_cosine": False, "eta1_decay": 0.99, "weight_decay": 1e-4, "coupling": 0.125}
_PAPER |= {"let_go": False, "init": "paper", "center_gradient": "sum", "follow": None, "warmup": 0.0, "finetune": 1 / 7}

# Training in one place (Table 1); lambda_p and coupling have no meaning there.
_PAPER_TRAINING = _PAPER | {"optimizer": "adam", "eta1": 0.01, "eta1_decay": 1.0, "weight_decay": 0.0}
_PAPER_TRAINING |= {"lambda_growth": 1e-4, "eta2_drops": (80, 140), "finetune": 1 / 3}
_PRINTED = _PAPER | {"rule": "paper", "as_printed": True}

_ALONE: dict[str, object] = {"warmup": 0.5}

_TUNING: dict[str, object] = {"prior": 0.0}  # the usual one; it may be given
_SHARED: dict[str, object] = {"warmup": 0.5, "lambda_p": 0.2}

_recipe(
    "qupel",
    "QuPeL as we run it: shared, quantized while shared, personal; alone where that is better",
    qupel,
    _SHARED,
)
_recipe("local", "each client alone, straight through (bits = 32: plain training)", local, _ALONE)
_recipe("qupel-prox", "FedAvg, then QuPeL by proximal steps, then fine-tuning", qupel_prox)
_recipe("local-prox", "Algorithm 1 at each client alone (bits = 32: plain training)", local_prox, _ALONE)
_recipe("qupel-corrected", "QuPeL with the paper's settings and corrected signs", qupel_prox, _PAPER, fixed=True)
_recipe("qupel-paper", "QuPeL exactly as printed, wrong signs included", qupel_prox, _PRINTED, fixed=True)
_recipe("local-corrected", "Algorithm 1 at each client with the paper's settings", local_prox, _PAPER, fixed=True)
_recipe("training-corrected", "Algorithm 1 as in Table 1 of the paper", local_prox, _PAPER_TRAINING, fixed=True)
_recipe("fedavg", "one shared full-precision model", fedavg, bits=32)
_recipe("fedavg-finetune", "FedAvg, then local steps at full precision", fedavg_finetune, _TUNING, bits=32)
_recipe("proxquant", "ProxQuant: weights pulled to fixed centers", proxquant, _ALONE)
_recipe("binaryrelax", "BinaryRelax: a latent model slides to its quantization", binaryrelax, _ALONE)
_recipe("ptq-range", "post-training: nearest point of a min-max grid", _posttraining("range"))
_recipe("ptq-kmeans", "post-training: k-means centers", _posttraining("kmeans"))
