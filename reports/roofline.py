"""The roofline of a decoding step, fitted on measured cost tables: what a pass takes on a device with known peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from lossyspec.settings import CACHE_BYTES, WEIGHT_BYTES

from .accelerators import Accelerator
from .load import Run
from .serving import memory

#: achieved share of the roofline outside of which a measurement is called suspect
PLAUSIBLE = (0.15, 1.0)


@dataclass(frozen=True)
class ModelSize:
    """Numbers that a pass reads. parameters: of the target; cached: keys and values a sequence, at the run's context.

    draft_parameters: None when the draft has no weights, or they are not known.
    """

    parameters: float
    cached: float
    draft_parameters: float | None


@dataclass(frozen=True)
class Fit:
    """e_bandwidth, e_flops: achieved shares of the peaks (0-1]. overhead_s: seconds a pass, whatever the device.

    rms_log: root mean square of log(predicted/measured) on the cells of the fit. compute_bound: whether any cell was
    limited by arithmetic; without one e_flops is not determined, and stays at 0.5.
    """

    e_bandwidth: float
    e_flops: float
    overhead_s: float
    rms_log: float
    compute_bound: bool


@dataclass(frozen=True)
class Cell:
    """One measured pass: what it moves and computes over the device's peaks, in seconds, and what it took."""

    precision: str
    batch: int
    verified: int
    memory_s: float
    arithmetic_s: float
    measured_s: float


def model_size(run: Run) -> ModelSize | str:
    """The sizes of a run's models, from the manifest or from its memory estimates; else the reason why not, in words."""
    room = memory(run)
    if room is None:
        return "no trial has a memory estimate"
    weight, number, manifest = WEIGHT_BYTES[room.precision], CACHE_BYTES[room.precision], run.manifest
    batch, total = min(room.bytes_by_batch.items())
    parameters, draft = manifest.target_parameters, manifest.draft_parameters
    if parameters is None:
        if manifest.draft.get("kind") != "ngram":
            return (
                "the run does not record the target's parameters, and its draft's weights cannot be told from the target's"
            )
        if room.fixed_bytes is None or not room.bytes_per_sequence:
            return "one batch size alone was searched, so weights and cache cannot be told apart"
        return ModelSize(room.fixed_bytes / weight, room.bytes_per_sequence / number, None)
    cached = (total - weight * (parameters + (draft or 0))) / number / batch
    return ModelSize(parameters, max(0.0, cached), draft)


def pass_s(
    device: Accelerator, parameters: float, cached: float, precision: str, batch: int, verified: float
) -> Cell | None:
    """A pass at the device's peaks (measured_s is 0); None when it has no rate at the precision."""
    rate = device.rate(precision)
    if rate is None or precision not in WEIGHT_BYTES:
        return None
    moved = WEIGHT_BYTES[precision] * parameters + CACHE_BYTES[precision] * batch * cached
    computed = 2.0 * parameters * batch * verified
    return Cell(precision, batch, int(verified), moved / device.bandwidth_bytes_per_s, computed / rate, 0.0)


def cells_of(run: Run, device: Accelerator, size: ModelSize) -> list[Cell]:
    """The measured cells of a run's cost table at the precisions that the device has a rate for."""
    found = []
    for (precision, batch), times in (run.costs.round_s if run.costs else {}).items():
        for verified, seconds in enumerate(times, start=1):
            cell = pass_s(device, size.parameters, size.cached, precision, batch, verified)
            if cell is not None and seconds > 0:
                found.append(replace(cell, measured_s=seconds))
    return found


def seconds(cell: Cell, fit: Fit) -> float:
    """max(bytes/(bandwidth e), flops/(rate e)) + overhead."""
    return max(cell.memory_s / fit.e_bandwidth, cell.arithmetic_s / fit.e_flops) + fit.overhead_s


def achieved(cell: Cell) -> float:
    """The share of the roofline that a measured pass reached: its time at the peaks over its time."""
    return max(cell.memory_s, cell.arithmetic_s) / cell.measured_s


def suspect(cells: Sequence[Cell]) -> list[str]:
    """One sentence for each precision and batch size whose one-token pass is not plausible for the device."""
    low, high = PLAUSIBLE
    return [
        f"suspect measurement: {cell.precision}, batch {cell.batch} reaches {share:.0%} of the roofline "
        f"({low:.0%}-{high:.0%} is plausible): "
        + ("faster than the device's peaks allow" if share > high else "bound by the host, or disturbed")
        for cell in cells
        if cell.verified == 1 and not low <= (share := achieved(cell)) <= high
    ]


def suspect_run(run: Run, device: Accelerator | None) -> list[str]:
    """As `suspect`, of a run on a device whose peaks are known; nothing where they or the models' sizes are not."""
    size = model_size(run)
    return [] if device is None or isinstance(size, str) else suspect(cells_of(run, device, size))


def fit_cells(cells: Sequence[Cell]) -> Fit:
    """Least squares of log(predicted/measured) by a pattern search from several starts; the same for the same cells."""
    import numpy

    ceiling = min(cell.measured_s for cell in cells)
    memory_s, arithmetic_s, measured_s = numpy.array(
        [(cell.memory_s, cell.arithmetic_s, cell.measured_s) for cell in cells]
    ).T

    def error(place: Sequence[float]) -> float:
        e_bandwidth, e_flops, overhead_s = map(exp, place)
        taken = numpy.maximum(memory_s / e_bandwidth, arithmetic_s / e_flops) + overhead_s
        return float(numpy.mean(numpy.log(taken / measured_s) ** 2))

    best = min((_search(error, start, ceiling) for start in _starts(ceiling)), key=lambda fit: fit.rms_log)
    bound = any(cell.arithmetic_s / best.e_flops > cell.memory_s / best.e_bandwidth for cell in cells)
    return replace(best, compute_bound=bound, e_flops=best.e_flops if bound else 0.5)


def _starts(ceiling: float) -> Iterator[tuple[float, float, float]]:
    for e_bandwidth in (0.2, 0.7):
        for e_flops in (0.1, 0.5):
            for share in (0.05, 0.5):
                yield log(e_bandwidth), log(e_flops), log(share * ceiling)


def _search(error: Callable[[Sequence[float]], float], start: tuple[float, float, float], ceiling: float) -> Fit:
    """Moves one of the three logarithms at a time, halving the step when no move helps."""
    bounds = ((log(0.01), 0.0), (log(0.01), 0.0), (log(1e-4 * ceiling), log(ceiling)))
    place, step = list(start), 0.5
    best = error(place)
    while step > 1e-3:
        moved = False
        for axis, (low, high) in enumerate(bounds):
            for way in (step, -step):
                tried = list(place)
                tried[axis] = min(high, max(low, tried[axis] + way))
                found = error(tried)
                if found < best - 1e-12:
                    place, best, moved = tried, found, True
        step = step if moved else step / 2
    return Fit(exp(place[0]), exp(place[1]), exp(place[2]), sqrt(best), False)
