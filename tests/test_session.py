"""A session answers as if the whole conversation were decoded anew, and reads only what is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_tokenizer
from test_decoding import lively_model, perturbed, random_prompts
from test_feature_head import tiny_head

from lossyspec.decoder import Decoder
from lossyspec.drafts import LoadedHead
from lossyspec.errors import ConfigurationError
from lossyspec.kv_cache import RowCache
from lossyspec.loading import LoadedModel
from lossyspec.runner import Runner
from lossyspec.settings import Settings

#: the assistant's words of earlier turns are left out, so each turn rewrites the ones before
FORGETFUL = "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }} {% endif %}{% endfor %}w9"
FAITHFUL = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w9"
DRAFTS = ("ngram", "model", "head")


def loaded(model: Any, template: str | None = None) -> LoadedModel:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return LoadedModel(model, tokenizer, {"id": "tiny"}, "fp32")


def make(draft: str, architecture: str = "llama", template: str | None = None, **settings: Any) -> Decoder:
    model = lively_model(architecture)
    drafts: dict[str, Any] = {
        "ngram": None,
        "model": loaded(perturbed(model), template) if draft == "model" else None,
        "head": LoadedHead(tiny_head(), {"id": "head"}),
    }
    decoder = Decoder(loaded(model, template), drafts[draft], Settings(**{"draft_length": 4, **settings}))
    decoder.eos_ids = frozenset()
    return decoder


def anew(decoder: Decoder, prompt: list[int], new: int, **options: Any) -> list[int]:
    return decoder.generate_ids([prompt], new, **options)[0].tokens


def count_reads(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the number of tokens of each later pass of a model."""
    widths: list[int] = []
    place = Runner._place

    def counted(self: Runner, tokens: torch.Tensor, starts: list[int]) -> Any:
        if self.model is runner.model:
            widths.append(tokens.shape[1])
        return place(self, tokens, starts)

    monkeypatch.setattr(Runner, "_place", counted)
    return widths


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [
        ("llama", "ngram"), ("llama", "model"), ("llama", "head"), ("gpt2", "model"),
        ("opt", "ngram"), ("qwen3", "head"), ("gemma3", "head"), ("mistral", "model"),
    ],
)  # fmt: skip
def test_three_greedy_turns_are_those_of_the_whole_conversation(architecture: str, draft: str) -> None:
    decoder = make(draft, architecture)
    prompt = random_prompts(1, seed=5)[0]
    with decoder.session() as chat:
        for turn, question in enumerate(random_prompts(3, seed=6, longest=30)):
            prompt = prompt + question
            answer = chat.generate_ids(prompt, 9 + turn, temperature=0.0)
            assert answer[0].tokens == anew(decoder, prompt, 9 + turn, temperature=0.0)
            assert answer[0].prompt_tokens == len(prompt)
            prompt = prompt + answer[0].tokens


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_turn_may_share_any_prefix_with_the_one_before(draft: str) -> None:
    """Also with a rewritten beginning, with a prompt that is a part of the last one, and when sampled."""
    decoder = make(draft, alpha=0.4)
    chat, generator = decoder.session(), torch.Generator().manual_seed(1)
    said = random_prompts(1, seed=8)[0]
    for turn in range(8):
        keep = int(torch.randint(0, len(said) + 1, (1,), generator=generator))
        fresh = torch.randint(3, VOCAB, (int(torch.randint(0, 4, (1,), generator=generator)),), generator=generator)
        prompt = (said[:keep] + fresh.tolist()) or [7]
        options: dict[str, Any] = {"seed": turn, "temperature": 0.0 if turn % 2 else 0.8}
        got = chat.generate_ids(prompt, 7, **options)[0].tokens
        assert got == anew(decoder, prompt, 7, **options)
        said = prompt + got


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_turn_reads_only_what_is_new(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make(draft)
    first = random_prompts(1, seed=2, longest=200)[0] * 3
    with decoder.session() as chat:
        answer = chat.generate_ids(first, 8, temperature=0.0)[0].tokens
        runners = [decoder.target] if draft == "ngram" else [decoder.target, decoder.draft.runner]  # type: ignore[attr-defined]
        for runner in runners:
            with monkeypatch.context() as patch:
                widths = count_reads(runner, patch)
                answer += chat.generate_ids([*first, *answer, 5, 6, 7], 8, temperature=0.0)[0].tokens
            first, answer = [*first, *answer[:-8], 5, 6, 7], answer[-8:]
            # the answer's last token was never read, the prompt's last one is read in the first round
            assert widths[0] <= 4
            assert sum(widths) < 60 < len(first)


def test_other_work_may_come_between_the_turns_and_between_the_pieces() -> None:
    for draft in ("model", "head"):
        decoder = make(draft, template=FAITHFUL)
        one, other = decoder.session(), decoder.session()
        streams = [one.stream("w1 w2", 8, temperature=0.0), other.stream("w30 w31 w32", 8, temperature=0.0)]
        texts = ["", ""]
        while streams[0] is not None or streams[1] is not None:
            for place, stream in enumerate(streams):
                piece = next(stream, None) if stream is not None else None
                texts[place] += piece.text if piece else ""
                if piece is None:
                    streams[place] = None  # type: ignore[call-overload]
            decoder.generate("w50 w51", 3, temperature=0.0)
        assert texts[0] == decoder.generate("w1 w2", 8, temperature=0.0)[0].text
        assert texts[1] == decoder.generate("w30 w31 w32", 8, temperature=0.0)[0].text
        talk = [*one.messages, {"role": "user", "content": "w3"}]
        assert one.send("w3", 8, temperature=0.0)[0] == decoder.generate(talk, 8, temperature=0.0)[0]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("template", [FAITHFUL, FORGETFUL])
def test_sent_turns_are_kept_as_messages(draft: str, template: str) -> None:
    decoder = make(draft, template=template)
    talk = [{"role": "system", "content": "w40 w41"}]
    with decoder.session(talk) as chat:
        for text in ("w1 w2 w3", "w4", "w5 w6"):
            talk = [*talk, {"role": "user", "content": text}]
            expected = decoder.generate(talk, 9, temperature=0.0)[0]
            assert chat.send(text, 9, temperature=0.0)[0] == expected
            talk = [*talk, {"role": "assistant", "content": expected.text}]
            assert chat.messages == talk


def test_a_turn_that_was_not_read_to_its_end_leaves_no_message_and_a_good_cache() -> None:
    for draft in DRAFTS:
        decoder = make(draft, template=FAITHFUL)
        chat = decoder.session()
        stream = chat.stream("w1 w2", 40, temperature=0.0)
        for _ in range(3):
            next(stream)
        stream.close()
        assert chat.messages == []
        assert chat.send("w1 w2 w3", 9, temperature=0.0)[0] == decoder.generate("w1 w2 w3", 9, temperature=0.0)[0]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_turn_that_fails_does_not_spoil_the_next(draft: str) -> None:
    decoder = make(draft)
    chat = decoder.session()
    prompt = random_prompts(1, seed=4)[0]
    said = prompt + chat.generate_ids(prompt, 6, temperature=0.0)[0].tokens
    calls = 0

    def breaks(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise KeyboardInterrupt
        return scores.flip(-1)  # so that both models read tokens that the next turn does not have

    with pytest.raises(KeyboardInterrupt):
        chat.generate_ids([*said, 8, 9], 30, temperature=0.0, processors=[breaks])
    got = chat.generate_ids([*said, 8, 9, 10], 8, temperature=0.0)[0].tokens
    assert got == anew(decoder, [*said, 8, 9, 10], 8, temperature=0.0)


def test_close_frees_the_cache_and_the_conversation_can_go_on() -> None:
    decoder = make("model", template=FAITHFUL)
    with decoder.session() as chat:
        chat.send("w1 w2", 8, temperature=0.0)
        assert chat._target.cache.nbytes > 0
    assert chat._target.cache.nbytes == 0
    talk = [*chat.messages, {"role": "user", "content": "w3"}]
    assert chat.send("w3", 8, temperature=0.0)[0] == decoder.generate(talk, 8, temperature=0.0)[0]


def test_what_cannot_be_a_turn_is_refused_and_the_session_stays_usable() -> None:
    decoder = make("ngram", template=FAITHFUL)
    chat = decoder.session()
    with pytest.raises(ConfigurationError, match=r"max_new_tokens is 0"):
        chat.send("w1", 0)
    with pytest.raises(ConfigurationError, match=r"unknown key 'temprature'"):
        list(chat.stream("w1", temprature=0.5))
    with pytest.raises(ConfigurationError, match=r"need 2\d\d\d positions; the target model has 2048"):
        chat.send("w1", 2048)
    with pytest.raises(ConfigurationError, match=r"prompt 0 holds the token id 999"):
        chat.generate_ids([999])
    assert chat.messages == []
    with pytest.raises(ConfigurationError, match="no chat template"):
        make("ngram").session().send("w1")
    assert len(chat.send("w1", 4, seed=0)[0].tokens) == 4


def test_a_grown_cache_keeps_what_it_holds() -> None:
    cache = RowCache(2, 4)
    keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    cache.place([0], 3, torch.device("cpu"))
    for layer in range(2):
        cache.update(keys, values, layer)
    cache.grow(9)
    cache.grow(5)  # never shrinks
    assert cache.capacity == 9
    cache.place([3], 4, torch.device("cpu"))
    got, _ = cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), 1)
    assert torch.equal(got[:, :, :3], keys)
    assert got.shape[2] == 7
