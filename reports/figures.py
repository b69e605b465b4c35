"""Figures that put runs side by side: absolute speed, batch size, memory, prediction. Only runs that may be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lossyspec.records import FrontPoint

from .charts import DERIVED, KIND_COLOURS, PALETTE, PREDICTED, Chart, Drawn, Line, Mark, Missing, Series, Source
from .load import Run
from .pareto import loss_percent
from .predict import PredictedPoint
from .serving import KINDS, ServingPoint, device_memory_bytes, memory, serving_points, speedups_by_batch, stops_paying
from .speeds import decode_speed
from .summary import three

GIB = 2**30


@dataclass(frozen=True)
class Group:
    """Runs that may be drawn together, with a label each, and what was predicted from the first of them."""

    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    predicted: tuple[PredictedPoint, ...] = ()
    serving: tuple[tuple[ServingPoint, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "serving", tuple(tuple(serving_points(run)) for run in self.runs))

    def colour(self, place: int, kind: str) -> str:
        """By kind when there is one run, by run when there are several."""
        return KIND_COLOURS[kind] if len(self.runs) == 1 else PALETTE[place % len(PALETTE)]

    def name(self, place: int, kind: str) -> str:
        """What a series is called in the legend."""
        return kind if len(self.runs) == 1 else f"{self.labels[place]}, {kind}"

    def devices(self) -> list[str]:
        """Devices that were predicted, in order."""
        return list(dict.fromkeys(point.device for point in self.predicted))

    def predicted_colour(self, device: str) -> str:
        """A colour that no run of the group has."""
        first = 3 if len(self.runs) == 1 else len(self.runs)
        return PALETTE[(first + self.devices().index(device)) % len(PALETTE)]


def _measured(group: Group, place: int, kind: str, marks: Sequence[Mark]) -> Series:
    """The points of one kind that the run at `place` of the group measured live."""
    colour = group.colour(place, kind)
    return Series(group.name(place, kind), group.labels[place], kind, "measured", colour, tuple(marks), joined=False)


def compare_figure(group: Group) -> Drawn:
    """Tokens/s against loss: the front of every run on absolute axes."""
    title = "Tokens/s against loss"
    series = []
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        for kind in KINDS:
            marks = [mark for point in run.points if point.kind == kind and (mark := _front_mark(run, label, point))]
            if marks:
                series.append(_measured(group, place, kind, marks))
    if not series:
        return Missing(title, "no point was measured live")
    return Chart("speed-against-loss", title, "Loss: perplexity over the target's, %", "Tokens/s a device, decoding",
                 tuple(series), "Measured live; bars are 95 % intervals over blocks.", from_zero=True)  # fmt: skip


def _front_mark(run: Run, label: str, point: FrontPoint) -> Mark | None:
    speed = decode_speed(run, point)
    if speed is None:
        return None
    low, high = speed.ci95 or (None, None)
    ratio = point.quality.perplexity_ratio
    ends = [loss_percent(end) for end in ratio.ci95] if ratio.ci95 else [None, None]
    loss = loss_percent(ratio.value)
    text = f"{label}, {point.kind}, batch {point.batch_size}: {three(speed.value)} tokens/s at {loss:+.2f} %, measured"
    return Mark(loss, speed.value, text, low, high, *ends)


def serving_figure(group: Group) -> Drawn:
    """Tokens/s a user against tokens/s a device, over batch sizes; live points with their intervals on top."""
    title = "Speed a user against speed a device"
    series: list[Series] = []
    for place, label in enumerate(group.labels):
        for kind in KINDS:
            points = [point for point in group.serving[place] if point.kind == kind]
            if points:
                marks = tuple(_serving_mark(label, point, "derived") for point in points)
                series.append(Series(group.name(place, kind), label, kind, "derived", group.colour(place, kind), marks))
    for device in group.devices():
        for kind in KINDS:
            some = [point for point in group.predicted if point.device == device and point.kind == kind]
            if some and kind != "lossless":
                marks = tuple(_predicted_mark(point) for point in some)
                series.append(Series(f"{device}, {kind} (predicted)", device, kind, "predicted",
                                     group.predicted_colour(device), marks))  # fmt: skip
    if not series:
        return Missing(title, "no trial has a predicted speed")
    live = []
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        best = run.recommended
        speed = decode_speed(run, best) if best else None
        if best and speed:
            low, high = speed.ci95 or (None, None)
            text = f"{label}, recommended, batch {best.batch_size}: {three(speed.value)} tokens/s, measured live"
            mark = Mark(speed.value / best.batch_size, speed.value, text, low, high)
            colour = KIND_COLOURS["recommended"] if len(group.runs) == 1 else group.colour(place, "lossy")
            name = "recommended, live" if len(group.runs) == 1 else f"{label}, live"
            live.append(Series(name, label, "recommended", "measured", colour, (mark,), joined=False))
    note = f"{DERIVED} Numbers beside points: sequences in a batch." + (" Stars: measured live." if live else "")
    note += f" {PREDICTED}" if group.predicted else ""
    return Chart(
        "user-and-device", title, "Tokens/s a user", "Tokens/s a device", (*series, *live), note, y_log=True, x_tens=True
    )


def _serving_mark(label: str, point: ServingPoint, source: Source) -> Mark:
    text = (
        f"{label}, {point.kind}, batch {point.batch}: {three(point.tokens_per_s_user)} tokens/s a user, "
        f"{three(point.tokens_per_s)} a device; {point.precision}, {point.draft_length} drafted ({source})"
    )
    return Mark(point.tokens_per_s_user, point.tokens_per_s, text, label=str(point.batch))


def _predicted_mark(point: PredictedPoint) -> Mark:
    text = (
        f"{point.device}, {point.kind}, batch {point.batch}: {three(point.tokens_per_s)} tokens/s a device "
        f"({three(point.low)}-{three(point.high)}), predicted"
    )
    return Mark(point.tokens_per_s / point.batch, point.tokens_per_s, text, point.low, point.high, label=str(point.batch))


def batch_figure(group: Group) -> Drawn:
    """Speed-up over plain decoding at the same batch size, and from which batch size on it is gone."""
    title = "Where speculation stops paying"
    series, said = [], []
    for place, label in enumerate(group.labels):
        for kind in KINDS[1:]:
            speedups = speedups_by_batch(group.serving[place], kind)
            if not speedups:
                continue
            marks = tuple(
                Mark(batch, ratio, f"{label}, {kind}, batch {batch}: {ratio:.2f}x over plain at this batch size (derived)")
                for batch, ratio in speedups.items()
            )
            series.append(Series(group.name(place, kind), label, kind, "derived", group.colour(place, kind), marks))
            stop = stops_paying(speedups)
            largest = max(speedups)
            end = f"stops paying at batch {stop}" if stop else f"still pays at batch {largest}, the largest searched"
            said.append(f"{group.name(place, kind)} {end}")
    if not series:
        return Missing(title, "no batch size has both a plain and a drafting configuration")
    note = f"{DERIVED} Here {'; '.join(said)}."
    return Chart("batch-sizes", title, "Batch, sequences", "Speed-up over plain at this batch", tuple(series), note,
                 (Line("y", 1.0, "plain"),), x_log=True, counted=True)  # fmt: skip


def memory_figure(group: Group) -> Drawn:
    """Memory against batch size, with the limit and the largest batch that fits."""
    title = "Memory against batch"
    series: list[Series] = []
    lines: list[Line] = []
    said: list[str] = []
    one_limit = len({device_memory_bytes(run) for run in group.runs}) == 1
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        room = memory(run)
        if room is None:
            continue
        colour = group.colour(place, "lossy")
        full = label if room.precision in label.split(", ") else f"{label}, {room.precision}"
        short = room.precision if len(group.runs) == 1 else full
        marks = tuple(
            Mark(batch, size / GIB, f"{full}, batch {batch}: {size / GIB:.2f} GiB (the run's estimate)")
            for batch, size in room.bytes_by_batch.items()
        )
        series.append(Series(short, label, "lossy", "derived", colour, marks))
        fits = room.largest_batch
        if fits is not None and room.limit_bytes and room.fixed_bytes is not None and room.bytes_per_sequence:
            said.append(f"{short}: up to {fits:,} sequences fit into {room.limit_bytes / GIB:.1f} GiB")
            steps = [2**power for power in range(24) if max(room.bytes_by_batch) < 2**power < fits]
            sizes = [max(room.bytes_by_batch), *steps, fits]
            needed = {size: (room.fixed_bytes + size * room.bytes_per_sequence) / GIB for size in sizes}
            beyond = tuple(
                Mark(size, gib, f"{label}, batch {size:,}: {gib:.2f} GiB, extended")
                for size, gib in needed.items()
                if size >= max(room.bytes_by_batch)
            )
            if len(beyond) > 1:
                series.append(Series(f"{short}, extended", label, "lossy", "predicted", colour, beyond, markers=False))
            at = room.limit_bytes / GIB
            if all(line.at != at for line in lines):
                lines.append(Line("y", at, f"limit {at:.1f} GiB" if one_limit else f"{label}: {at:.1f} GiB"))
        else:
            why = "its memory is not recorded" if room.limit_bytes is None else "one batch size alone was searched"
            said.append(f"{short}: the largest batch is not known, {why}")
    if not series:
        return Missing(title, "no trial has a memory estimate")
    note = f"An estimate: weights, keys and values at the run's context; activations are not in it. {'; '.join(said)}."
    return Chart("memory", title, "Batch, sequences", "Memory, GiB", tuple(series), note, tuple(lines), True, True, True)


def check_figure(group: Group) -> Drawn:
    """Predicted against measured speed-up of the confirmed points."""
    title = "Predicted against measured"
    series = []
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        for kind in KINDS:
            marks = []
            for point in run.points:
                if point.kind == kind and point.measured and kind != "plain":
                    speed = point.measured.speedup
                    low, high = speed.ci95 or (None, None)
                    expected = point.predicted.speedup
                    text = f"{label}, {kind}, trial {point.trial}: predicted {expected:.2f}x, measured {speed.value:.2f}x"
                    marks.append(Mark(point.predicted.speedup, speed.value, text, low, high))
            if marks:
                series.append(_measured(group, place, kind, marks))
    if not series:
        return Missing(title, "no drafting point was measured live")
    return Chart("predicted-and-measured", title, "Predicted speed-up", "Measured speed-up", tuple(series),
                 "Predicted by replay and the cost table; measured live, with 95 % intervals. On the line both agree.",
                 (Line("diagonal", 0.0, "equal"),))  # fmt: skip


def group_figures(group: Group) -> Sequence[Drawn]:
    """All figures of a group that need no price and no demand."""
    return [figure(group) for figure in (compare_figure, serving_figure, batch_figure, memory_figure, check_figure)]
