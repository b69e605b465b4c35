"""Drafts: what they propose depends on the prefix alone, and the q they return is the q they drew from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import (
    LawRunner,
    chi_square_p,
    hf_greedy,
    histogram,
    law_draft,
    lively_model,
    model_draft,
    outputs,
    perturbed,
    random_prompts,
    run,
)
from torch import Tensor

from lossyspec.drafting import ModelDraft, Proposal, Request
from lossyspec.mixed_drafting import _joined
from lossyspec.ngram_drafting import NgramDraft, find_match, match_confidence, ngram_chain
from lossyspec.runner import Runner
from lossyspec.sampling import Choice, probabilities
from lossyspec.settings import NgramSettings, Sampling, ScheduleRow, Settings


def ask(
    prefixes: Sequence[Sequence[int]],
    limits: Sequence[int],
    knobs: Settings | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    **more: Any,
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    choice = Choice(sampling or Sampling(), generator, **more)
    return Request(prefixes, limits, knobs or Settings(), [choice] * len(prefixes))


# --- prompt lookup ---


def brute_match(tokens: Sequence[int], ngram: NgramSettings) -> tuple[int, int]:
    """The definition: the longest suffix first, and for each the most recent earlier occurrence."""
    size = len(tokens)
    for length in range(min(ngram.max_match, size - 1), ngram.min_match - 1, -1):
        suffix = list(tokens[size - length :])
        for end in range(size - 1, length - 1, -1):  # the occurrence is tokens[end - length : end]
            if list(tokens[end - length : end]) == suffix:
                return end, length
    return -1, 0


TOKENS = st.lists(st.integers(0, 3), max_size=30)
NGRAM = st.tuples(st.integers(1, 5), st.integers(0, 4)).map(
    lambda pair: NgramSettings(min_match=pair[0], max_match=pair[0] + pair[1])
)


@settings(deadline=None, max_examples=400)
@given(TOKENS, NGRAM)
def test_find_match_is_the_most_recent_occurrence_of_the_longest_suffix(tokens: list[int], ngram: NgramSettings) -> None:
    assert find_match(tokens, ngram) == brute_match(tokens, ngram)


@pytest.mark.parametrize(
    ("tokens", "lengths", "expected"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], (1, 4), (5, 2)),  # the more recent of two of the same length
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], (1, 4), (3, 3)),  # the longer one, though it is older
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], (1, 2), (6, 2)),  # at most 2 tokens are looked for
        ([1, 2, 3, 9, 3], (2, 4), (-1, 0)),  # a match of 1 token is too short
        ([7, 7, 7], (1, 4), (2, 2)),  # an occurrence may overlap the suffix
        ([5], (1, 4), (-1, 0)),
        ([], (1, 4), (-1, 0)),
    ],
)
def test_find_match_by_hand(tokens: list[int], lengths: tuple[int, int], expected: tuple[int, int]) -> None:
    assert find_match(tokens, NgramSettings(min_match=lengths[0], max_match=lengths[1])) == expected


@settings(deadline=None, max_examples=200)
@given(TOKENS, NGRAM, st.integers(1, 8))
def test_a_chain_depends_on_the_prefix_only(tokens: list[int], ngram: NgramSettings, limit: int) -> None:
    """The draft at a position is the same whether a round began there or the drafted tokens before it were accepted."""
    chain = ngram_chain(tokens, ngram, limit)
    assert len(chain) <= limit
    if chain:
        assert chain[1:] == ngram_chain([*tokens, chain[0][0]], ngram, limit - 1)
        place, length = brute_match(tokens, ngram)
        assert chain[0] == (tokens[place], match_confidence(length))
    else:
        assert brute_match(tokens, ngram) == (-1, 0)


def test_the_ngram_draft_respects_each_limit_and_has_a_one_hot_q() -> None:
    prefix = [3, 4, 5, 6, 3, 4]
    proposal = NgramDraft().propose(ask([prefix, prefix, [8, 9], prefix], [5, 2, 5, 0]))
    assert proposal.lengths == [5, 2, 0, 0]
    assert proposal.tokens[0].tolist() == [5, 6, 3, 4, 5]
    assert proposal.tokens[1, :2].tolist() == [5, 6]
    assert proposal.q is None
    assert proposal.steps == 0
    nothing = NgramDraft().propose(ask([[3], [4, 5]], [4, 4]))
    assert nothing.tokens.shape == (2, 0)
    assert nothing.lengths == [0, 0]


def test_the_ngram_draft_stops_before_a_position_of_low_confidence() -> None:
    """Confidence is n / (n + 1) after a match of n tokens: the first match here has 1 token, then 2, 3, 4."""
    prefix = [3, 4, 5, 6, 7, 8, 3]
    lengths = {}
    for theta in (0.0, 0.5, 0.51, 0.66, 0.67):
        lengths[theta] = NgramDraft().propose(ask([prefix], [4], Settings(theta=theta))).lengths[0]
    assert lengths == {0.0: 4, 0.5: 4, 0.51: 0, 0.66: 0, 0.67: 0}
    longer = [3, 4, 5, 6, 9, 3, 4]
    assert NgramDraft().propose(ask([longer], [4], Settings(theta=0.66))).lengths == [4]
    assert NgramDraft().propose(ask([longer], [4], Settings(theta=0.67))).lengths == [0]


def test_the_ngram_settings_of_the_request_come_first() -> None:
    prefix, short = [3, 4, 5, 3], NgramSettings(min_match=2, max_match=3)
    assert NgramDraft().propose(ask([prefix], [1])).lengths == [1]
    assert NgramDraft(short).propose(ask([prefix], [1])).lengths == [0]
    assert NgramDraft().propose(ask([prefix], [1], Settings(ngram=short))).lengths == [0]
    one = NgramSettings(min_match=1, max_match=1)
    assert NgramDraft(short).propose(ask([prefix], [1], Settings(ngram=one))).lengths == [1]


# --- a model as the draft ---


@torch.inference_mode()
def law_after(model: Any, prefix: Sequence[int], sampling: Sampling, tau: float = 1.0) -> Tensor:
    """q after a prefix, read without any cache."""
    logits = model(input_ids=torch.tensor([list(prefix)]), use_cache=False).logits[:, -1:]
    return probabilities(logits, sampling, tau)[0, 0]


def check_laws(
    model: Any, proposal: Proposal, prefixes: Sequence[Sequence[int]], sampling: Sampling, tau: float = 1.0
) -> None:
    """Each returned q is the law of the draft after the prefix and the tokens drafted before it."""
    assert proposal.q is not None
    for row, prefix in enumerate(prefixes):
        for depth in range(proposal.lengths[row]):
            grown = [*prefix, *proposal.tokens[row, :depth].tolist()]
            torch.testing.assert_close(proposal.q[row, depth], law_after(model, grown, sampling, tau), rtol=2e-4, atol=2e-6)


class Rounds:
    """A ModelDraft under test: rows grow as the caller says, and each proposal is held against a model without a cache."""

    def __init__(self, architecture: str, prompts: list[list[int]]) -> None:
        self.model = lively_model(architecture)
        self.draft = model_draft(self.model)
        self.prefixes = [list(prompt) for prompt in prompts]
        self.draft.start(prompts, 120)
        self.seed = 0

    def propose(self, limits: Sequence[int], knobs: Settings | None = None) -> Proposal:
        self.seed += 1
        proposal = self.draft.propose(ask([list(prefix) for prefix in self.prefixes], limits, knobs, seed=self.seed))
        assert all(length <= limit for length, limit in zip(proposal.lengths, limits, strict=True))
        if proposal.q is not None:
            check_laws(self.model, proposal, self.prefixes, Sampling(), (knobs or Settings()).tau)
        return proposal

    def grow(self, proposal: Proposal, accepted: Sequence[int], following: Sequence[int]) -> None:
        for row, prefix in enumerate(self.prefixes):
            prefix.extend(proposal.tokens[row, : accepted[row]].tolist())
            prefix.append(following[row])

    def say(self, *tokens: Sequence[int]) -> None:
        """A round without drafting."""
        for prefix, new in zip(self.prefixes, tokens, strict=True):
            prefix.extend(new)

    def select(self, rows: list[int]) -> None:
        self.draft.select(rows)
        self.prefixes = [self.prefixes[row] for row in rows]


CATCH_UP = ["llama", "gpt2", "gemma3"]


@pytest.mark.parametrize("architecture", CATCH_UP)
def test_the_draft_is_right_after_full_partial_and_no_acceptance(architecture: str) -> None:
    rounds = Rounds(architecture, [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]])
    for accepted in ([3, 3, 3], [0, 0, 0], [3, 0, 1], [1, 3, 0], [2, 1, 3], [3, 3, 3], [0, 3, 2]):
        proposal = rounds.propose([3, 3, 3])
        assert proposal.lengths == [3, 3, 3]
        assert proposal.steps == 3
        rounds.grow(proposal, accepted, [20, 21, 22])


@pytest.mark.parametrize("architecture", CATCH_UP)
def test_the_draft_catches_up_after_rounds_without_drafting(architecture: str) -> None:
    rounds = Rounds(architecture, [[5, 6, 7, 8], [11, 12]])
    rounds.say([20, 21, 22], [23, 24, 25])
    proposal = rounds.propose([2, 2])
    rounds.grow(proposal, [2, 0], [30, 31])
    rounds.say([40, 41], [42, 43])
    rounds.propose([3, 3])


@pytest.mark.parametrize("architecture", CATCH_UP)
def test_the_draft_reads_over_rejected_tokens_though_a_later_one_is_the_same(architecture: str) -> None:
    """It drafted a, b, c; the text went on x, b, c: what it read of b and c followed another token."""
    rounds = Rounds(architecture, [[5, 6, 7, 8], [11, 12]])
    proposal = rounds.propose([3, 3])
    first, second = proposal.tokens.tolist()
    rounds.say([(first[0] + 1) % VOCAB, *first[1:], 30], [*second[:1], (second[1] + 1) % VOCAB, second[2], 31])
    rounds.propose([3, 3])


def test_the_draft_keeps_the_right_rows_after_select() -> None:
    rounds = Rounds("llama", [[5, 6, 7, 8], [11, 12], [13], [14, 15, 16, 17, 18]])
    rounds.grow(rounds.propose([2, 2, 2, 2]), [2, 0, 1, 2], [20, 21, 22, 23])
    rounds.select([1, 2, 3])
    rounds.grow(rounds.propose([2, 2, 2]), [1, 2, 0], [24, 25, 26])
    rounds.select([0, 2])
    rounds.grow(rounds.propose([4, 4]), [4, 4], [27, 28])
    rounds.select([1])
    rounds.propose([4])


def test_the_draft_reads_no_token_twice_but_the_rejected_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens after full acceptance (the last drafted one was never read), else one; dropped rows change nothing."""
    rounds = Rounds("llama", [[5, 6, 7, 8], [11, 12, 13, 14, 15], [16, 17, 18]])
    widths: list[int] = []
    logits = Runner.logits

    def spy(self: Runner, tokens: Tensor, starts: list[int]) -> Tensor:
        widths.append(tokens.shape[1])
        return logits(self, tokens, starts)

    monkeypatch.setattr(Runner, "logits", spy)
    for accepted, expected in (([0, 1, 0], 1), ([2, 0, 1], 2), ([1, 1, 1], 1)):
        proposal = rounds.propose([2, 2, 2])
        rounds.grow(proposal, accepted, [20, 21, 22])
        widths.clear()
        rounds.select([0, 1, 2])
        rounds.propose([1, 1, 1])
        assert widths == [expected]
    rounds.grow(rounds.propose([2, 2, 2]), [0, 0, 0], [30, 31, 32])
    rounds.select([1, 2])
    widths.clear()
    rounds.propose([2, 2])
    assert widths == [1, 1]


def test_rows_without_a_limit_draft_nothing_and_stay_right() -> None:
    rounds = Rounds("llama", [[5, 6, 7], [11, 12], [13, 14, 15, 16]])
    proposal = rounds.propose([0, 3, 1])
    assert proposal.lengths == [0, 3, 1]
    rounds.grow(proposal, [0, 3, 1], [20, 21, 22])
    proposal = rounds.propose([3, 0, 2])
    assert proposal.lengths == [3, 0, 2]
    nothing = rounds.propose([0, 0, 0])
    assert nothing.lengths == [0, 0, 0]
    assert nothing.tokens.shape == (3, 0)
    rounds.grow(proposal, [3, 0, 2], [23, 24, 25])
    rounds.propose([2, 2, 2])


def test_a_schedule_that_pauses_drafting_leaves_the_draft_right() -> None:
    """4 rows draft, 2 and 3 do not, 1 does: a draft equal to the target is accepted to the last token nonetheless."""
    model = lively_model("llama")
    prompts = random_prompts(4, seed=41)
    texts = [hf_greedy(model, prompt, 40) for prompt in prompts]
    ends = [texts[0][3], texts[1][8], texts[2][17]]
    schedule = (ScheduleRow(batch=(1, 1), draft_length=4), ScheduleRow(batch=(4, 4), draft_length=2))
    rows, stats = run(Runner(model), model_draft(model), prompts, Settings(schedule=schedule), new=40, eos=ends)
    assert len({len(row.output) for row in rows}) > 2
    assert stats.drafted_at[3] > 0
    assert stats.accepted == stats.drafted
    assert outputs(rows) == [text[: len(row.output)] for text, row in zip(texts, rows, strict=True)]


@pytest.mark.parametrize(
    ("sampling", "tau"),
    [
        (Sampling(), 1.0),
        (Sampling(temperature=0.6), 0.5),
        (Sampling(temperature=1.3, top_k=3), 1.5),
        (Sampling(top_p=0.7), 0.8),
        (Sampling(temperature=0.9, top_k=6, top_p=0.8), 1.0),
        (Sampling(repetition_penalty=1.8), 1.0),
    ],
)
def test_case_3_the_q_returned_is_the_q_sampled_from(sampling: Sampling, tau: float) -> None:
    model, size, rows = lively_model("llama", vocab_size=8, spread=1.5), 8, 6000
    prefix = [3, 5, 4]
    draft = model_draft(model, size)
    draft.start([prefix] * rows, 16)
    proposal = draft.propose(ask([prefix] * rows, [2] * rows, Settings(tau=tau), sampling))
    assert proposal.q is not None
    first = proposal.q[0, 0]
    if sampling.repetition_penalty == 1.0:
        torch.testing.assert_close(first, law_after(model, prefix, sampling, tau), rtol=2e-4, atol=2e-6)
    else:
        plain = law_after(model, prefix, Sampling(), tau)
        assert all(float(first[token] / first[0]) < float(plain[token] / plain[0]) for token in prefix)
    filtered = sampling.top_k is not None or sampling.top_p is not None
    assert bool((first == 0).any()) == filtered
    assert chi_square_p(histogram(proposal.tokens[:, 0].tolist(), size), first.tolist()) > 1e-3
    for token in first.argsort(descending=True)[:2].tolist():
        chosen = proposal.tokens[:, 0] == token
        second = proposal.q[chosen][0, 1]
        torch.testing.assert_close(proposal.q[chosen][:, 1], second.expand(int(chosen.sum()), -1), rtol=2e-4, atol=2e-6)
        if sampling.repetition_penalty == 1.0:
            torch.testing.assert_close(second, law_after(model, [*prefix, token], sampling, tau), rtol=2e-4, atol=2e-6)
        assert chi_square_p(histogram(proposal.tokens[chosen, 1].tolist(), size), second.tolist()) > 1e-3


def test_a_greedy_draft_is_one_hot_at_its_argmax() -> None:
    """Its q is not the soft one, but theta looks at the soft one."""
    model, prefix = lively_model("llama"), [5, 6, 7]
    draft = model_draft(model)
    draft.start([prefix], 32)
    proposal = draft.propose(ask([prefix], [5], sampling=Sampling(temperature=0.0)))
    assert proposal.q is None
    assert proposal.tokens[0].tolist() == hf_greedy(model, prefix, 5)
    confidence = float(law_after(model, prefix, Sampling(temperature=0.0), 0.7).max())
    for theta, length in ((confidence - 1e-3, 1), (confidence + 1e-3, 0)):
        knobs = Settings(theta=theta, tau=0.7)
        assert draft.propose(ask([prefix], [1], knobs, Sampling(temperature=0.0))).lengths == [length]


def test_theta_stops_before_a_position_and_never_looks_at_the_drafted_token() -> None:
    """q = (.6, .4), theta = .5: max q is over it, so also the token of .4 stays. Dropping it would emit (.7, .3), not p."""
    p, q, count = (0.5, 0.5), (0.6, 0.4), 6000
    draft = law_draft(q)
    draft.start([[0]] * count, 8)
    proposal = draft.propose(ask([[0]] * count, [3] * count, Settings(theta=0.5)))
    assert proposal.lengths == [3] * count
    for depth in range(3):
        assert chi_square_p(histogram(proposal.tokens[:, depth].tolist(), 2), q) > 1e-3
    rows, _ = run(LawRunner(p), draft, [[0]] * count, Settings(theta=0.5, draft_length=2), Sampling(), new=3)
    for depth in range(3):
        assert chi_square_p(histogram([row.output[depth] for row in rows], 2), p) > 1e-3
    draft.start([[0]] * 3, 8)
    stopped = draft.propose(ask([[0]] * 3, [3] * 3, Settings(theta=0.61)))
    assert stopped.lengths == [0, 0, 0]
    assert stopped.steps == 1  # it had to look to know


def test_theta_stops_each_row_at_its_first_position_of_low_confidence() -> None:
    model, prompts, theta = lively_model("llama"), random_prompts(12, seed=6), 0.45
    draft = model_draft(model)
    draft.start(prompts, 64)
    proposal = draft.propose(ask(prompts, [6] * 12, Settings(theta=theta)))
    check_laws(model, proposal, prompts, Sampling())
    for row, prompt in enumerate(prompts):
        length = proposal.lengths[row]
        laws = [law_after(model, [*prompt, *proposal.tokens[row, :depth].tolist()], Sampling()) for depth in range(length)]
        assert all(float(law.max()) >= theta for law in laws)
        if length < proposal.tokens.shape[1]:
            after = law_after(model, [*prompt, *proposal.tokens[row, :length].tolist()], Sampling())
            assert float(after.max()) < theta
    assert len(set(proposal.lengths)) > 1
    assert min(proposal.lengths) == 0


def test_draft_steps_are_the_forward_passes_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model("llama")
    passes = 0
    logits = Runner.logits

    def counting(self: Runner, *given: Any) -> Tensor:
        nonlocal passes
        passes += self.name == "draft"
        return logits(self, *given)

    monkeypatch.setattr(Runner, "logits", counting)
    for theta in (0.0, 0.5):
        passes = 0
        rows, stats = run(
            Runner(model),
            model_draft(perturbed(model)),
            random_prompts(6),
            Settings(theta=theta, draft_length=4),
            Sampling(),
        )
        assert stats.draft_steps == passes > 0
        assert stats.drafted < len(rows) * passes
    assert stats.draft_steps > max(stats.drafted_at)  # rejected and withheld ones are counted too


def test_a_draft_with_fewer_logits_than_the_vocabulary_gives_the_others_no_probability() -> None:
    draft = ModelDraft(LawRunner((0.5, 0.3, 0.2)), 5)  # type: ignore[arg-type]
    draft.start([[0]], 8)
    q = draft.propose(ask([[0]], [2])).q
    assert q is not None
    assert q.shape == (1, 2, 5)
    assert q[..., 3:].tolist() == [[[0.0, 0.0], [0.0, 0.0]]]
    torch.testing.assert_close(q[0, 0, :3], torch.tensor([0.5, 0.3, 0.2]))


def test_one_generator_gives_each_row_and_position_its_own_number() -> None:
    """Rows with the same prefix draft different tokens, and the next request goes on with new numbers."""
    draft = law_draft([1 / 50] * 50)
    generator = torch.Generator().manual_seed(0)
    request = Request([[0]] * 8, [8] * 8, Settings(), [Choice(Sampling(), generator)] * 8)
    draft.start([[0]] * 8, 16)
    first, second = draft.propose(request).tokens, draft.propose(request).tokens
    assert len({tuple(row) for row in first.tolist()}) == 8
    assert len({tuple(column) for column in first.T.tolist()}) == 8
    assert not torch.equal(first, second)


@pytest.mark.parametrize("found", [4, 6], ids=["in the support", "not in it"])
def test_rows_of_lookup_and_of_a_draft_with_a_support_are_one_proposal(found: int) -> None:
    support, q = torch.tensor([1, 4, 7]), torch.tensor([[[0.2, 0.3, 0.5]], [[0.6, 0.1, 0.3]]])
    drawn = Proposal(torch.tensor([[7], [1]]), [0, 1], q, 1, support)
    looked = Proposal(torch.tensor([[found, 7], [0, 0]]), [2, 0], None, 0)
    both = _joined(looked, drawn, 8)
    assert both.tokens.tolist() == [[found, 7], [1, 0]]
    assert (both.lengths, both.steps) == ([2, 1], 1)
    assert (both.support is None) == (found == 6)
    whole = both.on_all(8).q
    assert whole is not None
    assert whole[0].argmax(-1).tolist() == [found, 7] and whole[0].sum(-1).tolist() == [1.0, 1.0]
    torch.testing.assert_close(whole[1, 0], torch.tensor([0, 0.6, 0, 0, 0.1, 0, 0, 0.3]))
