"""Where relaxation acts: factors in [0, 1] on alpha that depend on the prefix alone, so that the emitted law keeps its
closed form and the exact likelihood and the replay stay exact.

Protected positions: alpha is 0 at the start of a sentence, paragraph, list item or line. Exact prefix: 0 for the first
tokens of an answer. Recovery: 0 for some tokens after a row of tokens that the target found unlikely. Adaptive: in
proportion to the target's entropy, so that positions where it is sure stay exact. Guard: 0 to the end of a text once its
surprise has drifted too far above what the target's own text has (a one-sided CUSUM; E. S. Page, Biometrika 41, 1954).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .acceptance import entropy
from .native import laws as native
from .settings import Boundary, Policy

#: tokens whose text shows what a position is
TAIL = 8
#: nats a token by which surprise may exceed entropy without counting
_SLACK = 0.1
_CLOSERS = "[\"'\u201d\u2019)\\]\u300d\u300f\uff09\u300b*_]*"
_PATTERNS: dict[Boundary, re.Pattern[str]] = {
    "sentence": re.compile(rf"([.!?\u2026\u3002\uff01\uff1f\uff0e]{_CLOSERS}|\n)\s*$"),
    "paragraph": re.compile(r"\n[ \t]*\n\s*$"),
    "list": re.compile(r"(^|\n)[ \t]*([-*+\u2022\u30fb]|\(?\d{1,3}[.)\u3001]|[a-zA-Z][.)])[ \t]*$"),
    "line": re.compile(r"\n[ \t]*$"),
}
#: the first position of an answer starts everything but a list item
_FIRST: frozenset[Boundary] = frozenset(("sentence", "paragraph", "line"))


class Boundaries:
    """What the position after some output tokens is, by their text. Shared by decoding and replay."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of = lru_cache(1 << 16)(self._look)

    def after(self, output: Sequence[int]) -> frozenset[Boundary]:
        """The kinds of the position after `output` (its last tokens will do)."""
        return self._of(tuple(output[-TAIL:])) if output else _FIRST

    def _look(self, tail: tuple[int, ...]) -> frozenset[Boundary]:
        text = self._tokenizer.decode(list(tail), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return frozenset(kind for kind, pattern in _PATTERNS.items() if pattern.search(text))


@dataclass(frozen=True)
class Walk:
    """One text on its way: what the factors need of its output so far. Immutable, so that drafted tokens can be tried."""

    policy: Policy
    tail: tuple[int, ...] = ()
    count: int = 0
    unlikely: int = 0
    exact_left: int = 0
    drift: float = 0.0
    spent: bool = False

    def factor(self, entropy: float, kinds: frozenset[Boundary]) -> float:
        """The factor on alpha at the next position. entropy: the target's there, in nats. kinds: what the position is."""
        policy = self.policy
        if self.spent or self.exact_left or self.count < policy.exact_prefix or kinds & set(policy.protect):
            return 0.0
        return min(1.0, entropy / policy.adaptive) if policy.adaptive else 1.0

    def then(self, token: int, log_p: float, entropy: float) -> Walk:
        """After `token`, which the target gave a log probability of `log_p` where it had that entropy."""
        policy, left, unlikely = self.policy, max(self.exact_left - 1, 0), 0
        if policy.recovery is not None:
            unlikely = self.unlikely + 1 if log_p < math.log(policy.recovery.floor) else 0
            if unlikely >= policy.recovery.after:
                left, unlikely = policy.recovery.tokens, 0
        drift = max(0.0, self.drift - log_p - entropy - _SLACK) if policy.guard else 0.0
        return replace(
            self,
            tail=(*self.tail, token)[-TAIL:],
            count=self.count + 1,
            unlikely=unlikely,
            exact_left=left,
            drift=drift,
            spent=self.spent or (policy.guard is not None and drift > policy.guard),
        )


class Seen:
    """What a round's walks by a policy need of p (batch, width + 1, V): its entropies, taken once, and log probabilities of
    tokens; 0 where the policy asks for none."""

    def __init__(self, p: Tensor, policy: Policy) -> None:
        self.p = p
        self._weighs = policy.guard is not None or policy.recovery is not None
        if policy.guard is None and not policy.adaptive:
            self.entropies = [[0.0] * p.shape[1]] * len(p)
        else:
            self.entropies = (native.entropy(p) if native.takes(p) else entropy(p)).tolist()

    def log_p(self, tokens: list[list[int]]) -> list[list[float]]:
        """Of the tokens of each row at its first places."""
        if not self._weighs:
            return [[0.0] * len(row) for row in tokens]
        width = max(map(len, tokens))
        padded = [[*row, *[0] * (width - len(row))] for row in tokens]
        index = torch.tensor(padded, dtype=torch.long, device=self.p.device).reshape(len(tokens), width)
        logs: list[list[float]] = self.p[:, :width].gather(-1, index[..., None])[..., 0].log().tolist()
        return logs


def factors(
    seen: Seen, walks: Sequence[Walk], boundaries: Boundaries | None, tokens: list[list[int]], lengths: Sequence[int]
) -> list[list[float]]:
    """Factors on alpha for each drafted token, each from the prefix that ends before it; 1 behind a row's length."""
    chances, found = seen.log_p(tokens), [[1.0] * len(row) for row in tokens]
    for row, walk in enumerate(walks):
        for column in range(lengths[row]):
            kinds = boundaries.after(walk.tail) if boundaries is not None and walk.policy.protect else frozenset()
            found[row][column] = walk.factor(seen.entropies[row][column], kinds)
            walk = walk.then(tokens[row][column], chances[row][column], seen.entropies[row][column])
    return found


def moved(seen: Seen, walks: Sequence[Walk], emitted: list[list[int]]) -> list[Walk]:
    """The walks after what a round emitted: the accepted tokens of each row, and the one that follows them."""
    chances, found = seen.log_p(emitted), []
    for walk, tokens, logs, entropies in zip(walks, emitted, chances, seen.entropies, strict=True):
        for token, log, uncertainty in zip(tokens, logs, entropies, strict=False):  # p may reach further
            walk = walk.then(token, log, uncertainty)
        found.append(walk)
    return found
