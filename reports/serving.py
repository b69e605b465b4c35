"""What the cost table says of batch sizes: speed a user and a device, where speculation stops paying, memory, a round.

All of it is derived: replay gives the tokens a round, the measured cost table gives the seconds. Nothing here ran live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lossyspec.records import FrontPoint, TrialRecord
from lossyspec.settings import format_of

from .load import Run

KINDS = ("plain", "lossless", "lossy")
#: what a round's time goes into
PASS, MORE, DRAFTING, JUDGING = "target, one token", "target, drafted tokens", "drafting", "judging"


@dataclass(frozen=True)
class ServingPoint:
    """The fastest configuration of one kind at a batch size, within the loss limit. Tokens/s of the whole batch."""

    trial: int
    kind: str
    batch: int
    tokens_per_s: float
    tokens_per_round: float
    round_s: float
    draft_length: int
    precision: str

    @property
    def tokens_per_s_user(self) -> float:
        """Tokens/s that each of the sequences sees."""
        return self.tokens_per_s / self.batch


@dataclass(frozen=True)
class Memory:
    """Bytes by batch size at one precision, by the run's own estimate, and the largest batch that fits.

    limit_bytes, largest_batch: None when the limit, or the growth with the batch, is not known.
    """

    precision: str
    bytes_by_batch: dict[int, int]
    limit_bytes: int | None
    fixed_bytes: float | None
    bytes_per_sequence: float | None

    @property
    def largest_batch(self) -> int | None:
        """The largest number of sequences within the limit; 0 when not even the weights fit."""
        if self.limit_bytes is None or self.fixed_bytes is None or not self.bytes_per_sequence:
            return None
        return max(0, int((self.limit_bytes - self.fixed_bytes) // self.bytes_per_sequence))


def serving_points(run: Run) -> list[ServingPoint]:
    """For each batch size that was searched, the fastest plain, lossless and lossy configuration; absent ones left out."""
    found: list[ServingPoint] = []
    for batch in sorted({trial.batch_size for trial in run.trials}):
        for kind in KINDS:
            best = max(
                (trial for trial in run.trials if trial.batch_size == batch and trial.kind == kind and usable(trial, run)),
                key=_speed,
                default=None,
            )
            if best is not None and best.predicted is not None:
                found.append(
                    ServingPoint(
                        best.number,
                        kind,
                        batch,
                        best.predicted.tokens_per_s,
                        best.predicted.tokens_per_round,
                        best.predicted.round_s,
                        best.settings.draft_length_for(batch),
                        best.settings.precision.target,
                    )
                )
    return found


def _speed(trial: TrialRecord) -> float:
    return trial.predicted.tokens_per_s if trial.predicted else 0.0


def usable(trial: TrialRecord, run: Run) -> bool:
    """Complete, with a speed, and within the loss limit where it is known."""
    if trial.state != "complete" or trial.predicted is None or trial.quality is None:
        return False
    limit = run.loss_limit
    return trial.kind != "lossy" or limit is None or trial.quality.perplexity_ratio.value <= 1 + limit


def speedups_by_batch(points: Sequence[ServingPoint], kind: str) -> dict[int, float]:
    """Speed-up over plain decoding at the same batch size, where both are there."""
    plain = {point.batch: point.tokens_per_s for point in points if point.kind == "plain"}
    return {
        point.batch: point.tokens_per_s / plain[point.batch]
        for point in points
        if point.kind == kind and plain.get(point.batch)
    }


def stops_paying(speedups: dict[int, float]) -> int | None:
    """The smallest batch size from which on no searched one is faster than plain; None when the largest still is."""
    slow = [batch for batch in speedups if all(speedups[other] <= 1.0 for other in speedups if other >= batch)]
    return min(slow, default=None)


def memory(run: Run) -> Memory | None:
    """Memory at the precision of the recommended point, else of the fastest plain one; None when no trial has bytes."""
    known = [trial for trial in run.trials if trial.memory_bytes]
    if not known:
        return None
    best = run.recommended
    precision = best.settings.precision.target if best else max(known, key=_speed).settings.precision.target
    by_batch: dict[int, int] = {}
    for trial in known:
        if trial.settings.precision.target == precision and trial.memory_bytes:
            by_batch[trial.batch_size] = max(by_batch.get(trial.batch_size, 0), trial.memory_bytes)
    if not by_batch:
        return None
    fixed = growth = None
    if len(by_batch) > 1:
        low, high = min(by_batch), max(by_batch)
        growth = (by_batch[high] - by_batch[low]) / (high - low)
        fixed = by_batch[low] - growth * low
    return Memory(precision, dict(sorted(by_batch.items())), device_memory_bytes(run), fixed, growth)


def device_memory_bytes(run: Run) -> int | None:
    """Memory of the device as the run recorded it: of its first visible GPU, else what the process may use; or None."""
    hardware = run.manifest.hardware
    gpus = [gpu for gpu in hardware.get("gpus") or [] if isinstance(gpu, dict) and gpu.get("visible")]
    if gpus:
        return _bytes(gpus[0].get("memory_bytes"))
    cpu, device = hardware.get("cpu"), hardware.get("device")
    if isinstance(cpu, dict):
        known = [value for name in ("memory_bytes", "memory_limit_bytes") if (value := _bytes(cpu.get(name)))]
        return min(known, default=None)
    return _bytes(device.get("memory_bytes")) if isinstance(device, dict) else None


def _bytes(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def draft_steps(point: FrontPoint | TrialRecord) -> float:
    """Steps of a draft model in a mean round, by the prediction: one more than it drafts where it may stop early."""
    if point.predicted is None:
        return 0.0
    settings = point.settings
    return min(point.predicted.drafted_per_round + (settings.theta > 0), settings.draft_length_for(point.batch_size))


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place between two of a list; the last one beyond its end."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - int(place)) * (values[high] - values[low])


def round_parts(run: Run, point: FrontPoint | TrialRecord) -> dict[str, float] | None:
    """Seconds of a round, by what they go into: the target's pass for one token, what more tokens add, drafting, judging.

    They add up to the predicted round. None when the cost table lacks the precision or the batch size.
    """
    costs, settings, batch, predicted = run.costs, point.settings, point.batch_size, point.predicted
    rounds = costs.round_s.get((settings.cost_format, batch)) if costs else None
    if costs is None or not rounds or predicted is None:
        return None
    total, length = predicted.round_s, settings.draft_length_for(batch)
    if length == 0:
        return {PASS: total}
    judging = costs.judge_s.get((settings.rule, batch), 0.0)
    by_model = costs.draft_s.get((format_of(settings.precision.target, settings.attention.on("draft")), batch))
    if by_model:
        drafting = _between(by_model, draft_steps(point))
    else:
        lookup = costs.lookup_s.get(batch, ())
        drafting = lookup[length] if length < len(lookup) else 0.0
    first = min(rounds[0], total)
    drafting = min(drafting, total - first)
    judging = min(judging, total - first - drafting)
    return {PASS: first, MORE: total - first - drafting - judging, DRAFTING: drafting, JUDGING: judging}
