"""The stored cost table (costs.json) as plain numbers: seconds of a round by precision and batch size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from lossyspec.errors import ConfigurationError

SCHEMA = "lossytune.costs/2"
#: gave drafting as one number a step
_OLDER = "lossytune.costs/1"
_STEPS = 16
Key = tuple[str, int]


@dataclass(frozen=True)
class Costs:
    """Median seconds, keyed by (precision, batch). round_s[..][n - 1]: a pass that verifies n tokens in each row.

    context_tokens: context at which all was measured. draft_s: what drafting 0, 1, .. tokens by a model adds.
    lookup_s: by batch, of drafting 0, 1, .. tokens by n-gram. judge_s: by (rule, batch), over `exact`. spread: median
    absolute deviation over the median, a share.
    """

    context_tokens: int
    round_s: dict[Key, tuple[float, ...]]
    draft_s: dict[Key, tuple[float, ...]]
    lookup_s: dict[int, tuple[float, ...]]
    judge_s: dict[Key, float]
    spread: dict[Key, float]


def read_costs(path: Path) -> Costs:
    """Reads costs.json; raises ConfigurationError naming the file when it is not a cost table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] not in (SCHEMA, _OLDER):
            raise ConfigurationError(f"{path}: schema is {data['schema']!r}; expected {SCHEMA!r}")
        return Costs(
            int(data["context"]),
            {_key(key): _seconds(value) for key, value in data["round_s"].items()},
            _drafting(data),
            {int(key): _seconds(value) for key, value in data.get("lookup_s", {}).items()},
            {_key(key): float(value) for key, value in data.get("judge_s", {}).items()},
            {_key(key): float(value) for key, value in data.get("spread", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path}: not a cost table ({type(error).__name__}: {error})") from None


def _drafting(data: dict[str, Any]) -> dict[Key, tuple[float, ...]]:
    if data["schema"] == _OLDER:
        steps = {_key(key): _number(value) for key, value in data.get("draft_step_s", {}).items()}
        return {key: tuple(count * step for count in range(_STEPS + 1)) for key, step in steps.items()}
    return {_key(key): _seconds(value) for key, value in data.get("draft_s", {}).items()}


def _key(text: str) -> Key:
    name, _, batch = text.rpartition("/")
    return name, int(batch)


def _seconds(values: Any) -> tuple[float, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    """Seconds, or a share. A cost can be next to nothing, but neither under 0 nor no number."""
    number = float(value)
    if not 0 <= number < inf:
        raise ValueError(f"{number:g} is no measured value")
    return number
