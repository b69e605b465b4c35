"""The report on one page of A4, to be passed on: the verdicts in words and the figures that decide."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lossyspec.records import write_bytes

from .assemble import Report
from .canvas import FAINT, INK, PAPER, canvas_style
from .charts import Figure
from .draw import draw_axes
from .legends import legend_entries

#: which figures come first when there is no room for all
ORDER = (
    "speed-against-loss", "user-and-device", "cost", "capacity", "predicted-devices", "energy", "batch-sizes", "memory",
    "round-time", "acceptance", "predicted-and-measured", "importance",
)  # fmt: skip
MOST = 6
A4 = (8.27, 11.69)


def chosen_figures(report: Report) -> list[tuple[str, Figure]]:
    """At most six figures, the deciding ones first, with what they are of where there are several groups or runs."""
    found = [
        ("" if len(report.groups) == 1 else ", ".join(group.group.labels), item)
        for group in report.groups
        for item in group.gallery.drawn
    ]
    found += [("" if len(report.runs) == 1 else run.label, item) for run in report.runs for item in run.gallery.drawn]
    return sorted(found, key=lambda entry: ORDER.index(entry[1].name))[:MOST]


def save_pdf(report: Report, path: Path) -> Path:
    """Writes the page, atomically; the same bytes for the same report."""
    with canvas_style():
        from matplotlib.backends.backend_pdf import FigureCanvasPdf
        from matplotlib.figure import Figure as Canvas

        page = Canvas(figsize=A4, facecolor=PAPER)
        FigureCanvasPdf(page)
        top = _words(report, page.text)
        figures = chosen_figures(report)
        rows = max(1, (len(figures) + 1) // 2)
        high = (top - 0.06) / max(rows, 2)
        for place, (of, item) in enumerate(figures):
            row, column = divmod(place, 2)
            entries = legend_entries(item)
            under = 0.034 + 0.0105 * ((len(entries) + 1) // 2)
            bottom = top - (row + 1) * high + under + 0.012
            left = 0.085 if not hasattr(item, "rows") else 0.17
            axes = page.add_axes((left + 0.48 * column, bottom, 0.45 - left + 0.03, high - under - 0.05), facecolor=PAPER)
            draw_axes(item, axes)
            axes.tick_params(labelsize=6)
            axes.set_xlabel(axes.get_xlabel(), fontsize=7, parse_math=False)
            axes.set_ylabel(axes.get_ylabel(), fontsize=7, parse_math=False)
            title = f"{item.title} ({of})" if of else item.title
            axes.set_title(title[:60], fontsize=8.5, loc="left", color=INK, weight="bold", parse_math=False)
            if entries:
                handles = [handle for _, handle in entries]
                axes.legend(handles=handles, loc="upper left", fontsize=5.8, frameon=False, ncols=2, labelcolor=INK,
                            bbox_to_anchor=(-0.1, -0.13), borderaxespad=0)  # fmt: skip
        stream = io.BytesIO()
        page.savefig(stream, format="pdf", metadata={"CreationDate": None, "Creator": "lossytune", "Producer": None})
    write_bytes(path, stream.getvalue())
    return path


def _words(report: Report, text: object) -> float:
    """Title, verdicts and what they rest on; returns the height where they end."""
    write = text
    assert callable(write)
    at = 0.965
    write(0.05, at, "lossytune report", fontsize=15, weight="bold", color=INK)
    about = ", ".join(dict.fromkeys(f"{item.summary.task} on {item.summary.device}" for item in report.runs))
    lines: list[tuple[str, float, str]] = [(line, 8.5, FAINT) for line in textwrap.wrap(about, 110)[:2]]
    for item in report.runs[:6]:
        lines += [(line, 9.5, INK) for line in textwrap.wrap(f"{item.label}: {item.summary.sentence}", 98)[:3]]
    if len(report.runs) > 6:
        lines.append((f"and {len(report.runs) - 6} more runs, on the page", 8.5, FAINT))
    for said in _said(report)[:6]:
        lines += [(line, 8, FAINT) for line in textwrap.wrap(said, 120)[:2]]
    at -= 0.022
    for words, size, colour in lines:
        write(0.05, at, words, fontsize=size, color=colour, parse_math=False)
        at -= 0.0165
    note = "Speeds: measured live. Batch sizes, memory, rounds and capacity: derived from the cost table. Hollow: predicted."
    write(0.05, 0.02, f"{note} All figures and numbers: index.html, report.json.", fontsize=6.5, color=FAINT)
    return at


def _said(report: Report) -> Sequence[str]:
    """Refusals, rankings and footnotes."""
    return [*report.refusals, *(said for group in report.groups for said in (*group.ranking, *group.footnotes))]
