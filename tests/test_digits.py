"""The integer product of int8 weights and activations in two digits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lossyspec import digits

pytestmark = pytest.mark.skipif(not digits.available(), reason="this torch or CPU has no FBGEMM")


def matrix(rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (rows, width), generator=generator, dtype=torch.int8)
    return weight, torch.rand(rows, generator=generator) * 0.02 + 0.001


def exact(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x.double() @ (weight.double() * scales.double()[:, None]).T


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 200), st.integers(0, 1000))
def test_the_error_is_that_of_the_second_digit(count: int, rows: int, width: int, seed: int) -> None:
    weight, scales = matrix(rows, width, seed)
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 10 ** ((seed % 7) - 3)
    got = digits.times(x, digits.pack(weight, scales))
    # each activation is off by half a step of the second digit at most
    bound = 0.5 / 7938 * x.abs().amax(-1, keepdim=True) * (weight.abs().double().sum(-1) * scales)
    assert bool(((got - exact(x, weight, scales)).abs() <= bound + 1e-5 * exact(x, weight, scales).abs() + 1e-30).all())


def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    weight, scales = matrix(96, 192)
    packed, x = digits.pack(weight, scales), torch.randn(12, 192)
    x[3] *= 1e4
    x[7] *= 1e-6
    together = digits.times(x, packed)
    for row in range(12):
        assert torch.equal(digits.times(x[row : row + 1], packed), together[row : row + 1])
    assert torch.equal(digits.times(x[2:9], packed), together[2:9])


def test_the_largest_digits_do_not_overflow() -> None:
    weight = torch.full((32, 512), 127, dtype=torch.int8)
    weight[1::2] = -127
    x = torch.ones(4, 512)
    x[1], x[2, ::2] = -1, -1
    x[3] = 0.9921  # the second digit is at its end too
    got = digits.times(x, digits.pack(weight, torch.ones(32)))
    assert torch.allclose(got, exact(x, weight, torch.ones(32)).float(), rtol=1e-4, atol=4.0)


def test_rows_of_zeros_and_broken_ones() -> None:
    weight, scales = matrix(16, 32)
    x = torch.randn(4, 32)
    x[0], x[1, 5], x[2, 6] = 0, torch.nan, torch.inf
    got = digits.times(x, digits.pack(weight, scales))
    assert bool((got[0] == 0).all())
    assert not bool(got[1:3].isfinite().any())  # so that the check of the logits sees it
    assert bool(got[3].isfinite().all())
