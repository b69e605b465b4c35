"""How far a head's laws are from the target's: the loss that training lowers, and the overlap that decoding will see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lossyspec.feature_head import FeatureHead

from .data import Shard

#: positions whose laws are held at a time
_PIECE = 256


class _LawsLoss(torch.autograd.Function):
    """Distances of softmaxes over the same output rows. The gradients in the draft's logits are known in closed form, so
    they are taken in the forward pass, a piece at a time: no (positions, vocab) tensor is kept or read twice, and the
    target's law of a position is made once for all depths."""

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor, known: Tensor, rows: Tensor, weights: Tensor, reach: float, *outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, overlaps = torch.zeros((), device=known.device), torch.zeros(len(outputs), device=known.device)
        by_output, by_bias = [torch.empty_like(output) for output in outputs], torch.zeros_like(bias)
        for first in range(0, len(known), _PIECE):
            piece = slice(first, first + _PIECE)
            z = F.linear(known[piece].to(rows.dtype), rows).float()
            level = z.logsumexp(-1, keepdim=True)
            p = (z - level).exp_()
            certainty = torch.linalg.vecdot(p, z) - level[:, 0]
            for depth, output in enumerate(outputs):
                weight = weights[depth, piece]
                z = F.linear(output[piece].to(rows.dtype), rows).float().add_(bias)
                level = z.logsumexp(-1, keepdim=True)
                divergence = certainty - torch.linalg.vecdot(p, z) + level[:, 0]
                q = z.sub_(level).exp_()
                shared = torch.minimum(p, q).sum(-1)
                overlaps[depth] += weight @ shared
                share = float((-reach * (weight @ shared) / weight.sum().clamp_min(1e-12)).exp()) if reach else 1.0
                total += weight @ (share * divergence + (1.0 - share) * (1.0 - shared))
                slope = q - p
                if share < 1.0:
                    below = (q < p).to(q.dtype)
                    least = torch.linalg.vecdot(q, below)
                    slope.mul_(share).addcmul_(q, least[:, None] - below, value=1.0 - share)
                slope.mul_(weight[:, None])
                by_output[depth][piece] = (slope.to(rows.dtype) @ rows).to(output.dtype)
                by_bias += slope.sum(0)
        ctx.save_for_backward(by_bias, *by_output)
        overlaps /= weights.sum(1).clamp_min(1e-12)
        ctx.mark_non_differentiable(overlaps)
        return total, overlaps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_bias, *by_output = ctx.saved_tensors
        scale = gradients[0]
        return by_bias * scale, None, None, None, None, *(part * scale for part in by_output)


def laws_loss(
    outputs: Sequence[Tensor],
    bias: Tensor,
    known: Tensor,
    rows: Tensor,
    weights: Tensor,
    reach: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weighted sum over depths and positions of share KL(p || q) + (1 - share) (1 - sum(min(p, q))), and the mean
    overlap sum(min(p, q)) of each depth.

    outputs: by depth, (n, hidden) of the head, q = softmax(rows output + bias). known: (n, hidden) of the target, p =
    softmax(rows known). rows: (vocab, hidden), in whose dtype products are taken. weights: (depths, n).
    share: exp(-reach overlap), so that training begins with KL, whose gradient reaches tokens that q does not know yet, and
    moves on to what is accepted in the end. reach 0: KL alone.
    """
    total, overlaps = _LawsLoss.apply(bias, known, rows, weights, reach, *outputs)  # type: ignore[no-untyped-call]
    return total, overlaps


@torch.inference_mode()
def overlap(
    head: FeatureHead,
    embeddings: Tensor,
    output_rows: Tensor,
    batch: Shard,
    temperatures: Sequence[float],
    depths: int,
) -> list[dict[str, Any]]:
    """How near q is to p by temperature and depth on held-out streams: mean sum(min(p, q)), the share of equal argmax.

    output_rows: (V, hidden) of the target; p has full support. Forced tokens are left out.
    """
    device = embeddings.device
    sums = torch.zeros(len(temperatures), depths, 2, dtype=torch.float64, device=device)
    counts = torch.zeros(depths, dtype=torch.long, device=device)
    rows = output_rows[head.token_map]
    for tokens, forced, features in zip(
        batch.tokens.split(16), batch.forced.split(16), batch.features.split(16), strict=True
    ):
        known = features.to(device=device, dtype=embeddings.dtype)
        outputs = head.unroll(F.embedding(tokens[:, 1:-1].to(device).long(), embeddings), known[:, :-2], depths)
        wanted = ~forced[:, 2:].to(device)
        begun = torch.arange(wanted.shape[1], device=device).expand_as(wanted)[wanted]
        flat = [output[wanted] for output in outputs]
        for first in range(0, len(begun), _PIECE):
            piece = slice(first, first + _PIECE)
            target = F.linear(known[:, 1:-1][wanted][piece], output_rows).float()
            best = target.argmax(-1)
            laws = [(target / temperature).softmax(-1)[:, head.token_map] for temperature in temperatures]
            for depth, output in enumerate(flat):
                inside = begun[piece] >= depth
                counts[depth] += inside.sum()
                draft = head.logits(output[piece], rows).float()
                equal = (head.token_map[draft.argmax(-1)] == best)[inside].sum()
                for index, (temperature, p) in enumerate(zip(temperatures, laws, strict=True)):
                    shared = torch.minimum(p, (draft / temperature).softmax(-1)).sum(-1)
                    sums[index, depth, 0] += shared[inside].sum()
                    sums[index, depth, 1] += equal
    return [
        {
            "depth": depth + 1,
            "temperature": temperature,
            "overlap": float(sums[index, depth, 0] / counts[depth]),
            "top1": float(sums[index, depth, 1] / counts[depth]),
            "tokens": int(counts[depth]),
        }
        for index, temperature in enumerate(temperatures)
        for depth in range(depths)
    ]


__all__ = ["laws_loss", "overlap"]
