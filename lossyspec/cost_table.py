"""The cost table, costs.json: seconds of a round by format and batch size. Pure numbers, as `records` are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from .errors import ConfigurationError
from .records import write_text

SCHEMA = "lossytune.costs/2"
#: gave drafting as one number a step
_OLDER = "lossytune.costs/1"
_STEPS = 16
#: hold one number a key; older tables lack some of them
_SINGLE = ("judge_s", "spread", "compile_s")
Key = tuple[str, int]


@dataclass
class CostTable:
    """Median seconds by (format, batch), a format being a precision, maybe with sparse attention or a compiler.

    context_tokens: at which all was measured. round_s[..][n - 1]: a pass that verifies n tokens in each row, host time
    included; draft_s: what drafting 0, 1, .. tokens by a model adds; lookup_s: by batch, of drafting 0, 1, .. tokens by
    n-gram; judge_s: by (rule, batch), over `exact`; spread: median absolute deviation over the median; compile_s: of
    compiling what a cell was the first to need.
    """

    context_tokens: int
    round_s: dict[Key, list[float]] = field(default_factory=dict)
    draft_s: dict[Key, list[float]] = field(default_factory=dict)
    lookup_s: dict[int, list[float]] = field(default_factory=dict)
    judge_s: dict[Key, float] = field(default_factory=dict)
    spread: dict[Key, float] = field(default_factory=dict)
    compile_s: dict[Key, float] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As JSON data."""

        def flat(table: dict[Any, Any]) -> dict[str, Any]:
            return {"/".join(map(str, key)) if isinstance(key, tuple) else str(key): value for key, value in table.items()}

        return {
            "schema": SCHEMA,
            "context": self.context_tokens,
            "round_s": flat(self.round_s),
            "draft_s": flat(self.draft_s),
            "lookup_s": flat(self.lookup_s),
            "judge_s": flat(self.judge_s),
            "spread": flat(self.spread),
            "compile_s": flat(self.compile_s),
        }

    def write(self, path: Path) -> None:
        """Writes costs.json."""
        write_text(path, json.dumps(self.dump(), indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> CostTable:
        """Reads costs.json; raises ConfigurationError naming the file when it is not a cost table."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] not in (SCHEMA, _OLDER):
                raise ConfigurationError(f"{path}: schema is {data['schema']!r}; expected {SCHEMA!r}")
            return CostTable(
                int(data["context"]),
                {_key(key): _seconds(value) for key, value in data["round_s"].items()},
                _drafting(data),
                {int(key): _seconds(value) for key, value in data["lookup_s"].items()},
                *({_key(key): _number(value) for key, value in data.get(name, {}).items()} for name in _SINGLE),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path}: not a cost table ({type(error).__name__}: {error})") from None


def _drafting(data: dict[str, Any]) -> dict[Key, list[float]]:
    if data["schema"] == _OLDER:
        steps = {_key(key): _number(value) for key, value in data.get("draft_step_s", {}).items()}
        return {key: [count * step for count in range(_STEPS + 1)] for key, step in steps.items()}
    return {_key(key): _seconds(value) for key, value in data["draft_s"].items()}


def _key(text: str) -> Key:
    name, _, batch = text.rpartition("/")
    return name, int(batch)


def _seconds(values: Any) -> list[float]:
    return list(map(_number, values))


def _number(value: Any) -> float:
    """Seconds, or a share. A cost can be next to nothing, but neither under 0 nor no number."""
    number = float(value)
    if not 0 <= number < inf:
        raise ValueError(f"{number:g} is no measured value")
    return number
