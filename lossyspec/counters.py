"""What a decoder has counted since it was made, as a plain dictionary and as Prometheus text. Safe from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from .stats import Round

#: how a request may end, and which guard may make one go on lossless
REASONS = ("stop", "length", "cancelled", "error")
GUARDS = ("request", "rolling")

#: Prometheus name, type, help, and where its values are in the snapshot; the label, where there are several
_METRICS: tuple[tuple[str, str, str, str, str | None], ...] = (
    ("requests_total", "counter", "Requests whose prompts were read.", "requests", None),
    ("requests_finished_total", "counter", "Requests that ended, by reason.", "finished", "reason"),
    ("requests_running", "gauge", "Requests in the batch of a batcher.", "running", None),
    ("requests_waiting", "gauge", "Requests in the queue of a batcher.", "waiting", None),
    ("prompt_tokens_total", "counter", "Tokens of the prompts.", "prompt_tokens", None),
    ("tokens_total", "counter", "Tokens of the answers.", "tokens", None),
    ("passes_total", "counter", "Passes of the target over a batch.", "passes", None),
    ("rounds_total", "counter", "Rounds, each row of a batch its own.", "rounds", None),
    ("drafted_tokens_total", "counter", "Drafted tokens that were verified.", "drafted", None),
    ("accepted_tokens_total", "counter", "Drafted tokens that were accepted.", "accepted", None),
    ("prefetches_total", "counter", "Proposals of a batch drafted ahead of their round.", "prefetched", None),
    ("prefetches_kept_total", "counter", "Of those, the ones that were used.", "prefetches_kept", None),
    ("relaxed_tokens_total", "counter", "Tokens of answers judged with alpha over 0.", "relaxed", None),
    ("relaxed_variation_total", "counter", "Sum of TV(emitted law, target) over relaxed tokens.", "variation", None),
    ("rolling_variation", "gauge", "Mean TV a token over the guard's rolling window.", "rolling_variation", None),
    ("guard_trips_total", "counter", "Requests that a guard made lossless, by guard.", "guard_trips", "guard"),
    ("phase_seconds_total", "counter", "Wall-clock seconds by phase.", "seconds", "phase"),
    ("profile_info", "gauge", "How the profile fits this machine; always 1.", "profile", "match"),
)


class Counters:
    """Totals of a decoder over all its requests. match: how its profile fits (`given`: settings by hand)."""

    def __init__(self, match: str = "given") -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {key: 0 for _, _, _, key, label in _METRICS if label is None}
        self._values |= {"variation": 0.0, "rolling_variation": 0.0, "profile": {match: 1}}
        self._values["finished"] = dict.fromkeys(REASONS, 0)
        self._values["guard_trips"] = dict.fromkeys(GUARDS, 0)
        self._values["seconds"] = dict.fromkeys(("prefill", "draft", "verify", "host"), 0.0)

    def began(self, prompt_tokens: Iterable[int], prefill_s: float) -> None:
        """Requests whose prompts have been read, in `prefill_s` seconds together."""
        with self._lock:
            for count in prompt_tokens:
                self._values["requests"] += 1
                self._values["prompt_tokens"] += count
            self._values["seconds"]["prefill"] += prefill_s

    def add(self, done: Round) -> None:
        """A round. host: the seconds of it that were neither drafting nor the target's pass."""
        with self._lock:
            values, seconds = self._values, self._values["seconds"]
            values["passes"] += 1
            values["rounds"] += len(done.tokens)
            for key in ("tokens", "drafted", "accepted", "relaxed", "variation"):
                values[key] += sum(getattr(done, key))
            values["prefetched"] += done.prefetched
            values["prefetches_kept"] += done.kept
            seconds["draft"] += done.draft_s
            seconds["verify"] += done.verify_s
            seconds["host"] += done.total_s - done.draft_s - done.verify_s

    def finished(self, reason: str) -> None:
        """A request ended. reason: one of `REASONS`."""
        with self._lock:
            self._values["finished"][reason] += 1

    def tripped(self, guard: str) -> None:
        """A request goes on lossless. guard: one of `GUARDS`."""
        with self._lock:
            self._values["guard_trips"][guard] += 1

    def set(self, **gauges: float) -> None:
        """Sets `running`, `waiting` or `rolling_variation`."""
        with self._lock:
            self._values.update(gauges)

    def snapshot(self) -> dict[str, Any]:
        """All values at one moment: numbers, and dictionaries of numbers by label. `variation` is a sum of TV, `seconds` are
        of the wall clock."""
        with self._lock:
            return {key: dict(value) if isinstance(value, dict) else value for key, value in self._values.items()}

    def prometheus(self) -> str:
        """The same in Prometheus' text exposition format (version 0.0.4), each name with the prefix `lossyspec_`."""
        values, lines = self.snapshot(), []
        for name, kind, text, key, label in _METRICS:
            lines += [f"# HELP lossyspec_{name} {text}", f"# TYPE lossyspec_{name} {kind}"]
            if label is None:
                lines.append(f"lossyspec_{name} {values[key]}")
                continue
            lines += [f'lossyspec_{name}{{{label}="{_escaped(part)}"}} {value}' for part, value in values[key].items()]
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    """A label's value as the format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
