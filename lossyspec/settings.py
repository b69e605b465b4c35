"""The knobs: what can be set about speculative decoding, with their ranges. Pure data, no torch."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ConfigurationError, nearest

Rule = Literal["exact", "mixture", "optimal", "priced", "lenience", "typical", "fuzzy"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4-int8", "int4"]
Source = Literal["draft", "ngram", "mixed"]
Boundary = Literal["sentence", "paragraph", "list", "line"]
AttentionSide = Literal["draft", "verify"]
Compile = Literal["off", "inductor", "tensorrt"]
#: how a pass of few tokens runs: compiled, replayed as a CUDA graph where there is one, or operation by operation
Passes = Literal["inductor", "tensorrt", "graphs", "eager"]

RULES: tuple[Rule, ...] = get_args(Rule)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: precisions of the layers' matrices, beside which the stream and the cache are wider
QUANTISED: tuple[Precision, ...] = ("fp8", "int8", "int4-int8", "int4")
SOURCES: tuple[Source, ...] = get_args(Source)
COMPILES: tuple[Compile, ...] = get_args(Compile)
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
#: rules whose emitted law has a closed form that is bounded by alpha; the others are named baselines
PRINCIPLED_RULES = ("exact", "mixture", "optimal", "priced", "lenience")
MAX_DRAFT_LENGTH = 16
#: tokens of a block of sparse attention; 0 is dense
BLOCKS = (8, 16, 32, 64, 128)
#: bytes of a weight (an int4 group has 4 bytes of scales; int4-int8 is int8 at both ends), and of a number of the cache,
#: which is bf16 beside packed weights, and fp32 there on a CPU without our compiled code
WEIGHT_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4-int8": 0.7, "int4": 0.625}
CACHE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "int8": 2, "int4-int8": 2, "int4": 2}


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


class Attention(Model):
    """Block-sparse attention. A token sees the first `sink` blocks, its own and the `window` - 1 before it, and of those
    between the `top` that its query scores highest; all in blocks of `block` tokens. 0 is dense, and the rest is then null.

    side: `draft` for the passes of the draft `self` alone, which changes no law; `verify` for the target's own, which does.
    """

    block: int = 0
    window: int | None = Field(None, ge=1, le=65536)
    sink: int | None = Field(None, ge=0, le=65536)
    top: int | None = Field(None, ge=0, le=65536)
    side: AttentionSide | None = None

    @model_validator(mode="after")
    def _whole(self) -> Attention:
        given = {name: getattr(self, name) for name in ("window", "sink", "top", "side")}
        if self.block not in (0, *BLOCKS):
            raise ValueError(f"block is {self.block}; allowed: 0 (dense), {', '.join(map(str, BLOCKS))}")
        if self.block == 0 and (extra := [name for name, value in given.items() if value is not None]):
            raise ValueError(f"block is 0, which is dense attention: {', '.join(extra)} must be null")
        if self.block and (missing := [name for name, value in given.items() if value is None]):
            raise ValueError(f"block is {self.block}: {', '.join(missing)} must be given too")
        return self

    @property
    def kept(self) -> int:
        """Blocks that a token sees at most; 0 for dense attention."""
        return (self.sink or 0) + (self.top or 0) + (self.window or 0)

    def skips(self, length: int) -> bool:
        """Whether the last token of a text of `length` tokens has blocks that it does not see."""
        return self.block > 0 and -(-length // self.block) > self.kept

    def on(self, side: AttentionSide) -> Attention:
        """This on its own side, dense on the other."""
        return self if self.side == side else Attention()

    @property
    def name(self) -> str:
        """A short name: `dense`, or as `b32-s1-w4-t16-verify`."""
        if not self.block:
            return "dense"
        return f"b{self.block}-s{self.sink}-w{self.window}-t{self.top}-{self.side}"

    @staticmethod
    def named(name: str) -> Attention:
        """The attention of a name. Raises ConfigurationError for another form or value."""
        if name == "dense":
            return Attention()
        match = re.fullmatch(r"b(\d+)-s(\d+)-w(\d+)-t(\d+)-(draft|verify)", name)
        if match is None:
            raise ConfigurationError(
                f"attention is {name!r}; allowed: dense, or block, sink, window, top and side as in b32-s1-w4-t16-verify"
            )
        block, sink, window, top = map(int, match.groups()[:4])
        try:
            return Attention(block=block, sink=sink, window=window, top=top, side=match[5])
        except ValidationError as error:
            fields = dict(Attention.model_fields)
            raise ConfigurationError(f"attention is {name!r}: {validation_message(error, fields)}") from None


def format_of(precision: str, attention: Attention, compiled: Compile = "off") -> str:
    """A precision with an attention and a compiler, by name: `int4`, or as `int4+b32-s1-w4-t16-verify+inductor`."""
    return "+".join([precision, *([attention.name] if attention.block else []), *([compiled] if compiled != "off" else [])])


#: what the draft `self` sees where the settings name nothing else
SELF_ATTENTION = Attention(block=32, window=3, sink=1, top=8, side="draft")


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
    policy: where alpha acts. attention: dense, or block-sparse on one side.
    compile: what compiles the target's passes of few tokens, see `lossyspec.compiled`. cuda_graphs: those that nothing
    compiles are CUDA graphs on a GPU, see `lossyspec.graphs`. Neither changes a law; both may change how it is rounded.
    lanes: a draft model goes on while the target verifies, see `lossyspec.lanes`; it changes the speed alone, and only costs
    where the device has no streams.
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
    attention: Attention = Attention()
    compile: Compile = "off"
    cuda_graphs: bool = True
    lanes: bool = False
    schedule: tuple[ScheduleRow, ...] = ()

    @property
    def relaxed(self) -> bool:
        """Whether the rule may accept what exact verification would reject."""
        return self.draft_length > 0 and self.rule != "exact" and self.alpha > 0.0

    @property
    def lossless(self) -> bool:
        """True when the emitted law is the target's own (at the target's precision, with dense attention)."""
        return not self.relaxed and self.attention.side != "verify"

    @property
    def target_format(self) -> str:
        """What traces call the target as it verifies: its precision, with its attention if sparse."""
        return format_of(self.precision.target, self.attention.on("verify"))

    @property
    def cost_format(self) -> str:
        """What cost tables call it: with the compiler."""
        return format_of(self.precision.target, self.attention.on("verify"), self.compile)

    @property
    def passes(self) -> Passes:
        """How the target's passes of few tokens run."""
        return self.compile if self.compile != "off" else "graphs" if self.cuda_graphs else "eager"

    @property
    def draft_format(self) -> str:
        """What they call the two as they draft: with the attention of either side."""
        return format_of(self.precision.target, self.attention)

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
