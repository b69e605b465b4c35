"""The guard in production: a request that has moved further from the target than its profile says goes on lossless.

What is watched is the total variation between the law that a rule really gave each position and the target's own,
TV(pi, p), in closed form from the verdict. Its sum over a text bounds, on average, the total variation between the law of
the whole text and the target's, so a limit on it is a limit on how often the text can be told from one of the target.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from .counters import Counters
from .profile import Evidence
from .rows import Row
from .settings import Model
from .stats import Round

if TYPE_CHECKING:
    from typing import Self

#: standard deviations of the mean that the band of a profile is wide
_BAND = 4.0


class Guard(Model):
    """Limits on the mean total variation a token, from 0 to 1; None: no limit.

    request: of one request, over its tokens so far, `least_tokens` at least. rolling: of all requests of a decoder, over
    their last `window` tokens. A request that meets a value over its limit is lossless from its next round to its end.
    """

    request: float | None = Field(None, ge=0.0, le=1.0)
    least_tokens: int = Field(32, ge=1)
    rolling: float | None = Field(None, ge=0.0, le=1.0)
    window: int = Field(4096, ge=1)

    @classmethod
    def of(cls, evidence: Evidence, window: int = 4096) -> Self | None:
        """The band of a profile: its mean TV, and four standard deviations of the mean over a text of the length that it
        was measured on, or over the window. None where the profile has none (greedy, lossless, or written before)."""
        quality = evidence.quality
        if quality.tv is None or quality.tv_spread is None:
            return None
        length = max(quality.tokens // quality.texts, 1)

        def limit(tokens: int) -> float:
            assert quality.tv is not None and quality.tv_spread is not None
            return min(quality.tv + _BAND * quality.tv_spread * (1 / tokens + 1 / quality.tokens) ** 0.5, 1.0)

        return cls(request=limit(length), least_tokens=length, rolling=limit(window), window=window)


class Watch:
    """Sees every round of a decoder, from whatever run and thread: counts it, and applies the guard."""

    def __init__(self, counters: Counters, guard: Guard | None = None) -> None:
        self.counters = counters
        self.guard = guard or Guard()
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, float]] = deque()
        self._tokens, self._variation = 0, 0.0

    def began(self, rows: Sequence[Row], prefill_s: float) -> None:
        """The prompts of these rows have been read."""
        self.counters.began([len(row.prompt) for row in rows], prefill_s)

    def saw(self, rows: Sequence[Row], done: Round) -> None:
        """A round of these rows is over: rows that are over a limit become lossless."""
        self.counters.add(done)
        rolling = self._roll(sum(done.tokens), sum(done.variation))
        for row in rows:
            if row.finish_reason is not None:
                self.counters.finished(row.finish_reason)
            elif row.guarded is None and row.alpha > 0:
                if _over(row.variation, len(row.output), self.guard.request, self.guard.least_tokens):
                    row.guarded = "request"
                elif rolling:
                    row.guarded = "rolling"
                if row.guarded is not None:
                    self.counters.tripped(row.guarded)

    def ended(self, rows: Sequence[Row], error: BaseException | None) -> None:
        """These rows end before their time: with an error, or cancelled (None, or a stream that was dropped)."""
        gone = error is None or isinstance(error, GeneratorExit)
        for row in rows:
            row.finish_reason = "cancelled" if gone else "error"
            self.counters.finished(row.finish_reason)

    def _roll(self, tokens: int, variation: float) -> bool:
        """Whether the window, with these in it, is over its limit."""
        with self._lock:
            self._recent.append((tokens, variation))
            self._tokens, self._variation = self._tokens + tokens, self._variation + variation
            while self._tokens - self._recent[0][0] >= self.guard.window:
                old = self._recent.popleft()
                self._tokens, self._variation = self._tokens - old[0], self._variation - old[1]
            self.counters.set(rolling_variation=max(self._variation, 0.0) / self._tokens)
            return _over(self._variation, self._tokens, self.guard.rolling, self.guard.window)


def _over(variation: float, tokens: int, limit: float | None, least_tokens: int) -> bool:
    return limit is not None and variation > limit * max(tokens, least_tokens)
