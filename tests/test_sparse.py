"""Block-sparse attention: what a query sees, that nothing else is read, and that a law depends on the prefix alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import lively_model
from torch import Tensor

from lossyspec.attention import attend
from lossyspec.decoding import Job, decode
from lossyspec.errors import ConfigurationError
from lossyspec.kv_cache import RowCache
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.quantised import quantise
from lossyspec.runner import Runner
from lossyspec.settings import Attention, Sampling, Settings
from lossyspec.sparse import BlockIndex, SparseReader, pick_blocks
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping

SMALL = Attention(block=8, sink=1, window=2, top=2, side="verify")


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(
    runner: Runner, prompts: list[list[int]], config: Settings, new: int = 24, temperature: float = 0.0
) -> list[list[int]]:
    job = Job(config, Sampling(temperature=temperature), Stopping(new), torch.Generator().manual_seed(1))
    *_, rows = decode(runner, NgramDraft(), prompts, job, Stats())
    return [row.output for row in rows]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(lively_model("llama"))


# what a query sees


def read_of(keys: Tensor, starts: list[int], attention: Attention) -> tuple[SparseReader, Any]:
    """A reader of a pass of one token over a stored layer of one head."""
    runner = Runner(tiny_model("llama"))
    stack = runner.check_sparse()
    stack.kv_heads = keys.shape[1]
    cache = RowCache(1, keys.shape[2])
    layer: Any = cache.layers[0]
    layer.keys, layer.values, layer.is_initialized = keys, keys.clone(), True
    cache.place(starts, 1, keys.device)
    return SparseReader(stack, cache, attention, starts, None), layer


def test_the_block_that_holds_the_needle_is_seen() -> None:
    keys = 0.1 * torch.randn(1, 1, 128, 4, generator=torch.Generator().manual_seed(0))
    keys[0, 0, 41] = torch.tensor([9.0, 0, 0, 0])
    reader, _ = read_of(keys, [119], Attention(block=8, sink=1, window=2, top=1, side="verify"))
    seen = reader.seen(0, torch.tensor([[[[1.0, 0, 0, 0]]]]))
    assert seen[0, 0, 0].nonzero().flatten().tolist() == [0, 41 // 8, 13, 14]
    away = reader.seen(0, torch.tensor([[[[-1.0, 0, 0, 0]]]]))
    assert not away[0, 0, 0, 41 // 8]


def test_skipped_blocks_are_not_read() -> None:
    keys = torch.randn(1, 2, 128, 4, generator=torch.Generator().manual_seed(0))
    q, new = torch.randn(1, 1, 4, 4), torch.randn(1, 2, 1, 4)
    reader, layer = read_of(keys, [119], SMALL)
    want = reader(0, q, new, new)
    seen = reader.seen(0, q)[0, :, 0]
    assert seen.sum(-1).tolist() == [SMALL.kept] * 2
    for head, block in (~seen).nonzero().tolist():
        for part in (layer.keys, layer.values):
            part[0, head, block * 8 : (block + 1) * 8] = torch.nan
    again = SparseReader(reader.stack, reader.cache, SMALL, [119], None)  # the next pass: the blocks are summed up by now
    assert torch.equal(again(0, q, new, new), want)
    assert want.isfinite().all()


def test_picked_blocks_are_copies_in_order_and_a_cache_of_one_row_serves_many() -> None:
    part = torch.arange(2 * 2 * 16 * 3.0).view(2, 2, 16, 3)
    blocks = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 0]]])
    got = pick_blocks(part, blocks, 8)
    assert torch.equal(got[0, 0], torch.cat([part[0, 0, 8:], part[0, 0, :8]]))
    assert torch.equal(got[1, 1], torch.cat([part[1, 1, :8], part[1, 1, :8]]))
    one = pick_blocks(part[:1], blocks, 8)
    assert torch.equal(one[1, 0], torch.cat([part[0, 0, 8:], part[0, 0, 8:]]))


def plain_sparse(q: Tensor, keys: Tensor, values: Tensor, position: int, attention: Attention) -> Tensor:
    """One query by the definition, for one row: q (heads, size), keys and values (kv_heads, T, size)."""
    group, block = q.shape[0] // keys.shape[0], attention.block
    assert attention.window is not None
    assert attention.sink is not None
    assert attention.top is not None
    out = []
    for head in range(keys.shape[0]):
        own = position // block
        always = {b for b in range(own + 1) if b < attention.sink or b > own - attention.window}
        queries = q[head * group : (head + 1) * group]
        scored = []
        for b in sorted(set(range(own + 1)) - always):
            part = keys[head, b * block : (b + 1) * block]
            bound = torch.maximum(queries * part.amax(0), queries * part.amin(0)).sum()
            scored.append((float(bound), b))
        always |= {b for _, b in sorted(scored, reverse=True)[: attention.top]}
        slots = [slot for b in sorted(always) for slot in range(b * block, (b + 1) * block) if slot <= position]
        weights = (queries @ keys[head, slots].T).softmax(-1)
        out.append(weights @ values[head, slots])
    return torch.cat(out).flatten()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_pass_of_any_rows_and_tokens_is_the_definition_query_by_query(
    starts: list[int], count: int, heads: tuple[int, int], sink: int, window: int, top: int
) -> None:
    torch.manual_seed(sum(starts) + count)
    attention = Attention(block=8, sink=sink, window=window, top=top, side="verify")
    keys, values = torch.randn(2, len(starts), heads[1], 128, 4)
    q, k, v = torch.randn(len(starts), count, heads[0], 4), *torch.randn(2, len(starts), heads[1], count, 4)
    reader, layer = read_of(keys, starts, attention)
    layer.values = values
    reader.cache.place(starts, count, keys.device)
    reader = SparseReader(reader.stack, reader.cache, attention, starts, None)
    got = reader(0, q, k, v)
    for row, start in enumerate(starts):
        for place in range(count):
            want = plain_sparse(q[row, place], layer.keys[row], layer.values[row], start + place, attention)
            torch.testing.assert_close(got[row, place], want, rtol=1e-4, atol=1e-5)


# the index


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_index_is_right_for_whole_blocks_whatever_was_rolled_back(moves: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    cache, filled = RowCache(1, 120), [0, 0]
    for move in moves:
        count = 10
        cache.place(filled, count, torch.device("cpu"))
        cache.update(torch.randn(2, 1, count, 3), torch.randn(2, 1, count, 3), 0)
        index = BlockIndex.of(cache, 8)
        if seed % 2:  # some passes look at the index, with what they have just written
            index.expect([length + count for length in filled])
            index.refresh(0)
        filled = [length + kept for length, kept in zip(filled, move, strict=True)]  # the rest is rolled back
    cache.place(filled, 1, torch.device("cpu"))
    index.expect(filled)
    bounds, keys = index.refresh(0), cache.layers[0].keys
    for row, length in enumerate(filled):
        for block in range(length // 8):
            part = keys[row, 0, block * 8 : (block + 1) * 8]
            assert torch.equal(bounds[row, 0, block], torch.cat([part.amax(0), part.amin(0)]))


# a model


def test_a_text_that_skips_nothing_has_the_dense_logits_exactly(runner: Runner) -> None:
    prompt = tokens_of(SMALL.kept * 8 - 2)
    found = []
    for attention in (None, SMALL):
        runner.start([prompt], 64)
        found.append(runner.logits(torch.tensor([[prompt[-1], 7, 8]]), [len(prompt) - 1], attention))
    assert torch.equal(*found)


def test_blocks_enough_for_all_of_a_longer_text_give_the_dense_logits(runner: Runner) -> None:
    prompts = [tokens_of(150), tokens_of(40, 1)]
    wide = Attention(block=8, sink=1, window=2, top=15, side="verify")
    found = []
    for attention in (None, wide):
        runner.start(prompts, 200)
        step = torch.tensor([[prompt[-1], 7, 8] for prompt in prompts])
        found.append(runner.logits(step, [len(prompt) - 1 for prompt in prompts], attention))
    short, long = (torch.stack([logits[row] for logits in found]) for row in (1, 0))
    torch.testing.assert_close(short[0], short[1], rtol=1e-4, atol=1e-4)
    assert wide.skips(150)
    assert not torch.allclose(long[0], long[1], rtol=1e-4, atol=1e-4)  # one block of nineteen is skipped


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("llama", "fp32"), ("qwen3", "fp32"), ("gemma3", "fp32"), ("llama", "int4"), ("qwen3", "int8")],
)
def test_verifying_many_tokens_is_what_single_passes_are_in_a_ragged_batch(architecture: str, precision: str) -> None:
    """Beside packed weights entries may be kept in bf16, and then a last digit falls here or there."""
    model = lively_model(architecture)
    runner = Runner(model, stack=None if precision == "fp32" else quantise(model, precision))
    most = 1e-3 if precision == "fp32" else 2e-2
    prompts, more = [tokens_of(90), tokens_of(33, 1), tokens_of(61, 2)], tokens_of(12, 3)
    starts = [len(prompt) - 1 for prompt in prompts]
    runner.start(prompts, 128)
    step = torch.tensor([[prompt[-1], *more] for prompt in prompts])
    at_once = runner.logits(step, starts, SMALL)
    for row, prompt in enumerate(prompts):
        runner.start([prompt], 128)
        for place in range(step.shape[1]):
            alone = runner.logits(step[row : row + 1, place : place + 1], [starts[row] + place], SMALL)
            torch.testing.assert_close(alone[0, 0], at_once[row, place], rtol=most, atol=most)


def test_a_sparse_target_is_decoded_losslessly_by_rejected_and_accepted_drafts(runner: Runner) -> None:
    prompts = [tokens_of(90), (tokens_of(12, 1) * 9)[:70], tokens_of(30, 2)]
    plain = run(runner, prompts, Settings(draft_length=0, attention=SMALL))
    assert plain != run(runner, prompts, Settings(draft_length=0))
    for length in (2, 5):
        assert run(runner, prompts, Settings(draft_length=length, rule="exact", attention=SMALL)) == plain
    alone = [run(runner, [prompt], Settings(draft_length=3, rule="exact", attention=SMALL))[0] for prompt in prompts]
    assert alone == plain


def test_decoding_writes_no_dense_entry_and_a_roll_back_leaves_no_trace(runner: Runner) -> None:
    prompt, wrong, right = tokens_of(79), tokens_of(9, 4), tokens_of(9, 5)
    found = []
    for first in (wrong, right):
        runner.start([prompt], 128)
        runner.logits(torch.tensor([[prompt[-1], *first]]), [78], SMALL)
        runner.logits(torch.tensor([right]), [79], SMALL)
        found.append(runner.logits(torch.tensor([[5]]), [88], SMALL))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_attention_with_a_mask_by_head_is_the_same_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 2, 3, 9) > 0.4
    mask[..., 0] = True
    short = attend(q, keys, values, mask)
    monkeypatch.setattr("lossyspec.attention._SHORT", 0)
    torch.testing.assert_close(attend(q, keys, values, mask), short, rtol=1e-4, atol=1e-5)


# what is refused


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("gpt2", r"gpt2\) runs as transformers runs it"), ("mistral", r"a sliding window of 16 tokens")],
)
def test_a_model_without_sparse_attention_says_why(architecture: str, message: str) -> None:
    runner = Runner(lively_model(architecture))
    with pytest.raises(ConfigurationError, match=message):
        run(runner, [tokens_of(60)], Settings(draft_length=0, attention=SMALL))
