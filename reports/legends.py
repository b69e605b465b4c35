"""Legends of charts: each series once, or runs by colour and kinds by marker where each pair of them would be too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .canvas import INK, PAPER
from .charts import KIND_LINES, KIND_MARKERS, Bars, Chart, Figure, Series

PREDICTED_LINE = (0, (4, 3))
MANY = 5  # from more series on, runs and kinds are told apart separately


def legend_entries(item: Figure) -> list[tuple[str, Any]]:
    """Labels and handles, each once; none where the axis says it all."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    if isinstance(item, Bars):
        if item.style != "dots":
            for row in item.rows:
                for part in row.parts:
                    entries.setdefault(part.name, Patch(facecolor=part.colour, label=part.name))
        return list(entries.items())
    if len({series.name for series in item.series}) > MANY:
        return _legend_by_run_and_kind(item)
    for series in item.series:
        entries.setdefault(series.name, Line2D([], [], **_handle(series, series.colour, short(series.name, 52))))
    return list(entries.items())


def _legend_by_run_and_kind(item: Chart) -> list[tuple[str, Any]]:
    """A colour a run and a marker a kind, where each pair of them would be too many."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for series in item.series:
        predicted = series.source == "predicted"
        label = f"{series.run} (predicted)" if predicted and series.markers else series.run
        face = PAPER if predicted else series.colour
        entries.setdefault(label, Patch(facecolor=face, edgecolor=series.colour, linewidth=1.2, label=short(label, 52)))
    for series in item.series:
        if series.source != "predicted":
            entries.setdefault(series.kind, Line2D([], [], **_handle(series, INK, series.kind)))
    return list(entries.items())


def _handle(series: Series, colour: str, label: str) -> dict[str, Any]:
    """How a series looks in the legend."""
    predicted = series.source == "predicted"
    dash = PREDICTED_LINE if predicted else KIND_LINES.get(series.kind, "solid")
    style: dict[str, Any] = {"linestyle": dash if series.joined and len(series.marks) > 1 else "none"}
    if series.markers:
        style |= {"marker": KIND_MARKERS.get(series.kind, "o"), "markersize": 8 if series.kind == "recommended" else 6}
    face = PAPER if predicted else colour
    return style | {"color": colour, "markerfacecolor": face, "markeredgecolor": colour, "label": label}


def columns(labels: Sequence[str]) -> int:
    """Columns of the legend that fit."""
    longest = max(map(len, labels), default=0)
    return 1 if longest > 27 else 2 if longest > 13 else 3


def short(label: str, most: int = 40) -> str:
    """A label that is cut in the middle where it would be too long."""
    return label if len(label) <= most else f"{label[: most - 20]}…{label[-19:]}"
