"""A preallocated key/value cache with its own length for each row. The only file that knows transformers' cache API.

Row i keeps its tokens in slots 0 .. length_i - 1, without padding. A forward pass writes n new entries of each row from
that row's own start; entries past a row's length are masked and later overwritten, so rolling back is only a matter
of where the next pass starts. Sliding-window layers keep all entries and are windowed by the mask, so they roll back too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .errors import ConfigurationError

#: layer types of transformers configs whose cache is a list of past keys and values
_ROLLABLE = {"full_attention", "sliding_attention", "attention"}
#: a cache that others join grows by so many slots
_GROW_SLOTS = 256
#: storage comes in pieces of this many slots, so that every block of sparse attention is whole
STORAGE_SLOTS = 128


class Summaries(Protocol):
    """What is known of stored keys beside them: it must hear which of them are written anew."""

    def forget(self, starts: list[int]) -> None:
        """Entries of row i from slot `starts[i]` on are written anew."""


class _RowLayer(CacheLayerMixin):
    """One layer: keys and values of shape (batch, heads, slots, head_dim), slots being at least the capacity."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        # no cycle: a cache goes with its last user, not when the garbage collector comes to it, with gigabytes still held
        self.owner: Any = weakref.proxy(owner)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, slots = key_states.shape[0], self.owner.storage
        # zeros, not empty: stale entries are masked, but NaN times a zero weight would still be NaN
        self.keys = key_states.new_zeros(batch, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        owner, rows, count = self.owner, key_states.shape[0], key_states.shape[2]
        if owner.uniform_start is not None:
            place = slice(owner.uniform_start, owner.uniform_start + count)
            self.keys[:rows, :, place] = key_states
            self.values[:rows, :, place] = value_states
        else:
            self.keys[owner.row_index, :, owner.slots] = key_states.transpose(1, 2).to(self.keys.dtype)
            self.values[owner.row_index, :, owner.slots] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[:rows, :, : owner.extent], self.values[:rows, :, : owner.extent]

    def join(self, other: _RowLayer, rows: int, others: int, room: int) -> None:
        """Puts the other's `others` rows behind the first `rows` of this layer, whose capacity is at least the other's."""
        if not self.is_initialized and not other.is_initialized:
            return
        like = self if self.is_initialized else other
        self.keys = _joined(self.keys, other.keys, like.keys, (rows, others, room, self.owner.storage))
        self.values = _joined(self.values, other.values, like.values, (rows, others, room, self.owner.storage))
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.extent, 0

    def get_seq_length(self) -> int:
        return self.owner.extent - self.owner.count

    def get_max_length(self) -> int:
        return self.owner.capacity


def _joined(mine: Tensor | None, theirs: Tensor | None, like: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Keys or values of (rows + others) rows, in the memory of `mine` where that has room for them."""
    rows, others, room, slots = sizes
    if mine is None or mine.shape[0] < rows + others:
        grown = like.new_zeros(max(room, rows + others), like.shape[1], slots, like.shape[3])
        if mine is not None:
            grown[:rows] = mine[:rows]
        mine = grown
    new = mine[rows : rows + others]
    new.zero_()  # an earlier row of this place may have left NaN behind
    if theirs is not None:
        new[:, :, : theirs.shape[2]] = theirs[:others]
    return mine


class RowCache(Cache):
    """Cache of one model for a batch of rows, whose keys and values are the first `rows` of each layer's.

    `place(starts, count)` says where the next forward pass writes; `select(rows)` drops the other rows, and `join(other)`
    appends those of another cache.
    """

    def __init__(self, layer_count: int, capacity: int, rows: int = 0) -> None:
        self.rows = rows
        self.capacity = capacity
        self.extent = 0
        self.count = 0
        #: slots that every row has filled before the pass: all its queries see them
        self.shared = 0
        self.uniform_start: int | None = 0
        self.row_index: Tensor | None = None
        self.slots: Tensor | None = None
        #: of its blocks, where sparse attention reads them; made there, dropped here when rows or slots move
        self.summaries: Summaries | None = None
        #: its tensors, and where compiled passes find them
        self.places: tuple[Any, ...] = ()
        super().__init__(layers=[_RowLayer(self) for _ in range(layer_count)])

    @property
    def storage(self) -> int:
        """Slots that are stored of a row."""
        return -(-self.capacity // STORAGE_SLOTS) * STORAGE_SLOTS

    def place(self, starts: list[int], count: int, device: torch.device | None) -> None:
        """The next pass writes `count` entries of row i from slot `starts[i]`. device: None when they will be `pinned`."""
        if self.summaries is not None:
            self.summaries.forget(starts)
        self.rows, self.count = len(starts), count
        self.shared, self.extent = min(starts), max(starts) + count
        if self.extent > self.capacity:
            raise ValueError(f"cache of {self.capacity} slots is too small for {self.extent}")
        if min(starts) == max(starts) or device is None:
            self.uniform_start, self.row_index, self.slots = starts[0], None, None
            return
        self.uniform_start = None
        first = torch.tensor(starts, device=device)
        self.slots = first[:, None] + torch.arange(count, device=device)
        self.row_index = torch.arange(len(starts), device=device)[:, None]

    @contextmanager
    def pinned(self, slots: Tensor, extent: int) -> Iterator[None]:
        """Meanwhile a pass writes at `slots` (rows, n) and sees the first `extent` slots, whatever `place` said: for passes
        that are recorded, which must depend on tensors alone."""
        before = (self.extent, self.shared, self.uniform_start, self.slots, self.row_index)
        self.extent, self.shared, self.uniform_start, self.slots = extent, 0, None, slots
        self.row_index = torch.arange(len(slots), device=slots.device)[:, None]
        try:
            yield
        finally:
            self.extent, self.shared, self.uniform_start, self.slots, self.row_index = before

    @torch.inference_mode()
    def restart(self, capacity: int, rows: int) -> bool:
        """Makes the cache as new in its own memory, so that passes recorded over it hold; False where that is too small."""
        keys = self.layers[0].keys if self.layers[0].is_initialized else None
        if keys is None or keys.shape[0] < rows or keys.shape[2] < capacity:
            return False
        for layer in self.layers:
            layer.keys[:rows].zero_()  # an earlier text may have left NaN behind
            layer.values[:rows].zero_()
        self.rows, self.capacity, self.extent, self.count, self.shared = rows, keys.shape[2], 0, 0, 0
        self.summaries = None
        return True

    def grow(self, capacity: int) -> None:
        """Room for `capacity` slots a row, with what is stored kept; never shrinks."""
        if capacity <= self.capacity:
            return
        before, self.capacity = self.storage, capacity
        more, self.summaries = self.storage - before, None
        for layer in self.layers:
            if layer.is_initialized and more:
                layer.keys, layer.values = (
                    torch.nn.functional.pad(part, (0, 0, 0, more)) for part in (layer.keys, layer.values)
                )

    @torch.inference_mode()  # as what is stored was made in
    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order. Where each is at its place or comes from behind them, only those that come are
        copied; else all are."""
        self.summaries = None
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        inside = all(row >= len(rows) for _, row in moved)
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            if not inside:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[index], layer.values[index]
                continue
            for place, row in moved:
                for part in (layer.keys, layer.values):
                    part[place, :, : self.extent] = part[row, :, : self.extent]
        self.rows = len(rows)

    @torch.inference_mode()
    def join(self, other: RowCache, room: int = 0) -> None:
        """Appends the other's rows. Where they do not fit, the memory grows to `room` rows and to a multiple of slots, so
        that most joins copy the new rows alone."""
        if other.capacity > self.capacity:
            self.grow(-(-other.capacity // _GROW_SLOTS) * _GROW_SLOTS)
        self.summaries = None
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs, self.rows, other.rows, room)
        self.rows, self.extent = self.rows + other.rows, max(self.extent, other.extent)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(part.nbytes for layer in self.layers if layer.is_initialized for part in (layer.keys, layer.values))


def numbers_per_token(config: Any) -> int:
    """Numbers that one token adds to the cache of a model."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width)


def layer_types(config: Any) -> list[str]:
    """The attention type of each layer: full_attention or sliding_attention.

    Raises ConfigurationError for a model whose cache cannot be rolled back, with the reason.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(f"{config.model_type}: an encoder-decoder model; only decoder-only models can be used")
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise ConfigurationError(f"{config.model_type}: its configuration has no num_hidden_layers")
    declared = getattr(text, "layer_types", None)
    if declared is None:
        window = getattr(text, "sliding_window", None)
        sliding = window is not None and getattr(text, "use_sliding_window", True)
        declared = ["sliding_attention" if sliding else "full_attention"] * count
    unlike = sorted(set(declared) - _ROLLABLE)
    if unlike:
        raise ConfigurationError(
            f"{config.model_type}: layers of type {', '.join(unlike)} keep a state that cannot be rolled back after a "
            f"rejected token; only models whose layers are all full or sliding attention can be used"
        )
    return ["sliding_attention" if kind == "sliding_attention" else "full_attention" for kind in declared]
