"""Which runs may be drawn together, what differs between them, and which of their differences are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lossyspec.records import Estimate
from lossyspec.versions import TUNED_WITH

from .load import Run

Field = tuple[str, Callable[[Run], Any]]
ABSENT = "not recorded"


def _hash(model: dict[str, Any]) -> Any:
    return model.get("weights_sha256") or model.get("id")


def _gpu(run: Run, name: str) -> Any:
    gpus = [gpu for gpu in run.manifest.hardware.get("gpus") or [] if isinstance(gpu, dict) and gpu.get("visible")]
    return gpus[0].get(name) if gpus else None


def _fingerprint(run: Run, name: str) -> Any:
    found = run.manifest.hardware.get("fingerprint")
    return found.get(name) if isinstance(found, dict) else None


def _best(read: Callable[[Any], Any]) -> Callable[[Run], Any]:
    return lambda run: read(run.recommended) if run.recommended else None


#: runs that differ in one of these measured different things: they are never drawn together
MUST_AGREE: tuple[Field, ...] = (
    ("target", lambda run: _hash(run.manifest.target)),
    ("draft", lambda run: _hash(run.manifest.draft)),
    ("tokenizer", lambda run: run.manifest.tokenizer_sha256),
    ("prompts", lambda run: run.manifest.workload.get("sha256")),
    ("new tokens", lambda run: run.manifest.workload.get("max_new_tokens")),
    ("sampling", lambda run: run.manifest.sampling.model_dump(mode="json")),
)
#: these may differ between machines; a difference is a footnote
FOOTNOTES: tuple[Field, ...] = (
    ("driver", lambda run: _fingerprint(run, "driver") or _gpu(run, "driver")),
    ("CUDA driver", lambda run: _fingerprint(run, "cuda_driver") or _gpu(run, "cuda_driver")),
    ("kernel of the system", lambda run: run.manifest.hardware.get("kernel")),
    *((name, lambda run, name=name: run.manifest.versions.get(name)) for name in ("lossytune", *TUNED_WITH)),
    ("batch size", _best(lambda point: point.batch_size)),
    ("loss limit", lambda run: run.loss_limit),
)
#: the machine and the choice that was made on it: shown, expected to differ
SHOWN: tuple[Field, ...] = (
    ("device", lambda run: run.device),
    ("rule", _best(lambda point: point.settings.rule)),
    ("precision", _best(lambda point: point.settings.precision.target)),
    ("clock, MHz", lambda run: _fingerprint(run, "sm_clock_max_mhz") or _gpu(run, "sm_clock_max_mhz")),
    ("power limit, W", lambda run: _fingerprint(run, "power_limit_w") or _gpu(run, "power_limit_w")),
    ("throttled at the start", lambda run: _throttled(_gpu(run, "throttle_reasons"))),
    ("date", lambda run: run.manifest.created),
)


def _throttled(reasons: Any) -> str | None:
    """What held the clocks back when the run began; the share over the run is not recorded."""
    if reasons is None:
        return None
    return ", ".join(reason for reason in reasons if reason != "gpu_idle") or "no"


@dataclass(frozen=True)
class ComparedField:
    """One row of the comparability table: a value a run; None is not recorded. differs: the recorded ones are not one."""

    name: str
    values: tuple[Any, ...]
    required: bool
    differs: bool


def comparability(runs: Sequence[Run]) -> list[ComparedField]:
    """All fields, those that must agree first."""
    rows = []
    for fields, required in ((MUST_AGREE, True), (FOOTNOTES, False), (SHOWN, False)):
        for name, read in fields:
            values = tuple(read(run) for run in runs)
            rows.append(ComparedField(name, values, required, len({repr(value) for value in values}) > 1))
    return rows


def unlike(one: Run, other: Run) -> list[str]:
    """Names of the fields for which two runs must not be drawn together."""
    return [name for name, read in MUST_AGREE if read(one) != read(other)]


def groups(runs: Sequence[Run]) -> list[list[int]]:
    """Places of runs that may be drawn together, in the given order."""
    found: list[list[int]] = []
    for place, run in enumerate(runs):
        home = next((group for group in found if not unlike(runs[group[0]], run)), None)
        if home is None:
            found.append([place])
        else:
            home.append(place)
    return found


def refusals(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """One sentence for each pair of groups that is not drawn together, naming the fields."""
    firsts = [group[0] for group in groups(runs)]
    return [
        f"{labels[one]} and {labels[other]} are not drawn together: unlike {', '.join(unlike(runs[one], runs[other]))}"
        for place, one in enumerate(firsts)
        for other in firsts[place + 1 :]
    ]


def footnotes(runs: Sequence[Run]) -> list[str]:
    """One sentence for each field that differs between runs that are drawn together and may matter."""
    names = {name for name, _ in FOOTNOTES}
    return [
        f"{row.name} differs: {', '.join(ABSENT if value is None else str(value) for value in row.values)}"
        for row in comparability(runs)
        if row.name in names and row.differs
    ]


def separable(one: Estimate | None, other: Estimate | None) -> bool | None:
    """True when the 95 % intervals do not touch, False when they do; None when one has no interval."""
    if one is None or other is None or one.ci95 is None or other.ci95 is None:
        return None
    return one.ci95[1] < other.ci95[0] or other.ci95[1] < one.ci95[0]


def ranking(speeds: Sequence[tuple[str, Estimate | None]]) -> list[str]:
    """Sentences on which of the tokens/s differ, fastest first. Neighbours that are not separable get no rank."""
    known = sorted(((name, speed) for name, speed in speeds if speed is not None), key=lambda item: -item[1].value)
    said = [f"{name}: no measured speed" for name, speed in speeds if speed is None]
    for (fast, above), (slow, below) in pairwise(known):
        apart = separable(above, below)
        if apart:
            said.append(f"{fast} is faster than {slow}: {above.value / below.value:.2f} times the tokens/s")
        else:
            reason = "their intervals overlap" if apart is False else "one of them has no interval"
            said.append(f"{fast} and {slow} are not separable: {reason}")
    return said
