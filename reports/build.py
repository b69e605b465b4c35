"""Rebuilds every output of one or more runs from their stored files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from lossyspec.errors import EnvironmentProblem
from lossyspec.records import write_text

from .assemble import Options, Report, assemble
from .canvas import canvas_style, save_figure
from .charts import Figure
from .data import SUMMARY_COLUMNS, report_json, summary_rows
from .draw import draw_figure
from .html import render_page
from .page import Drawing
from .pdf import ORDER, in_order, save_pdf
from .plots import save_pareto
from .tables import write_csv, write_front_csv

#: names of pictures that a report may write
PICTURE = re.compile(rf"({'|'.join(('pareto', *ORDER))})(-(run|group)\d+)?\.(png|svg)")


def build_report(folders: Path | Sequence[Path], out: Path | None = None, options: Options | None = None) -> list[Path]:
    """Writes the page, the one-page PDF, every figure as PNG and SVG, the tables as CSV and report.json, each atomically.

    `out`: the folder of one run's report is its `report` unless given; of several runs it is `report` here. Returns the
    paths. Raises ConfigurationError for a missing or broken run file or an option that fits nothing, and
    EnvironmentProblem when the outputs cannot be written.
    """
    folders = [Path(folders)] if isinstance(folders, str | Path) else [Path(folder) for folder in folders]
    report = assemble(folders, options)
    out = Path(out) if out else (folders[0] / "report" if len(folders) == 1 else Path("report"))
    try:
        with canvas_style():
            return _write(report, out)
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentProblem(f"{error.filename or out}: the report cannot be written ({reason})") from None


def _write(report: Report, out: Path) -> list[Path]:
    """Draws and writes all; returns the paths."""
    runs, groups = report.runs, report.groups
    files: list[Path] = []
    paretos = []
    for place, run in enumerate(runs, start=1):
        name = "pareto" if len(runs) == 1 else f"pareto-run{place}"
        files += save_pareto(run.pareto, out, name)
        paretos.append((name, files[-1].read_text(encoding="utf-8")))
    by_group = [
        _draw(group.gallery.drawn, "" if len(groups) == 1 else f"-group{place}", out, files)
        for place, group in enumerate(groups, start=1)
    ]
    by_run = [
        _draw(run.gallery.drawn, "" if len(runs) == 1 else f"-run{place}", out, files)
        for place, run in enumerate(runs, start=1)
    ]
    files.append(save_pdf(report, in_order(by_group, by_run), out, out / "report.pdf"))
    files.append(write_front_csv([run.run for run in runs], out / "front.csv"))
    files.append(write_csv(out / "summary.csv", SUMMARY_COLUMNS, summary_rows(report)))
    files += [out / "report.json", out / "index.html"]
    write_text(files[-2], json.dumps(report_json(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(files[-1], render_page(report, paretos, by_run, by_group))
    _remove_stale(out, files)
    return files


def _remove_stale(out: Path, files: Sequence[Path]) -> None:
    """Removes pictures that an earlier report left: what is not drawn now must not lie beside what is."""
    written = {path.name for path in files}
    for path in out.iterdir():
        if PICTURE.fullmatch(path.name) and path.name not in written:
            path.unlink()


def _draw(items: Sequence[Figure], suffix: str, out: Path, files: list[Path]) -> list[Drawing]:
    """Draws figures into files, and for the page."""
    drawings = []
    for item in items:
        picture = draw_figure(item)
        name = item.name + suffix
        files += save_figure(picture.canvas, out, name)
        svg = files[-1].read_text(encoding="utf-8")
        drawings.append(Drawing(name, item, svg, picture.tips, picture.note_pt))
    return drawings
