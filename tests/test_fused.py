"""The fused stack against transformers' own forward, and its weights, which are the model's own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import lively_model
from torch import Tensor
from torch.nn import functional as F

import lossyspec.attention as attention
from lossyspec.attention import attend
from lossyspec.fused import FusedStack, fuse
from lossyspec.likeness import apart, tolerance
from lossyspec.runner import Runner

FAMILY = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]
OTHERS = ["gpt2", "opt", "phi", "gpt_neox"]


@pytest.mark.parametrize("architecture", FAMILY)
def test_the_family_is_fused_and_gives_the_models_own_logits(architecture: str) -> None:
    model = lively_model(architecture)
    runner, own = Runner(model), Runner(model)
    assert runner._fused is not None
    own._fused = None
    rows, starts = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], [20, 21]], [6, 2, 1]
    for each in (runner, own):
        each.start(rows, 24)
    for tokens in (torch.tensor([[11, 2, 3], [5, 6, 7], [21, 9, 8]]), torch.tensor([[7], [8], [9]])):
        torch.testing.assert_close(runner.logits(tokens, starts), own.logits(tokens, starts), rtol=1e-4, atol=1e-4)
        assert runner.features is not None and own.features is not None
        torch.testing.assert_close(runner.features, own.features, rtol=1e-4, atol=1e-4)
        starts = [start + 2 for start in starts]


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_run_as_transformers_runs_them_and_the_reason_is_logged(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="lossytune"):
        assert fuse(lively_model(architecture)) is None
    assert "runs as transformers runs it: its parts are" in caplog.text


def test_fused_matrices_are_the_models_own_memory() -> None:
    model = lively_model("llama")
    stack = fuse(model)
    assert stack is not None
    layer = model.base_model.layers[0]
    qkv: Any = stack.layers[0].qkv
    assert layer.self_attn.q_proj.weight.data_ptr() == qkv.weight.data_ptr()
    assert torch.equal(qkv.weight[: len(layer.self_attn.q_proj.weight)], layer.self_attn.q_proj.weight)
    again = fuse(model)
    assert again is not None
    other: Any = again.layers[0].qkv
    assert other.weight.data_ptr() == qkv.weight.data_ptr()  # not moved a second time
    with torch.no_grad():
        layer.self_attn.v_proj.weight.zero_()
    assert not qkv.weight[-len(layer.self_attn.v_proj.weight) :].any()


def test_a_copy_of_a_fused_model_has_weights_of_its_own() -> None:
    model = lively_model("qwen2")
    first = Runner(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    second = Runner(other)
    tokens = torch.tensor([[5, 6, 7]])
    for runner in (first, second):
        runner.start([[5]], 8)
    with torch.inference_mode():
        for runner, owner in ((first, model), (second, other)):
            want = owner(input_ids=tokens, use_cache=False).logits
            torch.testing.assert_close(runner.logits(tokens, [0]), want, rtol=1e-4, atol=1e-4)


def test_a_model_that_does_more_than_its_parts_tell_is_left_to_transformers() -> None:
    model = lively_model("llama")
    plain = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits / 3
        return output

    model.forward = scaled
    assert isinstance(FusedStack(model), FusedStack)  # by its structure it is of the family
    assert fuse(model) is None


def slow_attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[2] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("bnhd,bhtd->bhnt", q, keys)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhnt,bhtd->bnhd", scores.softmax(-1), values).flatten(2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.integers(5, 9),
    st.booleans(),
    st.booleans(),
)
def test_attention_is_the_plain_formula_on_both_ways(
    batch: int, count: int, heads: tuple[int, int], length: int, masked: bool, short: bool
) -> None:
    torch.manual_seed(batch + 10 * count + 100 * length)
    q = torch.randn(batch, count, heads[0], 8)
    keys, values = torch.randn(2, batch, heads[1], length, 8)
    mask = None
    if masked:
        starts = torch.randint(0, length - count + 1, (batch,))
        place = starts[:, None] + torch.arange(count)
        mask = (torch.arange(length) <= place[..., None])[:, None]
    before = attention._SHORT
    attention._SHORT = 32 if short else 0
    try:
        got = attend(q, keys, values, mask)
    finally:
        attention._SHORT = before
    torch.testing.assert_close(got, slow_attend(q, keys, values, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_attention_is_as_exact_as_its_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count in (1, 3, 40):
        q, keys, values = 3 * torch.randn(5, count, 6, 8), torch.randn(5, 2, 90, 8), torch.randn(5, 2, 90, 8)
        q, keys, values = q.to(dtype), keys.to(dtype), values.to(dtype)
        mask = (torch.arange(90) <= torch.arange(45, 45 + count)[:, None])[None, None].expand(5, 1, -1, -1)
        got = attend(q, keys, values, mask)
        assert got.dtype == dtype
        want = slow_attend(q.float(), keys.float(), values.float(), mask)
        assert (got.float() - want).norm() <= 0.75 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("architecture", FAMILY)
def test_the_fused_stack_in_bf16_is_no_further_from_fp32_than_transformers_is(architecture: str) -> None:
    exact = lively_model(architecture)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        want = exact(input_ids=tokens, use_cache=False).logits
        theirs = model(input_ids=tokens, use_cache=False).logits.float()
    runner = Runner(model)
    assert runner._fused is not None
    runner.start([[3]], 48)
    ours = torch.cat([runner.logits(some, [int(some[0, 0]) - 3]) for some in tokens.split(8, 1)], 1)
    assert apart(ours, want) <= 1.5 * apart(theirs, want)


def test_apart_is_a_share_of_the_spread_at_the_worst_position() -> None:
    want = torch.randn(2, 3, 1000)
    got = want.clone()
    got[1, 2] += 0.5 * want.std()
    assert apart(want, want) == 0.0
    assert apart(got, want) == pytest.approx(0.5, rel=1e-3)
    got[0, 0, 0] = math.nan
    assert not apart(got, want) <= tolerance(torch.bfloat16)


def test_stale_entries_behind_the_mask_do_not_count() -> None:
    q, keys, values = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    mask = torch.tensor([[[[True, True, True, False, False, False], [True, True, True, True, False, False]]]])
    got = attend(q, keys, values, mask)
    keys[:, :, 4:], values[:, :, 4:] = 1e4, -1e4
    torch.testing.assert_close(attend(q, keys, values, mask), got)
    want = F.scaled_dot_product_attention(q.transpose(1, 2), keys[:, :, :4], values[:, :, :4], mask[..., :4], scale=1.0)
    torch.testing.assert_close(got, want.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
