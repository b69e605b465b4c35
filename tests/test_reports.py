"""Reports: stored files in, files out. Every run here is built through the pydantic models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lossyspec.records import (
    Estimate,
    Front,
    FrontPoint,
    Measurement,
    Prediction,
    Quality,
    RunManifest,
    TrialRecord,
    append_record,
    write_record,
)
from lossyspec.settings import Precisions, Sampling, Settings


def prediction(speedup: float) -> Prediction:
    return Prediction(
        speedup=speedup,
        tokens_per_s=40.0 * speedup,
        tokens_per_round=1.0 + speedup,
        drafted_per_round=4.0,
        acceptance=0.61,
        round_s=0.05,
        plain_round_s=0.025,
    )


def quality(ratio: float, interval: tuple[float, float] | None = None, **values: Any) -> Quality:
    known = {"tv": 0.04, "kl_forward": 0.03, "kl_reverse": 0.02, "certificate": None} | values
    return Quality(
        perplexity_ratio=Estimate(value=ratio, ci95=interval), tokens=4410, texts=40, corpus="target_samples", **known
    )


def measurement(speedup: float, interval: tuple[float, float] | None = None, **values: Any) -> Measurement:
    known: dict[str, Any] = {"acceptance": 0.6, "ttft_ms": 12.5, "itl_ms": {"p50": 9.0, "p95": 14.0, "p99": 20.0}}
    known |= {"length_ratio": 1.01, "repetition": 0.02, "generated_perplexity_ratio": 0.98, "prediction_error": 0.03}
    return Measurement(
        speedup=Estimate(value=speedup, ci95=interval),
        end_to_end_speedup=Estimate(value=speedup * 0.95),
        tokens_per_s=40.0 * speedup,
        plain_tokens_per_s=40.0,
        tokens_per_round=2.4,
        drafted_per_round=4.0,
        acceptance_by_depth=(0.8, 0.6, 0.4),
        tokens=9000,
        rounds=3700,
        blocks=12,
        tokens_per_round_error=-0.01,
        **(known | values),
    )


def trial(number: int, state: str = "complete", speedup: float = 1.5, ratio: float = 1.03, **values: Any) -> TrialRecord:
    known: dict[str, Any] = {"kind": "lossy", "settings": Settings(alpha=0.5), "batch_size": 1, "params": {}}
    known |= {"predicted": prediction(speedup), "quality": quality(ratio), "duration_s": 0.4}
    return TrialRecord(number=number, state=state, **(known | values))


def point(number: int, kind: str, speedup: float, ratio: float, **values: Any) -> FrontPoint:
    lossy = kind == "lossy"
    known: dict[str, Any] = {
        "recommended": False,
        "settings": Settings(
            rule="optimal" if lossy else "exact",
            alpha=values.pop("alpha", 0.6) if lossy else 0.0,
            tau=0.9,
            theta=0.3,
            draft_length=0 if kind == "plain" else 5,
            precision=Precisions(target="bf16", draft=None if kind == "plain" else "bf16"),
        ),
        "batch_size": 1,
        "predicted": prediction(speedup * 1.03),
        "quality": quality(ratio, (1 + (ratio - 1) * 0.8, 1 + (ratio - 1) * 1.2)),
        "measured": measurement(speedup, (speedup * 0.97, speedup * 1.03)),
    }
    return FrontPoint(trial=number, kind=kind, **(known | values))


def front(*points: FrontPoint, **values: Any) -> Front:
    known: dict[str, Any] = {
        "verdict": "Lossy decoding is worth it here: 1.88x at +3.1 % perplexity, against 1.45x lossless.",
        "max_quality_loss": 0.05,
        "transformers_tokens_per_s": 31.0,
        "transformers_ratio": Estimate(value=1.29, ci95=(1.25, 1.33)),
    }
    return Front(points=points, **(known | values))


def usual_front() -> Front:
    return front(
        point(0, "plain", 1.0, 1.0),
        point(1, "lossless", 1.45, 1.0),
        point(40, "lossy", 1.62, 1.008, alpha=0.2),
        point(41, "lossy", 1.6, 1.02, alpha=0.3),
        point(42, "lossy", 1.88, 1.031, alpha=0.6, recommended=True),
        point(43, "lossy", 1.93, 1.045, alpha=0.7),
    )


def manifest(**values: Any) -> RunManifest:
    known: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "command": ("lossytune", "search", "--task", "dialogue"),
        "task": "dialogue",
        "target": {"id": "HuggingFaceTB/SmolLM2-360M-Instruct", "revision": "abc", "weights_sha256": "ef" * 32},
        "draft": {"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "kind": "model"},
        "tokenizer_sha256": "ab" * 32,
        "sampling": Sampling(temperature=0.7),
        "workload": {"name": "dialogue", "prompts": 80, "sha256": "cd" * 32},
        "hardware": {"device": {"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 150_000_000_000}, "power_w": None},
        "versions": {"torch": "2.13.0", "transformers": "5.24.0", "lossytune": "0.1.0"},
        "config": {"max_quality_loss": 0.05, "trials": 200},
        "space": {"rule": ["optimal", "mixture"], "alpha": [0.0, 1.0]},
        "excluded": {"int4": "torchao is not installed", "fp16": "slower than bf16 at every length that was timed"},
        "seed": 0,
        "status": "complete",
        "timings_s": {"trace": 41.0, "search": 60.5},
        "peak_memory_bytes": 5_400_000_000,
        "notes": ("telemetry gap of 3 s",),
    }
    return RunManifest(**(known | values))


def usual_trials(count: int = 120) -> list[TrialRecord]:
    source = random.Random(0)
    trials = []
    for number in range(count):
        loss = source.random() ** 2 * 0.4
        speedup = 0.7 + 1.2 * source.random() * (0.6 + min(loss, 0.08) * 8)
        trials.append(trial(number, "infeasible" if loss > 0.2 else "complete", speedup, 1 + loss))
    trials.append(trial(count, "failed", predicted=None, quality=None, reason="CUDA out of memory. Tried 2.50 GiB"))
    trials.append(trial(count + 1, "failed", predicted=None, quality=None, reason="CUDA out of memory. Tried 12 GiB"))
    trials.append(trial(count + 2, "complete", quality=None))
    return trials


def write_run(folder: Path, trials: list[TrialRecord], stored: Front | None, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "manifest.json", manifest(**values))
    (folder / "trials.jsonl").unlink(missing_ok=True)
    for record in trials:
        append_record(folder / "trials.jsonl", record)
    if stored:
        write_record(folder / "front.json", stored)
    return folder
