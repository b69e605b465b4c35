"""Whether two ways to compute the same logits agree up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

#: of `apart`: fp32 differs by sums in another order alone; 16-bit numbers by 0.05 to 0.08 over 30 layers, and a wrong
#: position, mask or norm by 0.5 and more
_SAME, _SAME_16_BIT = 5e-4, 0.2


def apart(got: Tensor, want: Tensor) -> float:
    """How far logits (.., V) are from those that they should be: the root mean square of the difference over the standard
    deviation of `want`, at the position where it is largest. NaN where one is.

    The largest single difference of a vocabulary would say more about its tail than about the model."""
    scale = want.std().clamp_min(1e-6)
    return float(((got - want).square().mean(-1).sqrt() / scale).max())


def tolerance(dtype: torch.dtype) -> float:
    """The most that rounding in `dtype` explains."""
    return _SAME if dtype == torch.float32 else _SAME_16_BIT
