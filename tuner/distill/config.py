"""What a distillation was asked for, as one typed object."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from lossyspec.errors import ConfigurationError
from lossyspec.settings import Model, validation_message


class DistillConfig(Model):
    """What a distillation was asked for. budget_s None: no limit. rows, length: streams of a shard. start: a head to go on
    from; its sizes hold then. layers None: 1, or what `start` has. openings: a text, one a line; None: those that come with
    the tuner."""

    target: str = "embedded"
    data: Path | None = None
    streams: tuple[Path, ...] = ()
    openings: Path | None = None
    tokens: int = Field(300_000, ge=1_000)
    budget_s: float | None = None
    start: Path | None = None
    layers: int | None = Field(None, ge=1, le=8)
    width: int | None = Field(None, ge=32, multiple_of=32)
    vocab: int = Field(8192, ge=16)
    depths: int = Field(3, ge=1, le=8)
    epochs: float = Field(6.0, gt=0)
    rows: int = Field(64, ge=1, le=4096)
    length: int = Field(384, ge=16, le=8192)  # at most what the target has positions for
    temperatures: tuple[float, float] = (0.6, 1.0)
    batch_tokens: int = Field(4096, ge=64)
    rate: float = Field(1e-2, gt=0)
    seed: int = Field(0, ge=0, lt=2**31)


def make_distill_config(**values: object) -> DistillConfig:
    """A DistillConfig from loose values; raises ConfigurationError naming each wrong value and what is allowed."""
    try:
        return DistillConfig(**values)
    except ValidationError as error:
        raise ConfigurationError(validation_message(error, dict(DistillConfig.model_fields))) from None
