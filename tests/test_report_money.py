"""What is compared, what it costs, and how many devices a load needs. Expected values by hand or from queueing theory."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from report_runs import Machine, write_machine

from lossyspec.cost_table import CostTable
from lossyspec.errors import ConfigurationError
from lossyspec.records import Estimate
from lossyspec.reports.capacity import Demand, Service, devices_needed, latencies_s, make_demand, p95_latency_s, services
from lossyspec.reports.compare import comparability, footnotes, groups, ranking, refusals, separable, unlike
from lossyspec.reports.load import Run, load_run
from lossyspec.reports.prices import PriceTerms, cost_per_million, origin_text, parse_pairs, price_devices, price_terms
from lossyspec.settings import Sampling


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(write_machine(tmp_path_factory.mktemp("money") / "run", Machine(), count=40))


def changed(run: Run, **values: Any) -> Run:
    return replace(run, manifest=run.manifest.model_copy(update=values))


# comparison


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"target": {"id": "other", "weights_sha256": "11" * 32}}, ["target"]),
        ({"draft": {"kind": "model", "id": "other"}}, ["draft"]),
        ({"tokenizer_sha256": "22" * 32}, ["tokenizer"]),
        ({"workload": {"sha256": "33" * 32, "max_new_tokens": 64}}, ["prompts"]),
        ({"workload": {"sha256": "cd" * 32, "max_new_tokens": 128}}, ["new tokens"]),
        ({"sampling": Sampling(temperature=0.0)}, ["sampling"]),
        ({"sampling": Sampling(temperature=0.0), "tokenizer_sha256": "22" * 32}, ["tokenizer", "sampling"]),
        ({"versions": {"torch": "1.0"}}, []),
        ({"created": "2020-01-01", "seed": 5, "hardware": {"name": "t4-16gb"}}, []),
    ],
)
def test_unlike_runs_are_refused_by_the_names_of_the_fields(run: Run, values: dict[str, Any], named: list[str]) -> None:
    other = changed(run, **values)
    assert unlike(run, other) == named
    assert groups([run, other, run]) == ([[0, 2], [1]] if named else [[0, 1, 2]])
    said = refusals([run, other], ["one", "two"])
    assert said == ([f"one and two are not drawn together: unlike {', '.join(named)}"] if named else [])


def test_another_driver_is_a_footnote(run: Run) -> None:
    hardware = {"name": "t4-16gb", "gpus": [{"visible": True, "driver": "535.1"}], "kernel": "6.12"}
    other = changed(run, hardware=hardware)
    assert footnotes([run, other]) == ["driver differs: 580.65, 535.1"]
    assert footnotes([run, run]) == []
    silent = changed(run, hardware={"name": "t4-16gb", "kernel": "6.12"})
    assert footnotes([run, silent]) == ["driver differs: 580.65, not recorded"]
    rows = {row.name: row for row in comparability([run, other])}
    assert rows["device"].values == ("l4-24gb", "t4-16gb") and rows["device"].differs and not rows["device"].required
    assert rows["prompts"].required and not rows["prompts"].differs
    assert rows["power limit, W"].values == (72.0, None)
    assert rows["throttled at the start"].values == ("no", None)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ((9.0, 11.0), (12.0, 14.0), True),
        ((12.0, 14.0), (9.0, 11.0), True),
        ((9.0, 12.0), (12.0, 14.0), False),
        ((9.0, 13.0), (10.0, 11.0), False),
        (None, (1.0, 2.0), None),
    ],
)
def test_overlapping_intervals_are_not_separable(
    one: tuple[float, float] | None, other: tuple[float, float], apart: bool | None
) -> None:
    assert separable(Estimate(value=10.0, ci95=one), Estimate(value=13.0, ci95=other)) is apart


def test_only_separable_runs_get_a_rank() -> None:
    speeds = [
        ("slow", Estimate(value=10.0, ci95=(9.0, 11.0))),
        ("fast", Estimate(value=20.0, ci95=(19.0, 21.0))),
        ("same", Estimate(value=10.5, ci95=(9.5, 11.5))),
        ("odd", None),
    ]
    assert ranking(speeds) == [
        "odd: no measured speed",
        "fast is faster than same: 1.90 times the tokens/s",
        "same and slow are not separable: their intervals overlap",
    ]
    assert ranking([("a", Estimate(value=2.0)), ("b", Estimate(value=1.0))]) == [
        "a and b are not separable: one of them has no interval"
    ]


# prices


def test_costs_by_hand() -> None:
    assert cost_per_million(3.6, 100.0, 1.0) == pytest.approx(10.0)  # 0.001 a second over 100 tokens
    assert cost_per_million(3.6, 100.0, 0.25) == pytest.approx(40.0)
    terms = price_terms(capital=["h100=26298"], years=3, pue=1.5, electricity=0.2, source="offer", date="2026-01-02")
    prices = price_devices(terms, ["h100-sxm-80gb", "l4-24gb"], {"h100-sxm-80gb": 700.0})
    assert list(prices) == ["h100-sxm-80gb"]
    assert prices["h100-sxm-80gb"].per_hour == pytest.approx(1.0 + 0.7 * 1.5 * 0.2)  # 26298 h in 3 years
    assert "26298 USD over 3 years, and 700 W, the board's limit" in prices["h100-sxm-80gb"].basis
    mine = price_devices(replace(terms, power_w=(("h100", 400.0),)), ["h100-sxm-80gb"], {"h100-sxm-80gb": 700.0})
    assert mine["h100-sxm-80gb"].per_hour == pytest.approx(1.0 + 0.4 * 1.5 * 0.2)
    assert origin_text(terms) == "Prices: offer, 2026-01-02."
    assert origin_text(PriceTerms()) == "Prices: source not given, date not given."
    assert not PriceTerms().given and terms.given


@pytest.mark.parametrize("text", ["h100", "h100=", "=3", "h100=free", "h100=0", "h100=-1", "h100=nan", "h100=inf"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--price '.*': expected NAME=NUMBER with a number over 0"):
        parse_pairs([text], "--price")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"per_hour": ["t4=1"]}, "--price 't4' is not known; allowed: cpu-x-2c, l4-24gb"),
        ({"per_hour": ["l4=1", "l4-24gb=2"]}, "--price l4-24gb: it has a price already"),
        (
            {"per_hour": ["l4=1"], "capital": ["l4=9"], "years": 1, "pue": 1.1, "electricity": 0.1},
            "--capital l4-24gb: it has",
        ),
        ({"capital": ["l4=9"], "years": 1}, "--capital l4: --pue, --electricity must be given with it"),
        (
            {"capital": ["cpu-x=9"], "years": 1, "pue": 1, "electricity": 0.1},
            "the power of cpu-x-2c is not known; give --power",
        ),
        ({"pue": 0.9}, "--pue is 0.9; allowed: at least 1"),
        ({"years": 0.0}, "--years is 0; allowed: over 0"),
        ({"electricity": float("nan")}, "--electricity is nan"),
    ],
)
def test_terms_that_do_not_fit_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        price_devices(price_terms(**values), ["l4-24gb", "cpu-x-2c"], {"l4-24gb": 72.0})
    assert said in str(caught.value)


# capacity


def service(*rounds: tuple[int, float, float], prefill_s: float = 0.0) -> Service:
    return Service("lossy", rounds, prefill_s, "made up")


def test_a_device_that_is_hardly_used_answers_in_the_time_of_one_request() -> None:
    demand = Demand(0.001, 10, 10, 60.0)
    one = service((1, 0.5, 2.0), prefill_s=0.25)
    assert p95_latency_s(one, demand, 1, 300) == pytest.approx(0.25 + 5 * 0.5)
    assert p95_latency_s(service((1, 0.5, 3.0)), demand, 1, 300) == pytest.approx(4 * 0.5)  # 10 tokens are 4 rounds of 3


def test_a_lone_device_waits_as_queueing_theory_says() -> None:
    """One request at a time, all alike: an M/D/1 queue, whose mean wait is load x service / (2 (1 - load))."""
    demand = Demand(0.7, 1, 1, 60.0)
    found = latencies_s(service((1, 1.0, 1.0)), demand, 1, 60_000)
    assert sum(found) / len(found) == pytest.approx(1.0 + 0.7 / (2 * 0.3), rel=0.05)


def test_a_batch_takes_the_round_of_the_next_larger_measured_size() -> None:
    """Three at once on a table of 1 and 4 pay the round of 4, and a fifth waits."""
    crowd = Demand(1e6, 1, 1, 60.0)  # all arrive at once
    found = sorted(latencies_s(service((1, 1.0, 1.0), (4, 3.0, 1.0)), crowd, 1, 5))
    # the first goes alone (1 s); the next four share a round of 4
    assert found == pytest.approx([1.0, 4.0, 4.0, 4.0, 4.0], abs=1e-3)


def test_the_fewest_devices_are_found() -> None:
    """Eight requests/s of one second each keep at least 8 devices busy; the answer is the first count within the limit."""
    demand = Demand(8.0, 1, 1, 1.2)
    result = devices_needed(service((1, 1.0, 1.0)), demand, 600)
    assert result.devices is not None and result.devices > 8
    within = {count: value <= 1.2 for count, value in result.p95_by_devices.items()}
    assert within[result.devices] and not any(fits for count, fits in within.items() if count < result.devices)
    many = devices_needed(service((1, 1.0, 1.0)), Demand(60.0, 1, 1, 1.0001), 600)
    assert many.devices is not None and many.devices > 66
    assert many.p95_by_devices[many.devices - 1] > 1.0001  # also where the steps are wide


def test_a_load_that_keeps_devices_busy_all_the_time_is_not_called_served() -> None:
    """Ten requests/s of one second each and no hurry: 10 devices are busy for 100 % of the time, 11 for 91 %."""
    assert devices_needed(service((1, 1.0, 1.0)), Demand(10.0, 1, 1, 1e6), 300).devices == 11


def test_a_limit_under_one_request_is_refused_in_words() -> None:
    result = devices_needed(service((1, 1.0, 1.0)), Demand(1.0, 1, 10, 5.0), 100)
    assert result.devices is None and result.p95_by_devices == {}
    assert result.reason == "one request alone takes 10 s, over the 5 s allowed: no number of devices helps"


@settings_of_hypothesis(max_examples=25, deadline=None)
@given(
    st.floats(0.1, 20.0), st.integers(1, 30), st.integers(1, 4), st.floats(0.01, 0.5), st.floats(1.0, 4.0), st.integers(0, 3)
)
def test_nobody_is_served_faster_than_alone_and_everybody_is_served(
    rate: float, tokens: int, devices: int, seconds: float, per_round: float, seed: int
) -> None:
    offered = service((1, seconds, per_round), (4, 2 * seconds, per_round), prefill_s=0.01)
    found = latencies_s(offered, Demand(rate, 1, tokens, 1.0), devices, 60, seed)
    rounds = ceil(tokens / per_round - 1e-9)  # 7 tokens are 5 rounds of 1.4, whatever floats make of it
    assert min(found) >= 0.01 + rounds * seconds - 1e-6
    assert found == latencies_s(offered, Demand(rate, 1, tokens, 1.0), devices, 60, seed)


def test_service_comes_from_the_cost_table_and_the_live_prefill(run: Run) -> None:
    found = services(run, Demand(1.0, 336, 64, 5.0))
    assert [one.kind for one in found] == ["plain", "lossless", "lossy"]
    assert [batch for batch, _, _ in found[0].rounds] == [1, 4, 16]
    assert found[0].rounds[0][1] == pytest.approx(Machine().pass_s("bf16", 1, 1))
    assert found[0].prefill_s == pytest.approx(0.02 * 336 / 168)  # context 200 less half of 64 new tokens
    bare = services(replace(run, blocks=()), Demand(1.0, 336, 64, 5.0))
    assert bare[0].prefill_s == 0.0 and "was not measured" in bare[0].prefill_note
    assert services(replace(run, trials=()), Demand(1.0, 1, 1, 1.0)) == []


def test_a_demand_is_whole_or_absent() -> None:
    assert make_demand(None, None, None, None) is None
    assert make_demand(2.0, 100, 50, 3.0) == Demand(2.0, 100, 50, 3.0)
    with pytest.raises(ConfigurationError, match="needs --output-tokens, --p95 as well"):
        make_demand(2.0, 100, None, None)
    with pytest.raises(ConfigurationError, match="--rate is -1; allowed: over 0"):
        make_demand(-1.0, 100, 50, 3.0)
    with pytest.raises(ConfigurationError, match=r"--rate is 1e\+10; allowed: over 0, and under 1e9"):
        make_demand(1e10, 100, 50, 3.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"years": 3.0, "pue": 1.2}, "--years, --pue: used with --capital alone"),
        ({"power_w": ["l4=70"], "per_hour": ["l4=1"]}, "--power: used with --capital alone"),
        ({"capital": ["l4=1"], "years": 3, "pue": 1.2, "electricity": 0.1, "power_w": ["l4=70", "l4-24gb=80"]},
         "--power l4-24gb: it has 70 W already"),
    ],
)  # fmt: skip
def test_no_figure_of_the_user_is_dropped_in_silence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        price_devices(price_terms(**values), ["l4-24gb"], {"l4-24gb": 72.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "x", None])
@pytest.mark.parametrize("field", ["round_s", "lookup_s"])
def test_a_cost_that_nobody_can_have_measured_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    table = {"schema": "lossytune.costs/1", "context": 8, "round_s": {"fp32/1": [0.1]}, "lookup_s": {"1": [0.0]}}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    assert CostTable.read(tmp_path / "costs.json").context_tokens == 8
    newer = table | {"schema": "lossytune.costs/2", "draft_s": {"fp32/1": [0.0, 0.5]}}
    older = table | {"draft_step_s": {"fp32/1": 0.25}}
    for data, drafting in ((newer, [0.0, 0.5]), (older, [0.25 * count for count in range(17)])):
        (tmp_path / "costs.json").write_text(json.dumps(data))
        assert CostTable.read(tmp_path / "costs.json").draft_s == {("fp32", 1): drafting}
    table[field] = {"fp32/1" if field == "round_s" else "1": [value]}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    with pytest.raises(ConfigurationError, match=r"costs\.json: not a cost table"):
        CostTable.read(tmp_path / "costs.json")


def test_runs_at_two_places_are_read(tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "a", Machine(), count=12, front=False)
    bare = load_run(folder)
    assert bare.front is None and bare.costs is not None and bare.blocks == ()
