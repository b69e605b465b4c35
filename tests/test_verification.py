"""One round's verdict: accepted counts, the token after them, ragged batches. Public bug reports carry their numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from lossyspec.acceptance import emitted_law, residual, verify
from lossyspec.drafting import ModelDraft, Proposal, Request
from lossyspec.runner import Runner
from lossyspec.sampling import Choice, draw, probabilities
from lossyspec.settings import RULES, Sampling, Settings
from lossyspec.verification import judge

DRAWS = 100_000


def assert_drawn_from(law: Sequence[float] | Tensor, tokens: Sequence[int] | Tensor) -> None:
    """Chi-square of the histogram of `tokens` against `law`; tokens of probability 0 must not occur at all."""
    wanted = torch.as_tensor(law, dtype=torch.float64)
    counts = torch.bincount(torch.as_tensor(tokens), minlength=len(wanted)).double()
    some = wanted > 1e-12
    assert counts[~some].sum() == 0
    expected = wanted[some] / wanted[some].sum() * counts.sum()
    assert chisquare(counts[some].numpy(), expected.numpy()).pvalue > 1e-3


def settings_of(rule: str, alpha: float) -> Settings:
    return Settings(rule=rule, alpha=alpha)


def emit(
    p: Tensor, q: Tensor, lengths: list[int], rule: str, alpha: float, seed: int, batch: int = DRAWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds of `batch` rows on the same laws p (width + 1, V), q (width, V); row i drafts lengths[i % len(lengths)].

    Returns the tokens (batch, width + 1), how many of them each row emits, and the accepted counts.
    """
    width, generator = q.shape[0], torch.Generator().manual_seed(seed)
    laws, drafts = p.float().expand(batch, -1, -1), q.float().expand(batch, -1, -1)
    drafted = draw(drafts, torch.rand(batch, width, generator=generator))
    own = [lengths[row % len(lengths)] for row in range(batch)]
    uniforms = torch.rand(batch, width + 1, generator=generator)
    relaxation = torch.full((batch, width), alpha)
    proposal = Proposal(drafted, own, drafts, width)
    accepted, following, _ = judge(laws, proposal, settings_of(rule, alpha), relaxation, uniforms, greedy=False)
    counts = torch.tensor(accepted)
    tokens = torch.cat([drafted, torch.zeros(batch, 1, dtype=torch.long)], 1)
    tokens[torch.arange(batch), counts] = torch.tensor(following)
    return tokens, counts + 1, counts


def laws_of(width: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random p (width + 1, size) and q (width, size), far from each other."""
    generator = torch.Generator().manual_seed(seed)
    p = (1.2 * torch.randn(width + 1, size, generator=generator, dtype=torch.float64)).softmax(-1)
    q = (1.2 * torch.randn(width, size, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


def block_law(p: Tensor, q: Tensor, length: int, rule: str, alpha: float) -> dict[tuple[int, ...], float]:
    """The law of the tokens of one round that drafts `length` tokens, by the definition."""
    relaxation = torch.full((q.shape[0],), alpha, dtype=torch.float64)
    verification = verify(rule, p[:-1], q, relaxation)
    kept = q * verification.accept
    lost = 1 - kept.sum(-1)
    rest = residual(p[:-1], q, verification)
    law: dict[tuple[int, ...], float] = {}
    size = p.shape[1]
    for count in range(length + 1):
        for block in itertools.product(range(size), repeat=count + 1):
            chance = 1.0
            for place, token in enumerate(block[:-1]):
                chance *= float(kept[place, token])
            last = float(lost[count] * rest[count, block[-1]]) if count < length else float(p[length, block[-1]])
            law[block] = chance * last
    return law


# --- the law of a round ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "alpha"), [("exact", 0.0), ("optimal", 0.5), ("priced", 0.4), ("typical", 0.6)])
def test_blocks_of_a_ragged_batch_follow_the_law_of_their_own_length(rule: str, alpha: float) -> None:
    p, q = laws_of(3, 3, seed=1)
    batch = 40_000
    tokens, emitted, _ = emit(p, q, [0, 1, 2, 3], rule, alpha, seed=2, batch=batch)
    for length in range(4):
        rows = range(length, batch, 4)
        seen = Counter(tuple(tokens[row, : emitted[row]].tolist()) for row in rows)
        law = block_law(p, q, length, rule, alpha)
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
        assert set(seen) <= set(law)
        common = [block for block, chance in law.items() if chance * len(rows) >= 5]
        expected = [law[block] * len(rows) for block in common]
        observed = [seen[block] for block in common]
        expected.append(len(rows) - sum(expected))
        observed.append(len(rows) - sum(observed))
        if expected[-1] < 5:  # the rare blocks together are rare too: count them with the last one
            expected[-2:], observed[-2:] = [sum(expected[-2:])], [sum(observed[-2:])]
        assert chisquare(observed, expected).pvalue > 1e-3


def test_case_1_number_of_matches_and_histogram_with_a_draft_far_from_the_target() -> None:
    """The bug counted every drafted token as a match, so the histogram came out as q."""
    p = torch.tensor([0.7, 0.15, 0.1, 0.05], dtype=torch.float64).expand(4, -1)
    q = torch.tensor([0.05, 0.1, 0.15, 0.7], dtype=torch.float64).expand(3, -1)
    tokens, emitted, accepted = emit(p, q, [3], "exact", 0.0, seed=3)
    for place in range(4):
        assert_drawn_from(p[0], tokens[emitted > place, place])
    chance = float(torch.minimum(p[0], q[0]).sum())
    assert_drawn_from([(1 - chance) * chance**count for count in range(3)] + [chance**3], accepted)


def test_case_2_argmax_draft_is_judged_by_its_one_hot_law() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    generator = torch.Generator().manual_seed(4)
    laws = torch.stack([p, p]).expand(DRAWS, -1, -1)
    drafted = q.argmax().expand(DRAWS, 1)
    uniforms, alpha = torch.rand(DRAWS, 2, generator=generator), torch.zeros(DRAWS, 1)

    def emitted(law: Tensor | None) -> Tensor:
        proposal = Proposal(drafted, [1] * DRAWS, law, 0)
        accepted, following, _ = judge(laws, proposal, settings_of("exact", 0.0), alpha, uniforms, greedy=False)
        return torch.where(torch.tensor(accepted) == 1, drafted[:, 0], torch.tensor(following))

    assert_drawn_from(p, emitted(None))
    soft = torch.bincount(emitted(q.expand(DRAWS, 1, -1)), minlength=3) / DRAWS
    torch.testing.assert_close(soft, torch.tensor([0.833, 0.0, 0.167]), rtol=0, atol=0.005)  # what the bug would give


class ConstantRunner(Runner):
    """A model that says the same at every position."""

    def __init__(self, law: Sequence[float]) -> None:
        self.position_limit = None
        self.law = torch.tensor(law).log()
        self.device = torch.device("cpu")

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        pass

    def logits(self, tokens: Tensor, starts: list[int], attention: object = None) -> Tensor:
        return self.law.expand(*tokens.shape, -1)


def test_case_3_returned_q_is_the_q_that_was_sampled_from() -> None:
    """q = (.4,.3,.2,.1) under top-2 draws from (4/7,3/7,0,0); judged by the full q, TV(emitted, p) would be .20."""
    rows, p = 50_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    draft = ModelDraft(ConstantRunner([0.4, 0.3, 0.2, 0.1]), 4)
    prompts = [[0]] * rows
    draft.start(prompts, 8)
    generator = torch.Generator().manual_seed(5)
    sampling, knobs = Sampling(top_k=2), Settings(rule="exact", draft_length=2)
    proposal = draft.propose(Request(prompts, [2] * rows, knobs, [Choice(sampling, generator)] * rows))
    assert proposal.q is not None
    torch.testing.assert_close(proposal.q[7, 1], torch.tensor([4 / 7, 3 / 7, 0, 0]))
    for column in range(2):
        assert_drawn_from([4 / 7, 3 / 7, 0, 0], proposal.tokens[:, column])
    uniforms = torch.rand(rows, 3, generator=generator)
    laws = p.expand(rows, 3, -1)
    accepted, following, _ = judge(laws, proposal, knobs, torch.zeros(rows, 2), uniforms, greedy=False)
    first = torch.where(torch.tensor(accepted) > 0, proposal.tokens[:, 0], torch.tensor(following))
    assert_drawn_from(p, first)


def test_case_3_temperature_and_tau_are_in_the_returned_q_too() -> None:
    draft = ModelDraft(ConstantRunner([0.4, 0.3, 0.2, 0.1]), 4)
    draft.start([[0]], 8)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    choice = Choice(sampling, torch.Generator().manual_seed(0))
    request = Request([[0]], [1], Settings(draft_length=1, tau=0.5), [choice])
    want = probabilities(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), sampling, 0.5)
    q = draft.propose(request).q
    assert q is not None
    torch.testing.assert_close(q[0, 0], want)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_case_8_uniform_0_rejects_what_the_target_excludes(rule: str, alpha: float, one_hot: bool) -> None:
    p = torch.tensor([[[0.6, 0.4, 0.0], [0.0, 0.0, 1.0]]])
    q = None if one_hot else torch.tensor([[[0.1, 0.1, 0.8]]])
    proposal = Proposal(torch.tensor([[2]]), [1], q, 0)
    uniforms = torch.zeros(1, 2)
    accepted, following, _ = judge(p, proposal, settings_of(rule, alpha), torch.full((1, 1), alpha), uniforms, greedy=False)
    assert accepted == [0]
    assert following[0] in (0, 1)


def test_case_8_greedy_never_takes_what_the_target_excludes() -> None:
    p = torch.tensor([[[0.6, 0.4, 0.0], [0.0, 0.0, 1.0]]])
    proposal = Proposal(torch.tensor([[2]]), [1], None, 0)
    verdict = judge(p, proposal, settings_of("optimal", 1.0), torch.ones(1, 1), torch.zeros(1, 2), greedy=True)
    assert verdict[:2] == ([0], [0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_case_10_equal_laws_and_a_forced_rejection_draw_from_p(rule: str, alpha: float) -> None:
    """A uniform number of 1 rejects even a chance of 1; the residual of equal laws is 0 everywhere."""
    p = torch.tensor([0.5, 0.2, 0.3])
    rows = 20_000
    uniforms = torch.rand(rows, 2, generator=torch.Generator().manual_seed(6))
    uniforms[:, 0] = 1.0
    proposal = Proposal(torch.zeros(rows, 1, dtype=torch.long), [1] * rows, p.expand(rows, 1, -1), 1)
    laws = torch.stack([p, torch.tensor([0.0, 0.0, 1.0])]).expand(rows, -1, -1)
    relaxation = torch.full((rows, 1), alpha)
    accepted, following, _ = judge(laws, proposal, settings_of(rule, alpha), relaxation, uniforms, greedy=False)
    assert set(accepted) == {0}
    assert_drawn_from(p, following)


@pytest.mark.parametrize("rule", RULES)
def test_case_10_sure_target_and_a_one_hot_draft_on_its_token_draw_from_p(rule: str) -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    proposal = Proposal(torch.tensor([[1]]), [1], None, 0)
    forced = torch.tensor([[1.0, 0.5]])
    assert judge(p, proposal, settings_of(rule, 0.5), torch.full((1, 1), 0.5), forced, greedy=False)[:2] == ([0], [1])
    usual = torch.tensor([[1 - 2.0**-24, 0.5]])
    assert judge(p, proposal, settings_of(rule, 0.5), torch.full((1, 1), 0.5), usual, greedy=False)[:2] == ([1], [0])


def test_case_22_each_row_of_a_ragged_batch_emits_the_target_at_every_place() -> None:
    """Cut at the shortest row's count, and drawing anew there, the law would be (.40,.34,.26)."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    tokens, emitted, accepted = emit(p.expand(5, -1), q.expand(4, -1), [4, 1, 3, 2], "exact", 0.0, seed=7)
    chance = float(torch.minimum(p, q).sum())
    for row, length in enumerate([4, 1, 3, 2]):
        own_tokens, own_emitted = tokens[row::4], emitted[row::4]
        for place in range(length + 1):
            assert_drawn_from(p, own_tokens[own_emitted > place, place])
        assert_drawn_from([(1 - chance) * chance**count for count in range(length)] + [chance**length], accepted[row::4])


def test_case_22_a_row_is_judged_the_same_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    p = (2 * torch.randn(6, 5, 7, generator=generator)).softmax(-1)
    q = (2 * torch.randn(6, 4, 7, generator=generator)).softmax(-1)
    tokens = draw(q, torch.rand(6, 4, generator=generator))
    uniforms, lengths = torch.rand(6, 5, generator=generator), [4, 0, 2, 1, 3, 4]
    for rule in RULES:
        for law in (q, None):
            knobs, alpha = settings_of(rule, 0.4), torch.full((6, 4), 0.4)
            counts, following, variation = judge(p, Proposal(tokens, lengths, law, 4), knobs, alpha, uniforms, greedy=False)
            for row in range(6):
                own = slice(row, row + 1)
                width = lengths[row]  # alone, nothing pads the row
                alone = Proposal(tokens[own, :width], [width], None if law is None else law[own, :width], 4)
                numbers = torch.cat([uniforms[own, :width], uniforms[own, -1:]], 1)
                got = judge(p[own, : width + 1], alone, knobs, alpha[own, :width], numbers, greedy=False)
                assert got[:2] == ([counts[row]], [following[row]])
                torch.testing.assert_close(got.variation, variation[own, :width])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_draft_on_a_part_of_the_vocabulary_is_judged_as_on_all_of_it(rule: str, alpha: float) -> None:
    generator, rows, width, size = torch.Generator().manual_seed(14), 400, 3, 9
    support = torch.tensor([1, 2, 5, 8])
    p = (2 * torch.randn(rows, width + 1, size, generator=generator)).softmax(-1)
    p[::3, :, 5] = 0.0  # top-k of the target may exclude a token of the support
    p[1::3, :, [0, 3, 4, 6, 7]] = 0.0  # or all that the draft cannot say
    p = p / p.sum(-1, keepdim=True)
    q = (2 * torch.randn(rows, width, 4, generator=generator)).softmax(-1)
    tokens = support[draw(q, torch.rand(rows, width, generator=generator))]
    lengths = torch.randint(0, width + 1, (rows,), generator=generator).tolist()
    uniforms = torch.rand(rows, width + 1, generator=generator)
    part = Proposal(tokens, lengths, q, width, support)
    everywhere = part.on_all(size)
    assert everywhere.q is not None and everywhere.support is None
    torch.testing.assert_close(everywhere.q[..., support], q)
    assert everywhere.q.sum().item() == pytest.approx(rows * width, rel=1e-5)
    knobs, relaxation = settings_of(rule, alpha), torch.full((rows, width), alpha)
    want = judge(p, everywhere, knobs, relaxation, uniforms, greedy=False)
    got = judge(p, part, knobs, relaxation, uniforms, greedy=False)
    assert got[:2] == want[:2]
    torch.testing.assert_close(got.variation, want.variation)
    assert len(set(want[0])) == width + 1


@pytest.mark.parametrize("rule", RULES)
def test_draft_on_a_part_of_the_vocabulary_emits_the_closed_form(rule: str) -> None:
    p, _ = laws_of(1, 6, seed=15)
    support = torch.tensor([0, 3, 4])
    q = torch.tensor([0.2, 0.7, 0.1])
    generator, rows = torch.Generator().manual_seed(16), DRAWS
    drafted = support[draw(q.expand(rows, -1), torch.rand(rows, generator=generator))][:, None]
    proposal = Proposal(drafted, [1] * rows, q.expand(rows, 1, -1), 1, support)
    uniforms, alpha = torch.rand(rows, 2, generator=generator), torch.full((rows, 1), 0.5)
    accepted, following, _ = judge(
        p.float().expand(rows, -1, -1), proposal, settings_of(rule, 0.5), alpha, uniforms, greedy=False
    )
    full = torch.zeros(6, dtype=torch.float64).index_copy_(0, support, q.double())
    law = emitted_law(rule, p[0], full, torch.tensor(0.5, dtype=torch.float64))
    assert_drawn_from(law, torch.where(torch.tensor(accepted) == 1, drafted[:, 0], torch.tensor(following)))


# --- counts and the token after them ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    rule=st.sampled_from(RULES),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    uniform=st.none() | st.sampled_from([0.0, 1 - 2.0**-24]),
    one_hot=st.booleans(),
    greedy=st.booleans(),
)
def test_accepted_count_stays_within_the_proposal_and_the_next_token_is_possible(
    rule: str, alpha: float, lengths: list[int], seed: int, uniform: float | None, one_hot: bool, greedy: bool
) -> None:
    generator, rows, width = torch.Generator().manual_seed(seed), len(lengths), 4
    p = (4 * torch.randn(rows, width + 1, 6, generator=generator)).softmax(-1)
    q = (4 * torch.randn(rows, width, 6, generator=generator)).softmax(-1)
    p = torch.where(torch.rand(p.shape, generator=generator) < 0.3, 0.0, p) + 1e-9 * torch.eye(6)[0]
    p = p / p.sum(-1, keepdim=True)
    uniforms = torch.rand(rows, width + 1, generator=generator)
    if uniform is not None:
        uniforms = torch.full_like(uniforms, uniform)
    proposal = Proposal(draw(q, torch.rand(rows, width, generator=generator)), lengths, None if one_hot else q, width)
    relaxation = torch.full((rows, width), alpha)
    accepted, following, _ = judge(p, proposal, settings_of(rule, alpha), relaxation, uniforms, greedy)
    for row in range(rows):
        assert 0 <= accepted[row] <= lengths[row]
        assert p[row, accepted[row], following[row]] > 0
        for place in range(accepted[row]):
            assert p[row, place, proposal.tokens[row, place]] > 0


def test_token_after_all_accepted_is_drawn_from_the_target_at_the_rows_own_length() -> None:
    """Rows of length 1 in a batch of width 3: the bonus comes from p at column 1, and not from any residual."""
    rows = DRAWS
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    q = torch.tensor([0.5, 0.5, 0.0]).expand(rows, 3, -1)
    proposal = Proposal(torch.zeros(rows, 3, dtype=torch.long), [1] * rows, q, 3)
    uniforms = torch.rand(rows, 4, generator=torch.Generator().manual_seed(9))
    uniforms[:, 1:3] = 0.0  # the padding would be accepted if it were looked at
    accepted, following, _ = judge(
        p.expand(rows, -1, -1), proposal, settings_of("optimal", 0.7), torch.full((rows, 3), 0.7), uniforms, greedy=False
    )
    assert set(accepted) == {1}
    assert_drawn_from(p[1], following)


@pytest.mark.parametrize("rule", RULES)
def test_token_after_a_rejection_is_drawn_from_the_residual(rule: str) -> None:
    p = torch.tensor([0.45, 0.1, 0.25, 0.2])
    q = torch.tensor([0.1, 0.6, 0.05, 0.25])
    uniforms = torch.rand(DRAWS, 2, generator=torch.Generator().manual_seed(10))
    alpha = torch.full((DRAWS, 1), 0.3)
    proposal = Proposal(torch.ones(DRAWS, 1, dtype=torch.long), [1] * DRAWS, q.expand(DRAWS, 1, -1), 1)
    laws = torch.stack([p, torch.tensor([0.0, 0.0, 0.0, 1.0])]).expand(DRAWS, -1, -1)
    accepted, following, _ = judge(laws, proposal, settings_of(rule, 0.3), alpha, uniforms, greedy=False)
    verification = verify(rule, p, q, torch.tensor(0.3))
    rejected = torch.tensor(accepted) == 0
    share = 1 - float(verification.accept[1])
    assert float(rejected.double().mean()) == pytest.approx(share, abs=4.5 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-9)
    if share > 0:
        assert_drawn_from(residual(p, q, verification), torch.tensor(following)[rejected])


def test_alpha_is_each_positions_own() -> None:
    """A policy may set alpha to 0 at some positions: there the law is p."""
    p, q = laws_of(1, 4, seed=11)
    rows = DRAWS
    generator = torch.Generator().manual_seed(12)
    drafts = q.float().expand(rows, 1, -1)
    drafted = draw(drafts, torch.rand(rows, 1, generator=generator))
    alpha = torch.tensor([0.0, 0.9]).repeat(rows // 2)[:, None]
    uniforms = torch.rand(rows, 2, generator=generator)
    accepted, following, _ = judge(
        p.float().expand(rows, -1, -1),
        Proposal(drafted, [1] * rows, drafts, 1),
        settings_of("optimal", 0.9),
        alpha,
        uniforms,
        greedy=False,
    )
    first = torch.where(torch.tensor(accepted) == 1, drafted[:, 0], torch.tensor(following))
    assert_drawn_from(p[0], first[::2])
    assert_drawn_from(emitted_law("optimal", p[0], q[0], torch.tensor(0.9).double()), first[1::2])


def test_nothing_drafted_is_plain_decoding() -> None:
    p = torch.tensor([0.2, 0.5, 0.3])
    rows = 20_000
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(13))
    proposal = Proposal.empty(rows, torch.device("cpu"))
    laws = p.expand(rows, 1, -1)
    accepted, following, _ = judge(laws, proposal, settings_of("optimal", 0.9), torch.zeros(rows, 0), uniforms, greedy=False)
    assert set(accepted) == {0}
    assert_drawn_from(p, following)
    _, best, _ = judge(laws, proposal, settings_of("optimal", 0.9), torch.zeros(rows, 0), uniforms, greedy=True)
    assert set(best) == {1}


# --- temperature 0 ---------------------------------------------------------------------------------------------------

GREEDY = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]]])


def greedy_round(tokens: list[int], rule: str = "optimal", alpha: float = 0.0, length: int = 3) -> tuple[int, int]:
    """Accepted count and next token of one row on GREEDY, whatever the uniform numbers."""
    results = set()
    for uniform in (0.0, 0.5, 1 - 2.0**-24):
        proposal = Proposal(torch.tensor([tokens]), [length], None, 0)
        relaxation, uniforms = torch.full((1, 3), alpha), torch.full((1, 4), uniform)
        accepted, following, _ = judge(GREEDY, proposal, settings_of(rule, alpha), relaxation, uniforms, greedy=True)
        results.add((accepted[0], following[0]))
    assert len(results) == 1
    return results.pop()


def test_greedy_round_goes_on_with_the_targets_choice() -> None:
    assert greedy_round([0, 1, 2]) == (3, 0)
    assert greedy_round([0, 1, 2], length=2) == (2, 2)
    assert greedy_round([0, 1, 0]) == (2, 2)
    assert greedy_round([1, 1, 2]) == (0, 0)
    assert greedy_round([0, 2, 2]) == (1, 1)


def test_greedy_round_with_alpha_accepts_what_is_within_it() -> None:
    assert greedy_round([1, 1, 2], alpha=0.39) == (0, 0)
    assert greedy_round([1, 1, 2], alpha=0.41) == (3, 0)
    assert greedy_round([1, 2, 0], alpha=0.55) == (2, 2)
    assert greedy_round([2, 0, 1], alpha=1.0) == (3, 0)


def test_greedy_round_of_the_exact_rule_ignores_alpha() -> None:
    assert greedy_round([1, 1, 2], rule="exact", alpha=0.9) == (0, 0)


def test_greedy_variation_is_1_where_another_token_than_the_best_is_taken() -> None:
    p = torch.tensor([[[0.5, 0.4, 0.1], [0.1, 0.45, 0.45], [0.2, 0.2, 0.6]]])
    for tokens, alpha, want in (([1, 1], 0.5, [1.0, 0.0]), ([1, 1], 0.0, [0.0, 0.0]), ([0, 2], 0.5, [0.0, 1.0])):
        proposal = Proposal(torch.tensor([tokens]), [2], None, 0)
        relaxation = torch.full((1, 2), alpha)
        verdict = judge(p, proposal, settings_of("optimal", alpha), relaxation, torch.zeros(1, 3), greedy=True)
        assert verdict.variation.tolist() == [want]


def test_greedy_tie_at_alpha_0_gives_the_token_of_plain_greedy() -> None:
    p = torch.tensor([[[0.4, 0.4, 0.2], [0.1, 0.45, 0.45]]])
    plain = int(p[0, 0].argmax())
    other = 1 - plain
    for token, want in ((plain, ([1], [int(p[0, 1].argmax())])), (other, ([0], [plain]))):
        proposal = Proposal(torch.tensor([[token]]), [1], None, 0)
        uniforms = torch.zeros(1, 2)
        assert judge(p, proposal, settings_of("optimal", 0.0), torch.zeros(1, 1), uniforms, greedy=True)[:2] == want
