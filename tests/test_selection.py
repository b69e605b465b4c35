"""Which points are confirmed and which one is recommended, on records made by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from lossyspec.records import Estimate, FrontPoint, Measurement, Prediction, Quality, TrialRecord
from lossyspec.settings import Settings
from lossyspec.tuner.selection import pareto, recommend, speedup_of, to_confirm, verdict

SETTINGS = {
    "plain": Settings(draft_length=0, rule="exact"),
    "lossless": Settings(draft_length=3, rule="exact"),
    "lossy": Settings(draft_length=3, rule="optimal", alpha=0.4),
}


def prediction(speedup: float) -> Prediction:
    return Prediction(
        speedup=speedup,
        tokens_per_s=10 * speedup,
        tokens_per_round=2.0,
        drafted_per_round=3.0,
        acceptance=0.5,
        round_s=0.1,
        plain_round_s=0.1,
    )


def quality(ratio: float, interval: tuple[float, float] | None = None, certificate: float | None = None) -> Quality:
    return Quality(
        perplexity_ratio=Estimate(value=ratio, ci95=interval),
        tokens=1000,
        texts=10,
        corpus="target_samples",
        tv=0.1,
        kl_forward=0.1,
        kl_reverse=0.1,
        certificate=certificate,
    )


def trial(number: int, kind: Any, speedup: float, ratio: float = 1.0, batch: int = 1, **values: Any) -> TrialRecord:
    known: dict[str, Any] = {
        "state": "complete",
        "constraints": {"quality_loss": ratio - 1.05},
        "predicted": prediction(speedup),
        "quality": quality(ratio),
    }
    known |= values
    if "state" not in values and any(value > 0 for value in known["constraints"].values()):
        known["state"] = "infeasible"
    return TrialRecord(
        number=number, kind=kind, settings=SETTINGS[kind], batch_size=batch, params={}, duration_s=0.1, **known
    )


def failed(number: int, kind: Any = "lossy", batch: int = 1) -> TrialRecord:
    return trial(number, kind, 1.0, batch=batch, state="failed", predicted=None, quality=None, reason="broken")


def measurement(speedup: float, interval: tuple[float, float] | None) -> Measurement:
    estimate = Estimate(value=speedup, ci95=interval)
    return Measurement(
        speedup=estimate,
        end_to_end_speedup=estimate,
        tokens_per_s=10 * speedup,
        plain_tokens_per_s=10.0,
        tokens_per_round=2.0,
        drafted_per_round=3.0,
        acceptance=0.5,
        acceptance_by_depth=(0.5,),
        tokens=1000,
        rounds=500,
        blocks=8,
        ttft_ms=None,
        itl_ms=None,
        length_ratio=1.0,
        repetition=None,
        generated_perplexity_ratio=None,
        prediction_error=0.0,
        tokens_per_round_error=0.0,
    )


def point(
    number: int,
    kind: Any,
    speedup: float,
    spread: float | None = 0.02,
    ratio: float = 1.0,
    ratio_ci: tuple[float, float] | None = None,
    certificate: float | None = None,
    measured: bool = True,
) -> FrontPoint:
    interval = (speedup - spread, speedup + spread) if spread is not None else None
    return FrontPoint(
        trial=number,
        kind=kind,
        recommended=False,
        settings=SETTINGS[kind],
        batch_size=1,
        predicted=prediction(speedup),
        quality=quality(ratio, ratio_ci, certificate),
        measured=measurement(speedup, interval) if measured else None,
    )


PLAIN = point(0, "plain", 1.0, spread=0.0)


# the front


@settings_of_hypothesis(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 5), st.sampled_from(["complete", "infeasible", "failed"])),
        max_size=14,
    )
)
def test_the_front_is_what_no_other_record_beats(points: list[tuple[int, int, str]]) -> None:
    records = [
        trial(number, "lossy", speed / 2, 1 + loss / 10, state=state) for number, (speed, loss, state) in enumerate(points)
    ]
    alive = {(speed / 2, 1 + loss / 10) for speed, loss, state in points if state != "failed"}
    wanted = {
        (speed, ratio)
        for speed, ratio in alive
        if not any((s >= speed and r <= ratio and (s, r) != (speed, ratio)) for s, r in alive)
    }
    front = pareto(records)
    found = [(speedup_of(record), record.quality.perplexity_ratio.value if record.quality else 0.0) for record in front]
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert found == sorted(found)
    assert all(record.state != "failed" for record in front)


def test_of_equal_points_the_earlier_one_is_on_the_front() -> None:
    records = [trial(5, "lossy", 1.5, 1.02), trial(2, "lossy", 1.5, 1.02), trial(9, "lossy", 1.5, 1.02)]
    assert [record.number for record in pareto(records)] == [2]


def test_R5_a_failed_trial_with_a_zero_loss_is_not_on_the_front() -> None:
    zeros = trial(1, "lossy", 100.0, 0.5, state="failed")
    assert [record.number for record in pareto([trial(0, "plain", 1.0), zeros, failed(2)])] == [0]


def test_O3_R5_only_points_with_both_objectives_take_part() -> None:
    half = [trial(1, "lossy", 9.0, quality=None), trial(2, "lossy", 9.0, predicted=None)]
    assert [record.number for record in pareto([trial(0, "plain", 1.0), *half])] == [0]
    assert pareto([]) == []
    assert speedup_of(failed(3)) == 0.0


# what is confirmed


def test_the_best_plain_and_lossless_and_the_fastest_lossy_ones_at_some_levels_of_loss_are_confirmed() -> None:
    records = [
        trial(0, "plain", 0.9),
        trial(1, "plain", 1.0),
        trial(2, "lossless", 1.1),
        trial(3, "lossless", 1.3),
        trial(4, "lossy", 1.35, 1.010),  # within 0.25 of the limit
        trial(5, "lossy", 1.30, 1.005),
        trial(6, "lossy", 1.45, 1.028),  # surely within it
        trial(7, "lossy", 1.44, 1.026),
        trial(8, "lossy", 1.55, 1.050, constraints={"quality_loss": 0.0}),  # at the limit
        trial(9, "lossy", 1.70, 1.095),  # beyond it, within twice
        trial(10, "lossy", 2.00, 1.150),  # too far
        trial(11, "lossy", 1.54, 1.049),
        failed(12),
    ]
    assert [record.number for record in to_confirm(records, 0.05)] == [1, 3, 8, 4, 9]

    def upper(record: TrialRecord) -> float:
        assert record.quality is not None and record.kind == "lossy"
        return record.quality.perplexity_ratio.value + 0.02

    assert [record.number for record in to_confirm(records, 0.05, upper)] == [1, 3, 8, 4, 9, 6]


def test_plain_comes_first_and_no_point_is_measured_twice() -> None:
    records = [trial(3, "lossy", 1.6, 1.001), trial(1, "lossless", 1.2), trial(2, "plain", 1.0)]
    assert [record.number for record in to_confirm(records, 0.05)] == [2, 1, 3]


def test_points_are_compared_at_the_batch_size_of_the_fastest_feasible_one() -> None:
    records = [
        trial(0, "plain", 1.0, batch=1),
        trial(1, "lossless", 1.4, batch=1),
        trial(2, "plain", 1.0, batch=4),
        trial(3, "lossless", 1.1, batch=4),
        trial(4, "lossy", 1.2, 1.01, batch=4),
        trial(5, "lossy", 3.0, 1.2, batch=4),  # infeasible: does not choose the batch
    ]
    assert [record.number for record in to_confirm(records, 0.05)] == [0, 1]


def test_points_over_the_memory_are_never_confirmed_points_over_the_loss_may_be() -> None:
    over = {"quality_loss": -0.05, "memory": 0.2}
    records = [
        trial(0, "plain", 1.0),
        trial(1, "plain", 2.0, constraints=over),
        trial(2, "lossless", 3.0, constraints=over),
        trial(3, "lossy", 1.3, 1.08),
    ]
    assert [record.state for record in records] == ["complete", "infeasible", "infeasible", "infeasible"]
    assert [record.number for record in to_confirm(records, 0.05)] == [0, 3]


def test_O8_with_no_feasible_point_nothing_is_confirmed() -> None:
    records = [trial(0, "plain", 1.0, 1.2), trial(1, "lossy", 2.0, 1.3), failed(2)]
    assert to_confirm(records, 0.05) == []
    assert to_confirm([], 0.05) == []


def test_a_limit_of_zero_leaves_what_costs_nothing() -> None:
    records = [
        trial(0, "plain", 1.0, constraints={}),
        trial(1, "lossless", 1.3, constraints={}),
        trial(2, "lossy", 1.5, 1.0001, constraints={"quality_loss": 0.0001}),
    ]
    assert [record.number for record in to_confirm(records, 0.0)] == [0, 1]


# what is recommended


def best(*points: FrontPoint, loss: float = 0.05, ahead: dict[int, Estimate] | None = None) -> int:
    return points[recommend(points, loss, ahead or {})].trial


def sure(number: int, low: float = 1.01) -> dict[int, Estimate]:
    return {number: Estimate(value=1.1, ci95=(low, 1.2))}


def test_case_19_Q5_a_slow_draft_is_answered_with_plain_decoding_at_1x() -> None:
    points = (PLAIN, point(1, "lossless", 0.6), point(2, "lossy", 0.8, ratio=1.02, ratio_ci=(1.01, 1.03)))
    assert best(*points) == 0
    assert verdict(points, 0) == (
        "plain decoding, 1.00x: nothing measured is surely faster within the limit; lossless alone 0.60x (0.58-0.62)"
    )


def test_a_gain_that_its_interval_does_not_support_is_no_gain() -> None:
    assert best(PLAIN, point(1, "lossless", 1.05, spread=0.06)) == 0
    assert best(PLAIN, point(1, "lossless", 1.05, spread=0.05)) == 0  # the lower end is 1
    assert best(PLAIN, point(1, "lossless", 1.05, spread=0.04)) == 1
    assert best(PLAIN, point(1, "lossless", 1.5, spread=None)) == 0
    assert best(PLAIN, point(1, "lossless", 1.5, measured=False)) == 0


def test_the_loss_counts_by_the_upper_end_of_its_interval() -> None:
    lossless, lossy = point(1, "lossless", 1.2), point(2, "lossy", 1.5, ratio=1.04, ratio_ci=(1.03, 1.051))
    assert best(PLAIN, lossless, lossy, ahead=sure(2)) == 1
    assert best(PLAIN, lossless, lossy, loss=0.052, ahead=sure(2)) == 2
    without = point(2, "lossy", 1.5, ratio=1.04)
    assert best(PLAIN, lossless, without, ahead=sure(2)) == 2
    assert best(PLAIN, lossless, without, loss=0.03, ahead=sure(2)) == 1


def test_a_lossy_point_must_be_surely_faster_than_lossless_too() -> None:
    points = (PLAIN, point(1, "lossless", 1.4), point(2, "lossy", 1.5, ratio=1.02, ratio_ci=(1.01, 1.03)))
    assert best(*points, ahead=sure(2)) == 2
    assert best(*points, ahead=sure(2, low=1.0)) == 1
    assert best(*points, ahead={2: Estimate(value=1.07)}) == 1
    assert best(PLAIN, points[2]) == 2  # no lossless point was measured


def test_of_several_supported_points_the_fastest_is_recommended_whatever_their_order() -> None:
    points = [
        PLAIN,
        point(1, "lossless", 1.3),
        point(2, "lossy", 1.45, ratio=1.01, ratio_ci=(1.0, 1.02)),
        point(3, "lossy", 1.6, ratio=1.04, ratio_ci=(1.03, 1.049)),
        point(4, "lossy", 1.9, ratio=1.09, ratio_ci=(1.08, 1.1)),
    ]
    ahead = {number: Estimate(value=1.1, ci95=(1.05, 1.2)) for number in (2, 3, 4)}
    assert best(*points, ahead=ahead) == 3
    assert best(*points[::-1], ahead=ahead) == 3


# the verdict


def test_verdicts_are_one_sentence_with_what_was_measured() -> None:
    lossless = point(1, "lossless", 1.3, spread=0.04)
    lossy = point(2, "lossy", 1.5, spread=0.05, ratio=1.02, ratio_ci=(1.011, 1.032), certificate=1.25)
    points = (PLAIN, lossless, lossy)
    assert verdict(points, 2) == (
        "1.50x (1.45-1.55) at +2.0 % perplexity (+1.1 % to +3.2 %), certified at most +25.0 % on any text; "
        "lossless alone 1.30x (1.26-1.34)"
    )
    assert verdict(points, 1) == "lossless, 1.30x (1.26-1.34): no relaxation within the limit is surely faster"
    assert verdict((PLAIN,), 0).endswith("within the limit; lossless was not measured")


def test_a_verdict_leaves_out_what_is_not_known() -> None:
    bare = point(2, "lossy", 1.5, spread=None, ratio=0.995)
    assert verdict((PLAIN, bare), 1) == "1.50x at -0.5 % perplexity; lossless was not measured"
    unmeasured = point(1, "lossless", 1.3, measured=False)
    assert "lossless was not measured" in verdict((PLAIN, unmeasured), 0)
