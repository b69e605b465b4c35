"""Passes of the fused stack through a compiler: inductor (torch.compile), or TensorRT by torch_tensorrt.

What is compiled is one layer, for a number of tokens: all layers that are built alike run by the same code, with their own
weights, so compiling takes what one layer takes. Attention over the cache stays one operation that no compiler looks into:
the cache may grow, be ragged or sparse without compiling anew. The rows of a batch are laid out one after another, so
that a shape is a number of tokens and nothing else; there are at most `len(SIZES)` of them.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Attended, Reader
from .errors import ConfigurationError, EnvironmentProblem
from .folders import cache_folder
from .fused import FusedLayer, FusedStack, Step
from .settings import Compile

logger = logging.getLogger("lossytune")

#: tokens of all rows that a pass is compiled for; others are filled up to the next, and larger passes stay as they are
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
#: torch.compile(step, **options) as it is or as tests replace it
Compiler = Callable[..., Any]

_CXX_INSTALL = "install one, such as: apt-get install g++"
_TENSORRT_INSTALL = "pip install torch-tensorrt (of the version that goes with this torch)"

_here = threading.local()
_library = torch.library.Library("lossyspec", "DEF")
_library.define("attended(Tensor q, Tensor k, Tensor v) -> Tensor")


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of the layer that runs on this thread now: it depends on the cache, which no compiler may see into."""
    result: Tensor = _here.attended(q, k, v)
    return result


def _attended_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])


_library.impl("attended", _attended, "CompositeExplicitAutograd")
torch.library.register_fake("lossyspec::attended", _attended_shape, lib=_library)


class CompiledStack:
    """The passes of a fused stack, compiled for each size when it first comes. seconds: what that took, by size.

    compiler: stands in for torch.compile in tests."""

    def __init__(self, stack: FusedStack, how: Compile, compiler: Compiler = torch.compile) -> None:
        """Raises ConfigurationError or EnvironmentProblem where the stack's device has no such compiler."""
        check_compiler(how, stack.model.device)
        self.stack, self.how, self.compiler = stack, how, compiler
        self.seconds: dict[int, float] = {}
        self._steps: dict[int, Callable[..., Tensor]] = {}

    def hidden(self, tokens: Tensor, positions: Tensor, read: Reader) -> Tensor:
        """As `FusedStack.hidden`; of more tokens than the largest size, it is that."""
        rows, count = tokens.shape
        if rows * count > SIZES[-1]:
            return self.stack.hidden(tokens, positions, read)
        size = SIZES[bisect_left(SIZES, rows * count)]
        flat = [F.pad(part.reshape(1, -1), (0, size - rows * count)) for part in (tokens, positions)]
        reader, step = _in_line(read, rows, count), self._step(size)
        result = self._timed(size, lambda: self.stack.hidden(flat[0], flat[1], reader, step))
        return result[0, : rows * count].view(rows, count, -1)

    def _timed(self, size: int, run: Callable[[], Tensor]) -> Tensor:
        """A pass; the first one of a size compiles, which is timed and told."""
        if size in self.seconds:
            return run()
        began = perf_counter()
        with _kept_code():
            result = run()
        self.seconds[size] = perf_counter() - began
        logger.info("%s compiled the passes of %d tokens in %.1f s", self.how, size, self.seconds[size])
        return result

    def _step(self, size: int) -> Step:
        if size not in self._steps:
            self._steps[size] = self.compiler(_one_layer(self.stack, size), **_options(self.how))
        compiled = self._steps[size]

        def step(layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor, attended: Attended) -> Tensor:
            _here.attended = attended
            return compiled(layer, x, cos, sin)

        return step


def _one_layer(stack: FusedStack, size: int) -> Callable[..., Tensor]:
    """A layer as a function of its own code: torch counts recompilations by code, and gives up after a few of them."""

    def layer_of(layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return stack.step(layer, x, cos, sin, torch.ops.lossyspec.attended)

    code = layer_of.__code__.replace(co_name=f"layer_of_{size}_tokens")
    return FunctionType(code, layer_of.__globals__, code.co_name, None, layer_of.__closure__)


def _in_line(read: Reader, rows: int, count: int) -> Reader:
    """A reader of `rows` rows of `count` tokens for rows that lie one after another, with padding behind them."""

    def read_in_line(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        real = rows * count
        new = (part[0, :, :real].unflatten(1, (rows, count)).transpose(0, 1) for part in (k, v))
        attended = read(layer, q[0, :real].unflatten(0, (rows, count)), *new)
        return F.pad(attended.reshape(1, real, -1), (0, 0, 0, q.shape[1] - real))

    return read_in_line


def check_compiler(how: Compile, device: torch.device) -> None:
    """Raises ConfigurationError for a compiler that the device cannot have, EnvironmentProblem for one that is missing."""
    if how == "tensorrt":
        if device.type != "cuda":
            raise ConfigurationError(f"compile is 'tensorrt', which needs an NVIDIA GPU, and the model runs on {device}")
        if find_spec("torch_tensorrt") is None:
            raise EnvironmentProblem(f"compile is 'tensorrt', and torch_tensorrt is not installed; run: {_TENSORRT_INSTALL}")
        import_module("torch_tensorrt")  # which registers its backend
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as problem:
        raise EnvironmentProblem(f"compile is 'inductor', and no C++ compiler was found; {_CXX_INSTALL}") from problem
    if device.type == "cuda" and not has_triton():
        raise EnvironmentProblem("compile is 'inductor', and Triton does not run on this GPU; it needs: pip install triton")


def _options(how: Compile) -> dict[str, Any]:
    """Of torch.compile. Inductor rounds where the operations one by one would. TensorRT keeps the dtypes of the model, and
    its engines on disk, which takes weights that can be replaced (docs.pytorch.org/TensorRT, CompilationSettings)."""
    if how == "inductor":
        return {"fullgraph": True, "dynamic": False, "options": {"emulate_precision_casts": True}}
    options = {
        "use_explicit_typing": True,
        "min_block_size": 1,
        "immutable_weights": False,
        "cache_built_engines": True,
        "reuse_cached_engines": True,
        "engine_cache_dir": str(cache_folder() / "tensorrt"),
    }
    return {"backend": "torch_tensorrt", "dynamic": False, "options": options}


@contextmanager
def _kept_code() -> Iterator[None]:
    """Inductor keeps what it has compiled beside converted models, where later runs find it, unless the user said where."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name):
        yield
        return
    os.environ[name] = str(cache_folder() / "inductor")
    try:
        yield
    finally:
        os.environ.pop(name, None)
