"""Whole run folders for the tests of the reports: made up, through the records' own models, from a device's real peaks.

A pass takes max(bytes / (bandwidth e), flops / (rate e)) + overhead, so that a fit has a right answer.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lossyspec.records import (
    BlockRecord,
    Estimate,
    Front,
    FrontPoint,
    Measurement,
    Prediction,
    Quality,
    RunManifest,
    TrialRecord,
    append_record,
    read_record,
    read_records,
    write_record,
)
from lossyspec.reports.accelerators import known_accelerators
from lossyspec.reports.roofline import Fit, pass_s, seconds
from lossyspec.settings import WEIGHT_BYTES, NgramSettings, Precisions, Sampling, Settings

PARAMETERS, CACHED, CONTEXT, NEW_TOKENS = 1.5e9, 3e6, 200, 64
DRAFT_STEP_S = 0.002
TRUE_FIT = Fit(0.6, 0.4, 0.0015, 0.0, True)


@dataclass
class Machine:
    """A made-up machine: the peaks of a known device, and how it is described in a manifest."""

    device: str = "l4-24gb"
    fit: Fit = TRUE_FIT
    batches: tuple[int, ...] = (1, 4, 16)
    precisions: tuple[str, ...] = ("bf16", "fp32")
    driver: str = "580.65"
    seed: int = 0
    energy: bool = False
    manifest: dict[str, Any] = field(default_factory=dict)
    ngram: bool = True

    def pass_s(self, precision: str, batch: int, verified: float) -> float:
        """Seconds of a pass by the true roofline."""
        cell = pass_s(known_accelerators()[self.device], PARAMETERS, CACHED, precision, batch, verified)
        assert cell is not None
        return seconds(cell, self.fit)


def lookup_s(batch: int) -> list[float]:
    return [0.0, *(1e-5 * batch * length for length in range(1, 9))]


def costs_of(machine: Machine) -> dict[str, Any]:
    cells = [(precision, batch) for precision in machine.precisions for batch in machine.batches]
    return {
        "schema": "lossytune.costs/2",
        "context": CONTEXT,
        "round_s": {f"{p}/{b}": [machine.pass_s(p, b, n) for n in range(1, 10)] for p, b in cells},
        "draft_s": {} if machine.ngram else {f"{p}/{b}": [n * DRAFT_STEP_S for n in range(9)] for p, b in cells},
        "lookup_s": {str(batch): lookup_s(batch) for batch in machine.batches},
        "judge_s": {},
        "spread": {f"{p}/{b}": 0.01 for p, b in cells},
    }


def drafting_s(machine: Machine, batch: int, length: int) -> float:
    """Seconds of drafting in a round."""
    if length == 0:
        return 0.0
    return lookup_s(batch)[length] if machine.ngram else length * DRAFT_STEP_S


def predicted(machine: Machine, settings: Settings, batch: int, accepted: float) -> Prediction:
    """What the cost table says when each drafted token is accepted with one probability."""
    length, precision = settings.draft_length, settings.precision.target
    tokens = sum(accepted**depth for depth in range(length + 1))
    taken = machine.pass_s(precision, batch, length + 1) + drafting_s(machine, batch, length)
    plain = min(machine.pass_s(name, batch, 1) for name in machine.precisions)
    return Prediction(
        speedup=tokens * plain / taken,
        tokens_per_s=batch * tokens / taken,
        tokens_per_round=tokens,
        drafted_per_round=float(length),
        acceptance=(tokens - 1) / length if length else None,
        round_s=taken,
        plain_round_s=plain,
    )


def quality(ratio: float, certificate: float | None = None) -> Quality:
    ends = (1 + (ratio - 1) * 0.7, 1 + (ratio - 1) * 1.3)
    return Quality(
        perplexity_ratio=Estimate(value=ratio, ci95=ends), tokens=4096, texts=64, corpus="target_samples",
        tv=0.03, kl_forward=0.02, kl_reverse=0.02, certificate=certificate,
    )  # fmt: skip


def make_settings(kind: str, alpha: float, length: int, theta: float, precision: str, ngram: bool = True) -> Settings:
    return Settings(
        rule="exact" if kind != "lossy" else "optimal", alpha=alpha if kind == "lossy" else 0.0, theta=theta,
        draft_length=0 if kind == "plain" else length, ngram=NgramSettings() if ngram else None,
        precision=Precisions(target=precision, draft=None if ngram or kind == "plain" else precision),
    )  # fmt: skip


def loss_of(alpha: float) -> float:
    return 0.25 * alpha**2


def accepted_of(alpha: float, theta: float) -> float:
    return min(0.97, 0.55 + 0.3 * alpha + 0.1 * theta)


def make_trials(machine: Machine, count: int = 90) -> list[TrialRecord]:
    """Plain at each precision and batch size first, then others at random."""
    source = random.Random(machine.seed)
    plan: list[tuple[str, float, int, float, str, int]] = [
        (kind, 0.0, 3 if kind == "lossless" else 0, 0.0, precision, batch)
        for kind in ("plain", "lossless")
        for precision in machine.precisions
        for batch in machine.batches
    ]
    plan += [
        ("lossy", source.choice((0.1, 0.3, 0.45, 0.6)), source.randint(1, 6), source.choice((0.0, 0.3)),
         source.choice(machine.precisions), source.choice(machine.batches))
        for _ in range(max(0, count - len(plan)))
    ]  # fmt: skip
    trials = []
    for number, (kind, alpha, length, theta, precision, batch) in enumerate(plan):
        settings = make_settings(kind, alpha, length, theta, precision, machine.ngram)
        loss = loss_of(alpha) if kind == "lossy" else 0.0
        trials.append(
            TrialRecord(
                number=number,
                kind=kind,
                state="infeasible" if loss > 0.05 else "complete",
                settings=settings,
                batch_size=batch,
                params={
                    "alpha": alpha,
                    "draft_length": settings.draft_length,
                    "theta": theta,
                    "precision": precision,
                    "batch_size": batch,
                },
                predicted=predicted(machine, settings, batch, accepted_of(alpha, theta)),
                quality=quality(1 + loss),
                memory_bytes=int(
                    WEIGHT_BYTES[precision] * (PARAMETERS + machine.manifest.get("draft_parameters", 0) + batch * CACHED)
                ),
                duration_s=0.01,
            )
        )
    return trials


def make_blocks(machine: Machine, points: list[tuple[str, Prediction]], blocks: int = 12) -> list[BlockRecord]:
    """Live runs at batch 1 whose speed is the predicted one within some noise; prefill takes 20 ms."""
    source, records = random.Random(machine.seed + 1), []
    for block in range(blocks):
        for name, expected in points:
            rounds = round(NEW_TOKENS / expected.tokens_per_round)
            decode = rounds * expected.round_s * source.uniform(0.97, 1.05)
            drafted = int(expected.drafted_per_round)
            kept = tuple(int(rounds * 0.7 ** (depth + 1)) for depth in range(drafted))
            records.append(
                BlockRecord(
                    block=block,
                    forward=block % 2 == 0,
                    contestant=name,
                    batch_size=1,
                    tokens=NEW_TOKENS,
                    total_s=decode + 0.02,
                    decode_s=decode,
                    rounds=rounds,
                    drafted_at=(rounds,) * drafted,
                    accepted_at=kept,
                    first_token_s=0.02 + expected.round_s,
                    energy_joules=decode * 60 if machine.energy else None,
                )
            )
    return records


def front_point(trial: TrialRecord, plain: Prediction, machine: Machine, recommended: bool) -> FrontPoint:
    assert trial.predicted is not None and trial.quality is not None
    value = trial.predicted.tokens_per_s / plain.tokens_per_s * (1.0 if trial.kind == "plain" else 0.98)
    estimate = Estimate(value=value, ci95=(value * 0.97, value * 1.03))
    depth = trial.settings.draft_length
    measured = Measurement(
        speedup=estimate, end_to_end_speedup=estimate, tokens_per_s=plain.tokens_per_s * value,
        plain_tokens_per_s=plain.tokens_per_s, tokens_per_round=trial.predicted.tokens_per_round,
        drafted_per_round=float(depth), acceptance=0.6 if depth else None,
        acceptance_by_depth=tuple(0.7 ** (place + 1) for place in range(depth)), tokens=768, rounds=400, blocks=12,
        ttft_ms=20.0, itl_ms={"p50": 9.0, "p95": 14.0, "p99": 20.0}, length_ratio=1.0, repetition=0.02,
        generated_perplexity_ratio=1.01, prediction_error=0.02, tokens_per_round_error=0.0,
    )  # fmt: skip
    certificate = 1 / (1 - trial.settings.alpha) if trial.kind == "lossy" else 1.0
    return FrontPoint(
        trial=trial.number, kind=trial.kind, recommended=recommended, settings=trial.settings, batch_size=1,
        predicted=trial.predicted, quality=trial.quality.model_copy(update={"certificate": certificate}), measured=measured,
    )  # fmt: skip


def chosen_of(trials: list[TrialRecord]) -> list[TrialRecord]:
    """The fastest plain and lossless at batch 1, a mild lossy one, and the fastest lossy within the limit."""

    def fastest(some: list[TrialRecord]) -> TrialRecord:
        return max(some, key=lambda trial: trial.predicted.tokens_per_s if trial.predicted else 0.0)

    alone = [trial for trial in trials if trial.batch_size == 1 and trial.state == "complete"]
    kinds = [[trial for trial in alone if trial.kind == kind] for kind in ("plain", "lossless", "lossy")]
    mild = [trial for trial in kinds[2] if trial.settings.alpha < 0.2]
    found = [fastest(some) for some in (*kinds[:2], mild, kinds[2]) if some]
    return list({trial.number: trial for trial in found}.values())


def make_manifest(machine: Machine) -> RunManifest:
    device = known_accelerators()[machine.device]
    known: dict[str, Any] = {
        "created": "2026-03-04T05:06:07+00:00",
        "command": ("lossytune", "search", "--task", "dialogue"),
        "task": "dialogue",
        "target": {"kind": "model", "id": "made/up-1.5B", "weights_sha256": "ef" * 32},
        "draft": {"kind": "ngram", "id": "prompt lookup"} if machine.ngram else {"kind": "model", "id": "made/up-0.2B"},
        "tokenizer_sha256": "ab" * 32,
        "sampling": Sampling(temperature=0.7),
        "workload": {"source": "bundled", "sha256": "cd" * 32, "search": 16, "confirm": 16, "max_new_tokens": NEW_TOKENS},
        "hardware": {
            "name": machine.device,
            "kernel": "6.12",
            "gpus": [
                {"name": machine.device, "visible": True, "driver": machine.driver, "memory_bytes": device.memory_bytes,
                 "power_limit_w": device.power_w, "sm_clock_max_mhz": 2040, "throttle_reasons": ["gpu_idle"]},
            ],
        },
        "versions": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0", "lossytune": "0.1.0"},
        "config": {"max_quality_loss": 0.05},
        "space": {"alpha": [0.0, 0.6]},
        "excluded": {},
        "seed": machine.seed,
        "status": "complete",
        "energy": {"method": "NVML energy counter", "scope": "the whole board"} if machine.energy else None,
    }  # fmt: skip
    return RunManifest(**(known | machine.manifest))


def write_machine(folder: Path, machine: Machine | None = None, count: int = 90, front: bool = True) -> Path:
    """Writes a whole run folder."""
    machine = machine or Machine()
    folder.mkdir(parents=True, exist_ok=True)
    trials = make_trials(machine, count)
    write_record(folder / "manifest.json", make_manifest(machine))
    (folder / "costs.json").write_text(json.dumps(costs_of(machine)))
    for trial in trials:
        append_record(folder / "trials.jsonl", trial)
    if front:
        chosen = chosen_of(trials)
        plain = chosen[0].predicted
        assert plain is not None
        points = [front_point(trial, plain, machine, trial is chosen[-1]) for trial in chosen]
        for record in make_blocks(machine, [(str(point.trial), point.predicted) for point in points]):
            append_record(folder / "measurements.jsonl", record)
        verdict = "Made up for a test."
        write_record(folder / "front.json", Front(
            points=tuple(points), verdict=verdict, max_quality_loss=0.05, transformers_tokens_per_s=None,
            transformers_ratio=None,
        ))  # fmt: skip
    return folder


def scale_run(source: Path, out: Path, device: str, factor: float) -> Path:
    """A copy of a run, each time of it divided by `factor`, as if made on `device`; its manifest says that it is made up."""
    out.mkdir(parents=True)

    def scaled(record: Any, names: tuple[str, ...], by: float) -> Any:
        values = {name: getattr(record, name) for name in names}
        return record.model_copy(update={name: value / by for name, value in values.items() if value is not None})

    manifest = read_record(source / "manifest.json", RunManifest)
    said = f"a copy of {source.name}, measured on {manifest.hardware.get('name')}, with every time divided by {factor:g}"
    known = known_accelerators()[device]
    hardware = {"name": device, "gpus": [{"visible": True, "name": device, "memory_bytes": known.memory_bytes,
                                          "power_limit_w": known.power_w}]}  # fmt: skip
    config = manifest.config | {"made_up": said}
    write_record(out / "manifest.json", manifest.model_copy(update={"hardware": hardware, "config": config}))
    costs = json.loads((source / "costs.json").read_text())
    for name in ("round_s", "draft_s", "lookup_s", "judge_s"):
        for key, value in costs[name].items():
            costs[name][key] = [one / factor for one in value] if isinstance(value, list) else value / factor
    (out / "costs.json").write_text(json.dumps(costs))

    def faster(prediction: Prediction | None) -> Prediction | None:
        if prediction is None:
            return None
        slower = scaled(prediction, ("round_s", "plain_round_s"), factor)
        return scaled(slower, ("tokens_per_s",), 1 / factor)

    for trial in read_records(source / "trials.jsonl", TrialRecord):
        append_record(out / "trials.jsonl", trial.model_copy(update={"predicted": faster(trial.predicted)}))
    for block in read_records(source / "measurements.jsonl", BlockRecord):
        append_record(out / "measurements.jsonl", scaled(block, ("total_s", "decode_s", "first_token_s"), factor))
    if (source / "front.json").exists():
        front = read_record(source / "front.json", Front)
        points = []
        for point in front.points:
            measured = point.measured and scaled(point.measured, ("tokens_per_s", "plain_tokens_per_s"), 1 / factor)
            points.append(point.model_copy(update={"predicted": faster(point.predicted), "measured": measured}))
        write_record(out / "front.json", front.model_copy(update={"points": tuple(points)}))
    return out


def main() -> None:
    """`python tests/report_runs.py OUT`: the made-up run folders of docs/procurement.md.

    `python tests/report_runs.py OUT RUN DEVICE FACTOR`: a copy of a real run with scaled times, as if made on a device.
    """
    out = Path(sys.argv[1])
    if len(sys.argv) > 2:
        scale_run(Path(sys.argv[2]), out, sys.argv[3], float(sys.argv[4]))
        return
    said = {"max_quality_loss": 0.05, "made_up": "times from a roofline of the device with chosen efficiencies"}
    write_machine(out / "l4", Machine("l4-24gb", energy=True, manifest={"config": said}))
    slower = Fit(0.5, 0.35, 0.002, 0.0, True)
    write_machine(out / "h100", Machine("h100-sxm-80gb", driver="570.12", seed=3, fit=slower, manifest={"config": said}))


if __name__ == "__main__":
    main()
