"""Which points are confirmed live, and which one is recommended. Pure functions over records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lossyspec.records import Estimate, FrontPoint, TrialRecord

#: shares of the loss limit up to which a fastest point is confirmed; the one over 1 shows what lies beyond the limit
_LOSS_SHARES = (1.0, 0.25, 2.0)


def pareto(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The records that no other beats in predicted speed-up and perplexity ratio, slowest first. Failed ones never."""
    scored = [
        (record.predicted.speedup, record.quality.perplexity_ratio.value, record)
        for record in records
        if record.predicted is not None and record.quality is not None and record.state != "failed"
    ]
    front: list[TrialRecord] = []
    least = float("inf")
    for _, ratio, record in sorted(scored, key=lambda item: (-item[0], item[1], item[2].number)):
        if ratio < least:
            front.append(record)
            least = ratio
    return front[::-1]


def _fastest(records: Sequence[TrialRecord]) -> TrialRecord | None:
    return max(records, key=lambda record: (speedup_of(record), -record.number), default=None)


def speedup_of(record: TrialRecord) -> float:
    """Predicted speed-up of a trial; 0 when it has none."""
    return record.predicted.speedup if record.predicted is not None else 0.0


def _ratio(record: TrialRecord) -> float:
    return record.quality.perplexity_ratio.value if record.quality is not None else float("inf")


def to_confirm(
    records: Sequence[TrialRecord], max_quality_loss: float, upper_ratio: Callable[[TrialRecord], float] = _ratio
) -> list[TrialRecord]:
    """The points to measure live: the best plain and lossless ones, and the fastest lossy ones at a few levels of loss, one
    of them the fastest whose upper end (`upper_ratio`) is within the limit: what is recommended has to be.

    All at the batch size of the fastest feasible point, where they can be compared; plain comes first.
    """
    fits = [record for record in records if record.state != "failed" and record.constraints.get("memory", 0) <= 0]
    plain = {record.batch_size for record in fits if record.kind == "plain"}  # the others have nothing to be compared with
    feasible = [record for record in fits if record.state == "complete" and record.batch_size in plain]
    best = _fastest(feasible)
    if best is None:
        return []
    here = [record for record in fits if record.batch_size == best.batch_size]
    chosen = [_fastest([record for record in here if record.kind == kind]) for kind in ("plain", "lossless")]
    lossy = [record for record in pareto([record for record in here if record.kind == "lossy"]) if record.quality]
    for share in _LOSS_SHARES:
        limit = 1 + share * max_quality_loss
        chosen.append(_fastest([record for record in lossy if _ratio(record) <= limit]))
    chosen.append(next((record for record in reversed(lossy) if upper_ratio(record) <= 1 + max_quality_loss), None))
    unique: dict[int, TrialRecord] = {record.number: record for record in chosen if record is not None}
    return list(unique.values())


def recommend(points: Sequence[FrontPoint], max_quality_loss: float, over_lossless: dict[int, Estimate]) -> int:
    """Index of the recommended point: the fastest lossy one within the loss limit whose intervals support it, else
    lossless, else plain.

    Supported: the upper end of the perplexity ratio is within the limit, the lower end of the speed-up over plain is
    over 1, and so is that over lossless (`over_lossless`, by trial, from the same blocks).
    """
    plain = next(index for index, point in enumerate(points) if point.kind == "plain")
    best, best_speedup = plain, 1.0
    for index, point in enumerate(points):
        if point.kind == "plain" or point.measured is None or point.measured.speedup.ci95 is None:
            continue
        speedup, low = point.measured.speedup.value, point.measured.speedup.ci95[0]
        ratio = point.quality.perplexity_ratio
        within = (ratio.ci95[1] if ratio.ci95 else ratio.value) <= 1 + max_quality_loss
        ahead = over_lossless.get(point.trial)
        pays = point.kind == "lossless" or ahead is None or (ahead.ci95 is not None and ahead.ci95[0] > 1)
        if within and low > 1 and pays and speedup > best_speedup:
            best, best_speedup = index, speedup
    return best


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def verdict(points: Sequence[FrontPoint], recommended: int) -> str:
    """The result in one sentence."""
    point = points[recommended]
    lossless = next((other for other in points if other.kind == "lossless"), None)
    alone = "lossless was not measured"
    if lossless is not None and lossless.measured is not None:
        alone = f"lossless alone {_speed(lossless.measured.speedup)}"
    if point.kind == "plain":
        return f"plain decoding, 1.00x: nothing measured is surely faster within the limit; {alone}"
    assert point.measured is not None
    if point.kind == "lossless":
        return f"lossless, {_speed(point.measured.speedup)}: no relaxation within the limit is surely faster"
    ratio, bound = point.quality.perplexity_ratio, point.quality.certificate
    span = f" ({_percent(ratio.ci95[0])} to {_percent(ratio.ci95[1])})" if ratio.ci95 else ""
    certified = f", certified at most {_percent(bound)} on any text" if bound is not None else ""
    return f"{_speed(point.measured.speedup)} at {_percent(ratio.value)} perplexity{span}{certified}; {alone}"


def _speed(estimate: Estimate) -> str:
    span = f" ({estimate.ci95[0]:.2f}-{estimate.ci95[1]:.2f})" if estimate.ci95 else ""
    return f"{estimate.value:.2f}x{span}"
