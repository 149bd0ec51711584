"""The sections of a config: data, split, model, task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from qupel.tasks import zoo
from qupel.tasks.losses import losses
from qupel.tasks.metrics import Metric, chosen, metrics


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Strict):
    name: str = "digits"
    folder: Path | None = Field(None, description="where its files are; else that of `--data` or `QUPEL_DATA`")
    augment: bool = Field(False, description="images are flipped and cropped at random")
    limit: int | None = Field(None, ge=1, description="use only the first samples of each split")
    args: dict[str, Any] = Field({}, description='what a function of your own, "module:function", is called with')
    standardize: Literal["auto", "off", "client", "shared"] = Field(
        "auto",
        description="float inputs by mean and std of the client's own training data, or of all clients'; auto: divided "
        "by one number where they are far from 1",
    )


class SplitConfig(Strict):
    kind: Literal["classes", "dirichlet", "iid", "groups", "one"] = "classes"
    clients: int = Field(20, ge=1, description="how many; groups: as many as there are")
    classes: int = Field(4, ge=1, description="classes a client, kind = classes")
    alpha: float = Field(0.5, gt=0, description="kind = dirichlet")
    train_per_client: int | None = Field(None, ge=1)
    test_per_client: int | None = Field(None, ge=1)
    validation: float = Field(0.0, ge=0, lt=1, description="share of each client's training data held out")
    unseen: float = Field(0, ge=0, description="share of the clients, or how many, that join after training")

    blind: bool = Field(
        False,
        description="test data, and clients that join later, are left out: for choosing settings on validation data",
        exclude_if=lambda value: not value,  # runs of before it was there have the same settings
    )

    @field_validator("unseen")
    @classmethod
    def _whole(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError(f"{value}: allowed are a share below 1, or a whole number of clients")
        return value


class NetworkConfig(Strict):
    """A network of a client's own."""

    name: str
    args: dict[str, Any] = Field({}, description="what it is built with, beside the data's shape and classes")
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all but the first and the last")

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_model(value)

    @property
    def title(self) -> str:
        """By which clients of it are told from others."""
        return f"{self.name} {json.dumps(self.args)}" if self.args else self.name


Networks = tuple[str | NetworkConfig, ...]


def check_networks(value: Networks | None) -> Networks | None:
    for given in value or ():
        if isinstance(given, str):
            check_model(given)
    return value


class ModelConfig(Strict):
    name: str = "digits_cnn"
    layers: tuple[str, ...] | None = Field(None, description="layers to quantize; none: all but the first and the last")
    levels: Literal["layer", "channel"] = Field("layer", description="a layer's, or scaled by each output channel")
    start: Path | None = Field(None, description="a packed model file to start from (warm start)")
    args: dict[str, Any] = Field({}, description="what the network is built with, beside the data's shape and classes")
    networks: Networks = Field(
        (),
        description="each client's own network, repeated as needed, by name or as a table {name, args, layers}; none: "
        "all have the shared one",
        exclude_if=lambda value: not value,  # runs of before it was there have the same settings
    )

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_model(value)

    @field_validator("networks")
    @classmethod
    def _known_networks(cls, value: Networks) -> Networks:
        return check_networks(value) or ()


class TaskConfig(Strict):
    loss: str | None = Field(None, description="by default cross entropy; data without class labels needs one")
    metrics: tuple[str, ...] = Field((), description="beside loss and accuracy")
    judge_by: str | None = Field(
        None,
        description="a client's score: a metric, or the loss; by default accuracy where there are class labels",
        exclude_if=lambda value: value is None,  # runs of before it was there have the same settings
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str | None) -> str | None:
        if value is not None:
            losses[value]
        return value

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            metrics[name]
        return value

    @field_validator("judge_by")
    @classmethod
    def _known_judge(cls, value: str | None) -> str | None:
        chosen((), value)
        return value

    def asked(self) -> dict[str, Metric]:
        """The metrics by name, the one to judge by among them."""
        return chosen(self.metrics, self.judge_by)


class PrivacyConfig(Strict):
    """Differential privacy of what clients send, for a client with all of its data (`engine.accounting`)."""

    kind: Literal["central", "shared", "local"] = Field(
        "central", description="noise on the sum by the server, on it by all clients together, on each upload"
    )
    clip: float = Field(1.0, gt=0, description="longest move of a client, |w_i - w|")
    noise: float | None = Field(None, gt=0, description="its deviation, in clips; none: what target_epsilon needs")
    target_epsilon: float | None = Field(None, gt=0, description="what all rounds may cost; the run ends before more")
    delta: float = Field(1e-5, gt=0, lt=1)
    ledger: Path | None = Field(None, description="a file that counts several runs on the same clients; none: this one")

    @model_validator(mode="after")
    def _some_noise(self) -> PrivacyConfig:
        if self.noise is None and self.target_epsilon is None:
            raise ValueError("give noise, or target_epsilon, which finds it")
        return self


def check_model(name: str) -> str:
    if ":" in name:
        zoo.networks[name]  # one of the user's own
    elif name not in zoo.networks:
        raise ValueError(f'unknown model {name!r}; allowed: {", ".join(zoo.networks)}, or "module:Name" of your own')
    return name


class SecureConfig(Strict):
    """Secure aggregation, of federations on Flower: the server gets the sum of the uploads only (docs/secure.md)."""

    bits: Literal[16, 32] = Field(16, description="of a number of an upload, in fixed point")
    clip: float = Field(1.0, gt=0, lt=1e30, description="largest size of a number of w_i - w; the rest waits")
    threshold: float = Field(2 / 3, ge=0.5, lt=1, description="a sum is opened if more than this share is left")
    neighbours: int = Field(100, ge=4, multiple_of=2, description="clients that a client is masked with, at most")
