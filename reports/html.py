"""The report as one self-contained index.html: what to buy first, then each run. No external resource, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from lossyspec.records import Estimate

from .assemble import GroupReport, Report, RunReport
from .capacity import ASSUMPTIONS
from .compare import ABSENT
from .html_run import run_head, run_sections
from .load import pair_name
from .page import Drawing, bullets, frame, gallery, section, table
from .predict import Roofline
from .prices import cost_per_million, origin_text
from .speeds import served_speed
from .summary import speed_text, three
from .tables import NA

SHARES = (0.1, 0.3, 0.6, 1.0)
KIND_NAMES = ("plain", "lossless", "lossy")


def render_page(
    report: Report,
    paretos: Sequence[tuple[str, str]],
    by_run: Sequence[Sequence[Drawing]],
    by_group: Sequence[Sequence[Drawing]],
) -> str:
    """The page around its pictures. paretos: name and SVG text of the front of each run."""
    one = len(report.runs) == 1
    first = report.runs[0]
    title = f"{first.summary.task} on {first.label}" if one else _title(report)
    created = ", ".join(dict.fromkeys(item.run.manifest.created for item in report.runs))
    pairs = dict.fromkeys(pair_name(item.run.manifest.target, item.run.manifest.draft) for item in report.runs)
    body = [
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="faint">{escape("; ".join(pairs))} · <span>{escape(created)}</span></p></header>',
        "<main>",
        *(_verdict(item, one) for item in report.runs),
        run_head(first.run) if one else "",
        "" if one else section("Side by side", _devices(report.runs)),
        "" if one else section("What may be compared", _comparison(report)),
        _filter(report),
        *(
            section(_group_heading(report, place), _group(group, drawings, report), f"g{place}-")
            for place, (group, drawings) in enumerate(zip(report.groups, by_group, strict=True), start=1)
        ),
        section("Not drawn, and why", _missing(report)),
        *_runs(report, paretos, by_run),
        "</main>",
        '<footer class="faint">Rebuilt from run folders alone. All numbers: report.json; pictures beside it.</footer>',
    ]
    return frame(title, body)


def _title(report: Report) -> str:
    """What the runs are, and on which device where it is one."""
    devices = {item.summary.device for item in report.runs}
    where = f" on {devices.pop()}" if len(devices) == 1 else ""
    return f"{len(report.runs)} runs{where}: {'; '.join(item.label for item in report.runs)}"


def _verdict(item: RunReport, one: bool) -> str:
    name = "" if one else f"<strong>{escape(item.label)}:</strong> "
    suspects = "".join(f'<p class="refused">{escape(said)}</p>' for said in item.suspects)
    made_up = item.summary.made_up
    warning = f'<p class="refused"><strong>Not measured, made up:</strong> {escape(made_up)}</p>' if made_up else ""
    return f'<p class="verdict">{name}{escape(item.summary.sentence)}</p>{warning}{suspects}'


def _devices(runs: Sequence[RunReport]) -> str:
    """One row a run, on absolute axes."""

    def cell(estimate: Estimate | None) -> str:
        value, _, ends = speed_text(estimate).partition(" (")
        return escape(value) + (f"<small>{escape(ends.rstrip(')'))}</small>" if ends else "")

    heads = [
        "run",
        "task",
        "batch",
        "tokens/s",
        "lossless tokens/s",
        "plain tokens/s",
        "with prefill",
        "J/token",
        "largest batch",
    ]
    rows = [
        [
            escape(item.label),
            escape(item.summary.task),
            NA if item.summary.batch is None else str(item.summary.batch),
            cell(item.summary.speed_tokens_per_s),
            cell(item.summary.lossless_tokens_per_s),
            cell(item.summary.plain_tokens_per_s),
            cell(item.summary.served_tokens_per_s),
            cell(item.summary.joules_per_token),
            NA if item.summary.largest_batch is None else f"{item.summary.largest_batch:,}",
        ]
        for item in runs
    ]
    return table("Measured live on one device, whole batch; small: 95 % intervals over blocks.", heads, rows, 2)


def _comparison(report: Report) -> str:
    """The refusals, the ranking, and the table that both rest on."""
    parts = [f'<p class="refused">{escape(said)}.</p>' for said in report.refusals]
    for group in report.groups:
        parts.append(bullets(group.ranking) if group.ranking else "")
        parts.append(bullets(f"Note: {said}" for said in group.footnotes) if group.footnotes else "")
    heads = ["field", "must agree", *(item.label for item in report.runs)]
    rows = [
        [
            escape(row.name),
            "yes" if row.required else "no",
            *(f"{'≠ ' if row.differs else ''}{escape(_value(value))}" for value in row.values),
        ]
        for row in report.compared
    ]
    return "".join(parts) + table(
        "≠: the runs differ. What must agree and does not is never drawn together.", heads, rows, 99
    )


def _value(value: object) -> str:
    text = ABSENT if value is None else str(value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{name} {item}" for name, item in value.items() if item is not None and item != 1.0)
    return f"{text[:12]}…" if re.fullmatch(r"[0-9a-f]{32,}", text) else text


def _filter(report: Report) -> str:
    """Check boxes that hide marks in all figures; shown by the script, since nothing else could act on them."""
    names = [item.label for item in report.runs]
    for group in report.groups:
        names += [name for name in group.group.devices() if name not in names]
    runs = [_box("run", name) for name in names] if len(names) > 1 else []
    kinds = [_box("kind", name) for name in KIND_NAMES]
    return f'<fieldset class="filter" hidden><legend>Show</legend>{"".join(runs + kinds)}</fieldset>'


def _box(kind: str, name: str) -> str:
    return f'<label><input type="checkbox" name="{kind}" value="{escape(name)}" checked> {escape(name)}</label>'


def _group_heading(report: Report, place: int) -> str:
    return (
        "On absolute axes"
        if len(report.groups) == 1
        else f"On absolute axes: {'; '.join(report.groups[place - 1].group.labels)}"
    )


def _group(group: GroupReport, drawings: Sequence[Drawing], report: Report) -> str:
    parts = [gallery(drawings), _costs(group, report), _capacity(group, report), _prediction(group)]
    return "".join(part for part in parts if part)


def _costs(group: GroupReport, report: Report) -> str:
    """The cost curve as a table: a million tokens at four utilisations."""
    rows = []
    for run, label in zip(group.group.runs, group.group.labels, strict=True):
        price, best = report.prices.get(run.device), run.recommended
        speed = served_speed(run, best) if best else None
        if price and speed:
            costs = [three(cost_per_million(price.per_hour, speed.value, share)) for share in SHARES]
            rows.append([escape(label), escape(f"{three(price.per_hour)} {price.currency}"), *costs])
    if not rows:
        return ""
    heads = ["run", "an hour", *(f"at {share:.0%}" for share in SHARES)]
    terms = report.options.prices
    caption = f"{terms.currency} a million tokens, recommended point, by utilisation. {origin_text(terms)}"
    return f"<h3>Cost</h3>{table(caption, heads, rows)}"


def _capacity(group: GroupReport, report: Report) -> str:
    """Devices for the demand, with every assumption."""
    demand = report.options.demand
    if demand is None:
        return ""
    rows, notes = [], []
    for run, label, results in zip(group.group.runs, group.group.labels, group.capacity, strict=True):
        price = report.prices.get(run.device)
        for result in results:
            fleet = NA
            if price and result.devices:
                fleet = f"{three(result.devices * price.per_hour)} {price.currency}"
            p95 = result.p95_by_devices.get(result.devices) if result.devices else None
            count = str(result.devices) if result.devices else f"none: {result.reason}"
            rows.append(
                [escape(label), escape(result.kind), escape(count), NA if p95 is None else f"{three(p95)} s", escape(fleet)]
            )
            notes.append(f"{label}: {result.prefill_note}")
    caption = (
        f"{demand.requests_per_s:g} requests/s of {demand.input_tokens} tokens in and {demand.output_tokens} out, "
        f"95 % within {demand.p95_s:g} s. Simulated from the cost table, not measured."
    )
    body = (
        table(caption, ["run", "decoding", "devices", "p95", "all of them, an hour"], rows, 2)
        if rows
        else "<p>No run has a cost table and trials.</p>"
    )
    once = ASSUMPTIONS if group is report.groups[0] else ("The assumptions are those above.",)
    return f"<h3>Devices for a load</h3>{body}{bullets([*dict.fromkeys(notes), *once])}"


def _prediction(group: GroupReport) -> str:
    """What the predicted devices rest on."""
    roofline = group.roofline
    if roofline is None:
        return ""
    if not isinstance(roofline, Roofline):
        return f'<h3>Prediction</h3><p class="refused">Nothing was predicted. {escape(roofline)}.</p>'
    fit = roofline.fit
    lines = [
        f"Fitted on {', '.join(roofline.machines)}: {fit.e_bandwidth:.0%} of the bandwidth, {fit.e_flops:.0%} of the "
        f"arithmetic, {1e3 * fit.overhead_s:.3g} ms a pass besides.",
        f"Error: {roofline.error}.",
        "The tokens a round transfer from the measured run; the time of a pass is max(bytes/bandwidth, FLOP/rate) + "
        "overhead. Prompt lookup and the host are taken to be as fast as on the measured machine; no prefill is predicted.",
        *roofline.warnings,
        *group.unpredicted,
    ]
    points = {(point.device, point.kind, point.batch): point for point in group.group.predicted}
    batches = sorted({batch for _, _, batch in points})
    rows = []
    for device, kind in dict.fromkeys((device, kind) for device, kind, _ in points):
        cells = [points.get((device, kind, batch)) for batch in batches]
        speeds = [
            f"{three(one.tokens_per_s)}<small>{three(one.low)}-{three(one.high)}</small>" if one else NA for one in cells
        ]
        rows.append([escape(device), escape(kind), *speeds])
    heads = ["device", "decoding", *(f"batch {batch}" for batch in batches)]
    body = table("Predicted, not measured: tokens/s a device and its range, by batch size.", heads, rows, 2)
    return f"<h3>Prediction</h3>{body if rows else ''}{bullets(lines)}"


def _missing(report: Report) -> str:
    """All figures that are absent, each reason once."""
    said = [f"{item.title}: {item.reason}." for group in report.groups for item in group.gallery.missing]
    for run in report.runs:
        name = "" if len(report.runs) == 1 else f"{run.label}, "
        said += [f"{name}{item.title}: {item.reason}." for item in run.gallery.missing]
    return bullets(dict.fromkeys(said)) if said else "<p>Nothing: every figure has its data.</p>"


def _runs(report: Report, paretos: Sequence[tuple[str, str]], by_run: Sequence[Sequence[Drawing]]) -> list[str]:
    """The runs one after the other; folded where there are several."""
    if len(report.runs) == 1:
        return [run_sections(report.runs[0], paretos[0], by_run[0])]
    return [
        f"<details><summary>{escape(item.label)}: the run by itself</summary>"
        f"{run_head(item.run)}{run_sections(item, pareto, drawings, f'r{place}-')}</details>"
        for place, (item, pareto, drawings) in enumerate(zip(report.runs, paretos, by_run, strict=True), start=1)
    ]
