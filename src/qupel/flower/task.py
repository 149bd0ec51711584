"""What the server tells its clients (`Task`), and what a client keeps to itself (`ClientConfig`, a TOML file)."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from qupel.config import Bits, PhaseConfig, SplitConfig, Strict, check_bits, explain
from qupel.deploy.budget import parse_size
from qupel.engine.job import Job
from qupel.errors import UserError
from qupel.flower.wire import Codec

PROTOCOL: Literal[1] = 1  # of the messages between server and clients; both sides must agree


class Task(Strict):
    """One job, in every message of it: a client that joins late or starts again needs nothing else but w.

    It holds no bits: how small a client's model gets is the client's own business.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # BinaryRelax ends with an infinite lambda

    protocol: Literal[1] = PROTOCOL
    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$", description="names the client's folder of states")
    label: str
    seed: int = Field(ge=0)
    model: str
    shape: tuple[int, ...]
    classes: int = Field(ge=1)
    clients: int = Field(ge=1)
    phases: tuple[PhaseConfig, ...]
    local_steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    epoch_steps: int = Field(ge=1)
    augment: bool = False
    upload: Codec = "fp32"

    @classmethod
    def of(cls, job: Job, *, name: str, label: str, model: str, upload: Codec) -> Task:
        """What clients must know of the server's job."""
        described = {
            "job": name,
            "label": label,
            "seed": job.seed,
            "model": model,
            "shape": list(job.data.train.inputs.shape[1:]),
            "classes": job.data.classes,
            "clients": len(job.parts),
            "phases": [{"rounds": p.rounds, "method": asdict(p.method)} for p in job.phases],
            "local_steps": job.local_steps,
            "batch": job.batch,
            "epoch_steps": job.steps_per_epoch,
            "augment": job.transform.augment,
            "upload": upload,
        }
        return cls.model_validate_json(json.dumps(described))


class OwnData(Strict):
    name: str = "digits"
    folder: Path | None = None
    limit: int | None = Field(None, ge=1)


class Privacy(Strict):
    """Local differential privacy of every upload: the difference to w is clipped, then Gaussian noise is added."""

    clip: float = Field(gt=0, description="largest norm of w_i - w")
    epsilon: float = Field(gt=0, le=1, description="per round")
    delta: float = Field(gt=0, lt=1)
    sensitivity: float | None = Field(None, gt=0, description="none: 2 * clip, the most that two uploads can differ")


class ClientConfig(Strict):
    """A client's own settings. They never leave its machine."""

    client: int = Field(ge=0, description="its number in the federation")
    data: OwnData = OwnData()
    split: SplitConfig | None = Field(None, description="a try-out: this client's part of a data set that all have")
    bits: Bits | None = Field(None, description="1 to 8, or 32 for full precision")
    budget: str | None = Field(None, description='bytes its file may have, e.g. "24 KiB", in place of bits')
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all but the first and last")
    state: Path = Field(Path("state"), description="folder for its personal model, its centers and exported files")
    resident: bool = Field(True, description="keep torch, data and state loaded between rounds")
    idle_minutes: float = Field(60, gt=0, description="a resident worker that nobody asks for this long ends")
    nice: int = Field(0, ge=0, le=19)
    privacy: Privacy | None = None

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
    own: dict[str, Any] = {"state": here / config.state}
    if data.name.endswith(".npz"):
        own["data"] = data.model_copy(update={"name": str(here / Path(data.name).expanduser())})
    return config.model_copy(update=own)
