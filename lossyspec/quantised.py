"""int8 and int4 weights and fp8 products, by the kernels of the device (`packed`).

int8: one scale for each output, symmetric. int4: groups of 32 inputs with a scale and a least value, w = scale * n + least
with n in 0 .. 15, which is how Q4_1 of GGUF stores its blocks: a model that comes from there keeps its numbers but for the
rounding of the scales to bf16. int4-int8: int4, and int8 for the first and last layers. The output rows, and an embedding
that is tied to them, are int8 in all three. fp8: one scale for each output and for each token, both factors of a product in
e4m3; the output rows stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError
from .fused import Dense, FusedStack, RootMeanSquare, dense, fuse
from .native.products import GROUP
from .packed import Kernels, kernels_of

#: cuBLAS takes matrices of fp8 in so many rows and columns
_FP8_TILE = 16
#: int4-int8 keeps one of so many layers at each end in int8: what comes first and last loses most by rounding
_ENDS = 12
_MATRICES = ("qkv", "out", "gate_up", "down")
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


@dataclass(frozen=True)
class Int8:
    """packed: as the kernels want it. scales: (out,), numbers of bf16 in the dtype of the kernels."""

    packed: Any
    scales: Tensor
    bias: Tensor | None
    kernels: Kernels

    @staticmethod
    def of(dense: Dense, kernels: Kernels | None = None) -> Int8:
        """Rounds to the nearest step of each output's own scale. kernels: None for those that suit the weight."""
        kernels = kernels or kernels_of(dense.weight, 8)
        scales = (dense.weight.float().abs().amax(-1) / 127).clamp_min(1e-12).bfloat16()
        weight = (dense.weight.float() / scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
        return Int8(kernels.pack8(weight, scales), scales.to(kernels.scales8), dense.bias, kernels)

    def dense(self) -> Tensor:
        """The weights that the product uses, fp32."""
        return self.kernels.unpack8(self.packed).float() * self.scales.float().unsqueeze(-1)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (.., in) -> (.., out) in x's dtype."""
        result = self.kernels.times8(x.reshape(-1, x.shape[-1]), self.packed, self.scales)
        result = result.view(*x.shape[:-1], -1).to(x.dtype)
        return result if self.bias is None else result + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.kernels.unpack8(self.packed).nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Int4:
    """packed: as the kernels want it. scales: (in / 32, out, 2) bf16, a scale and the value of n = 8."""

    packed: Any
    scales: Tensor
    bias: Tensor | None
    rounded: Tensor | None  # (out, in) fp32; see `dense`
    kernels: Kernels

    @staticmethod
    def of(dense: Dense, kernels: Kernels | None = None) -> Int4:
        """Rounds within each group from its least to its largest value. kernels: None for those that suit the weight.

        Raises ConfigurationError for other widths."""
        rows, width = dense.weight.shape
        kernels = kernels or kernels_of(dense.weight, 4)
        if width % GROUP or rows % kernels.outputs4:
            raise ConfigurationError(
                f"int4 needs inputs in groups of {GROUP} and outputs in {kernels.outputs4}s; a matrix is {rows} x {width}"
            )
        groups = dense.weight.float().view(rows, width // GROUP, GROUP)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / 15).clamp_min(1e-12).bfloat16()
        middle = (least + 8 * scales.float()).bfloat16()
        numbers = ((groups - middle.float().unsqueeze(-1)) / scales.float().unsqueeze(-1) + 8).round().clamp(0, 15)
        rounded = ((numbers - 8) * scales.float().unsqueeze(-1) + middle.float().unsqueeze(-1)).view(rows, width)
        both = torch.stack([scales, middle], -1).transpose(0, 1).contiguous()
        return Int4(kernels.pack4(numbers.int().view(rows, width), both), both, dense.bias, rounded, kernels)

    def dense(self) -> Tensor:
        """The weights that the product uses, fp32; known until the stack is checked."""
        assert self.rounded is not None
        return self.rounded

    def __call__(self, x: Tensor) -> Tensor:
        """x: (.., in) -> (.., out) in x's dtype."""
        result = self.kernels.times4(x.reshape(-1, x.shape[-1]), self.packed, self.scales)
        result = result.view(*x.shape[:-1], -1).to(x.dtype)
        return result if self.bias is None else result + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return int(self.packed.nbytes + self.scales.nbytes)


@dataclass(frozen=True)
class Fp8:
    """weight: (out, in) e4m3. scales: (out,) fp32.

    Tokens are scaled here, not by the product: scales by row are not on all devices that have fp8, one for all is
    (pytorch/pytorch issues 133334 and 192707)."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    one: Tensor

    @staticmethod
    def of(dense: Dense) -> Fp8:
        """Rounds under each output's own scale. Raises ConfigurationError for other widths."""
        rows, width = dense.weight.shape
        if width % _FP8_TILE or rows % _FP8_TILE:
            raise ConfigurationError(f"fp8 needs inputs and outputs in {_FP8_TILE}s; a matrix is {rows} x {width}")
        weight, scales = _e4m3(dense.weight.float())
        return Fp8(weight, scales[:, 0], dense.bias, scales.new_ones(()))

    def dense(self) -> Tensor:
        """The weights that the product uses, fp32."""
        return self.weight.float() * self.scales.unsqueeze(-1)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (.., in) -> (.., out) in x's dtype."""
        tokens, scales = _e4m3(x.reshape(-1, x.shape[-1]).float())
        result = torch._scaled_mm(tokens, self.weight.T, scale_a=self.one, scale_b=self.one, out_dtype=torch.float32)
        result = (result * scales * self.scales).view(*x.shape[:-1], -1).to(x.dtype)
        return result if self.bias is None else result + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes + self.scales.nbytes


def _e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, width) in e4m3, and the scale of each, (n, 1)."""
    scales = (rows.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-12)
    return (rows / scales).to(torch.float8_e4m3fn), scales


def quantise(model: Any, precision: str) -> FusedStack:
    """The fused stack of a dense fp32 model with its matrices in int8 or int4. The model's own weights become the rounded
    ones, so that its forward is the stack's reference until `release`.

    Raises ConfigurationError for a model that is not of the Llama family.
    """
    stack = fuse(model)
    if stack is None:
        kind = model.config.model_type
        raise ConfigurationError(
            f"{precision} needs a model of the Llama family, and {kind} is another; use fp32, bf16 or fp16"
        )
    count, ends = len(stack.layers), max(1, len(stack.layers) // _ENDS)
    for index, layer in enumerate(stack.layers):
        low = precision == "int4" or (precision == "int4-int8" and min(index, count - 1 - index) >= ends)
        form: type[Any] = Fp8 if precision == "fp8" else Int4 if low else Int8
        parts = {name: _rounded(form, getattr(layer, name)) for name in _MATRICES}
        # where the products take bf16 the norms before them give it, and what is between gate_up and down stays in it
        rounds = form is Fp8 or parts["qkv"].kernels.narrow
        norms = {name: replace(getattr(layer, name), narrow=rounds) for name in ("before_attention", "before_mlp")}
        stack.layers[index] = replace(layer, **parts, **norms)
    if precision != "fp8":
        stack.head = _rounded(Int8, dense([model.get_output_embeddings()]))
    return stack


def narrow(model: Any, stack: FusedStack) -> None:
    """Makes all that is not quantised bf16: the stream, the cache, norms, embedding and dense output rows. For devices that
    are slow at fp32; a CPU keeps its fp32 stream."""
    for part in model.parameters():
        part.data = part.data.bfloat16()
    stack.native = None  # made of what changes here
    stack.norm = _narrow(stack.norm)
    for index, layer in enumerate(stack.layers):
        parts = {name: _narrow(getattr(layer, name)) for name in (*_MATRICES, *_NORMS)}
        weights = None if layer.head_weights is None else layer.head_weights.bfloat16()
        stack.layers[index] = replace(layer, **parts, head_weights=weights)


def _narrow(part: Any) -> Any:
    if isinstance(part, RootMeanSquare):
        return replace(part, weight=part.weight.bfloat16(), narrow=False)
    return part if part is None or part.bias is None else replace(part, bias=part.bias.bfloat16())


def _rounded(kind: type[Any], whole: Any) -> Any:
    result = kind.of(whole)
    whole.weight.copy_(result.dense())  # the model's own weights are views of it
    return result


def release(model: Any, stack: FusedStack) -> None:
    """Frees the dense matrices of the layers: from now on the model runs by the stack alone."""
    for layer in model.base_model.layers:
        for module in layer.modules():
            if type(module) is torch.nn.Linear:
                module.weight.data = module.weight.data.new_empty(0)
    stack.layers = [replace(layer, **{name: _packed(getattr(layer, name)) for name in _MATRICES}) for layer in stack.layers]


def _packed(part: Any) -> Any:
    return replace(part, rounded=None) if isinstance(part, Int4) else part
