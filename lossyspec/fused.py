"""The decoder stack of the Llama family in few, large operations: one product for q, k and v, one for gate and up.

Llama, Qwen 2 and 3, Mistral, Gemma 3, SmolLM and what else is built alike, recognised by structure and by comparing its
logits with those of transformers' own forward; everything else runs as transformers runs it. The weights stay the model's
own: fused matrices are one block of memory that the model's separate ones are views of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Attended, Reader, attend
from .kv_cache import RowCache, layer_types
from .likeness import apart, tolerance
from .norms import rms_norm

logger = logging.getLogger("lossytune")

_LAYER_NORMS = (
    {"input_layernorm", "post_attention_layernorm"},
    {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"},
)
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

Linear = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


class _Unlike(Exception):
    """The model is built in another way."""


@dataclass(frozen=True)
class Dense:
    """x -> x W^T + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (.., in) -> (.., out)."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RootMeanSquare:
    """RMS norm with its weights as they multiply. narrow: fp32 in, bf16 out, for products in bf16."""

    weight: Tensor
    epsilon: float
    narrow: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x: (.., width)."""
        return rms_norm(x, self.weight, self.epsilon, self.narrow)


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer. after_attention, after_mlp: norms of what is added to the stream (Gemma), None: none.

    head_weights: (heads + kv_heads, size) of the norms of q and k, None where they are not normed.
    """

    before_attention: Norm
    qkv: Linear
    head_weights: Tensor | None
    out: Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    after_mlp: Norm | None


#: a layer, the stream, cos and sin, attention -> the stream after the layer; see `FusedStack.step`
Step = Callable[[FusedLayer, Tensor, Tensor, Tensor, Attended], Tensor]


class FusedStack:
    """Embedding, layers, final norm and output rows of one model, over a RowCache."""

    def __init__(self, model: Any) -> None:
        """Raises an exception of some kind for a model that is not built like the family; see `fuse`."""
        stack, text = model.base_model, model.config.get_text_config()
        if set(dict(stack.named_children())) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise _Unlike(f"its parts are {', '.join(dict(stack.named_children()))}")
        self.model = model
        self.kinds = layer_types(model.config)
        first = stack.layers[0].self_attn
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.size = getattr(first, "head_dim", None) or text.hidden_size // self.heads
        self.scale = float(first.scaling)
        self.head_epsilon = _epsilon(first.q_norm) if hasattr(first, "q_norm") else 0.0
        self.layers = [self._layer(layer) for layer in stack.layers]
        self.norm = _norm(stack.norm)
        #: the model's own module, so that hooks on it act here too
        self.head: Linear = model.get_output_embeddings()
        #: its passes by the compiled code, which runners of the same model share
        self.native: Any = None
        self._by_kind = any(name == "layer_type" for name in _parameters(stack.rotary_emb.forward))

    def _layer(self, layer: Any) -> FusedLayer:
        children = set(dict(layer.named_children()))
        attention, mlp = layer.self_attn, layer.mlp
        norms = children - {"self_attn", "mlp"}
        own = set(dict(attention.named_children()))
        if norms not in _LAYER_NORMS or own not in (_ATTENTION, _ATTENTION | {"q_norm", "k_norm"}):
            raise _Unlike(f"a layer has {', '.join(sorted(children | own))}")
        if set(dict(mlp.named_children())) != _MLP or float(attention.scaling) != self.scale:
            raise _Unlike("its MLP or its attention is another one")
        gemma = "pre_feedforward_layernorm" in norms
        weights = None
        if "q_norm" in own:
            q, k = _weight(attention.q_norm), _weight(attention.k_norm)
            weights = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])
        after = _norm(layer.post_attention_layernorm)
        return FusedLayer(
            _norm(layer.input_layernorm),
            dense([attention.q_proj, attention.k_proj, attention.v_proj]),
            weights,
            dense([attention.o_proj]),
            after if gemma else None,
            _norm(layer.pre_feedforward_layernorm) if gemma else after,
            dense([mlp.gate_proj, mlp.up_proj]),
            mlp.act_fn,
            dense([mlp.down_proj]),
            _norm(layer.post_feedforward_layernorm) if gemma else None,
        )

    def dense(self, cache: RowCache, mask: Any) -> Reader:
        """Attention over all of a cache, whose `place` says where the new entries go.

        mask: (batch, 1, n, extent) of booleans, or by layer type; None: everything is visible.
        """

        def read(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.update(k, v, index)
            kind = self.kinds[index]
            seen = mask[kind] if isinstance(mask, dict) else mask
            return attend(q, keys, values, seen, cache.shared if kind == "full_attention" else 0)

        return read

    def hidden(self, tokens: Tensor, positions: Tensor, read: Reader, step: Step | None = None) -> Tensor:
        """Final states (batch, n, hidden) of tokens (batch, n) at positions (batch, n). step: `self.step` or its like."""
        x = self.model.base_model.embed_tokens(tokens)
        tables = {kind: self._rotary(x, positions, kind) for kind in set(self.kinds)}
        for index, layer in enumerate(self.layers):
            x = (step or self.step)(layer, x, *tables[self.kinds[index]], partial(read, index))
        return self.norm(x)

    def step(self, layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor, attended: Attended) -> Tensor:
        """One layer of the stream x (batch, n, hidden). cos, sin: as `_rotary`. attended: of the layer's q, k and v."""
        both, half = self.heads + self.kv_heads, self.size // 2
        qkv = layer.qkv(layer.before_attention(x)).to(x.dtype).view(*x.shape[:2], both + self.kv_heads, self.size)
        qk, v = qkv[:, :, :both], qkv[:, :, both:]
        if layer.head_weights is not None:
            qk = F.rms_norm(qk, (self.size,), eps=self.head_epsilon) * layer.head_weights
        qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin)
        added = layer.out(attended(qk[:, :, : self.heads], qk[:, :, self.heads :].transpose(1, 2), v.transpose(1, 2)))
        x = x + (added if layer.after_attention is None else layer.after_attention(added))
        gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, dim=-1)
        added = layer.down(layer.activation(gate) * up)
        return x + (added if layer.after_mlp is None else layer.after_mlp(added))

    def _rotary(self, x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """cos and signed sin for all heads of q and k, (batch, n, heads + kv_heads, size); the attention scale is in q's."""
        cos, sin = self.turns(x, positions, kind)
        scale = x.new_ones(self.heads + self.kv_heads, 1)
        scale[: self.heads] = self.scale
        return cos.unsqueeze(2) * scale, sin.unsqueeze(2) * scale

    def turns(self, like: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """cos and sin (batch, n, size) of rotary positions in a dtype; the first half of the sines is negative."""
        rotary = self.model.base_model.rotary_emb
        cos, sin = rotary(like, positions, kind) if self._by_kind else rotary(like, positions)
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat([-first, second], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(.., V) of hidden states."""
        return self.head(hidden)


def fuse(model: Any) -> FusedStack | None:
    """The fused stack of a model; None, with the reason in the debug log, when it is not built like the family or gives
    other logits."""
    try:
        stack = FusedStack(model)
        if _agrees(model, stack):
            return stack
        reason = "it gives other logits than the model's own forward"
    except torch.OutOfMemoryError:
        raise
    except (_Unlike, AttributeError, TypeError, RuntimeError, ValueError) as problem:  # parts or shapes of another family
        reason = str(problem)
    logger.debug("%s runs as transformers runs it: %s", type(model).__name__, reason)
    return None


@torch.inference_mode()
def _agrees(model: Any, stack: FusedStack) -> bool:
    """Whether a short text has the same logits as by the model's own forward."""
    vocab = model.config.get_text_config().vocab_size
    tokens = torch.tensor([[token % vocab for token in (5, 17, 3, 11, 7, 13, 2, 19)]], device=model.device)
    positions = torch.arange(tokens.shape[1], device=model.device)[None]
    cache = RowCache(len(stack.layers), tokens.shape[1])
    cache.place([0], tokens.shape[1], model.device)
    read = stack.dense(cache, (positions[:, None] <= positions[..., None])[:, None])
    got = stack.logits(stack.hidden(tokens, positions, read)).float()
    want = model(input_ids=tokens, use_cache=False).logits.float()
    return apart(got, want) <= tolerance(model.dtype)


def dense(modules: Sequence[Any]) -> Dense:
    """Linear modules of the same input as one; their weights become views of its weight."""
    if not all(type(module) is torch.nn.Linear for module in modules):
        raise _Unlike("a projection is not a plain linear layer")
    biases = [module.bias for module in modules if module.bias is not None]
    if biases and len(biases) < len(modules):
        raise _Unlike("only some of the projections have a bias")
    return Dense(_together([module.weight for module in modules]), _together(biases) if biases else None)


def _together(parts: Sequence[Any]) -> Tensor:
    """Parameters below one another as one tensor of the same memory; moved there unless they already are."""
    first = parts[0].data
    if len(parts) == 1:
        return first
    sizes = [len(part) for part in parts]
    follows = all(
        part.is_contiguous()
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.data_ptr() == first.data_ptr() + sum(sizes[:index]) * first[0].nbytes
        for index, part in enumerate(parts)
    )
    if follows:
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    joined = torch.cat([part.data for part in parts])
    for part, piece in zip(parts, joined.split(sizes), strict=True):
        part.data = piece
    return joined


def _norm(module: Any) -> RootMeanSquare:
    return RootMeanSquare(_weight(module), _epsilon(module))


def _weight(module: Any) -> Tensor:
    """What an RMS norm multiplies with: its weight, or one more than it."""
    weight: Tensor = module.weight.data
    probe = torch.linspace(-1.0, 2.0, len(weight), device=weight.device, dtype=torch.float32)
    plain = F.rms_norm(probe, probe.shape, eps=_epsilon(module))
    with torch.inference_mode():
        shown = module(probe.to(weight.dtype)).float()
    for candidate in (weight, 1.0 + weight):
        if torch.allclose(shown, plain * candidate.float(), rtol=0.02, atol=1e-3):
            return candidate
    raise _Unlike("a norm is not an RMS norm")


def _epsilon(module: Any) -> float:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if value is None:
        raise _Unlike("a norm without an epsilon")
    return float(value)


def _parameters(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)
