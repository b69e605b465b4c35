"""What a search was asked for, as one typed object. The command line parses into it; nothing else reads options."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from lossyspec.errors import ConfigurationError
from lossyspec.settings import (
    MAX_DRAFT_LENGTH,
    RULES,
    Attention,
    Compile,
    Model,
    Precision,
    Rule,
    Sampling,
    validation_message,
)

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class SearchConfig(Model):
    """One search. None: chosen by the task or by the hardware."""

    task: str = "dialogue"
    target: str = "embedded"
    draft: str = "auto"
    prompts: Path | None = None
    dataset: str | None = None
    sampling: Sampling | None = None  # None: the task's own
    max_new_tokens: int = Field(64, ge=8, le=4096)
    texts: int | None = Field(None, ge=2, le=512)  # prompts traced in each half; None: 16, or what the budget holds
    max_quality_loss: float = Field(0.05, ge=0.0, le=10.0)
    budget_s: float = Field(300.0, ge=10.0)
    trials: int = Field(600, ge=1)
    batch_sizes: tuple[int, ...] = (1, 4)
    precisions: tuple[Precision, ...] | None = None  # None: all that the hardware has
    rules: tuple[Rule, ...] | None = None  # None: optimal, mixture, priced
    attentions: tuple[str, ...] | None = None  # by name; None: what the draft and the contexts are good for
    compiles: tuple[Compile, ...] = ("off",)  # searched beside passes that nothing compiles
    cuda_graphs: bool = True
    max_draft_length: int = Field(8, ge=1, le=MAX_DRAFT_LENGTH)
    seed: int = Field(0, ge=0, lt=2**31)
    storage: str | None = None
    force: bool = False  # relax tasks that are known as unsuitable
    strict: bool = False  # refuse to measure while another process uses the device

    @field_validator("attentions")
    @classmethod
    def _attentions(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            return tuple(Attention.named(name).name for name in value) if value is not None else None
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None

    @field_validator("batch_sizes")
    @classmethod
    def _batches(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1 or max(value) > 256:
            raise ValueError("allowed: whole numbers from 1 to 256, such as 1,2,4,8")
        return tuple(sorted(set(value)))


def make_config(**values: object) -> SearchConfig:
    """A SearchConfig from loose values; raises ConfigurationError naming each wrong value and what is allowed."""
    try:
        return SearchConfig(**values)
    except ValidationError as error:
        raise ConfigurationError(validation_message(error, dict(SearchConfig.model_fields))) from None


def parse_duration_s(text: str) -> float:
    """Seconds from '90', '90s', '5m' or '1.5h'. Raises ConfigurationError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) <= 0:
        raise ConfigurationError(f"duration is {text!r}; allowed: a number over 0 with s, m or h, such as 90s or 5m")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def parse_loss(text: str) -> float:
    """A relative loss from '5%' or '0.05'. Raises ConfigurationError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if not match:
        raise ConfigurationError(f"quality loss is {text!r}; allowed: a share or a percentage, such as 0.05 or 5%")
    share = float(match[1]) / (100 if match[2] else 1)
    if share > 1 and not match[2]:
        raise ConfigurationError(
            f"quality loss is {text!r}, which is a share of {share:.0%}; write {text.strip()}% for a percentage"
        )
    return share


def parse_numbers(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers from '1,2,4'. Raises ConfigurationError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; allowed: whole numbers with commas, such as 1,2,4") from None


def parse_names(text: str) -> tuple[str, ...] | None:
    """Names from 'a,b'; None for 'auto'."""
    return None if text == "auto" else tuple(part.strip() for part in text.split(",") if part.strip())


__all__ = ["RULES", "SearchConfig", "make_config", "parse_duration_s", "parse_loss", "parse_names", "parse_numbers"]
