"""The target as its own draft over a few blocks of its cache: lossless, whatever the rows, and replayed exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny
from test_decoding import lively_model
from test_sparse import tokens_of
from test_verification import assert_drawn_from

from lossyspec.decoder import Decoder
from lossyspec.decoding import decode
from lossyspec.drafting import CompactDraft, Proposal, Request
from lossyspec.drafts import TargetItself, draft_identity, draft_name, load_draft
from lossyspec.errors import ConfigurationError
from lossyspec.loading import load
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.rows import Job
from lossyspec.runner import Runner
from lossyspec.sampling import Choice
from lossyspec.self_drafting import SelfDraft
from lossyspec.settings import Attention, Sampling, Settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping
from lossyspec.tuner.trace import text_pass

SMALL = Attention(block=8, sink=1, window=1, top=2, side="draft")
#: more tokens of a round than its block of the window has
LONG = Settings(draft_length=12, rule="exact", attention=SMALL)


def run(
    target: Runner,
    draft: Any,
    prompts: list[list[int]],
    config: Settings,
    new: int = 32,
    temperature: float = 0.0,
    seed: int = 1,
) -> tuple[list[list[int]], Stats]:
    job = Job(config, Sampling(temperature=temperature), Stopping(new), torch.Generator().manual_seed(seed))
    stats = Stats()
    *_, rows = decode(target, draft, prompts, job, stats)
    return [row.output for row in rows], stats


@pytest.fixture(scope="module")
def target() -> Runner:
    return Runner(lively_model("llama"))


def self_draft(target: Runner, **options: Any) -> SelfDraft:
    return SelfDraft(target, target.vocab_size, **options)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_those_of_plain_decoding_in_a_ragged_batch(architecture: str) -> None:
    target = Runner(lively_model(architecture))
    prompts = [tokens_of(90), tokens_of(20, 1), tokens_of(61, 2)]
    plain, _ = run(target, None, prompts, Settings(draft_length=0))
    for config in (LONG, LONG.model_copy(update={"draft_length": 3})):
        drafted, stats = run(target, self_draft(target), prompts, config)
        assert drafted == plain
        assert 0 < stats.accepted < stats.drafted  # the blocks that it skips matter, and it does not draft in vain


def test_rows_that_end_early_and_another_batch_after_them_change_nothing(target: Runner) -> None:
    prompts, draft = [tokens_of(90), tokens_of(70, 1), tokens_of(61, 2)], self_draft(target)
    plain, _ = run(target, None, prompts, Settings(draft_length=0))
    ends = frozenset([plain[1][5]])
    job = Job(LONG, Sampling(temperature=0), Stopping(32, ends), torch.Generator())
    *_, rows = decode(target, draft, prompts, job, Stats())
    for row, output in zip(rows, plain, strict=True):
        assert row.output == output[: len(row.output)]
        assert row.finish_reason == "length" or row.output[-1] in ends
    assert {row.finish_reason for row in rows} == {"length", "stop"} or all(row.finish_reason == "stop" for row in rows)
    assert run(target, draft, prompts[::-1], LONG)[0] == plain[::-1]


def test_a_draft_that_sees_every_block_is_always_right(target: Runner) -> None:
    wide = Attention(block=8, sink=1, window=2, top=20, side="draft")
    draft, prompt = self_draft(target), tokens_of(90)
    target.start([prompt], 128)
    want = target.logits(torch.tensor([[prompt[-1]]]), [89])
    got = draft._step(draft._begin(wide, [89]), torch.tensor([[prompt[-1]]]), [89], 0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_text_that_skips_nothing_is_not_drafted(target: Runner) -> None:
    draft = self_draft(target, attention=SMALL)
    assert draft.least_prefix == 33
    for length, drafted in ((32, 0), (33, 3)):
        prompt = tokens_of(length)
        target.start([prompt], 64)
        request = Request([prompt], [3], LONG, [Choice(Sampling(temperature=0), torch.Generator())])
        assert draft.propose(request).lengths == [drafted]


def test_the_targets_entries_stay_its_own(target: Runner) -> None:
    prompt, draft = tokens_of(90), self_draft(target)
    target.start([prompt], 128)
    before = [layer.keys.clone() for layer in target.cache.layers]
    draft.propose(Request([prompt], [9], LONG, [Choice(Sampling(), torch.Generator())]))
    assert all(torch.equal(layer.keys, kept) for layer, kept in zip(target.cache.layers, before, strict=True))


def test_skipped_blocks_are_not_read(target: Runner) -> None:
    prompt, draft = tokens_of(90), self_draft(target)
    request = Request([prompt], [4], LONG, [Choice(Sampling(temperature=0), torch.Generator())])
    target.start([prompt], 128)
    want = draft.propose(request)
    excerpt = draft._excerpt
    assert excerpt is not None
    layer, picked = target.cache.layers[1], set()
    for head in range(2):
        for place in range(excerpt.width):
            part = excerpt.cache.layers[1].keys[0, head, place * 8 : place * 8 + 8]
            same = [b for b in range(11) if torch.equal(part, layer.keys[0, head, b * 8 : b * 8 + 8])]
            picked |= {(head, block) for block in same}
    skipped = {(head, block) for head in range(2) for block in range(11)} - picked
    assert len(skipped) == 2 * (11 - 3)  # sink and two chosen; the window is the block that the text ends in
    with torch.inference_mode():
        for head, block in skipped:
            layer.keys[0, head, block * 8 : block * 8 + 8] = torch.nan
            layer.values[0, head, block * 8 : block * 8 + 8] = torch.nan
    assert torch.equal(draft.propose(request).tokens, want.tokens)


def test_sampled_texts_come_from_the_targets_law(target: Runner) -> None:
    prompt, config = tokens_of(60), Settings(draft_length=2, rule="exact", attention=SMALL)
    rows = 1000
    tokens: list[int] = []
    for seed in range(2):
        outputs, stats = run(target, self_draft(target), [prompt] * rows, config, 2, temperature=1.5, seed=seed)
        assert stats.accepted < stats.drafted
        tokens += [output[0] for output in outputs]
    target.start([prompt], 64)
    law = (target.logits(torch.tensor([[prompt[-1]]]), [59])[0, 0].double() / 1.5).softmax(-1)
    kept = law.argsort(descending=True)[:12]
    grouped = torch.cat([law[kept], 1 - law[kept].sum(-1, keepdim=True)])
    place = {int(token): index for index, token in enumerate(kept)}
    assert_drawn_from(grouped, [place.get(token, len(kept)) for token in tokens])


def test_the_law_along_a_text_is_what_a_round_draws_from(target: Runner) -> None:
    draft = self_draft(target, attention=SMALL)
    assert isinstance(draft, CompactDraft)
    # in the second text the first 32 rounds skip nothing
    for prompt, output, begins in (
        (tokens_of(60), tokens_of(40, 3), (60, 93)),
        (tokens_of(1), tokens_of(70, 4), (20, 36, 64)),
    ):
        text_pass(target, prompt, output)
        laws = draft.along(prompt, output, None, 4)
        assert [law.shape for law in laws] == [(len(output), target.vocab_size)] * 4
        text = prompt + output
        for begin in begins:  # tokens before the round
            target.start([text[:begin]], 128)
            excerpt = draft._begin(SMALL, [begin - 1])
            for depth in range(4):
                step = torch.tensor([[text[begin - 1 + depth]]])
                got = draft._step(excerpt, step, [begin - 1], depth)[0, 0]
                torch.testing.assert_close(laws[depth][begin - len(prompt) + depth], got, rtol=1e-3, atol=1e-3)


def test_a_session_drafts_over_the_cache_that_it_keeps(target: Runner, tmp_path: Path) -> None:
    model = load(str(save_tiny(tmp_path / "target")), "fp32")
    decoder = Decoder(dataclasses.replace(model, model=lively_model("llama")), TargetItself(), LONG)
    chat, prompt = decoder.session(), tokens_of(60)
    for extra in ((), (5, 6, 7)):
        answer = chat.generate_ids([*prompt, *extra], 24, temperature=0.0)
        fresh = decoder.generate_ids([[*prompt, *extra]], 24, temperature=0.0)  # in between, on the decoder's own cache
        assert answer[0].tokens == fresh[0].tokens
        assert answer.stats.drafted > 0
        prompt = [*prompt, *answer[0].tokens]


def test_another_precision_of_the_target_drafts_over_copies_of_its_entries(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "target"))
    model = load(folder, "fp32")
    draft = load_draft("self:bf16", model, "fp32")
    assert isinstance(draft, TargetItself)
    assert draft.model is not None
    assert draft.model.precision == "bf16"
    decoder, prompts = Decoder(model, draft, LONG), [tokens_of(90), tokens_of(61, 2)]
    got = decoder.generate_ids(prompts, 24, temperature=0.0)
    plain = Decoder(model, None, Settings(draft_length=0)).generate_ids(prompts, 24, temperature=0.0)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in plain]
    assert got.stats.accepted > 0
    identity = draft_identity(draft)
    assert (identity.kind, identity.id, draft_name(identity)) == ("self", "self:bf16", "self:bf16")
    same = load_draft("self:fp32", model, "fp32")
    assert same == TargetItself()
    with pytest.raises(ConfigurationError, match=r"draft is 'self:int5'; allowed: self, or self:PRECISION with one of fp32"):
        load_draft("self:int5", model, "fp32")


def test_the_side_draft_with_another_draft_is_refused(target: Runner) -> None:
    with pytest.raises(ConfigurationError, match=r"side is 'draft', and the draft is NgramDraft: only the draft 'self'"):
        run(target, NgramDraft(), [tokens_of(60)], LONG)
    assert run(target, self_draft(target), [tokens_of(60)], Settings(draft_length=0))[1].drafted == 0


def test_a_model_that_is_not_fused_cannot_be_its_own_draft() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a model of the Llama family"):
        self_draft(Runner(lively_model("gpt2")))


def test_nothing_is_drafted_for_rows_at_their_limit(target: Runner) -> None:
    prompts = [tokens_of(60), tokens_of(70, 1)]
    target.start(prompts, 128)
    request = Request(prompts, [0, 2], LONG, [Choice(Sampling(), torch.Generator().manual_seed(0))] * 2)
    proposal: Proposal = self_draft(target).propose(request)
    assert proposal.lengths == [0, 2]
