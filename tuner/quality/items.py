"""Prompts with what a right answer is, and which metric fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lossyspec.errors import ConfigurationError, nearest

from ..workloads import Messages, item_of, json_rows, read_text
from .metrics import last_number
from .programs import Problem

Metric = Literal["rouge-l", "exact", "numeric", "pass1"]
METRICS: tuple[Metric, ...] = get_args(Metric)
#: references of at most this many words are answers to be matched, not texts to be compared
_SHORT_WORDS = 5


@dataclass(frozen=True)
class QualityItem:
    """A prompt; its right answers (any of them will do), or the problem whose tests a program must pass."""

    id: str
    messages: Messages
    references: tuple[str, ...]
    problem: Problem | None = None


def _references(value: Any, place: str) -> tuple[str, ...]:
    many = [value] if isinstance(value, str) else value if isinstance(value, list) else None
    if many is None or not all(isinstance(one, str) and one.strip() for one in many):
        raise ConfigurationError(f"{place}: reference is {value!r}; it must be a text, a list of texts, or be left out")
    return tuple(many)


def quality_item(row: Any, number: int, place: str) -> QualityItem:
    """A row with `messages` or `prompt`, and maybe `reference` (a text or a list); or a code problem.

    Raises ConfigurationError naming the place and what is wrong.
    """
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: expected a JSON object, found {type(row).__name__}")
    name = str(row.get("id", row.get("task_id", number)))
    if "test" in row or "entry_point" in row:
        parts = [row.get(key) for key in ("prompt", "test", "entry_point")]
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise ConfigurationError(f"{place}: a code problem needs 'prompt', 'test' and 'entry_point', each a text")
        problem = Problem(*map(str, parts))
        return QualityItem(name, [{"role": "user", "content": problem.question}], (), problem)
    references = row.get("reference")
    item = item_of({key: value for key, value in row.items() if key != "reference"}, number, place)
    return QualityItem(name, item.messages, () if references is None else _references(references, place))


def read_items(path: Path, limit: int | None = None) -> list[QualityItem]:
    """The first `limit` rows of a JSONL file (None: all). Raises ConfigurationError naming the file, the line and what is
    wrong, or when the file has no row."""
    items = [quality_item(row, number, place) for number, place, row in json_rows(read_text(path), str(path))]
    if not items:
        raise ConfigurationError(f"prompts {path}: holds no prompts; at least 1 is needed")
    return items[:limit]


def choose_metric(items: Sequence[QualityItem], wanted: str, run_code: bool) -> Metric | None:
    """The metric of a set of prompts; None when they say nothing about right answers. `auto` looks at the references.

    Raises ConfigurationError when the prompts do not have what the metric needs, or it runs code and that was not allowed.
    """
    if wanted not in ("auto", *METRICS):
        raise ConfigurationError(f"metric is {wanted!r}; allowed: auto, {', '.join(METRICS)}.{nearest(wanted, METRICS)}")
    metric: Metric | None = _automatic(items) if wanted == "auto" else next(one for one in METRICS if one == wanted)
    if metric == "pass1":
        if bare := [item.id for item in items if item.problem is None]:
            raise ConfigurationError(f"metric pass1 needs 'test' and 'entry_point' in every row; prompt {bare[0]} has none")
        if not run_code:
            raise ConfigurationError("metric pass1 runs the code that the model writes; allow it with --run-code")
    elif metric is not None:
        if bare := [item.id for item in items if not item.references]:
            raise ConfigurationError(f"metric {metric} needs a reference in every row; prompt {bare[0]} has none")
        if metric == "numeric" and (bare := [item.id for item in items if not any(map(_has_number, item.references))]):
            raise ConfigurationError(f"metric numeric needs a number in every reference; that of prompt {bare[0]} has none")
    return metric


def _automatic(items: Sequence[QualityItem]) -> Metric | None:
    if any(item.problem for item in items):
        return "pass1"
    texts = [text for item in items for text in item.references]
    if not all(item.references for item in items):
        return None
    if all("####" in text or not any(letter.isalpha() for letter in text) for text in texts) and all(
        map(_has_number, texts)
    ):
        return "numeric"
    return "exact" if all(len(text.split()) <= _SHORT_WORDS for text in texts) else "rouge-l"


def _has_number(text: str) -> bool:
    return last_number(text) is not None
