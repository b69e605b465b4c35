"""Logits to probabilities as transformers does it, and uniform numbers to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lossyspec.sampling import draw, penalise, probabilities
from lossyspec.settings import Sampling

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, database=None)
JUST_UNDER_1 = (1 - 2.0**-24, 1 - 2.0**-53)  # the largest numbers that torch.rand gives in fp32 and fp64


def warped(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Probabilities of transformers' generate: its warpers in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))
    ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    return warpers(ids, logits.clone()).softmax(-1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 63, 64, 1000])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
def test_probabilities_are_those_of_the_transformers_warpers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = 3 * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    got = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    want = warped(logits, temperature, top_k, top_p)
    assert bool(((got > 0) == (want > 0)).all())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@PROPERTY
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 3),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.01, 1.0),
)
def test_any_row_matches_the_transformers_warpers(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    row = torch.tensor([logits])
    got = probabilities(row, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(got, warped(row, temperature, top_k, top_p), rtol=1e-5, atol=1e-30)
    assert got.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert got[row == row.max()].max() > 0  # one of the best tokens always stays


def test_ties_at_the_kth_place_all_stay_as_in_transformers() -> None:
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    got = probabilities(row, Sampling(top_k=2))
    assert (got > 0).tolist() == [[False, True, True, True, False]]
    torch.testing.assert_close(got, warped(row, 1.0, 2, None))


def test_mass_that_is_exactly_what_top_p_leaves_out_goes_as_in_transformers() -> None:
    row = torch.zeros(1, 4)  # a quarter each: the lowest half is what top_p = 0.5 leaves out
    got = probabilities(row, Sampling(top_p=0.5))
    assert (got > 0).sum().item() == 2
    torch.testing.assert_close(got, warped(row, 1.0, None, 0.5))


def test_tau_is_a_factor_on_the_temperature() -> None:
    logits = 3 * torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.8, top_k=9, top_p=0.8)
    torch.testing.assert_close(probabilities(logits, sampling, 0.5), warped(logits, 0.4, 9, 0.8))


def test_rows_and_columns_are_filtered_each_alone() -> None:
    logits = 3 * torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=0.7, top_k=8, top_p=0.7)
    together = probabilities(logits, sampling)
    for row in range(3):
        for column in range(4):
            torch.testing.assert_close(together[row, column], probabilities(logits[row, column], sampling))


def test_temperature_0_gives_the_softmax_of_the_raw_logits_without_filters() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
    got = probabilities(logits, Sampling(temperature=0.0, top_k=1, top_p=0.1))
    torch.testing.assert_close(got, logits.softmax(-1))


def test_probabilities_leave_the_logits_alone() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    probabilities(logits, Sampling(temperature=0.5, top_k=2, top_p=0.5))
    assert torch.equal(logits, before)


# --- penalties -------------------------------------------------------------------------------------------------------

PREFIXES = [[3, 3, 7], [1], [0, 5, 2, 5, 9]]
DRAFTED = torch.tensor([[7, 4, 4], [6, 1, 8], [9, 5, 3]])


def column_by_column(logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """What plain decoding would get: the processors on each prefix, the drafted tokens before the column included."""
    want = logits.clone()
    for row, prefix in enumerate(PREFIXES):
        for column in range(logits.shape[1]):
            ids = torch.tensor([prefix + DRAFTED[row, :column].tolist()])
            want[row, column] = processors(ids, logits[row, column][None].clone())[0]
    return want


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_is_transformers_own_on_each_prefix_with_its_drafted_tokens(penalty: float) -> None:
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(5))
    logits[0, 0, 3] = 0.0
    logits[1, 2, 6] = -torch.inf
    before = logits.clone()
    got = penalise(logits, PREFIXES, DRAFTED, Sampling(repetition_penalty=penalty))
    want = column_by_column(logits, LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)]))
    assert torch.equal(got, want)
    assert torch.equal(logits, before)


def test_penalty_comes_before_the_processors_as_in_generate() -> None:
    processors = [NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([2, 8])]
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(6))
    got = penalise(logits, PREFIXES, DRAFTED, Sampling(repetition_penalty=1.4), processors)
    want = column_by_column(logits, LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), *processors]))
    assert torch.equal(got, want)
    assert bool(torch.isneginf(got[..., [2, 8]]).all())


def test_processors_see_the_prefix_of_their_position_and_nothing_later() -> None:
    seen: list[list[int]] = []

    def spy(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    penalise(torch.zeros(3, 3, 10), PREFIXES, DRAFTED, Sampling(), [spy])
    assert seen == [prefix + DRAFTED[row, :column].tolist() for row, prefix in enumerate(PREFIXES) for column in range(3)]


def test_penalty_ignores_prompt_tokens_past_the_vocabulary_as_transformers_does() -> None:
    """A prompt may hold ids of the target's embedding that the shared vocabulary leaves out."""
    logits = torch.randn(1, 1, 10, generator=torch.Generator().manual_seed(7))
    prefix = [4, 10, 25]
    got = penalise(logits, [prefix], torch.zeros(1, 0, dtype=torch.long), Sampling(repetition_penalty=2.0))
    want = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([prefix]), logits[0].clone())
    assert torch.equal(got[0], want)


def test_nothing_to_apply_returns_the_logits_themselves() -> None:
    logits = torch.zeros(3, 1, 10)
    assert penalise(logits, PREFIXES, DRAFTED, Sampling()) is logits


# --- draw ------------------------------------------------------------------------------------------------------------


WAYS = {
    "compiled": {},
    "at once": {"native.takes": lambda values: False},
    "by blocks": {"native.takes": lambda values: False, "_FEW": 0, "_BLOCK": 3},
}


@contextmanager
def drawn(way: str) -> Iterator[None]:
    """Draws of small vocabularies by the compiled code, where there is one, and by torch in both ways."""
    with ExitStack() as stack:
        for name, value in WAYS[way].items():
            stack.enter_context(mock.patch(f"lossyspec.sampling.{name}", value))
        yield


@pytest.fixture(params=WAYS)
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    with drawn(request.param):
        yield


@PROPERTY
@given(
    weights=st.lists(st.just(0.0) | st.floats(1e-30, 1e6, width=64), min_size=1, max_size=12).filter(any),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    uniform=st.sampled_from([0.0, 2.0**-24, *JUST_UNDER_1]) | st.floats(0, 1, exclude_max=True),
)
def test_case_8_draw_never_gives_a_token_of_weight_0(weights: Sequence[float], dtype: torch.dtype, uniform: float) -> None:
    row = torch.tensor([weights], dtype=dtype)
    for way in WAYS:
        with drawn(way):
            token = int(draw(row, torch.tensor([uniform], dtype=torch.float64)))
        assert 0 <= token < len(weights)
        assert row[0, token] > 0


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("uniform", [0.0, *JUST_UNDER_1, 1.0])
def test_case_8_ends_of_the_unit_interval_draw_the_first_and_the_last_possible_token(uniform: float) -> None:
    row = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0])
    token = int(draw(row, torch.tensor(uniform, dtype=torch.float64)))
    assert token == (2 if uniform == 0 else 4)


@pytest.mark.usefixtures("few")
def test_draw_takes_each_token_on_its_own_interval() -> None:
    weights = torch.tensor([0.1, 0.0, 0.25, 0.4, 0.25], dtype=torch.float64)
    steps = 10_000
    uniforms = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    tokens = draw(weights.expand(steps, -1), uniforms)
    assert torch.bincount(tokens, minlength=5).tolist() == [1000, 0, 2500, 4000, 2500]
    assert bool((tokens.diff() >= 0).all())


@pytest.mark.usefixtures("few")
def test_draw_follows_weights_that_do_not_sum_to_1() -> None:
    generator = torch.Generator().manual_seed(9)
    weights = torch.tensor([2.0, 0.0, 5.0, 1.0, 0.5, 3.5])
    tokens = draw(weights.expand(100_000, -1), torch.rand(100_000, generator=generator))
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[1] == 0
    some = weights > 0
    expected = (weights / weights.sum() * 100_000)[some].double()
    assert chisquare(counts[some].numpy(), (expected * (100_000 / expected.sum())).numpy()).pvalue > 1e-3


@pytest.mark.usefixtures("few")
def test_draw_gives_each_row_and_column_its_own_number() -> None:
    weights = torch.rand(4, 3, 7, generator=torch.Generator().manual_seed(10))
    uniforms = torch.rand(4, 3, generator=torch.Generator().manual_seed(11))
    together = draw(weights, uniforms)
    assert together.shape == (4, 3)
    alone = [[int(draw(weights[row, column], uniforms[row, column])) for column in range(3)] for row in range(4)]
    assert together.tolist() == alone


@pytest.mark.usefixtures("few")
def test_draw_reaches_the_last_token_of_a_large_vocabulary_and_loses_no_mass() -> None:
    size = 150_000
    weights = torch.full((size,), 1 / size)
    places = torch.tensor([0, 1, 75_000, size - 2, size - 1])
    uniforms = (places.double() + 0.5) / size
    assert draw(weights.expand(5, -1), uniforms).tolist() == places.tolist()


@pytest.mark.usefixtures("few")
def test_draw_sees_small_weights_behind_large_ones() -> None:
    """Summed up in fp32, 1 + 1e-8 is 1: the tail would never be drawn."""
    weights = torch.tensor([1.0, *[1e-8] * 100])
    total = float(weights.double().sum())
    uniforms = torch.tensor([(1 + (place + 0.5) * 1e-8) / total for place in (0, 50, 99)], dtype=torch.float64)
    assert draw(weights.expand(3, -1), uniforms).tolist() == [1, 51, 100]


@pytest.mark.usefixtures("few")
def test_a_row_without_any_weight_draws_what_is_no_token() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 2.0]])
    assert draw(weights, torch.tensor([0.3, 0.3])).tolist() == [5, 4]
