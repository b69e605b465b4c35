"""A labelled estimate for a device that was not measured: acceptance transfers, step times come from the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from lossyspec.records import TrialRecord
from lossyspec.settings import CACHE_BYTES, WEIGHT_BYTES

from .accelerators import Accelerator
from .load import Run
from .roofline import Cell, Fit, ModelSize, cells_of, fit_cells, model_size, pass_s, seconds
from .serving import DRAFTING, JUDGING, KINDS, draft_steps, round_parts, usable

#: factor up and down that is stated when there is only one machine: a convention, not an estimate
WIDE = 2.0


@dataclass(frozen=True)
class PredictedPoint:
    """Tokens/s of the whole batch on a device that was not measured; low and high: the stated range."""

    device: str
    kind: str
    batch: int
    trial: int
    tokens_per_s: float
    low: float
    high: float
    round_s: float
    tokens_per_round: float


@dataclass(frozen=True)
class Roofline:
    """The fit on the measured machines that have known peaks, and how far it may be trusted.

    factor: the range is a value divided and multiplied by it. error: how it came about, in words.
    """

    fit: Fit
    machines: tuple[str, ...]
    factor: float
    error: str
    warnings: tuple[str, ...]


def fit_runs(runs: Sequence[Run], labels: Sequence[str], known: Mapping[str, Accelerator]) -> Roofline | str:
    """Fits the roofline on runs that may be drawn together; the reason, in words, when there is nothing to fit on."""
    cells: dict[str, list[Cell]] = {}
    reasons, warnings = [], []
    for run, label in zip(runs, labels, strict=True):
        device, size = known.get(run.device), model_size(run)
        if device is None:
            reasons.append(f"{label}: the peaks of {run.device} are not known; give them with --accelerators FILE")
        elif isinstance(size, str):
            reasons.append(f"{label}: {size}")
        elif not (found := cells_of(run, device, size)):
            reasons.append(f"{label}: no cost table at a precision that {run.device} has a known rate for")
        else:
            cells.setdefault(f"{run.device} (made up)" if run.made_up else run.device, []).extend(found)
    if not cells:
        return "; ".join(reasons)
    fit = fit_cells([cell for found in cells.values() for cell in found])
    if not fit.compute_bound:
        warnings.append(
            "no measured pass was limited by arithmetic: that side of the roofline is a guess (half of the peak)"
        )
    factor, error = _leave_one_out(cells, fit)
    return Roofline(fit, tuple(cells), factor, error, (*warnings, *reasons))


def _leave_one_out(cells: Mapping[str, Sequence[Cell]], fit: Fit) -> tuple[float, str]:
    """The largest error on a machine that the fit has not seen, as a factor; a wide one when there is only one machine."""
    if len(cells) < 2:
        (name,) = cells
        return WIDE, (
            f"no error estimate: fitted on {name} alone (off by {exp(fit.rms_log) - 1:.0%} there); the range is a factor of "
            f"{WIDE:g} either way, by convention"
        )
    errors = {}
    for left_out, unseen in cells.items():
        other = fit_cells([cell for name, found in cells.items() if name != left_out for cell in found])
        logs = [log(seconds(cell, other) / cell.measured_s) for cell in unseen]
        errors[left_out] = sqrt(sum(value**2 for value in logs) / len(logs))
    said = ", ".join(f"{name} a factor of {exp(error):.2f}" for name, error in errors.items())
    return exp(max(errors.values())), f"leave-one-out: off on {said}; the range is the largest of them"


def predict_device(run: Run, device: Accelerator, roofline: Roofline) -> tuple[list[PredictedPoint], str | None]:
    """The fastest configurations of a run's search on another device, by kind and batch size; or none, and why.

    Each configuration keeps its tokens a round; its target passes and its model draft's steps take what the roofline
    says; prompt lookup takes what it took here (the host is assumed alike). Configurations that would not fit into the
    device's memory, or at a precision that it lacks, are left out.
    """
    size = model_size(run)
    if isinstance(size, str):
        return [], size
    best: dict[tuple[int, str], PredictedPoint] = {}
    for trial in run.trials:
        if not usable(trial, run) or trial.predicted is None:
            continue
        taken = _round_s(run, trial, device, size, roofline.fit)
        if taken is None:
            continue
        speed = trial.batch_size * trial.predicted.tokens_per_round / taken
        key, factor = (trial.batch_size, trial.kind), roofline.factor
        if key not in best or speed > best[key].tokens_per_s:
            best[key] = PredictedPoint(
                device.name, trial.kind, trial.batch_size, trial.number, speed, speed / factor, speed * factor, taken,
                trial.predicted.tokens_per_round,
            )  # fmt: skip
    order = sorted(best.values(), key=lambda point: (KINDS.index(point.kind), point.batch))
    return order, None if order else f"no configuration of the search fits {device.name}: memory or precision"


def _round_s(run: Run, trial: TrialRecord, device: Accelerator, size: ModelSize, fit: Fit) -> float | None:
    """Seconds of a round of a configuration on the device; None when it does not fit."""
    predicted, batch, precision = trial.predicted, trial.batch_size, trial.settings.precision.target
    if precision not in WEIGHT_BYTES or predicted is None or trial.settings.attention.block:
        return None  # what skipped blocks save there is not in the roofline
    needed = WEIGHT_BYTES[precision] * (size.parameters + (size.draft_parameters or 0))
    needed += CACHE_BYTES[precision] * batch * size.cached
    if needed > device.memory_bytes:
        return None
    drafts = trial.settings.draft_length_for(batch) > 0
    verified = 1 + (predicted.drafted_per_round if drafts else 0)
    there = pass_s(device, size.parameters, size.cached, precision, batch, verified)
    if there is None:
        return None
    total = seconds(there, fit)
    if not drafts:
        return total
    parts = round_parts(run, trial)
    if parts is None:
        return None
    costs = run.costs
    if costs is not None and costs.draft_s.get((precision, batch)):
        one = pass_s(device, size.draft_parameters, 0.0, precision, batch, 1) if size.draft_parameters else None
        if one is None:
            return None
        return total + draft_steps(trial) * seconds(one, fit) + parts[JUDGING]
    return total + parts[DRAFTING] + parts[JUDGING]
