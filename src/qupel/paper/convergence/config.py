"""Strict configuration of `qupel theory`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from qupel.run.config import Strict, explain, read_toml
from qupel.util.errors import UserError

Rule = Literal["exact", "first_order", "paper"]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class ProblemConfig(Strict):
    """Digits of the first `classes` classes; F = f(x) + f(Q~_c(x)) + lam R(x, c), f = cross entropy + (mu/2) |x|^2."""

    classes: int = Field(4, ge=2, le=10)
    samples: int = Field(200, ge=1, description="training samples (a client)")
    features: int = Field(8, ge=1, le=60, description="whitened principal components of the images")
    hidden: tuple[Count, ...] = Field((), description="tanh units a layer; none: softmax regression")
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all weights")
    bits: int = Field(1, ge=1, le=8)
    P: float = Field(gt=0, description="steepness of the soft quantizer, constant")
    lam: float = Field(ge=0)
    mu: float = Field(ge=0)
    center_bound: float = Field(gt=0, description="|c| never exceeds it; the constants are made for it")
    points: int = Field(20, ge=1, description="random points at which a network's constants are estimated")
    safety: float = Field(2.0, ge=1, description="factor on those estimates")
    seed: int = Field(0, ge=0)


class Theorem1(Strict):
    """Algorithm 1 with Theorem 1's step sizes; the center prox in every way of `rules`."""

    theorem: Literal[1]
    steps: int = Field(10_000, ge=10)
    rules: tuple[Rule, ...] = ("exact", "first_order", "paper")
    problems: dict[str, ProblemConfig] = Field(min_length=1)


class Theorem2(Strict):
    """Algorithm 2 with Theorem 2's step sizes, once for every T in `steps` and every share of own data."""

    theorem: Literal[2]
    steps: tuple[Count, ...] = Field((16, 64, 256, 1024), min_length=2)
    tau: int = Field(4, ge=1)
    lambda_p: float = Field(gt=0)
    clients: int = Field(10, ge=2)
    shares: tuple[Share, ...] = Field((0.0, 0.25, 0.5, 0.75, 1.0), min_length=1)
    problem: ProblemConfig


TheoryConfig = Theorem1 | Theorem2


def load(path: Path) -> TheoryConfig:
    try:
        raw = read_toml(path.read_text(), path)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'not a text file'}") from None
    if raw.get("theorem") not in (1, 2):
        raise UserError(f"{path}: theorem = {raw.get('theorem')!r}; allowed are 1 and 2")
    try:
        adapter: TypeAdapter[TheoryConfig] = TypeAdapter(Theorem1 if raw["theorem"] == 1 else Theorem2)
        return adapter.validate_json(json.dumps(raw, default=str))
    except ValidationError as e:
        raise UserError(f"{path}: {explain(e)}") from None
