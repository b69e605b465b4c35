"""Absolute figures of the live runs: tokens/s, joules a token and seconds of prefill, with intervals over blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lossyspec.records import BlockRecord, Estimate, FrontPoint

from .load import Run

RESAMPLES = 1000
MIN_BLOCKS = 3  # with fewer there is no interval


def plain_point(run: Run) -> FrontPoint | None:
    """The plain point of the front, or None."""
    return next((point for point in run.points if point.kind == "plain"), None)


def lossless_point(run: Run) -> FrontPoint | None:
    """The fastest measured lossless point of the front, or None."""
    found = [point for point in run.points if point.kind == "lossless" and point.measured]
    return max(found, key=lambda point: point.measured.speedup.value if point.measured else 0.0, default=None)


def blocks_of(run: Run, point: FrontPoint) -> list[BlockRecord]:
    """The live runs of a point of the front."""
    return [record for record in run.blocks if record.contestant == str(point.trial)]


def decode_speed(run: Run, point: FrontPoint) -> Estimate | None:
    """Tokens/s of the whole batch while decoding, without prefill; from the front where no block is stored."""
    blocks = [record for record in blocks_of(run, point) if record.decoding]
    if not blocks:
        return Estimate(value=point.measured.tokens_per_s) if point.measured else None
    return _ratio(blocks, lambda record: _decoding(record)[0], lambda record: _decoding(record)[1])


def _decoding(record: BlockRecord) -> tuple[int, float]:
    return record.decoding or (0, 0.0)


def served_speed(run: Run, point: FrontPoint) -> Estimate | None:
    """Tokens/s of the whole batch with prefill: what a price is divided by. None where no block is stored."""
    blocks = blocks_of(run, point)
    return _ratio(blocks, lambda record: record.tokens, lambda record: record.total_s) if blocks else None


def joules_per_token(run: Run, point: FrontPoint) -> Estimate | None:
    """Joules a token, prefill included. None unless every live run of the point has its energy: absent is not 0."""
    blocks = blocks_of(run, point)
    if not blocks or any(record.energy_joules is None for record in blocks):
        return None
    return _ratio(blocks, lambda record: record.energy_joules or 0.0, lambda record: record.tokens)


def prefill_s(run: Run) -> float | None:
    """Mean seconds from the start of a live plain run to its decoding, for its whole batch. None when not stored."""
    plain = plain_point(run)
    blocks = [record for record in blocks_of(run, plain) if record.decode_s is not None] if plain else []
    if not blocks:
        return None
    return sum(record.total_s - (record.decode_s or 0.0) for record in blocks) / len(blocks)


def noise_band(run: Run) -> tuple[float, float] | None:
    """95 % range of plain decoding over itself: ratios of two resamples of its own blocks. None: under 3 blocks.

    It is unpaired, so wider than the interval of a contestant that ran in the same blocks.
    """
    plain = plain_point(run)
    blocks = [record for record in blocks_of(run, plain) if record.decoding] if plain else []
    if len(blocks) < MIN_BLOCKS:
        return None
    source = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        speeds = []
        for _ in range(2):
            drawn = source.choices(blocks, k=len(blocks))
            speeds.append(sum(_decoding(one)[0] for one in drawn) / sum(_decoding(one)[1] for one in drawn))
        ratios.append(speeds[0] / speeds[1])
    return _middle_95(ratios)


def _ratio(
    blocks: Sequence[BlockRecord], above: Callable[[BlockRecord], float], below: Callable[[BlockRecord], float]
) -> Estimate | None:
    """Sum over sum with an interval that resamples whole blocks; None when there is nothing to divide by."""
    pairs = [(float(above(record)), float(below(record))) for record in blocks]
    total, divisor = (sum(part) for part in zip(*pairs, strict=True))
    if divisor <= 0:
        return None
    if len(pairs) < MIN_BLOCKS:
        return Estimate(value=total / divisor)
    source = random.Random(0)
    draws = [source.choices(pairs, k=len(pairs)) for _ in range(RESAMPLES)]
    ratios = [sum(one for one, _ in drawn) / sum(two for _, two in drawn) for drawn in draws]
    return Estimate(value=total / divisor, ci95=_middle_95(ratios))


def _middle_95(values: Sequence[float]) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles, interpolated."""
    ranked = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ranked) - 1)
        low = int(place)
        high = min(low + 1, len(ranked) - 1)
        return ranked[low] + (ranked[high] - ranked[low]) * (place - low)

    return quantile(0.025), quantile(0.975)
