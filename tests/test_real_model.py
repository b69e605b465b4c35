"""The embedded model (SmolLM2-135M-Instruct, 4-bit weights made dense): loading, and the same texts as transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lossyspec import loading
from lossyspec.decoder import Decoder
from lossyspec.loading import LoadedModel, file_sha256, load, resolve
from lossyspec.prompts import prompt_ids
from lossyspec.sampling import probabilities
from lossyspec.settings import Sampling, Settings
from lossyspec.tuner.replay import Replay
from lossyspec.tuner.trace import Texts, Trace, Tracer
from lossyspec.tuner.workloads import load_workload

pytestmark = pytest.mark.real_model

TOKENS = 48
PLAIN, NGRAM = Settings(draft_length=0), Settings(rule="exact", draft_length=5)
#: rows of the ragged batch: 51, 317, 58 and 680 tokens of prompt
RAGGED = (0, 4, 1, 5)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("embedded")


@pytest.fixture(scope="module")
def decoder(loaded: LoadedModel) -> Decoder:
    return Decoder(loaded)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Six bundled prompts: three of dialogue, two of code, one of summarization."""
    items = [load_workload(task).search[index] for task, index in (("dialogue", 0), ("dialogue", 1), ("dialogue", 2))]
    items += [load_workload("code").search[0], load_workload("code").search[1], load_workload("summarization").search[0]]
    return [prompt_ids(loaded.tokenizer, item.messages) for item in items]


def by_transformers(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy output of transformers' own `generate`, and the logits that it was chosen from."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return result.sequences[0, len(prompt) :].tolist(), [logits[0].float() for logits in result.logits]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [by_transformers(loaded.model, prompt, TOKENS)[0] for prompt in prompts]


# loading


def test_a_second_load_converts_nothing_and_checks_the_weights(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path) -> None:
        raise AssertionError("converted again")

    hashed: list[str] = []

    def spy(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(loading, "_convert_gguf", convert)
    monkeypatch.setattr(loading, "file_sha256", spy)
    folder = Path(resolve("embedded"))
    assert "model.safetensors" in hashed
    note = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
    assert note["weights_sha256"] == loaded.identity["weights_sha256"] == file_sha256(folder / "model.safetensors")
    assert note["source_sha256"] == file_sha256(loading.embedded_gguf())


def test_the_embedded_model_is_the_one_that_is_named(loaded: LoadedModel) -> None:
    config = loaded.model.config
    assert loaded.identity["id"] == "embedded"
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("llama", 30, 49152)
    assert 130e6 < sum(part.numel() for part in loaded.model.parameters()) < 140e6
    assert {part.dtype for part in loaded.model.parameters()} == {torch.float32}


def test_prompts_go_through_the_chat_template(loaded: LoadedModel) -> None:
    ids = prompt_ids(loaded.tokenizer, "Hello there")
    text = loaded.tokenizer.decode(ids)
    assert text.endswith("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")
    assert ids == prompt_ids(loaded.tokenizer, [{"role": "user", "content": "Hello there"}])
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    text = loaded.tokenizer.decode(prompt_ids(loaded.tokenizer, turns))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert [text.index(part) for part in ("One", "Two", "Three")] == sorted(
        text.index(part) for part in ("One", "Two", "Three")
    )


# greedy texts


def test_the_prompts_are_ragged(prompts: list[list[int]]) -> None:
    lengths = [len(prompts[row]) for row in RAGGED]
    assert len(set(lengths)) == len(RAGGED)
    assert max(lengths) > 5 * min(lengths)


def test_case_17_greedy_plain_decoding_is_token_identical_to_transformers(
    decoder: Decoder, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, output in zip(prompts, expected, strict=True):
        assert decoder.generate_ids([prompt], TOKENS, settings=PLAIN, temperature=0.0)[0].tokens == output


def test_case_17_and_18_greedy_prompt_lookup_is_token_identical_to_transformers(
    decoder: Decoder, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    drafted = accepted = 0
    for prompt, output in zip(prompts, expected, strict=True):
        generation = decoder.generate_ids([prompt], TOKENS, settings=NGRAM, temperature=0.0)
        assert generation[0].tokens == output
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
    assert 0 < accepted < drafted, "drafts were kept and drafts were rejected"


@pytest.mark.parametrize("settings", [PLAIN, NGRAM], ids=["plain", "ngram"])
def test_case_21_a_ragged_batch_of_four_is_token_identical_to_transformers_one_by_one(
    decoder: Decoder, prompts: list[list[int]], expected: list[list[int]], settings: Settings
) -> None:
    generation = decoder.generate_ids([prompts[row] for row in RAGGED], TOKENS, settings=settings, temperature=0.0)
    assert [answer.tokens for answer in generation] == [expected[row] for row in RAGGED]


def gap(logits: Tensor, one: int, other: int) -> float:
    """Nats between two tokens."""
    return abs(float(logits[one] - logits[other]))


def step(logit: Tensor) -> float:
    """Distance of neighbouring bf16 numbers around a logit."""
    return float(2.0 ** (math.floor(math.log2(abs(float(logit)))) - 7))


def test_case_17_bf16_differs_from_transformers_first_at_a_numeric_tie(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie: in the logits that either of the two decoders chose from, the two tokens are less than 1e-2 nats apart; or
    they are one step of the number format apart, which is more than 1e-2 at logits of 34 (0.25)."""
    narrow = load("embedded", "bf16")
    decoder = Decoder(narrow)
    assert decoder.target._fused is not None
    real, seen = decoder.target.logits, []

    def record(tokens: Tensor, *given: Any) -> Tensor:
        logits = real(tokens, *given)
        seen.append(logits[0, -1])
        return logits

    monkeypatch.setattr(decoder.target, "logits", record)
    for prompt in prompts[:3]:
        output, theirs = by_transformers(narrow.model, prompt, 24)
        seen.clear()
        ours = decoder.generate_ids([prompt], 24, settings=PLAIN, temperature=0.0)[0].tokens
        assert len(seen) == len(ours)
        place = next((place for place, pair in enumerate(zip(ours, output, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            assert ours == output
            continue
        pair = ours[place], output[place]
        gaps = [gap(logits, *pair) for logits in (seen[place], theirs[place])]
        assert min(gaps) < 1e-2 or max(gaps) <= step(seen[place].max()), f"position {place}: {gaps}"


# sampled and relaxed


def test_a_stream_is_the_same_text_as_generate(decoder: Decoder) -> None:
    settings = Settings(rule="mixture", alpha=0.3, draft_length=4)
    prompt = "Repeat after me: the cat sat on the mat, the cat sat on the mat."
    options: dict[str, Any] = {"seed": 5, "settings": settings, "temperature": 0.7}
    whole = decoder.generate(prompt, 32, **options)
    pieces = list(decoder.stream(prompt, 32, **options))
    assert "".join(piece.text for piece in pieces) == whole[0].text
    assert len(pieces) > 3
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole[0].finish_reason
    assert pieces[-1].stats is not None
    assert pieces[-1].stats.accepted == whole.stats.accepted > 0


@pytest.fixture(scope="module")
def trace(decoder: Decoder, prompts: list[list[int]]) -> Trace:
    """Four texts of 32 tokens that the target sampled at temperature 0.7, traced with prompt lookup."""
    chosen = prompts[:4]
    drawn = decoder.generate_ids(chosen, 32, seed=1, settings=PLAIN, temperature=0.7)
    texts = Texts(chosen, [answer.tokens for answer in drawn], [answer.finish_reason == "length" for answer in drawn])
    tracer = Tracer(Sampling(temperature=0.7), 4)
    trace = tracer.begin(texts, "fp32")
    tracer.add(trace, "fp32", decoder.target, None)
    return trace


def test_the_exact_perplexity_ratio_is_1_without_relaxation_and_within_the_certificate_with_it(trace: Trace) -> None:
    replay = Replay(trace)
    assert replay.run(Settings(alpha=0.0, draft_length=4)).perplexity_ratio == pytest.approx(1.0, abs=1e-9)
    ratios = []
    for alpha in (0.3, 0.6):
        for rule in ("mixture", "optimal"):
            quality = replay.quality(Settings(rule=rule, alpha=alpha, draft_length=4))
            assert quality.certificate == pytest.approx(1 / (1 - alpha))
            assert 1.0 < quality.perplexity_ratio.value <= quality.certificate
            ratios.append(quality.perplexity_ratio.value)
    assert ratios[0] == pytest.approx(ratios[1]), "both rules emit the same for a draft of one token"
    assert ratios[2] > ratios[0]


def test_the_trace_holds_the_probabilities_of_a_plain_forward_pass(loaded: LoadedModel, trace: Trace) -> None:
    """The likelihood under the target, from the model without our cache."""
    first = 0
    for prompt, output in zip(trace.texts.prompts, trace.texts.outputs, strict=True):
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits
        p = probabilities(logits[0, len(prompt) - 1 : -1], Sampling(temperature=0.7))
        want = p.gather(-1, torch.tensor(output)[:, None])[:, 0].log()
        got = torch.from_numpy(trace.plain["fp32"][first : first + len(output)])
        torch.testing.assert_close(got, want.double(), atol=2e-3, rtol=0)
        first += len(output)
