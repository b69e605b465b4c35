"""The contract between the tuner and the reports: what a run folder holds. Pure data, no torch.

Absent is None, never 0. Every file carries `schema`; a newer version is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from pydantic import Field, ValidationError

from .errors import ConfigurationError
from .settings import Model, Precision, Sampling, Settings, validation_message

Corpus = Literal["target_samples", "references", "greedy_text"]
RecordT = TypeVar("RecordT", bound=Model)


class Estimate(Model):
    """A measured value with its 95 % interval (None: not enough samples for one)."""

    value: float
    ci95: tuple[float, float] | None = None


class Quality(Model):
    """Exact loss of a configuration, per emitted position, on held-out text.

    perplexity_ratio: perplexity of the decoder over that of the reference target on the same text (temperature 0:
    exp of the mean log-prob regret). certificate: an upper bound of the ratio on ANY text where the rule has one,
    against the target at the same precision. tv, kl_forward KL(p||pi), kl_reverse KL(pi||p): nats. tv_spread: the mean TV of
    n tokens lies around `tv` with a standard deviation of tv_spread / sqrt(n), as seen between texts.
    """

    perplexity_ratio: Estimate
    tokens: int
    texts: int
    corpus: Corpus
    tv: float | None
    kl_forward: float | None
    kl_reverse: float | None
    certificate: float | None
    tv_spread: float | None = None


class Prediction(Model):
    """What replay and the cost table say. Times in seconds a round of the whole batch."""

    speedup: float
    tokens_per_s: float
    tokens_per_round: float
    drafted_per_round: float
    acceptance: float | None  # accepted over drafted; None when nothing is drafted
    round_s: float
    plain_round_s: float


class Measurement(Model):
    """What was measured live, interleaved with plain decoding. Speeds are of decoding; prefill is apart.

    speedup: ratio of tokens/s to the fastest plain decoding in the same blocks. end_to_end_speedup includes prefill.
    """

    speedup: Estimate
    end_to_end_speedup: Estimate
    tokens_per_s: float
    plain_tokens_per_s: float
    tokens_per_round: float
    drafted_per_round: float
    acceptance: float | None
    acceptance_by_depth: tuple[float, ...]
    tokens: int
    rounds: int
    blocks: int
    design: Literal["ABBA"] = "ABBA"
    ttft_ms: float | None
    itl_ms: dict[str, float] | None  # p50, p95, p99 over rounds, per token
    length_ratio: float | None  # mean output length over plain's
    repetition: float | None  # share of repeated 4-grams in the output
    generated_perplexity_ratio: float | None  # drift alarm only, never an objective
    prediction_error: float | None  # predicted speedup over measured, minus 1
    tokens_per_round_error: float | None


class TrialRecord(Model):
    """One line of trials.jsonl: a finished or failed trial of the search."""

    schema_: Literal["lossytune.trial/1"] = Field("lossytune.trial/1", alias="schema")
    number: int
    kind: Literal["plain", "lossless", "lossy"]
    state: Literal["complete", "failed", "infeasible"]
    settings: Settings
    batch_size: int
    params: dict[str, Any]  # as the sampler suggested them, to rebuild the study
    predicted: Prediction | None = None
    quality: Quality | None = None
    memory_bytes: int | None = None
    constraints: dict[str, float] = {}
    reason: str | None = None
    duration_s: float


class FrontPoint(Model):
    """A point that was confirmed, with its quality on the half of the workload the search never saw."""

    trial: int
    kind: Literal["plain", "lossless", "lossy"]
    recommended: bool
    settings: Settings
    batch_size: int
    predicted: Prediction
    quality: Quality
    quality_references: Quality | None = None  # on the task's human references, where it has some
    measured: Measurement | None
    note: str | None = None


class BlockRecord(Model):
    """One line of measurements.jsonl: one run of one contestant in one block, as it was counted.

    contestant: `transformers`, or the number of the trial. Seconds of wall clock; prefill and decoding apart
    (None: the contestant does not tell them apart). full_tokens, full_s: of the rounds in which all rows of a larger batch
    took part. forward: whether the block ran the contestants in order or reversed.
    """

    schema_: Literal["lossytune.block/1"] = Field("lossytune.block/1", alias="schema")
    block: int
    forward: bool
    contestant: str
    batch_size: int
    tokens: int
    total_s: float
    decode_s: float | None
    full_tokens: int | None = None
    full_s: float | None = None
    rounds: int | None
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    first_token_s: float | None
    gaps_s: tuple[float, ...] = ()  # seconds between tokens: a round's time shared by its tokens
    energy_joules: float | None = None  # of the whole run, prefill included; None: not measured
    outputs: tuple[tuple[int, ...], ...] = ()

    @property
    def decoding(self) -> tuple[int, float] | None:
        """Tokens and seconds of decoding without prefill, None where it is not told apart. Of a larger batch while it was
        whole: texts that speculation finishes at different times leave a batch that nobody refills here."""
        if self.full_tokens is not None and self.full_s is not None:
            return self.full_tokens, self.full_s
        return (self.tokens, self.decode_s) if self.decode_s else None


class Front(Model):
    """front.json: the confirmed points, fastest last, and the verdict in words. max_quality_loss: 0.05 is 5 %."""

    schema_: Literal["lossytune.front/1"] = Field("lossytune.front/1", alias="schema")
    points: tuple[FrontPoint, ...]
    verdict: str
    max_quality_loss: float
    transformers_tokens_per_s: float | None  # transformers' generate, same precision as plain, same blocks
    transformers_ratio: Estimate | None  # plain decoding here over transformers' generate


class RunManifest(Model):
    """manifest.json: all that is needed to tell what a run was, and to do it again."""

    schema_: Literal["lossytune.run/1"] = Field("lossytune.run/1", alias="schema")
    created: str
    command: tuple[str, ...]
    task: str
    target: dict[str, Any]
    draft: dict[str, Any]
    tokenizer_sha256: str
    sampling: Sampling
    workload: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    space: dict[str, Any]
    excluded: dict[str, str]  # parts of the space left out, with the reason
    seed: int
    status: Literal["running", "complete", "interrupted", "failed"] = "running"
    timings_s: dict[str, float] = {}
    peak_memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    energy: dict[str, str] | None = None  # method and scope of the blocks' joules, or the reason why there are none
    target_parameters: int | None = None  # numbers read in a pass of the target; None: not recorded
    draft_parameters: int | None = None
    #: of its `generate` where plain decoding is quantised; None: not recorded
    transformers_precision: Precision | None = None


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes through a temporary file, fsync and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def dump(record: Model) -> dict[str, Any]:
    """The record as plain JSON data, with its `schema` key."""
    return record.model_dump(mode="json", by_alias=True)


def write_record(path: Path, record: Model) -> None:
    """Writes one record as an indented JSON file, atomically."""
    write_text(path, json.dumps(dump(record), indent=2, ensure_ascii=False) + "\n")


def append_record(path: Path, record: Model) -> None:
    """Appends one line and waits until it is on the disk. A last line that a crash cut off is dropped first."""
    with open(path, "a+b") as stream:
        _drop_cut_line(stream)
        stream.write((json.dumps(dump(record)) + "\n").encode())  # ASCII, so that a cut line is still text
        stream.flush()
        os.fsync(stream.fileno())


def _drop_cut_line(stream: BinaryIO) -> None:
    """Truncates an appended file after its last newline; a last line that lacks the newline alone gets it."""
    end = stream.seek(0, os.SEEK_END)
    if end == 0:
        return
    stream.seek(end - 1)
    if stream.read(1) == b"\n":
        return
    stream.seek(0)
    data = stream.read()
    start = data.rfind(b"\n") + 1
    try:
        json.loads(data[start:])
    except ValueError:
        stream.truncate(start)
    else:  # `read_records` counts it, so it stays
        stream.write(b"\n")


def parse(data: Any, kind: type[RecordT], place: str) -> RecordT:
    """A record from JSON data; raises ConfigurationError naming the place, the field and what is allowed."""
    if not isinstance(data, dict):
        raise ConfigurationError(f"{place}: expected a JSON object, found {type(data).__name__}")
    expected = kind.model_fields["schema_"].default
    found = data.get("schema")
    if found != expected:
        name, _, version = str(found).partition("/")
        wanted_name, _, wanted_version = expected.partition("/")
        newer = name == wanted_name and version.isdigit() and int(version) > int(wanted_version)
        advice = "it was written by a newer lossytune; upgrade this one" if newer else f"expected {expected!r}"
        raise ConfigurationError(f"{place}: schema is {found!r}; {advice}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError(f"{place}: {validation_message(error, dict(kind.model_fields))}") from None


def _read_text(path: Path) -> str:
    if path.is_char_device() or path.is_block_device():  # some have no end
        raise ConfigurationError(f"{path}: cannot be read (it is a device)")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_record(path: Path, kind: type[RecordT]) -> RecordT:
    """Reads one record; raises ConfigurationError for a missing, broken or unlike file."""
    text = _read_text(path)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path}: not a JSON file ({error})") from None
    return parse(data, kind, str(path))


def read_records(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Reads a .jsonl file line by line. A last line cut off by a crash is skipped; any other broken line raises."""
    if not path.exists():
        return
    lines = _read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it: the process died while writing it
                return
            raise ConfigurationError(f"{path}, line {number}: not JSON ({error})") from None
        yield parse(data, kind, f"{path}, line {number}")
