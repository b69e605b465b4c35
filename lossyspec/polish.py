"""Post-correction: tokens that relaxing let through and that the target finds unlikely are proposed anew, by a corrector.

An edit is kept only when the target prefers the whole text with it, exactly, and when it changes few characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .drafting import shared_length
from .errors import ConfigurationError

if TYPE_CHECKING:
    from .answers import Completion
    from .decoder import Decoder
    from .runner import Runner

#: logits of this many positions are held at a time
_CHUNK = 128


@dataclass(frozen=True)
class PolishSettings:
    """What is looked at, and how much may change.

    floor: a relaxed token with p(token) under it is looked at. most_changed: Levenshtein distance in characters of one edit.
    least_gain_nats: by how much the log-likelihood of the whole text must rise.
    """

    floor: float = 0.05
    most_changed: int = 24
    least_gain_nats: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigurationError(f"floor is {self.floor}; allowed: over 0, at most 1")
        if self.most_changed < 1:
            raise ConfigurationError(f"most_changed is {self.most_changed}; it must be at least 1")
        if not self.least_gain_nats >= 0:
            raise ConfigurationError(f"least_gain_nats is {self.least_gain_nats}; it must be at least 0")


@dataclass(frozen=True)
class Span:
    """Tokens start .. end - 1 of an output, and where they stand in its text, in characters."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class Candidate:
    """A whole new output. first: where in the old text the change begins; before, after: the text there."""

    tokens: list[int]
    first: int
    before: str
    after: str


@dataclass(frozen=True)
class Edit:
    """A change that was kept. first: its place in the text before it, in characters. gain_nats: log-likelihood won."""

    first: int
    before: str
    after: str
    gain_nats: float


@dataclass(frozen=True)
class Polished:
    """The answer after the pass. edits: what was kept, from left to right. tried: spans for which an edit was proposed.

    log_likelihood: (before, after) of the output given the prompt under the target, in nats at temperature 1. seconds: wall
    clock.
    """

    text: str
    tokens: list[int]
    edits: tuple[Edit, ...]
    tried: int
    log_likelihood: tuple[float, float]
    seconds: float


class Corrector(Protocol):
    """Who proposes how a span should read."""

    def propose(self, scorer: Scorer, output: list[int], span: Span) -> Candidate | None:
        """A new output in which the span, or the text around it, has changed; None: leave it. Spans come from right to
        left, so that what stands left of a span is as it was emitted."""


class Scorer:
    """The target's exact log-probabilities of outputs after one prompt; what two outputs share is read once."""

    def __init__(self, runner: Runner, prompt: list[int], tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.runner, self.prompt, self.tokenizer, self.eos_ids = runner, prompt, tokenizer, eos_ids
        self._output: list[int] = []
        self._known = torch.zeros(0)
        runner.start([prompt], len(prompt))

    def text(self, output: Sequence[int]) -> str:
        """The text of output tokens."""
        decoded: str = self.tokenizer.decode(list(output), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded

    def _logits(self, tokens: list[int], place: int) -> Tensor:
        """fp32 logits (n, V) after reading n tokens, the first of which is `place` tokens behind the prompt's last."""
        begin = len(self.prompt) - 1 + place
        self.runner.cache.grow(begin + len(tokens))
        return self.runner.logits(torch.tensor([tokens], device=self.runner.device), [begin])[0]

    def log_probabilities(self, output: list[int]) -> Tensor:
        """(n,) fp32, log p of each output token."""
        kept = shared_length(self._output, output)
        sequence = [self.prompt[-1], *output]
        parts = [self._known[:kept]]
        for first in range(kept, len(output), _CHUNK):
            last = min(first + _CHUNK, len(output))
            law = self._logits(sequence[first:last], first).log_softmax(-1)
            wanted = torch.tensor(output[first:last], device=law.device).unsqueeze(-1)
            parts.append(law.gather(-1, wanted)[:, 0].cpu())
        self._output, self._known = list(output), torch.cat(parts)
        return self._known

    def most_likely(self, output: list[int], count: int) -> list[int]:
        """`count` tokens of the target's own greedy decoding after an output."""
        kept = len(output)
        self.log_probabilities(output)
        grown = [self.prompt[-1], *output]
        for place in range(kept, kept + count):
            grown.append(int(self._logits(grown[-1:], place)[-1].argmax()))
        return grown[kept + 1 :]


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance in characters."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, start=1):
        diagonal, row[0] = row[0], place
        for column, candidate in enumerate(other, start=1):
            changed = diagonal + (letter != candidate)
            diagonal, row[column] = row[column], min(changed, row[column] + 1, row[column - 1] + 1)
    return row[-1]


def doubtful_spans(scorer: Scorer, output: list[int], relaxed: Sequence[bool], logs: Tensor, floor: float) -> list[Span]:
    """Runs of relaxed tokens with p under the floor, from left to right; end-of-text tokens are left alone."""
    doubtful = [
        soft and value < floor and token not in scorer.eos_ids
        for soft, value, token in zip(relaxed, logs.exp().tolist(), output, strict=True)
    ]
    spans, start = [], None
    for place, here in enumerate([*doubtful, False]):
        if here and start is None:
            start = place
        elif not here and start is not None:
            spans.append(Span(start, place, len(scorer.text(output[:start])), len(scorer.text(output[:place]))))
            start = None
    return spans


class Polisher:
    """Polishes answers of a decoder. The cost: a pass of the target over the answer, and one over its rest for each edit."""

    def __init__(self, decoder: Decoder, corrector: Corrector, settings: PolishSettings | None = None) -> None:
        self.decoder, self.corrector, self.settings = decoder, corrector, settings or PolishSettings()
        self._runner = decoder.target.fork()

    @torch.inference_mode()
    def polish_ids(self, prompt: list[int], answer: Completion) -> Polished:
        """Polishes one answer to a prompt of token ids."""
        began = perf_counter()
        scorer = Scorer(self._runner, prompt, self.decoder.tokenizer, self.decoder.eos_ids)
        output, edits, tried = list(answer.tokens), list[Edit](), 0
        logs = before = scorer.log_probabilities(output)
        untouched, ending = len(answer.text), scorer.text(output)[len(answer.text) :]  # a stop string is no part of the text
        for span in reversed(doubtful_spans(scorer, output, answer.relaxed, logs, self.settings.floor)):
            if span.last > untouched:
                continue  # inside what was already proposed anew
            candidate = self.corrector.propose(scorer, output, span)
            if candidate is None or candidate.tokens == output or not candidate.tokens:
                continue
            if candidate.first + len(candidate.before) > untouched:
                continue
            tried, untouched = tried + 1, candidate.first
            if edit_distance(candidate.before, candidate.after) > self.settings.most_changed:
                continue
            found = scorer.log_probabilities(candidate.tokens)
            gain = float(found.sum() - logs.sum())
            # a shorter text is likelier for its length alone: it must be likelier per token as well
            if gain > self.settings.least_gain_nats and float(found.mean()) > float(logs.mean()):
                edits.append(Edit(candidate.first, candidate.before, candidate.after, gain))
                output, logs = candidate.tokens, found
        likelihood = float(before.sum()), float(logs.sum())
        text = scorer.text(output).removesuffix(ending) if edits else answer.text
        return Polished(text, output, tuple(reversed(edits)), tried, likelihood, perf_counter() - began)
