"""Tiny random models of many architectures, a tiny tokenizer, and decoders made of them: all tests run on these."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

VOCAB = 101
WORDS = [f"w{index}" for index in range(VOCAB - 3)]


def tiny_config(architecture: str, vocab_size: int = VOCAB) -> Any:
    """Configuration of a model with 3 layers of 32 hidden units."""
    import transformers as t

    common = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 2048,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    plain = {key: value for key, value in common.items() if key != "num_key_value_heads"}
    opt = {**plain, "ffn_dim": 64, "word_embed_proj_dim": 32}
    opt.pop("intermediate_size")
    gpt2 = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 2048,
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
    sliding = ["sliding_attention", "sliding_attention", "full_attention"]
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**common),
        "gpt2": lambda: t.GPT2Config(**gpt2),
        "qwen2": lambda: t.Qwen2Config(**common),
        "qwen3": lambda: t.Qwen3Config(**common, head_dim=8),
        "gemma3": lambda: t.Gemma3TextConfig(**common, head_dim=8, sliding_window=16, layer_types=sliding),
        "opt": lambda: t.OPTConfig(**opt),
        "phi": lambda: t.PhiConfig(**common),
        "gpt_neox": lambda: t.GPTNeoXConfig(**plain),
        "mistral": lambda: t.MistralConfig(**common, head_dim=8, sliding_window=16),
        "mamba": lambda: t.MambaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2),
    }
    return makers[architecture]()


def tiny_model(architecture: str = "llama", seed: int = 0, vocab_size: int = VOCAB, scale: float = 6.0) -> Any:
    """A random fp32 model in eval mode. `scale` widens its logits, so that its choices are clear and not near-uniform."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, vocab_size), dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(scale)
    return model


def tiny_tokenizer(vocab_size: int = VOCAB) -> Any:
    """Words w0, w1, .. with ids 3, 4, ..; ids 0, 1, 2 are <s>, </s>, <unk>. `decode` puts spaces between words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(vocab_size - 3)]
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def save_tiny(folder: Path, architecture: str = "llama", seed: int = 0, template: bool = True) -> Path:
    """Writes a tiny model with its tokenizer as a folder that `lossyspec.loading.load` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(architecture, seed).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if template:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's profiles, or finds one that ships for the machine that it runs on; real-model tests
    share the user's cache of converted models."""
    monkeypatch.setenv("LOSSYTUNE_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setattr("lossyspec.profile.bundled_files", list)
