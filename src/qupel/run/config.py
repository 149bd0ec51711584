"""Strict configuration: an unknown key, a wrong type or an impossible value is an error that names key, value and what
is allowed. A file of a few lines is enough; everything has a default."""

from __future__ import annotations

import difflib
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from qupel.deploy.budget import parse_size
from qupel.parts.phase import Phase, phase_from
from qupel.run.recipes import compose, find, recipes
from qupel.run.sections import (
    DataConfig,
    ModelConfig,
    Networks,
    PrivacyConfig,
    SecureConfig,
    SplitConfig,
    Strict,
    TaskConfig,
    check_model,
    check_networks,
)
from qupel.run.settings import Length, Settings
from qupel.util.errors import UserError

_BRANCHES = {"constrained-int", "str", "NetworkConfig"}  # what pydantic adds to a path for the choices of a union

_DEEP = "tables or lists in one another, deeper than any setting is"

Bits = Annotated[int, Field(ge=1, le=32)]


def _phases(value: Any) -> Any:
    """Tables -> phases."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"a list of tables is needed, not {value!r}")
    if not value:
        raise ValueError("at least one is needed")
    return tuple(p if isinstance(p, Phase) else phase_from(p, f"phase {k}") for k, p in enumerate(value, 1))


Phases = Annotated[
    tuple[InstanceOf[Phase], ...],
    BeforeValidator(_phases),
    PlainSerializer(lambda phases: [p.table() for p in phases]),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Part = str | dict[str, Any] | None  # a part's name, or a table of its settings with its `name`


class MethodConfig(Settings):
    """A recipe with its settings; or a method with a quantizer and a server of one's choice; or phases written out."""

    model_config = ConfigDict(allow_inf_nan=False)

    recipe: str | None = Field(None, description="a name of `qupel methods`; its settings stand beside it")
    method: Part = Field(None, description="one method for all rounds, in place of a recipe")
    quantizer: Part = Field(None, description="of that method")
    server: Part = Field(
        None, description="how uploads become the next w: of that method, or of a recipe's FedAvg phases"
    )
    phases: Phases | None = Field(None, description="methods one after another, each for some rounds")
    bits: Bits | tuple[Bits, ...] | None = Field(None, description="in place of the run's bits")
    model: str | None = Field(None, description="in place of the run's model.name")
    networks: Networks | None = Field(
        None,
        description="in place of the run's model.networks; [] where all have the shared one",
        exclude_if=lambda value: value is None,  # runs of before it was there have the same settings
    )
    of: str | None = Field(
        None,
        description="the label of a full-precision method: its finished models, quantized afterwards to these bits",
        exclude_if=lambda value: value is None,  # runs of before it was there have the same settings
    )
    afterwards: Literal["kmeans", "range", "quantile", "aciq"] | None = Field(
        None, description="how; by default k-means", exclude_if=lambda value: value is None
    )

    @model_validator(mode="after")
    def _one_way(self) -> MethodConfig:
        ways = [name for name in ("recipe", "method", "phases") if getattr(self, name) is not None]
        if len(ways) != 1:
            raise ValueError("give either recipe, or method, or phases")
        if self.method is None and self.quantizer is not None:
            raise ValueError(f"quantizer goes with method; {ways[0]} has its own")
        if self.phases is not None and self.server is not None:
            raise ValueError("server goes with method or recipe; phases have their own")
        if self.afterwards is not None and self.of is None:
            raise ValueError("afterwards goes with `of`, the method whose models are quantized")
        if self.method is not None:
            compose(self.method, self.quantizer, self.server, self, Length(1, 1, 1))  # its mistakes are found here
        return self

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str | None) -> str | None:
        return None if value is None else check_model(value)

    @field_validator("networks")
    @classmethod
    def _known_networks(cls, value: Networks | None) -> Networks | None:
        return check_networks(value)

    @field_validator("recipe")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None:
            find(value)
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
    task: TaskConfig = TaskConfig()
    bits: Bits | tuple[Bits, ...] | Literal["auto"] = Field(
        (2, 3), description="per client, repeated as needed; 32: full precision; auto: what fits the budget"
    )
    budget: str | tuple[str, ...] | None = Field(None, description='bytes a client\'s file may have, e.g. "24 KiB"')
    rounds: int = Field(30, ge=1, description="of local_steps steps each")
    local_steps: int = Field(10, ge=1, description="tau, the steps between two synchronizations")
    batch: int = Field(20, ge=1, description="samples a step")
    sample: float = Field(1.0, gt=0, le=1, description="share of the clients in a round")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="exactly that share, or each client by its own draw",
        exclude_if=lambda value: value == "fixed",  # runs of before it was there have the same settings
    )
    weighted: bool = Field(False, description="server mean weighted by training samples")
    evaluate_every: int = Field(10, ge=1, description="rounds; the last of a phase is always evaluated")
    evaluate_sample: float = Field(1.0, gt=0, le=1, description="share of the clients judged; at a phase's end all")
    checkpoint_every: int = Field(0, ge=0, description="rounds; 0: with every evaluation")
    keep_checkpoints: int = Field(3, ge=1, description="the newest so many, to fall back on")
    on_bad_upload: Literal["refuse", "stop"] = "refuse"
    upload_bound: float = Field(50.0, ge=0, description="an upload's distance from w, in medians; 0: no bound")
    store: Literal["memory", "disk"] = "memory"
    vectorize: Literal["auto", "on", "off"] = Field("auto", description="clients of a process trained in stacks")
    save_models: bool = True
    diagnostics: Literal["off", "cheap", "full"] = "off"
    privacy: PrivacyConfig | None = Field(None, exclude_if=lambda value: value is None)
    secure: SecureConfig | None = Field(
        None,
        description="federations on Flower: the server gets sums of uploads only",
        exclude_if=lambda value: value is None,  # runs of before it was there have the same settings
    )
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

    @model_validator(mode="after")
    def _private(self) -> Config:
        if self.privacy and self.weighted:
            raise ValueError("privacy: weighted = true would let a client count for more than its clip")
        if self.privacy and self.privacy.kind == "shared" and self.sampling == "poisson" and self.sample < 1:
            raise ValueError(
                'privacy.kind = "shared" needs sampling = "fixed": clients must know how many share the noise'
            )
        return self

    @model_validator(mode="after")
    def _of(self) -> Config:
        for label, method in self.methods.items():
            if method.of is None:
                continue
            able = [k for k, m in self.methods.items() if m.of is None]
            if method.of not in able:
                raise ValueError(f"methods.{label}.of = {method.of!r}: allowed are {', '.join(map(repr, able))}")
            if method.bits is None or not self.save_models:
                raise ValueError(f"methods.{label}: `of` needs bits beside it, and save_models = true")
        return self

    def budgets(self) -> tuple[str, ...]:
        return (self.budget,) if isinstance(self.budget, str) else self.budget or ()

    @field_validator("seeds", "methods")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise ValueError("at least one is needed")
        return value


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
    find_modules_in(path.resolve().parent)
    return parse(text, str(path), overrides, defaults)


def find_modules_in(place: Path) -> None:
    """Parts of one's own may stand beside the config: its folder is put on the Python path, after what is on it, here
    and for the processes that this one starts."""
    folder = str(place.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, folder])


def validate(raw: dict[str, Any], where: str) -> Config:
    raw = dict(raw)
    shared, methods = raw.pop("settings", {}), raw.get("methods", {})
    for key, table in (("settings", shared), ("methods", methods)):
        if not isinstance(table, dict):
            raise UserError(f"{where}: {key}: a table is needed, not {table!r}")
    merged = {}
    for name, method in methods.items():
        merged[name] = {**_base(method.get("recipe"), shared), **method} if isinstance(method, dict) else method
    for name, method in merged.items():
        if isinstance(method, dict) and "of" in method:
            merged[name] = _quantized(f"{where}: methods.{name}", methods[name], merged)
    if methods:
        raw["methods"] = merged
    try:
        # through JSON: strict about types, yet lists are tuples and strings are paths, as in TOML
        return Config.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as e:
        raise UserError(f"{where}: {explain(e)}") from None


def _quantized(where: str, table: dict[str, Any], methods: dict[str, Any]) -> dict[str, Any]:
    """`of = LABEL` has all that LABEL has, but for its bits."""
    if more := set(table) - {"of", "afterwards", "bits"}:
        raise UserError(f"{where}: {sorted(more)[0]}: beside `of` there are bits and afterwards, nothing else")
    source = methods.get(str(table["of"]))
    known = {k: v for k, v in source.items() if k not in ("bits", *table)} if isinstance(source, dict) else {}
    return {**(known or {"recipe": "fedavg"}), **table}  # a label that is not there is said of the whole config


def write(config: Config) -> str:
    """JSON of what was given, which `read` makes the same config of, infinite numbers included."""
    return json.dumps(config.model_dump(exclude_unset=True), default=str)


def read(text: str) -> Config:
    return Config.model_validate_json(text)


def _base(recipe: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """What a method's own table builds on: [settings] over a recipe's defaults, a published preset over [settings]."""
    if not isinstance(recipe, str) or recipe not in recipes:
        return shared
    found = find(recipe)
    own = found.defaults if found.bits is None else {**found.defaults, "bits": found.bits}
    return {**shared, **own} if found.fixed else {**own, **shared}


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
        made = str(part) in _BRANCHES or "[" in str(part)
        if (k == 1 and loc[0] == "methods") or not made:
            path.append(str(part))
    return ".".join(path) or "config"


def _all_keys() -> set[str]:
    schema = TypeAdapter(Config).json_schema()
    tables = [schema, *schema.get("$defs", {}).values()]
    return {key for table in tables for key in table.get("properties", {})} | {"settings"}
