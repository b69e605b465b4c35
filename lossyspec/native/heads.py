"""Steps and whole rounds of a feature head in one call of `stack.cpp`."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_head import EPSILON, FeatureHead
from ..fused import FusedLayer, RootMeanSquare
from ..kv_cache import RowCache
from . import build
from .build import checked
from .passes import NativeLayers, Unfit
from .products import Blocks

logger = logging.getLogger("lossytune")


class NativeHead(NativeLayers):
    """Steps of a feature head: embeddings and features in, its own features and logits over its token map out."""

    def __init__(self, head: FeatureHead, embeddings: Tensor, rows: Any) -> None:
        """head: packed. rows: the target's output rows, packed. Raises `Unfit`."""
        shape = head.shape
        size = shape.width // shape.heads

        def norm(module: Any) -> RootMeanSquare:
            return RootMeanSquare(module.weight.detach(), EPSILON)

        def turns(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (part[0, 0] for part in head.rope(positions[None], torch.float32))
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

        def layer(block: Any) -> FusedLayer:
            return FusedLayer(
                norm(block.norm_attention), block.qkv.matrix, None, block.out.matrix, None,
                norm(block.norm_mlp), block.gate_up.matrix, F.silu, block.down.matrix, None,
            )  # fmt: skip

        heads = (shape.heads, shape.kv_heads, size)
        super().__init__([layer(block) for block in head.blocks], norm(head.norm), heads, size**-0.5, turns)
        if shape.width != shape.hidden:
            raise Unfit("the head is of another width than its target")
        joins: Any = head.fc
        bias, parts = head.bias.detach(), (joins.matrix.packed, rows.packed)
        if not all(isinstance(part, Blocks) for part in parts):
            raise Unfit("its matrices are not packed for the compiled code")
        if embeddings.dtype not in (torch.float32, torch.bfloat16):
            raise Unfit(f"embeddings in {embeddings.dtype}")
        bias, embeddings = bias.float().contiguous(), embeddings.contiguous()
        self._support = head.token_map.contiguous()
        self._kept += [bias, embeddings]
        self._shape.table, self._outputs = embeddings.data_ptr(), shape.vocab
        self._shape.half_table = embeddings.dtype == torch.bfloat16
        self._shape.entry, self._shape.exit = parts[0].matrix(), parts[1].matrix(bias)
        self._kept += parts

    def step(
        self, tokens: Tensor, features: Tensor, starts: Sequence[int], cache: RowCache, picks: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Features (batch, n, hidden) after tokens (batch, n) with the target's or its own features (batch, n, hidden), and
        fp32 logits (batch, 1, S) after column picks[i] of row i."""
        what, x, logits = self._read(tokens, features, starts, cache, picks)
        self._run(what, x)
        return x, logits

    def chain(
        self,
        tokens: Tensor,
        features: Tensor,
        starts: Sequence[int],
        cache: RowCache,
        picks: Sequence[int],
        limits: Sequence[int],
        temperature: float,
        theta: float,
        numbers: Tensor | None,
    ) -> tuple[Tensor, Tensor, list[int], int]:
        """A whole round of at most limits[i] tokens for row i, the first after what `step` reads; a row stops before a
        law with NaN, or no chance of theta. numbers: (batch, n) that they are drawn by; None: the most likely ones. Returns
        their ids (batch, n), the laws (batch, n, S) that they are from, how many count in each row, and the steps that were
        taken. Raises ValueError where the cache has not the slots."""
        steps = max(limits)
        if (end := max(start + pick for start, pick in zip(starts, picks, strict=True)) + steps) > cache.capacity:
            raise ValueError(f"cache of {cache.capacity} slots is too small for {end}")
        what, x, logits = self._read(tokens, features, starts, cache, picks)
        rows, (cosines, sines) = len(starts), self._angles_to(self.kinds[0], cache.capacity)
        laws, drawn = logits.new_empty(rows, steps, self._outputs), torch.empty(rows, steps, dtype=torch.long)
        most, lengths = (ctypes.c_int64 * rows)(*limits), (ctypes.c_int64 * (rows + 1))()
        numbers = None if numbers is None else numbers.double().contiguous()
        given = None if numbers is None else numbers.data_ptr()
        after = [part.data_ptr() for part in (self._support, cosines, sines, laws, drawn)]
        shape, begin = ctypes.byref(self._shape), ctypes.byref(what)
        checked(
            self._code.lossyspec_chain(shape, begin, x.data_ptr(), most, steps, temperature, theta, given, *after, lengths)
        )
        *counts, taken = lengths
        width = max(counts)
        return drawn[:, :width], laws[:, :width], counts, taken

    def _read(
        self, tokens: Tensor, features: Tensor, starts: Sequence[int], cache: RowCache, picks: Sequence[int]
    ) -> tuple[build.Pass, Tensor, Tensor]:
        """The pass over entries, where their states go, and the logits."""
        rows, count, width = features.shape
        tokens, features = tokens.contiguous(), features.float().contiguous()
        x, logits = features.new_empty(rows, count, width), features.new_empty(rows, 1, self._outputs)
        what = self._pass(rows, count, starts, cache)
        what.tokens, what.features, what.logits = tokens.data_ptr(), features.data_ptr(), logits.data_ptr()
        what.picks = (ctypes.c_int64 * rows)(*picks)
        what.kept = what.kept, tokens, features
        return what, x, logits


def native_head(head: FeatureHead, embeddings: Tensor, rows: Any) -> NativeHead | None:
    """The steps of a packed head by the compiled code; None, with the reason in the log, where it has not all parts."""
    try:
        return NativeHead(head, embeddings, rows)
    except Unfit as reason:
        logger.debug("the draft head runs by torch's operations: %s", reason)
        return None
