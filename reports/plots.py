"""Info object to figure. matplotlib is imported inside the functions, without pyplot and without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .canvas import FAINT, INK, LINE, PAPER, canvas_style, fitted, save_figure
from .draw import Tip
from .pareto import ConfirmedPoint, ParetoInfo, SearchedPoint, View, footnote, view

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe-Ito colours and a marker each, so that no kind is told by colour alone
COLOURS = {"plain": "#1f2328", "lossless": "#009e73", "lossy": "#0072b2", "recommended": "#d55e00"}
MARKERS = {"plain": "s", "lossless": "^", "lossy": "o"}
MANY = 2000  # from here on searched points are a picture inside the SVG
HIDDEN = 1000.0  # cost of a label from which on it covers something
LEADER = 18.0  # a label farther than this, in points, gets a line to its marker
OFFSETS = [
    (dx * r, dy * r)
    for r in (11, 20, 32, 48)
    for dx, dy in ((1, 0), (0.8, -0.7), (0.8, 0.7), (-1, 0), (-0.8, 0.7), (-0.8, -0.7), (0, 1), (0, -1))
]


def draw_pareto(info: ParetoInfo) -> Figure:
    """The front: loss against speed-up, confirmed points with their intervals over the searched ones."""
    with canvas_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.6, 5.6), facecolor=PAPER)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.118, 0.235, 0.855, 0.615), facecolor=PAPER)
        limits = view(info)
        axes.set(xlim=limits.x, ylim=limits.y)
        _draw_frame(figure, axes, info)
        _draw_lines(axes, info, limits)
        _draw_searched(axes, info, limits)
        _draw_confirmed(axes, info.drawn)
        _draw_legend(figure, axes, info, limits)
        if not info.drawn and not info.searched:
            axes.text(0.5, 0.6, "No point to draw", transform=axes.transAxes, ha="center", color=FAINT, fontsize=13)
        _place_labels(figure, axes, info)
        return figure


def pareto_tips(info: ParetoInfo, run: str) -> dict[str, Tip]:
    """What is said of each confirmed point, by the id of its SVG element."""
    tips = {}
    for point in info.drawn:
        loss, speedup = point.place
        band = point.bars[1]
        ends = f" ({band[0]:.2f}-{band[1]:.2f})" if band else ""
        text = f"{point.label}, trial {point.trial}: {speedup:.2f}x{ends} at {loss:+.2f} %, measured live"
        tips[f"p{point.trial}"] = Tip(text, run, point.kind)
    return tips


def save_pareto(info: ParetoInfo, folder: Path, name: str = "pareto") -> list[Path]:
    """Writes the front as PNG and SVG into the folder, atomically; returns their paths."""
    return save_figure(draw_pareto(info), folder, name)


def _draw_frame(figure: Figure, axes: Axes, info: ParetoInfo) -> None:
    """Titles, axis labels, ticks and grid."""
    fitted(figure, 0.945, info.title, fontsize=14, weight="bold", color=INK)
    fitted(figure, 0.9, info.subtitle, fontsize=9.5, color=FAINT)
    axes.set_xlabel(info.x_label, color=INK, labelpad=7)
    figure.text(0.018, 0.545, info.y_label, color=INK, rotation=90, va="center")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if abs(value) > 1e-9 else "0 %")
    axes.yaxis.set_major_formatter(lambda value, _: f"{round(value, 6):g}x")
    axes.locator_params(nbins=7)
    axes.grid(color=LINE, linewidth=0.6, alpha=0.45)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)


def _draw_lines(axes: Axes, info: ParetoInfo, limits: View) -> None:
    """The lines of no speed-up, of no loss, and of the limit."""
    axes.axhline(1.0, color=FAINT, linewidth=1.0, zorder=1.5)
    axes.axvline(0.0, color=FAINT, linewidth=1.0, zorder=1.5)
    if info.noise_band is not None:
        axes.axhspan(*info.noise_band, color=LINE, alpha=0.3, linewidth=0, zorder=1, label="plain against itself")
    if info.lossless_speedup is not None:
        axes.axhline(info.lossless_speedup, color=COLOURS["lossless"], linewidth=1.0, linestyle=(0, (1, 2)), zorder=1.5)
    if info.loss_limit is not None and limits.holds(info.loss_limit * 100):
        limit = info.loss_limit * 100
        axes.axvline(limit, color=INK, linewidth=1.3, linestyle=(0, (5, 4)), zorder=1.6)
        axes.annotate(f"limit +{limit:.3g} %", (limit, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
                      textcoords="offset points", ha="center", fontsize=9.5, color=INK)  # fmt: skip


def _draw_searched(axes: Axes, info: ParetoInfo, limits: View) -> None:
    """Searched points that were not confirmed: a dot, a ring on their front, a cross when infeasible."""
    confirmed = {point.trial for point in info.drawn}
    rest = [point for point in info.searched if point.trial not in confirmed and limits.holds(*point.place)]

    def scatter(points: list[SearchedPoint], **style: Any) -> None:
        if points:
            axes.scatter(*zip(*(point.place for point in points), strict=True), rasterized=len(points) > MANY, **style)

    beaten = [point for point in rest if point.dominated and not point.infeasible]
    scatter(beaten, label="searched", marker="o", s=17, color=LINE, linewidths=0, zorder=2.1)
    scatter([point for point in rest if not point.dominated], label="searched, unbeaten", marker="o", s=19,
            facecolors=PAPER, edgecolors=FAINT, linewidths=1.0, zorder=2.2)  # fmt: skip
    scatter([point for point in rest if point.infeasible], label="searched, infeasible", marker="x", s=16,
            linewidths=0.9, color=LINE, zorder=2)  # fmt: skip


def _draw_confirmed(axes: Axes, shown: Sequence[ConfirmedPoint]) -> None:
    """Confirmed points with both intervals; the staircase joins those that none of them beats; a star recommends."""
    front = _front(shown)
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color=COLOURS["lossy"], linewidth=1.2, alpha=0.4, zorder=2.5)
    for point in sorted(shown, key=lambda point: point.recommended):
        x, y = point.place
        colour = COLOURS["recommended" if point.recommended else point.kind]
        beaten = _kind(point) == "beaten"
        bar = axes.errorbar(
            x, y, xerr=_arms(x, point.bars[0]), yerr=_arms(y, point.bars[1]),
            fmt="*" if point.recommended else MARKERS[point.kind], markersize=17 if point.recommended else 8,
            color=colour, markerfacecolor=PAPER if beaten else colour, markeredgecolor=colour if beaten else PAPER,
            markeredgewidth=1.2 if beaten else 0.8, ecolor=colour, elinewidth=1.2, capsize=3, zorder=5,
        )  # fmt: skip
        bar.lines[0].set_gid(f"p{point.trial}")


def _kind(point: ConfirmedPoint) -> str:
    """How a confirmed point is drawn: recommended, its kind, or as a lossy one that another point beats."""
    if point.recommended:
        return "recommended"
    return "beaten" if point.dominated and point.kind == "lossy" else point.kind


def _arms(value: float, interval: Sequence[float] | None) -> list[list[float]] | None:
    """Lengths of an error bar below and above a value; None without an interval."""
    return [[max(value - interval[0], 0.0)], [max(interval[1] - value, 0.0)]] if interval else None


def _draw_legend(figure: Figure, axes: Axes, info: ParetoInfo, limits: View) -> None:
    """The legend under the axes, and below it what is not drawn."""
    from matplotlib.lines import Line2D

    kinds = {_kind(point) for point in info.drawn}
    handles: list[Any] = []

    def entry(kind: str, label: str, marker: str, colour: str, size: float = 8, **style: Any) -> None:
        if kind in kinds:
            style = {"markeredgecolor": PAPER, "label": label} | style
            handles.append(Line2D([], [], linestyle="", marker=marker, color=colour, markersize=size, **style))

    entry("recommended", "recommended", "*", COLOURS["recommended"], 15)
    for kind, marker in MARKERS.items():
        entry(kind, kind, marker, COLOURS[kind])
    blue = COLOURS["lossy"]
    entry("beaten", "lossy, beaten", "o", blue, markerfacecolor=PAPER, markeredgecolor=blue)
    handles += axes.get_legend_handles_labels()[0]
    if handles:
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.01, 0.14), ncols=4, frameon=False,
                      fontsize=9.5, labelcolor=INK, handletextpad=0.2, columnspacing=1.4)  # fmt: skip
    figure.text(0.02, 0.018, footnote(info, limits), fontsize=8.5, color=FAINT)


def _place_labels(figure: Figure, axes: Axes, info: ParetoInfo) -> None:
    """Writes each point's label where it covers no marker, bar or other label; a lossy one without room is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    taken = [box for point in info.drawn for box in _boxes(axes, point)]
    avoided = _avoided(axes, info)

    def cost(text: Any, offset: tuple[float, float]) -> float:
        """Square pixels shared with what is taken or outside the axes (dear), or with what is best avoided."""
        text.set_position(offset)
        text.set_horizontalalignment("left" if offset[0] > 1 else "right" if offset[0] < -1 else "center")
        box = text.get_window_extent(renderer)
        lost = box.width * box.height - _shared(box, [axes.bbox.extents]) + _shared(box, taken)
        return float(lost * HIDDEN + _shared(box, avoided) + 2 * math.hypot(*offset))

    for point in sorted(info.drawn, key=lambda point: (not point.recommended, point.kind == "lossy", -point.place[1])):
        needed = point.recommended or point.kind != "lossy"
        words = f"recommended: {point.label}" if point.recommended else point.label
        style: dict[str, Any] = {
            "fontsize": 9.5 if needed else 8.5,
            "weight": "bold" if point.recommended else "normal",
        }
        style |= {"bbox": {"facecolor": PAPER, "alpha": 0.7, "linewidth": 0, "pad": 0.6}, "color": INK, "zorder": 6}
        text = axes.annotate(words, point.place, xytext=(0, 0), textcoords="offset points", va="center", **style)
        best = min(OFFSETS, key=lambda offset: cost(text, offset))
        if cost(text, best) >= HIDDEN and not needed:
            text.remove()
            continue
        if math.hypot(*best) > LEADER:
            line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.8, "shrinkA": 5, "shrinkB": 5}
            axes.annotate("", point.place, xytext=best, textcoords="offset points", zorder=4, arrowprops=line)
        taken.append(text.get_window_extent(renderer).extents)


def _avoided(axes: Axes, info: ParetoInfo) -> list[Sequence[float]]:
    """Boxes in pixels of what a label may cover but better does not: the lines, the staircase, the searched points."""
    left, low, right, high = axes.bbox.extents
    limit = (0.0 if info.loss_limit is None else info.loss_limit * 100, 1.0)
    (x0, y0), (x1, _) = axes.transData.transform([(0.0, 1.0), limit])
    boxes: list[Sequence[float]] = [(x - 1, low, x + 1, high) for x in (x0, x1)]
    boxes.append((left, y0 - 1, right, y0 + 1))
    boxes += [(x - 3, y - 3, x + 3, y + 3) for x, y in map(axes.transData.transform, {p.place for p in info.searched})]
    for (x0, y0), (x1, y1) in pairwise(map(axes.transData.transform, _front(info.drawn))):
        boxes += [(x0, y0 - 1, x1, y0 + 1), (x1 - 1, y0, x1 + 1, y1)]
    return boxes


def _front(points: Sequence[ConfirmedPoint]) -> list[tuple[float, float]]:
    """Places of the confirmed points that none beats, by loss."""
    return sorted(point.place for point in points if not point.dominated)


def _boxes(axes: Axes, point: ConfirmedPoint) -> list[Sequence[float]]:
    """Boxes in pixels of a point's marker and of its error bars."""
    (x, y), (xs, ys) = point.place, point.bars
    pads = (10 if point.recommended else 6, 2, 2)
    (x0, x1), (y0, y1) = xs or (x, x), ys or (y, y)
    corners = ([(x, y), (x, y)], [(x0, y), (x1, y)], [(x, y0), (x, y1)])
    boxes = [axes.transData.transform(pair) for pair in corners]
    return [(a[0] - pad, a[1] - pad, b[0] + pad, b[1] + pad) for (a, b), pad in zip(boxes, pads, strict=True)]


def _shared(box: Any, others: Sequence[Sequence[float]]) -> float:
    """Square pixels that a box shares with all of the others together."""
    import numpy

    x0, y0, x1, y1 = numpy.asarray(others, dtype=float).reshape(-1, 4).T
    width = numpy.minimum(box.x1, x1) - numpy.maximum(box.x0, x0)
    height = numpy.minimum(box.y1, y1) - numpy.maximum(box.y0, y0)
    return float((width.clip(min=0) * height.clip(min=0)).sum())
