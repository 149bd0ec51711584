"""What recipes are made of: settings, the length of a run, and how its rounds are shared out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from qupel.core.optim import SGD, Adam, Optimizer
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.engine.job import Job
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.ste import StraightThrough
from qupel.parts.servers import Server
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.parts.servers.mean import Mean
from qupel.util.errors import UserError

LONG = 60  # rounds; in longer runs personal models are not trained longer than in these


# Layers whose gradients differ so much in size that plain SGD hardly trains them.
UNEVEN = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.LayerNorm)
ADAM_SHARE = 0.03  # of eta1, where Adam takes the place of SGD: 0.003 for 0.1


@dataclass(frozen=True)
class Length:
    """How long a run is: rounds of `local_steps` steps, `epoch_steps` of which make an epoch. uneven: of a network with
    layers that ask for Adam."""

    rounds: int
    local_steps: int
    epoch_steps: float
    uneven: bool = False

    @classmethod
    def of(cls, job: Job, rounds: int) -> Length:
        uneven = any(isinstance(layer, UNEVEN) for layer in job.module.modules())
        return cls(rounds, job.local_steps, job.steps_per_epoch, uneven)

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
    optimizer: Literal["auto", "sgd", "momentum", "adam"] = Field(
        "auto", description="auto: SGD; for text, recurrent layers and attention Adam with 0.03 eta1"
    )
    weight_decay: float = Field(0.0, ge=0, description="of x only")
    gradient_clip: float | None = Field(4.0, gt=0, description="SGD's gradients are at most so long")
    # weights meet centers
    passes: Literal[1, 2] = Field(1, description="a step: straight through, or proximal steps (recipes qupel, local)")
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
    share: Literal["architecture", "nothing"] = Field(
        "architecture", description="QuPeD: clients of one network are averaged until models become personal"
    )
    reading: Literal["distill", "mutual"] = Field("mutual", description="what w learns from in QuPeD (docs/method.md)")
    temperature: float = Field(1.0, gt=0, description="of QuPeD's distillation")
    as_printed: bool = Field(False, description="the w step and the synchronization as the paper prints them")
    # sharing that knows when to stop (recipes qupel and local)
    server_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the server while w is shared")
    held: float = Field(
        0.2, ge=0, lt=1, description="share of its samples beyond 10 by which a client chooses; 0: none goes alone"
    )
    alone_eta1: float = Field(0.003, gt=0, description="step size of Adam for a model that is trained alone")
    prior: float = Field(0.5, ge=0, description="pseudo-counts of the label prior of personal models; 0: none")
    # phases, as shares of the rounds
    warmup: float = Field(0.8, ge=0, lt=1, description="full precision first (recipes with prox, and others)")
    shared_levels: float = Field(0.2, ge=0, lt=1, description="quantized while shared (recipes qupel, local)")
    personal: float = Field(0.2, ge=0, le=1, description="then personal; of the first 60 rounds where there are more")
    finetune: float = Field(0.1, ge=0, lt=1, description="fixed assignments last")

    def x_optimizer(self, length: Length) -> Optimizer:
        if self.optimizer == "adam" or self._adam_instead(length):
            return Adam(weight_decay=self.weight_decay)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        return SGD(momentum=momentum, weight_decay=self.weight_decay, clip=self.gradient_clip)

    def _adam_instead(self, length: Length) -> bool:
        return self.optimizer == "auto" and length.uneven

    def x_schedule(self, length: Length) -> Schedule:
        return self._falling(self.eta1 * (ADAM_SHARE if self._adam_instead(length) else 1), length)

    def center_schedule(self, length: Length) -> Schedule:
        """With the mean gradient and the step size of SGD a center moves as its average weight would."""
        return self._falling(self.eta1, length) if self.eta2 is None else Schedule(self.eta2, drops=self.eta2_drops)

    def alone_schedule(self, length: Length) -> Schedule:
        return self._falling(self.alone_eta1, length)

    def _falling(self, start: float, length: Length) -> Schedule:
        return Schedule(start, decay=self.eta1_decay, cosine=length.epochs(length.rounds) if self.eta1_cosine else 0)

    def meeting(self, levels: Schedule, length: Length, done: int) -> StraightThrough | Prox:
        """How weights and levels meet from this round on: in one pass a step, or in the paper's two."""
        eta2 = levels.later(length.epochs(done))
        return StraightThrough(eta2, init=self.init) if self.passes == 1 else self.learned_centers(eta2)

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

    def w_server(self) -> Server:
        return FedAvgM(self.server_momentum, nesterov=True) if self.server_momentum else Mean()

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


def stages(s: Settings, rounds: int) -> tuple[int, int, int, int]:
    """Rounds of full precision, of levels while shared, of personal models and of fine-tuning: the last three by their
    shares of the rounds, or of the first 60 where there are more; the first has what is left.

    >>> [stages(Settings(), rounds) for rounds in (1, 10, 30, 150)]
    [(0, 0, 1, 0), (5, 2, 2, 1), (15, 6, 6, 3), (120, 12, 12, 6)]
    """
    if s.shared_levels + s.personal + s.finetune > 1:
        raise UserError("shared_levels, personal and finetune: together at most 1, the share of all rounds")
    shared, own, last = (int(share * min(rounds, LONG) + 0.5) for share in (s.shared_levels, s.personal, s.finetune))
    own = max(own, 1)
    last = min(last, rounds - own)
    shared = min(shared, rounds - own - last)
    return rounds - shared - own - last, shared, own, last
