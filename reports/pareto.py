"""Records to a frozen info object: what the Pareto plot shows, as plain values that tests can compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lossyspec.records import FrontPoint, TrialRecord

from .load import Counts, Run, machine_name, pair_name
from .speeds import noise_band

Interval = tuple[float, float]
Kind = Literal["plain", "lossless", "lossy"]
ROOM = 0.5  # searched points may stretch an axis by this share of the range of the confirmed points and the limit
FAR = 4.0  # a limit of more than this many times the largest confirmed loss is not drawn


@dataclass(frozen=True)
class ConfirmedPoint:
    """A point of the front. A value that is absent is None; such a point is not drawn."""

    trial: int
    kind: Kind
    recommended: bool
    label: str
    speedup: float | None
    speedup_ci95: Interval | None
    perplexity_ratio: float | None
    perplexity_ratio_ci95: Interval | None
    dominated: bool

    @property
    def drawable(self) -> bool:
        """True when both coordinates are known."""
        return self.speedup is not None and self.perplexity_ratio is not None

    @property
    def place(self) -> tuple[float, float]:
        """Loss in percent and speed-up; NaN where absent."""
        ratio = math.nan if self.perplexity_ratio is None else self.perplexity_ratio
        return loss_percent(ratio), math.nan if self.speedup is None else self.speedup

    @property
    def bars(self) -> tuple[Interval | None, Interval | None]:
        """Intervals of the loss in percent and of the speed-up."""
        ends = self.perplexity_ratio_ci95
        return (loss_percent(ends[0]), loss_percent(ends[1])) if ends else None, self.speedup_ci95


@dataclass(frozen=True)
class SearchedPoint:
    """A trial of the search, by its prediction. An infeasible one is never on the front: it counts as dominated."""

    trial: int
    kind: Kind
    speedup: float
    perplexity_ratio: float
    dominated: bool
    infeasible: bool

    @property
    def place(self) -> tuple[float, float]:
        """Loss in percent and speed-up."""
        return loss_percent(self.perplexity_ratio), self.speedup


@dataclass(frozen=True)
class ParetoInfo:
    """All that the Pareto plot shows. `loss_limit` is a share: 0.05 allows a perplexity ratio of 1.05."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    confirmed: tuple[ConfirmedPoint, ...]
    searched: tuple[SearchedPoint, ...]
    counts: Counts
    loss_limit: float | None
    has_front: bool
    confirmed_left_out: int  # points of the front without a measured speed-up or a ratio
    searched_left_out: int  # trials that did not fail but have no prediction or no ratio
    lossless_speedup: float | None = None  # of the fastest measured lossless point
    noise_band: Interval | None = None  # 95 % range of plain decoding over itself

    @property
    def drawn(self) -> tuple[ConfirmedPoint, ...]:
        """The confirmed points that have a place."""
        return tuple(point for point in self.confirmed if point.drawable)


@dataclass(frozen=True)
class View:
    """What part of the plane is drawn, loss in percent, and how many searched points are outside of it."""

    x: Interval
    y: Interval
    outside: int

    def holds(self, loss: float, speedup: float = 1.0) -> bool:
        """True when the place is inside; without a speed-up, when the loss is (1.0 is always shown)."""
        return self.x[0] <= loss <= self.x[1] and self.y[0] <= speedup <= self.y[1]


def loss_percent(perplexity_ratio: float) -> float:
    """The loss axis: a ratio of 1.031 is 3.1 %."""
    return (perplexity_ratio - 1.0) * 100.0


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (speed-up, ratio): True when no other is at least as fast with at most its ratio and better in one.

    Equal points do not dominate each other. A point with a NaN is never on the front. O(n log n).
    """
    keep = [False] * len(points)
    valid = [index for index, point in enumerate(points) if not any(math.isnan(value) for value in point)]
    valid.sort(key=lambda index: (-points[index][0], points[index][1]))
    best: float | None = None  # lowest ratio among the strictly faster points
    for _, group in groupby(valid, key=lambda index: points[index][0]):
        tied = list(group)
        lowest = points[tied[0]][1]
        if best is None or lowest < best:
            best = lowest
            for index in tied:
                keep[index] = points[index][1] == lowest
    return keep


def pareto_info(run: Run) -> ParetoInfo:
    """The info object of a run; failed trials are counted and never among the points."""
    confirmed = _confirmed(run.points)
    tried = [trial for trial in run.trials if trial.state != "failed"]
    searched = _searched(tried)
    manifest = run.manifest
    pair = pair_name(manifest.target, manifest.draft, paths=False)
    temperature = f"temperature {manifest.sampling.temperature:g}"
    return ParetoInfo(
        title=f"{manifest.task}: speed-up against loss",
        subtitle=f"{pair}, {temperature}, on {machine_name(manifest.hardware)}",
        x_label="Loss: exact perplexity over the target's, held-out text",
        y_label="Speed-up over the fastest plain decoding",
        confirmed=confirmed,
        searched=searched,
        counts=run.counts,
        loss_limit=run.loss_limit,
        has_front=run.front is not None,
        confirmed_left_out=sum(not point.drawable for point in confirmed),
        searched_left_out=len(tried) - len(searched),
        lossless_speedup=max((p.speedup for p in confirmed if p.kind == "lossless" and p.speedup), default=None),
        noise_band=noise_band(run),
    )


def axis_range(core: Sequence[float], extra: Iterable[float]) -> Interval:
    """A range with all of `core`, and of `extra` what is at most `ROOM` of the core's range away from it."""
    low, high = min(core), max(core)
    room = (high - low) * ROOM
    near = [value for value in extra if low - room <= value <= high + room]
    low, high = min([low, *near]), max([high, *near])
    pad = 0.06 * (high - low) or 0.05 * max(abs(high), 1.0)
    return low - pad, high + pad


def view(info: ParetoInfo) -> View:
    """Axis ranges that the confirmed points and a limit near them set: what is far from them does not squash them."""
    places = [point.place for point in info.drawn]
    xs = [0.0, *(x for x, _ in places)]
    if info.loss_limit is not None and (not places or info.loss_limit * 100 <= FAR * max(max(xs), 1.0)):
        xs.append(info.loss_limit * 100)
    reach = max(xs) * (1 + ROOM) or math.inf
    xs += [min(end, reach) for point in info.drawn for end in point.bars[0] or ()]
    if not places and info.searched and all(point.infeasible for point in info.searched):
        xs.append(min(point.place[0] for point in info.searched))  # how near the nearest one came
    if len(xs) == 1:
        xs += [point.place[0] for point in info.searched if not point.dominated]
    x = axis_range(xs, [point.place[0] for point in info.searched])
    inside = [point for point in info.searched if x[0] <= point.place[0] <= x[1]]
    ys = [1.0, *(y for _, y in places)]
    reach = max(ys) * (1 + ROOM)
    ys += [min(end, reach) for point in info.drawn for end in point.bars[1] or ()]
    if not places:
        ys += [point.speedup for point in inside if not point.infeasible] or [point.speedup for point in inside]
    y = axis_range(ys, [point.speedup for point in inside])
    return View(x, y, len(info.searched) - sum(y[0] <= point.speedup <= y[1] for point in inside))


def footnote(info: ParetoInfo, limits: View) -> str:
    """What the figure does not show, in one line."""
    limit = info.loss_limit
    missing = [
        (limits.outside, "searched outside the axes"),
        (info.confirmed_left_out + info.searched_left_out, "without a value"),
        (info.counts.failed, "failed"),
    ]
    parts = [f"{count} {what}" for count, what in missing if count]
    if limit is not None and not limits.holds(limit * 100):
        parts.append(f"the limit of +{limit * 100:.3g} %")
    first = "Bars: 95 % intervals." if info.drawn else "Predictions only: nothing was confirmed."
    return first + (f" Not drawn: {', '.join(parts)}." if parts else "")


def point_labels(points: Sequence[FrontPoint]) -> list[str]:
    """A few words a point: the kind, or the rule with its alpha; more only for those that are not told apart by it."""
    labels = [
        f"{point.settings.rule} α {point.settings.alpha:.2f}" if point.kind == "lossy" else point.kind for point in points
    ]
    details = (
        [f"{point.settings.draft_length_for(point.batch_size)} drafted" for point in points],
        [f"batch {point.batch_size}" for point in points],
        [f"trial {point.trial}" for point in points],
    )
    for detail in details:
        seen = Counter(labels)
        labels = [f"{label}, {more}" if seen[label] > 1 else label for label, more in zip(labels, detail, strict=True)]
    return labels


def _confirmed(points: Sequence[FrontPoint]) -> tuple[ConfirmedPoint, ...]:
    """The points of the front, with measured speed-ups only: a prediction is never shown as a measurement."""
    speeds = [_positive(point.measured.speedup.value) if point.measured else None for point in points]
    ratios = [_positive(point.quality.perplexity_ratio.value) for point in points]
    labels = point_labels(points)
    on_front = non_dominated([(s or math.nan, r or math.nan) for s, r in zip(speeds, ratios, strict=True)])
    return tuple(
        ConfirmedPoint(
            trial=point.trial,
            kind=point.kind,
            recommended=point.recommended,
            label=label,
            speedup=speed,
            speedup_ci95=point.measured.speedup.ci95 if point.measured else None,
            perplexity_ratio=ratio,
            perplexity_ratio_ci95=point.quality.perplexity_ratio.ci95,
            dominated=not kept,
        )
        for point, label, speed, ratio, kept in zip(points, labels, speeds, ratios, on_front, strict=True)
    )


def _searched(trials: Sequence[TrialRecord]) -> tuple[SearchedPoint, ...]:
    """Trials with both values; the front among them is that of the feasible ones."""
    found: list[tuple[TrialRecord, float, float]] = []
    for trial in trials:
        speed = _positive(trial.predicted.speedup) if trial.predicted else None
        ratio = _positive(trial.quality.perplexity_ratio.value) if trial.quality else None
        if speed is not None and ratio is not None:
            found.append((trial, speed, ratio))
    feasible = [(speed, ratio) if trial.state == "complete" else (math.nan, math.nan) for trial, speed, ratio in found]
    return tuple(
        SearchedPoint(trial.number, trial.kind, speed, ratio, not kept, trial.state == "infeasible")
        for (trial, speed, ratio), kept in zip(found, non_dominated(feasible), strict=True)
    )


def _positive(value: float) -> float | None:
    """The value, or None for one that no measurement can give: neither axis can be 0 or less."""
    return value if value > 0 and math.isfinite(value) else None
