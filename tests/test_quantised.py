"""Packed weights: what the products compute, how far the numbers move, and models that run by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_config, tiny_model
from test_decoding import lively_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lossyspec import digits
from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError
from lossyspec.fused import Dense
from lossyspec.likeness import apart, tolerance
from lossyspec.loading import load
from lossyspec.packed import CPU, CUDA, DIGITS, GROUP, NATIVE, Kernels, kernels_of, unusable
from lossyspec.quantised import Fp8, Int4, Int8, narrow, quantise, release
from lossyspec.runner import Runner, check_rollback
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
            Int4.of(dense(rows, width), CPU)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_quantised_model_is_loaded_checked_freed_and_stays_lossless_against_itself(
    architecture: str, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lossyspec.loading.unusable", lambda precision, device: None)  # torch has fp8 on CPUs, slowly
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


def test_fp8_rounds_weights_and_tokens_each_by_its_own_scale_and_nothing_else() -> None:
    whole = dense(bias=True)
    part, x = Fp8.of(whole), torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] *= 1e4
    x[1, 2] *= 1e-4
    assert part.nbytes == 48 * 64 + 48 * 4 and whole.bias is not None
    step = whole.weight.abs().amax(-1, keepdim=True) / 448
    error = (part.dense() - whole.weight).abs()
    assert bool((error <= whole.weight.abs() / 16 + step * 2**-9).all())  # half of the last of 3 bits, or a subnormal's
    scales = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scales).to(torch.float8_e4m3fn).float() * scales
    torch.testing.assert_close(part(x), rounded @ part.dense().T + whole.bias, rtol=1e-4, atol=1e-5)
    assert torch.equal(part(torch.zeros(1, 64)), whole.bias[None])
    for row in (0, 1):  # a token is the same in any company
        assert torch.equal(part(x)[row, 1], part(x[row, 1]))


def test_fp8_refuses_widths_that_it_cannot_tile() -> None:
    for rows, width in ((48, 40), (20, 64)):
        with pytest.raises(ConfigurationError, match=f"fp8 needs inputs and outputs in 16s; a matrix is {rows} x {width}"):
            Fp8.of(dense(rows, width))


def test_fp8_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"precision fp8 cannot be used: .* compute capability 8\.9"):
        load(str(save_tiny(tmp_path / "model", "llama")), "fp8")


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_narrow_stream_is_bf16_throughout_and_near_the_wide_one(architecture: str, precision: Any) -> None:
    model = lively_model(architecture)
    stack = quantise(model, precision)
    wide = Runner(model, stack=stack)
    wide.start([[5]], 16)
    want = wide.logits(torch.tensor([PROMPTS[0]]), [0])
    release(model, stack)
    narrow(model, stack)
    runner = Runner(model, stack=stack)
    runner.start([[5]], 16)
    got = runner.logits(torch.tensor([PROMPTS[0]]), [0])
    assert runner.features is not None and runner.features.dtype == runner.cache.layers[0].keys.dtype == torch.bfloat16
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
    assert 0 < apart(got, want) <= tolerance(torch.bfloat16)


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


# the forms that a GPU wants, with products of the same layout in plain torch


class Gpu:
    """What torch checks and computes on a GPU, in plain torch. The order within a tile is torch's own; here bytes stay."""

    def __init__(self) -> None:
        self.tiles: list[int] = []

    def convert(self, pairs: Tensor, tiles: int) -> Tensor:
        rows, half = pairs.shape
        assert pairs.dtype == torch.uint8 and pairs.is_contiguous() and tiles in (2, 4, 8)
        assert 2 * half % (16 * tiles) == 0 and rows % 8 == 0
        self.tiles.append(tiles)
        return pairs.view(torch.int32).view(rows // 8, 2 * half // (16 * tiles), 32, tiles // 2)

    def times4(self, x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        rows, width = 8 * packed.shape[0], x.shape[1]
        assert x.dtype == scales.dtype == torch.bfloat16 and x.is_contiguous() and group in (32, 64, 128, 256)
        assert packed.shape[1] == width // (32 * packed.shape[3]) and scales.shape == (width // group, rows, 2)
        pairs = packed.view(torch.uint8).view(rows, width // 2)
        numbers = torch.stack([pairs >> 4, pairs & 15], -1).view(rows, width // group, group).float()
        scale, middle = scales.float().transpose(0, 1).unsqueeze(-1).unbind(-2)
        return (x.float() @ ((numbers - 8) * scale + middle).view(rows, width).T).bfloat16()

    def times8(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        assert x.dtype == scales.dtype == torch.float32 and weight.dtype == torch.int8
        return (x @ weight.float().T) * scales


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu, aten = Gpu(), torch.ops.aten
    monkeypatch.setattr(aten, "_convert_weight_to_int4pack", gpu.convert)
    monkeypatch.setattr(aten, "_weight_int4pack_mm", gpu.times4)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", gpu.times8)
    return gpu


@pytest.mark.parametrize("width", [32, 64, 96, 128, 576])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gpu_form_of_int4_has_the_numbers_of_the_cpu_form(width: int, bias: bool, gpu: Gpu) -> None:
    whole = dense(48, width, bias)
    mine, theirs = Int4.of(whole, CUDA), Int4.of(whole, CPU)
    assert torch.equal(mine.dense(), theirs.dense()) and torch.equal(mine.scales, theirs.scales)
    assert mine.nbytes == theirs.nbytes
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))
    got = mine(x)
    assert got.shape == (2, 3, 48) and got.dtype == x.dtype
    torch.testing.assert_close(got, theirs(x), rtol=0.02, atol=0.02)
    assert gpu.tiles == [{32: 2, 64: 4, 96: 2, 128: 8, 576: 4}[width]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_form_of_int8_has_the_numbers_of_the_cpu_form(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dense(bias=True)
    theirs = Int8.of(whole, CPU)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = theirs(x)
    monkeypatch.setattr(torch, "_weight_int8pack_mm", Gpu().times8)
    mine = Int8.of(whole, CUDA)
    assert torch.equal(mine.dense(), theirs.dense()) and torch.equal(mine.packed, theirs.packed)
    got = mine(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_the_gpu_takes_outputs_in_8s_and_the_cpu_in_16s(gpu: Gpu) -> None:
    assert Int4.of(dense(24, 64), CUDA)(torch.ones(1, 64)).shape == (1, 24)
    for kernels, rows in ((CUDA, 20), (CPU, 24)):
        with pytest.raises(ConfigurationError, match=f"outputs in {kernels.outputs4}s; a matrix is {rows} x 64"):
            Int4.of(dense(rows, 64), kernels)
    with pytest.raises(ConfigurationError, match="groups of 32"):
        Int4.of(dense(48, 40), CUDA)


@pytest.mark.parametrize("precision", [name for name in QUANTISED if name != "fp8"])
def test_a_model_of_the_gpu_form_passes_the_check_at_load(precision: Any, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(matrix: Tensor, bits: int) -> Kernels:
        return CUDA

    monkeypatch.setattr("lossyspec.quantised.kernels_of", always)
    model = tiny_model("qwen3")
    stack = quantise(model, precision)
    assert all(layer.qkv.kernels is CUDA for layer in stack.layers)  # type: ignore[attr-defined]
    check_rollback(model, "target", stack)


def test_kernels_go_by_device_width_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.empty(960, 576), torch.empty(8192, 576)
    monkeypatch.setattr("lossyspec.native.products.library", object)
    assert all(kernels_of(matrix, bits) is NATIVE for matrix in (small, large) for bits in (4, 8))
    assert kernels_of(torch.empty(64, 36), 8) is NATIVE and kernels_of(torch.empty(64, 36), 4) is CPU
    monkeypatch.setattr("lossyspec.native.products.library", lambda: None)
    monkeypatch.setattr("lossyspec.digits.available", lambda: True)
    assert kernels_of(small, 8) is CPU and kernels_of(large, 8) is DIGITS
    monkeypatch.setattr("lossyspec.digits.available", lambda: False)
    assert kernels_of(large, 8) is CPU
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), numel=large.numel)
    assert kernels_of(on_gpu, 4) is CUDA


@pytest.mark.skipif(not digits.available(), reason="this torch or CPU has no FBGEMM")
def test_integer_products_have_the_numbers_of_the_others() -> None:
    whole = dense(bias=True)
    mine, theirs = Int8.of(whole, DIGITS), Int8.of(whole, CPU)
    assert torch.equal(mine.dense(), theirs.dense()) and mine.nbytes == theirs.nbytes
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    assert whole.bias is not None
    want = x @ mine.dense().T + whole.bias
    assert float((mine(x) - want).abs().max()) < 0.1 * float((theirs(x) - want).abs().max())  # bf16 has fewer digits
    assert mine(x).dtype == torch.float32


def test_a_device_that_cannot_run_packed_weights_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable("int4", torch.device("cpu")) is None
    assert "not on mps" in str(unusable("int4", torch.device("mps")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert unusable("int8", torch.device("cuda")) is None
    assert unusable("int4", torch.device("cuda")) == "Tesla T4 has compute capability 7.5, and int4 needs 8.0 or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert unusable("int4-int8", torch.device("cuda")) is None
