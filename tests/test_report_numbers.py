"""Absolute figures out of a run folder: speeds, energy, batch sizes, memory, rounds, knobs. Expected values by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from report_runs import CACHED, NEW_TOKENS, PARAMETERS, Machine, write_machine

from lossyspec.cost_table import CostTable
from lossyspec.errors import ConfigurationError
from lossyspec.records import BlockRecord, Estimate
from lossyspec.reports.importance import explained, grouped, knob_importance
from lossyspec.reports.load import Run, load_run
from lossyspec.reports.serving import (
    memory,
    round_parts,
    serving_points,
    speedups_by_batch,
    stops_paying,
)
from lossyspec.reports.speeds import decode_speed, joules_per_token, noise_band, prefill_s, served_speed
from lossyspec.reports.summary import ratio_text, run_labels, summarise, three, verdict_sentence


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_machine(tmp_path_factory.mktemp("numbers") / "run", Machine(energy=True)))


def block(number: int, tokens: int, decode: float | None, **values: object) -> BlockRecord:
    known: dict[str, object] = {"block": number, "forward": True, "contestant": "0", "batch_size": 1, "tokens": tokens}
    known |= {"total_s": (decode or 0) + 1.0, "decode_s": decode, "rounds": tokens, "first_token_s": 1.0}
    return BlockRecord(**(known | values))  # type: ignore[arg-type]


# speeds


def test_speeds_are_sums_over_sums_with_and_without_prefill(run: Run) -> None:
    plain = run.points[0]
    blocks = (block(0, 10, 1.0), block(1, 30, 3.0), block(2, 60, 4.0))
    mine = replace(run, blocks=blocks)
    speed, served = decode_speed(mine, plain), served_speed(mine, plain)
    assert speed is not None and speed.value == pytest.approx(100 / 8)
    assert served is not None and served.value == pytest.approx(100 / 11)
    assert prefill_s(mine) == pytest.approx(1.0)
    assert speed.ci95 is not None and 10.0 <= speed.ci95[0] < 100 / 8 < speed.ci95[1] <= 15.0
    two = replace(run, blocks=blocks[:2])
    few = decode_speed(two, plain)
    assert few is not None and few.ci95 is None  # two blocks are too few for an interval
    assert noise_band(two) is None


def test_without_stored_blocks_the_speed_is_that_of_the_front_and_the_rest_is_absent(run: Run) -> None:
    bare, plain = replace(run, blocks=()), run.points[0]
    assert plain.measured is not None
    assert decode_speed(bare, plain) == Estimate(value=plain.measured.tokens_per_s)
    assert (served_speed(bare, plain), joules_per_token(bare, plain), prefill_s(bare)) == (None, None, None)


def test_energy_is_absent_unless_every_block_has_it(run: Run) -> None:
    plain = run.points[0]
    known = tuple(block(number, 10, 1.0, energy_joules=25.0) for number in range(3))
    found = joules_per_token(replace(run, blocks=known), plain)
    assert found is not None and found.value == pytest.approx(2.5)
    assert joules_per_token(replace(run, blocks=(*known, block(3, 10, 1.0))), plain) is None
    assert summarise(replace(run, blocks=())).no_energy_reason is not None
    manifest = run.manifest.model_copy(update={"energy": {"reason": "RAPL cannot be read here"}})
    assert summarise(replace(run, blocks=(), manifest=manifest)).no_energy_reason == "RAPL cannot be read here"


def test_the_noise_band_holds_1_and_widens_with_the_noise(run: Run) -> None:
    def band(spread: float) -> tuple[float, float]:
        found = noise_band(replace(run, blocks=tuple(block(i, 100, 1.0 + spread * (i % 2)) for i in range(12))))
        assert found is not None
        return found

    calm, rough = band(0.01), band(0.5)
    assert rough[0] < calm[0] < 1.0 < calm[1] < rough[1]


def test_a_block_that_was_run_again_counts_once(tmp_path: Path) -> None:
    folder = write_machine(tmp_path, count=20)
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    again = json.loads(lines[0]) | {"tokens": 7}
    (folder / "measurements.jsonl").write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    found = [one for one in load_run(folder).blocks if (one.block, one.contestant) == (0, again["contestant"])]
    assert [one.tokens for one in found] == [7]


# the cost table


def test_costs_are_read_by_precision_and_batch(tmp_path: Path) -> None:
    machine = Machine()
    costs = CostTable.read(write_machine(tmp_path, machine, count=10) / "costs.json")
    assert costs.context_tokens == 200
    assert costs.round_s["bf16", 4][2] == pytest.approx(machine.pass_s("bf16", 4, 3))
    assert costs.lookup_s[16][3] == pytest.approx(16 * 3 * 1e-5)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "lossytune.costs/2"}', '{"schema": "lossytune.costs/1"}'])
def test_another_file_is_no_cost_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"costs\.json: "):
        CostTable.read(tmp_path / "costs.json")


def test_the_fastest_within_the_limit_serves_each_batch_size(run: Run) -> None:
    points = serving_points(run)
    assert [(point.kind, point.batch) for point in points] == [
        (kind, batch) for batch in (1, 4, 16) for kind in ("plain", "lossless", "lossy")
    ]
    for point in points:
        same = [trial for trial in run.trials if trial.batch_size == point.batch and trial.kind == point.kind]
        allowed = [trial for trial in same if trial.state == "complete" and trial.predicted and trial.quality]
        assert point.tokens_per_s == max(trial.predicted.tokens_per_s for trial in allowed if trial.predicted)
        assert point.tokens_per_s_user * point.batch == pytest.approx(point.tokens_per_s)
    strict = run.front and run.front.model_copy(update={"max_quality_loss": 0.001})
    assert {point.kind for point in serving_points(replace(run, front=strict))} == {"plain", "lossless"}


def test_speedups_are_against_plain_at_the_same_batch_size(run: Run) -> None:
    points = serving_points(run)
    speedups = speedups_by_batch(points, "lossy")
    by = {(point.kind, point.batch): point.tokens_per_s for point in points}
    assert speedups == {batch: by["lossy", batch] / by["plain", batch] for batch in (1, 4, 16)}
    assert speedups_by_batch([point for point in points if point.kind != "plain"], "lossy") == {}


@pytest.mark.parametrize(
    ("speedups", "stop"),
    [
        ({1: 1.5, 4: 1.2, 16: 0.9}, 16),
        ({1: 1.5, 4: 1.0, 16: 0.9}, 4),
        ({1: 0.9, 4: 1.2, 16: 1.1}, None),  # a dip is no end
        ({1: 0.9, 4: 0.8}, 1),
        ({1: 1.5}, None),
        ({}, None),
    ],
)
def test_speculation_stops_paying_where_it_never_pays_again(speedups: dict[int, float], stop: int | None) -> None:
    assert stops_paying(speedups) == stop


def test_memory_grows_by_the_cache_and_ends_at_the_device(run: Run) -> None:
    room = memory(run)
    assert room is not None and room.limit_bytes == 24 * 10**9 and room.precision == "bf16"
    assert room.fixed_bytes == pytest.approx(2 * PARAMETERS) and room.bytes_per_sequence == pytest.approx(2 * CACHED)
    assert room.largest_batch == 3500  # (24e9 - 3e9) / 6e6
    one = replace(run, trials=tuple(trial for trial in run.trials if trial.batch_size == 1))
    alone = memory(one)
    assert alone is not None and alone.largest_batch is None
    assert memory(replace(run, trials=())) is None
    small = replace(room, limit_bytes=10**9)
    assert small.largest_batch == 0  # not even the weights fit


def test_the_parts_of_a_round_add_up_to_it(run: Run) -> None:
    for point in run.points:
        parts = round_parts(run, point)
        assert parts is not None and sum(parts.values()) == pytest.approx(point.predicted.round_s)
        assert all(seconds >= 0 for seconds in parts.values())
    lossy = round_parts(run, run.points[-1])
    assert lossy is not None
    assert lossy["drafting"] == pytest.approx(1e-5 * run.points[-1].settings.draft_length)
    assert round_parts(replace(run, costs=None), run.points[0]) is None


# knobs


def test_a_knob_that_decides_everything_explains_it_and_noise_explains_nothing(run: Run) -> None:
    knobs, count = knob_importance(run)
    assert count == 90
    by = {item.knob: item for item in knobs}
    assert by["alpha"].loss > 0.95  # the loss is a function of alpha alone
    assert by["precision"].speedup > 0.3 and by["batch_size"].speedup < 0.1
    assert by["theta"].loss < 0.15
    assert knob_importance(replace(run, trials=run.trials[:29])) == ([], 29)


def test_shares_of_the_variance_by_hand() -> None:
    # means 1 and 3, grand mean 2: total 8, within 4, 2 degrees of freedom, so (8 - 4 - 1 * 2) / 8
    assert explained(["a", "a", "b", "b"], [0.0, 2.0, 2.0, 4.0]) == pytest.approx(0.25)
    assert explained(["a", "a", "b", "b"], [1.0, 1.0, 1.0, 1.0]) == 0.0
    assert explained(["a", "b"], [1.0, 2.0]) == 0.0  # nothing left to judge by
    assert explained(["a", "a", "b", "b"], [1.0, 1.0, 2.0, 2.0]) == 1.0


@settings_of_hypothesis(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-5, 5)), min_size=2, max_size=60))
def test_a_share_is_between_0_and_1_and_equal_values_stay_together(rows: list[tuple[int, float]]) -> None:
    groups = grouped([value for value, _ in rows])
    assert 0.0 <= explained(groups, [value for _, value in rows]) <= 1.0
    homes: dict[int, set[object]] = {}
    for (value, _), group in zip(rows, groups, strict=True):
        homes.setdefault(value, set()).add(group)
    assert all(len(found) == 1 for found in homes.values())


# words


def test_the_verdict_says_speed_loss_certificate_and_lossless(run: Run) -> None:
    best = run.recommended
    assert best is not None and best.measured is not None and run.front is not None
    quality = best.quality.model_copy(update={"perplexity_ratio": Estimate(value=1.02), "certificate": 1.05})
    measured = best.measured.model_copy(update={"speedup": Estimate(value=1.84, ci95=(1.79, 1.89))})
    lossless = run.points[1]
    assert lossless.kind == "lossless" and lossless.measured is not None
    slower = lossless.measured.model_copy(update={"speedup": Estimate(value=1.52)})
    points = (
        run.points[0],
        lossless.model_copy(update={"measured": slower}),
        best.model_copy(update={"quality": quality, "measured": measured}),
    )
    said = verdict_sentence(replace(run, front=run.front.model_copy(update={"points": points})))
    assert said == "1.84x (1.79-1.89) at +2.0 % perplexity, certified at most +5 %; lossless alone 1.52x (no interval)"
    bare = points[2].model_copy(update={"quality": quality.model_copy(update={"certificate": None})})
    said = verdict_sentence(replace(run, front=run.front.model_copy(update={"points": (points[0], bare)})))
    assert said == "1.84x (1.79-1.89) at +2.0 % perplexity, no certificate; lossless alone was not measured"
    plain = points[0].model_copy(update={"recommended": True})
    assert "does not pay" in verdict_sentence(replace(run, front=run.front.model_copy(update={"points": (plain,)})))
    assert "nothing is recommended" in verdict_sentence(replace(run, front=None))


def test_numbers_have_three_digits_and_no_exponent() -> None:
    values = [1234.4, 123.4, 12.34, 1.234, 0.1234, 0.01234, 0.0001234, 0]
    assert [three(value) for value in values] == ["1,234", "123", "12.3", "1.23", "0.123", "0.012", "0.00012", "0"]
    assert ratio_text(Estimate(value=2.0, ci95=(1.9, 2.1))) == "2.00x (1.90-2.10)"


def test_runs_are_named_by_what_tells_them_apart(run: Run) -> None:
    code = replace(run, manifest=run.manifest.model_copy(update={"task": "code"}))
    other = replace(run, manifest=run.manifest.model_copy(update={"hardware": {"name": "t4-16gb"}}))
    assert run_labels([run, code, other]) == ["l4-24gb (dialogue)", "l4-24gb (code)", "t4-16gb"]
    assert run_labels([run]) == ["l4-24gb"]
    assert run_labels([run, code]) == ["dialogue", "code"]  # one device: it is in the title
    twins = run_labels([run, run])
    assert len(set(twins)) == 2 and NEW_TOKENS == 64
