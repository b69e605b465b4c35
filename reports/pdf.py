"""The report on one page of A4, to be passed on: the verdicts in words and the figures that decide."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lossyspec.records import write_bytes

from .assemble import Report
from .canvas import FAINT, INK, PAPER, canvas_style
from .page import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

#: which figures come first when there is no room for all
ORDER = (
    "speed-against-loss", "user-and-device", "cost", "capacity", "predicted-devices", "energy", "batch-sizes", "memory",
    "round-time", "acceptance", "predicted-and-measured", "importance",
)  # fmt: skip
WIDTH, HEIGHT = 8.27, 11.69  # inches
MARGIN, GAP = 0.45, 0.2
COLUMN = (WIDTH - 2 * MARGIN - GAP) / 2


def in_order(by_group: Sequence[Sequence[Drawing]], by_run: Sequence[Sequence[Drawing]]) -> list[Drawing]:
    """The deciding figures first: those of the first group of runs, then of the others, then of single runs."""
    return [
        drawing
        for drawings in (*by_group, *by_run)
        for drawing in sorted(drawings, key=lambda drawing: ORDER.index(drawing.item.name))
    ]


def save_pdf(report: Report, drawings: Sequence[Drawing], folder: Path, path: Path) -> Path:
    """Writes the page, atomically; the same bytes for the same report. The pictures are the PNG files of the folder."""
    with canvas_style():
        from matplotlib.backends.backend_pdf import FigureCanvasPdf
        from matplotlib.figure import Figure as Canvas

        page = Canvas(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
        FigureCanvasPdf(page)
        left_out = _place(page, drawings, folder, _words(page, report))
        note = f"{left_out} more figures, " if left_out else "The same figures, "
        note += "with hover, and all numbers: index.html, report.json. Hollow: predicted, never measured."
        page.text(MARGIN / WIDTH, 0.25 / HEIGHT, note, fontsize=6.5, color=FAINT)
        stream = io.BytesIO()
        page.savefig(
            stream, format="pdf", dpi=200, metadata={"CreationDate": None, "Creator": "lossytune", "Producer": None}
        )
    write_bytes(path, stream.getvalue())
    return path


def _place(page: Canvas, drawings: Sequence[Drawing], folder: Path, top: float) -> int:
    """Puts pictures into two columns, each into the one with more room, while there is room; returns how many are left."""
    from matplotlib.image import imread

    ends, left_out = [top, top], 0
    for drawing in drawings:
        picture = imread(folder / f"{drawing.name}.png")
        high = COLUMN * picture.shape[0] / picture.shape[1]
        column = 0 if ends[0] >= ends[1] else 1
        if ends[column] - high < 0.45:
            left_out += 1
            continue
        ends[column] -= high
        at = (MARGIN + column * (COLUMN + GAP)) / WIDTH
        axes = page.add_axes((at, ends[column] / HEIGHT, COLUMN / WIDTH, high / HEIGHT))
        axes.imshow(picture, aspect="auto", interpolation="none")
        axes.axis("off")
        ends[column] -= 0.12
    return left_out


def _words(page: Canvas, report: Report) -> float:
    """Title, verdicts and what they rest on; returns the inches from below where they end."""
    page.text(MARGIN / WIDTH, 1 - 0.55 / HEIGHT, "lossytune report", fontsize=15, weight="bold", color=INK)
    summaries = [item.summary for item in report.runs]
    places = [f"{one.task} on {one.device}{' (made up)' if one.made_up else ''}" for one in summaries]
    about = ", ".join(dict.fromkeys(places))
    lines = [(line, 8.5, FAINT) for line in textwrap.wrap(about, 118)[:2]]
    for item in report.runs[:5]:
        lines += [(line, 9.0, INK) for line in textwrap.wrap(f"{item.label}: {item.summary.sentence}", 116)[:2]]
    if len(report.runs) > 5:
        lines.append((f"and {len(report.runs) - 5} more runs, on the page", 8.5, FAINT))
    said = [*report.refusals, *(words for group in report.groups for words in (*group.ranking, *group.footnotes))]
    for words in said[:5]:
        lines += [(line, 8.0, FAINT) for line in textwrap.wrap(words, 124)[:2]]
    at = HEIGHT - 0.8
    for words, size, colour in lines:
        page.text(MARGIN / WIDTH, at / HEIGHT, words, fontsize=size, color=colour, parse_math=False)
        at -= 0.19
    return at
