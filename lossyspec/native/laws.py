"""Laws from logits, and tokens from laws, by `laws.h`: torch takes several operations, each with its launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import library


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


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `sampling.draw`; see `takes`."""
    code, weights, numbers = library(), weights.contiguous(), uniforms.double().contiguous()
    assert code is not None
    result = torch.empty(weights.shape[:-1], dtype=torch.long)
    code.lossyspec_draw(weights.data_ptr(), result.numel(), weights.shape[-1], numbers.data_ptr(), result.data_ptr())
    return result


def judge(
    p: Tensor, q: Tensor | None, support: Tensor | None, tokens: Tensor, lengths: Sequence[int], numbers: Tensor
) -> tuple[list[int], list[int]]:
    """The exact rule: of each row how many drafted tokens (batch, width) stay, and the token that follows; see `takes`.

    p: (batch, width + 1, V). q: (batch, width, S) over `support`, or over V; None: one-hot. numbers: (batch, width + 1)."""
    code, rows, width = library(), *tokens.shape
    assert code is not None
    p, tokens, numbers = p.contiguous(), tokens.contiguous(), numbers.double().contiguous()
    q = None if q is None else q.contiguous()
    counts = torch.tensor([list(lengths), [0] * rows, [0] * rows])
    code.lossyspec_judge(
        p.data_ptr(), rows, width, p.shape[-1], None if q is None else q.data_ptr(), 0 if q is None else q.shape[-1],
        None if support is None else support.data_ptr(), tokens.data_ptr(), counts[0].data_ptr(), numbers.data_ptr(),
        counts[1].data_ptr(), counts[2].data_ptr(),
    )  # fmt: skip
    accepted, following = counts[1:].tolist()
    return accepted, following
