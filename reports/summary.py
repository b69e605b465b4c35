"""A run in one row and one sentence: absolute speeds, the ratio, the loss, and what is certified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lossyspec.records import Estimate, FrontPoint

from .load import Run
from .pareto import loss_percent
from .serving import memory
from .speeds import decode_speed, joules_per_token, lossless_point, plain_point, served_speed

NO_ENERGY = "the run recorded no energy: neither a GPU's counter nor RAPL was read"


@dataclass(frozen=True)
class Summary:
    """The recommended point of a run, or what there is of one. An absent value is None.

    speed_tokens_per_s: of decoding; served_tokens_per_s: with prefill; both of the whole batch, on one device.
    """

    label: str
    device: str
    task: str
    made_up: str | None
    sentence: str
    batch: int | None
    speed_tokens_per_s: Estimate | None
    plain_tokens_per_s: Estimate | None
    lossless_tokens_per_s: Estimate | None
    served_tokens_per_s: Estimate | None
    joules_per_token: Estimate | None
    no_energy_reason: str | None
    largest_batch: int | None


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A name a run: its device, with the task, the precision and the folder only where names would be alike; without the
    device where all runs are on one."""
    more: list[list[str]] = [["made up"] if run.made_up else [] for run in runs]
    labels = [run.device + "".join(words) for run, words in zip(runs, more, strict=True)]
    details = (
        [run.manifest.task for run in runs],
        [run.recommended.settings.precision.target if run.recommended else "no front" for run in runs],
        [run.folder.resolve().name for run in runs],
        [str(place) for place in range(1, len(runs) + 1)],
    )
    for detail in details:
        seen = Counter(labels)
        for place, word in enumerate(detail):
            if seen[labels[place]] > 1:
                more[place].append(word)
        labels = [run.device + "".join(words) for run, words in zip(runs, more, strict=True)]
    if len(runs) > 1 and len({run.device for run in runs}) == 1:
        return [", ".join(words) for words in more]
    return [f"{run.device} ({', '.join(words)})" if words else run.device for run, words in zip(runs, more, strict=True)]


def summarise(run: Run, label: str | None = None) -> Summary:
    """The summary of a run."""
    best, plain, lossless = run.recommended, plain_point(run), lossless_point(run)
    joules = joules_per_token(run, best) if best else None
    room = memory(run)
    recorded = run.manifest.energy or {}
    return Summary(
        label=label or run.device,
        device=run.device,
        task=run.manifest.task,
        made_up=run.made_up,
        sentence=verdict_sentence(run),
        batch=best.batch_size if best else None,
        speed_tokens_per_s=decode_speed(run, best) if best else None,
        plain_tokens_per_s=decode_speed(run, plain) if plain else None,
        lossless_tokens_per_s=decode_speed(run, lossless) if lossless else None,
        served_tokens_per_s=served_speed(run, best) if best else None,
        joules_per_token=joules,
        no_energy_reason=None if joules else recorded.get("reason", NO_ENERGY),
        largest_batch=room.largest_batch if room else None,
    )


def verdict_sentence(run: Run) -> str:
    """ "1.84x (1.79-1.89) at +2.0 % perplexity, certified at most +5 %; lossless alone 1.52x (1.48-1.56)"."""
    best = run.recommended
    if best is None or best.measured is None:
        return run.verdict
    if best.kind == "plain":
        return "plain decoding is the fastest here within the limit: speculation does not pay"
    said = f"{ratio_text(best.measured.speedup)} {_quality(best)}"
    if best.kind == "lossless":
        return said
    lossless = lossless_point(run)
    if lossless is None or lossless.measured is None:
        return f"{said}; lossless alone was not measured"
    return f"{said}; lossless alone {ratio_text(lossless.measured.speedup)}"


def ratio_text(estimate: Estimate) -> str:
    """1.84x (1.79-1.89)."""
    ends = f" ({estimate.ci95[0]:.2f}-{estimate.ci95[1]:.2f})" if estimate.ci95 else " (no interval)"
    return f"{estimate.value:.2f}x{ends}"


def speed_text(estimate: Estimate | None, unit: str = "") -> str:
    """36.0 (34.9-37.2) with a unit, n/a for None; three digits count."""
    if estimate is None:
        return "n/a"
    ends = f" ({three(estimate.ci95[0])}-{three(estimate.ci95[1])})" if estimate.ci95 else ""
    return f"{three(estimate.value)}{ends}{unit}"


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 0.001:
        return f"{value:.{2 if size >= 1 else 3}f}" if size < 10 else f"{value:.1f}"
    return f"{value:.2g}"


def _quality(point: FrontPoint) -> str:
    if point.kind == "lossless":
        return "lossless"
    loss = loss_percent(point.quality.perplexity_ratio.value)
    certificate = point.quality.certificate
    sure = "no certificate" if certificate is None else f"certified at most {loss_percent(certificate):+.3g} %"
    return f"at {loss:+.1f} % perplexity, {sure}"
