"""From logits to probabilities, and from uniform numbers to tokens.

The target and the draft go through the same steps, in the order of transformers' generate: penalties, temperature,
top-k, top-p. All in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .settings import Sampling

#: a logits processor as in transformers: (input_ids (1, L), scores (1, V)) -> scores (1, V)
Processor = Callable[[Tensor, Tensor], Tensor]


def penalise(
    logits: Tensor,
    prefixes: Sequence[Sequence[int]],
    drafted: Tensor,
    sampling: Sampling,
    processors: Sequence[Processor] = (),
) -> Tensor:
    """Applies the repetition penalty and `processors` to logits (batch, n, V).

    Column j of row i sees the prefix of the row and its first j drafted tokens, as plain decoding would there;
    drafted is (batch, >= n - 1). Returns logits unchanged when there is nothing to apply.
    """
    if sampling.repetition_penalty == 1.0 and not processors:
        return logits
    logits = logits.clone()
    for row, prefix in enumerate(prefixes):
        history = torch.tensor(list(prefix), dtype=torch.long, device=logits.device)
        for column in range(logits.shape[1]):
            seen = torch.cat([history, drafted[row, :column]]) if column else history
            scores = logits[row, column]
            if sampling.repetition_penalty != 1.0:
                present = seen.unique()
                present = present[present < scores.shape[0]]  # a prompt may hold ids that cannot be emitted
                value = scores[present]
                penalty = sampling.repetition_penalty
                scores = scores.index_put((present,), torch.where(value < 0, value * penalty, value / penalty))
            for processor in processors:
                scores = processor(seen[None], scores[None])[0]
            logits[row, column] = scores
    return logits


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    """top-k, then top-p, by setting the logits of the rest to -inf. The best token always stays."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1)
        cut = ordered.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        cut[..., -1] = False
        logits = logits.masked_fill(cut.scatter(-1, index, cut), -torch.inf)
    return logits


def probabilities(logits: Tensor, sampling: Sampling, tau: float = 1.0) -> Tensor:
    """fp32 probabilities (..., V) at the request's temperature times `tau`.

    At temperature 0: the softmax of the logits themselves (at `tau`), from which the greedy rule takes the argmax.
    """
    temperature = max((sampling.temperature or 1.0) * tau, 1e-30)  # under it, fp32 overflows; it is the argmax by then
    scaled = logits if temperature == 1.0 else logits / temperature
    if sampling.temperature > 0:
        scaled = _filter(scaled, sampling)
    return scaled.softmax(-1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: the first token whose cumulated weight is over uniform * total; (..., V), (...) -> (...).

    A token of weight 0 is never drawn, also not at uniform = 0 or just under 1.
    """
    cumulated = weights.double().cumsum(-1)
    total = cumulated[..., -1:]
    level = uniforms.double().unsqueeze(-1) * total
    # at the top, rounding could reach `total`: the last step of the cumulated weights is then the token
    level = torch.where(level >= total, torch.nextafter(total, torch.zeros_like(total)), level)
    return torch.searchsorted(cumulated, level, right=True).squeeze(-1)
