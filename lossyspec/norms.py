"""RMS norms in few operations: torch's own is one kernel on a GPU, and a chain of six small ones on the CPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


@lru_cache(maxsize=64)
def _root(epsilon: float) -> Tensor:
    with torch.inference_mode(False):  # it serves training too
        return torch.tensor(epsilon**0.5)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, narrow: bool = False) -> Tensor:
    """x (.., width) over its root mean square, times the weight, in the wider dtype of both. narrow: with an fp32 weight, in
    bf16 and without a gradient."""
    if x.device.type != "cpu" or (weight is not None and weight.dtype != torch.float32):
        result = F.rms_norm(x, x.shape[-1:], weight, epsilon)
        return result.bfloat16() if narrow else result
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    # mean square plus epsilon, as the two sides of a triangle
    # a compiler cannot look into what is kept from an earlier call
    root = torch.tensor(epsilon**0.5) if torch.compiler.is_compiling() else _root(epsilon)
    unit = x / torch.hypot(norm * x.shape[-1] ** -0.5, root)
    if weight is None:
        return unit.to(x.dtype)
    return torch.mul(unit, weight, out=torch.empty_like(unit, dtype=torch.bfloat16)) if narrow else unit * weight
