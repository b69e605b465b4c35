"""Clocks that can be replaced in tests, and statistics of repeated measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: seconds, as time.perf_counter
Clock = Callable[[], float]

default_clock: Clock = time.perf_counter


def synchronise(device: Any) -> None:
    """Waits until the device has finished what was queued, so that a clock read after it counts the work."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)


def ratio_interval(
    tokens: Sequence[Sequence[float]],
    seconds: Sequence[Sequence[float]],
    base_tokens: Sequence[Sequence[float]],
    base_seconds: Sequence[Sequence[float]],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % interval of a ratio of speeds, resampling whole blocks: both sides of a ratio come from the same blocks.

    Each argument: a list of blocks, each a list of runs. None when there are fewer than 3 blocks.
    """
    sums = [np.array([sum(block) for block in part]) for part in (tokens, seconds, base_tokens, base_seconds)]
    blocks = len(sums[0])
    if blocks < 3:
        return None
    picks = np.random.default_rng(seed).integers(0, blocks, (resamples, blocks))
    new, new_s, base, base_s = (part[picks].sum(1) for part in sums)
    low, high = np.quantile((new / new_s) / (base / base_s), [0.025, 0.975])
    return float(low), float(high)
