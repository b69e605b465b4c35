"""Packed int4, int8 and bf16 matrices of `stack.cpp` and their products with fp32 activations."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .build import Matrix, checked, library

#: outputs of a block
LANES = 16
#: inputs of an int4 group, and of what an int8 product takes at once
GROUP, _FOUR = 32, 4


@dataclass(frozen=True)
class Blocks:
    """A matrix (outputs, inputs) as `stack.cpp` reads it. bytes: (blocks, ..) uint8."""

    bytes: Tensor
    outputs: int
    inputs: int
    bits: int

    def matrix(self, bias: Tensor | None = None) -> Matrix:
        """For the compiled code; the tensors must outlive it."""
        place = None if bias is None else bias.data_ptr()
        return Matrix(self.bytes.data_ptr(), place, self.outputs, self.inputs, self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.bytes.nbytes


def available(inputs: int, bits: int) -> bool:
    """Whether matrices of so many inputs run by the compiled code."""
    return inputs % (GROUP if bits == 4 else _FOUR) == 0 and library() is not None


def pack4(numbers: Tensor, scales: Tensor) -> Blocks:
    """numbers: (out, in) 0 .. 15. scales: (in / 32, out, 2) bf16, of a group the scale and the value of 8."""
    outputs, inputs = numbers.shape
    more, groups = -outputs % LANES, inputs // GROUP
    quads = F.pad(numbers, (0, 0, 0, more)).to(torch.uint8).view(-1, LANES, groups, GROUP // 8, 2, _FOUR)
    pairs = (quads[..., 0, :] | quads[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    whole = F.pad(scales, (0, 0, 0, more)).view(groups, -1, LANES, 2).permute(1, 0, 3, 2).contiguous()
    return Blocks(torch.cat([pairs, whole.view(torch.uint8).flatten(2)], -1).contiguous(), outputs, inputs, 4)


def pack8(weight: Tensor, scales: Tensor) -> Blocks:
    """weight: (out, in) int8. scales: (out,)."""
    outputs, inputs = weight.shape
    more = -outputs % LANES
    rows = F.pad(weight, (0, 0, 0, more)).view(-1, LANES, inputs // _FOUR, _FOUR)
    quads = rows.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)
    steps = F.pad(scales.float(), (0, more)).view(-1, LANES).contiguous()
    return Blocks(torch.cat([quads, steps.view(torch.uint8)], -1).contiguous(), outputs, inputs, 8)


def pack16(weight: Tensor) -> Blocks:
    """weight: (out, in) bf16, in even."""
    outputs, inputs = weight.shape
    rows = F.pad(weight.detach(), (0, 0, 0, -outputs % LANES)).view(-1, LANES, inputs // 2, 2)
    return Blocks(rows.transpose(1, 2).contiguous().view(torch.uint8).flatten(1), outputs, inputs, 16)


def unpack8(blocks: Blocks) -> Tensor:
    """The int8 weights (out, in) again."""
    quads = blocks.bytes[:, : LANES * blocks.inputs].contiguous().view(torch.int8)
    return quads.view(-1, blocks.inputs // _FOUR, LANES, _FOUR).transpose(1, 2).reshape(-1, blocks.inputs)[: blocks.outputs]


def times(x: Tensor, blocks: Blocks, scales: Tensor | None = None) -> Tensor:
    """x (n, in) -> (n, out) fp32."""
    return torch.ops.lossyspec_native.product(x, blocks.bytes, blocks.outputs, blocks.inputs, blocks.bits)


def _product(x: Tensor, blocks: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
    code = library()
    assert code is not None
    x = x.float().contiguous()
    result = x.new_empty(len(x), outputs)
    matrix = ctypes.byref(Blocks(blocks, outputs, inputs, bits).matrix())
    checked(code.lossyspec_product(matrix, x.data_ptr(), len(x), result.data_ptr(), torch.get_num_threads()))
    return result


def _product_shape(x: Tensor, blocks: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs, dtype=torch.float32)


# an operation of torch's, so that its compilers can pass it by
_library = torch.library.Library("lossyspec_native", "DEF")
_library.define("product(Tensor x, Tensor blocks, int outputs, int inputs, int bits) -> Tensor")
_library.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("lossyspec_native::product", _product_shape, lib=_library)
