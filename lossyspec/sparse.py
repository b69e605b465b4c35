"""Block-sparse attention over a RowCache: a query sees its blocks alone, and what it skips is not read.

Which blocks a query sees follows from its position and from summaries of the keys before it, so the law at a position
depends on the prefix and not on how passes were cut: verifying n tokens is what n passes of one token would be. Heads that
share their keys share their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import attend
from .fused import FusedStack
from .kv_cache import RowCache
from .settings import MAX_DRAFT_LENGTH, Attention


class BlockIndex:
    """The largest and the least of the keys in each block, number by number: together an upper bound of a query's product
    with any key of the block (Quest, arXiv 2406.10774).

    It stands for whole blocks. Blocks that are written again are read again, when they are next asked for.
    """

    def __init__(self, cache: RowCache, block: int) -> None:
        self.layers = cache.layers  # not the cache, which holds the index: both go with their last user
        self.block = block
        self.rows = cache.rows
        self._known = [0] * self.rows  # whole blocks that the bounds stand for
        self._first, self._last = self._known, self._known
        self._bounds: dict[int, Tensor] = {}

    @staticmethod
    def of(cache: RowCache, block: int) -> BlockIndex:
        """The index that a cache has, or a new one."""
        if not isinstance(cache.summaries, BlockIndex) or cache.summaries.block != block:
            cache.summaries = BlockIndex(cache, block)
        return cache.summaries

    def forget(self, starts: list[int]) -> None:
        """Entries of row i from slot `starts[i]` on are written anew."""
        self._known = [min(known, start // self.block) for known, start in zip(self._known, starts, strict=True)]

    def expect(self, filled: Sequence[int]) -> None:
        """A pass begins, after which row i holds `filled[i]` entries; each layer that sparse attention reads must then ask
        for its scores, since after the pass the index counts as up to date."""
        self._first, self._last = self._known, [length // self.block for length in filled]
        self._known = [max(before, now) for before, now in zip(self._first, self._last, strict=True)]

    def refresh(self, layer: int) -> Tensor:
        """The bounds of a layer up to date, (batch, kv_heads, blocks, 2 size): largest, then least numbers."""
        keys, first, last = self.layers[layer].keys[: self.rows], min(self._first), max(self._last)
        if layer not in self._bounds:
            rows, heads, slots, size = keys.shape
            self._bounds[layer] = keys.new_zeros(rows, heads, slots // self.block, 2 * size)
        if any(now > before for before, now in zip(self._first, self._last, strict=True)):
            # a block of another row that is not whole yet is read too; nobody asks for it before it is
            new = keys[:, :, first * self.block : last * self.block].unflatten(2, (last - first, self.block))
            self._bounds[layer][:, :, first:last] = torch.cat([new.amax(3), new.amin(3)], -1)
        return self._bounds[layer]

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """(batch, kv_heads, n, blocks) upper bounds of q (batch, n, heads, size) with each block, summed over the heads that
        share keys. The cache may have one row for all of the batch."""
        bounds = self.refresh(layer)
        batch, count, heads, size = q.shape
        grouped = q.view(batch, count, bounds.shape[1], heads // bounds.shape[1], size)
        parts = torch.cat([grouped.clamp_min(0).sum(3), grouped.clamp_max(0).sum(3)], -1)
        wide = torch.promote_types(parts.dtype, bounds.dtype)  # scores of few bits would have ties, which fall as they may
        return parts.transpose(1, 2).to(wide) @ bounds.transpose(-1, -2).to(wide)


def pick_blocks(part: Tensor, blocks: Tensor, block: int, out: Tensor | None = None) -> Tensor:
    """Blocks (batch, kv_heads, m) of keys or values (batch or 1, kv_heads, slots, size): (batch, kv_heads, m * block, size).

    out: where the copy goes. The slots must be whole blocks; what is not picked is not read."""
    rows, heads, slots, size = part.shape
    width = slots // block
    row = torch.arange(rows, device=part.device)[:, None] * heads + torch.arange(heads, device=part.device)
    flat = (blocks + (row * width).unsqueeze(-1)).flatten()
    wide = None if out is None else out.view(-1, block * size)
    picked = torch.index_select(part.view(-1, block * size), 0, flat, out=wide)
    return picked.view(*blocks.shape[:2], -1, size)


class SparseReader:
    """Attention of a pass of the target whose queries each see their own blocks, for any number of new tokens.

    The blocks that any query of a row sees are read once; a mask then gives each query its own."""

    def __init__(
        self, stack: FusedStack, cache: RowCache, attention: Attention, starts: Sequence[int], mask: object
    ) -> None:
        """`cache.place` has been told of the pass. mask: for layers with a sliding window, which stay as they are."""
        self.stack, self.cache, self.attention = stack, cache, attention
        self.dense = stack.dense(cache, mask)
        device = stack.model.device
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(cache.count, device=device)
        own = (self.positions // attention.block)[:, None, :, None]  # (batch, 1, n, 1)
        blocks = torch.arange(-(-cache.extent // attention.block), device=device)
        sink, before = attention.sink or 0, own - (attention.window or 0)
        self.always = ((blocks > before) | (blocks < sink)) & (blocks <= own)
        self.candidates = (blocks >= sink) & (blocks <= before)
        self._ends = [start + cache.count for start in starts]
        self._index: BlockIndex | None = None
        self._rooms = [torch.empty(0), torch.empty(0)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `lossyspec.attention.Reader`."""
        if self.stack.kinds[layer] != "full_attention":
            return self.dense(layer, q, k, v)
        self.cache.update(k, v, layer)
        stored, block = self.cache.layers[layer], self.attention.block
        seen = self.seen(layer, q)
        union = seen.any(2)
        width = int(union.sum(-1).amax())
        chosen, blocks = union.to(torch.uint8).topk(width)
        real = chosen > 0
        blocks = torch.where(real, blocks, 0)  # rows that see fewer blocks read the first one again, behind the mask
        rows = self.cache.rows
        keys, values = self._copied(0, stored.keys[:rows], blocks), self._copied(1, stored.values[:rows], blocks)
        visible = seen.gather(-1, blocks.unsqueeze(2).expand(-1, -1, q.shape[1], -1)) & real.unsqueeze(2)
        slots = (blocks.unsqueeze(-1) * block + torch.arange(block, device=blocks.device)).flatten(2)
        causal = slots.unsqueeze(2) <= self.positions[:, None, :, None]
        return attend(q, keys, values, visible.repeat_interleave(block, -1) & causal)

    def _copied(self, which: int, part: Tensor, blocks: Tensor) -> Tensor:
        """`pick_blocks` into memory that the layers of a pass share, which is still in the processor's cache."""
        shape = (*blocks.shape[:2], blocks.shape[2] * self.attention.block, part.shape[3])
        if (numbers := math.prod(shape)) > self._rooms[which].numel():
            self._rooms[which] = part.new_empty(numbers)
        return pick_blocks(part, blocks, self.attention.block, self._rooms[which][:numbers].view(shape))

    def seen(self, layer: int, q: Tensor) -> Tensor:
        """(batch, kv_heads, n, blocks) which blocks each query sees."""
        top = min(self.attention.top or 0, self.candidates.shape[-1])
        always = self.always.expand(-1, self.stack.kv_heads, -1, -1)
        if not top:
            return always
        if self._index is None:  # here and not before: the cache may have been empty
            self._index = BlockIndex.of(self.cache, self.attention.block)
            self._index.expect(self._ends)
        scores = self._index.scores(layer, q)[..., : self.candidates.shape[-1]].masked_fill(~self.candidates, -torch.inf)
        found = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(top).indices, True)
        return always | (found & self.candidates)


class Excerpt:
    """The blocks that a round of drafting sees, copied out of a cache by the round's first queries: a small cache of its
    own, in which the round goes on without any further choice.

    Blocks keep their order, sink first and the window last, so from the window on a slot here is a slot there less a shift;
    what a round adds follows the window. A text that skips nothing is copied whole, with shift 0.
    """

    def __init__(self, stack: FusedStack, source: RowCache, attention: Attention) -> None:
        """stack: of the model that reads the copy. source: the cache of the texts, or of one text for all rows."""
        self.stack, self.source, self.attention = stack, source, attention
        #: blocks here: those that are seen, and room for what a round adds
        self.width = attention.kept - (-MAX_DRAFT_LENGTH // attention.block)
        self.cache = RowCache(len(source.layers), self.width * attention.block)
        self.shifts: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        """A round begins: row i has read `lengths[i]` tokens, and the next one makes the choice."""
        attention, device = self.attention, self.stack.model.device
        own = [length // attention.block for length in lengths]
        skipped = [max(block + 1 - attention.kept, 0) for block in own]
        self.shifts = [blocks * attention.block for blocks in skipped]
        self.chooses = any(skipped) and bool(attention.top)
        if self.chooses:
            self.index = BlockIndex.of(self.source, attention.block)
            self.index.expect(lengths if len(lengths) == self.index.rows else [max(lengths)])
        stored = self.source.layers[0].keys.shape[2] // attention.block
        place = torch.arange(self.width, device=device)
        #: (batch, 1, width) the last blocks of each row, as many as are seen
        self.recent = (place + torch.tensor(skipped, device=device)[:, None]).clamp_max(stored - 1).unsqueeze(1)
        self.sparse = (torch.tensor(skipped, device=device) > 0)[:, None, None]
        blocks = torch.arange(stored, device=device)
        last = torch.tensor(own, device=device)[:, None, None] - (attention.window or 0)
        self.candidates = (blocks >= (attention.sink or 0)) & (blocks <= last)
        self.sink = place[: attention.sink]

    def take(self, layer: int, q: Tensor) -> None:
        """Copies what q (batch, 1, heads, size) sees of a layer; layers with a sliding window see the last blocks."""
        heads, attention = self.stack.kv_heads, self.attention
        blocks = self.recent.expand(-1, heads, -1)
        if self.stack.kinds[layer] == "full_attention" and any(self.shifts):
            sink, top = attention.sink or 0, attention.top or 0
            parts = [self.sink.expand(len(blocks), heads, -1), blocks[..., sink:]]
            if self.chooses:
                scores = self.index.scores(layer, q)[:, :, 0].masked_fill(~self.candidates, -torch.inf)
                parts[1:] = [scores.topk(top).indices, blocks[..., sink + top :]]
            blocks = torch.where(self.sparse, torch.cat(parts, -1), blocks)
        stored, mine = self.source.layers[layer], self.cache.layers[layer]
        shape = (*blocks.shape[:2], self.width * attention.block)
        if not mine.is_initialized or mine.keys.shape[:3] != shape:
            dtype = self.stack.model.dtype
            mine.keys = stored.keys.new_empty(*shape, stored.keys.shape[-1], dtype=dtype)
            mine.values = stored.values.new_empty(*shape, stored.values.shape[-1], dtype=dtype)
            mine.is_initialized = True
        rows = self.source.rows
        for part, copied in ((stored.keys[:rows], mine.keys), (stored.values[:rows], mine.values)):
            if part.dtype == copied.dtype:
                pick_blocks(part, blocks, attention.block, copied)
            else:
                copied.copy_(pick_blocks(part, blocks, attention.block))
