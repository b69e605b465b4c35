"""The knobs: ranges, and messages that name the field, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lossyspec.errors import ConfigurationError, nearest
from lossyspec.settings import (
    MAX_DRAFT_LENGTH,
    PRECISIONS,
    PRINCIPLED_RULES,
    RULES,
    Attention,
    Sampling,
    ScheduleRow,
    Settings,
    make_sampling,
    make_settings,
)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("alpha", -0.01, "greater than or equal to 0"),
        ("alpha", 1.01, "less than or equal to 1"),
        ("tau", 0.0, "greater than 0"),
        ("tau", 2.01, "less than or equal to 2"),
        ("theta", -0.1, "greater than or equal to 0"),
        ("theta", 1.0, "less than 1"),
        ("draft_length", -1, "greater than or equal to 0"),
        ("draft_length", MAX_DRAFT_LENGTH + 1, f"less than or equal to {MAX_DRAFT_LENGTH}"),
        ("draft_length", 2.5, "valid integer"),
        ("rule", "optimall", "'exact', 'mixture', 'optimal', 'priced', 'lenience', 'typical' or 'fuzzy'"),
        ("alpha", float("nan"), "finite"),
        ("alpha", float("inf"), "finite"),
        ("tau", "warm", "valid number"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_settings(**{field: value})
    assert f"{field} is {value!r}: " in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [("alpha", (0.0, 1.0)), ("tau", (0.01, 2.0)), ("theta", (0.0, 0.99)), ("draft_length", (0, 16)), ("rule", RULES)],
)
def test_the_ends_of_each_range_are_allowed(field: str, values: tuple[Any, ...]) -> None:
    assert [getattr(make_settings(**{field: value}), field) for value in values] == list(values)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", 10.5, "less than or equal to 10"),
        ("temperature", float("nan"), "finite"),
        ("top_k", 0, "greater than or equal to 1"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.1, "less than or equal to 1"),
        ("repetition_penalty", 0.0, "greater than 0"),
    ],
)
def test_sampling_has_its_own_ranges(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_sampling(**{field: value})
    assert f"{field} is {value!r}: " in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key", "meant"),
    [
        ({"alfa": 0.1}, "alfa", "alpha"),
        ({"draft_lenght": 3}, "draft_lenght", "draft_length"),
        ({"precision": {"targt": "fp32"}}, "precision.targt", "target"),
        ({"ngram": {"max_mach": 3}}, "ngram.max_mach", "max_match"),
        ({"schedule": [{"batch": [1, 2], "draft_length": 1, "drft_length": 1}]}, "schedule.0.drft_length", "draft_length"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_key_beside_it(values: dict[str, Any], key: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_settings(**values)
    assert f"unknown key {key!r}. Did you mean {meant!r}?" in str(caught.value)


def test_an_unknown_key_without_a_near_one_gets_no_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=r"^unknown key 'zzzz'\.$"):
        make_settings(zzzz=1)
    assert nearest("zzzz", ["alpha"]) == ""


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_settings(alpha=2.0, tau=3.0, rul="exact")
    assert all(part in str(caught.value) for part in ("alpha is 2.0", "tau is 3.0", "unknown key 'rul'"))


def test_a_missing_part_is_named_without_repeating_all_that_is_there() -> None:
    with pytest.raises(ConfigurationError, match=r"^schedule\.0\.draft_length is missing$"):
        make_settings(schedule=[{"batch": [1, 2]}])


def test_case_25_an_explicit_zero_is_kept_for_every_knob() -> None:
    zeros = {"alpha": 0.0, "theta": 0.0, "draft_length": 0}
    settings = make_settings(**zeros)
    assert {name: getattr(settings, name) for name in zeros} == zeros
    assert Settings(draft_length=0).draft_length != Settings().draft_length
    assert make_sampling(temperature=0.0).temperature == 0.0
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again == settings


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().alpha = 0.5  # type: ignore[misc]


def test_lossless_is_alpha_zero_or_the_exact_rule_or_no_draft() -> None:
    assert all(Settings(rule=rule, alpha=0.0).lossless for rule in PRINCIPLED_RULES)
    assert Settings(rule="exact", alpha=0.5).lossless
    assert Settings(alpha=0.5, draft_length=0).lossless
    assert not any(Settings(rule=rule, alpha=0.01).lossless for rule in RULES if rule != "exact")
    assert Settings().lossless, "the defaults must not relax"


def schedule(*rows: tuple[int, int | None, int]) -> Settings:
    return Settings(
        draft_length=7,
        schedule=tuple(ScheduleRow(batch=(first, last), draft_length=length) for first, last, length in rows),
    )


@pytest.mark.parametrize(
    ("batch", "length"), [(1, 5), (4, 5), (5, 3), (16, 3), (17, 0), (19, 0), (20, 2), (1000, 2), (0, 0)]
)
def test_the_row_that_holds_the_batch_size_says_the_draft_length_and_outside_all_rows_it_is_plain(
    batch: int, length: int
) -> None:
    assert schedule((1, 4, 5), (5, 16, 3), (20, None, 2)).draft_length_for(batch) == length


def test_without_a_schedule_the_draft_length_holds_for_every_batch() -> None:
    assert [schedule().draft_length_for(batch) for batch in (1, 8, 300)] == [7, 7, 7]


@pytest.mark.parametrize("batch", [(0, 4), (-1, None), (4, 1)])
def test_a_row_that_no_batch_can_fall_into_is_refused(batch: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigurationError, match=r"schedule\.0 .*first at least 1"):
        make_settings(schedule=[{"batch": batch, "draft_length": 2}])


def test_a_match_range_upside_down_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_match is 5; it must be at most max_match, 2"):
        make_settings(ngram={"min_match": 5, "max_match": 2})
    with pytest.raises(ConfigurationError, match=r"ngram\.max_match is 17"):
        make_settings(ngram={"max_match": 17})


def test_precisions_are_the_known_ones() -> None:
    for name in PRECISIONS:
        assert make_settings(precision={"target": name, "draft": name}).precision.draft == name
    with pytest.raises(
        ConfigurationError,
        match=r"target is 'int2': .*'fp32', 'bf16', 'fp16', 'fp8', 'int8', 'int4-int8' or 'int4'",
    ):
        make_settings(precision={"target": "int2"})


@given(
    rule=st.sampled_from(RULES),
    alpha=st.floats(0, 1),
    tau=st.floats(0, 2, exclude_min=True),
    theta=st.floats(0, 1, exclude_max=True),
    length=st.integers(0, MAX_DRAFT_LENGTH),
    penalty=st.floats(0.01, 10),
)
def test_settings_and_sampling_survive_json(
    rule: Any, alpha: float, tau: float, theta: float, length: int, penalty: float
) -> None:
    settings = Settings(rule=rule, alpha=alpha, tau=tau, theta=theta, draft_length=length)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    sampling = Sampling(repetition_penalty=penalty, top_p=0.5, top_k=3)
    assert Sampling.model_validate_json(sampling.model_dump_json()) == sampling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block": 12}, r"block is 12; allowed: 0 \(dense\), 8, 16, 32, 64, 128"),
        ({"block": 0, "window": 2}, r"block is 0, which is dense attention: window must be null"),
        ({"block": 32, "window": 2, "sink": 1}, r"block is 32: top, side must be given too"),
        ({"block": 32, "window": 0, "sink": 1, "top": 1, "side": "draft"}, r"attention.window is 0"),
        ({"block": 32, "window": 1, "sink": 1, "top": 1, "side": "both"}, r"attention.side is 'both'"),
    ],
)
def test_attention_that_is_no_attention_is_refused_with_what_is_allowed(values: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_settings(attention=values)


def test_attention_has_a_name_and_comes_back_from_it() -> None:
    sparse = Attention(block=32, sink=1, window=4, top=16, side="verify")
    assert sparse.name == "b32-s1-w4-t16-verify"
    for each in (sparse, Attention(), Attention(block=8, sink=0, window=1, top=0, side="draft")):
        assert Attention.named(each.name) == each
    assert (sparse.on("verify"), sparse.on("draft")) == (sparse, Attention())
    assert [sparse.skips(length) for length in (21 * 32, 21 * 32 + 1)] == [False, True]
    assert not Attention().skips(10**6)
    with pytest.raises(ConfigurationError, match=r"attention is 'b32-s1-w0-t16-verify': window is 0"):
        Attention.named("b32-s1-w0-t16-verify")


def test_settings_without_attention_are_dense_and_sparse_ones_survive_their_file() -> None:
    dense = Settings().model_dump(mode="json")
    assert dense["attention"] == {"block": 0, "window": None, "sink": None, "top": None, "side": None}
    older = {name: value for name, value in dense.items() if name != "attention"}
    assert Settings(**older) == Settings()
    sparse = Settings(attention=Attention(block=32, sink=1, window=4, top=16, side="verify"))
    assert Settings.model_validate_json(sparse.model_dump_json()) == sparse
    assert (sparse.target_format, sparse.draft_format) == ("fp32+b32-s1-w4-t16-verify",) * 2
    assert Settings().target_format == "fp32"
    compiled = sparse.model_copy(update={"compile": "inductor"})
    assert (compiled.target_format, compiled.cost_format) == (sparse.target_format, f"{sparse.target_format}+inductor")
    assert [Settings(compile="tensorrt").passes, Settings().passes, Settings(cuda_graphs=False).passes] == [
        "tensorrt",
        "graphs",
        "eager",
    ]
    with pytest.raises(ConfigurationError, match=r"compile is 'yes': Input should be 'off', 'inductor' or 'tensorrt'"):
        make_settings(compile="yes")
