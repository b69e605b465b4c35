"""Which precisions are worth a trace: those that are faster than the reference somewhere, measured in turns for a second."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from lossyspec.runner import Runner

from .measurement.clock import Clock, default_clock, synchronise

#: tokens of a pass that plain decoding and a usual round verify
_WIDTHS = (1, 4)
_REPEATS = 5
#: a first pass that takes so many times the reference's needs no second one
_HOPELESS = 4.0
_CONTEXT = 64


def slower_everywhere(reference: Runner, other: Runner, clock: Clock = default_clock) -> str | None:
    """Why a precision cannot win, or None: it is slower than the reference, which loses nothing, at each width of a pass."""
    said = []
    for width in _WIDTHS:
        ours, theirs = _step_s(reference, width, clock), _step_s(other, width, clock)
        mine: list[float] = []
        other_s: list[float] = []
        for repeat in range(_REPEATS):
            mine.append(ours())
            other_s.append(theirs())
            if repeat == 0 and other_s[0] > _HOPELESS * mine[0]:
                break
        if median(other_s) < median(mine):
            return None
        said.append(f"{median(other_s) * 1e3:.0f} against {median(mine) * 1e3:.0f} ms for {width} token{'s' * (width > 1)}")
    return f"slower than the reference here: {', '.join(said)}"


def _step_s(runner: Runner, width: int, clock: Clock) -> Callable[[], float]:
    """A timed pass of `width` tokens after some context, at batch 1; one has been run."""
    prompt = [3 + token % max(runner.vocab_size - 3, 1) for token in range(_CONTEXT)]
    tokens = torch.tensor([prompt[:width]], device=runner.device)
    runner.start([prompt], _CONTEXT + width)

    def step() -> float:
        synchronise(runner.device)
        began = clock()
        runner.logits(tokens, [_CONTEXT - 1])
        synchronise(runner.device)
        return clock() - began

    step()
    return step
