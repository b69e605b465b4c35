"""Whole passes of quantised and bf16 layers in one call of `stack.cpp`, and those of a fused stack."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from ..cpu import free_memory_bytes, multiplies_bf16
from ..fused import Dense, FusedLayer, FusedStack, RootMeanSquare
from ..kv_cache import RowCache
from . import build
from .build import checked, library
from .products import Blocks, pack16, times

logger = logging.getLogger("lossytune")

#: (kind of layer, positions (n,)) -> cos and sin (n, size), the first half of the sines negative
Turns = Callable[[str, Tensor], tuple[Tensor, Tensor]]

_ACTIVATIONS = {"silu": 0, "SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
#: rotary positions that depend on the text's length
_MOVING = {"dynamic", "longrope"}
_MATRICES = ("qkv", "out", "gate_up", "down")
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
#: positions whose angles are made at a time
_ANGLES = 1024
#: tokens of a row that the compiled code is about as fast with as products by units for bf16
_FEW = 32


class Unfit(Exception):
    """A part that the compiled code has not."""


def blocks_of(part: Any) -> Blocks | None:
    """A matrix as the compiled code reads it: its own blocks, or a copy of what is bf16 on the CPU."""
    if isinstance(packed := getattr(part, "packed", None), Blocks):
        return packed
    if not isinstance(part, Dense) or part.weight.dtype != torch.bfloat16 or part.weight.device.type != "cpu":
        return None
    return pack16(part.weight) if part.weight.shape[1] % 2 == 0 else None


class NativeLayers:
    """Dense passes of layers whose matrices are all `Blocks`, or bf16 ones that it packs a copy of, over a RowCache in fp32
    or bf16."""

    #: of a cache that it begins
    dtype = torch.float32

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        norm: RootMeanSquare,
        heads: tuple[int, int, int],
        scale: float,
        turns: Turns,
        kinds: Sequence[str] = (),
        window: int = 0,
        head_epsilon: float = 0.0,
    ) -> None:
        """heads: of q, of k and v, and their size. scale: of the scores. turns: of every position from 0 on. kinds: of
        layers, as `kv_cache.layer_types`; () for full attention in all. window: of the sliding ones. head_epsilon: of the
        norms of q and k. Raises `Unfit`."""
        code = library()
        if code is None:
            raise Unfit("there is no compiled code")
        self._code, self._turns = code, turns
        self._kept: list[Any] = []  # what the compiled code has addresses of
        self.kinds = list(kinds) or ["full_attention"] * len(layers)
        self.kv_heads, self.size = heads[1:]
        parts = (build.Layer * len(layers))()
        for index, layer in enumerate(layers):
            parts[index] = self._layer(layer, window if self.kinds[index] == "sliding_attention" else 0)
        names = {getattr(layer.activation, "__name__", type(layer.activation).__name__) for layer in layers}
        if len(names) != 1 or not names <= set(_ACTIVATIONS):
            raise Unfit(f"activation {', '.join(sorted(names))}")
        norms = [norm, *(part for layer in layers for name in _NORMS if (part := getattr(layer, name)) is not None)]
        if len({part.epsilon for part in norms}) != 1:
            raise Unfit("norms with unlike epsilons")
        hidden, middle = parts[0].qkv.inputs, parts[0].down.inputs
        self._shape = build.Stack(
            parts, self._address(norm.weight), len(parts), hidden, *heads, middle,
            _ACTIVATIONS[names.pop()], scale, norm.epsilon, head_epsilon,
        )  # fmt: skip
        self._kept.append(parts)
        self._angles: dict[str, tuple[Tensor, Tensor]] = {}

    def _layer(self, layer: FusedLayer, window: int) -> build.Layer:
        result = build.Layer(window=window)
        for name in _MATRICES:
            part = getattr(layer, name)
            blocks = blocks_of(part)
            if blocks is None:
                raise Unfit(f"{name} is not packed for the compiled code")
            bias = None if part.bias is None else part.bias.float().contiguous()
            self._kept += [blocks, bias]
            setattr(result, name, blocks.matrix(bias))
        for name in _NORMS:
            norm = getattr(layer, name)
            if norm is not None:
                if not isinstance(norm, RootMeanSquare) or norm.narrow:
                    raise Unfit(f"{name} is another norm")
                setattr(result, name, self._address(norm.weight))
        if layer.head_weights is not None:
            result.head_weights = self._address(layer.head_weights)
        return result

    def _address(self, weight: Tensor) -> int:
        if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
            raise Unfit(f"weights in {weight.dtype} on {weight.device}")
        self._kept.append(weight.float().contiguous())
        return int(self._kept[-1].data_ptr())

    def through(self, x: Tensor, starts: Sequence[int], cache: RowCache) -> Tensor:
        """Final normed states (batch, n, hidden) of the fp32 stream x (batch, n, hidden), which is overwritten. Row i goes
        to slots from starts[i] on, and the cache has been told so."""
        x = x.contiguous()
        self._run(self._pass(x.shape[0], x.shape[1], starts, cache), x)
        return x

    def _run(self, what: build.Pass, x: Tensor) -> None:
        checked(self._code.lossyspec_pass(ctypes.byref(self._shape), ctypes.byref(what), x.data_ptr()))

    def _pass(self, rows: int, count: int, starts: Sequence[int], cache: RowCache) -> build.Pass:
        for layer in cache.layers:
            if not layer.is_initialized:
                empty = torch.empty(rows, self.kv_heads, 0, self.size, dtype=self.dtype)
                layer.lazy_initialization(empty, empty)
        turns = {kind: self._turned(kind, starts, count) for kind in set(self.kinds)}
        number, pointer, layers = ctypes.c_int64, ctypes.c_void_p, len(self.kinds)
        places = {kind: [part.data_ptr() for part in both] for kind, both in turns.items()}
        cosines, sines = ((pointer * layers)(*[places[kind][part] for kind in self.kinds]) for part in (0, 1))
        keys, values, slots = self._places(cache)
        result = build.Pass(
            keys, values, (number * rows)(*starts), slots, cosines, sines,
            rows, count, torch.get_num_threads(), cache.layers[0].keys.dtype == torch.bfloat16,
        )  # fmt: skip
        result.kept = turns  # while the pass has their addresses
        return result

    def _places(self, cache: RowCache) -> tuple[Any, Any, Any]:
        """Where the cache holds keys and values, and in how many slots; the addresses are kept while its tensors are."""
        tensors = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        if len(cache.places) != 2 or any(map(is_not, cache.places[0], tensors)):
            layers = len(self.kinds)
            pointers = [(ctypes.c_void_p * layers)(*[part.data_ptr() for part in tensors[first::2]]) for first in (0, 1)]
            cache.places = tensors, (*pointers, (ctypes.c_int64 * layers)(*[part.shape[2] for part in tensors[::2]]))
        found: tuple[Any, Any, Any] = cache.places[1]
        return found

    def _turned(self, kind: str, starts: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles_to(kind, max(starts) + count)
        if len(starts) == 1:
            place = slice(starts[0], starts[0] + count)
            return cos[place], sin[place]
        positions = (torch.tensor(starts)[:, None] + torch.arange(count)).flatten()
        return cos[positions], sin[positions]

    def _angles_to(self, kind: str, needed: int) -> tuple[Tensor, Tensor]:
        known = self._angles.get(kind)
        if known is None or len(known[0]) < needed:
            cos, sin = self._turns(kind, torch.arange(-(-needed // _ANGLES) * _ANGLES))
            known = self._angles[kind] = (cos.float().contiguous(), sin.float().contiguous())
        return known


class NativeStack(NativeLayers):
    """The same of a fused stack. Keys and values are kept in bf16, beside packed weights too: with long texts a pass reads
    little else."""

    def __init__(self, stack: FusedStack) -> None:
        """Raises `Unfit`."""
        config = stack.model.config.get_text_config()
        ropes = getattr(stack.model.base_model.rotary_emb, "rope_type", "default")
        if not _MOVING.isdisjoint(ropes.values() if isinstance(ropes, dict) else [ropes]):
            raise Unfit("rotary positions that depend on the text's length")
        limit = getattr(config, "max_position_embeddings", None)

        def turns(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
            inside = positions if limit is None else positions.clamp_max(limit - 1)  # what pads a row may lie past the end
            cos, sin = stack.turns(torch.empty(0), inside[None], kind)
            return cos[0], sin[0]

        super().__init__(
            stack.layers, stack.norm, (stack.heads, stack.kv_heads, stack.size), stack.scale, turns, stack.kinds,
            getattr(config, "sliding_window", None) or 0, stack.head_epsilon,
        )  # fmt: skip
        self._stack, self._model_dtype, self.dtype = stack, stack.model.dtype, torch.bfloat16
        self._embed = stack.model.base_model.embed_tokens
        self._head = pack16(stack.model.get_output_embeddings().weight) if self._plain_head() else None

    def takes(self, count: int) -> bool:
        """Whether a pass of so many tokens a row runs here: prompts are read faster by the CPU's units for bf16. All others
        round alike, plain ones and those that verify, whatever the batch."""
        return self._model_dtype != torch.bfloat16 or count <= _FEW or not multiplies_bf16()

    def _plain_head(self) -> bool:
        """Whether the output rows are a linear layer in bf16 that nothing listens to."""
        head: Any = self._stack.head
        if type(head) is not torch.nn.Linear or head.bias is not None or head._forward_hooks or head._forward_pre_hooks:
            return False
        return head.weight.dtype == torch.bfloat16 and head.in_features % 2 == 0

    def hidden(self, tokens: Tensor, starts: Sequence[int], cache: RowCache) -> Tensor:
        """Final states (batch, n, hidden) of tokens (batch, n), in the model's dtype; see `through`."""
        return self.through(self._embed(tokens).float(), starts, cache).to(self._model_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(.., V) of hidden states."""
        if self._head is None or not self._plain_head() or not self.takes(hidden.shape[-2]):
            return self._stack.logits(hidden)
        return times(hidden.reshape(-1, hidden.shape[-1]), self._head).view(*hidden.shape[:-1], -1)


def native_stack(stack: FusedStack | None) -> NativeStack | None:
    """The passes of a stack by the compiled code, made once for it; None, with the reason in the debug log, where it has not
    all parts."""
    if stack is None:
        return None
    if isinstance(stack.native, NativeStack):
        return stack.native
    try:
        _check_weights(stack)
        stack.native = NativeStack(stack)
        return stack.native
    except Unfit as reason:
        logger.debug("quantised passes run by torch's operations: %s", reason)
        return None


def _check_weights(stack: FusedStack) -> None:
    """Refuses dense weights that are not bf16, and more bf16 ones than half of the free memory holds a copy of."""
    dense = [part for layer in stack.layers for name in _MATRICES if isinstance(part := getattr(layer, name), Dense)]
    if unlike := {part.weight.dtype for part in dense} - {torch.bfloat16}:
        raise Unfit(f"weights in {', '.join(map(str, unlike))}")
    needed, free = sum(part.weight.nbytes for part in dense), free_memory_bytes()
    if free is not None and 2 * needed > free:
        raise Unfit(f"a second copy of its weights needs {needed} bytes, {free} are free")
