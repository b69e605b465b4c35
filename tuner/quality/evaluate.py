"""Decodes prompts plainly and with a profile, from the same seeds, and compares what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lossyspec.answers import Completion
from lossyspec.decoder import Decoder
from lossyspec.prompts import Prompt, prompt_ids
from lossyspec.settings import Settings

from .compare import Comparison, compare_means, compare_totals
from .items import Metric, QualityItem
from .metrics import distinct_share, exact_match, numeric_match, repeated_share, rouge_l, word_f1
from .run_code import run_program

#: measures of one answer by name; None where the answer has no such value
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Limits:
    """Of a generated program: seconds of wall clock, bytes of memory."""

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class Result:
    """comparisons: the metric's own measures first. answers: (plain, profile) texts by prompt, of the first seed."""

    metric: Metric | None
    comparisons: tuple[Comparison, ...]
    answers: tuple[tuple[str, str], ...]


def task_scores(metric: Metric | None, item: QualityItem, answer: str, limits: Limits) -> Scores:
    """The measures of a metric for one answer."""
    if metric is None:
        return {}
    if metric == "pass1":
        assert item.problem is not None
        return {"pass1": float(run_program(item.problem.program(answer), limits.timeout_s, limits.memory_bytes).passed)}
    if metric == "rouge-l":
        return {"rouge_l": rouge_l(answer, item.references)}
    if metric == "numeric":
        return {"numeric": numeric_match(answer, item.references)}
    return {"exact": exact_match(answer, item.references), "f1": word_f1(answer, item.references)}


def general_scores(tokens: Sequence[int]) -> Scores:
    """The measures that every answer has."""
    return {
        "repeated_4grams": repeated_share(tokens, 4),
        "distinct_2": distinct_share(tokens, 2),
        "tokens": float(len(tokens)),
    }


def evaluate(
    decoder: Decoder,
    items: Sequence[QualityItem],
    metric: Metric | None,
    *,
    max_new_tokens: int,
    seed: int = 0,
    samples: int = 1,
    limits: Limits | None = None,
    progress: Callable[[], None] = lambda: None,
    **sampling: Any,
) -> Result:
    """Each prompt `samples` times on both sides, with the same seeds; plain decoding in the profile's own precision.

    progress: called after each prompt. sampling: what is not the profile's own.
    """
    sides = [Settings(draft_length=0, precision=decoder.settings.precision), decoder.settings]
    prompts = [prompt_ids(decoder.tokenizer, _prompt(item, decoder.tokenizer)) for item in items]
    values: list[list[Scores]] = [[], []]
    answers = []
    for index, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
        said: list[list[Completion]] = [[], []]
        for draw in range(samples):
            for side, settings in enumerate(sides):
                own = seed + index * samples + draw
                said[side] += decoder.generate_ids([prompt], max_new_tokens, seed=own, settings=settings, **sampling)
        for side in range(2):
            scores = [
                {**task_scores(metric, item, answer.text, limits or Limits()), **general_scores(answer.tokens)}
                for answer in said[side]
            ]
            values[side].append({name: _mean([score[name] for score in scores]) for name in scores[0]})
        answers.append((said[0][0].text, said[1][0].text))
        progress()
    return Result(metric, tuple(_compare(*values)), tuple(answers))


def _prompt(item: QualityItem, tokenizer: Any) -> Prompt:
    """Messages; without a chat template the bare text, which the model then goes on with."""
    if getattr(tokenizer, "chat_template", None) is not None or len(item.messages) > 1:
        return item.messages
    return item.problem.prompt if item.problem else item.messages[0]["content"]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _compare(plain: Sequence[Scores], profile: Sequence[Scores]) -> list[Comparison]:
    """A comparison for each measure, over the prompts where both sides have it; a measure without any is left out."""
    found = []
    for name in plain[0]:
        pairs = [
            (old, new)
            for one, other in zip(plain, profile, strict=True)
            if (old := one[name]) is not None and (new := other[name]) is not None
        ]
        if pairs:
            olds, news = zip(*pairs, strict=True)
            compared = compare_totals("length_ratio", olds, news) if name == "tokens" else compare_means(name, olds, news)
            found.append(compared)
    return found
