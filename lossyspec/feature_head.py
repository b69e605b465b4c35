"""The feature-head draft network: one small decoder that reads the target's final hidden states (EAGLE, arXiv 2401.15077).

Entry i pairs the target's feature f_i (its final hidden state after reading token i) with token i + 1, and predicts token
i + 2. Deeper in a round the network's own output takes the place of a feature that the target has not computed yet, so
its law depends on the depth. Token embeddings and output rows are the target's own and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norms import rms_norm

EPSILON = 1e-6


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the network. hidden: the target's hidden size. vocab: rows of the reduced output."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    vocab: int
    rope_theta: float = 10_000.0


def unit_rms(values: Tensor) -> Tensor:
    """Rows scaled to a root mean square of 1: the target's final norm has large weights, which the input must not carry."""
    return rms_norm(values, None, EPSILON)


class _Block(nn.Module):
    """Pre-norm attention with rotary positions and grouped keys, and a gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.norm_attention = nn.RMSNorm(shape.width, eps=EPSILON)
        self.norm_mlp = nn.RMSNorm(shape.width, eps=EPSILON)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.width, bias=False)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, n, size), keys and values (B, kv_heads, n, size) of x (B, n, width)."""
        q, k, v = self.qkv(rms_norm(x, self.norm_attention.weight, EPSILON)).split(
            [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size], dim=-1
        )
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k, v))
        return _rotate(q, rope), _rotate(k, rope), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the block, from attended values (B, heads, n, size)."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(rms_norm(x, self.norm_mlp.weight, EPSILON)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class FeatureHead(nn.Module):
    """fc(unit-RMS embedding, unit-RMS feature) -> blocks -> norm -> the target's output rows of `token_map`.

    token_map: (vocab,) ids of the target's tokens that the draft can propose; q is 0 on all others.
    """

    token_map: Tensor

    def __init__(self, shape: HeadShape, token_map: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.width, bias=False)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.to_hidden = nn.Identity() if shape.width == shape.hidden else nn.Linear(shape.width, shape.hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(shape.vocab))
        self.register_buffer("token_map", token_map, persistent=True)

    def entry(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Input of the blocks: (B, n, width) from token embeddings and features (B, n, hidden)."""
        return self.fc(torch.cat([unit_rms(embeddings), unit_rms(features)], dim=-1))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions (B, n): (B, 1, n, size / 2)."""
        half = self.shape.width // self.shape.heads // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        angles = positions[:, None, :, None].float() * rates
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def output(self, x: Tensor) -> Tensor:
        """The network's own feature (B, n, hidden) from the last block."""
        return self.to_hidden(rms_norm(x, self.norm.weight, EPSILON))

    def logits(self, feature: Tensor, rows: Tensor) -> Tensor:
        """(B, n, vocab) from features and the target's output rows (vocab, hidden)."""
        return F.linear(feature, rows) + self.bias

    def unroll(self, embeddings: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """The network's features at depth 1 .. `depths` for all entries at once; each (B, n, hidden).

        embeddings: (B, n, hidden) of token i + 1 at entry i. features: (B, n, hidden) the target's. At depth d entry i
        uses the output of depth d - 1 at entry i - 1 as its feature, and attends to the target's entries up to i - d + 1 and
        to the draft's own at depths 2 .. d on the diagonal: what a round that began d - 1 tokens earlier would see. Entries
        i < d - 1 have no such round; their outputs mean nothing.
        """
        count = embeddings.shape[1]
        positions = torch.arange(count, device=embeddings.device).expand(embeddings.shape[0], -1)
        rope = self.rope(positions, embeddings.dtype)
        place = torch.arange(count, device=embeddings.device)
        gap = place[:, None] - place[None, :]
        memory: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]
        outputs: list[Tensor] = []
        for depth in range(1, depths + 1):
            x = self.entry(embeddings, features)
            for block, kept in zip(self.blocks, memory, strict=True):
                assert isinstance(block, _Block)
                q, k, v = block.project(x, rope)
                kept.append((k, v))
                x = block.finish(x, _attend(q, kept, gap, depth))
            outputs.append(self.output(x))
            features = F.pad(outputs[-1], (0, 0, 1, 0))[:, :-1]
        return outputs


def _attend(q: Tensor, kept: list[tuple[Tensor, Tensor]], gap: Tensor, depth: int) -> Tensor:
    """Attention of depth `depth`: over the first depth's keys at a distance of at least depth - 1, and for each later
    depth s over its key at distance depth - s."""
    group = q.shape[1] // kept[0][0].shape[1]
    scale = q.shape[-1] ** -0.5
    keys, values = (part.repeat_interleave(group, dim=1) for part in kept[0])
    if depth == 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(gap < depth - 1, -torch.inf)
    own, shifted = [], []
    for s in range(2, depth + 1):
        back = depth - s
        key, value = (_delay(part, back).repeat_interleave(group, dim=1) for part in kept[s - 1])
        own.append((q * key).sum(-1, keepdim=True) * scale)
        shifted.append(value)
    weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
    attended = weights[..., : keys.shape[2]] @ values
    for index, value in enumerate(shifted):
        attended = attended + weights[..., keys.shape[2] + index, None] * value
    return attended


def _delay(x: Tensor, count: int) -> Tensor:
    """Entries moved `count` places later along dim 2; the first ones are 0."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x
