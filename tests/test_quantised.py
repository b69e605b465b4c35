"""Packed weights: what the products compute, how far the numbers move, and models that run by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError
from lossyspec.fused import Dense
from lossyspec.loading import load
from lossyspec.quantised import GROUP, Int4, Int8, quantise
from lossyspec.runner import Runner
from lossyspec.settings import QUANTISED, Settings

PROMPTS = [[5, 6, 7, 8, 5, 6], [3, 4, 5], [20, 21, 22, 20, 21]]


def dense(rows: int = 48, width: int = 64, bias: bool = False, seed: int = 0) -> Dense:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.1 * torch.randn(rows, width, generator=generator)
    return Dense(weight, torch.randn(rows, generator=generator) if bias else None)


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (70,)])
def test_a_product_is_that_of_the_weights_it_says_it_has(kind: type[Any], bias: bool, shape: tuple[int, ...]) -> None:
    whole = dense(bias=bias)
    part = kind.of(whole)
    x = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(1))
    got = part(x)
    want = x.bfloat16().float() @ part.dense().T + (whole.bias if whole.bias is not None else 0.0)
    assert got.dtype == x.dtype and got.shape == (*shape, 48)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_int8_moves_a_weight_by_half_a_step_at_most() -> None:
    whole = dense()
    step = whole.weight.abs().amax(-1, keepdim=True) / 127
    error = (Int8.of(whole).dense() - whole.weight).abs()
    assert (error <= 0.5 * step + 0.5 * step).all()  # half a step, and what rounding the scale to bf16 moves at the ends
    assert error.mean() < 0.35 * step.mean()


def test_int4_moves_a_weight_by_half_a_step_of_its_group_at_most() -> None:
    whole = dense()
    groups = whole.weight.view(48, -1, GROUP)
    step = ((groups.amax(-1) - groups.amin(-1)) / 15).unsqueeze(-1)
    error = (Int4.of(whole).dense().view_as(groups) - groups).abs()
    assert (error <= 0.62 * step).all()
    assert error.mean() < 0.3 * step.mean()


def q4_1(rows: int, width: int) -> Tensor:
    """Weights as a Q4_1 file stores them: w = d n + m, with all of 0 .. 15 in each block."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.stack([torch.randperm(GROUP, generator=generator) % 16 for _ in range(rows * width // GROUP)])
    scale = 0.01 + 0.02 * torch.rand(len(numbers), 1, generator=generator)
    least = -8 * scale + 0.01 * torch.randn(len(numbers), 1, generator=generator)
    return (scale.half().float() * numbers + least.half().float()).view(rows, width)


def test_int4_keeps_the_numbers_of_a_q4_1_file_but_for_the_rounding_of_its_scales() -> None:
    weight = q4_1(32, 64)
    part = Int4.of(Dense(weight, None))
    error = (part.dense() - weight).abs().max() / weight.abs().max()
    assert error < 2**-7
    groups = weight.view(32, -1, GROUP)
    naive = ((groups / groups.abs().amax(-1, keepdim=True) * 7).round() / 7 * groups.abs().amax(-1, keepdim=True)).view_as(
        weight
    )
    assert (part.dense() - weight).square().mean() < 0.01 * (naive - weight).square().mean()


def test_int4_refuses_widths_that_it_cannot_group() -> None:
    for rows, width in ((48, 40), (20, 64)):
        with pytest.raises(ConfigurationError, match=f"{rows} x {width}"):
            Int4.of(dense(rows, width))


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_quantised_model_is_loaded_checked_freed_and_stays_lossless_against_itself(
    architecture: str, precision: Any, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", architecture)
    loaded, whole = load(str(folder), precision), load(str(folder), "fp32")
    assert loaded.stack is not None and loaded.weights == whole.weights > 0
    assert all(not layer.mlp.down_proj.weight.numel() for layer in loaded.model.base_model.layers)
    decoder = Decoder(loaded)
    plain = decoder.generate_ids(PROMPTS, 24, settings=Settings(draft_length=0), temperature=0.0)
    drafted = decoder.generate_ids(PROMPTS, 24, settings=Settings(draft_length=4), temperature=0.0)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert drafted.stats.drafted > 0
    logits = []
    for part in (loaded, whole):
        runner = Runner(part.model, stack=part.stack)
        runner.start([[5]], 16)
        logits.append(runner.logits(torch.tensor([PROMPTS[0]]), [0]).softmax(-1))
    distance = float(0.5 * (logits[0] - logits[1]).abs().sum(-1).mean())
    assert 0 < distance < 0.2


def test_int4_int8_keeps_the_ends_in_int8() -> None:
    for name, wanted in (("int4-int8", [Int8, Int4, Int4, Int8]), ("int4", [Int4] * 4), ("int8", [Int8] * 4)):
        config = tiny_config("llama", 101)
        config.num_hidden_layers = 4
        stack = quantise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), name)
        assert [type(layer.down) for layer in stack.layers] == wanted
        assert isinstance(stack.head, Int8)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="int8 needs a model of the Llama family, and gpt2 is another"):
        quantise(tiny_model("gpt2"), "int8")
