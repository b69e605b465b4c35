"""The Python API with wrong values: each is a ConfigurationError that names the value, and the objects stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import tiny_model
from test_decoder import loaded
from test_session import FAITHFUL

from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError
from lossyspec.settings import Settings


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(loaded(tiny_model(), FAITHFUL), settings=Settings(draft_length=2))


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("max_new_tokens", {"max_new_tokens": value}) for value in (-1, 0, "5", None, 1.5, float("nan"), True)),
    *(("seed", {"seed": value}) for value in (-1, "a", 1.5, 2**64, True)),
    *(("stop", {"stop": value}) for value in (5, [5], None, "", [""], b"x")),
    *(("processors", {"processors": value}) for value in (5, [5], None)),
    *(("temperature", {"temperature": value}) for value in (-1, "x", None)),
    ("top_k", {"top_k": 1.5}),
    ("unknown key 'bogus'", {"bogus": 1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_a_wrong_option_is_named_by_every_way_to_decode(decoder: Decoder, name: str, options: dict[str, Any]) -> None:
    with decoder.session() as chat, decoder.batcher(max_batch=2) as batcher:
        ways: list[Callable[..., Any]] = [
            decoder.generate, lambda text, **more: list(decoder.stream(text, **more)), chat.send, batcher.submit,
        ]  # fmt: skip
        for way in ways:
            with pytest.raises(ConfigurationError, match=name):
                way("w1", **options)
        assert chat.messages == []
        assert len(chat.send("w1", 2, seed=0)[0].tokens) == len(batcher.submit("w1", 2, seed=0).result().tokens)


PROMPTS = [None, 5, b"w1", [[]], [None], [5], [[1, 2]], [["w1"]], [[{"rol": "user"}]], [{"role": "user", "content": None}]]


@pytest.mark.parametrize("prompts", PROMPTS, ids=repr)
def test_what_is_no_prompt_is_refused(decoder: Decoder, prompts: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prompt|message"):
        decoder.generate(prompts, 2)


@pytest.mark.parametrize("prompt", [None, 5, b"w1", [], ["w1", "w2"], [{"a": 1}]], ids=repr)
def test_what_is_not_one_prompt_is_refused(decoder: Decoder, prompt: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prompt|message"):
        list(decoder.stream(prompt, 2))
    with decoder.batcher() as batcher, pytest.raises(ConfigurationError, match=r"prompt|message"):
        batcher.submit(prompt, 2)


@pytest.mark.parametrize("ids", [[1, 2], [["a"]], [[1.5]], [None], torch.tensor([[5, 6]]), [torch.tensor([5])]], ids=repr)
def test_what_are_no_token_ids_is_refused(decoder: Decoder, ids: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prompt 0 is .*allowed: a list of token ids"):
        decoder.generate_ids(ids, 2)


@pytest.mark.parametrize("text", [None, 5, [{"role": "user", "content": "w1"}], b"w1"], ids=repr)
def test_what_is_no_text_leaves_no_turn(decoder: Decoder, text: Any) -> None:
    chat = decoder.session()
    with pytest.raises(ConfigurationError, match=r"the text of a turn is .*allowed: a string"):
        chat.send(text, 2)
    assert chat.messages == []


@pytest.mark.parametrize("messages", ["You are kind.", [1], [{"a": 1}], {"role": "system", "content": "x"}, None], ids=repr)
def test_a_session_begins_with_messages_or_not_at_all(decoder: Decoder, messages: Any) -> None:
    with pytest.raises(ConfigurationError, match="message"):
        decoder.session(messages)


def test_messages_that_the_template_refuses_are_one_error() -> None:
    strict = "{{ raise_exception('System role not supported') }}"
    decoder = Decoder(loaded(tiny_model(), strict))
    with pytest.raises(ConfigurationError, match="the chat template refuses the messages: System role not supported"):
        decoder.generate("w1", 2)


@pytest.mark.parametrize("name", ["max_batch", "max_length", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "a", None, True])
def test_sizes_of_a_batcher_are_whole_numbers(decoder: Decoder, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is"):
        decoder.batcher(**{name: value})


@pytest.mark.parametrize(
    "values",
    [{"profile": 5}, {"profile": None}, {"target": None}, {"target": 5}, {"draft": 5}, {"guard": 5}, {"guard": "x"}],
)
def test_a_decoder_is_not_made_of_anything(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigurationError, match=f"{name} is"):
        Decoder.from_profile(**values)


def test_settings_are_settings(decoder: Decoder) -> None:
    wrong: Any = {"alpha": 0.3}
    with pytest.raises(ConfigurationError, match=r"settings is .*allowed: a Settings, or None"):
        decoder.generate("w1", 2, settings=wrong)
    with pytest.raises(ConfigurationError, match="settings is"):
        Decoder(loaded(tiny_model()), settings=wrong)


def test_closing_twice_and_using_afterwards(decoder: Decoder) -> None:
    chat, batcher = decoder.session(), decoder.batcher()
    done = batcher.submit("w1", 2)
    assert len(done.result().tokens) >= 1
    for _ in range(2):
        chat.close()
        batcher.close()
    assert len(chat.send("w1", 2)[0].tokens) >= 1  # a session goes on, see `Session.close`
    with pytest.raises(ConfigurationError, match="the batcher is closed"):
        batcher.submit("w1", 2)
    assert done.result().finish_reason is not None and not batcher.step()
