"""Large int8 matrices on x86 CPUs by integer products (FBGEMM), with activations in two digits.

torch's own weight-only int8 kernel multiplies in bf16 and runs out of arithmetic after a few rows; an integer product
hardly does, so that verifying several tokens takes little more than one. Splitting activations takes eight small operations,
which a matrix of a few hundred rows does not win back. One int8 digit a number would lose too much (its
steps are 1/63 of a row's largest magnitude); with a second digit of what the first one leaves they are 1/7938 of it, finer
than the numbers of bf16, and both digits are rows of the same product, which reads the weights once.

Integer sums are exact, and a row is scaled by itself alone: its result is the same to the bit in any company, so the law
does not depend on how many tokens a pass verifies.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: digits are whole numbers from -63 to 63: without VNNI, FBGEMM adds two products of 7 and 8 bits in 16
_MOST = 63
_SECOND = 2.0 * _MOST  # the first digit leaves at most a half
_ZERO = 64


def pack(weight: Tensor, scales: Tensor) -> Any:
    """Weights (out, in) int8 with their scales (out,) as FBGEMM wants them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantised tensors will leave torch: see `available`
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        whole = torch._make_per_channel_quantized_tensor(weight, scales.double() / _MOST, zeros, 0)
        return torch.ops.quantized.linear_prepack(whole, None)


def unpack(packed: Any) -> Tensor:
    """The int8 weights (out, in) again."""
    weight: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return weight


def times(x: Tensor, packed: Any) -> Tensor:
    """x (n, in) fp32 -> (n, out) fp32."""
    count = x.shape[0]
    digits = x.new_empty(2, *x.shape)
    most = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).clamp_min_(1e-30)
    rest = torch.mul(x, _MOST / most, out=digits[1])
    # the product rounds its inputs, halves of them either way: the first digits must be whole before
    rest.sub_(torch.round(rest, out=digits[0])).mul_(_SECOND)
    both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits.flatten(0, 1), 1.0, _ZERO, packed)
    return torch.add(both[:count], both[count:], alpha=1 / _SECOND).mul_(most)


@cache
def available() -> bool:
    """Whether this torch and this CPU have the product, and it gives what it should."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (32, 64), generator=generator, dtype=torch.int8)
    x, scales = torch.randn(3, 64, generator=generator), torch.full((32,), 0.01)
    try:
        got = times(x, pack(weight, scales))
    except (AttributeError, RuntimeError):  # a torch without quantised tensors
        return False
    want = x @ (weight.float() * 0.01).T
    return bool((got - want).abs().max() < 1e-3 * want.abs().max())
