"""A request in a batcher, as who asked for it sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .rows import Row
from .stats import Stats

if TYPE_CHECKING:
    from .answers import Completion, Piece
    from .serving import Batcher


class Handle:
    """A request in a batcher. stats: of its rounds alone; the seconds are those of the whole batch in them."""

    def __init__(self, batcher: Batcher, row: Row, seeded: bool) -> None:
        self.stats = Stats(rows=1)
        self._batcher, self._row, self._seeded = batcher, row, seeded
        self._cancelled = False
        # what the batcher has published: how many tokens there are, and how the request ended
        self._tokens = 0
        self._reason: str | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._reason is not None

    def cancel(self) -> None:
        """Ends the request before the next round; its answer is what it has said by then. Nothing once it has ended."""
        self._cancelled = True
        self._batcher.wake()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the answer. finish_reason is `stop`, `length` or `cancelled`.

        Raises what the request failed with, and TimeoutError when it has not ended after `timeout_s` seconds.
        """
        self._batcher.wait(lambda: self.done, timeout_s)
        seen = self._seen()
        return self._batcher.decoder.completion(seen, seen.job.stopping)

    def __iter__(self) -> Iterator[Piece]:
        """The answer piece by piece, as `Decoder.stream`."""
        return self._batcher.decoder.pieces(self._rounds(), self._row.job, self.stats)

    def _rounds(self) -> Iterator[list[Row]]:
        ended, count = False, 0
        while not ended:
            self._batcher.wait(lambda count=count: self.done or self._tokens > count, None)  # type: ignore[misc]
            seen = self._seen()
            ended, count = seen.finish_reason is not None, len(seen.output)
            yield [seen]

    def _seen(self) -> Row:
        """The row as far as it has been published."""
        ended = self._reason
        if self._error is not None:
            raise self._error
        return replace(self._row, output=self._row.output[: self._tokens], finish_reason=ended)
