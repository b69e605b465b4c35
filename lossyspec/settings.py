"""The knobs: what can be set about speculative decoding, with their ranges. Pure data, no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigurationError, nearest

Rule = Literal["exact", "mixture", "optimal", "priced", "lenience", "typical", "fuzzy"]
Precision = Literal["fp32", "bf16", "fp16", "int8", "int4-int8", "int4"]
Source = Literal["draft", "ngram", "mixed"]
Boundary = Literal["sentence", "paragraph", "list", "line"]

RULES: tuple[Rule, ...] = get_args(Rule)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: precisions of the weights alone, whose products are bf16
QUANTISED: tuple[Precision, ...] = ("int8", "int4-int8", "int4")
SOURCES: tuple[Source, ...] = get_args(Source)
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
#: rules whose emitted law has a closed form that is bounded by alpha; the others are named baselines
PRINCIPLED_RULES = ("exact", "mixture", "optimal", "priced", "lenience")
MAX_DRAFT_LENGTH = 16
#: bytes of a weight (an int4 group has 4 bytes of scales; int4-int8 is int8 at both ends), and of a number of the cache
WEIGHT_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int4-int8": 0.7, "int4": 0.625}
CACHE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 4, "int4-int8": 4, "int4": 4}


class Model(BaseModel):
    """Base of all stored data: immutable, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Sampling(Model):
    """How the target samples: the request's own choice, never a knob of the search.

    `temperature` 0 is greedy. `top_k` and `top_p` of None do not filter. `repetition_penalty` 1 is off.
    """

    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0)


class Precisions(Model):
    """Number formats of the weights and activations of the target and the draft."""

    target: Precision = "fp32"
    draft: Precision | None = None  # None: the draft has no weights


class NgramSettings(Model):
    """Prompt lookup: the shortest and the longest suffix that is searched for, in tokens."""

    min_match: int = Field(1, ge=1, le=16)
    max_match: int = Field(4, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> NgramSettings:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match is {self.min_match}; it must be at most max_match, {self.max_match}")
        return self


class Recovery(Model):
    """After `after` tokens in a row that the target gave under `floor`, the next `tokens` ones are exact."""

    after: int = Field(3, ge=1, le=64)
    floor: float = Field(0.02, gt=0.0, lt=1.0)
    tokens: int = Field(8, ge=1, le=1024)


class Policy(Model):
    """Where relaxation acts; all off by default, see `lossyspec.policy`.

    protect: kinds of positions that stay exact. exact_prefix: first tokens of an answer that do. adaptive: nats of the
    target's entropy from which alpha is whole. guard: nats of surprise over entropy after which the rest is exact.
    """

    protect: tuple[Boundary, ...] = ()
    exact_prefix: int = Field(0, ge=0, le=65536)
    recovery: Recovery | None = None
    adaptive: float | None = Field(None, gt=0.0)
    guard: float | None = Field(None, gt=0.0)

    @property
    def active(self) -> bool:
        """Whether anything is on."""
        return self != Policy()


class ScheduleRow(Model):
    """For batches of `batch` = [first, last] sequences (last None: no end), draft `draft_length` tokens a round."""

    batch: tuple[int, int | None]
    draft_length: int = Field(ge=0, le=MAX_DRAFT_LENGTH)

    @model_validator(mode="after")
    def _ordered(self) -> ScheduleRow:
        first, last = self.batch
        if first < 1 or (last is not None and last < first):
            raise ValueError("allowed: [first, last] with first at least 1, and last not under it (or null for no end)")
        return self


class Settings(Model):
    """One configuration of the decoder.

    alpha: share of would-be rejections that is waived; 0 is lossless under every rule.
    tau: draft temperature as a factor on the request's own. theta: the draft stops before a position where its
    confidence is under it. draft_length: most drafted tokens a round; 0 is plain decoding.
    source: who drafts: the loaded draft; prompt lookup although a draft is loaded; or `mixed`: prompt lookup in rounds that
    begin after a match of at least `ngram.min_match` tokens, for as long as it finds such matches, else the loaded draft.
    policy: where alpha acts.
    """

    rule: Rule = "optimal"
    alpha: float = Field(0.0, ge=0.0, le=1.0)
    tau: float = Field(1.0, gt=0.0, le=2.0)
    theta: float = Field(0.0, ge=0.0, lt=1.0)
    draft_length: int = Field(4, ge=0, le=MAX_DRAFT_LENGTH)
    precision: Precisions = Precisions()
    source: Source = "draft"
    ngram: NgramSettings | None = None
    policy: Policy = Policy()
    schedule: tuple[ScheduleRow, ...] = ()

    @property
    def lossless(self) -> bool:
        """True when the emitted law is the target's own (at the target's precision)."""
        return self.draft_length == 0 or self.rule == "exact" or self.alpha == 0.0

    def draft_length_for(self, batch_size: int) -> int:
        """Draft length for a batch: `draft_length` without a schedule; plain (0) outside all of its rows."""
        if not self.schedule:
            return self.draft_length
        for row in self.schedule:
            first, last = row.batch
            if first <= batch_size and (last is None or batch_size <= last):
                return row.draft_length
        return 0


def validation_message(error: ValidationError, allowed: dict[str, Any]) -> str:
    """One line a problem: the field, the value it got, and what is allowed."""
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {place!r}.{nearest(str(item['loc'][-1]), _keys_beside(allowed, item['loc']))}")
        elif item["type"] == "missing":
            lines.append(f"{place} is missing")
        else:
            lines.append(f"{place} is {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)


def _keys_beside(fields: dict[str, Any], place: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed where `place` ends."""
    for part in place[:-1]:
        if isinstance(part, str):
            fields = _fields_of(fields[part].annotation) if part in fields else {}
    return list(fields)


def _fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a model, or of the first model inside `Model | None` or `tuple[Model, ...]`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return dict(kind.model_fields)
    return next((fields for part in get_args(kind) if (fields := _fields_of(part))), {})


def make_settings(**values: Any) -> Settings:
    """Settings from loose values.

    Raises ConfigurationError naming each wrong value and what is allowed.
    """
    try:
        return Settings(**values)
    except ValidationError as error:
        raise ConfigurationError(validation_message(error, dict(Settings.model_fields))) from None


def make_sampling(**values: Any) -> Sampling:
    """Sampling from loose values; raises ConfigurationError as `make_settings` does."""
    try:
        return Sampling(**values)
    except ValidationError as error:
        raise ConfigurationError(validation_message(error, dict(Sampling.model_fields))) from None
