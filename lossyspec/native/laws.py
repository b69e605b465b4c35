"""Laws from logits, and tokens from laws, by `laws.h`: torch takes several operations, each with its launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import library

#: that `judge` knows, by their numbers there, and those for drafts whose tokens are one-hot
RULES = {"exact": 0, "mixture": 1, "lenience": 2, "priced": 3, "optimal": 4}
ONE_HOT_RULES = RULES | {"optimal": 1}


def takes(values: Tensor) -> bool:
    """Whether the compiled code does these."""
    return values.device.type == "cpu" and values.dtype == torch.float32 and values.numel() > 0 and library() is not None


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension; see `takes`."""
    code, logits = library(), logits.contiguous()
    assert code is not None
    result, width = torch.empty_like(logits), logits.shape[-1]
    rows, threads = logits.numel() // width, torch.get_num_threads()
    code.lossyspec_softmax(logits.data_ptr(), rows, width, temperature, result.data_ptr(), threads)
    return result


def largest(values: Tensor) -> Tensor:
    """amax over the last dimension, through which NaN spreads; see `takes`."""
    code, values = library(), values.contiguous()
    assert code is not None
    result, width = values.new_empty(values.shape[:-1]), values.shape[-1]
    code.lossyspec_largest(values.data_ptr(), result.numel(), width, result.data_ptr())
    return result


def entropy(laws: Tensor) -> Tensor:
    """Of each law in nats, as `acceptance.entropy`; see `takes`."""
    code, laws = library(), laws.contiguous()
    assert code is not None
    result, width = laws.new_empty(laws.shape[:-1]), laws.shape[-1]
    code.lossyspec_entropy(laws.data_ptr(), result.numel(), width, result.data_ptr(), torch.get_num_threads())
    return result


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `sampling.draw`; see `takes`."""
    code, weights, numbers = library(), weights.contiguous(), uniforms.double().contiguous()
    assert code is not None
    result = torch.empty(weights.shape[:-1], dtype=torch.long)
    code.lossyspec_draw(weights.data_ptr(), result.numel(), weights.shape[-1], numbers.data_ptr(), result.data_ptr())
    return result


def judge(
    rule: str,
    p: Tensor,
    q: Tensor | None,
    support: Tensor | None,
    tokens: Tensor,
    lengths: Sequence[int],
    alpha: Tensor,
    numbers: Tensor,
) -> tuple[list[int], list[int], Tensor]:
    """By a rule of theirs, of each row how many drafted tokens (batch, width) stay, and the token that follows; and the TV
    between the rule's law and p at the positions that were reached, (batch, width); see `takes`.

    p: (batch, width + 1, V). q: (batch, width, S) over `support`, or over V; None: one-hot. alpha: (batch, width). numbers:
    (batch, width + 1)."""
    code, rows, width = library(), *tokens.shape
    assert code is not None
    kept = [part.contiguous() for part in (p, tokens, numbers.double(), alpha.float())]  # while there are addresses of them
    drawn, kind = (None, ONE_HOT_RULES[rule]) if q is None else (q.contiguous(), RULES[rule])
    counts, variation = torch.tensor([list(lengths), [0] * rows, [0] * rows]), torch.zeros(rows, width)
    code.lossyspec_judge(
        kept[0].data_ptr(), rows, width, p.shape[-1], None if drawn is None else drawn.data_ptr(),
        0 if drawn is None else drawn.shape[-1], None if support is None else support.data_ptr(), kept[1].data_ptr(),
        counts[0].data_ptr(), kept[2].data_ptr(), kind, kept[3].data_ptr(), counts[1].data_ptr(),
        counts[2].data_ptr(), variation.data_ptr(),
    )  # fmt: skip
    accepted, following = counts[1:].tolist()
    return accepted, following, variation
