"""What a search is asked for: durations, losses and lists from texts; wrong values are named with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lossyspec.errors import ConfigurationError
from lossyspec.settings import Sampling
from lossyspec.tuner.config import (
    SearchConfig,
    make_config,
    parse_duration_s,
    parse_loss,
    parse_names,
    parse_numbers,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0), ("0.5m", 30.0), (" 2 m ", 120.0)],
)
def test_durations_are_read_in_seconds_minutes_and_hours(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5m", "5d", "m", "5m30s", "nan", "inf", "5 minutes"])
def test_a_wrong_duration_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"90s or 5m") as caught:
        parse_duration_s(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("6.5 %", 0.065), ("0", 0.0), ("0%", 0.0), ("100%", 1.0)]
)
def test_losses_are_read_as_shares_or_percentages(text: str, share: float) -> None:
    assert parse_loss(text) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize("text", ["", "-5%", "five", "5%%", "nan", "inf", "1e3"])
def test_a_wrong_loss_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.05 or 5%") as caught:
        parse_loss(text)
    assert repr(text) in str(caught.value)


def test_lists_of_numbers() -> None:
    assert parse_numbers("1,2, 8", "batch") == (1, 2, 8)
    for wrong in ("", "1,,2", "1.5", "a", "1;2"):
        with pytest.raises(ConfigurationError, match=r"^batch is .*such as 1,2,4$") as caught:
            parse_numbers(wrong, "batch")
        assert repr(wrong) in str(caught.value)


def test_lists_of_names_and_auto() -> None:
    assert parse_names("auto") is None
    assert parse_names("bf16") == ("bf16",)
    assert parse_names("optimal, mixture,") == ("optimal", "mixture")


def test_defaults_relax_nothing_by_force_and_batches_are_sorted_without_repeats() -> None:
    config = make_config()
    assert (config.task, config.force, config.strict) == ("dialogue", False, False)
    assert make_config(batch_sizes=(8, 1, 4, 1)).batch_sizes == (1, 4, 8)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_sizes": (0,)}, "batch_sizes"),
        ({"batch_sizes": (1, 257)}, "1 to 256"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"max_draft_length": 17}, "max_draft_length is 17"),
        ({"max_draft_length": 0}, "max_draft_length is 0"),
        ({"max_new_tokens": 7}, "max_new_tokens is 7"),
        ({"texts": 1}, "texts is 1"),
        ({"max_quality_loss": -0.1}, "max_quality_loss is -0.1"),
        ({"max_quality_loss": float("nan")}, "max_quality_loss is nan"),
        ({"budget_s": 9.9}, "budget_s is 9.9"),
        ({"trials": 0}, "trials is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31}, "seed is 2147483648"),
        ({"precisions": ("bf17",)}, "'bf17'"),
        ({"rules": ("optimal", "optimistic")}, "'optimistic'"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature is -1.0"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_config(**values)
    assert named in str(caught.value)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_config(trials=0, seed=-1)
    assert "trials is 0" in str(caught.value)
    assert "seed is -1" in str(caught.value)


def test_an_unknown_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key 'max_quality_los'\. Did you mean 'max_quality_loss'\?"):
        make_config(max_quality_los=0.05)


def test_case_25_an_explicit_zero_is_kept_and_not_taken_for_absent() -> None:
    config = make_config(max_quality_loss=0.0, seed=0, sampling=Sampling(temperature=0.0))
    assert config.max_quality_loss == 0.0
    assert config.sampling is not None
    assert config.sampling.temperature == 0.0


def test_a_config_cannot_be_changed_and_survives_json() -> None:
    config = make_config(task="code", batch_sizes=(2, 4), rules=("priced",), precisions=("bf16",), storage="sqlite:///x.db")
    with pytest.raises(ValidationError, match="frozen"):
        config.trials = 3  # type: ignore[misc]
    assert SearchConfig.model_validate_json(config.model_dump_json()) == config
