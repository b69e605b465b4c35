"""The end of a search: the loss on references, and the schedule of a profile, which is never slower than plain."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_selection import measurement, point

from lossyspec.records import BlockRecord
from lossyspec.settings import Settings
from lossyspec.tuner import confirmation
from lossyspec.tuner.confirmation import _on_references, schedule

#: predicted speed-up and perplexity ratio by batch and draft length
LANDSCAPE = {
    (1, 1): (1.2, 1.01), (1, 2): (1.5, 1.02), (1, 3): (1.6, 1.03), (1, 4): (9.0, 1.04),
    (4, 1): (1.2, 1.01), (4, 2): (1.3, 1.04), (4, 3): (1.4, 1.08), (4, 4): (1.1, 1.02),
    (8, 1): (1.05, 1.01), (8, 2): (1.02, 1.02), (8, 3): (0.9, 1.03), (8, 4): (0.8, 1.04),
    (16, 1): (0.9, 1.0), (16, 2): (0.8, 1.0), (16, 3): (0.7, 1.0), (16, 4): (1.3, None),
}  # fmt: skip


class Costs:
    """An objective that knows the landscape; a ratio of None is not a finite number."""

    meter = SimpleNamespace(max_draft_length=4)

    def evaluate(self, settings: Settings, batch: int) -> Any:
        assert settings.schedule == () and settings.rule == "optimal" and settings.alpha == 0.4
        speedup, ratio = LANDSCAPE[batch, settings.draft_length]
        if ratio is None:
            raise ValueError("perplexity ratio is inf")
        return SimpleNamespace(predicted=SimpleNamespace(speedup=speedup), replayed=SimpleNamespace(perplexity_ratio=ratio))


def rows(measured: float, limit: float = 0.05, kind: str = "lossy") -> list[tuple[tuple[int, int | None], int]]:
    best = point(3, kind, 1.6).model_copy(update={"measured": measurement(measured, None)})
    return [(row.batch, row.draft_length) for row in schedule(best, Costs(), [1, 4, 8, 16], limit)]  # type: ignore[arg-type]


def test_the_measured_size_keeps_its_length_and_others_get_the_fastest_within_the_limit() -> None:
    assert rows(measured=1.6) == [((1, 1), 3), ((2, 4), 2), ((5, 8), 1), ((9, 16), 0)]
    assert rows(measured=1.6, limit=0.1) == [((1, 1), 3), ((2, 4), 3), ((5, 8), 1), ((9, 16), 0)]


@pytest.mark.parametrize(("measured", "lengths"), [(2.0, [3, 2, 1, 0]), (1.5, [3, 2, 0, 0]), (1.2, [3, 0, 0, 0])])
def test_a_prediction_that_was_too_high_is_taken_down_everywhere(measured: float, lengths: list[int]) -> None:
    """1.5 of 1.6 leaves 1.05 under 1, 1.2 of 1.6 leaves 1.3 under 1; one that was too low lifts nothing."""
    assert [length for _, length in rows(measured)] == lengths


def test_where_plain_is_recommended_nothing_is_drafted() -> None:
    assert [length for _, length in rows(1.0, kind="plain")] == [0, 0, 0, 0]


@pytest.mark.parametrize(("ratio", "kept"), [(1.5, True), (math.inf, False), (math.nan, False)])
def test_a_reference_of_probability_0_leaves_no_loss_on_references(ratio: float, kept: bool) -> None:
    """At temperature 0.2, that of code, a word that the target would never write underflows."""
    replay: Any = SimpleNamespace(
        run=lambda settings: SimpleNamespace(perplexity_ratio=ratio), quality=lambda *_, **__: "loss"
    )
    assert _on_references(replay, Settings()) == ("loss" if kept else None)
    assert _on_references(None, Settings()) is None


def test_the_drift_alarm_scores_a_few_texts_of_each_contestant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a batch size of 4 scoring all texts, and plain decoding's beside each contestant, took 80 s of a search."""
    read: list[tuple[int, ...]] = []

    def logits(runner: Any, prompt: list[int], output: list[int]) -> Any:
        read.append(tuple(prompt))
        yield torch.zeros(len(output), 8)

    monkeypatch.setattr(confirmation, "text_logits", logits)
    pool: Any = SimpleNamespace(decoder=lambda precision: SimpleNamespace(target=None))
    prompts = [[index] for index in range(16)]
    score = confirmation.generated_perplexity(pool, "fp32", prompts, 0.7)
    records = {
        name: [
            BlockRecord(
                block=block, forward=True, contestant=name, batch_size=4, tokens=12, total_s=1.0, decode_s=1.0, rounds=12,
                first_token_s=None, outputs=((1, 2, 3),) * 4,
            )
            for block in range(10)
        ]
        for name in ("1", "2")
    }  # fmt: skip
    for name in ("1", "2", "1"):
        assert score(records[name]) == pytest.approx(8.0)  # a uniform law over 8 tokens
    assert read == [(index,) for index in range(8)] * 2  # 2 blocks of 4 texts each, of each contestant
