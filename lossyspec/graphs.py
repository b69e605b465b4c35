"""Passes of few tokens as CUDA graphs: recorded once for a number of rows and tokens, then replayed as one launch.

A recorded pass reads its tokens and where each row begins from memory of its own, writes the cache by index, and sees some
power of two of slots, with those that are not written yet masked: nothing in it depends on the host. Graphs hold for the
memory that they were recorded over, so they go when the cache takes other memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kv_cache import STORAGE_SLOTS, RowCache
from .settings import MAX_DRAFT_LENGTH

logger = logging.getLogger("lossytune")

#: graphs that are kept; those that were not replayed for longest go first
MOST = 64

#: records what a function does; what replays it, and where its result is then
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
#: tokens (rows, n) and their slots (rows, n) -> final hidden states, over a cache that is pinned
Pass = Callable[[Tensor, Tensor], Tensor]


class CudaCapture:
    """Records by torch.cuda.CUDAGraph; all graphs of one share the memory of what lies between their input and result."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Capture`. Raises RuntimeError where `run` does what cannot be recorded."""
        with torch.cuda.device(self.device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()  # libraries take their working memory in the first call
            torch.cuda.current_stream().wait_stream(side)
            # another thread may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        return graph.replay, result


@dataclass(frozen=True)
class _Recorded:
    """tokens: (rows, n). first: (rows,) slot of each row's first token. result: (rows, n, hidden)."""

    tokens: Tensor
    first: Tensor
    result: Tensor
    replay: Callable[[], None]


class Graphs:
    """The recorded passes of one model over one cache, by rows, tokens and slots.

    new_capture: makes what records them; a runner's forks have one each."""

    def __init__(self, new_capture: Callable[[], Capture]) -> None:
        self.new_capture = new_capture
        self.capture = new_capture()
        self.usable = True
        self._memory: weakref.ref[Tensor] | None = None
        self._seen: set[tuple[int, int, int]] = set()
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}

    def fork(self) -> Graphs:
        """None yet, recorded in the same way."""
        return Graphs(self.new_capture)

    def hidden(self, cache: RowCache, tokens: Tensor, starts: list[int], run: Pass) -> Tensor | None:
        """Final hidden states of a pass that reads tokens (rows, n) from slots `starts` on; None: run it otherwise.

        A pass is recorded when one like it comes for the second time."""
        rows, count = tokens.shape
        if not self.usable or count > MAX_DRAFT_LENGTH + 1 or not cache.layers[0].is_initialized:
            return None
        memory: Tensor = cache.layers[0].keys
        if self._memory is None or self._memory() is not memory:
            self.drop()
            self._memory = weakref.ref(memory)
        key = (rows, count, _bucket(max(starts) + count, memory.shape[2]))
        if key not in self._seen:
            self._seen.add(key)
            return None
        cache.place(starts, count, None)
        first = torch.tensor(starts, device=tokens.device)
        recorded = self._recorded.pop(key, None) or self._record(cache, tokens, first, key[2], run)
        if recorded is None:
            return None
        self._recorded[key] = recorded  # the last one used lies last
        if len(self._recorded) > MOST:
            del self._recorded[next(iter(self._recorded))]
        recorded.tokens.copy_(tokens)
        recorded.first.copy_(first)
        recorded.replay()
        return recorded.result.clone()  # the next replay writes there again

    def drop(self) -> None:
        """Forgets all graphs: the memory that they use is no longer the cache's."""
        self._seen.clear()
        self._recorded.clear()

    def _record(self, cache: RowCache, tokens: Tensor, first: Tensor, extent: int, run: Pass) -> _Recorded | None:
        """None where it cannot be recorded, which is then not tried again."""
        tokens, first = tokens.clone(), first.clone()

        def fixed() -> Tensor:
            slots = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            with cache.pinned(slots, extent):
                return run(tokens, slots)

        try:
            replay, result = self.capture(fixed)
        except RuntimeError as problem:  # what runs cannot be recorded, or there is no memory for it
            logger.warning("passes run without CUDA graphs from now on, since one could not be recorded: %s", problem)
            self.usable = False
            self.drop()
            return None
        return _Recorded(tokens, first, result, replay)


def _bucket(extent: int, stored: int) -> int:
    """Slots that a recorded pass sees: at least `extent`, in few different numbers."""
    size = STORAGE_SLOTS
    while size < extent:
        size *= 2
    return min(size, stored)
