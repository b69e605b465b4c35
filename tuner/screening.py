"""Which precisions are worth a trace: the fastest two that beat the reference somewhere, measured in turns for a second."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from lossyspec.errors import ConfigurationError
from lossyspec.hardware import HardwareInfo, supported_precisions
from lossyspec.runner import Runner
from lossyspec.settings import QUANTISED, Precision, Sampling

from .measurement.clock import Clock, default_clock, synchronise
from .models import ModelPool
from .search_space import SearchSpace

#: tokens of a pass that plain decoding and a usual round verify
WIDTHS = (1, 4)
_REPEATS = 5
#: a first pass that takes so many times the reference's needs no second one
_HOPELESS = 4.0
_CONTEXT = 64
#: tokens that transformers writes in each of its turns, after so few that reading them does not decide
_OUTSIDE_TOKENS, _OUTSIDE_PROMPT, _OUTSIDE_TURNS = 16, 8, 2
#: precisions beside the reference
_MOST = 2


@dataclass(frozen=True)
class Times:
    """Median seconds of a pass of each of WIDTHS tokens at batch 1, by the reference and by another precision in turns."""

    reference_s: tuple[float, ...]
    other_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Mean of the other's time over the reference's."""
        return sum(mine / other for mine, other in zip(self.other_s, self.reference_s, strict=True)) / len(WIDTHS)

    @property
    def slower(self) -> str | None:
        """Why the precision cannot win, or None: it is slower at each width than the reference, which loses nothing."""
        pairs = list(zip(WIDTHS, self.reference_s, self.other_s, strict=True))
        if any(other < mine for _, mine, other in pairs):
            return None
        said = (
            f"{other * 1e3:.0f} against {mine * 1e3:.0f} ms for {width} token{'s' * (width > 1)}"
            for width, mine, other in pairs
        )
        return f"slower than the reference here: {', '.join(said)}"


def measure(reference: Runner, other: Runner, clock: Clock = default_clock) -> Times:
    """Times passes of both in turns."""
    medians: list[tuple[float, float]] = []
    for width in WIDTHS:
        ours, theirs = _step_s(reference, width, clock), _step_s(other, width, clock)
        mine: list[float] = []
        other_s: list[float] = []
        for repeat in range(_REPEATS):
            mine.append(ours())
            other_s.append(theirs())
            if repeat == 0 and other_s[0] > _HOPELESS * mine[0]:
                break
        medians.append((median(mine), median(other_s)))
    return Times(tuple(pair[0] for pair in medians), tuple(pair[1] for pair in medians))


def left_out(times: Mapping[Precision, Times]) -> dict[Precision, str]:
    """The precisions that a search does without, with the reason: those that cannot win, and all but the fastest few."""
    found = {name: reason for name, each in times.items() if (reason := each.slower) is not None}
    ranked = sorted((name for name in times if name not in found), key=lambda name: times[name].ratio)
    for name in ranked[_MOST:]:
        faster = " and ".join(ranked[:_MOST])
        found[name] = f"{faster} are faster here, and a search looks at {_MOST + 1} precisions; ask for it with --precision"
    return found


def screen(space: SearchSpace, pool: ModelPool, reference: Precision) -> dict[Precision, str]:
    """The precisions to do without: they do not run with this model, or others are faster. Tells the pool which dense format
    is fastest."""
    found: dict[Precision, str] = {}
    times: dict[Precision, Times] = {}
    base = pool.decoder(reference).target
    for precision in space.precisions:
        if precision != reference:
            try:
                times[precision] = measure(base, pool.decoder(precision).target)
            except ConfigurationError as problem:
                found[precision] = str(problem)
    pool.outside = fastest_outside(pool, [name for name in (reference, *times) if name not in QUANTISED] or [pool.outside])
    return found | left_out(times)


def fastest_dense(pool: ModelPool, hardware: HardwareInfo, kept: Collection[Precision]) -> Precision:
    """The dense format of this hardware in which transformers is fastest. kept: those that the search needs; of the others
    only the fastest stays in memory."""
    usable = [name for name, reason in supported_precisions(hardware).items() if reason is None and name not in QUANTISED]
    best = fastest_outside(pool, usable)
    for precision in usable:
        if precision != best and precision not in kept:
            pool.forget(precision)
    return best


def fastest_outside(pool: ModelPool, names: Sequence[Precision]) -> Precision:
    """The dense format in which transformers' own `generate` is fastest, by turns: it runs beside quantised targets,
    and what is fastest by the fused forward need not be so by its own."""
    if len(names) == 1:
        return names[0]
    sampling, size = Sampling(temperature=0.0), pool.decoder(names[0]).target.vocab_size
    prompt = [token % size for token in range(3, 3 + _OUTSIDE_PROMPT)]
    runs = {name: pool.run_transformers(name, sampling, _OUTSIDE_TOKENS, min_new_tokens=_OUTSIDE_TOKENS) for name in names}
    taken: dict[Precision, list[float]] = {name: [] for name in names}
    for turn in range(_OUTSIDE_TURNS + 1):
        for name, run in runs.items():
            seconds = run([prompt], 0).total_s
            if turn:  # the first one warms up
                taken[name].append(seconds)
    return min(names, key=lambda name: median(taken[name]))


def narrow(space: SearchSpace, pool: ModelPool, reference: Precision, say: Callable[[str], None]) -> SearchSpace:
    """The space without those precisions, with the reasons in `excluded`."""
    found = screen(space, pool, reference)
    for precision, reason in found.items():
        if precision != pool.outside:
            pool.forget(precision)
        say(f"precision {precision} is left out: {reason}")
    kept = tuple(name for name in space.precisions if name not in found)
    excluded = space.excluded | {f"precision {name}": reason for name, reason in found.items()}
    return replace(space, precisions=kept, excluded=excluded)


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
