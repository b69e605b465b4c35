"""The report as data: report.json, and one row a run for summary.csv. Absent is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lossyspec.records import Estimate, dump

from .assemble import GroupReport, Report, RunReport
from .capacity import ASSUMPTIONS, Capacity
from .charts import Bars, Figure
from .load import Run
from .predict import Roofline
from .prices import Price, cost_per_million
from .speeds import served_speed
from .tables import front_rows

RUN_SCHEMA = "lossytune.report/1"
COMPARISON_SCHEMA = "lossytune.comparison/1"
SHARES = (0.1, 0.3, 0.6, 1.0)
_ESTIMATES = (
    "speed_tokens_per_s", "lossless_tokens_per_s", "plain_tokens_per_s", "served_tokens_per_s", "joules_per_token",
)  # fmt: skip
SUMMARY_COLUMNS = (
    "run", "label", "device", "task", "made_up", "verdict", "batch_size_sequences",
    *(f"{name}{end}" for name in _ESTIMATES for end in ("", "_ci95_low", "_ci95_high")),
    "no_energy_reason", "largest_batch_sequences", "price_per_hour", "currency",
    *(f"cost_per_million_tokens_at_{share:.0%}".replace("%", "_percent") for share in SHARES),
)  # fmt: skip


def report_data(run: Run) -> dict[str, Any]:
    """One run: the verdict, each point with all of its numbers, and what they were got with."""
    manifest, counts = run.manifest, run.counts
    points = [row | {"record": dump(point)} for row, point in zip(front_rows(run), run.points, strict=True)]
    return {
        "schema": RUN_SCHEMA,
        "task": manifest.task,
        "created": manifest.created,
        "status": manifest.status,
        "verdict": run.verdict,
        "max_quality_loss_share": run.loss_limit,
        "points": points,
        "transformers_tokens_per_s": run.front.transformers_tokens_per_s if run.front else None,
        "transformers_ratio": dump(run.front.transformers_ratio) if run.front and run.front.transformers_ratio else None,
        "counts": {"complete": counts.complete, "failed": counts.failed, "infeasible": counts.infeasible},
        "failures": [{"reason": reason, "trials": count} for reason, count in run.reasons("failed")],
        "machine": manifest.hardware,
        "models": {
            "target": manifest.target,
            "draft": manifest.draft,
            "tokenizer_sha256": manifest.tokenizer_sha256,
        },
        "workload": manifest.workload,
        "sampling": dump(manifest.sampling),
        "excluded": manifest.excluded,
        "versions": manifest.versions,
        "seed": manifest.seed,
        "timings_s": manifest.timings_s,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "notes": list(manifest.notes),
    }


def report_json(report: Report) -> dict[str, Any]:
    """report.json. One run: its own data, with its figures. Several: the same of each, and how they compare."""
    groups = [_group_data(group, report) for group in report.groups]
    if len(report.runs) == 1:
        return _run_data(report.runs[0]) | {"absolute": groups[0]}
    return {
        "schema": COMPARISON_SCHEMA,
        "runs": [_run_data(item) for item in report.runs],
        "comparability": [asdict(row) for row in report.compared],
        "refusals": list(report.refusals),
        "groups": groups,
    }


def _run_data(item: RunReport) -> dict[str, Any]:
    summary = asdict(item.summary) | {name: _estimate(getattr(item.summary, name)) for name in _ESTIMATES}
    return report_data(item.run) | {
        "label": item.label,
        "summary": summary,
        "suspect_measurements": list(item.suspects),
        "noise_band_ratio": item.pareto.noise_band,
        "figures": [_figure(figure) for figure in item.gallery.drawn],
        "not_drawn": [asdict(missing) for missing in item.gallery.missing],
    }


def _group_data(group: GroupReport, report: Report) -> dict[str, Any]:
    roofline, demand = group.roofline, report.options.demand
    return {
        "runs": list(group.group.labels),
        "ranking": list(group.ranking),
        "footnotes": list(group.footnotes),
        "figures": [_figure(figure) for figure in group.gallery.drawn],
        "not_drawn": [asdict(missing) for missing in group.gallery.missing],
        "prices": [asdict(report.prices[run.device]) for run in group.group.runs if run.device in report.prices],
        "price_source": report.options.prices.source,
        "price_date": report.options.prices.date,
        "demand": asdict(demand) if demand else None,
        "capacity": [
            {"run": label, "results": [_capacity(result, report.prices.get(run.device)) for result in results]}
            for run, label, results in zip(group.group.runs, group.group.labels, group.capacity, strict=True)
        ]
        if demand
        else None,
        "capacity_assumptions": list(ASSUMPTIONS) if demand else None,
        "roofline": asdict(roofline) if isinstance(roofline, Roofline) else None,
        "no_prediction_reason": roofline if isinstance(roofline, str) else None,
        "predicted": [asdict(point) for point in group.group.predicted],
        "unpredicted": list(group.unpredicted),
    }


def _capacity(result: Capacity, price: Price | None) -> dict[str, Any]:
    """A result with what its devices cost for an hour; None without a price or without a number of devices."""
    return asdict(result) | {"price_per_hour": price.per_hour * result.devices if price and result.devices else None}


def _figure(figure: Figure) -> dict[str, Any]:
    return {"type": "bars" if isinstance(figure, Bars) else "chart"} | asdict(figure)


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return dump(estimate) if estimate else None


def summary_rows(report: Report) -> list[dict[str, Any]]:
    """One row a run under `SUMMARY_COLUMNS`."""
    rows = []
    for item in report.runs:
        run, summary = item.run, item.summary
        row: dict[str, Any] = dict.fromkeys(SUMMARY_COLUMNS)
        row |= {"run": run.folder.resolve().name, "label": item.label, "device": summary.device, "task": summary.task}
        row |= {"made_up": summary.made_up, "verdict": summary.sentence, "batch_size_sequences": summary.batch}
        row |= {"no_energy_reason": summary.no_energy_reason, "largest_batch_sequences": summary.largest_batch}
        for name in _ESTIMATES:
            estimate: Estimate | None = getattr(summary, name)
            if estimate:
                row[name] = estimate.value
                row[f"{name}_ci95_low"], row[f"{name}_ci95_high"] = estimate.ci95 or (None, None)
        price, best = report.prices.get(run.device), run.recommended
        if price:
            row |= {"price_per_hour": price.per_hour, "currency": price.currency}
            speed = served_speed(run, best) if best else None
            for share in SHARES if speed else ():
                assert speed is not None
                name = f"cost_per_million_tokens_at_{share:.0%}".replace("%", "_percent")
                row[name] = cost_per_million(price.per_hour, speed.value, share)
        rows.append(row)
    return rows
