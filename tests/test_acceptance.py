"""Acceptance rules: the law that each emits, what each guarantees, and the corners where public implementations broke."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from lossyspec.acceptance import (
    accept_one_hot,
    clip_bounds,
    emitted_law,
    entropy,
    greedy_accept,
    jensen_shannon,
    price,
    priced_bounds,
    relaxed_variation,
    residual,
    total_variation,
    typical_threshold,
    verify,
)
from lossyspec.drafting import Proposal
from lossyspec.errors import ConfigurationError
from lossyspec.sampling import draw
from lossyspec.settings import RULES, Settings
from lossyspec.verification import judge

CLIPS = ("optimal", "priced")
CERTIFIED = ("mixture", "optimal", "priced")  # pi >= (1 - alpha) p
DRAWS = 100_000
PROPERTY = settings(max_examples=50, deadline=None, derandomize=True, database=None)

P = torch.tensor([0.36, 0.05, 0.22, 0.02, 0.15, 0.08, 0.12], dtype=torch.float64)
Q = torch.tensor([0.08, 0.31, 0.20, 0.09, 0.02, 0.05, 0.25], dtype=torch.float64)


class Pair(NamedTuple):
    """One row of p and of q, and alpha."""

    p: Tensor
    q: Tensor
    alpha: Tensor


ALPHAS = st.one_of(st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0]), st.floats(0.0, 1.0))


@st.composite
def pairs(draw_from: st.DrawFn, zeros: bool = True, reach: float = 60.0, dtype: torch.dtype = torch.float64) -> Pair:
    """Rows of 2 to 12 tokens with logits up to +-reach; with `zeros`, top-k-like holes anywhere but at one token of each."""
    size = draw_from(st.integers(2, 12))
    rows = []
    for _ in range(2):
        logits = torch.tensor(draw_from(st.lists(st.floats(-reach, reach), min_size=size, max_size=size)), dtype=dtype)
        if zeros:
            holes = torch.tensor(draw_from(st.lists(st.booleans(), min_size=size, max_size=size)))
            holes[draw_from(st.integers(0, size - 1))] = False
            logits = logits.masked_fill(holes, -torch.inf)
        rows.append(logits.softmax(-1))
    return Pair(rows[0], rows[1], torch.tensor(draw_from(ALPHAS), dtype=dtype))


def impossible(p: Tensor, q: Tensor) -> Tensor:
    """Draft mass on tokens that the target excludes."""
    return torch.where(p <= 0, q, 0.0).sum(-1)


def kept_share(rule: str, pair: Pair) -> Tensor:
    """sum q a: the share of drafted tokens that is accepted."""
    return (pair.q * verify(rule, *pair).accept).sum(-1)


def sides(pair: Pair, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """sum(q - p/lo)+ and sum(p/hi - q)+."""
    cap, under = bounds
    return (pair.q - cap * pair.p).clamp_min(0).sum(-1), (under * pair.p - pair.q).clamp_min(0).sum(-1)


def divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of each row."""
    return (torch.xlogy(left, left) - torch.xlogy(left, right)).sum(-1)


def first_tokens(rule: str, alpha: float, p: Tensor, q: Tensor | int, seed: int) -> Tensor:
    """The first token of DRAWS rounds that propose one token each, as the loop runs them: fp32, one generator.
    q: a law to draw from, or the token of a one-hot draft."""
    generator = torch.Generator().manual_seed(seed)
    after = torch.full_like(p, 1 / len(p))
    laws = torch.stack([p, after]).float().expand(DRAWS, 2, len(p))
    if isinstance(q, int):
        proposal = Proposal(torch.full((DRAWS, 1), q), [1] * DRAWS, None, 0)
    else:
        drafted = draw(q.float().expand(DRAWS, -1), torch.rand(DRAWS, generator=generator))
        proposal = Proposal(drafted[:, None], [1] * DRAWS, q.float().expand(DRAWS, 1, -1), 1)
    uniforms = torch.rand(DRAWS, 2, generator=generator)
    relaxation = torch.full((DRAWS, 1), alpha)
    accepted, following, _ = judge(laws, proposal, Settings(rule=rule, alpha=alpha), relaxation, uniforms, greedy=False)
    return torch.where(torch.tensor(accepted) == 1, proposal.tokens[:, 0], torch.tensor(following))


def assert_drawn_from(law: Tensor, tokens: Tensor) -> None:
    """Chi-square of the histogram of `tokens` against `law`; tokens of probability 0 must not occur at all."""
    counts = torch.bincount(tokens, minlength=len(law)).double()
    some = law > 1e-12
    assert counts[~some].sum() == 0
    expected = (law[some] / law[some].sum() * len(tokens)).numpy()
    if len(expected) > 1:
        assert chisquare(counts[some].numpy(), expected).pvalue > 1e-3


# --- what is emitted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_rounds_with_a_dense_draft_emit_the_closed_form(rule: str, alpha: float) -> None:
    law = emitted_law(rule, P, Q, torch.tensor(alpha, dtype=torch.float64))
    assert_drawn_from(law, first_tokens(rule, alpha, P, Q, seed=11))


@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("rule", RULES)
def test_rounds_with_a_one_hot_draft_emit_the_closed_form(rule: str, alpha: float, token: int) -> None:
    one_hot = torch.zeros_like(P)
    one_hot[token] = 1.0
    law = emitted_law(rule, P, one_hot, torch.tensor(alpha, dtype=torch.float64))
    assert_drawn_from(law, first_tokens(rule, alpha, P, token, seed=5))


@pytest.mark.parametrize("rule", RULES)
def test_rounds_never_emit_what_the_target_filters_out(rule: str) -> None:
    p = torch.where(P > 0.1, P, 0.0)
    p = p / p.sum()
    law = emitted_law(rule, p, Q, torch.tensor(0.8, dtype=torch.float64))
    assert_drawn_from(law, first_tokens(rule, 0.8, p, Q, seed=3))


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs())
def test_law_is_kept_mass_plus_rejected_mass_times_residual(rule: str, pair: Pair) -> None:
    verification = verify(rule, *pair)
    accept, rest = verification.accept, residual(pair.p, pair.q, verification)
    assert bool(((accept >= 0) & (accept <= 1)).all())
    assert rest.sum().item() == pytest.approx(1.0, abs=1e-12) and bool((rest >= 0).all())
    want = pair.q * accept + (1 - (pair.q * accept).sum()) * rest
    law = emitted_law(rule, *pair)
    torch.testing.assert_close(law, want, rtol=0, atol=1e-15)
    assert law.sum().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs())
def test_relaxed_variation_is_the_distance_of_the_emitted_law_from_p(rule: str, pair: Pair) -> None:
    p, q, _ = pair
    verification = verify(rule, *pair)
    distance = total_variation(emitted_law(rule, *pair), p)
    torch.testing.assert_close(relaxed_variation(rule, p, q, verification), distance, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs(), place=st.integers(0, 11))
def test_a_verdict_carries_the_variation_of_its_law(rule: str, pair: Pair, place: int) -> None:
    """For a dense and a one-hot draft; 0 at alpha 0, where the last row is."""
    p, q, alpha = pair.p.float(), pair.q.float(), pair.alpha.float()
    token = torch.tensor([[place % len(p)]])
    laws, alphas = p.expand(2, 2, -1), torch.stack([alpha, torch.zeros(())])[:, None]
    for dense in (True, False):
        proposal = Proposal(token.expand(2, 1), [1, 1], q.expand(2, 1, -1) if dense else None, 1)
        verdict = judge(
            laws, proposal, Settings(rule=rule, alpha=float(alpha)), alphas, torch.full((2, 2), 0.5), greedy=False
        )
        law, target, share = (q, p, alpha)
        if not dense:  # in fp64: the closed form has no factor that overflows for a subnormal p
            law, target, share = torch.nn.functional.one_hot(token[0, 0], len(p)).double(), p.double(), pair.alpha
        wanted = total_variation(emitted_law(rule, target, law, share), target).float()
        torch.testing.assert_close(verdict.variation[0, 0], wanted, rtol=0, atol=2e-6)
        assert abs(float(verdict.variation[1, 0])) < 2e-6


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs())
def test_alpha_0_is_exact_and_lossless(rule: str, pair: Pair) -> None:
    p, q, _ = pair
    zero = torch.zeros((), dtype=torch.float64)
    got, want = verify(rule, p, q, zero), verify("exact", p, q, zero)
    torch.testing.assert_close(got.accept * q, want.accept * q, rtol=0, atol=1e-12)
    torch.testing.assert_close(emitted_law(rule, p, q, zero), p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs())
def test_alpha_1_accepts_all_but_what_the_target_excludes(rule: str, pair: Pair) -> None:
    p, q, _ = pair
    pair = Pair(p, q, torch.ones((), dtype=torch.float64))
    if rule == "exact":
        torch.testing.assert_close(emitted_law(rule, *pair), p, rtol=0, atol=1e-12)
        return
    torch.testing.assert_close(kept_share(rule, pair), 1 - impossible(p, q), rtol=0, atol=1e-11)
    assert bool((verify(rule, *pair).accept[p <= 0] == 0).all())
    if float(impossible(p, q)) == 0:
        torch.testing.assert_close(emitted_law(rule, *pair), q, rtol=0, atol=1e-11)


def test_exact_ignores_alpha() -> None:
    for alpha in (0.0, 0.6, 1.0):
        torch.testing.assert_close(emitted_law("exact", P, Q, torch.tensor(alpha).double()), P, rtol=0, atol=1e-15)


# --- what each rule guarantees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["mixture", "optimal"])
@PROPERTY
@given(pair=pairs(zeros=False))
def test_alpha_is_the_waived_share_of_rejections(rule: str, pair: Pair) -> None:
    p, q, alpha = pair
    distance = total_variation(p, q)
    torch.testing.assert_close(total_variation(emitted_law(rule, *pair), p), alpha * distance, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept_share(rule, pair), 1 - (1 - alpha) * distance, rtol=0, atol=1e-12)


@PROPERTY
@given(pair=pairs(zeros=False))
def test_mixture_emits_the_mixture(pair: Pair) -> None:
    p, q, alpha = pair
    torch.testing.assert_close(emitted_law("mixture", *pair), (1 - alpha) * p + alpha * q, rtol=0, atol=1e-12)


@PROPERTY
@given(pair=pairs())
def test_optimal_never_moves_further_than_alpha_tv(pair: Pair) -> None:
    p, q, alpha = pair
    forced = torch.maximum((1 - alpha) * total_variation(p, q), impossible(p, q))
    law = emitted_law("optimal", *pair)
    torch.testing.assert_close(total_variation(law, p), total_variation(p, q) - forced, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept_share("optimal", pair), 1 - forced, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", CLIPS)
@PROPERTY
@given(pair=pairs())
def test_clip_rules_emit_q_clipped_into_the_band_around_p(rule: str, pair: Pair) -> None:
    cap, under = (clip_bounds if rule == "optimal" else priced_bounds)(*pair)
    assert float(cap) >= 1 - 1e-12 and 0 <= float(under) <= 1 + 1e-12
    clipped = torch.minimum(torch.maximum(pair.q, under * pair.p), cap * pair.p)
    torch.testing.assert_close(emitted_law(rule, *pair), clipped, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", CERTIFIED)
@PROPERTY
@given(pair=pairs())
def test_perplexity_certificate_holds(rule: str, pair: Pair) -> None:
    """pi >= (1 - alpha) p at every token: perplexity on any text is at most 1 / (1 - alpha) times the target's."""
    assert bool((emitted_law(rule, *pair) >= (1 - pair.alpha) * pair.p - 1e-13).all())


@PROPERTY
@given(pair=pairs(zeros=False))
def test_lenience_never_gives_a_token_more_than_p_over_1_minus_alpha(pair: Pair) -> None:
    p, q, alpha = pair
    strict = (1 - alpha).clamp_min(1e-300)
    law = emitted_law("lenience", *pair)
    over = q > p  # the residual adds to the others only
    assert bool((law[over] <= (p / strict)[over] + 1e-13).all())
    torch.testing.assert_close(law[over], torch.minimum(q, p / strict)[over], rtol=0, atol=1e-12)
    assert bool((law[~over] <= p[~over] + 1e-13).all() and (law[~over] >= q[~over] - 1e-13).all())


@PROPERTY
@given(pair=pairs())
def test_typical_is_a_threshold_on_p(pair: Pair) -> None:
    p, q, alpha = pair
    if float(alpha) == 0:
        return
    strict = 1 - float(alpha)
    surprise = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    threshold = min(strict**2, strict * math.exp(-surprise))
    near = (p - threshold).abs() < 1e-12
    accept = verify("typical", *pair).accept
    assert bool((accept == (p > threshold))[~near].all())
    law = emitted_law("typical", *pair)
    torch.testing.assert_close(law, q * accept + (1 - (q * accept).sum()) * p, rtol=0, atol=1e-12)


def test_typical_at_alpha_07_is_the_published_setting() -> None:
    flat, sure = torch.full((1, 8), 0.125), torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]])
    alpha = torch.tensor([0.7])
    assert typical_threshold(flat, alpha).item() == pytest.approx(0.3 / 8)
    assert typical_threshold(sure, alpha).item() == pytest.approx(0.09)
    assert entropy(flat).item() == pytest.approx(math.log(8)) and entropy(sure).item() == 0


@PROPERTY
@given(pair=pairs(zeros=False))
def test_fuzzy_takes_q_where_it_is_near_and_p_elsewhere(pair: Pair) -> None:
    p, q, alpha = pair
    distance, threshold = float(jensen_shannon(p, q)), float(alpha) * math.log(2.0)
    if float(alpha) == 0 or abs(distance - threshold) < 1e-12:
        return
    want = q if distance < threshold else p
    torch.testing.assert_close(emitted_law("fuzzy", *pair), want, rtol=0, atol=1e-12)


def alternatives(p: Tensor, q: Tensor, alpha: float, count: int, generator: torch.Generator) -> Tensor:
    """Laws between p and q with the same TV to p (alpha TV) and to q: random mixtures of random corners of that set."""
    gap, amount = p - q, (1 - alpha) * total_variation(p, q)
    corners = []
    for _ in range(4 * count):
        law = q.clone()
        for sign in (1, -1):
            left = amount.clone()
            for token in torch.randperm(len(p), generator=generator).tolist():
                step = torch.minimum((sign * gap[token]).clamp_min(0), left)
                law[token] += sign * step
                left -= step
        corners.append(law)
    shares = torch.rand(count, 4 * count, generator=generator, dtype=p.dtype) ** 8
    return (shares / shares.sum(-1, keepdim=True)) @ torch.stack(corners)


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_optimal_has_the_least_kl_both_ways_of_all_laws_with_its_acceptance(alpha: float) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        p, q = (3 * torch.randn(2, 6, generator=generator, dtype=torch.float64)).softmax(-1)
        best = emitted_law("optimal", p, q, torch.tensor(alpha).double())
        others = alternatives(p, q, alpha, 40, generator)
        torch.testing.assert_close(others.sum(-1), torch.ones(40).double())
        torch.testing.assert_close(total_variation(others, p), (alpha * total_variation(p, q)).expand(40))
        torch.testing.assert_close(total_variation(others, q), ((1 - alpha) * total_variation(p, q)).expand(40))
        assert bool((divergence(p.expand_as(others), others) >= divergence(p, best) - 1e-9).all())
        assert bool((divergence(others, p.expand_as(others)) >= divergence(best, p) - 1e-9).all())
        mixed = emitted_law("mixture", p, q, torch.tensor(alpha).double())
        assert float(divergence(p, best)) < float(divergence(p, mixed))


@PROPERTY
@given(pair=pairs(zeros=False))
def test_priced_pays_the_same_price_at_every_position(pair: Pair) -> None:
    if float(pair.alpha) > 0.99:
        return
    cap, under = priced_bounds(*pair)
    assert float(1 / under - 1 / cap) == pytest.approx(float(price(pair.alpha)), rel=1e-9, abs=1e-9)
    above, below = sides(pair, (cap, under))
    assert float(above) == pytest.approx(float(below), abs=1e-12)


@pytest.mark.parametrize("rule", CLIPS)
@PROPERTY
@given(pair=pairs())
def test_clip_rules_take_as_much_as_they_give_also_where_the_target_excludes_tokens(rule: str, pair: Pair) -> None:
    above, below = sides(pair, (clip_bounds if rule == "optimal" else priced_bounds)(*pair))
    assert float(above) == pytest.approx(float(below), abs=1e-12)
    assert float(below) >= float(impossible(pair.p, pair.q)) - 1e-12


def test_priced_wins_the_most_acceptance_for_its_total_kl() -> None:
    """Two positions: every other split of the same loss over them, by `optimal` at each, keeps fewer drafted tokens."""
    generator = torch.Generator().manual_seed(8)
    p, q = (2 * torch.randn(2, 2, 8, generator=generator, dtype=torch.float64)).softmax(-1)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    spent = divergence(p, emitted_law("priced", p, q, half)).sum()
    kept = (q * verify("priced", p, q, half).accept).sum()

    def loss(index: int, alphas: Tensor) -> Tensor:
        rows = (p[index].expand(len(alphas), -1), q[index].expand(len(alphas), -1))
        return divergence(rows[0], emitted_law("optimal", *rows, alphas))

    first = torch.linspace(0, 1, 101, dtype=torch.float64)
    budget = spent - loss(0, first)
    first, budget = first[budget >= 0], budget[budget >= 0]
    low, high = torch.zeros_like(first), torch.ones_like(first)
    for _ in range(50):  # the second position spends the rest of the budget
        middle = 0.5 * (low + high)
        over = loss(1, middle) > budget
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    distance = total_variation(p, q)
    totals = 2 - (1 - first) * distance[0] - (1 - low) * distance[1]
    assert len(first) > 10
    assert float(totals.max()) <= float(kept) + 1e-9
    assert float(totals.max()) == pytest.approx(float(kept), abs=1e-3)  # the grid comes near: the comparison is fair
    assert float(totals.min()) < float(kept) - 0.01


# --- one-hot drafts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs(), place=st.integers(0, 11))
def test_one_hot_closed_form_is_the_dense_rule_on_a_one_hot_q(rule: str, pair: Pair, place: int) -> None:
    p, _, alpha = pair
    token = place % len(p)
    one_hot = torch.zeros_like(p)
    one_hot[token] = 1.0
    chosen, surprise = p[token], entropy(p)
    borders = {  # a threshold hit to rounding may fall on either side
        "typical": (chosen, typical_threshold(p, alpha)),
        "fuzzy": (jensen_shannon(p, one_hot), alpha * math.log(2.0)),
    }
    if rule in borders and abs(float(borders[rule][0] - borders[rule][1])) < 1e-12 < float(1 - alpha):
        return
    verification = verify(rule, p, one_hot, alpha)
    got = accept_one_hot(rule, chosen, surprise, alpha)
    assert float(got) == pytest.approx(float(verification.accept[token]), abs=1e-10)
    if float(got) < 1 - 1e-9:  # what the one-hot path draws from after a rejection
        others = p.clone()
        others[token] = 0.0
        want = p if rule == "typical" and float(alpha) > 0 else others / others.sum()
        torch.testing.assert_close(residual(p, one_hot, verification), want, rtol=0, atol=1e-9)


def test_one_hot_priced_of_a_token_the_target_all_but_excludes() -> None:
    """a = p/lo with lo of the size of p; kappa = 7/3 keeps 1 - 1/kappa. A floor under the divisor once gave 0.25."""
    tiny, alpha = torch.tensor(2.5e-46, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    assert accept_one_hot("priced", tiny, None, alpha).item() == pytest.approx(4 / 7, abs=1e-9)


def test_one_hot_typical_asks_for_the_entropy() -> None:
    with pytest.raises(ValueError, match="target_entropy"):
        accept_one_hot("typical", torch.tensor([0.2]), None, torch.tensor([0.5]))


# --- corners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(pair=pairs(reach=40.0, dtype=torch.float32))
def test_case_8_what_the_target_excludes_has_chance_exactly_0(rule: str, pair: Pair) -> None:
    """Exactly: with `uniform < chance`, not even uniform = 0 accepts it."""
    p, _, alpha = pair
    assert bool((verify(rule, *pair).accept[p <= 0] == 0).all())
    one_hot = accept_one_hot(rule, p, entropy(p).expand_as(p), alpha.expand_as(p))
    assert bool((one_hot[p <= 0] == 0).all())
    assert bool((emitted_law(rule, *pair)[p <= 0] == 0).all())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_case_10_residual_of_equal_laws_falls_back_to_p(rule: str, alpha: float) -> None:
    p = torch.stack([P, Q])
    relaxation = torch.full((2,), alpha, dtype=torch.float64)
    rest = residual(p, p, verify(rule, p, p, relaxation))
    torch.testing.assert_close(rest, p, rtol=0, atol=1e-15)
    if rule != "typical":  # which judges p(x) alone, and so is lossy even with a perfect draft
        torch.testing.assert_close(emitted_law(rule, p, p, relaxation), p, rtol=0, atol=1e-15)


@PROPERTY
@given(pair=pairs())
def test_case_24_jensen_shannon_is_symmetric_and_bounded(pair: Pair) -> None:
    p, q, _ = pair
    forth, back = float(jensen_shannon(p, q)), float(jensen_shannon(q, p))
    assert forth == pytest.approx(back, abs=1e-14)
    assert 0.0 <= forth <= math.log(2.0)
    middle = 0.5 * (p + q)
    want = 0.5 * float(divergence(p, middle) + divergence(q, middle))
    assert forth == pytest.approx(want, abs=1e-12)


def test_case_24_jensen_shannon_of_disjoint_laws_is_ln_2_and_of_equal_laws_0() -> None:
    left, right = torch.tensor([0.3, 0.7, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.9, 0.1])
    assert jensen_shannon(left, right).item() == pytest.approx(math.log(2.0))
    assert jensen_shannon(left, left).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_subnormal_probabilities_give_no_nan_and_stay_inside_the_certificate(rule: str, dtype: torch.dtype) -> None:
    """q/p overflows there: a factor of infinity times p = 0 was NaN, and a residual under 1e-45 did not sum to 1."""
    least = -100.0 if dtype == torch.float32 else -735.0
    logits_p = torch.tensor([[0.0, least, -torch.inf], [0.0, least, -5.0], [least, 0.0, least]], dtype=dtype)
    logits_q = torch.tensor([[least, 0.0, -3.0], [least, 0.0, least], [0.0, -torch.inf, -1.0]], dtype=dtype)
    p, q = logits_p.softmax(-1), logits_q.softmax(-1)
    assert 0 < float(p[0, 1]) < torch.finfo(dtype).tiny
    for alpha in (0.0, 0.5, 0.7, 0.9, 0.999, 1.0):
        relaxation = torch.full((3,), alpha, dtype=dtype)
        verification = verify(rule, p, q, relaxation)
        assert bool(((verification.accept >= 0) & (verification.accept <= 1)).all())
        law = emitted_law(rule, p, q, relaxation)
        torch.testing.assert_close(law.sum(-1), torch.ones(3, dtype=dtype))
        assert bool((law[p <= 0] == 0).all())
        if rule in CERTIFIED:
            assert bool((law >= (1 - alpha) * p - 1e-6).all())


def test_priced_of_probabilities_near_the_smallest_double_keeps_its_certificate() -> None:
    """The bracket of lo spans hundreds of nats: the product of its ends underflowed, and lo with it."""
    p = torch.tensor([[2.88e-306, 1.0], [1.0, 4.1e-303], [6.2e-303, 1.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 9.3e-225], [8.1e-53, 1.0], [1.0, 2.3e-131]], dtype=torch.float64)
    for alpha in (0.5, 0.7, 0.9, 0.999):
        law = emitted_law("priced", p, q, torch.full((3,), alpha, dtype=torch.float64))
        torch.testing.assert_close(law.sum(-1), torch.ones(3, dtype=torch.float64))
        assert bool((law >= (1 - alpha) * p - 1e-13).all())


def test_many_rows_at_once_are_each_row_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = (3 * torch.randn(2, 5, 3, 20, generator=generator, dtype=torch.float64)).softmax(-1)
    alpha = torch.rand(5, 3, generator=generator, dtype=torch.float64)
    alpha[0] = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    for rule in RULES:
        together = emitted_law(rule, p, q, alpha)
        for row in range(5):
            for column in range(3):
                alone = emitted_law(rule, p[row, column], q[row, column], alpha[row, column])
                torch.testing.assert_close(together[row, column], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_fp32_law_of_a_large_vocabulary_is_the_fp64_one(rule: str) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = 4 * torch.randn(2, 4, 20_000, generator=generator, dtype=torch.float64)
    logits[1] = logits[0] + 0.7 * torch.randn(4, 20_000, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1)
    alpha = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    fine, coarse = emitted_law(rule, p, q, alpha), emitted_law(rule, p.float(), q.float(), alpha.float())
    assert float((fine - coarse).abs().sum(-1).max()) < 2e-5


def test_unknown_rule_is_refused_with_the_nearest_name() -> None:
    row, alpha = torch.tensor([0.5, 0.5]), torch.tensor(0.1)
    with pytest.raises(ConfigurationError, match=r"'optimla'.*allowed: exact, .*Did you mean 'optimal'"):
        verify("optimla", row, row, alpha)
    with pytest.raises(ConfigurationError, match="Did you mean 'mixture'"):
        accept_one_hot("mixtur", row, None, alpha)
    with pytest.raises(ConfigurationError) as caught:
        verify("1234", row, row, alpha)
    assert "Did you mean" not in str(caught.value)


# --- temperature 0 ---------------------------------------------------------------------------------------------------


def greedy(p: list[float], alpha: float) -> list[bool]:
    """What greedy decoding accepts, token by token."""
    tokens = torch.arange(len(p))
    return greedy_accept(torch.tensor(p).expand(len(p), -1), tokens, torch.full((len(p),), alpha)).tolist()


def test_greedy_accepts_the_argmax_and_what_is_within_alpha_of_it() -> None:
    assert greedy([0.5, 0.3, 0.2, 0.0], 0.0) == [True, False, False, False]
    assert greedy([0.5, 0.3, 0.2, 0.0], 0.39) == [True, False, False, False]
    assert greedy([0.5, 0.3, 0.2, 0.0], 0.41) == [True, True, False, False]
    assert greedy([0.5, 0.3, 0.2, 0.0], 0.61) == [True, True, True, False]
    assert greedy([0.5, 0.3, 0.2, 0.0], 1.0) == [True, True, True, False]


def test_greedy_tie_at_alpha_0_is_the_choice_of_plain_greedy_alone() -> None:
    tie = [0.1, 0.4, 0.4, 0.1]
    first = int(torch.tensor(tie).argmax())
    assert greedy(tie, 0.0) == [token == first for token in range(4)]
    assert greedy(tie, 1e-6) == [False, True, True, False]


@PROPERTY
@given(pair=pairs(dtype=torch.float32, reach=40.0))
def test_greedy_regret_is_bounded_by_alpha(pair: Pair) -> None:
    """An accepted token costs at most -log(1 - alpha) nats against the target's choice."""
    p, _, alpha = pair
    if float(alpha) > 0.9999:
        return
    tokens = torch.arange(len(p))
    accepted = greedy_accept(p.expand(len(p), -1), tokens, alpha.expand(len(p)))
    assert bool(accepted[p.argmax()])
    assert bool((p.max().log() - p[accepted].log() <= -torch.log(1 - alpha) + 1e-5).all())
    assert not bool(accepted[(p < (1 - alpha) * p.max() * (1 - 1e-5)) & (tokens != p.argmax())].any())
