"""Laws against the dense rules: what replay makes of a trace is what `lossyspec.acceptance` says on full distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lossyspec.acceptance import accept_one_hot, emitted_law, entropy, greedy_accept, jensen_shannon, price, verify
from lossyspec.errors import ConfigurationError
from lossyspec.likelihood import dense_weights
from lossyspec.settings import RULES
from lossyspec.tuner.laws import BINS, SPAN, Answer, BinnedLaw, GreedyLaw, OneHotLaw, bin_masses

VOCAB = 3000
ALPHAS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
BINNED_RULES = tuple(rule for rule in RULES if rule != "typical")
#: (spread of the target's logits, noise of the draft's, sharpness of the draft): from near-equal to hardly overlapping
PAIRS = ((1.0, 0.5, 1.0), (3.0, 1.0, 1.0), (3.0, 1.0, 2.0), (4.0, 3.0, 1.0), (6.0, 6.0, 1.0))


@dataclass(frozen=True)
class Exact:
    """What the dense rules say: weights of the text's tokens, sum q a, and the distances of pi to p."""

    accepted: Tensor
    rejected: Tensor
    acceptance: Tensor
    tv: Tensor
    kl_forward: Tensor
    kl_reverse: Tensor


def xlogx(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > 0, x * (x.clamp_min(1e-320) / y).log(), 0.0).sum(-1)


def exact(p: Tensor, q: Tensor, text: Tensor, rule: str, alpha: Tensor) -> Exact:
    p, q = ((part.double() / part.double().sum(-1, keepdim=True)) for part in (p, q))
    shape = (1, len(text), 1)
    flags = torch.ones(shape, dtype=torch.bool)
    weights = dense_weights(p[None], q[None, :, None], text[None], rule, alpha[None], flags, flags[..., 0])
    pi = emitted_law(rule, p, q, alpha)
    return Exact(
        *(torch.from_numpy(part)[0, :, 0] for part in (weights.accepted, weights.rejected, weights.acceptance)),
        0.5 * (pi - p).abs().sum(-1),
        xlogx(p, pi),
        xlogx(pi, p),
    )


def level(alpha: float, like: Tensor) -> Tensor:
    return torch.full((len(like),), alpha, dtype=torch.float64)


def random_pair(
    spread: float, noise: float, sharp: float, count: int, seed: int, vocab: int = VOCAB
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 p and q (count, vocab), and text tokens drawn from p."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    other = logits + noise * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1).float(), (sharp * other).softmax(-1).float()
    return p, q, torch.multinomial(p, 1, generator=generator).squeeze(-1)


def binned(p: Tensor, q: Tensor, text: Tensor) -> BinnedLaw:
    pick = text.unsqueeze(-1)
    p_text, q_text = (part.gather(-1, pick).squeeze(-1).double() for part in (p, q))
    return BinnedLaw(*bin_masses(p, q), p_text, q_text, q.amax(-1).double())


def one_hot(p: Tensor, text: Tensor, drafted: Tensor) -> OneHotLaw:
    p_draft, p_text = (p.gather(-1, token.unsqueeze(-1)).squeeze(-1) for token in (drafted, text))
    return OneHotLaw(p_draft, p_text, entropy(p), drafted == text, torch.full_like(p_draft, 0.5))


def worst(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# one-hot drafts: exact


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_one_hot_law_is_the_dense_rule_to_1e_12(rule: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(int(10 * spread))
    p = (spread * torch.randn(24, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)
    drafted = torch.where(torch.arange(24) % 3 == 0, torch.multinomial(p, 1, generator=generator).squeeze(-1), p.argmax(-1))
    hits = torch.arange(24) % 2 == 0
    text = torch.where(hits, drafted, torch.multinomial(p, 1, generator=generator).squeeze(-1))
    q = torch.nn.functional.one_hot(drafted, VOCAB).double()
    law = one_hot(p, text, drafted)
    for alpha in ALPHAS:
        answer, wanted = law.answer(rule, level(alpha, text)), exact(p, q, text, rule, level(alpha, text))
        assert worst(answer.accepted, wanted.accepted) < 1e-12, alpha
        assert worst(answer.rejected, wanted.rejected) < 1e-12, alpha
        assert worst(answer.acceptance, wanted.acceptance) < 1e-12, alpha
        assert answer.tv is not None
        assert worst(answer.tv, wanted.tv) < 1e-12, alpha
        for mine, theirs in ((answer.kl_forward, wanted.kl_forward), (answer.kl_reverse, wanted.kl_reverse)):
            assert mine is not None
            assert torch.equal(mine.isinf(), theirs.isinf()), alpha
            finite = ~mine.isinf()
            assert not finite.any() or worst(mine[finite], theirs[finite]) < 1e-11, alpha


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_one_hot_law_sums_to_one_over_the_vocabulary(rule: str, alpha: float) -> None:
    p = (2 * torch.randn(1, 400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).softmax(-1)
    text, drafted = torch.arange(400), torch.full((400,), 7)
    answer = one_hot(p.expand(400, 400), text, drafted).answer(rule, level(alpha, text))
    assert float((answer.accepted + answer.rejected).sum()) == pytest.approx(1.0, abs=1e-12)


def test_one_hot_law_where_nothing_is_drafted_or_p_is_certain() -> None:
    law = OneHotLaw(
        p_draft=torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64),
        p_text=torch.tensor([0.4, 1.0, 0.0], dtype=torch.float64),
        entropy=torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        hit=torch.tensor([False, True, False]),
        confidence=torch.tensor([-1.0, 0.5, 0.5], dtype=torch.float64),
    )
    for rule in RULES:
        answer = law.answer(rule, torch.full((3,), 0.5, dtype=torch.float64))
        assert answer.acceptance.tolist() == [0.0, 1.0, 1.0]
        assert answer.accepted.tolist() == [0.0, 1.0, 0.0]
        assert answer.rejected.tolist() == [0.4, 0.0, 0.0]
        assert answer.tv is not None
        assert answer.tv.tolist() == [0.0, 0.0, 0.0]


# drafts with a full q: within half a bin


@pytest.mark.parametrize("rule", BINNED_RULES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_binned_law_is_the_dense_rule_within_its_tolerance(rule: str, pair: tuple[float, float, float]) -> None:
    p, q, text = random_pair(*pair, count=10, seed=11)
    law = binned(p, q, text)
    for alpha in ALPHAS:
        answer, wanted = law.answer(rule, level(alpha, text)), exact(p, q, text, rule, level(alpha, text))
        assert worst(answer.acceptance, wanted.acceptance) < 3e-4, alpha
        assert worst(answer.accepted, wanted.accepted) < 1e-4, alpha
        assert worst(answer.rejected, wanted.rejected) < 1e-4, alpha
        weight, wanted_weight = (part.accepted + part.rejected for part in (answer, wanted))
        seen = wanted_weight > 1e-5
        assert int(seen.sum()) >= 5
        assert worst(weight[seen].log(), wanted_weight[seen].log()) < 2e-3, alpha
        assert answer.tv is not None
        assert worst(answer.tv, wanted.tv) < 3e-4, alpha


@pytest.mark.parametrize("rule", BINNED_RULES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_binned_divergences_are_close_and_never_too_high(rule: str, pair: tuple[float, float, float]) -> None:
    p, q, text = random_pair(*pair, count=10, seed=11)
    law = binned(p, q, text)
    for alpha in ALPHAS:
        answer, wanted = law.answer(rule, level(alpha, text)), exact(p, q, text, rule, level(alpha, text))
        for mine, theirs in ((answer.kl_forward, wanted.kl_forward), (answer.kl_reverse, wanted.kl_reverse)):
            assert mine is not None
            assert bool((mine <= theirs + 3e-4).all()), alpha
            assert bool((mine >= 0.8 * theirs - 3e-4).all()), alpha
            # looser only where much of the mass lies beyond the outer bins
            assert rule in ("lenience", "fuzzy") or pair == PAIRS[-1] or worst(mine, theirs) < 3e-4, alpha


@pytest.mark.parametrize("rule", ["exact", "mixture", "optimal", "lenience", "priced"])
def test_binned_law_at_alpha_0_gives_the_texts_own_p(rule: str) -> None:
    p, q, text = random_pair(3.0, 2.0, 1.0, count=40, seed=5)
    law = binned(p, q, text)
    answer = law.answer(rule, level(0.0, text))
    tolerance = 1e-12 if rule in ("exact", "mixture") else 2e-3  # lossless settings replay as `exact`
    assert worst((answer.accepted + answer.rejected).log(), law.p_text.log()) < tolerance


@pytest.mark.parametrize("rule", ["mixture", "optimal", "lenience", "priced", "fuzzy"])
def test_binned_law_at_alpha_1_accepts_everything_and_emits_q(rule: str) -> None:
    p, q, text = random_pair(2.0, 1.0, 1.0, count=40, seed=6)
    law = binned(p, q, text)
    answer = law.answer(rule, level(1.0, text))
    assert worst(answer.acceptance, torch.ones(40).double()) < 1e-4
    assert worst((answer.accepted + answer.rejected).log(), law.q_text.log()) < 2e-3
    assert answer.tv is not None
    assert answer.kl_forward is not None
    assert worst(answer.tv, 0.5 * (p - q).abs().sum(-1).double()) < 1e-6
    assert worst(answer.kl_forward, xlogx(p.double(), q.double())) < 1e-4


@pytest.mark.parametrize("rule", BINNED_RULES)
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6, 0.95])
def test_binned_law_sums_to_one_over_the_vocabulary(rule: str, alpha: float) -> None:
    p, q, _ = random_pair(3.0, 1.5, 1.2, count=1, seed=7, vocab=1000)
    masses = [part.expand(1000, BINS) for part in bin_masses(p, q)]
    law = BinnedLaw(*masses, p[0].double(), q[0].double(), q.amax(-1).double().expand(1000))
    answer = law.answer(rule, torch.full((1000,), alpha, dtype=torch.float64))
    assert float((answer.accepted + answer.rejected).sum()) == pytest.approx(1.0, abs=3e-4)
    assert float(answer.accepted.sum()) == pytest.approx(float(answer.acceptance[0]), abs=3e-4)


@pytest.mark.parametrize("rule", ["mixture", "optimal"])
def test_alpha_is_the_waived_share_of_rejections_and_of_tv(rule: str) -> None:
    p, q, text = random_pair(3.0, 1.5, 1.0, count=20, seed=8)
    tv = 0.5 * (p.double() - q.double()).abs().sum(-1)
    for alpha in ALPHAS:
        answer = binned(p, q, text).answer(rule, level(alpha, text))
        assert answer.tv is not None
        assert worst(answer.acceptance, 1 - (1 - alpha) * tv) < 1e-4
        assert worst(answer.tv, alpha * tv) < 1e-4


@pytest.mark.parametrize("rule", ["mixture", "optimal", "priced"])
def test_the_certified_rules_never_give_a_token_less_than_its_share_of_p(rule: str) -> None:
    p, q, text = random_pair(4.0, 4.0, 1.0, count=40, seed=9)
    law = binned(p, q, text)
    for alpha in ALPHAS:
        answer = law.answer(rule, level(alpha, text))
        assert bool((answer.accepted + answer.rejected >= (1 - alpha) * law.p_text * (1 - 2e-3)).all()), alpha


def test_each_position_has_its_own_alpha() -> None:
    p, q, text = random_pair(3.0, 1.5, 1.0, count=len(ALPHAS), seed=10)
    mixed = binned(p, q, text).answer("optimal", torch.tensor(ALPHAS, dtype=torch.float64))
    for place, alpha in enumerate(ALPHAS):
        alone = binned(p, q, text).answer("optimal", level(alpha, text))
        assert float(mixed.acceptance[place]) == float(alone.acceptance[place])
        assert float(mixed.rejected[place]) == float(alone.rejected[place])


def test_the_fuzzy_rule_switches_where_the_divergence_is_at_its_limit() -> None:
    p, q, text = random_pair(3.0, 1.0, 1.0, count=6, seed=12)
    law, limits = binned(p, q, text), jensen_shannon(p.double(), q.double()) / math.log(2.0)
    for factor, accepts_all in ((0.999, False), (1.001, True)):
        answer = law.answer("fuzzy", factor * limits)
        assert bool((answer.acceptance > 1 - 1e-6).all()) is accepts_all


def test_typical_is_refused_for_a_sampling_draft_with_the_reason() -> None:
    p, q, text = random_pair(1.0, 1.0, 1.0, count=2, seed=13)
    with pytest.raises(ConfigurationError, match=r"'typical' cannot be replayed .* depends on p\(x\) alone, .*n-gram"):
        binned(p, q, text).answer("typical", level(0.5, text))


def test_tokens_that_one_side_excludes_are_kept_in_the_outer_bins() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.0, 0.75, 0.0]])
    p_mass, q_mass = bin_masses(p, q)
    assert (p_mass[0, 0], q_mass[0, 0]) == (0.0, 0.75)
    assert (p_mass[0, -1], q_mass[0, -1]) == (0.5, 0.0)
    assert (float(p_mass.sum()), float(q_mass.sum())) == (1.0, 1.0)
    inner = int((math.log(2.0) + SPAN) * BINS / (2 * SPAN))
    assert (p_mass[0, inner], q_mass[0, inner]) == (0.5, 0.25)


def test_case_8_a_token_that_the_target_excludes_is_never_accepted() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]]).expand(3, 3)
    q = torch.tensor([[0.2, 0.2, 0.6]]).expand(3, 3)
    text = torch.arange(3)
    for rule in ("exact", "optimal"):
        for alpha in (0.0, 0.5, 1.0):
            answer = binned(p, q, text).answer(rule, level(alpha, text))
            wanted = exact(p, q, text, rule, level(alpha, text))
            assert float(answer.accepted[2] + answer.rejected[2]) == 0.0
            assert worst(answer.acceptance, wanted.acceptance) < 1e-6
            assert worst(answer.accepted + answer.rejected, wanted.accepted + wanted.rejected) < 1e-6


# temperature 0


def test_greedy_law_accepts_what_the_decoder_accepts_and_counts_the_regret() -> None:
    generator = torch.Generator().manual_seed(14)
    p = (2 * torch.randn(200, 50, generator=generator, dtype=torch.float64)).softmax(-1)
    drafted = torch.where(torch.arange(200) % 2 == 0, p.argmax(-1), torch.multinomial(p, 1, generator=generator).squeeze(-1))
    best, index = p.max(-1)
    chosen = p.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    law = GreedyLaw(chosen, best, drafted == index, chosen)
    for alpha in (0.0, 0.3, 0.8, 1.0):
        answer = law.answer("optimal", level(alpha, drafted))
        kept = greedy_accept(p, drafted, level(alpha, drafted))
        assert torch.equal(answer.acceptance.bool(), kept)
        assert torch.equal(answer.accepted + answer.rejected, torch.ones(200).double())
        wanted = torch.where(kept, best.log() - chosen.log(), 0.0)
        assert worst(answer.regret, wanted) < 1e-12
        assert bool((answer.regret[kept] <= -math.log(max(1 - alpha, 1e-300)) + 1e-9).all())
        assert (answer.tv, answer.kl_forward, answer.kl_reverse) == (None, None, None)


def test_greedy_law_without_relaxation_has_no_regret() -> None:
    law = GreedyLaw(*(torch.tensor(part).double() for part in ([0.3, 0.5], [0.5, 0.5])), torch.tensor([False, True]), None)  # type: ignore[arg-type]
    for answer in (law.answer("optimal", torch.zeros(2)), law.answer("exact", torch.full((2,), 0.9))):
        assert answer.acceptance.tolist() == [0.0, 1.0]
        assert answer.regret.tolist() == [0.0, 0.0]
    relaxed: Answer = law.answer("optimal", torch.full((2,), 0.4).double())
    assert relaxed.acceptance.tolist() == [1.0, 1.0]
    assert relaxed.regret.tolist() == pytest.approx([math.log(0.5 / 0.3), 0.0])


# the closed forms that the laws stand on


def test_priced_keeps_one_price_at_every_position() -> None:
    p, q, text = random_pair(3.0, 1.0, 1.0, count=8, seed=15)
    for alpha in (0.1, 0.5, 0.8):
        lo, hi, _ = binned(p, q, text)._clip("priced", level(alpha, text))
        moving = (lo < 1) & (hi > 1)
        assert bool(moving.all())
        assert worst(hi - lo, price(level(alpha, text))) < 1e-9


def test_one_hot_acceptance_is_the_dense_acceptance_at_the_drafted_token() -> None:
    p = (2 * torch.randn(30, 60, generator=torch.Generator().manual_seed(16), dtype=torch.float64)).softmax(-1)
    drafted = torch.arange(30)
    q = torch.nn.functional.one_hot(drafted, 60).double()
    chosen = p.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    for rule in RULES:
        for alpha in np.linspace(0, 1, 11):
            dense = verify(rule, p, q, level(alpha, drafted)).accept.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
            assert worst(accept_one_hot(rule, chosen, entropy(p), level(alpha, drafted)), dense) < 1e-9, (rule, alpha)
