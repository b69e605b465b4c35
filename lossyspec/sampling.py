"""From logits to probabilities, and from uniform numbers to tokens.

The target and the draft go through the same steps, in the order of transformers' generate: penalties, temperature,
top-k, top-p. All in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import mark_row, row_of
from .native import laws as native
from .settings import Sampling

#: tokens whose weights are summed before one of them is drawn
_BLOCK = 256
#: tokens that are cumulated at once
_FEW = 1 << 14
#: a logits processor as in transformers: (input_ids (1, L), scores (1, V)) -> scores (1, V)
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Choice:
    """How the tokens of a row are chosen. generator: where its uniform numbers come from; rows may share one."""

    sampling: Sampling
    generator: torch.Generator
    processors: Sequence[Processor] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.sampling.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether a penalty or processors change the logits."""
        return self.sampling.repetition_penalty != 1.0 or bool(self.processors)


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
            try:
                for processor in processors:
                    scores = processor(seen[None], scores[None])[0]
            except Exception as error:
                mark_row(error, row)
                raise
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
    whole = softmax_temperature(sampling, tau)
    if whole is not None and native.takes(logits):
        return native.softmax(logits, whole)
    temperature = _temperature(sampling, tau)
    scaled = logits if temperature == 1.0 else logits / temperature
    if sampling.temperature > 0:
        scaled = _filter(scaled, sampling)
    return scaled.softmax(-1)


def _temperature(sampling: Sampling, tau: float) -> float:
    return max((sampling.temperature or 1.0) * tau, 1e-30)  # under it, fp32 overflows; it is the argmax by then


def softmax_temperature(sampling: Sampling, tau: float) -> float | None:
    """The temperature whose softmax the law is, by one division; None: it is filtered, or too near its limit."""
    filtered = sampling.temperature > 0 and (sampling.top_k is not None or sampling.top_p not in (None, 1.0))
    temperature = _temperature(sampling, tau)
    return None if filtered or temperature < 1e-4 else temperature


def laws(
    logits: Tensor, prefixes: Sequence[Sequence[int]], drafted: Tensor, choices: Sequence[Choice], tau: float = 1.0
) -> Tensor:
    """fp32 probabilities (batch, n, V) of each row under its own choice: `penalise`, then `probabilities`.

    Rows that choose alike are done together. An error of a processor carries its row (`row_of`).
    """
    groups: dict[tuple[Sampling, tuple[int, ...]], list[int]] = {}
    for row, choice in enumerate(choices):
        groups.setdefault((choice.sampling, tuple(map(id, choice.processors))), []).append(row)
    if len(groups) == 1:
        first = choices[0]
        return probabilities(penalise(logits, prefixes, drafted, first.sampling, first.processors), first.sampling, tau)
    found = torch.empty_like(logits)
    for rows in groups.values():
        own, index = choices[rows[0]], torch.tensor(rows, device=logits.device)
        try:
            scores = penalise(logits[index], [prefixes[row] for row in rows], drafted[index], own.sampling, own.processors)
        except Exception as error:
            if (place := row_of(error)) is not None:
                mark_row(error, rows[place])
            raise
        found[index] = probabilities(scores, own.sampling, tau)
    return found


def uniforms(choices: Sequence[Choice], counts: Sequence[int], device: torch.device) -> Tensor:
    """(rows, width) uniform numbers, the first counts[i] of row i its own; width: the largest count, and at least 1.

    A row takes as many from its generator as it counts, whatever the others do; rows that share one draw together.
    """
    width, first = max(1, *counts), choices[0].generator
    if all(choice.generator is first for choice in choices):
        return torch.rand(len(choices), width, generator=first, device=first.device).to(device)
    drawn = torch.zeros(len(choices), width)
    for row, (choice, count) in enumerate(zip(choices, counts, strict=True)):
        if count:
            drawn[row, :count] = torch.rand(count, generator=choice.generator, device=choice.generator.device)
    return drawn.to(device)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: the first token whose cumulated weight is over uniform * total; (..., V), (...) -> (...).

    A token of weight 0 is never drawn, also not at uniform = 0 or just under 1; a row without any weight gives V. In a large
    vocabulary the block of tokens is found first, by the blocks' sums: cumulating all of it takes as long as some layers.
    """
    if native.takes(weights):
        return native.draw(weights, uniforms)
    if weights.shape[-1] <= _FEW:
        cumulated = weights.double().cumsum(-1)
        return _first_over(cumulated, uniforms.double() * cumulated[..., -1])
    missing = -weights.shape[-1] % _BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulated = sums.cumsum(-1)
    level = uniforms.double() * cumulated[..., -1]
    block = _first_over(cumulated, level)
    inside = block.clamp_max(blocks.shape[-2] - 1).unsqueeze(-1)  # a row without any weight has no block
    before = (cumulated - sums).gather(-1, inside).squeeze(-1)
    chosen = blocks.gather(-2, inside.unsqueeze(-1).expand(*inside.shape, _BLOCK)).squeeze(-2)
    token = _first_over(chosen.double().cumsum(-1), (level - before).clamp_min(0.0))
    return (block * _BLOCK + token).clamp_max(weights.shape[-1])


def _first_over(cumulated: Tensor, level: Tensor) -> Tensor:
    """The first place whose cumulated weight is over `level`. At the top, rounding could reach the total: the last step
    of the cumulated weights is then the place."""
    total = cumulated[..., -1]
    level = torch.where(level >= total, torch.nextafter(total, torch.zeros_like(total)), level)
    return torch.searchsorted(cumulated, level.unsqueeze(-1), right=True).squeeze(-1)
