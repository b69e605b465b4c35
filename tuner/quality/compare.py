"""Paired comparison of a profile with plain decoding: the difference, its interval, and what could have been seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: sum of the normal quantiles of a two-sided test at 5 % and of a power of 80 %
_POWER = 1.959964 + 0.841621


@dataclass(frozen=True)
class Comparison:
    """One measure over the prompts where both sides have a value.

    change: profile minus plain (for `ratio`: profile over plain). ci95: paired bootstrap over prompts, None under 3 prompts.
    detectable: the least difference that this many prompts show with 80 % power at the 5 % level; None where no pair
    differs, or under 3 prompts: then nothing is known about it.
    """

    measure: str
    prompts: int
    plain: float
    profile: float
    change: float
    ci95: tuple[float, float] | None
    detectable: float | None
    ratio: bool = False


def _resampled(count: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (resamples, count))


def compare_means(
    measure: str, plain: Sequence[float], profile: Sequence[float], resamples: int = 4000, seed: int = 0
) -> Comparison:
    """Means of paired values, one pair a prompt."""
    old, new = np.asarray(plain, dtype=float), np.asarray(profile, dtype=float)
    differences, count = new - old, len(old)
    interval = detectable = None
    if count >= 3:
        low, high = np.quantile(differences[_resampled(count, resamples, seed)].mean(1), [0.025, 0.975])
        interval = (float(low), float(high))
        spread = float(differences.std(ddof=1))
        detectable = _POWER * spread / count**0.5 if spread > 0 else None
    return Comparison(measure, count, float(old.mean()), float(new.mean()), float(differences.mean()), interval, detectable)


def compare_totals(
    measure: str, plain: Sequence[float], profile: Sequence[float], resamples: int = 4000, seed: int = 0
) -> Comparison:
    """Ratio of the sums of paired values, as for lengths. `plain` must not sum to 0."""
    old, new = np.asarray(plain, dtype=float), np.asarray(profile, dtype=float)
    ratio, count = float(new.sum() / old.sum()), len(old)
    interval = detectable = None
    if count >= 3:
        picks = _resampled(count, resamples, seed)
        low, high = np.quantile(new[picks].sum(1) / old[picks].sum(1), [0.025, 0.975])
        interval = (float(low), float(high))
        spread = float((new - ratio * old).std(ddof=1))  # of the ratio, by linearisation
        detectable = _POWER * spread / count**0.5 / float(old.mean()) if spread > 0 else None
    return Comparison(measure, count, float(old.mean()), float(new.mean()), ratio, interval, detectable, ratio=True)
