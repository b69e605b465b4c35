"""Checks that wait for an NVIDIA GPU: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_model, tiny_tokenizer
from test_decoding import lively_model

from lossyspec.decoder import Decoder
from lossyspec.fused import Dense
from lossyspec.hardware import detect_hardware, used_gpu
from lossyspec.loading import LoadedModel, load
from lossyspec.packed import unusable
from lossyspec.quantised import Fp8, Int4, Int8
from lossyspec.runner import Runner
from lossyspec.settings import QUANTISED, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13] * 6]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_greedy_lossless_on_the_gpu_is_plain_on_the_gpu(architecture: str) -> None:
    model = tiny_model(architecture).cuda()
    loaded = LoadedModel(model, tiny_tokenizer(), {"id": "tiny"}, "fp32")
    other = LoadedModel(tiny_model(architecture, seed=1).cuda(), tiny_tokenizer(), {"id": "draft"}, "fp32")
    plain = Decoder(loaded).generate_ids(PROMPTS, 48, settings=Settings(draft_length=0), temperature=0.0)
    for decoder in (Decoder(loaded), Decoder(loaded, other)):
        got = decoder.generate_ids(PROMPTS, 48, settings=Settings(draft_length=4), temperature=0.0)
        assert [answer.tokens for answer in got] == [answer.tokens for answer in plain]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_cuda_graphs_give_what_passes_without_them_give(architecture: str) -> None:
    loaded = LoadedModel(lively_model(architecture).cuda(), tiny_tokenizer(), {"id": "tiny"}, "fp32")
    decoder = Decoder(loaded)
    want = decoder.generate_ids(PROMPTS, 150, settings=Settings(draft_length=4, cuda_graphs=False), temperature=0.0)
    graphs = decoder.target._graphs
    assert graphs is not None and not graphs._recorded
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        got = decoder.generate_ids(prompts, 150, settings=Settings(draft_length=4), temperature=0.0)
        assert [answer.tokens for answer in got] == [answer.tokens for answer in want][: len(prompts)]
    assert graphs.usable and graphs._recorded


def test_replayed_logits_on_the_gpu_are_those_of_passes_that_run() -> None:
    model = lively_model("llama").cuda()
    replayed, plain = Runner(model), Runner(model)
    plain.how = "eager"
    for each in (replayed, plain):
        each.start(PROMPTS, 200)
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    for turn in range(40):
        tokens = torch.randint(3, 100, (3, 1 + turn % 3), generator=torch.Generator().manual_seed(turn)).cuda()
        torch.testing.assert_close(replayed.logits(tokens, starts), plain.logits(tokens, starts), rtol=1e-3, atol=1e-3)
        starts = [start + 1 + (turn + row) % 3 for row, start in enumerate(starts)]
    assert replayed._graphs is not None and replayed._graphs._recorded


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_inductor_on_the_gpu_gives_what_single_operations_give(precision: Any, tmp_path: Path) -> None:
    decoder = Decoder(load(str(save_tiny(tmp_path / "model", "llama")), precision))
    plain = decoder.generate_ids(PROMPTS, 16, settings=Settings(draft_length=0), temperature=0.0)
    got = decoder.generate_ids(PROMPTS, 16, settings=Settings(draft_length=2, compile="inductor"), temperature=0.0)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in plain]


def test_tensorrt_gives_what_single_operations_give() -> None:
    pytest.importorskip("torch_tensorrt")
    decoder = Decoder(LoadedModel(lively_model("llama").cuda(), tiny_tokenizer(), {"id": "tiny"}, "fp32"))
    plain = decoder.generate_ids(PROMPTS, 16, settings=Settings(draft_length=0), temperature=0.0)
    got = decoder.generate_ids(PROMPTS, 16, settings=Settings(draft_length=0, compile="tensorrt"), temperature=0.0)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in plain]


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("width", [32, 96, 128, 576])
def test_packed_products_on_the_gpu_are_those_of_their_numbers(kind: type[Any], width: int) -> None:
    weight = 0.1 * torch.randn(48, width, generator=torch.Generator().manual_seed(0))
    part, theirs = kind.of(Dense(weight.cuda(), None)), kind.of(Dense(weight, None))
    assert torch.equal(part.dense().cpu(), theirs.dense())
    for rows in (1, 5, 70):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        want = x.bfloat16().float() @ theirs.dense().T
        torch.testing.assert_close(part(x.cuda()).cpu(), want, rtol=0.02, atol=0.02)


def test_fp8_products_on_the_gpu_are_those_of_their_numbers() -> None:
    if (reason := unusable("fp8", torch.device("cuda"))) is not None:
        pytest.skip(reason)
    weight = 0.1 * torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    part, theirs = Fp8.of(Dense(weight.cuda(), None)), Fp8.of(Dense(weight, None))
    for rows in (1, 5, 70):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(part(x.cuda()).cpu(), theirs(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_models_load_on_the_gpu_and_are_lossless_against_themselves(precision: Any, tmp_path: Path) -> None:
    if (reason := unusable(precision, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    decoder = Decoder(load(str(save_tiny(tmp_path / "model", "qwen3")), precision))
    assert decoder.target.model.dtype == torch.bfloat16
    plain = decoder.generate_ids(PROMPTS, 24, settings=Settings(draft_length=0), temperature=0.0)
    drafted = decoder.generate_ids(PROMPTS, 24, settings=Settings(draft_length=4), temperature=0.0)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lanes_on_the_gpu_change_no_token(temperature: float) -> None:
    """The target as its own draft, so that all is kept; and one that agrees with it now and then."""
    loaded = LoadedModel(tiny_model().cuda(), tiny_tokenizer(), {"id": "tiny"}, "fp32")
    other = LoadedModel(tiny_model(seed=1).cuda(), tiny_tokenizer(), {"id": "draft"}, "fp32")
    for draft in (loaded, other):
        decoder = Decoder(loaded, draft)
        decoder.eos_ids = frozenset()
        for prompts in (PROMPTS, PROMPTS[:1]):
            want, got = (
                decoder.generate_ids(prompts, 64, seed=3, temperature=temperature, settings=Settings(lanes=lanes))
                for lanes in (False, True)
            )
            assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
            assert got.stats.prefetched > 0 == want.stats.prefetched
            if draft is loaded:
                assert got.stats.prefetches_kept == got.stats.prefetched


def test_sampling_on_the_gpu_is_reproduced_by_its_seed() -> None:
    loaded = LoadedModel(tiny_model().cuda(), tiny_tokenizer(), {"id": "tiny"}, "fp32")
    runs = [Decoder(loaded).generate_ids(PROMPTS, 32, seed=7, temperature=0.9) for _ in range(2)]
    assert [answer.tokens for answer in runs[0]] == [answer.tokens for answer in runs[1]]


def test_the_gpu_is_detected_by_nvml() -> None:
    gpu = used_gpu(detect_hardware())
    assert gpu is not None and gpu.memory_bytes and gpu.compute_capability and gpu.driver
