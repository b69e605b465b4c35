"""Figures of one run: acceptance by depth, where a round's time goes, what each knob does."""

from __future__ import annotations

from .charts import DERIVED, KIND_COLOURS, PALETTE, Bars, Chart, Drawn, Mark, Missing, Part, Row, Series
from .importance import MIN_TRIALS, knob_importance
from .load import Run
from .pareto import point_labels
from .serving import DRAFTING, JUDGING, MORE, PASS, round_parts
from .speeds import blocks_of
from .summary import three

PART_COLOURS = {PASS: "#1f2328", MORE: "#0072b2", DRAFTING: "#e69f00", JUDGING: "#cc79a7"}


def acceptance_figure(run: Run, label: str) -> Drawn:
    """The share of drafted tokens that was accepted, by their depth in the round; a line a confirmed point."""
    title = "Acceptance by depth"
    series = []
    names = point_labels(run.points)
    colours = iter(PALETTE * 4)
    for point, name in zip(run.points, names, strict=True):
        shares = point.measured.acceptance_by_depth if point.measured else ()
        if shares and point.kind != "plain":
            marks = tuple(
                Mark(depth, share, f"{label}, {name}: {share:.1%} of the tokens drafted at depth {depth} were accepted")
                for depth, share in enumerate(shares, start=1)
            )
            colour = KIND_COLOURS["recommended"] if point.recommended else next(colours)
            if colour == KIND_COLOURS["recommended"] and not point.recommended:
                colour = next(colours)
            shown = f"{name} (recommended)" if point.recommended else name
            series.append(Series(shown, label, point.kind, "measured", colour, marks))
    if not series:
        return Missing(title, "no drafting point was measured live")
    return Chart("acceptance", title, "Depth in the round, tokens", "Accepted share of the drafted tokens", tuple(series),
                 "Measured live, over all rounds that drafted that far.", counted=True, from_zero=True)  # fmt: skip


def round_figure(run: Run, label: str) -> Drawn:
    """Where the time of a round goes, for each confirmed point."""
    title = "Where a round's time goes"
    rows, live = [], False
    for point, name in zip(run.points, point_labels(run.points), strict=True):
        parts = round_parts(run, point)
        if parts is None:
            continue
        blocks = [block for block in blocks_of(run, point) if block.decode_s and block.rounds]
        measured = None
        if blocks and point.batch_size == 1:  # rows of a batch end at different times: their passes cannot be counted
            measured = 1e3 * sum(block.decode_s or 0 for block in blocks) / sum(block.rounds or 0 for block in blocks)
            live = True
        total = 1e3 * sum(parts.values())
        pieces = tuple(
            Part(part, ms, f"{label}, {name}: {part} {three(ms)} ms, {ms / total:.0%} of the round", PART_COLOURS[part])
            for part, seconds in parts.items()
            if (ms := 1e3 * seconds) > 0
        )
        rows.append(Row(name, label, pieces, measured))
    if not rows:
        reason = "no point was confirmed" if run.costs else "the run folder has no cost table"
        return Missing(title, reason)
    note = DERIVED + (" Diamonds: seconds of a round, measured live." if live else "")
    return Bars("round-time", title, "Milliseconds a round", tuple(rows), "stack", note)


def importance_figure(run: Run, label: str) -> Drawn:
    """What each knob does: the share of the variance that it explains alone."""
    title = "What each knob does"
    knobs, count = knob_importance(run)
    if not knobs:
        return Missing(
            title, f"{count} finished trials; {MIN_TRIALS} are needed" if count < MIN_TRIALS else "one value a knob"
        )
    rows = []
    for item in knobs:
        faster = f"{item.knob} alone explains {item.speedup:.0%} of the variance of the predicted speed-up"
        worse = f"{item.knob} alone explains {item.loss:.0%} of the variance of the loss"
        parts = (
            Part("speed-up", item.speedup, faster, KIND_COLOURS["lossy"]),
            Part("loss", item.loss, worse, KIND_COLOURS["recommended"]),
        )
        rows.append(Row(item.knob, label, parts))
    note = f"Over the {count} finished trials, as the sampler chose them; what knobs do together is in none of the bars."
    return Bars("importance", title, "Share of the variance explained alone", tuple(rows), "group", note)
