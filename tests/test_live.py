"""Interleaved measurement with contestants and a clock made up here: what a drifting machine does to a ratio, and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lossyspec.records import BlockRecord, Measurement, Prediction
from lossyspec.stats import Round, Stats
from lossyspec.tuner.measurement.clock import ratio_interval
from lossyspec.tuner.measurement.live import (
    Contestant,
    measure_blocks,
    repetition,
    speed_ratio,
    summarise,
    tokens_per_s,
)

PROMPTS = [[index] * 3 for index in range(5)]
PREDICTED = Prediction(
    speedup=1.21,
    tokens_per_s=12.0,
    tokens_per_round=2.2,
    drafted_per_round=3.0,
    acceptance=0.5,
    round_s=0.1,
    plain_round_s=0.1,
)


def record(contestant: str, block: int = 0, tokens: int = 10, seconds: float = 1.0, **values: Any) -> BlockRecord:
    known: dict[str, Any] = {
        "forward": True,
        "batch_size": 1,
        "total_s": seconds,
        "decode_s": seconds,
        "rounds": tokens,
        "first_token_s": None,
        "outputs": (tuple(range(tokens)),),
    }
    return BlockRecord(block=block, contestant=contestant, tokens=tokens, **(known | values))


@dataclass
class Machine:
    """A machine whose speed at a time is `drift(time)`; contestants take their turns on it."""

    drift: Callable[[float], float] = lambda now: 1.0
    now: float = 0.0
    calls: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def contestant(self, name: str, speed: float, tokens: int = 64, batch: int = 1) -> Contestant:
        """Decodes `tokens` tokens at `speed` times 100 tokens/s, as far as the machine gives it."""

        def run(prompts: list[list[int]], seed: int) -> BlockRecord:
            self.calls.append((name, tuple(prompt[0] for prompt in prompts), seed))
            left, began = float(tokens), self.now
            while left > 0:  # in small steps, since the speed changes on the way
                rate = 100 * speed * self.drift(self.now)
                step = min(left, 1.0)
                left, self.now = left - step, self.now + step / rate
            return record(name, tokens=tokens, seconds=self.now - began, batch_size=batch)

        return Contestant(name, batch, run)


def measure(machine: Machine, contestants: Sequence[Contestant], **values: Any) -> list[BlockRecord]:
    known: dict[str, Any] = {
        "budget_s": 1e9,
        "min_blocks": 4,
        "max_blocks": 8,
        "seed": 7,
        "on_run": lambda record: None,
        "stop": lambda: False,
        "clock": machine.clock,
    }
    return measure_blocks(contestants, PROMPTS, **(known | values))


# N2: heat


def soaking(now: float) -> float:
    """Loses 5 % within half a minute, as a device that warms up."""
    return 1 - 0.05 * (1 - math.exp(-now / 12))


def linear(now: float) -> float:
    return 1 - 0.002 * now


@pytest.mark.parametrize("drift", [soaking, linear])
def test_N2_interleaving_measures_the_true_ratio_on_a_machine_that_slows_down(drift: Callable[[float], float]) -> None:
    machine = Machine(drift)
    plain, new = machine.contestant("plain", 1.0), machine.contestant("new", 1.10)
    runs = measure(machine, [plain, new], min_blocks=24, max_blocks=24)
    assert machine.now > 25
    ratio = speed_ratio(runs, "new", "plain")
    assert ratio.value == pytest.approx(1.10, rel=0.005)
    assert ratio.ci95 is not None
    assert ratio.ci95[0] <= 1.10 * 1.005
    assert ratio.ci95[1] >= 1.10 * 0.995
    # a baseline that is measured once, before the rest, reads about 1.05
    once = Machine(drift)
    first = [once.contestant("plain", 1.0).run(PROMPTS[:1], 0) for _ in range(4)]
    once.now += 20
    later = [once.contestant("new", 1.10).run(PROMPTS[:1], 0) for _ in range(20)]
    assert 1.03 < tokens_per_s(later, "new") / tokens_per_s(first, "plain") < 1.07


def test_N2_several_contestants_are_hit_alike() -> None:
    machine = Machine(linear)
    contestants = [machine.contestant(str(index), 1 + index / 10) for index in range(4)]
    runs = measure(machine, contestants, min_blocks=8, max_blocks=8)
    for index in range(1, 4):
        assert speed_ratio(runs, str(index), "0").value == pytest.approx(1 + index / 10, rel=0.005)


# order, seeds, prompts


def test_contestants_take_turns_in_order_and_in_reverse_on_the_same_prompts_and_seeds() -> None:
    machine = Machine()
    names = ("a", "b", "c")
    kept: list[BlockRecord] = []
    runs = measure(machine, [machine.contestant(name, 1.0) for name in names], on_run=kept.append)
    assert kept == runs
    warm_up, rest = machine.calls[:3], machine.calls[3:]
    assert [name for name, _, _ in warm_up] == list(names)
    assert len(rest) == len(runs) == 24
    for block in range(8):
        part = rest[3 * block : 3 * block + 3]
        order = names if block % 2 == 0 else names[::-1]
        assert [name for name, _, _ in part] == list(order)
        assert len({(prompts, seed) for _, prompts, seed in part}) == 1
        assert [(run.block, run.forward) for run in runs[3 * block : 3 * block + 3]] == [(block, block % 2 == 0)] * 3
    assert len({seed for _, _, seed in rest}) == 8
    assert 7 not in {seed for _, _, seed in rest}  # the warm-up's own seed


def test_blocks_walk_through_all_prompts_in_batches() -> None:
    machine = Machine()
    measure(machine, [machine.contestant("a", 1.0, batch=2)], max_blocks=4)
    batches = [prompts for _, prompts, _ in machine.calls]
    assert batches == [(0, 0), (0, 1), (2, 3), (4, 0), (1, 2)]


def test_the_budget_ends_the_measurement_after_an_even_number_of_blocks_and_at_least_the_fewest() -> None:
    def blocks(budget_s: float) -> int:
        machine = Machine()
        contestants = [machine.contestant("a", 1.0, tokens=100), machine.contestant("b", 1.0, tokens=100)]
        return len(measure(machine, contestants, budget_s=budget_s, min_blocks=4, max_blocks=20)) // 2

    assert blocks(0.0) == 4
    # 2 s of warm-up count too; a block takes 2 s, and two more must fit
    assert [blocks(budget_s) for budget_s in (13.9, 14.1, 18.1)] == [4, 6, 8]
    assert blocks(1e9) == 20


def test_stop_ends_between_blocks_and_keeps_whole_blocks_only() -> None:
    machine = Machine()
    contestants = [machine.contestant("a", 1.0), machine.contestant("b", 1.0)]
    runs = measure(machine, contestants, stop=lambda: len(machine.calls) >= 2 + 5)
    assert [run.block for run in runs] == [0, 0, 1, 1, 2, 2]


# resuming


def test_a_resumed_measurement_keeps_finished_blocks_and_runs_the_rest() -> None:
    whole = Machine()
    stored = measure(whole, [whole.contestant("a", 1.0), whole.contestant("b", 1.1)])
    cut = stored[:7]  # block 3 has one of its two runs
    machine = Machine()
    again = measure(machine, [machine.contestant("a", 1.0), machine.contestant("b", 1.1)], done=cut)
    assert again[:6] == stored[:6]
    assert [(run.block, run.contestant, run.forward) for run in again] == [
        (run.block, run.contestant, run.forward) for run in stored
    ]
    # the same prompts and seeds as the first time, after a new warm-up
    assert machine.calls[:2] == whole.calls[:2]
    assert machine.calls[2:] == whole.calls[2 + 6 :]


def test_a_block_that_was_cut_off_and_run_again_counts_once() -> None:
    stored = [record("a", 0), record("b", 0), record("b", 1, seconds=50.0)]  # cut off in block 1
    stored += [record("b", 1, seconds=2.0), record("a", 1)]  # and run again
    machine = Machine()
    runs = measure(machine, [machine.contestant("a", 1.0), machine.contestant("b", 1.0)], done=stored, max_blocks=2)
    assert machine.calls == []
    assert len(runs) == 4
    assert tokens_per_s(runs, "b") == pytest.approx(20 / 3)


def test_blocks_of_other_contestants_are_not_mixed_in() -> None:
    machine = Machine()
    stored = [record("a", 0), record("x", 0), record("a", 1), record("b", 1), record("x", 1)]
    runs = measure(machine, [machine.contestant("a", 1.0), machine.contestant("b", 1.0)], done=stored, max_blocks=4)
    assert {run.contestant for run in runs} == {"a", "b"}
    assert [run.block for run in runs] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_finished_measurement_runs_nothing_again_not_even_the_warm_up() -> None:
    whole = Machine()
    stored = measure(whole, [whole.contestant("a", 1.0)])
    machine = Machine()
    assert measure(machine, [machine.contestant("a", 1.0)], done=stored) == stored
    assert machine.calls == []


# figures


def test_N8_speed_is_total_tokens_over_total_seconds() -> None:
    runs = [record("a", 0, tokens=10, seconds=1.0), record("a", 1, tokens=1000, seconds=10.0)]
    assert tokens_per_s(runs, "a") == pytest.approx(91.8, abs=0.05)
    plain = [record("p", 0, tokens=10, seconds=2.0), record("p", 1, tokens=1000, seconds=20.0)]
    assert speed_ratio([*runs, *plain], "a", "p").value == pytest.approx(2.0)
    skewed = [record("p", 0, tokens=10, seconds=10.0), record("p", 1, tokens=1000, seconds=10.0)]
    assert speed_ratio([*runs, *skewed], "a", "p").value == pytest.approx((1010 / 11) / (1010 / 20))


def test_decoding_and_end_to_end_are_told_apart_and_a_contestant_without_prefill_time_counts_whole() -> None:
    runs = [record("a", seconds=4.0, decode_s=2.0), record("t", seconds=5.0, decode_s=None)]
    assert tokens_per_s(runs, "a") == 5.0
    assert tokens_per_s(runs, "a", end_to_end=True) == 2.5
    assert tokens_per_s(runs, "t") == tokens_per_s(runs, "t", end_to_end=True) == 2.0
    assert speed_ratio(runs, "a", "t").value == 2.5
    assert speed_ratio(runs, "a", "t", end_to_end=True).value == 1.25


def test_a_batch_counts_while_it_is_whole_and_all_of_it_end_to_end() -> None:
    """Texts that speculation finishes early leave a batch that nobody refills: its last rounds are no serving."""
    stats = Stats()
    for seconds, tokens in ((1.0, [2, 3]), (1.0, [2, 1]), (0.9, [2]), (0.9, [1])):
        count = len(tokens)
        stats.add(Round([0] * count, [0] * count, tokens, [0] * count, [0.0] * count, 0, 0.0, 0.0, 0.0, seconds))
    assert stats.round_rows == [2, 2, 1, 1]
    assert stats.whole(2) == (8, 2.0)
    whole = record("new", tokens=11, seconds=3.8, batch_size=2, full_tokens=8, full_s=2.0)
    assert whole.decoding == (8, 2.0)
    assert BlockRecord.model_validate_json(whole.model_dump_json(by_alias=True)).decoding == (8, 2.0)
    plain = record("plain", tokens=8, seconds=4.0, batch_size=2, full_tokens=8, full_s=4.0)
    assert speed_ratio([whole, plain], "new", "plain").value == 2.0
    assert speed_ratio([whole, plain], "new", "plain", end_to_end=True).value == pytest.approx((11 / 3.8) / 2)
    assert tokens_per_s([whole, plain], "new") == 4.0
    assert record("outside", decode_s=None).decoding is None


def test_an_interval_needs_three_blocks_and_holds_the_value() -> None:
    one = [[10.0], [10.0]]
    assert ratio_interval(one, one, one, one) is None
    rng = np.random.default_rng(0)
    tokens = [[100.0]] * 12
    new, old = ([[float(value)] for value in rng.normal(mean, 0.05, 12)] for mean in (1.0, 1.2))
    interval = ratio_interval(tokens, new, tokens, old)
    assert interval is not None
    value = np.sum(old) / np.sum(new)
    assert interval[0] < value < interval[1]
    assert interval[1] - interval[0] < 0.15
    assert ratio_interval(tokens, new, tokens, old) == interval
    assert ratio_interval(tokens, new, tokens, old, seed=1) != interval


def test_blocks_are_resampled_whole_so_that_a_drift_common_to_both_sides_does_not_widen_the_interval() -> None:
    tokens, slow = [[100.0]] * 10, [[1.0 + block] for block in range(10)]
    slower = [[1.1 * seconds[0]] for seconds in slow]
    paired = ratio_interval(tokens, slow, tokens, slower)
    assert paired == pytest.approx((1.1, 1.1), abs=1e-12)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        common = rng.normal(1.0, 0.1, 16)
        new, old = common * rng.normal(1.0, 0.03, 16), 1.1 * common * rng.normal(1.0, 0.03, 16)
        parts = [[[float(value)] for value in values] for values in (np.ones(16), new, np.ones(16), old)]
        interval = ratio_interval(*parts, resamples=400, seed=trial)
        assert interval is not None
        hits += interval[0] <= 1.1 <= interval[1]
    assert 170 <= hits <= 198


def test_repetition_is_the_share_of_ngrams_that_occurred_before_in_the_same_output() -> None:
    assert repetition([]) is None
    assert repetition([(1, 2, 3)]) is None
    assert repetition([(1, 2, 3, 4)]) == 0.0
    assert repetition([(7, 7, 7, 7, 7, 7)]) == pytest.approx(2 / 3)
    assert repetition([(1, 2, 3, 4), (1, 2, 3, 4)]) == 0.0  # not across outputs
    assert repetition([(1, 2, 1, 2), ()], size=2) == pytest.approx(1 / 3)


def summary(runs: Sequence[BlockRecord], name: str = "1", **values: Any) -> Measurement:
    return summarise(runs, name, "0", PREDICTED, **values)


def test_a_summary_is_of_sums_over_all_runs_of_a_contestant() -> None:
    plain = [record("0", block, tokens=10, seconds=1.0, outputs=((1,) * 10,)) for block in range(4)]
    mine = [
        record("1", 0, 20, 1.0, rounds=8, drafted_at=(8, 6), accepted_at=(6, 2), first_token_s=0.1, gaps_s=(0.1, 0.2)),
        record("1", 1, 20, 1.0, rounds=10, drafted_at=(10,), accepted_at=(4,), first_token_s=0.3, gaps_s=(0.3,)),
        record("1", 2, 20, 1.5, rounds=10, drafted_at=(), accepted_at=(), gaps_s=()),
        record("1", 3, 20, 0.5, rounds=12, drafted_at=(2, 2, 0), accepted_at=(2, 0, 0)),
    ]
    measured = summary([*plain, *mine])
    assert measured.speedup.value == pytest.approx(2.0)
    assert measured.speedup.ci95 is not None
    assert (measured.tokens, measured.rounds, measured.blocks) == (80, 40, 4)
    assert measured.tokens_per_round == 2.0
    assert measured.drafted_per_round == 28 / 40
    assert measured.acceptance == 14 / 28
    assert measured.acceptance_by_depth == (12 / 20, 2 / 8)
    assert measured.ttft_ms == pytest.approx(200.0)
    assert measured.itl_ms == pytest.approx({"p50": 200.0, "p95": 290.0, "p99": 298.0})
    assert measured.length_ratio == 2.0
    assert measured.tokens_per_s == 20.0
    assert measured.plain_tokens_per_s == 10.0
    assert measured.prediction_error == pytest.approx(1.21 / 2.0 - 1)
    assert measured.tokens_per_round_error == pytest.approx(2.2 / 2.0 - 1)
    assert measured.generated_perplexity_ratio is None


def test_what_was_not_measured_is_absent_and_not_zero() -> None:
    measured = summary([record("0"), record("1", drafted_at=(), accepted_at=(), outputs=((1, 2),))])
    assert measured.acceptance is None
    assert measured.acceptance_by_depth == ()
    assert (measured.ttft_ms, measured.itl_ms, measured.repetition) == (None, None, None)
    assert measured.drafted_per_round == 0.0
    assert measured.speedup.ci95 is None


def test_the_drift_alarm_compares_generated_text_with_plains_and_skips_plain_itself() -> None:
    runs = [record("0", outputs=((1, 1),)), record("1", outputs=((3, 3),))]

    def score(records: Sequence[BlockRecord]) -> float:
        return float(np.mean([np.mean(output) for run in records for output in run.outputs]))

    assert summary(runs, generated_perplexity=score).generated_perplexity_ratio == 3.0
    assert summary(runs, "0", generated_perplexity=score).generated_perplexity_ratio is None


def test_plain_against_itself_is_one_exactly() -> None:
    runs = [record("0", block, seconds=1.0 + block) for block in range(5)]
    measured = summary(runs, "0")
    assert measured.speedup.value == 1.0
    assert measured.speedup.ci95 == (1.0, 1.0)
    assert measured.length_ratio == 1.0
