"""What a figure shows, as plain values that tests can compare; `draw` turns it into a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["measured", "derived", "predicted"]
#: what stands beside a figure whose values did not run live
DERIVED = "Derived from the cost table and replay, not measured live."
PREDICTED = "Hollow and dashed: predicted by a roofline for a device that was not measured."
#: Okabe-Ito, told apart with any colour vision; the page has a dark version of each
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328")
KIND_COLOURS = {"plain": "#1f2328", "lossless": "#009e73", "lossy": "#0072b2", "recommended": "#d55e00"}
KIND_MARKERS = {"plain": "s", "lossless": "^", "lossy": "o", "recommended": "*"}
KIND_LINES: dict[str, Any] = {"plain": (0, (1, 1.5)), "lossless": (0, (5, 2)), "lossy": "solid"}


@dataclass(frozen=True)
class Mark:
    """A point, with an interval of its y (and x) where there is one; `text` is shown on hover, `label` beside it."""

    x: float
    y: float
    text: str
    low: float | None = None
    high: float | None = None
    x_low: float | None = None
    x_high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one run and one kind. joined: a line goes through them. markers: whether each point is drawn."""

    name: str
    run: str
    kind: str
    source: Source
    colour: str
    marks: tuple[Mark, ...]
    joined: bool = True
    markers: bool = True


@dataclass(frozen=True)
class Line:
    """A reference line across the axes: at a value of x or of y, or the diagonal."""

    axis: Literal["x", "y", "diagonal"]
    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A figure with two numeric axes. note: what must be said beside it. counted: x holds whole numbers."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    lines: tuple[Line, ...] = ()
    x_log: bool = False  # to the base of 2
    y_log: bool = False
    x_tens: bool = False  # logarithmic to the base of 10
    counted: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Part:
    """A piece of a bar, or a value of its own in its row; low and high: its interval."""

    name: str
    value: float
    text: str
    colour: str
    low: float | None = None
    high: float | None = None
    source: Source = "measured"


@dataclass(frozen=True)
class Row:
    """One row of a bar figure. `measured`: a mark at this value on top of stacked parts."""

    label: str
    run: str
    parts: tuple[Part, ...]
    measured: float | None = None


@dataclass(frozen=True)
class Bars:
    """A figure of horizontal bars: pieces stacked in a row, or beside each other, or dots with intervals."""

    name: str
    title: str
    x_label: str
    rows: tuple[Row, ...]
    style: Literal["stack", "group", "dots"]
    note: str = ""
    x_log: bool = False


@dataclass(frozen=True)
class Missing:
    """A figure that is not drawn, and why."""

    title: str
    reason: str


Figure = Chart | Bars
Drawn = Figure | Missing


@dataclass
class Gallery:
    """The figures of a set of runs, and those that are not drawn."""

    drawn: list[Figure] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def add(self, item: Drawn) -> None:
        """Puts a figure, or the reason why there is none, into its list."""
        if isinstance(item, Missing):
            self.missing.append(item)
        else:
            self.drawn.append(item)
