"""How many devices a load needs: requests that arrive at random are served in simulation, with the measured cost table.

Assumptions, printed with every result: see `ASSUMPTIONS`.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lossyspec.errors import ConfigurationError

from .load import Run
from .serving import ServingPoint, serving_points
from .speeds import plain_point, prefill_s

ASSUMPTIONS = (
    "Arrivals are Poisson, all requests have the same lengths, and one queue feeds all devices, first come, first served.",
    "A request starts on an idle device, else on the first whose round ends with room; its prefill holds up that device.",
    "A round of b requests takes what the cost table says of the next larger batch size that was measured; nothing is "
    "interpolated, and no more requests than the largest one run at once on a device.",
    "No device is planned to be busy for more than 95 % of the time.",
    "Each round gives each request the mean tokens of its configuration; latency is from arrival to the last token.",
    "Tokens a round and seconds a round are those of the run's prompts and context; other lengths change both.",
)
REQUESTS = 2000
MOST_REQUESTS = 20_000
WARM_UP_SHARE = 0.1
#: share of the time that a device may be busy at most
MOST_BUSY = 0.95
MOST_DEVICES = 512


@dataclass(frozen=True)
class Demand:
    """requests_per_s in all; lengths in tokens; p95_s: seconds that 95 % of the requests must be answered within."""

    requests_per_s: float
    input_tokens: int
    output_tokens: int
    p95_s: float


@dataclass(frozen=True)
class Service:
    """How one device serves. rounds: (batch, seconds a round, tokens a round), by batch. prefill_s: of one request.

    kind: plain, lossless or lossy. prefill_note: how the prefill was got, in words.
    """

    kind: str
    rounds: tuple[tuple[int, float, float], ...]
    prefill_s: float
    prefill_note: str


@dataclass(frozen=True)
class Capacity:
    """Devices that meet a demand (None: not with `MOST_DEVICES`, or never), and p95 seconds by number of devices."""

    kind: str
    devices: int | None
    p95_by_devices: dict[int, float]
    prefill_note: str
    reason: str | None


def services(run: Run, demand: Demand) -> list[Service]:
    """Plain, lossless and lossy service by the run's cost table, for the kinds that it has."""
    seconds, note = _prefill(run, demand)
    by_kind: dict[str, list[ServingPoint]] = {}
    for point in serving_points(run):
        by_kind.setdefault(point.kind, []).append(point)
    return [
        Service(kind, tuple((one.batch, one.round_s, one.tokens_per_round) for one in points), seconds, note)
        for kind, points in by_kind.items()
    ]


def _prefill(run: Run, demand: Demand) -> tuple[float, str]:
    """Seconds of the prefill of one request: the live runs' own, in proportion to the input tokens."""
    plain, measured = plain_point(run), prefill_s(run)
    new_tokens = run.manifest.workload.get("max_new_tokens")
    if plain is None or measured is None or run.costs is None or not isinstance(new_tokens, int):
        return 0.0, "prefill was not measured, and counts as 0 s: the real latency is higher"
    prompt = max(1, run.costs.context_tokens - new_tokens // 2)
    seconds = measured / plain.batch_size * demand.input_tokens / prompt
    return (
        seconds,
        f"prefill {seconds:.3g} s: measured live on prompts of about {prompt} tokens, in proportion to the length",
    )


def devices_needed(service: Service, demand: Demand, requests: int = REQUESTS, seed: int = 0) -> Capacity:
    """The fewest devices with which the 95 % quantile of the latency is within the demand, by simulation."""
    alone = service.prefill_s + _rounds(demand.output_tokens, service.rounds[0][2]) * service.rounds[0][1]
    tried: dict[int, float] = {}
    if alone > demand.p95_s:
        reason = f"one request alone takes {alone:.3g} s, over the {demand.p95_s:g} s allowed: no number of devices helps"
        return Capacity(service.kind, None, tried, service.prefill_note, reason)
    busy = min(
        service.prefill_s + _rounds(demand.output_tokens, tokens) * seconds / batch
        for batch, seconds, tokens in service.rounds
    )
    # near full load a finite simulation ends before the queue has grown
    count = too_few = max(1, ceil(demand.requests_per_s * busy / MOST_BUSY))
    requests = max(requests, min(MOST_REQUESTS, ceil(20 * demand.requests_per_s * alone)))
    while count <= MOST_DEVICES:
        tried[count] = p95_latency_s(service, demand, count, requests, seed)
        if tried[count] <= demand.p95_s:
            break
        too_few, count = count + 1, count + max(1, count // 16)
    else:
        return Capacity(
            service.kind, None, dict(sorted(tried.items())), service.prefill_note, f"over {MOST_DEVICES} devices"
        )
    for fewer in range(too_few, count):  # the steps widen: go back to what was skipped
        tried[fewer] = p95_latency_s(service, demand, fewer, requests, seed)
        if tried[fewer] <= demand.p95_s:
            count = fewer
            break
    for more in (count + 1, count + 2):  # to see what one more would bring
        tried[more] = p95_latency_s(service, demand, more, requests, seed)
    return Capacity(service.kind, count, dict(sorted(tried.items())), service.prefill_note, None)


def p95_latency_s(service: Service, demand: Demand, devices: int, requests: int = REQUESTS, seed: int = 0) -> float:
    """95 % quantile of the seconds from arrival to the last token, after a warm-up that is left out."""
    kept = sorted(latencies_s(service, demand, devices, requests, seed)[int(requests * WARM_UP_SHARE) :])
    return kept[min(len(kept) - 1, ceil(0.95 * len(kept)) - 1)]


def latencies_s(service: Service, demand: Demand, devices: int, requests: int = REQUESTS, seed: int = 0) -> list[float]:
    """Seconds from arrival to the last token of each request, in the order of arrival."""
    source, now = random.Random(seed), 0.0
    arrivals: deque[tuple[float, int]] = deque()
    for number in range(requests):
        now += source.expovariate(demand.requests_per_s)
        arrivals.append((now, number))
    return _simulate(service, demand.output_tokens, devices, arrivals)


def _simulate(service: Service, tokens: int, devices: int, arrivals: deque[tuple[float, int]]) -> list[float]:
    """Seconds of each request, by its number. A device that has work runs round after round; an idle one waits."""
    most, latencies = service.rounds[-1][0], [0.0] * len(arrivals)
    active: list[list[list[float]]] = [[] for _ in range(devices)]  # of each request: tokens left, arrival, number
    running: list[tuple[float, int]] = []  # a heap of (when its round ends, device)
    idle = list(range(devices - 1, -1, -1))
    while arrivals or running:
        if arrivals and idle and (not running or arrivals[0][0] <= running[0][0]):
            device, now = idle.pop(), arrivals[0][0]
        else:
            now, device = heapq.heappop(running)
            _finish(active[device], now, latencies)
        held_s = 0.0
        while arrivals and arrivals[0][0] <= now and len(active[device]) < most:
            if idle and active[device]:
                break  # an idle device takes it
            arrived, number = arrivals.popleft()
            active[device].append([float(tokens), arrived, float(number)])
            held_s += service.prefill_s
        if not active[device]:
            idle.append(device)
            continue
        seconds, gained = _round(service.rounds, len(active[device]))
        for request in active[device]:
            request[0] -= gained
        heapq.heappush(running, (now + held_s + seconds, device))
    return latencies


def _finish(active: list[list[float]], now: float, latencies: list[float]) -> None:
    """Takes the finished requests off a device."""
    for left, arrived, number in active:
        if left <= 1e-9:
            latencies[int(number)] = now - arrived
    active[:] = [request for request in active if request[0] > 1e-9]


def _round(rounds: Sequence[tuple[int, float, float]], requests: int) -> tuple[float, float]:
    """Seconds and tokens of a round, from the smallest measured batch that holds the requests."""
    return next((seconds, tokens) for batch, seconds, tokens in rounds if batch >= requests)


def _rounds(tokens: int, tokens_per_round: float) -> int:
    return ceil(tokens / tokens_per_round - 1e-9)


def make_demand(
    requests_per_s: float | None, input_tokens: int | None, output_tokens: int | None, p95_s: float | None
) -> Demand | None:
    """A demand, or None when nothing of it is given. Raises ConfigurationError when a part is missing or not over 0."""
    parts = {"--rate": requests_per_s, "--input-tokens": input_tokens, "--output-tokens": output_tokens, "--p95": p95_s}
    missing = [name for name, value in parts.items() if value is None]
    if len(missing) == len(parts):
        return None
    if missing:
        raise ConfigurationError(f"capacity needs {', '.join(missing)} as well: give all of {', '.join(parts)}")
    for name, value in parts.items():
        if value is not None and not 0 < value < 1e9:
            raise ConfigurationError(f"{name} is {value:g}; allowed: over 0, and under 1e9")
    assert requests_per_s is not None and input_tokens is not None and output_tokens is not None and p95_s is not None
    return Demand(requests_per_s, input_tokens, output_tokens, p95_s)
