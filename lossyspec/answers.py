"""What a decoder answers: whole, or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .stats import Stats


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: the new text, and at the end the reason and the statistics."""

    text: str
    finish_reason: str | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Completion:
    """One answer. tokens: ids, with the EOS token where that ended it. finish_reason: `stop` or `length`. relaxed: which
    tokens a rule with alpha over 0 let through or drew; variation: the sum over those of TV(emitted law, target)."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    relaxed: tuple[bool, ...] = field(default=(), compare=False)
    variation: float = field(default=0.0, compare=False)


@dataclass
class Generation:
    """The answers in the order of the prompts, and what was counted on the way."""

    completions: list[Completion]
    stats: Stats = field(default_factory=Stats)

    def __getitem__(self, index: int) -> Completion:
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)
