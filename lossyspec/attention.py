"""Attention of grouped heads over cached keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

#: (layer, scaled q (batch, n, heads, size), new keys and values (batch, kv_heads, n, size)) -> (batch, n, heads size):
#: stores what is new and attends
Reader = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: the same for one layer
Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
#: on the CPU, fp32 passes of at most this many tokens a row attend by two plain products; all others by the fused kernel,
#: which reads 16-bit keys as they lie and sums in fp32
_SHORT = 32


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, shared: int = 0) -> Tensor:
    """Attention of scaled q (batch, n, heads, size) over keys and values (batch, kv_heads, T, size): (batch, n, heads size).

    mask: (batch, 1 or kv_heads, n, T) of booleans; the first `shared` of T are known to be visible to all. Grouped heads
    share their keys without copies of them."""
    batch, count, heads, size = q.shape
    keys, values = keys.to(q.dtype), values.to(q.dtype)  # a cache may be kept in fewer bits
    if q.device.type != "cpu" or count > _SHORT or q.dtype != torch.float32:
        queries = q.transpose(1, 2)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(heads // mask.shape[1], 1)
        result = F.scaled_dot_product_attention(queries, keys, values, mask, scale=1.0, enable_gqa=heads != keys.shape[1])
        return result.transpose(1, 2).reshape(batch, count, heads * size)
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if count == 1:
        queries = q.reshape(batch * kv_heads, group, size)
    else:
        queries = q.view(batch, count, kv_heads, group, size).permute(0, 2, 3, 1, 4).reshape(-1, group * count, size)
    scores = torch.bmm(queries, keys.flatten(0, 1).mT)
    if mask is not None:  # in place and past what all see: with a long past the scores are much to copy
        hidden = ~mask[..., shared:].unsqueeze(2)
        scores.view(batch, kv_heads, group, count, -1)[..., shared:].masked_fill_(hidden, -torch.inf)
    attended = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    if count > 1:
        attended = attended.view(batch, kv_heads, group, count, size).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch, count, heads * size)
