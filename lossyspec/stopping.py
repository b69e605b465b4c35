"""When a text ends, and the text itself as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .checks import check_count
from .errors import ConfigurationError


@dataclass(frozen=True)
class Stopping:
    """End of a text: an id of `eos_ids`, a string of `stop_strings`, or `max_new_tokens` tokens.

    The tokens end with the EOS token, or with the token that completes the stop string; the text ends before either.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        if "" in self.stop_strings:
            raise ConfigurationError("stop_strings holds an empty string; each needs at least one character")


def cut(output: Sequence[int], new: Sequence[int], stopping: Stopping, tokenizer: Any) -> tuple[list[int], str | None]:
    """The part of `new` that belongs to the text after `output`, and why the text ends there (None: it goes on)."""
    kept: list[int] = []
    for token in new:
        kept.append(token)
        if token in stopping.eos_ids:
            return kept, "stop"
        if stopping.stop_strings and _stop_place([*output, *kept], stopping, tokenizer) is not None:
            return kept, "stop"
        if len(output) + len(kept) >= stopping.max_new_tokens:
            return kept, "length"
    return kept, None


def _stop_place(tokens: Sequence[int], stopping: Stopping, tokenizer: Any) -> int | None:
    """Where the earliest stop string begins in the text of `tokens`."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    places = [place for place in map(text.find, stopping.stop_strings) if place >= 0]
    return min(places) if places else None


def final_text(tokens: Sequence[int], stopping: Stopping, tokenizer: Any) -> str:
    """The finished text, cut before a stop string."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    place = _stop_place(tokens, stopping, tokenizer) if stopping.stop_strings else None
    return text if place is None else text[:place]


def stable_text(tokens: Sequence[int], stopping: Stopping, tokenizer: Any) -> str:
    """The text that no later token can change: without an unfinished character or the beginning of a stop string."""
    text = final_text(tokens, stopping, tokenizer)
    while text.endswith("\ufffd"):
        text = text[:-1]
    held = 0
    for stop in stopping.stop_strings:
        for size in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:size]):
                held = size
                break
    return text[: len(text) - held]
