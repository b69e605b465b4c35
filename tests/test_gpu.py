"""Checks that wait for an NVIDIA GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model, tiny_tokenizer

from lossyspec.decoder import Decoder
from lossyspec.hardware import detect_hardware, used_gpu
from lossyspec.loading import LoadedModel
from lossyspec.settings import Settings

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
