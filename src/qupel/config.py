"""Strict configuration: an unknown key, a wrong type or an impossible value is an error that names key, value and what
is allowed. A file of a few lines is enough; everything has a default."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from qupel import models
from qupel.algorithms import (
    AnyMethod,
    BinaryRelax,
    FedAvg,
    FineTune,
    Local,
    PostTraining,
    ProxQuant,
    Quantizer,
    QuPeL,
)
from qupel.deploy.budget import parse_size
from qupel.errors import UserError
from qupel.optim import SGD, Adam
from qupel.recipes import RECIPES, Settings
from qupel.schedule import Follow, Schedule, Travel

# The methods' own dataclasses are their schema: one home for a setting's name, type and default.
_STRICT = {"extra": "forbid", "strict": True}
_SCHEMA: tuple[type, ...] = (QuPeL, Local, FedAvg, FineTune, ProxQuant, BinaryRelax, PostTraining)
for _cls in (*_SCHEMA, Quantizer, SGD, Adam, Schedule, Travel, Follow):
    setattr(_cls, "__pydantic_config__", _STRICT)  # noqa: B010 - the classes themselves need not know pydantic

_SCHEDULES = {"eta1", "eta2", "eta3", "lam", "lam_c", "lambda_p"}

_BRANCHES = {"constrained-int", "str", *(c.__name__ for c in (SGD, Adam, Schedule, Travel, Follow))}

_DEEP = "tables or lists in one another, deeper than any setting is"

Bits = Annotated[int, Field(ge=1, le=32)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Strict):
    name: str = "digits"
    folder: Path | None = None
    augment: bool = False
    limit: int | None = Field(None, ge=1, description="use only the first samples of each split")


class SplitConfig(Strict):
    kind: Literal["classes", "dirichlet", "iid", "groups", "one"] = "classes"
    clients: int = Field(20, ge=1)
    classes: int = Field(4, ge=1, description="classes a client, kind = classes")
    alpha: float = Field(0.5, gt=0, description="kind = dirichlet")
    train_per_client: int | None = Field(None, ge=1)
    test_per_client: int | None = Field(None, ge=1)
    validation: float = Field(0.0, ge=0, lt=1, description="share of each client's training data held out")


class ModelConfig(Strict):
    name: str = "digits_cnn"
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all but the first and the last")
    start: Path | None = Field(None, description="a packed model file to start from (warm start)")

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_model(value)


class PhaseConfig(Strict):
    rounds: int = Field(ge=0)
    method: Annotated[AnyMethod, Field(discriminator="method")]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """{rounds, method = "qupel", eta1 = 0.1, ...} -> {rounds, method: {...}}; a number is a constant schedule."""
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("method"), dict):  # as a config is written out
            return {**value, "method": _constants(value["method"])}
        rest = {k: v for k, v in value.items() if k != "rounds"}
        head = {"rounds": value["rounds"]} if "rounds" in value else {}
        return {**head, "method": _constants(rest)}


def _constants(table: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out[key] = _constants(value)
        elif key in _SCHEDULES and isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = {"start": value}
        elif isinstance(value, list):
            out[key] = tuple(value)  # what stands behind this step is strict about the difference
        else:
            out[key] = value
    return out


class MethodConfig(Settings):
    """A recipe with its settings, or phases written out."""

    model_config = ConfigDict(allow_inf_nan=False)

    recipe: str | None = None
    phases: tuple[PhaseConfig, ...] | None = None
    bits: Bits | tuple[Bits, ...] | None = Field(None, description="in place of the run's bits")
    model: str | None = Field(None, description="in place of the run's model.name")

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str | None) -> str | None:
        return None if value is None else check_model(value)

    @field_validator("recipe")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in RECIPES:
            raise ValueError(f"unknown recipe {value!r}; allowed: {', '.join(RECIPES)}")
        return value

    @field_validator("bits")
    @classmethod
    def _bits(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        if value is not None:
            check_bits(value)
        return value


class Config(Strict):
    """A whole experiment: data, clients, model, budget, and the methods to compare on the same seeds."""

    seeds: tuple[int, ...] = (0,)
    data: DataConfig = DataConfig()
    split: SplitConfig = SplitConfig()
    model: ModelConfig = ModelConfig()
    bits: Bits | tuple[Bits, ...] | Literal["auto"] = Field(
        (2, 3), description="per client, repeated as needed; 32: full precision; auto: what fits the budget"
    )
    budget: str | tuple[str, ...] | None = Field(None, description='bytes a client\'s file may have, e.g. "24 KiB"')
    rounds: int = Field(30, ge=1)
    local_steps: int = Field(10, ge=1, description="tau, the steps between two synchronizations")
    batch: int = Field(20, ge=1)
    sample: float = Field(1.0, gt=0, le=1, description="share of the clients in a round")
    weighted: bool = Field(False, description="server mean weighted by training samples")
    evaluate_every: int = Field(10, ge=1)
    evaluate_sample: float = Field(1.0, gt=0, le=1, description="share of the clients judged; at a phase's end all")
    checkpoint_every: int = Field(0, ge=0, description="rounds; 0: with every evaluation")
    on_bad_upload: Literal["refuse", "stop"] = "refuse"
    store: Literal["memory", "disk"] = "memory"
    vectorize: Literal["auto", "on", "off"] = Field("auto", description="clients of a process trained in stacks")
    save_models: bool = True
    diagnostics: Literal["off", "cheap", "full"] = "off"
    methods: dict[str, MethodConfig]

    @field_validator("bits")
    @classmethod
    def _bits(cls, value: int | tuple[int, ...] | str) -> int | tuple[int, ...] | str:
        if not isinstance(value, str):
            check_bits(value)
        return value

    @model_validator(mode="after")
    def _budget(self) -> Config:
        if self.bits == "auto" and self.budget is None:
            raise ValueError('bits = "auto" needs a budget, e.g. budget = ["16 KiB", "24 KiB"]')
        for text in self.budgets():
            parse_size(text)
        return self

    def budgets(self) -> tuple[str, ...]:
        return (self.budget,) if isinstance(self.budget, str) else self.budget or ()

    @field_validator("seeds", "methods")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise ValueError("at least one is needed")
        return value


def check_model(name: str) -> str:
    if name not in models.AVAILABLE:
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(models.AVAILABLE)}")
    return name


def check_bits(value: int | Sequence[int]) -> None:
    if value == ():
        raise ValueError("at least one number of bits is needed")
    for b in [value] if isinstance(value, int) else value:
        if not (1 <= b <= 8 or b == 32):
            raise ValueError(f"bits = {b}: allowed are 1 to 8, and 32 for full precision")


def parse(text: str, where: str, overrides: Sequence[str] = (), defaults: dict[str, Any] | None = None) -> Config:
    """A config from TOML text, with `key.path=value` overrides; [settings] is shared by all methods."""
    raw = read_toml(text, where)
    for override in overrides:
        _set(raw, override)
    try:
        return validate(merge(defaults or {}, raw), where)
    except RecursionError:
        raise UserError(f"{where}: {_DEEP}") from None


def read_toml(text: str, where: object) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{where} is not TOML: {e}") from None
    except RecursionError:
        raise UserError(f"{where}: {_DEEP}") from None


def load(path: Path, overrides: Sequence[str] = (), defaults: dict[str, Any] | None = None) -> Config:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'not a text file'}") from None
    return parse(text, str(path), overrides, defaults)


def validate(raw: dict[str, Any], where: str) -> Config:
    raw = dict(raw)
    shared, methods = raw.pop("settings", {}), raw.get("methods", {})
    for key, table in (("settings", shared), ("methods", methods)):
        if not isinstance(table, dict):
            raise UserError(f"{where}: {key}: a table is needed, not {table!r}")
    merged = {}
    for name, method in methods.items():
        merged[name] = {**_base(method.get("recipe"), shared), **method} if isinstance(method, dict) else method
    if methods:
        raw["methods"] = merged
    try:
        # through JSON: strict about types, yet lists are tuples and strings are paths, as in TOML
        return Config.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as e:
        raise UserError(f"{where}: {explain(e)}") from None


def write(config: Config) -> str:
    """JSON of what was given, which `read` makes the same config of, infinite numbers included."""
    return json.dumps(config.model_dump(exclude_unset=True), default=str)


def read(text: str) -> Config:
    return Config.model_validate_json(text)


def _base(recipe: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """What a method's own table builds on: [settings] over a recipe's defaults, a published preset over [settings]."""
    if not isinstance(recipe, str) or recipe not in RECIPES:
        return shared
    found = RECIPES[recipe]
    return {**shared, **found.defaults} if found.fixed else {**found.defaults, **shared}


def _set(raw: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    if not found:
        raise UserError(f"--set {override!r}: expected key=value, e.g. --set split.clients=10")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except RecursionError:
        raise UserError(f"--set {path[:80]!r}: {_DEEP}") from None
    *parents, key = path.strip().split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise UserError(f"--set {override!r}: {parent} is not a table")
    raw[key] = value


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and key != "methods"
        out[key] = merge(out[key], value) if both else value
    return out


def explain(error: ValidationError) -> str:
    """The first problem in one line: where, what, and what is allowed."""
    first = error.errors()[0]
    where = _path(first["loc"])
    others = {_path(e["loc"]) for e in error.errors()} - {where}
    more = f" (and {len(others)} more)" if others else ""
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        key = str(first["loc"][-1])
        near = difflib.get_close_matches(key, sorted(_all_keys() - {key}), 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        if len(first["loc"]) == 1 and key in Settings.model_fields:
            hint = "; it belongs in [settings] or in a method"
        return f"{where}: unknown key {key!r}{hint}{more}"
    if first["type"] == "missing":
        return f"{where}: missing{more}"
    given = first.get("input")
    shown = "" if isinstance(given, dict) or first["type"] == "value_error" else f", not {given!r}"
    return f"{where}: {message[0].lower()}{message[1:]}{shown}{more}"


def _path(loc: tuple[int | str, ...]) -> str:
    """Where a problem is, in the words of the file: without what pydantic adds for the branches of a union."""
    path: list[str] = []
    for k, part in enumerate(loc):
        made = str(part) in _BRANCHES or "[" in str(part) or (k > 1 and loc[k - 1] == "method")
        if (k == 1 and loc[0] == "methods") or not made:
            path.append(str(part))
    return ".".join(path) or "config"


def _all_keys() -> set[str]:
    schema = TypeAdapter(Config).json_schema()
    tables = [schema, *schema.get("$defs", {}).values()]
    return {key for table in tables for key in table.get("properties", {})} | {"settings"}
