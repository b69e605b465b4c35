"""Exact likelihood of the decoder, against all texts, against whole blocks by the definition, and against the real loop.

Everything runs on tables: p and q of each prefix over 3 tokens, texts of 5 tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from lossyspec.acceptance import emitted_law, residual, total_variation, verify
from lossyspec.decoding import Job, decode
from lossyspec.drafting import Draft, ModelDraft, Proposal, Request
from lossyspec.likelihood import Recursion, StepWeights, bootstrap_ratio, dense_weights, forward
from lossyspec.runner import Runner
from lossyspec.sampling import draw, probabilities
from lossyspec.settings import RULES, Sampling, Settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping

V, T = 3, 5
Text = tuple[int, ...]
TEXTS: list[Text] = list(itertools.product(range(V), repeat=T))
LONGEST = T + 3  # blocks may reach past the text
THETA = 0.55  # stops the draft at some prefixes and not at others, see `Tables`


def code(prefix: Text) -> int:
    """Row of a prefix in the tables: the number of prefixes before it."""
    number = 0
    for token in prefix:
        number = number * V + token + 1
    return number


PREFIXES: list[Text] = [text for size in range(LONGEST) for text in itertools.product(range(V), repeat=size)]
assert all(code(prefix) == row for row, prefix in enumerate(PREFIXES))


@dataclass(frozen=True)
class Tables:
    """p: (rows, V) and q: (rows, D, V) of each prefix, fp64. D > 1: the draft says something else at each depth."""

    p: Tensor
    q: Tensor

    @staticmethod
    def random(seed: int, depths: int = 1) -> Tables:
        generator = torch.Generator().manual_seed(seed)
        rows = len(PREFIXES)
        p = torch.randn(rows, V, generator=generator, dtype=torch.float64).softmax(-1)
        q = torch.randn(rows, depths, V, generator=generator, dtype=torch.float64).softmax(-1)
        return Tables(p, q)

    def law(self, prefix: Text, depth: int) -> Tensor:
        return self.q[code(prefix), min(depth, self.q.shape[1] - 1)]


def recursion(
    tables: Tables, rule: str, alpha: float, theta: float, draft_length: int, room: bool = False
) -> tuple[Recursion, StepWeights]:
    """The recursion over all texts. room: a round leaves room for the token after it, as in the loop."""
    rows = torch.tensor([[code(text[:place]) for place in range(T)] for text in TEXTS])
    q = tables.q[rows]
    draftable = q.amax(-1) >= theta
    if room:
        draftable[:, -1] = False
    weights = dense_weights(
        tables.p[rows],
        q,
        torch.tensor(TEXTS),
        rule,
        torch.full(rows.shape, alpha, dtype=torch.float64),
        draftable,
        torch.ones_like(rows, dtype=torch.bool),
    )
    return forward(weights, draft_length), weights


@dataclass
class Outcome:
    """Probabilities of all texts, expected rounds and accepted tokens inside the text."""

    law: dict[Text, float]
    rounds: float
    accepted: float


def by_whole_blocks(tables: Tables, rule: str, alpha: float, theta: float, draft_length: int) -> Outcome:
    """The process by its definition: draft a whole chain, judge it, emit a block, begin again. No states, no recursion."""
    depths = tables.q.shape[1]
    p = tables.p[:, None].expand(-1, depths, -1)
    verification = verify(rule, p, tables.q, torch.full((len(PREFIXES), depths), alpha, dtype=torch.float64))
    accept, rest = verification.accept.tolist(), residual(p, tables.q, verification).tolist()
    p_rows, q_rows = tables.p.tolist(), tables.q.tolist()
    mass: dict[Text, float] = {(): 1.0}
    outcome = Outcome({}, 0.0, 0.0)

    def emit(block: Text, chance: float, kept: int, start: Text) -> None:
        if chance:
            outcome.accepted += chance * min(kept, T - len(start))
            text = (start + block)[:T]
            into = outcome.law if len(text) == T else mass
            into[text] = into.get(text, 0.0) + chance

    def judged(start: Text, chain: Text, chance: float) -> None:
        for place, token in enumerate(chain):
            row, depth = code(start + chain[:place]), min(place, depths - 1)
            yes = accept[row][depth][token]
            for after in range(V):
                emit((*chain[:place], after), chance * (1 - yes) * rest[row][depth][after], place, start)
            chance *= yes
        for after in range(V):
            emit((*chain, after), chance * p_rows[code(start + chain)][after], len(chain), start)

    def drafted(start: Text, chain: Text, chance: float) -> None:
        q = q_rows[code(start + chain)][min(len(chain), depths - 1)] if len(chain) < draft_length else [0.0]
        if len(chain) < draft_length and max(q) >= theta:
            for token in range(V):
                drafted(start, (*chain, token), chance * q[token])
        else:
            judged(start, chain, chance)

    for start in PREFIXES:  # shorter ones first
        if len(start) < T and start in mass:
            outcome.rounds += mass[start]
            drafted(start, (), mass[start])
    return outcome


# --- the real loop on tables -----------------------------------------------------------------------------------------


class TableRunner(Runner):
    """A model that looks its logits up. Each prompt is one token, which says nothing."""

    def __init__(self, laws: Tensor) -> None:
        self.position_limit = None
        self.logs = laws.log().float()
        self.vocab_size = laws.shape[-1]
        self.device = torch.device("cpu")
        self.tokens = torch.zeros(0, 0, dtype=torch.long)
        self.features = None

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.long)

    def select(self, rows: list[int]) -> None:
        self.tokens = self.tokens[rows]

    def logits(self, tokens: Tensor, starts: list[int], attention: Any = None) -> Tensor:
        first, width = torch.tensor(starts), tokens.shape[1]
        rows = torch.arange(len(starts))
        for column in range(width):
            self.tokens[rows, first + column] = tokens[:, column]
        places = torch.arange(1, int(first.max()) + width)
        numbers = torch.zeros(len(starts), int(first.max()) + width, dtype=torch.long)
        for place in places.tolist():  # slot 0 is the prompt's
            numbers[:, place] = numbers[:, place - 1] * V + self.tokens[:, place] + 1
        wanted = numbers.gather(1, first[:, None] + torch.arange(width))
        return self.logs[wanted % len(self.logs)]  # what pads a row may read past the tables


class DepthDraft:
    """A draft whose q depends on how deep in the round it is, behind the interface of `Draft`."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        pass

    def read(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, request: Request) -> Proposal:
        rows, width = len(request.prefixes), max(request.limits)
        numbers = torch.tensor([code(tuple(prefix[1:])) for prefix in request.prefixes])
        going, lengths = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
        tokens, laws = [], []
        for depth in range(width):
            q = self.tables.q[numbers % len(PREFIXES), depth]
            going &= (q.amax(-1) >= request.settings.theta) & (torch.tensor(request.limits) > depth)
            lengths += going
            tokens.append(draw(q, torch.rand(rows, generator=request.choices[0].generator)))
            laws.append(q.float())
            numbers = numbers * V + tokens[-1] + 1
        return Proposal(torch.stack(tokens, 1), lengths.tolist(), torch.stack(laws, 1), width)


@dataclass
class Simulation:
    """Texts of the real loop, and rounds and accepted tokens a text, chunk by chunk."""

    texts: Counter[Text]
    rounds: list[float]
    accepted: list[float]


def simulate(tables: Tables, settings: Settings, seed: int, chunks: int = 20, rows: int = 1000) -> Simulation:
    """Runs `decode`, with the real `ModelDraft` where q does not depend on the depth."""
    draft: Draft = DepthDraft(tables)
    if tables.q.shape[1] == 1:
        draft = ModelDraft(TableRunner(tables.q[:, 0]), V)
    generator = torch.Generator().manual_seed(seed)
    result = Simulation(Counter(), [], [])
    for _ in range(chunks):
        stats = Stats()
        job = Job(settings, Sampling(), Stopping(T), generator)
        *_, done = decode(TableRunner(tables.p), draft, [[0]] * rows, job, stats)
        result.texts.update(tuple(row.output) for row in done)
        result.rounds.append(stats.rounds / rows)
        result.accepted.append(stats.accepted / rows)
    return result


def assert_texts_follow(law: list[float], seen: Counter[Text]) -> None:
    """Chi-square over all texts, the rare ones counted together; impossible ones must not occur at all."""
    total = sum(seen.values())
    expected = np.array(law) * total
    observed = np.array([seen[text] for text in TEXTS], dtype=float)
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    assert chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue > 1e-3


def assert_mean(values: list[float], expected: float) -> None:
    """The mean of the chunks is within 4.5 standard errors of `expected`, which is small enough to mean something."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert error < 0.02
    assert abs(float(np.mean(values)) - expected) < 4.5 * error + 1e-9


# --- likelihood ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depths", [1, 4])
@pytest.mark.parametrize("theta", [0.0, THETA])
@pytest.mark.parametrize("draft_length", [0, 1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_likelihoods_of_all_texts_sum_to_1(rule: str, draft_length: int, theta: float, depths: int) -> None:
    tables = Tables.random(1, depths)
    for alpha in (0.0, 0.5, 1.0):
        result, weights = recursion(tables, rule, alpha, theta, draft_length)
        assert 0.1 < weights.draftable.mean() < 0.9 or theta == 0.0
        assert np.exp(result.log_likelihood).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("theta", [0.0, THETA])
@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_recursion_is_the_block_process(rule: str, draft_length: int, theta: float, depths: int) -> None:
    """Likelihood of every text, expected rounds and expected accepted tokens, to 1e-12."""
    tables, alpha = Tables.random(2, depths), 0.45
    result, weights = recursion(tables, rule, alpha, theta, draft_length)
    outcome = by_whole_blocks(tables, rule, alpha, theta, draft_length)
    law = np.exp(result.log_likelihood)
    np.testing.assert_allclose(law, [outcome.law[text] for text in TEXTS], rtol=0, atol=1e-12)
    assert law @ result.rounds == pytest.approx(outcome.rounds, abs=1e-12)
    assert law @ result.accepted == pytest.approx(outcome.accepted, abs=1e-12)
    assert law @ result.starts.sum(1) == pytest.approx(outcome.rounds, abs=1e-12)
    if depths == 1:
        drafted_and_kept = (result.drafted * weights.acceptance[..., 0]).sum(1)
        assert law @ drafted_and_kept == pytest.approx(outcome.accepted, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "alpha", "draft_length", "theta"),
    [("exact", 0.0, 3, THETA), ("mixture", 0.6, 3, 0.0), ("optimal", 0.5, 2, THETA), ("priced", 0.5, 4, THETA),
     ("lenience", 0.4, 1, 0.0), ("typical", 0.7, 3, THETA), ("fuzzy", 0.1, 3, 0.0)],
)  # fmt: skip
def test_real_loop_emits_the_likelihoods(rule: str, alpha: float, draft_length: int, theta: float) -> None:
    tables = Tables.random(3)
    settings = Settings(rule=rule, alpha=alpha, draft_length=draft_length, theta=theta)
    result, _ = recursion(tables, rule, alpha, theta, draft_length, room=True)
    law = np.exp(result.log_likelihood)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    seen = simulate(tables, settings, seed=31)
    assert_texts_follow(law.tolist(), seen.texts)
    assert_mean(seen.rounds, float(law @ result.rounds))
    assert_mean(seen.accepted, float(law @ result.accepted))


@pytest.mark.parametrize("theta", [0.0, THETA])
def test_real_loop_emits_the_likelihoods_with_a_draft_that_depends_on_its_depth(theta: float) -> None:
    tables = Tables.random(4, depths=3)
    result, _ = recursion(tables, "optimal", 0.6, theta, 3, room=True)
    law = np.exp(result.log_likelihood)
    seen = simulate(tables, Settings(rule="optimal", alpha=0.6, draft_length=3, theta=theta), seed=32)
    assert_texts_follow(law.tolist(), seen.texts)
    assert_mean(seen.rounds, float(law @ result.rounds))
    assert_mean(seen.accepted, float(law @ result.accepted))
    shallow, _ = recursion(Tables(tables.p, tables.q[:, :1]), "optimal", 0.6, theta, 3, room=True)
    assert float(np.abs(np.exp(shallow.log_likelihood) - law).sum()) > 0.05  # the depth really matters here


def test_real_loop_with_tau_draws_from_the_tempered_draft() -> None:
    tables = Tables.random(5)
    cold = Tables(tables.p, probabilities(tables.q.log(), Sampling(), 0.4))
    result, _ = recursion(cold, "optimal", 0.7, THETA, 3, room=True)
    settings = Settings(rule="optimal", alpha=0.7, draft_length=3, theta=THETA, tau=0.4)
    seen = simulate(tables, settings, seed=33)
    assert_texts_follow(np.exp(result.log_likelihood).tolist(), seen.texts)
    assert_mean(seen.rounds, float(np.exp(result.log_likelihood) @ result.rounds))


@pytest.mark.parametrize("depths", [1, 4])
@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_alpha_0_gives_the_targets_own_likelihood(rule: str, draft_length: int, depths: int) -> None:
    tables = Tables.random(6, depths)
    result, weights = recursion(tables, rule, 0.0, THETA, draft_length)
    np.testing.assert_allclose(result.log_likelihood, np.log(weights.plain).sum(1), rtol=0, atol=1e-12)


def test_draft_length_0_is_the_target_under_any_rule_and_alpha() -> None:
    result, weights = recursion(Tables.random(7), "mixture", 1.0, 0.0, 0)
    np.testing.assert_allclose(result.log_likelihood, np.log(weights.plain).sum(1), rtol=0, atol=1e-14)
    assert (result.rounds == T).all() and (result.accepted == 0).all()
    assert (result.starts == 1).all() and (result.drafted == 0).all()


def test_draft_that_is_the_target_is_accepted_whole() -> None:
    tables = Tables.random(8)
    perfect = Tables(tables.p, tables.p[:, None])
    result, weights = recursion(perfect, "exact", 0.0, 0.0, 4)
    np.testing.assert_allclose(result.log_likelihood, np.log(weights.plain).sum(1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.accepted, 4, atol=1e-12)
    np.testing.assert_allclose(result.rounds, 1, atol=1e-12)


def test_texts_of_unequal_length_are_each_as_if_alone() -> None:
    _, weights = recursion(Tables.random(9), "optimal", 0.5, THETA, 3)
    lengths = np.array([1 + index % T for index in range(len(TEXTS))])
    mask = np.arange(T) < lengths[:, None]
    noise = np.random.default_rng(0).random(weights.plain.shape)
    padded = StepWeights(
        np.where(mask[..., None], weights.accepted, noise[..., None]),
        np.where(mask[..., None], weights.rejected, noise[..., None]),
        np.where(mask[..., None], weights.acceptance, noise[..., None]),
        weights.draftable,
        np.where(mask, weights.plain, noise),
        mask,
    )
    together = forward(padded, 3)
    for index in (0, 1, 2, 3, 4, 77, 200):
        own, size = slice(index, index + 1), int(lengths[index])
        alone = forward(
            StepWeights(
                weights.accepted[own, :size],
                weights.rejected[own, :size],
                weights.acceptance[own, :size],
                weights.draftable[own, :size],
                weights.plain[own, :size],
                np.ones((1, size), dtype=bool),
            ),
            3,
        )
        assert together.log_likelihood[index] == pytest.approx(alone.log_likelihood[0], abs=1e-14)
        assert together.rounds[index] == pytest.approx(alone.rounds[0], abs=1e-14)
        assert together.accepted[index] == pytest.approx(alone.accepted[0], abs=1e-14)
        assert (together.starts[index, size:] == 0).all() and (together.drafted[index, size:] == 0).all()


def test_impossible_text_has_likelihood_0_and_leaves_the_counts_finite() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(2, T, -1)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(2, T, 1, -1)
    tokens = torch.tensor([[0, 1, 0, 1, 0], [0, 2, 0, 1, 0]])
    everywhere = torch.ones(2, T, dtype=torch.bool)
    for rule in RULES:
        alpha = torch.full((2, T), 0.5, dtype=torch.float64)
        result = forward(dense_weights(p, q, tokens, rule, alpha, everywhere[..., None], everywhere), 2)
        assert math.isfinite(result.log_likelihood[0]) and result.log_likelihood[1] == -math.inf
        assert np.isfinite(result.rounds).all() and np.isfinite(result.accepted).all()


@pytest.mark.parametrize("rule", RULES)
def test_every_drafted_position_emits_the_closed_form_law(rule: str) -> None:
    """With room for one drafted token a round, the first position's likelihood is pi."""
    tables = Tables.random(10)
    result, _ = recursion(tables, rule, 0.5, 0.0, 1)
    first = np.array([text[0] for text in TEXTS])
    law = np.exp(result.log_likelihood)
    got = [law[first == token].sum() for token in range(V)]
    want = emitted_law(rule, tables.p[0], tables.q[0, 0], torch.tensor(0.5).double())
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-12)


# --- traps -----------------------------------------------------------------------------------------------------------


def test_theta_looks_at_the_prefix_and_never_at_the_drafted_token() -> None:
    """q = (.6,.4), p = (.5,.5): dropping a drafted token because of its own q(x) < .5 would emit (.7,.3)."""
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.6, 0.4, 0.0]).double()
    tables = Tables(p.expand(len(PREFIXES), -1), q.expand(len(PREFIXES), 1, -1))
    for theta, drafts in ((0.5, True), (0.61, False)):
        seen = simulate(tables, Settings(rule="exact", draft_length=2, theta=theta), seed=34, chunks=5)
        assert (sum(seen.accepted) > 0) == drafts
        for place in range(T):
            counts = Counter[int]()
            for text, count in seen.texts.items():
                counts[text[place]] += count
            assert counts[2] == 0
            assert chisquare([counts[0], counts[1]]).pvalue > 1e-3
        assert_texts_follow([0.5**T * (2 not in text) for text in TEXTS], seen.texts)


def cold_pair() -> Tables:
    """A target, and a draft that knows it well but not quite."""
    generator = torch.Generator().manual_seed(12)
    rows = len(PREFIXES)
    logits = 1.2 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    noisy = logits + 0.3 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    return Tables(logits.softmax(-1), noisy.softmax(-1)[:, None])


def test_case_Q9_cold_draft_is_ranked_worse_than_lossless_though_its_own_text_looks_better() -> None:
    tables = cold_pair()
    cold = Tables(tables.p, probabilities(tables.q.log(), Sampling(), 0.3))
    lossless, weights = recursion(tables, "exact", 0.0, 0.0, 3)
    lossy, _ = recursion(cold, "mixture", 0.6, 0.0, 3)
    target = np.log(weights.plain).sum(1)

    def perplexity(law: np.ndarray, judged_by: np.ndarray) -> float:
        return math.exp(-float(np.exp(law) @ judged_by) / T)

    # perplexity of generated text under the target: the lossy decoder looks better
    assert perplexity(lossy.log_likelihood, target) < 0.95 * perplexity(lossless.log_likelihood, target)
    # perplexity of the decoder on text of the target: it is worse, inside the certificate
    ratio = perplexity(target, lossy.log_likelihood) / perplexity(target, target)
    assert 1.05 < ratio <= 1 / (1 - 0.6)
    assert perplexity(target, lossless.log_likelihood) / perplexity(target, target) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", ["mixture", "optimal", "priced"])
def test_certificate_holds_on_every_text(rule: str) -> None:
    """Perplexity is at most 1 / (1 - alpha) times the target's on ANY text: (1 - alpha)^T bounds the likelihood ratio."""
    tables = Tables.random(13)
    for alpha in (0.1, 0.5, 0.9):
        result, weights = recursion(tables, rule, alpha, 0.0, 4)
        worst = (np.log(weights.plain).sum(1) - result.log_likelihood).max()
        assert 0 < worst <= -T * math.log(1 - alpha) + 1e-12


def test_more_alpha_costs_more_and_accepts_more() -> None:
    tables = Tables.random(14)
    ratios, kept = [], []
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        result, weights = recursion(tables, "optimal", alpha, 0.0, 3)
        target = np.log(weights.plain).sum(1)
        ratios.append(float(np.exp(target) @ (target - result.log_likelihood)))
        kept.append(float(np.exp(result.log_likelihood) @ result.accepted))
    assert ratios == sorted(ratios) and kept == sorted(kept)
    assert ratios[0] == pytest.approx(0.0, abs=1e-12) and ratios[1] > 1e-4
    first_rows = float(total_variation(tables.p[0], tables.q[0, 0]))
    assert first_rows > 0.05  # otherwise there would be nothing to relax


# --- bootstrap -------------------------------------------------------------------------------------------------------


def test_bootstrap_interval_is_that_of_the_normal_law_for_many_texts() -> None:
    generator = np.random.default_rng(1)
    tokens = np.full(400, 50.0)
    log_ratio = 50 * 0.06 + generator.normal(0, 5.0, 400)
    low, high = bootstrap_ratio(log_ratio, tokens)
    value = math.exp(log_ratio.sum() / tokens.sum())
    half = 1.96 * float(log_ratio.std()) / math.sqrt(400) / 50
    assert low < value < high
    assert math.log(low) == pytest.approx(math.log(value) - half, abs=0.15 * half)
    assert math.log(high) == pytest.approx(math.log(value) + half, abs=0.15 * half)


def test_bootstrap_pairs_each_text_with_its_own_tokens() -> None:
    """The same loss per token in texts of all lengths leaves nothing to doubt."""
    tokens = np.array([1.0, 3, 10, 200, 50, 7])
    low, high = bootstrap_ratio(0.2 * tokens, tokens)
    assert low == pytest.approx(math.exp(0.2)) and high == pytest.approx(math.exp(0.2))


def test_bootstrap_depends_on_its_seed_alone() -> None:
    log_ratio, tokens = np.random.default_rng(2).normal(0.5, 1.0, 20), np.full(20, 10.0)
    assert bootstrap_ratio(log_ratio, tokens, seed=3) == bootstrap_ratio(log_ratio, tokens, seed=3)
    assert bootstrap_ratio(log_ratio, tokens, seed=3) != bootstrap_ratio(log_ratio, tokens, seed=4)


def test_bootstrap_of_one_text_is_its_own_value() -> None:
    low, high = bootstrap_ratio(np.array([1.0]), np.array([10.0]))
    assert low == high == pytest.approx(math.exp(0.1))


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        log_ratio = generator.normal(0.3, 1.0, 40)
        low, high = bootstrap_ratio(log_ratio, np.full(40, 10.0), resamples=400, seed=trial)
        hits += low <= math.exp(0.03) <= high
    assert 178 <= hits <= 199  # 95 % of 200, within three standard deviations and a little for 40 texts
