"""After the live runs: quality on the half that the search never saw, the recommendation, and the profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lossyspec.profile import Evidence, Here, MatchFields, Profile, Provenance
from lossyspec.records import BlockRecord, Corpus, Front, FrontPoint, Quality, RunManifest, TrialRecord
from lossyspec.settings import Precision, ScheduleRow, Settings
from lossyspec.versions import tuned_with

from .measurement.live import speed_ratio, summarise, tokens_per_s
from .models import ModelPool
from .objective import Objective
from .replay import Replay
from .selection import recommend, verdict
from .study import SAMPLER
from .trace import Trace, text_logits

#: texts of a contestant that are scored for the drift alarm, in whole blocks
_DRIFT_TEXTS = 8


@dataclass(frozen=True)
class Confirmed:
    """The front with its measurements, and what was noticed on the way."""

    front: Front
    recommended: FrontPoint
    notes: tuple[str, ...]


def generated_perplexity(
    pool: ModelPool, precision: Precision, prompts: Sequence[list[int]], temperature: float
) -> Callable[[Sequence[BlockRecord]], float]:
    """Perplexity of outputs under the target at the request's temperature: a drift alarm, which a cold draft can lower."""
    runner = pool.decoder(precision).target
    scale, known = temperature or 1.0, dict[str, float]()

    def score(records: Sequence[BlockRecord]) -> float:
        first = records[0]
        if first.contestant not in known:  # plain decoding is what all others are held against
            known[first.contestant] = scored(records[: max(1, _DRIFT_TEXTS // first.batch_size)])
        return known[first.contestant]

    def scored(records: Sequence[BlockRecord]) -> float:
        total, count = 0.0, 0
        for record in records:
            for row, output in enumerate(record.outputs):
                prompt = prompts[(record.block * record.batch_size + row) % len(prompts)]
                place = 0
                for logits in text_logits(runner, prompt, list(output)):
                    law = (logits / scale).log_softmax(-1)
                    picked = law[range(logits.shape[0]), list(output[place : place + logits.shape[0]])]
                    total, place = total + float(picked.sum()), place + logits.shape[0]
                count += len(output)
        return math.exp(-total / count)

    return score


def confirm(
    chosen: Sequence[TrialRecord],
    blocks: Sequence[BlockRecord],
    traces: dict[str, Trace],
    pool: ModelPool,
    max_quality_loss: float,
    temperature: float,
) -> Confirmed:
    """Puts the confirmed points together. `chosen`: plain first."""
    plain = chosen[0]
    replay = Replay(traces["confirm"])
    references = Replay(traces["references"]) if "references" in traces else None
    corpus: Corpus = "greedy_text" if temperature == 0 else "target_samples"
    score = generated_perplexity(pool, traces["confirm"].reference, traces["confirm"].texts.prompts, temperature)
    points, notes = [], []
    for record in chosen:
        assert record.predicted is not None
        replayed = replay.run(record.settings)
        on_references = _on_references(references, record.settings)
        if references is not None and on_references is None:
            notes.append(
                f"trial {record.number}: no loss on references, since one holds a token whose probability is 0 in fp32 at "
                f"temperature {temperature:g}"
            )
        points.append(
            FrontPoint(
                trial=record.number,
                kind=record.kind,
                recommended=False,
                settings=record.settings,
                batch_size=record.batch_size,
                predicted=record.predicted,
                quality=replay.quality(record.settings, replayed, corpus=corpus),
                quality_references=on_references,
                measured=summarise(blocks, str(record.number), str(plain.number), record.predicted, score),
            )
        )
    lossless = next((point for point in points if point.kind == "lossless"), None)
    ahead = (
        {}
        if lossless is None
        else {
            point.trial: speed_ratio(blocks, str(point.trial), str(lossless.trial))
            for point in points
            if point.kind == "lossy"
        }
    )
    best = recommend(points, max_quality_loss, ahead)
    points[best] = points[best].model_copy(update={"recommended": True})
    order = sorted(points, key=lambda point: point.measured.speedup.value if point.measured else 0.0)
    front = Front(
        points=tuple(order),
        verdict=verdict(points, best),
        max_quality_loss=max_quality_loss,
        transformers_tokens_per_s=tokens_per_s(blocks, "transformers", end_to_end=True),
        transformers_ratio=speed_ratio(blocks, str(plain.number), "transformers", end_to_end=True),
    )
    return Confirmed(front, points[best], (*notes, *_notes(points)))


def _on_references(references: Replay | None, settings: Settings) -> Quality | None:
    """The loss on the references; None without them, or where it is not finite: at a low temperature a word that the target
    would never write underflows to 0, before or after rounding of the weights."""
    if references is None:
        return None
    replayed = references.run(settings)
    return references.quality(settings, replayed, corpus="references") if math.isfinite(replayed.perplexity_ratio) else None


def _notes(points: Sequence[FrontPoint]) -> list[str]:
    notes = []
    for point in points:
        drift = point.measured.generated_perplexity_ratio if point.measured else None
        if drift is not None and not 0.8 <= drift <= 1.25:
            notes.append(f"trial {point.trial}: perplexity of its own text is {drift:.2f} times plain's (drift alarm)")
    return notes


def schedule(
    recommended: FrontPoint, objective: Objective, batches: Sequence[int], max_quality_loss: float
) -> tuple[ScheduleRow, ...]:
    """Draft length by batch size, of the recommended settings: as measured at their own size; at the other tuned sizes the
    length that the cost table says is the fastest within the limit of loss.

    Never slower than plain, so far as can be told: a speed-up is taken down by as much as the prediction was too high where
    it was measured, and what is then not over 1 is plain. Sizes between two tuned ones go by the larger, where drafting
    pays less; sizes past the last one are plain.
    """
    assert recommended.measured is not None
    own = recommended.settings
    trust = min(recommended.measured.speedup.value / recommended.predicted.speedup, 1.0)
    rows: list[ScheduleRow] = []
    for batch in sorted(batches):
        length = own.draft_length
        if length and batch != recommended.batch_size:
            length = _best_length(own, objective, batch, trust, max_quality_loss)
        rows.append(ScheduleRow(batch=(rows[-1].batch[1] + 1 if rows else 1, batch), draft_length=length))  # type: ignore[operator]
    return tuple(rows)


def _best_length(own: Settings, objective: Objective, batch: int, trust: float, max_quality_loss: float) -> int:
    best, fastest = 0, 1.0
    for length in range(1, objective.meter.max_draft_length + 1):
        try:
            found = objective.evaluate(own.model_copy(update={"draft_length": length, "schedule": ()}), batch)
        except ValueError:  # a figure that is not finite
            continue
        speedup = trust * found.predicted.speedup
        if speedup > fastest and found.replayed.perplexity_ratio <= 1 + max_quality_loss:
            best, fastest = length, speedup
    return best


def evidence_of(point: FrontPoint, front: Front, memory_peak_bytes: int | None) -> Evidence:
    """The figures of a measured point of a front, as its profile has them."""
    measured = point.measured
    assert measured is not None
    lossless = next((other.measured for other in front.points if other.kind == "lossless" and other.measured), None)
    return Evidence(
        batch_size=point.batch_size,
        speedup=measured.speedup,
        lossless_speedup=lossless.speedup if lossless else None,
        predicted_speedup=point.predicted.speedup,
        plain_tokens_per_s=measured.plain_tokens_per_s,
        transformers_tokens_per_s=front.transformers_tokens_per_s,
        quality=point.quality,
        tokens_per_round=measured.tokens_per_round,
        acceptance=measured.acceptance,
        length_ratio=measured.length_ratio,
        ttft_ms=measured.ttft_ms,
        itl_ms=measured.itl_ms,
        memory_peak_bytes=memory_peak_bytes,
    )


def build_profile(
    manifest: RunManifest, here: Here, confirmed: Confirmed, records: Sequence[TrialRecord], objective: Objective
) -> Profile:
    """The profile of the recommended point, with the schedule that `objective` makes of it."""
    point = confirmed.recommended
    states = [record.state for record in records]
    batches = sorted({record.batch_size for record in records})
    rows = schedule(point, objective, batches, confirmed.front.max_quality_loss)
    kept = tuned_with(manifest.versions)
    return Profile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        task=manifest.task,
        sampling=manifest.sampling,
        match=MatchFields(
            device=here.device, target=here.target, draft=here.draft, tokenizer_sha256=here.tokenizer_sha256, versions=kept
        ),
        settings=point.settings.model_copy(update={"schedule": rows}),
        evidence=evidence_of(point, confirmed.front, manifest.peak_memory_bytes),
        provenance=Provenance(
            versions=manifest.versions,
            sampler=SAMPLER,
            seed=manifest.seed,
            workload=manifest.workload,
            trials={name: states.count(name) for name in ("complete", "failed", "infeasible")},
            max_quality_loss=confirmed.front.max_quality_loss,
        ),
    )
