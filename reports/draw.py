"""A chart's plain values to a matplotlib picture. matplotlib is imported inside the functions, without a display."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log10
from typing import TYPE_CHECKING, Any

from .canvas import FAINT, INK, LINE, PAPER, canvas_style, fitted
from .charts import KIND_LINES, KIND_MARKERS, Bars, Chart, Figure, Part, Series
from .legends import PREDICTED_LINE, columns, legend_entries, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDTH = 5.0  # inches: text that can be read when the figure is as wide as a phone
TOP, BOTTOM = 0.42, 0.55
ROW_LABEL = 36  # most characters of the label of a bar


@dataclass(frozen=True)
class Tip:
    """What is said of an element of a picture, and the run and kind that it belongs to, to be filtered by."""

    text: str
    run: str
    kind: str


@dataclass(frozen=True)
class Picture:
    """A drawn figure; tips: by the id of its SVG element; note_pt: height in points of the note below it."""

    canvas: Canvas
    tips: dict[str, Tip]
    note_pt: float


def draw_figure(item: Figure) -> Picture:
    """The figure by itself: title, axes, legend under them, and its note."""
    with canvas_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        entries = legend_entries(item)
        across = columns([label for label, _ in entries])
        legend = 0.22 * ceil(len(entries) / across) + 0.05 if entries else 0.0
        note = textwrap.wrap(item.note, 80)
        note_high = 0.15 * len(note) + 0.08 if note else 0.0
        axes_high = 2.9 if isinstance(item, Chart) else max(0.7, 0.36 * len(item.rows) * _thickness(item))
        high = TOP + axes_high + BOTTOM + legend + note_high
        canvas = Canvas(figsize=(WIDTH, high), facecolor=PAPER)
        FigureCanvasAgg(canvas)
        left = 0.155 if isinstance(item, Chart) else _label_share(item)
        axes = canvas.add_axes((left, (BOTTOM + legend + note_high) / high, 0.97 - left, axes_high / high), facecolor=PAPER)
        fitted(canvas, 1 - 0.27 / high, item.title, fontsize=12, weight="bold", color=INK)
        tips = draw_axes(item, axes)
        if entries:
            canvas.legend(handles=[handle for _, handle in entries], loc="upper left", ncols=across, frameon=False,
                          bbox_to_anchor=(0.01, (legend + note_high + 0.06) / high), fontsize=9.2, labelcolor=INK,
                          handletextpad=0.4, columnspacing=1.2, borderpad=0.1)  # fmt: skip
        for line, words in enumerate(reversed(note)):
            canvas.text(0.02, (0.07 + 0.15 * line) / high, words, fontsize=7.8, color=FAINT, parse_math=False)
        return Picture(canvas, tips, 72 * note_high)


def draw_axes(item: Figure, axes: Axes) -> dict[str, Tip]:
    """Draws into given axes; returns the tips by element id."""
    axes.grid(color=LINE, linewidth=0.6, alpha=0.45)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    axes.set_xlabel(item.x_label, color=INK, fontsize=10, parse_math=False)
    return _draw_chart(item, axes) if isinstance(item, Chart) else _draw_bars(item, axes)


def _draw_chart(item: Chart, axes: Axes) -> dict[str, Tip]:
    axes.set_ylabel(item.y_label, color=INK, fontsize=10, parse_math=False)
    tips: dict[str, Tip] = {}
    numbers = iter(range(10**6))
    for series in sorted(item.series, key=lambda series: series.kind == "recommended"):
        _draw_series(series, axes, tips, numbers)
    _scale(item, axes)
    for line in item.lines:
        if line.axis == "diagonal":
            low, high = _both(axes)
            axes.plot([low, high], [low, high], color=FAINT, linewidth=1, zorder=1.5)
            axes.set(xlim=(low, high), ylim=(low, high))
            continue
        across = axes.axhline if line.axis == "y" else axes.axvline
        across(line.at, color=FAINT, linewidth=1, zorder=1.5)
        place: dict[str, Any] = {"xy": (1, line.at), "xycoords": ("axes fraction", "data"), "ha": "right"}
        above = line.axis == "x" or not _under_another(line.at, item)
        if line.axis == "x":
            place = {"xy": (line.at, 1), "xycoords": ("data", "axes fraction"), "ha": "right"}
        place |= {"xytext": (-2, 3 if above else -3), "va": "baseline" if above else "top"}
        axes.annotate(line.label, textcoords="offset points", fontsize=8, color=FAINT, **place)
    return tips


def _under_another(at: float, item: Chart) -> bool:
    """Whether a line across lies so near above that the words between would be written over it."""
    lines = [line.at for line in item.lines if line.axis == "y"]
    ys = [*lines, *(mark.y for series in item.series for mark in series.marks)]
    share = (lambda y: log10(y / min(ys)) / log10(max(ys) / min(ys))) if item.y_log else (lambda y: y / max(ys))
    return any(at < other and share(other) - share(at) < 0.07 for other in lines)


def _draw_series(series: Series, axes: Axes, tips: dict[str, Tip], numbers: Iterator[int]) -> None:
    predicted = series.source == "predicted"
    dash = PREDICTED_LINE if predicted else KIND_LINES.get(series.kind, "solid")
    xs, ys = [mark.x for mark in series.marks], [mark.y for mark in series.marks]
    about = f"{series.name}: {len(series.marks)} points"
    if series.joined and len(xs) > 1:
        name = f"e{next(numbers)}"
        axes.plot(xs, ys, color=series.colour, linewidth=1.6, linestyle=dash, gid=name, zorder=3)
        tips[name] = Tip(about, series.run, series.kind)
    for mark in series.marks:
        name = f"e{next(numbers)}"
        tips[name] = Tip(mark.text, series.run, series.kind)
        _bars_of(mark, series, axes, name, tips)
        style: dict[str, Any] = {"marker": KIND_MARKERS.get(series.kind, "o"), "markersize": 6.5, "markeredgewidth": 1.2}
        style |= {"markerfacecolor": PAPER if predicted else series.colour, "markeredgecolor": series.colour}
        if series.kind == "recommended":
            style |= {"markersize": 14, "markeredgecolor": PAPER, "markeredgewidth": 0.8}
        if not series.markers:  # nothing to see, but the pointer finds it
            style |= {"marker": "o", "markersize": 9, "alpha": 0.0}
        axes.plot([mark.x], [mark.y], linestyle="none", gid=name, zorder=6 if series.kind == "recommended" else 5, **style)
        if mark.label:
            axes.annotate(mark.label, (mark.x, mark.y), xytext=(5, 5), textcoords="offset points", fontsize=8,
                          color=FAINT, zorder=4, annotation_clip=True)  # fmt: skip


def _bars_of(mark: Any, series: Series, axes: Axes, name: str, tips: dict[str, Tip]) -> None:
    """The lines of a mark's intervals."""
    style: dict[str, Any] = {"color": series.colour, "linewidth": 1.1, "zorder": 4, "alpha": 0.85}
    if series.source == "predicted":
        style["linestyle"] = (0, (2, 2))
    for end, (low, high) in enumerate(((mark.low, mark.high), (mark.x_low, mark.x_high))):
        if low is not None and high is not None:
            xs, ys = ([mark.x, mark.x], [low, high]) if end == 0 else ([low, high], [mark.y, mark.y])
            axes.plot(xs, ys, gid=f"{name}i{end}", **style)
            tips[f"{name}i{end}"] = Tip(mark.text, series.run, series.kind)


def _scale(item: Chart, axes: Axes) -> None:
    """Logarithmic axes with plain numbers, whole numbers where things are counted, and 0 where it belongs."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    xs = sorted({mark.x for series in item.series for mark in series.marks})
    ys = [y for series in item.series for mark in series.marks for y in (mark.y, mark.low, mark.high) if y is not None]
    if item.x_log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(xs) / 1.25, max(xs) * 1.25)
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = [2.0**power for power in range(40) if min(xs) / 1.01 <= 2.0**power <= max(xs) * 1.01]
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: ceil(len(ticks) / 9)] if ticks else xs))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    elif item.counted:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
    if item.x_tens:
        _tens(axes, "x", xs)
    if item.y_log:
        _tens(axes, "y", [*ys, *(line.at for line in item.lines if line.axis == "y")])
    elif item.from_zero:
        axes.set_ylim(0, max(ys) * 1.12 or 1)


def _tens(axes: Axes, name: str, values: Sequence[float], longest: float = 300) -> None:
    """A logarithmic axis that is labelled at 1, 2 and 5, or at powers of ten alone where its ends lie `longest` times apart
    or more."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}scale": "log"})
    low, high = min(values) / 1.35, max(values) * 1.35
    axes.set(**{f"{name}lim": (low, high)})
    step = (1, 2, 5) if high / low < longest else (1,)
    powers = range(int(log10(low)) - 2, int(log10(high)) + 2)
    ticks = [one * 10.0**power for power in powers for one in step if low <= one * 10.0**power <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _both(axes: Axes) -> tuple[float, float]:
    """One range that holds both axes."""
    ends = (*axes.get_xlim(), *axes.get_ylim())
    return min(ends), max(ends)


def _draw_bars(item: Bars, axes: Axes) -> dict[str, Tip]:
    tips: dict[str, Tip] = {}
    places = range(len(item.rows))
    axes.set_yticks(list(places), [short(row.label, ROW_LABEL) for row in item.rows])
    axes.set_ylim(len(item.rows) - 0.5, -0.5)
    axes.tick_params(axis="y", labelsize=8.5)
    axes.grid(visible=False, axis="y")
    numbers = iter(range(10**6))
    for place, row in zip(places, item.rows, strict=True):
        left = 0.0
        for index, part in enumerate(row.parts):
            name = f"e{next(numbers)}"
            tips[name] = Tip(part.text, row.run, part.name)
            if item.style == "dots":
                _draw_dot(part, place, axes, name)
                continue
            grouped = item.style == "group"
            high = 0.8 / len(row.parts) if grouped else 0.62
            at = place + (index - (len(row.parts) - 1) / 2) * high if grouped else place
            bar = axes.barh(at, part.value, high, left=0.0 if grouped else left, color=part.colour, edgecolor=PAPER,
                            linewidth=0.8)  # fmt: skip
            bar[0].set_gid(name)
            left += part.value
        if row.measured is not None:
            name = f"e{next(numbers)}"
            tips[name] = Tip(f"{row.label}: {row.measured:.1f} ms a round, measured live", row.run, "measured")
            axes.plot([row.measured], [place], marker="D", markersize=6, color="#d55e00", markeredgecolor=PAPER, gid=name,
                      linestyle="none", zorder=6)  # fmt: skip
    values = [value for row in item.rows for part in row.parts for value in (part.value, part.high or 0.0)]
    stacked = [sum(part.value for part in row.parts) for row in item.rows] if item.style == "stack" else values
    most = max([*stacked, *(row.measured or 0.0 for row in item.rows)])
    if item.x_log:
        _tens(
            axes,
            "x",
            [value for row in item.rows for part in row.parts for value in (part.value, part.low, part.high) if value],
            longest=40,  # names take half of the width
        )
    else:
        axes.set_xlim(0, most * 1.06 or 1)
        axes.locator_params(axis="x", nbins=6)
    return tips


def _draw_dot(part: Part, place: int, axes: Axes, name: str) -> None:
    predicted = part.source == "predicted"
    if part.low is not None and part.high is not None:
        axes.plot([part.low, part.high], [place, place], color=part.colour, linewidth=1.4,
                  linestyle=(0, (3, 2)) if predicted else "-", zorder=4)  # fmt: skip
    axes.plot([part.value], [place], marker="o", markersize=8, markerfacecolor=PAPER if predicted else part.colour,
              markeredgecolor=part.colour, markeredgewidth=1.4, linestyle="none", gid=name, zorder=5)  # fmt: skip


def _thickness(item: Bars) -> float:
    return 1.25 if item.style == "group" else 1.0


def _label_share(item: Bars) -> float:
    """Share of the width that the row labels need."""
    return min(0.56, 0.045 + 0.0143 * max(len(short(row.label, ROW_LABEL)) for row in item.rows))
