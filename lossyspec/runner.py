"""One model with its cache: prompts in, logits of the new positions out, for rows of unequal length."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .compiled import CompiledStack
from .errors import ConfigurationError, NumericalError, mark_row
from .fused import FusedStack, fuse
from .graphs import Capture, CudaCapture, Graphs
from .kv_cache import RowCache, layer_types
from .likeness import apart, tolerance
from .native import laws
from .native.passes import native_stack
from .settings import Attention, Compile, Passes
from .sparse import SparseReader

#: prompts are read in pieces of this many tokens, which bounds the memory of the prefill
PREFILL_CHUNK = 1024


class Runner:
    """Runs a transformers causal LM over ragged rows.

    name: what errors call the model. vocab_size: logits past it (padding of the embedding) are cut off.
    stack: the quantised form that the model runs by; None: fused where it is of the family, else as transformers runs it.
    new_capture: makes what records passes; None: CUDA graphs on a CUDA device, nothing elsewhere.
    how: passes of few tokens run, from the next one on; prompts are always read operation by operation.
    """

    how: Passes = "graphs"

    def __init__(
        self,
        model: Any,
        name: str = "target",
        vocab_size: int | None = None,
        stack: FusedStack | None = None,
        new_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.config = model.config.get_text_config()
        self.layer_types = layer_types(model.config)
        self.window = getattr(self.config, "sliding_window", None)
        self.device: torch.device = model.device
        padded = self.config.vocab_size
        self.vocab_size = min(vocab_size, padded) if vocab_size else padded
        self.position_limit: int | None = getattr(self.config, "max_position_embeddings", None)
        self.cache = RowCache(len(self.layer_types), 0)
        #: (batch, n, hidden) what the output layer read in the last pass (all of the prompt's after `start`)
        self.features: Tensor | None = None
        self._fused = stack or fuse(model)
        self._native = native_stack(self._fused)
        self._compiled: dict[str, CompiledStack] = {}  # shared by forks
        if new_capture is None and self.device.type == "cuda":
            new_capture = partial(CudaCapture, self.device)
        self._graphs = Graphs(new_capture) if new_capture is not None and self._fused is not None else None
        self._additive = self._fused is None and self.config._attn_implementation not in ("sdpa",)

    @property
    def native(self) -> bool:
        """Whether passes of few tokens run by the compiled code."""
        return self._native is not None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the keys and values of a text whose prompt is read by the usual passes."""
        return self._native.dtype if self._native is not None else self.model.dtype

    def fork(self) -> Runner:
        """The same model with a cache of its own, so that two texts can go on in turns."""
        other = copy.copy(self)
        other.cache = RowCache(len(self.layer_types), 0)
        other._graphs = self._graphs.fork() if self._graphs is not None else None
        return other

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """A new batch: allocates `capacity` slots a row and reads all but the last token of each prompt."""
        if self._graphs is None or not self.cache.restart(capacity, len(prompts)):
            self.cache = RowCache(len(self.layer_types), capacity, len(prompts))
        self._read(prompts, 0)

    @torch.inference_mode()
    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Goes on with the one row of the cache: its first `kept` tokens are the prompt's own, the rest of the prompt but
        its last token is read. The cache grows to `capacity` slots; `features` then begin at token `kept`."""
        self.cache.grow(capacity)
        self._read([prompt], kept)

    def _read(self, prompts: list[list[int]], kept: int) -> None:
        """Reads all but the last token of each prompt, from token `kept` on."""
        longest = max(len(prompt) for prompt in prompts) - 1
        pieces: list[Tensor] = []
        for first in range(kept, longest, PREFILL_CHUNK):
            piece = [prompt[:-1][first : first + PREFILL_CHUNK] for prompt in prompts]
            width = max(len(part) for part in piece)
            padded = [part + [prompt[0]] * (width - len(part)) for part, prompt in zip(piece, prompts, strict=True)]
            pieces.append(self._hidden(torch.tensor(padded, device=self.device), [first] * len(prompts)))
        self.features = torch.cat(pieces, 1) if pieces else None

    @torch.inference_mode()
    def logits(self, tokens: Tensor, starts: list[int], attention: Attention | None = None) -> Tensor:
        """Reads `tokens` (batch, n), row i from slot `starts[i]`; returns fp32 logits (batch, n, vocab_size).

        attention: block-sparse for these tokens; None: all that came before. Columns that only pad a row may hold any token:
        what they write is overwritten later. Raises what `launch` and `check` raise.
        """
        logits = self.launch(tokens, starts, attention)
        self.check(logits, starts)
        return logits

    @torch.inference_mode()
    def launch(self, tokens: Tensor, starts: list[int], attention: Attention | None = None) -> Tensor:
        """The same, queued on the device and not waited for: the logits have yet to be checked.

        Raises ConfigurationError for sparse attention that the model does not have.
        """
        if attention is not None and attention.block:
            self.check_sparse()
        return self._logits(tokens, starts, attention)[..., : self.vocab_size].float()

    def check(self, logits: Tensor, starts: list[int]) -> None:
        """Waits for logits of `launch`. Raises NumericalError naming the model and the position when one is NaN or +inf."""
        worst = laws.largest(logits) if laws.takes(logits) else logits.amax(-1)  # NaN spreads through both
        values = worst.tolist()  # of few numbers: torch.isfinite takes ten times as long
        bad = ((row, column) for row, own in enumerate(values) for column, value in enumerate(own) if not isfinite(value))
        if (place := next(bad, None)) is not None:
            row, column = place
            error = NumericalError(
                f"the {self.name} model {self.model.name_or_path or type(self.model).__name__} returned "
                f"{values[row][column]} as a logit at position {starts[row] + column} of row {row}; "
                f"try a precision with a wider range (bf16 or fp32)"
            )
            mark_row(error, row)
            raise error

    def select(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.cache.select(rows)

    @torch.inference_mode()
    def logits_beside(
        self,
        cache: RowCache,
        tokens: Tensor,
        slots: list[int],
        shifts: list[int],
        before: Callable[[int, Tensor], None] = lambda layer, q: None,
    ) -> Tensor:
        """fp32 logits (batch, n, vocab_size) of `tokens` (batch, n) that a fused model reads into another cache: row i from
        slot `slots[i]`, at positions `shifts[i]` further. before(layer, q) comes before a layer stores its entries."""
        assert self._fused is not None
        cache.place(slots, tokens.shape[1], self.device)
        first, count = torch.tensor(slots, device=self.device)[:, None], torch.arange(tokens.shape[1], device=self.device)
        dense = self._fused.dense(cache, self._mask(first + count, cache))

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before(layer, q)
            return dense(layer, q, k, v)

        positions = first + count + torch.tensor(shifts, device=self.device)[:, None]
        logits = self._fused.logits(self._fused.hidden(tokens, self._inside(positions), read))
        return logits[..., : self.vocab_size].float()

    def check_sparse(self) -> FusedStack:
        """The stack whose attention may be block-sparse. Raises ConfigurationError, saying why, for a model without."""
        if self._fused is None:
            raise ConfigurationError(
                f"block-sparse attention needs a model of the Llama family that runs fused; the {self.name} model "
                f"({self.config.model_type}) runs as transformers runs it: set attention.block to 0"
            )
        if "full_attention" not in self.layer_types:
            raise ConfigurationError(
                f"block-sparse attention has nothing to skip: each layer of the {self.name} model "
                f"({self.config.model_type}) has a sliding window of {self.window} tokens: set attention.block to 0"
            )
        return self._fused

    def check_compiler(self, how: Compile) -> CompiledStack:
        """The stack by a compiler. Raises ConfigurationError, saying why, for a model or device without, and
        EnvironmentProblem where something has to be installed."""
        if self._fused is None:
            raise ConfigurationError(
                f"compile {how!r} needs a model of the Llama family that runs fused; the {self.name} model "
                f"({self.config.model_type}) runs as transformers runs it: set compile to 'off'"
            )
        if how not in self._compiled:
            self._compiled[how] = CompiledStack(self._fused, how)
        return self._compiled[how]

    @property
    def compile_s(self) -> float:
        """Seconds that compiling passes has taken so far."""
        return sum(sum(stack.seconds.values()) for stack in self._compiled.values())

    def _stack(self, passes: Passes) -> FusedStack | CompiledStack:
        if passes in ("inductor", "tensorrt"):
            return self.check_compiler(passes)
        assert self._fused is not None
        return self._fused

    @torch.inference_mode()
    def join(self, other: Runner, room: int = 0) -> None:
        """Appends the rows of another fork of the same model. room: rows to make room for when the cache has to grow."""
        self.cache.join(other.cache, room)

    def check_room(self, longest: int) -> None:
        """Raises ConfigurationError when `longest` tokens do not fit the model's positions."""
        if self.position_limit is not None and longest > self.position_limit:
            raise ConfigurationError(
                f"prompt and new tokens need {longest} positions; the {self.name} model "
                f"has {self.position_limit}: shorten the prompt or lower max_new_tokens"
            )

    def _hidden(
        self, tokens: Tensor, starts: list[int], attention: Attention | None = None, passes: Passes = "eager"
    ) -> Tensor:
        """Reads tokens (batch, n) into the cache; returns what the output layer would read, (batch, n, hidden)."""
        sparse = attention is not None and attention.skips(max(starts) + tokens.shape[1])
        graphs = self._graphs if passes == "graphs" and not sparse else None
        if graphs is not None and (replayed := graphs.hidden(self.cache, tokens, starts, self._pinned)) is not None:
            return replayed
        native = self._native if not sparse and passes in ("eager", "graphs") else None
        if native is not None and native.takes(tokens.shape[1]):
            self.cache.place(starts, tokens.shape[1], self.device)
            return native.hidden(tokens, starts, self.cache)
        positions, mask = self._place(tokens, starts)
        if attention is not None and sparse:
            reader = SparseReader(self.check_sparse(), self.cache, attention, starts, mask)
            return self._stack(passes).hidden(tokens, positions, reader)
        if self._fused is not None:
            return self._stack(passes).hidden(tokens, positions, self._fused.dense(self.cache, mask))
        result: Tensor = self._run(self.model.base_model, tokens, positions, mask).last_hidden_state
        return result

    def _pinned(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """A dense pass over the cache as it is pinned, which depends on nothing but tensors."""
        assert self._fused is not None
        read = self._fused.dense(self.cache, self._mask(slots, self.cache))
        return self._fused.hidden(tokens, self._inside(slots), read)

    def _logits(self, tokens: Tensor, starts: list[int], attention: Attention | None) -> Tensor:
        """The same with the output layer: (batch, n, vocab)."""
        if self._fused is not None:
            self.features = self._hidden(tokens, starts, attention, self.how)
            return (self._native or self._fused).logits(self.features)
        # the model's own forward, since what lies between the last norm and the logits differs (scales, caps)
        with self.model.get_output_embeddings().register_forward_pre_hook(self._store_features):
            output: Tensor = self._run(self.model, tokens, *self._place(tokens, starts)).logits
        return output[:, -tokens.shape[1] :]

    def _store_features(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]

    def _place(self, tokens: Tensor, starts: list[int]) -> tuple[Tensor, Any]:
        """Tells the cache where the pass writes; positions (batch, n) and what each may see."""
        count = tokens.shape[1]
        self.cache.place(starts, count, self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(count, device=self.device)
        return self._inside(positions), self._mask(positions, self.cache)

    def _inside(self, positions: Tensor) -> Tensor:
        """Positions that the model has: columns that pad a row near the end of the context lie past them."""
        return positions if self.position_limit is None else positions.clamp_max(self.position_limit - 1)

    def _run(self, module: Any, tokens: Tensor, positions: Tensor, mask: Any) -> Any:
        return module(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True)

    def _mask(self, positions: Tensor, cache: RowCache) -> Any:
        """What queries at slots `positions` may see: (batch, 1, n, extent), or by layer type where there are both kinds."""
        uniform = cache.uniform_start is not None
        kinds = set(self.layer_types)
        inside = self.window is None or cache.extent <= self.window
        if uniform and positions.shape[1] == 1 and not self._additive and (inside or kinds == {"full_attention"}):
            return None  # one new token a row, nothing stale behind it: everything is visible
        slots = torch.arange(cache.extent, device=self.device)
        causal = slots[None, None, :] <= positions[:, :, None]
        masks = {"full_attention": causal}
        if "sliding_attention" in kinds and self.window is not None:
            masks["sliding_attention"] = causal & (slots[None, None, :] > positions[:, :, None] - self.window)
        ready = {kind: self._as_mask(masks.get(kind, causal)) for kind in kinds}
        return ready if len(kinds) > 1 else next(iter(ready.values()))

    def _as_mask(self, visible: Tensor) -> Tensor:
        visible = visible[:, None]
        if not self._additive:
            return visible
        dtype = self.model.dtype
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@torch.inference_mode()
def check_rollback(model: Any, name: str, stack: FusedStack | None = None) -> FusedStack | None:
    """Runs the model with and without a rolled-back, ragged cache on a few tokens, and compares. Returns what it ran by: the
    quantised `stack`, or the model fused; None: as transformers runs it.

    This catches what no configuration field tells: state outside the cache, positions taken from the mask, ALiBi.
    Raises ConfigurationError with what was seen.
    """
    runner = Runner(model, name, stack=stack)
    ids = [int(token) % runner.vocab_size for token in (5, 17, 3, 11, 7, 13, 2, 19)]
    rows = [ids[:5], ids[1:4]]
    try:
        runner.start(rows, 16)
        starts = [len(row) - 1 for row in rows]
        wrong = torch.tensor([[row[-1], ids[6], ids[7]] for row in rows], device=runner.device)
        runner.logits(wrong, starts)  # both drafted tokens rejected: the next pass starts one slot later
        after = torch.tensor([[ids[3], ids[2]], [ids[4], ids[5]]], device=runner.device)
        got = runner.logits(after, [start + 1 for start in starts])
        for index, row in enumerate(rows):
            full = torch.tensor([row + after[index].tolist()], device=runner.device)
            want = model(input_ids=full, use_cache=False).logits[0, -2:, : runner.vocab_size].float()
            error = apart(got[index], want)
            if not error <= tolerance(model.dtype if stack is None else torch.bfloat16):
                raise ConfigurationError(
                    f"the {name} model ({model.config.model_type}) gives other logits after a rollback than without a cache "
                    f"(off by {error:.2g} standard deviations): its state cannot be rolled back, so it cannot be used"
                )
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError) as problem:
        raise ConfigurationError(
            f"the {name} model ({model.config.model_type}) cannot run on a cache with rows of unequal length: {problem}"
        ) from problem
    return runner._fused
