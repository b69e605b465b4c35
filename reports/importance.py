"""What each knob does: the share of the variance of an outcome, over the trials of the search, that it explains alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from .load import Run

BINS = 8
MIN_TRIALS = 30


@dataclass(frozen=True)
class Importance:
    """Shares (0-1) of the variance of the predicted speed-up and of the log perplexity ratio that a knob explains alone."""

    knob: str
    speedup: float
    loss: float


def knob_importance(run: Run) -> tuple[list[Importance], int]:
    """Knobs by their share in the speed-up, most first, and on how many trials that rests.

    Empty with fewer than 30 finished trials. Values of a number are put into 8 bins of equal count. The share is
    epsilon squared, which is 0 on average for a knob that does nothing. The sampler looks more often where it is good,
    so the shares hold for the trials that it made, not for the space at large.
    """
    rows = [
        (trial.params, trial.predicted.speedup, log(trial.quality.perplexity_ratio.value))
        for trial in run.trials
        if trial.state != "failed" and trial.predicted and trial.quality and trial.quality.perplexity_ratio.value > 0
    ]
    if len(rows) < MIN_TRIALS:
        return [], len(rows)
    knobs = sorted({name for params, _, _ in rows for name in params})
    found = []
    for knob in knobs:
        groups = grouped([params.get(knob) for params, _, _ in rows])
        if len(set(groups)) > 1:
            speedups, losses = [speed for _, speed, _ in rows], [loss for _, _, loss in rows]
            found.append(Importance(knob, explained(groups, speedups), explained(groups, losses)))
    return sorted(found, key=lambda item: -item.speedup), len(rows)


def grouped(values: Sequence[Any]) -> list[Hashable]:
    """Numbers with many values by rank into bins of about equal count, equal ones together; all else as it is."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    distinct = sorted(set(numbers))
    if len(distinct) <= BINS:
        return [value if isinstance(value, Hashable) else repr(value) for value in values]
    ranked = sorted(numbers)
    ends = [ranked[len(ranked) * place // BINS] for place in range(1, BINS)]
    return [
        sum(value >= end for end in ends) if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)
        for value in values
    ]


def explained(groups: Sequence[Hashable], values: Sequence[float]) -> float:
    """Epsilon squared of one-way groups, 0 to 1: the variance between groups, less what chance gives, over all of it."""
    count, mean = len(values), sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    parts: dict[Hashable, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        parts.setdefault(group, []).append(value)
    free = count - len(parts)
    if total <= 1e-12 * count * max(mean**2, 1e-12) or free <= 0:
        return 0.0
    within = sum(sum((value - sum(part) / len(part)) ** 2 for value in part) for part in parts.values())
    return min(1.0, max(0.0, (total - within - (len(parts) - 1) * within / free) / total))
