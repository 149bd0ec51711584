"""What the server tells its clients (`Task`), and what a client keeps to itself (`ClientConfig`, a TOML file)."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from qupel.core.layout import Layout
from qupel.deploy.budget import parse_size
from qupel.engine.job import Job
from qupel.flower.boundary import HASH, JOB, MOST_METRICS
from qupel.flower.policy import Policy
from qupel.flower.secure import in_fixed_point
from qupel.parts.codecs import codecs
from qupel.parts.methods.base import row_per_network
from qupel.parts.phase import Phase
from qupel.parts.servers import covering
from qupel.parts.servers.mean import Mean
from qupel.run.adapt import layout_hash
from qupel.run.config import (
    Bits,
    Config,
    Phases,
    SplitConfig,
    Strict,
    check_bits,
    check_model,
    explain,
    find_modules_in,
)
from qupel.run.jobs import Cell, build_phases
from qupel.run.networks import model_name
from qupel.run.sections import NetworkConfig, SecureConfig
from qupel.run.settings import Length
from qupel.tasks.losses import losses
from qupel.tasks.metrics import chosen, metrics
from qupel.util.errors import UserError

PROTOCOL: Literal[5] = 5  # of the messages between server and clients; both sides must agree


class Wanted(Strict):
    """What a job trains and is judged by, said at hello: a client that does not allow a part of it declines there."""

    model: str
    args: dict[str, Any] = Field({}, description="what the network is built with")
    loss: str | None = None
    metrics: tuple[str, ...] = Field((), max_length=MOST_METRICS, description="one number each is told, in this order")
    judge_by: str | None = Field(None, description="what of these a client's file names as its score")

    @field_validator("model")
    @classmethod
    def _model(cls, value: str) -> str:
        return check_model(plain_name(value))

    @field_validator("loss")
    @classmethod
    def _loss(cls, value: str | None) -> str | None:
        if value is not None:
            losses[plain_name(value)]
        return value

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            metrics[plain_name(name)]
        return value

    @field_validator("judge_by")
    @classmethod
    def _judge(cls, value: str | None) -> str | None:
        if value is not None:
            chosen((), plain_name(value))
        return value

    @classmethod
    def of_config(cls, config: Config, cell: Cell) -> Wanted:
        return cls(
            model=model_name(config, cell),
            args=config.model.args,
            loss=config.task.loss,
            metrics=tuple(config.task.asked()),
            judge_by=config.task.judge_by,
        )


def refuse_means_of_networks(config: Config) -> None:
    """Which network a client has is its own affair, so there is nobody to average it with."""
    length = Length(config.rounds, config.local_steps, 1)
    for label, method in config.methods.items():
        if any(row_per_network(phase.method) for phase in build_phases(method, length)):
            why = "clients on Flower do not tell their networks"
            raise UserError(f'methods.{label}: share = "architecture": {why}; allowed there: share = "nothing"')


def named_modules(config: Config) -> list[str]:
    """The modules that jobs of a config name their parts from: what clients must allow."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value):
            found.add(value.partition(":")[0])
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            walk(inner)

    for label, method in config.methods.items():
        walk(Wanted.of_config(config, Cell(label, 0)).model_dump(exclude={"args"}))
        walk([sent(phase) for phase in build_phases(method, Length(config.rounds, config.local_steps, 1))])
    return sorted(found)


def sent(phase: Phase, secure: SecureConfig | None = None, numbers: int = 0) -> dict[str, Any]:
    """A phase as clients are told it: without the server's part, but for what it wants of them: a clip, and noise.
    numbers: of an upload, where it is summed unseen."""
    cover: Any = covering(phase.server)
    cover = in_fixed_point(cover, secure, numbers) if cover and secure else cover
    return replace(phase, server=replace(cover, server=None) if cover else Mean()).table()


class Task(Wanted):
    """One job, in every message of it: a client that joins late or starts again needs nothing else but w.

    It holds no bits: how small a client's model gets is the client's own business. Nor does it hold the server's part
    of a phase, which no client runs.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # BinaryRelax ends with an infinite lambda

    protocol: Literal[5] = PROTOCOL
    job: str = Field(pattern=f"^{JOB}$", description="names the client's folder of states")
    label: str
    seed: int = Field(ge=0)
    layout: str | None = Field(None, pattern=f"^{HASH}$", description="hash of the network's names and shapes")
    shape: tuple[int, ...]
    classes: int = Field(ge=1)
    clients: int = Field(ge=1)
    phases: Phases
    local_steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    epoch_steps: int = Field(ge=1)
    sample: float = Field(gt=0, le=1)
    sampling: Literal["fixed", "poisson"] = Field("fixed", exclude_if=lambda value: value == "fixed")
    augment: bool = False
    upload: str = Field("fp32", description="the codec")
    secure: SecureConfig | None = Field(None, description="uploads leave masked, for their sum")

    @field_validator("upload")
    @classmethod
    def _codec(cls, value: str) -> str:
        codecs.build(plain_name(value), "upload")
        return value

    @classmethod
    def of(
        cls, job: Job, config: Config, cell: Cell, *, name: str, upload: str, secure: SecureConfig | None = None
    ) -> Task:
        """What clients must know of the server's job."""
        numbers = Layout.of(job.module).size
        described = Wanted.of_config(config, cell).model_dump() | {
            "job": name,
            "label": cell.label,
            "seed": job.seed,
            "layout": layout_hash(job.module),
            "shape": list(job.data.shape),
            "classes": job.data.classes,
            "clients": len(job.parts),
            "phases": [sent(phase, secure, job.rows_of(k) * numbers) for k, phase in enumerate(job.phases)],
            "local_steps": job.local_steps,
            "batch": job.batch,
            "epoch_steps": job.client_epoch_steps,
            "sample": job.sample,
            "sampling": job.sampling,
            "augment": job.transform.augment,
            "upload": upload,
            "secure": None if secure is None else secure.model_dump(),
        }
        return cls.model_validate_json(json.dumps(described))


def plain_name(path: str) -> str:
    """A name that is built in, or a thing of a module's own: not one that the module has from elsewhere."""
    if "." in path.partition(":")[2]:
        raise ValueError(f"{path!r}: a name of the module itself is needed")
    return path


class OwnData(Strict):
    name: str = "digits"
    folder: Path | None = None
    limit: int | None = Field(None, ge=1)
    args: dict[str, Any] = Field({}, description='what a function of its own, "module:function", is called with')
    standardize: Literal["off", "client"] = Field("off", description="float inputs by its own training data")


class Privacy(Strict):
    """Local differential privacy of every upload: the difference to w is clipped, then Gaussian noise is added. A
    client answers a round once, and never more in all than its caps allow (`flower.ledger`)."""

    clip: float = Field(gt=0, description="largest norm of w_i - w")
    epsilon: float = Field(gt=0, le=1, description="per round")
    delta: float = Field(gt=0, lt=1)
    sensitivity: float | None = Field(None, gt=0, description="none: 2 * clip, the most that two uploads can differ")
    max_rounds: int = Field(100, ge=1, description="rounds it ever answers, of all jobs")
    max_epsilon: float = Field(10.0, gt=0, description="T epsilon, of the T rounds it has answered")
    max_delta: float = Field(0.01, gt=0, lt=1, description="T delta")

    @model_validator(mode="after")
    def _caps(self) -> Self:
        if self.epsilon > self.max_epsilon or self.delta > self.max_delta:
            raise ValueError("one round costs epsilon and delta: neither may be over max_epsilon or max_delta")
        return self


class ClientConfig(Strict):
    """A client's own settings. They never leave its machine."""

    client: int = Field(ge=0, description="its number in the federation")
    data: OwnData = OwnData()
    split: SplitConfig | None = Field(None, description="a try-out: this client's part of a data set that all have")
    network: NetworkConfig | None = Field(
        None, description="its own, {name, args}, where the job's method takes any; none: the job's"
    )
    bits: Bits | None = Field(None, description="1 to 8, or 32 for full precision")
    budget: str | None = Field(None, description='bytes its file may have, e.g. "24 KiB", in place of bits')
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all but the first and last")
    levels: Literal["layer", "channel"] = Field("layer", description="a layer's, or scaled by each output channel")
    state: Path = Field(Path("state"), description="folder for its personal model, its centers and exported files")
    resident: bool = Field(True, description="keep torch, data and state loaded between rounds")
    idle_minutes: float = Field(60, gt=0, description="a resident worker that nobody asks for this long ends")
    keep_days: float = Field(30, gt=0, description="states of jobs that nobody asks for this long go; models stay")
    nice: int = Field(0, ge=0, le=19)
    allow: tuple[str, ...] = Field((), description="modules of this machine that a job may name its parts from")
    modules: Path | None = Field(None, description="a folder of modules, besides this file's own")
    keys: Path = Field(Path("."), description="folder with its key and the other clients' (key, peers)")
    policy: Policy = Policy()
    privacy: Privacy | None = None

    @field_validator("network", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name stands for {name = ...}."""
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _size(self) -> Self:
        if (self.bits is None) == (self.budget is None):
            raise ValueError("give either bits or budget")
        if self.budget is not None:
            parse_size(self.budget)
        elif self.bits is not None:
            check_bits(self.bits)
        return self


def load_client(path: Path) -> ClientConfig:
    """Read a client's config; relative paths in it are meant from its own folder."""
    try:
        raw = tomllib.loads(path.read_text())
        config = ClientConfig.model_validate_json(json.dumps(raw, default=str))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'not a text file'}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise UserError(f"{path} is not TOML: {e}") from None
    except ValidationError as e:
        raise UserError(f"{path}: {explain(e)}") from None
    here, data = path.resolve().parent, config.data
    if config.allow or ":" in data.name or (config.network and ":" in config.network.name):
        find_modules_in(here)
        if config.modules is not None:
            find_modules_in(here / config.modules.expanduser())
    own: dict[str, Any] = {"state": here / config.state, "keys": here / config.keys.expanduser()}
    if data.name.endswith((".npz", "/")):
        own["data"] = data.model_copy(
            update={"name": f"{here / Path(data.name).expanduser()}{'/' * data.name.endswith('/')}"}
        )
    return config.model_copy(update=own)
