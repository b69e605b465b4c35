"""The front as rows: for CSV, the terminal, Markdown and the page. An absent value is None in a row, n/a in a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lossyspec.records import Estimate, FrontPoint, write_text

from .load import Run
from .pareto import loss_percent

if TYPE_CHECKING:
    from rich.table import Table

NA = "n/a"
Getter = Callable[[FrontPoint], Any]


def _drafts(point: FrontPoint) -> bool:
    """True when the point drafts at all at its batch size."""
    return point.settings.draft_length_for(point.batch_size) > 0


def _if_drafting(path: str) -> Getter:
    """A knob that only drafting uses: None for plain decoding."""
    read = attrgetter(path)
    return lambda point: read(point) if _drafts(point) else None


def _ngram(name: str) -> Getter:
    return lambda point: getattr(point.settings.ngram, name) if point.settings.ngram and _drafts(point) else None


def _alpha(point: FrontPoint) -> float | None:
    """None where the rule has no alpha."""
    return point.settings.alpha if _drafts(point) and point.settings.rule != "exact" else None


def _live(name: str) -> Getter:
    """A measured value: None when the point was not measured."""
    return lambda point: getattr(point.measured, name) if point.measured else None


def _latency(percentile: str) -> Getter:
    return lambda point: (point.measured.itl_ms or {}).get(percentile) if point.measured else None


def _interval(name: str, read: Getter, convert: Callable[[float], float] = float) -> dict[str, Getter]:
    """Three columns of an estimate: its value and the ends of its interval."""

    def end(index: int) -> Getter:
        def get(point: FrontPoint) -> float | None:
            estimate: Estimate | None = read(point)
            return convert(estimate.ci95[index]) if estimate and estimate.ci95 else None

        return get

    def value(point: FrontPoint) -> float | None:
        estimate: Estimate | None = read(point)
        return convert(estimate.value) if estimate else None

    return {name: value, f"{name}_ci95_low": end(0), f"{name}_ci95_high": end(1)}


_ratio = attrgetter("quality.perplexity_ratio")
#: the columns of a row, with the units in the names
COLUMNS: dict[str, Getter] = {
    "trial": attrgetter("trial"),
    "kind": attrgetter("kind"),
    "recommended": attrgetter("recommended"),
    "rule": _if_drafting("settings.rule"),
    "alpha": _alpha,
    "tau": _if_drafting("settings.tau"),
    "theta": _if_drafting("settings.theta"),
    "draft_length_tokens": lambda point: point.settings.draft_length_for(point.batch_size),
    "batch_size_sequences": attrgetter("batch_size"),
    "target_precision": attrgetter("settings.precision.target"),
    "draft_precision": _if_drafting("settings.precision.draft"),
    "ngram_min_match_tokens": _ngram("min_match"),
    "ngram_max_match_tokens": _ngram("max_match"),
    **_interval("speedup_ratio", _live("speedup")),
    **_interval("end_to_end_speedup_ratio", _live("end_to_end_speedup")),
    "predicted_speedup_ratio": attrgetter("predicted.speedup"),
    "prediction_error_share": _live("prediction_error"),
    **_interval("perplexity_ratio", _ratio),
    **_interval("loss_percent", _ratio, loss_percent),
    "certificate_perplexity_ratio": attrgetter("quality.certificate"),
    "tv": attrgetter("quality.tv"),
    "kl_forward_nats": attrgetter("quality.kl_forward"),
    "kl_reverse_nats": attrgetter("quality.kl_reverse"),
    "quality_corpus": attrgetter("quality.corpus"),
    "quality_tokens": attrgetter("quality.tokens"),
    "quality_texts": attrgetter("quality.texts"),
    "tokens_per_s": _live("tokens_per_s"),
    "plain_tokens_per_s": _live("plain_tokens_per_s"),
    "tokens_per_round": _live("tokens_per_round"),
    "tokens_per_round_error_share": _live("tokens_per_round_error"),
    "drafted_tokens_per_round": _live("drafted_per_round"),
    "acceptance_share": _live("acceptance"),
    "ttft_ms": _live("ttft_ms"),
    **{f"itl_ms_{percentile}": _latency(percentile) for percentile in ("p50", "p95", "p99")},
    "output_length_ratio": _live("length_ratio"),
    "repetition_share": _live("repetition"),
    "generated_perplexity_ratio": _live("generated_perplexity_ratio"),
    "measured_tokens": _live("tokens"),
    "measured_rounds": _live("rounds"),
    "measured_blocks": _live("blocks"),
    "note": attrgetter("note"),
}
#: headings of the tables, in order, and which are left out first on a narrow terminal (highest first; 0: never)
HEADINGS = {
    "trial": 0, "rule": 1, "alpha": 0, "tau": 5, "theta": 6, "draft length": 4, "batch": 3, "precision": 8,
    "speed-up [95 % CI]": 0, "loss % [95 % CI]": 0, "tokens/s": 2, "tokens/round": 7, "acceptance": 9, "TV": 10,
}  # fmt: skip
TEXT_HEADINGS = ("trial", "rule", "precision")


def front_rows(run: Run) -> list[dict[str, Any]]:
    """One flat row a point of the front, in stored order; absent values are None."""
    return [{name: read(point) for name, read in COLUMNS.items()} for point in run.points]


def write_front_csv(runs: Sequence[Run], path: Path) -> Path:
    """Writes the points of all runs as CSV (an empty cell is an absent value), atomically; without any its heading."""
    about = ("run", "device", "task")
    rows = [
        {"run": run.folder.resolve().name, "device": run.device, "task": run.manifest.task} | row
        for run in runs
        for row in front_rows(run)
    ]
    return write_csv(path, [*about, *COLUMNS], rows)


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows under a heading, atomically; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, stream.getvalue())
    return path


def number(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits, n/a for None."""
    return NA if value is None else f"{value:.{digits}f}"


def speedup_text(estimate: Estimate | None) -> str:
    """1.88x [1.83, 1.93]."""
    if estimate is None:
        return NA
    ends = estimate.ci95
    return f"{estimate.value:.2f}x" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")


def loss_text(estimate: Estimate) -> str:
    """+3.10 [+2.50, +3.70], in percent."""
    value, *ends = (f"{loss_percent(ratio):+.2f}" for ratio in (estimate.value, *(estimate.ci95 or ())))
    return (f"{value} [{ends[0]}, {ends[1]}]" if ends else value).replace("-0.00", "+0.00")


def table_cells(point: FrontPoint) -> list[str]:
    """The cells of a point under `HEADINGS`."""
    live, settings = point.measured, point.settings
    rule, tau, theta, draft = (COLUMNS[name](point) for name in ("rule", "tau", "theta", "draft_precision"))
    return [
        f"{point.trial} {point.kind}" + (" *" if point.recommended else ""),
        rule or NA,
        number(_alpha(point)),
        number(tau),
        number(theta),
        str(settings.draft_length_for(point.batch_size)),
        str(point.batch_size),
        settings.precision.target + (f"/{draft}" if draft else ""),
        speedup_text(live.speedup if live else None),
        loss_text(point.quality.perplexity_ratio),
        number(live.tokens_per_s if live else None, 1),
        number(live.tokens_per_round if live else None),
        number(live.acceptance if live else None),
        number(point.quality.tv, 3),
    ]


def describe_point(point: FrontPoint) -> str:
    """One line: what the point is, without its numbers."""
    settings, length = point.settings, point.settings.draft_length_for(point.batch_size)
    precision = table_cells(point)[list(HEADINGS).index("precision")]
    if settings.attention.block:
        precision += f", attention {settings.attention.name}"
    if settings.compile != "off":
        precision += f", {settings.compile}"
    if length == 0:
        return f"plain, batch {point.batch_size}, {precision}"
    rule = settings.rule if settings.rule == "exact" else f"{settings.rule} alpha {settings.alpha:.2f}"
    return (
        f"{point.kind}, {rule}, tau {settings.tau:.2f}, theta {settings.theta:.2f}, {length} drafted, "
        f"batch {point.batch_size}, {precision}"
    )


def front_table(run: Run, max_width: int | None = None) -> Table:
    """The front for the terminal. To fit into `max_width` cells break in two, then columns go, least needed first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = [list(HEADINGS), *(table_cells(point) for point in run.points)]
    if max_width is not None and _width(lines, range(len(HEADINGS))) > max_width:
        lines = [[cell.replace(" [", "\n[").replace("draft ", "draft\n") for cell in line] for line in lines]
    kept = list(range(len(HEADINGS)))
    for index in sorted(kept, key=lambda index: -list(HEADINGS.values())[index]):
        if max_width is None or _width(lines, kept) <= max_width or list(HEADINGS.values())[index] == 0:
            break
        kept.remove(index)
    caption = "* recommended" if run.recommended else "no point is recommended" if run.points else "no confirmed point"
    if len(kept) < len(HEADINGS):
        caption += f"; not shown here: {', '.join(name for at, name in enumerate(HEADINGS) if at not in kept)}"
    table = Table(title=Text(f"{run.manifest.task}: the front"), caption=Text(caption), box=box.SIMPLE, padding=(0, 1))
    for index in kept:
        justify: Any = "left" if list(HEADINGS)[index] in TEXT_HEADINGS else "right"
        table.add_column(Text(lines[0][index]), justify=justify, overflow="fold")
    for point, cells in zip(run.points, lines[1:], strict=True):
        table.add_row(*(Text(cells[index]) for index in kept), style="bold" if point.recommended else None)
    return table


def _width(lines: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Width in characters of a table of these columns, with its padding and separators."""
    return sum(max(len(part) for line in lines for part in line[index].split("\n")) + 3 for index in kept) + 1


def front_markdown(run: Run) -> str:
    """The front as a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |"]
    lines.append("|" + "|".join(":--" if name in TEXT_HEADINGS else "--:" for name in HEADINGS) + "|")
    for point in run.points:
        cells = [cell.replace("*", "\\*").replace("|", "\\|") for cell in table_cells(point)]
        lines.append("| " + " | ".join(f"**{cell}**" if point.recommended else cell for cell in cells) + " |")
    return "\n".join(lines) + "\n"
