"""Rebuilds every output of a run from its stored files, into its `report` folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lossyspec.errors import EnvironmentProblem
from lossyspec.records import dump, write_text

from .html import render_index
from .load import Run, load_run
from .pareto import pareto_info
from .plots import save_pareto
from .tables import front_rows, write_front_csv

SCHEMA = "lossytune.report/1"


def build_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes pareto.png, pareto.svg, front.csv, report.json and index.html, each atomically; returns their paths.

    `out` is `folder`/report unless given. Raises ConfigurationError for a missing or broken run file, and
    EnvironmentProblem when the outputs cannot be written.
    """
    run = load_run(folder)
    out = Path(out) if out else run.folder / "report"
    try:
        png, svg = save_pareto(pareto_info(run), out)
        table = write_front_csv(run, out / "front.csv")
        write_text(out / "report.json", json.dumps(report_data(run), indent=2, ensure_ascii=False) + "\n")
        write_text(out / "index.html", render_index(run, svg.read_text(encoding="utf-8")))
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentProblem(f"{error.filename or out}: the report cannot be written ({reason})") from None
    return [png, svg, table, out / "report.json", out / "index.html"]


def report_data(run: Run) -> dict[str, Any]:
    """report.json: the verdict, each point with all of its numbers, and what they were got with."""
    manifest, counts = run.manifest, run.counts
    points = [row | {"record": dump(point)} for row, point in zip(front_rows(run), run.points, strict=True)]
    return {
        "schema": SCHEMA,
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
