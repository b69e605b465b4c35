"""Where a text ends, and what of it may be shown while it grows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from conftest import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lossyspec.errors import ConfigurationError
from lossyspec.stopping import Stopping, cut, final_text, stable_text


def byte_tokenizer() -> Any:
    """One token a byte: characters of several bytes come in pieces, and nothing is put between tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>", "<unk>"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES = byte_tokenizer()


def ids(text: str) -> list[int]:
    tokens: list[int] = BYTES(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    return tokens


def grow(tokens: list[int], stopping: Stopping, block: int) -> tuple[list[int], str | None, list[str]]:
    """Feeds tokens in blocks as the loop does; returns the output, the reason, and what was shown after each block."""
    output: list[int] = []
    shown: list[str] = []
    for first in range(0, len(tokens), block):
        new, reason = cut(output, tokens[first : first + block], stopping, BYTES)
        output.extend(new)
        show = stable_text if reason is None else final_text
        shown.append(show(output, stopping, BYTES))
        if reason is not None:
            return output, reason, shown
    return output, None, shown


# --- where the tokens end ---


def test_case_7_a_stop_before_the_limit_wins_and_nothing_leaks() -> None:
    stopping = Stopping(5, frozenset({2}))
    assert cut([], [10, 11, 2, 20, 21, 22], stopping, None) == ([10, 11, 2], "stop")
    assert cut([10, 11], [2, 20, 21, 22], stopping, None) == ([2], "stop")
    assert cut([], [10, 11, 12, 20, 21, 22], stopping, None) == ([10, 11, 12, 20, 21], "length")


@pytest.mark.parametrize("before", range(5))
def test_an_eos_at_the_limit_is_a_stop(before: int) -> None:
    stopping = Stopping(5, frozenset({2, 3}))
    assert cut([9] * before, [9] * (4 - before) + [3, 2, 9], stopping, None) == ([9] * (4 - before) + [3], "stop")


def test_a_text_below_its_limit_goes_on() -> None:
    assert cut([1, 2], [3, 4], Stopping(5), None) == ([3, 4], None)
    assert cut([1, 2], [3, 4], Stopping(4), None) == ([3, 4], "length")
    assert cut([1, 2], [3, 4], Stopping(3), None) == ([3], "length")


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    assert cut([], [7], Stopping(9, frozenset({1})), None) == ([7], None)


@pytest.mark.parametrize("limit", [0, -1])
def test_max_new_tokens_under_1_is_refused(limit: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"max_new_tokens is {limit}; it must be at least 1"):
        Stopping(limit)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="empty string"):
        Stopping(5, stop_strings=("END", ""))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 40])
def test_case_6_a_stop_string_over_several_tokens_ends_the_text_before_it(block: int) -> None:
    output, reason, shown = grow(ids("Dear reader, END of it"), Stopping(99, stop_strings=("END",)), block)
    assert output == ids("Dear reader, END")  # the tokens end with the one that completes the string
    assert reason == "stop"
    assert shown[-1] == "Dear reader, "


@pytest.mark.parametrize("block", [1, 3, 40])
def test_case_6_a_stop_string_over_two_words_of_a_tokenizer_with_spaces(block: int) -> None:
    words = tiny_tokenizer()
    tokens = words("w1 w23 w45 w6")["input_ids"]
    stopping = Stopping(9, stop_strings=("3 w4",))
    output: list[int] = []
    for first in range(0, len(tokens), block):
        new, reason = cut(output, tokens[first : first + block], stopping, words)
        output += new
        if reason:
            break
    assert output == tokens[:3]
    assert reason == "stop"
    assert final_text(output, stopping, words) == "w1 w2"


def test_the_earliest_match_cuts_the_text() -> None:
    """One token may complete two stop strings: the text ends before the one that begins first."""
    stopping = Stopping(99, stop_strings=("c", "abc"))
    output, _, shown = grow(ids("xxabcabc"), stopping, 3)
    assert output == ids("xxabc")
    assert shown[-1] == "xx"
    first = Stopping(99, stop_strings=("bcd", "b"))
    output, _, shown = grow(ids("xabcd"), first, 5)
    assert output == ids("xab")
    assert shown[-1] == "xa"


def test_a_stop_string_is_looked_for_in_the_new_text_only_and_not_among_special_tokens() -> None:
    words = tiny_tokenizer()
    tokens = words("w1 </s> w2")["input_ids"]
    assert cut([], tokens, Stopping(9, stop_strings=("</s>",)), words) == (tokens, None)
    assert final_text(tokens, Stopping(9), words) == "w1 w2"


# --- what may be shown ---


def test_streaming_holds_back_what_may_become_a_stop_string() -> None:
    _, reason, shown = grow(ids("a EN b E ENDE"), Stopping(99, stop_strings=("END",)), 1)
    assert shown == [
        "a",
        "a ",
        "a ",
        "a ",
        "a EN ",
        "a EN b",
        "a EN b ",
        "a EN b ",
        "a EN b E ",
        "a EN b E ",
        "a EN b E ",
        "a EN b E ",
    ]
    assert reason == "stop"


def test_the_longest_held_back_beginning_of_any_stop_string_counts() -> None:
    stopping = Stopping(99, stop_strings=("bX", "abcY"))
    assert stable_text(ids("xxab"), stopping, BYTES) == "xx"
    assert stable_text(ids("xxabc"), stopping, BYTES) == "xx"
    assert stable_text(ids("xxabcd"), stopping, BYTES) == "xxabcd"
    assert stable_text(ids("xxb"), stopping, BYTES) == "xx"
    assert stable_text(ids("xaa"), Stopping(99, stop_strings=("aab",)), BYTES) == "x"


def test_a_text_that_ends_at_its_limit_shows_what_was_held_back() -> None:
    stopping = Stopping(4, stop_strings=("END",))
    _, reason, shown = grow(ids("a EN"), stopping, 1)
    assert reason == "length"
    assert shown == ["a", "a ", "a ", "a EN"]


@pytest.mark.parametrize("text", ["é", "€", "𝄞", "a€b𝄞", "日本"])
def test_an_unfinished_character_is_held_back(text: str) -> None:
    tokens = ids(text)
    for count in range(len(tokens) + 1):
        whole = text.encode()[:count].decode(errors="ignore")
        assert stable_text(tokens[:count], Stopping(99), BYTES) == whole


def test_each_byte_of_an_unfinished_character_is_held_back() -> None:
    """Llama's tokenizers decode every byte of it to a replacement character of its own."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257, "b": 258}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokens = [257, *"𝄞".encode(), 258]
    assert tokenizer.decode(tokens[:3]) == "a\ufffd\ufffd"  # this is such a tokenizer
    shown = [stable_text(tokens[:count], Stopping(99), tokenizer) for count in range(1, 7)]
    assert shown == ["a", "a", "a", "a", "a𝄞", "a𝄞b"]


def test_an_unfinished_character_does_not_hide_the_beginning_of_a_stop_string() -> None:
    stopping = Stopping(99, stop_strings=("E€",))
    tokens = ids("aE€")
    assert [stable_text(tokens[:count], stopping, BYTES) for count in range(1, 5)] == ["a", "a", "a", "a"]
    assert cut([], tokens, stopping, BYTES) == (tokens, "stop")
    assert final_text(tokens, stopping, BYTES) == "a"


def test_a_character_that_never_gets_finished_is_shown_at_the_end() -> None:
    broken = [*ids("a"), *ids("€")[:2]]
    assert stable_text(broken, Stopping(9), BYTES) == "a"
    assert final_text(broken, Stopping(9), BYTES).startswith("a\ufffd")
    assert stable_text([*broken, *ids("b")], Stopping(9), BYTES) == final_text([*broken, *ids("b")], Stopping(9), BYTES)


PIECES = st.lists(st.sampled_from(["a", "b", "ab", "ba", "€", "é", " "]), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["ab", "aba", "bb", "b€", "€", "a b", "éa", "bab", "aab"]), max_size=3).map(tuple)


@settings(deadline=None, max_examples=200)
@given(PIECES, STOPS, st.integers(1, 6), st.integers(1, 20))
def test_what_was_shown_is_never_taken_back(text: str, stops: tuple[str, ...], block: int, limit: int) -> None:
    stopping = Stopping(limit, stop_strings=stops)
    tokens = ids(text) if text else []
    output, reason, shown = grow(tokens, stopping, block)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
    alone, alone_reason, _ = grow(tokens, stopping, 1)
    assert (output, reason) == (alone, alone_reason)  # the blocks of a round change nothing
    final = final_text(output, stopping, BYTES)
    assert all(final.startswith(part) for part in shown)
    assert not any(stop in final for stop in stops)
    if reason != "stop":
        assert final == BYTES.decode(tokens[:limit])
