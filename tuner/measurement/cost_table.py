"""The cost table as it is stored: costs.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lossyspec.errors import ConfigurationError
from lossyspec.records import write_text

SCHEMA = "lossytune.costs/2"
#: gave a draft one number a step
_OLDER = "lossytune.costs/1"


@dataclass
class CostTable:
    """Seconds by (format, batch), a format being a precision, maybe with sparse attention or a compiler: `round_s` of a pass
    that verifies n tokens, host time included; `draft_s` what drafting d tokens by a model adds; `lookup_s` of drafting d
    tokens by n-gram; `judge_s` what a rule costs over `exact`; `compile_s` of compiling what a cell was the first to
    need."""

    context: int
    round_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    draft_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    lookup_s: dict[int, list[float]] = field(default_factory=dict)
    judge_s: dict[tuple[str, int], float] = field(default_factory=dict)
    spread: dict[tuple[str, int], float] = field(default_factory=dict)  # median absolute deviation over the median
    compile_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As JSON data."""

        def flat(table: dict[Any, Any]) -> dict[str, Any]:
            return {"/".join(map(str, key)) if isinstance(key, tuple) else str(key): value for key, value in table.items()}

        return {
            "schema": SCHEMA,
            "context": self.context,
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
        """Reads what `write` wrote. Raises ConfigurationError for another file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] not in (SCHEMA, _OLDER):
                raise ConfigurationError(f"{path}: schema is {data['schema']!r}; expected {SCHEMA!r}")

            def pairs(name: str) -> dict[tuple[str, int], Any]:
                return {(key.rpartition("/")[0], int(key.rpartition("/")[2])): value for key, value in data[name].items()}

            return CostTable(
                data["context"],
                pairs("round_s"),
                pairs("draft_s") if data["schema"] == SCHEMA else {},  # measured anew when needed
                {int(key): value for key, value in data["lookup_s"].items()},
                pairs("judge_s"),
                pairs("spread"),
                pairs("compile_s") if "compile_s" in data else {},  # older tables have none
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path}: not a cost table ({error})") from None
