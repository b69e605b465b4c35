"""Products of activations with packed int8 and int4 weights, by device: on x86 CPUs by code of our own (`native`), where it
could be compiled; else by torch's kernels with activations in bf16, but for large int8 matrices on x86 CPUs (`digits`).

On a GPU: `_weight_int8pack_mm` reads activations and scales in fp32 (aten/src/ATen/native/cuda/int8mm.cu);
`_weight_int4pack_mm` wants bf16, outputs in 8s, inputs in whole tiles, and compute capability 8.0 (int4mm.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import digits
from .hardware import FP8_ON_CPU, packed_problem
from .native import products
from .native.products import GROUP

#: numbers of a matrix from which on integer products are faster: output rows
_LARGE = 1 << 22
_CPU_TILES = 2
#: 16 inputs each, so many of them packed together on a GPU: as many as go into the width
_CUDA_TILES = (8, 4, 2)


@dataclass(frozen=True)
class Kernels:
    """Of one kind of device. outputs4: int4 matrices have them in so many.

    pack4: numbers 0 .. 15 (out, in) int32 and scales -> as `times4` wants them. times4, times8: x (n, in), packed weights
    and their scales -> (n, out). pack8: int8 (out, in) and scales (out,) -> as `times8` wants them; unpack8: int8 again.
    scales8: the dtype of the scales of `times8`. narrow: activations are rounded to bf16."""

    outputs4: int
    pack4: Callable[[Tensor, Tensor], Any]
    times4: Callable[[Tensor, Any, Tensor], Tensor]
    pack8: Callable[[Tensor, Tensor], Any]
    unpack8: Callable[[Any], Tensor]
    times8: Callable[[Tensor, Any, Tensor], Tensor]
    scales8: torch.dtype
    narrow: bool = True


def _pack4_cpu(numbers: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, _CPU_TILES)


def _times4_cpu(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, scales)


def _times8_cpu(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(x.bfloat16(), weight, scales)


def _times8_digits(x: Tensor, packed: Any, scales: Tensor) -> Tensor:
    return digits.times(x.float(), packed)


def _as_it_is(weight: Tensor, scales: Tensor | None = None) -> Tensor:
    return weight


def _pack4_cuda(numbers: Tensor, scales: Tensor) -> Tensor:
    """Two numbers a byte, the first of them in the upper half, then by torch into the order of the tensor cores."""
    tiles = next(count for count in _CUDA_TILES if numbers.shape[1] % (16 * count) == 0)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def _times4_cuda(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm(x.bfloat16(), packed, GROUP, scales)


def _times8_cuda(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    # torch 2.9 gives fp32 for any activations, later ones their dtype: in fp32 both do
    return torch._weight_int8pack_mm(x.bfloat16().float(), weight, scales)


CPU = Kernels(16, _pack4_cpu, _times4_cpu, _as_it_is, _as_it_is, _times8_cpu, torch.bfloat16)
DIGITS = replace(CPU, pack8=digits.pack, unpack8=digits.unpack, times8=_times8_digits)
NATIVE = Kernels(
    1, products.pack4, products.times, products.pack8, products.unpack8, products.times, torch.float32, narrow=False
)
CUDA = Kernels(8, _pack4_cuda, _times4_cuda, _as_it_is, _as_it_is, _times8_cuda, torch.float32)


def kernels_of(matrix: Tensor, bits: int) -> Kernels:
    """Those for a matrix of numbers of so many bits, by its device and size."""
    if matrix.device.type == "cuda":
        return CUDA
    if products.available(matrix.shape[1], bits):
        return NATIVE
    return DIGITS if matrix.numel() >= _LARGE and digits.available() else CPU


def unusable(precision: str, device: torch.device) -> str | None:
    """Why a device cannot run packed weights; None: it can."""
    if device.type == "cpu":
        return FP8_ON_CPU if precision == "fp8" else None
    if device.type != "cuda":
        return f"packed weights run on CPUs and NVIDIA GPUs, not on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return packed_problem(precision, torch.cuda.get_device_name(device), f"{major}.{minor}", torch.__version__)
