"""Passes by our own compiled code: products against exact ones, passes against torch's operations, and doing without."""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import lively_model
from test_feature_head import tiny_head
from torch import Tensor, nn

from lossyspec.acceptance import entropy
from lossyspec.cpu import instruction_sets
from lossyspec.drafting import Proposal, Request
from lossyspec.fused import Dense
from lossyspec.head_drafting import FeatureDraft
from lossyspec.likeness import apart
from lossyspec.native import build, laws, products
from lossyspec.native.passes import NativeStack, native_stack
from lossyspec.packed import CPU, NATIVE
from lossyspec.quantised import Int4, Int8, quantise
from lossyspec.runner import Runner
from lossyspec.sampling import Choice
from lossyspec.settings import Rule, Sampling, Settings
from lossyspec.verification import judge

compiled = pytest.mark.skipif(build.library() is None, reason="no g++, or a CPU without AVX2")
FAMILY = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


def matrix(kind: type[Any], rows: int, width: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    return kind.of(Dense(weight, None), NATIVE)


def exact(part: Any, x: Tensor) -> Tensor:
    return x.double() @ part.dense().double().T


@compiled
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Int4, Int8]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 9), st.integers(0, 1000))
def test_a_product_is_off_by_half_a_step_of_its_groups_at_most(
    kind: type[Any], count: int, rows: int, groups: int, seed: int
) -> None:
    part = matrix(kind, rows, groups * (32 if kind is Int4 else 4), seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, part.packed.inputs, generator=generator) * 10.0 ** (seed % 7 - 3)
    x *= 1 + 50 * (torch.rand(x.shape, generator=generator) < 0.02)  # outliers, as language models have them
    assert_within_half_a_step(part, x)


def assert_within_half_a_step(part: Any, x: Tensor) -> None:
    bound = (steps(x) / 2 * 1.02).double() @ part.dense().abs().double().T
    assert bool(((part(x) - exact(part, x)).abs() <= bound + 1e-5 * exact(part, x.abs()).abs() + 1e-30).all())


def steps(x: Tensor) -> Tensor:
    """What the last digit of each activation stands for, as products.h says."""
    width = x.shape[-1]
    sizes = nn.functional.pad(x.abs(), (0, -width % 32)).unflatten(-1, (-1, 32)).amax(-1)
    twice = (sizes.square() >= 2.25 * 0.9999 * sizes.square().mean(-1, keepdim=True)) | (sizes.shape[-1] < 4)
    by_group = (sizes / 127 / torch.where(twice, 254.0, 1.0)).repeat_interleave(32, -1)[..., :width]
    whole_row = x.abs().amax(-1, keepdim=True) / 127 / 254  # of int8 products by tiles
    return torch.maximum(by_group, whole_row)


@compiled
@pytest.mark.parametrize("kind", [Int4, Int8])
def test_a_row_is_the_same_to_the_bit_in_any_company(kind: type[Any]) -> None:
    part = matrix(kind, 100, 192)
    x = torch.randn(21, 192)
    x[3] *= 1e4
    x[7] *= 1e-6
    x[9] = 0.0
    together = part(x)
    for row in range(21):
        assert torch.equal(part(x[row : row + 1]), together[row : row + 1])
    assert torch.equal(part(x[2:9]), together[2:9])
    assert not together[9].any()


@compiled
@pytest.mark.parametrize("kind", [Int4, Int8])
def test_the_largest_numbers_do_not_overflow(kind: type[Any]) -> None:
    weight = torch.ones(32, 4096)
    weight[1::2] = -1.0
    weight[:, 0] *= 15.0 if kind is Int4 else 1.0
    part = kind.of(Dense(weight, None), NATIVE)
    x = torch.full((9, 4096), -3.0)
    torch.testing.assert_close(part(x), exact(part, x).float(), rtol=1e-5, atol=0.0)


@compiled
@pytest.mark.parametrize("kind", [Int4, Int8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_and_shows(kind: type[Any], bad: float) -> None:
    part = matrix(kind, 48, 192)
    clean = torch.randn(5, 192)
    want = part(clean)
    for place in range(0, 192, 5):
        x = clean.clone()
        x[2, place] = bad
        got = part(x)
        assert bool(got[2].isnan().all())
        assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@compiled
def test_int8_weights_come_out_as_they_went_in() -> None:
    weight = torch.randint(-127, 128, (37, 68), dtype=torch.int8)
    assert torch.equal(products.unpack8(products.pack8(weight, torch.ones(37))), weight)


@compiled
def test_the_numbers_are_those_of_torchs_kernels() -> None:
    """With more digits where a row is narrow; with up to four times their error, by 8 bits of a group, in a wide one."""
    for kind in (Int4, Int8):
        for width, most in ((64, 0.1), (512, 4.0)):
            generator = torch.Generator().manual_seed(0)
            whole = Dense(torch.randn(48, width, generator=generator), torch.randn(48, generator=generator))
            mine, theirs = kind.of(whole, NATIVE), kind.of(whole, CPU)
            assert torch.equal(mine.dense(), theirs.dense())
            x = torch.randn(2, 3, width, generator=generator)
            assert whole.bias is not None
            want = x @ mine.dense().T + whole.bias
            assert float((mine(x) - want).abs().max()) < most * float((theirs(x) - want).abs().max())


@compiled
@pytest.mark.parametrize("count", [1, 3, 5, 8, 21])
@pytest.mark.parametrize("width", [2, 50, 64, 192, 230])
def test_bf16_weights_are_multiplied_with_16_bits_of_an_activation(count: int, width: int) -> None:
    weight = torch.randn(37, width).bfloat16()
    x = torch.randn(count, width)
    got, bound = products.times(x, products.pack16(weight)), x.abs().double() @ weight.abs().double().T
    assert bool(((got - x.double() @ weight.double().T).abs() <= 2**-16 * bound).all())
    assert_alone_as_in_company(x, products.pack16(weight))


def assert_alone_as_in_company(x: Tensor, blocks: products.Blocks) -> None:
    """A row's product is the same to the bit whatever rows are beside it."""
    for count in range(1, len(x) + 1):
        got = products.times(x[:count], blocks)
        for row in range(count):
            assert torch.equal(products.times(x[row : row + 1], blocks), got[row : row + 1])


@compiled
@pytest.mark.parametrize("architecture", FAMILY)
def test_bf16_passes_are_nearer_to_fp32_than_torchs_and_share_the_cache(architecture: str) -> None:
    model = lively_model(architecture).to(torch.bfloat16)
    runner, theirs, exact = Runner(model), Runner(model), Runner(copy.deepcopy(model).float())
    assert runner._native is not None and exact._native is None
    theirs._native = None
    prompts, generator = [list(range(3, 33)), [5, 6, 7]], torch.Generator().manual_seed(0)
    starts = [29, 2]
    for each in (runner, theirs, exact):
        each.start(prompts, 96)
    assert runner.cache.layers[0].keys.dtype == torch.bfloat16
    for count in (1, 4, 11, 34):  # the last is more than the compiled code takes where bf16 has units of its own
        tokens = torch.randint(3, 90, (2, count), generator=generator)
        mine, other, want = (each.logits(tokens, starts) for each in (runner, theirs, exact))
        assert apart(mine, want) <= 1.2 * apart(other, want)
        starts = [start + count // 2 for start in starts]


@compiled
def test_a_second_copy_of_bf16_weights_is_made_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lossytune")
    model = lively_model("llama").to(torch.bfloat16)
    monkeypatch.setattr("lossyspec.native.passes.free_memory_bytes", lambda: 1000)
    assert Runner(model)._native is None and "1000 are free" in caplog.text
    monkeypatch.setattr("lossyspec.native.passes.free_memory_bytes", lambda: None)
    assert Runner(model)._native is not None


@compiled
@pytest.mark.parametrize("first", ["compiled code", "torch's operations"])
def test_both_kinds_of_passes_go_on_from_one_anothers_entries(first: str) -> None:
    mine, theirs = pair("llama", "int4")
    native, prompt = mine._native, list(range(3, 33))
    tokens, one_by_one = torch.tensor([[7, 8, 9]]), []
    mine._native = native if first == "compiled code" else None
    mine.start([prompt], 64)
    assert mine.cache.layers[0].keys.dtype == (torch.bfloat16 if mine._native else torch.float32)
    for column in range(3):
        mine._native = native if mine._native is None else None
        one_by_one.append(mine.logits(tokens[:, column : column + 1], [29 + column]))
    theirs.start([prompt], 64)
    assert apart(torch.cat(one_by_one, 1), theirs.logits(tokens, [29])) < 2e-2


@compiled
def test_output_rows_that_something_listens_to_stay_the_models_own() -> None:
    runner = Runner(lively_model("llama").to(torch.bfloat16))
    runner.start([[5, 6]], 16)
    heard: list[Any] = []
    with runner.model.get_output_embeddings().register_forward_hook(lambda *call: heard.append(call)):
        runner.logits(torch.tensor([[6]]), [1])
    runner.logits(torch.tensor([[7]]), [2])
    assert len(heard) == 1


def pair(architecture: str, precision: str) -> tuple[Runner, Runner]:
    """A runner by the compiled code, and one by torch's operations over the same products."""
    model = lively_model(architecture)
    stack = quantise(model, precision)
    ours, theirs = (Runner(model, stack=stack) for _ in range(2))
    assert ours._native is not None
    theirs._native = None
    return ours, theirs


@compiled
@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("precision", ["int8", "int4", "int4-int8"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_passes_are_those_of_torchs_operations(architecture: str, precision: str, kept: torch.dtype) -> None:
    """kept: of keys and values, which are bf16 beside packed weights. In fp32 what is left are roundings of digits, which
    differ where a sum was added in another order."""
    prompts = [list(range(3, 33)), [5, 6, 7], list(range(40, 60))]  # beyond the window of 16, within, beyond
    both = pair(architecture, precision)
    assert both[0].cache_dtype == torch.bfloat16 and both[1].cache_dtype == torch.float32
    assert both[0]._native is not None
    both[0]._native.dtype, exact = kept, kept == torch.float32
    generator = torch.Generator().manual_seed(0)
    starts, rejected = [len(prompt) - 1 for prompt in prompts], [0, 3, 1]
    for runner in both:
        runner.start(prompts, 80)
    for count in (1, 4, 11, 1):  # fewer than a block of rows, more than one
        tokens = torch.randint(3, 90, (3, count), generator=generator)
        mine, theirs = (runner.logits(tokens, starts) for runner in both)
        assert apart(mine, theirs) < (2e-3 if exact else 2e-2)
        for one, other in zip(both[0].cache.layers, both[1].cache.layers, strict=True):
            for part, its in ((one.keys, other.keys), (one.values, other.values)):
                assert part.dtype == kept
                assert apart(part, its) < 4e-2  # at the position where it is largest
                if exact:
                    torch.testing.assert_close(part, its, rtol=1e-2, atol=1e-2)
        starts = [start + max(0, count - back) for start, back in zip(starts, rejected, strict=True)]


def attended(keys: Tensor, values: Tensor, states: Tensor, starts: list[int], window: int, threads: int = 2) -> Tensor:
    """(rows, count, heads, size) by the compiled code, of keys and values (rows, kv_heads, slots, size)."""
    code, y, where = build.library(), torch.full_like(states, float("nan")), torch.tensor(starts)
    assert code is not None
    sizes = [*states.shape[:3], keys.shape[1], keys.shape[3], keys.shape[2], window, keys.dtype == torch.bfloat16, threads]
    given = [part.data_ptr() for part in (keys, values, states, where)]
    assert code.lossyspec_attend(*given, *sizes, y.data_ptr()) == 0
    return y


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 128), (6, 2, 20), (2, 1, 8), (3, 3, 96)])
def test_attention_is_that_of_exact_sums_and_the_same_to_the_bit_in_any_company(
    heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype
) -> None:
    generator, starts, slots = torch.Generator().manual_seed(0), [300, 0, 63, 64, 117, 128] * 3, 330
    for count in (1, 3, 11):
        shape = (len(starts), kv_heads, slots, size)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        states = torch.randn(len(starts), count, heads, size, generator=generator) * 0.5
        for row, start in enumerate(starts):  # what was never written is not read
            keys[row, :, start + count :], values[row, :, start + count :] = float("nan"), float("nan")
        found = attended(keys, values, states, starts, window)
        for row, start in enumerate(starts[:6]):
            alone = attended(keys[row : row + 1], values[row : row + 1], states[row : row + 1], [start], window)
            assert torch.equal(found[row], alone[0])
            for column in range(count):
                last = start + column + 1
                seen = slice(max(0, last - window) if window else 0, last)
                k, v = (part[row, :, seen].double().repeat_interleave(heads // kv_heads, 0) for part in (keys, values))
                weights = (k @ states[row, column, :, :, None].double()).softmax(1)
                torch.testing.assert_close(found[row, column].double(), (weights * v).sum(1), rtol=1e-4, atol=1e-5)
                one = states[row : row + 1, column : column + 1].contiguous()
                itself = attended(keys[row : row + 1], values[row : row + 1], one, [start + column], window, threads=1)
                assert torch.equal(found[row, column], itself[0, 0])


@compiled
def test_a_token_of_a_pass_is_the_same_to_the_bit_whatever_it_verifies_beside_it() -> None:
    runner, _ = pair("qwen3", "int4")
    tokens, prompt = torch.tensor([[6, 9, 30, 4, 77, 12, 8, 15, 21, 40]]), list(range(3, 20))
    runner.start([prompt], 64)
    together = runner.logits(tokens, [16])
    runner.start([prompt, [5, 6]], 64)
    for column in range(10):
        alone = runner.logits(torch.stack([tokens[0, column : column + 1], torch.tensor([7])]), [16 + column, 1 + column])
        assert torch.equal(alone[0], together[0, column : column + 1])


@compiled
def test_a_number_that_is_not_finite_is_reported() -> None:
    from lossyspec.errors import NumericalError

    runner, _ = pair("llama", "int8")
    with torch.no_grad():
        runner.model.base_model.embed_tokens.weight[9] = float("nan")
    runner.start([[3, 4], [5, 6]], 16)
    with pytest.raises(NumericalError, match="position 1 of row 1"):
        runner.logits(torch.tensor([[4], [9]]), [1, 1])


@compiled
def test_a_packed_draft_head_steps_as_by_torchs_operations() -> None:
    model = lively_model("llama")
    drafts = [FeatureDraft(tiny_head(), copy.deepcopy(model), 90, packed=True) for _ in range(2)]
    assert drafts[0]._native is not None
    assert FeatureDraft(tiny_head(width=64), model, 90, packed=True)._native is None  # of another width than its target
    drafts[1]._native = None
    generator, outputs = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for draft in drafts:
            draft.head.bias.copy_(torch.linspace(-1, 1, 60))
    tokens, features = torch.randint(3, 90, (2, 6), generator=generator), torch.randn(2, 6, 32, generator=generator)
    for draft in drafts:
        draft.start([[3], [4]], 32)
        with torch.inference_mode():
            first, laws = draft._step(tokens[:, :5], features[:, :5], [0, 2], [4, 2])
            deeper, more = draft._step(tokens[:, 5:], first, [5, 5], [0, 0])
        outputs.append((torch.cat([first, deeper], 1), torch.cat([laws, more], 1)))
    assert outputs[0][0].shape == (2, 2, 32) and outputs[0][1].shape == (2, 2, 60)
    for mine, theirs in zip(*outputs, strict=True):
        assert apart(mine, theirs) < 2e-3


@compiled
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("theta", [0.0, 0.5, 0.9])
def test_a_round_of_a_head_in_one_call_is_that_of_its_steps(temperature: float, own: bool, theta: float) -> None:
    model = lively_model("llama")
    drafts = [FeatureDraft(tiny_head(), copy.deepcopy(model), 90, packed=True) for _ in range(2)]
    native, prefixes = drafts[1]._native, [list(range(3, 12)), [4], [5, 6, 7]]
    assert native is not None
    features = torch.randn(3, 40, 32, generator=torch.Generator().manual_seed(0))
    choices = [[Choice(Sampling(temperature=temperature), made) for made in generators(3, own)] for _ in range(2)]
    for grown in (0, 3):  # a first round, and one that goes on from there
        texts = [[*prefix, *range(20, 20 + grown)] for prefix in prefixes]
        settings, limits, found = Settings(draft_length=4, tau=0.8, theta=theta), [4, 2, 1], []
        for draft, chosen in zip(drafts, choices, strict=True):
            if not grown:
                draft.start(texts, 40)
            draft.observe(features, [0, 0, 0])
            asked = Request(texts, limits, settings, chosen)
            if draft is drafts[0]:
                with mock.patch.object(Request, "softmax_temperature", None):
                    found.append(draft.propose(asked))
            else:
                with mock.patch.object(native, "chain", wraps=native.chain) as chain:
                    found.append(draft.propose(asked))
                assert chain.call_count == 1
        mine, theirs = found
        assert (mine.lengths, mine.steps) == (theirs.lengths, theirs.steps)
        assert mine.tokens.shape == theirs.tokens.shape
        assert (mine.q is None) == (theirs.q is None) == (temperature == 0 or not any(mine.lengths))
        for row, length in enumerate(mine.lengths):  # a prompt of one token has nothing to draft from
            assert torch.equal(mine.tokens[row, :length], theirs.tokens[row, :length])
            if mine.q is not None and theirs.q is not None:
                torch.testing.assert_close(mine.q[row, :length], theirs.q[row, :length], rtol=1e-4, atol=1e-6)
    assert [chosen.generator.get_state().tolist() for chosen in choices[0]] == [
        chosen.generator.get_state().tolist() for chosen in choices[1]
    ]
    with pytest.raises(ValueError, match="cache of 40 slots is too small"):
        drafts[1].propose(Request([list(range(3, 42))] * 3, [4, 4, 4], settings, choices[1]))


@compiled
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_breaks_drafts_nothing_from_there_on(temperature: float) -> None:
    draft = FeatureDraft(tiny_head(), lively_model("llama"), 90, packed=True)
    features = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    features[1, 5] = float("nan")
    draft.start([list(range(3, 12)), list(range(3, 12))], 40)
    draft.observe(features, [0, 0])
    choices = [Choice(Sampling(temperature=temperature), made) for made in generators(2, True)]
    request = Request([list(range(3, 12))] * 2, [3, 3], Settings(draft_length=3), choices)
    assert request.softmax_temperature is not None
    assert draft.propose(request).lengths == [3, 0]


def generators(count: int, own: bool) -> list[torch.Generator]:
    """One for each row, or one for all."""
    made = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return made if own else [made[0]] * count


@compiled
def test_a_stack_with_parts_that_the_code_has_not_runs_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lossytune")
    stack = quantise(lively_model("llama"), "int8")
    stack.model.base_model.rotary_emb.rope_type = "dynamic"
    assert native_stack(stack) is None and "depend on the text's length" in caplog.text
    stack.model.base_model.rotary_emb.rope_type = "default"
    object.__setattr__(stack.layers[1], "activation", torch.nn.ReLU())
    assert native_stack(stack) is None and "activation ReLU, SiLU" in caplog.text


ONE_HOT = [(rule, "one-hot") for rule in laws.ONE_HOT_RULES]
NUMBERS = st.sampled_from([0.0, -1.0, 3.5, -50.0, 88.0, -300.0, 1e30, float("-inf"), float("inf"), float("nan")])


@compiled
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(NUMBERS | st.floats(-90, 90, width=32), min_size=35, max_size=35), min_size=1, max_size=3), st.data()
)
def test_laws_and_largest_numbers_are_those_of_torch(rows: list[list[float]], data: Any) -> None:
    logits = torch.tensor(rows)[:, : data.draw(st.integers(1, 35))]
    temperature = data.draw(st.sampled_from([0.1, 0.7, 1.0, 3.0]))
    torch.testing.assert_close(
        laws.softmax(logits, temperature), (logits / temperature).softmax(-1), rtol=1e-5, atol=1e-43, equal_nan=True
    )
    torch.testing.assert_close(laws.largest(logits), logits.amax(-1), rtol=0, atol=0, equal_nan=True)
    p = (logits / temperature).softmax(-1)
    torch.testing.assert_close(laws.entropy(p), entropy(p.double()).float(), rtol=2e-6, atol=1e-6, equal_nan=True)


@compiled
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*((rule, kind) for rule in laws.RULES for kind in ("all", "support")), *ONE_HOT]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 10_000),
)
def test_verdicts_are_those_of_torchs_operations(
    case: tuple[Rule, str], rows: int, width: int, most: float, seed: int
) -> None:
    rule, kind = case
    generator = torch.Generator().manual_seed(seed)
    p = (3 * torch.randn(rows, width + 1, 300, generator=generator)).softmax(-1)
    p[p < 1e-4] = 0.0
    p /= p.sum(-1, keepdim=True)
    support = torch.randperm(300, generator=generator)[:80].sort().values if kind == "support" else None
    laws_of_draft = p[:, :width] + 1e-3 if support is None else p[:, :width, support] + 1e-3
    near = laws_of_draft * torch.rand(laws_of_draft.shape, generator=generator).pow(seed % 3)
    if seed % 2:  # a filtered draft
        near *= torch.rand(near.shape, generator=generator) < 0.5
        near[..., 0] += 1e-3
    q = None if kind == "one-hot" else near / near.sum(-1, keepdim=True)
    chosen = torch.multinomial(near.flatten(0, 1), 1, generator=generator).view(rows, width)
    tokens = chosen if support is None else support[chosen]
    lengths = torch.randint(0, width + 1, (rows,), generator=generator).tolist()
    alpha = most * torch.randint(0, 2, (rows, width), generator=generator)  # some positions are protected
    proposal, numbers = Proposal(tokens, lengths, q, width, support), torch.rand(rows, width + 1, generator=generator)
    asked = (p, proposal, Settings(rule=rule, alpha=most, draft_length=width), alpha, numbers, False)
    with mock.patch.object(laws, "judge", wraps=laws.judge) as compiled_judge:
        mine = judge(*asked)
    with mock.patch.object(laws, "takes", lambda values: False):
        theirs = judge(*asked)
    assert compiled_judge.call_count == 1
    assert (mine.accepted, mine.following) == (theirs.accepted, theirs.following)
    ends = [[min(kept + 1, length)] for kept, length in zip(mine.accepted, lengths, strict=True)]
    reached = torch.arange(width) < torch.tensor(ends)
    torch.testing.assert_close(mine.variation, theirs.variation * reached, rtol=1e-4, atol=1e-6)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing compiled yet, and nothing of what is tried here kept."""
    monkeypatch.setenv("LOSSYTUNE_CACHE", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


@compiled
def test_the_code_is_compiled_once_and_kept(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lossytune")
    assert build.library() is not None
    [kept] = (fresh / "native").iterdir()
    assert kept.suffix == ".so" and caplog.text.count("compiled the passes") == 1
    build.library.cache_clear()
    assert build.library() is not None and caplog.text.count("compiled the passes") == 1


@compiled
@pytest.mark.parametrize(
    ("kind", "needs"),
    [("haswell", "avx2"), ("skylake-avx512", "avx512bw"), ("native", "amx_tile"), ("emulated tiles", "avx2")],
)
def test_cpus_without_newer_instructions_get_the_same_numbers(
    kind: str, needs: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third is a CPU with tiles that the system does not let us use, the last one the code for tiles on any CPU."""
    if needs not in instruction_sets():
        pytest.skip(f"this CPU has no {needs}")
    parts = [matrix(each, 100, 192) for each in (Int4, Int8)]
    weight = torch.randn(100, 230).bfloat16()
    x, wide, found = torch.randn(11, 192), torch.randn(11, 230), []
    x[:, :9] *= 30.0  # in a group that gets second digits
    x[::3, 64:66] *= 40.0
    runner, _ = pair("qwen3", "int4-int8")
    for other in (False, True):
        if other and kind == "emulated tiles":
            tiles = f'-DEMULATED_TILES="{Path(__file__).parent / "emulated_tiles.h"}"'
            monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, tiles))
            monkeypatch.setattr(build, "_TILES", {"no such instructions"})
        elif other:
            flags = tuple(f"-march={kind}" if flag == "-march=native" else flag for flag in build._FLAGS)
            monkeypatch.setattr(build, "_FLAGS", flags)
            monkeypatch.setattr(build, "_allowed", lambda code: False)
            if kind != "native":
                monkeypatch.setattr(build, "instruction_sets", lambda: ["avx2"])
        build.library.cache_clear()
        assert build.library() is not None
        for blocks, rows in ((parts[0].packed, x), (parts[1].packed, x), (products.pack16(weight), wide)):
            assert_alone_as_in_company(rows, blocks)
        for part in parts:
            assert_within_half_a_step(part, x)
        assert runner._fused is not None
        runner._native = NativeStack(runner._fused)
        runner._native.dtype = torch.float32  # rounded to bf16, numbers that are a little apart can come to be more so
        runner.start([[5, 6, 7], [3, 4]], 16)
        logits = runner.logits(torch.tensor([[8, 9, 3], [5, 6, 4]]), [2, 1])
        found.append([products.times(wide, products.pack16(weight)), logits])
    assert len(list((fresh / "native").iterdir())) == 2
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-3, atol=2e-3)


def test_without_a_compiler_torchs_kernels_stay(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lossytune")
    monkeypatch.setattr(build, "instruction_sets", lambda: ["avx2"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert build.library() is None and "apt-get install g++" in caplog.text
    assert isinstance(Int4.of(Dense(torch.randn(16, 32), None)).packed, Tensor)
    stack = quantise(lively_model("llama"), "int4")
    assert native_stack(stack) is None


@pytest.mark.parametrize("switch", ["off", "0", "OFF"])
def test_it_can_be_turned_off(switch: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, switch)
    assert build.library() is None and not list(fresh.iterdir())


def test_a_cpu_without_the_instructions_has_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "instruction_sets", lambda: ["asimd"])
    assert build.library() is None and not list(fresh.iterdir())


def test_a_compiler_that_fails_is_told_of_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(command: list[str], **options: Any) -> Any:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "g++ 1.0", "")
        raise subprocess.CalledProcessError(1, command, stderr="stack.cpp: out of luck")

    monkeypatch.setattr(build, "instruction_sets", lambda: ["avx2"])
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(subprocess, "run", failing)
    assert build.library() is None and "out of luck" in caplog.text
    assert not list((fresh / "native").iterdir())
