"""Compiles `stack.cpp` for this CPU, once, and loads it. Without a compiler, or the instructions, torch's kernels stay."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from time import perf_counter

from ..cpu import instruction_sets, read_text_file
from ..folders import cache_folder

logger = logging.getLogger("lossytune")

#: "off": torch's kernels
SWITCH = "LOSSYTUNE_NATIVE"
_COMPILER = "g++"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_SOURCES = ("stack.cpp", "attention.h", "products.h", "by_vectors.h", "tiles.h", "laws.h", "vectors.h")
_TILES = {"amx_tile", "amx_int8", "amx_bf16"}
_NO_TILES = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
_LIMIT_S = 120


class Matrix(ctypes.Structure):
    """As in stack.cpp."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """As in stack.cpp."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        ("head_weights", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class Stack(ctypes.Structure):
    """As in stack.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "heads", "kv_heads", "size", "middle", "activation")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon", "head_epsilon")),
        ("table", ctypes.c_void_p),
        ("half_table", ctypes.c_int64),
        *((name, Matrix) for name in ("entry", "exit")),
    )


class Pass(ctypes.Structure):
    """As in stack.cpp."""

    _fields_ = (
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("keys", "values")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("starts", "slots")),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "threads", "half")),
        *((name, ctypes.c_void_p) for name in ("tokens", "features")),
        ("picks", ctypes.POINTER(ctypes.c_int64)),
        ("logits", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None, with the reason in the log, where there can be none."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        return None
    flags = instruction_sets()
    if "avx2" not in flags:
        logger.debug("passes by torch's kernels: this CPU has no AVX2")
        return None
    compiler = shutil.which(_COMPILER)
    if compiler is None:
        logger.info("passes by torch's kernels, which are slower: no g++ (apt-get install g++)")
        return None
    folder = Path(str(files("lossyspec.native")))
    try:
        return _with_tiles(compiler, folder, flags) or _declared(
            ctypes.CDLL(str(_built(compiler, folder, flags, _NO_TILES)))
        )
    except (OSError, subprocess.SubprocessError) as problem:
        said = getattr(problem, "stderr", None) or str(problem)
        logger.warning("passes by torch's kernels, which are slower; ours could not be compiled: %s", said.strip()[-500:])
        return None


def kernels() -> str:
    """What multiplies packed weights on this CPU, as runs and profiles record it: native or torch."""
    return "native" if library() is not None else "torch"


def _with_tiles(compiler: str, folder: Path, flags: list[str]) -> ctypes.CDLL | None:
    """The code for a CPU that multiplies tiles (AMX), where the system lets us have them."""
    if not _TILES.issubset(flags):
        return None
    code = ctypes.CDLL(str(_built(compiler, folder, flags)))
    if _allowed(code):
        return _declared(code)
    logger.info("passes without tiles, which are slower for several tokens: the system does not let this process use AMX")
    return None


def _allowed(code: ctypes.CDLL) -> bool:
    """Whether the system gives this process the state that tiles need: older Linux does not."""
    return bool(code.lossyspec_tiles())


def _built(compiler: str, folder: Path, flags: list[str], more: Sequence[str] = ()) -> Path:
    """The library's file, compiled unless it is there: for these sources, this compiler, this CPU and these options."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout
    sources = [(folder / name).read_text(encoding="utf-8") for name in _SOURCES]
    about = "\n".join([*sources, version, *_FLAGS, *more, *flags])
    place = cache_folder() / "native" / f"stack-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    began, partial = perf_counter(), place.with_suffix(f".{os.getpid()}.part")
    try:
        command = [compiler, *_FLAGS, *more, str(folder / _SOURCES[0]), "-o", str(partial), *_openmp()]
        subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        partial.replace(place)  # whole or not at all, whoever else builds it
    finally:
        partial.unlink(missing_ok=True)
    took_s = perf_counter() - began
    logger.info("compiled the passes of models for this CPU in %.1f s; they are kept in %s", took_s, place)
    return place


def _openmp() -> list[str]:
    """torch's own OpenMP runtime, so that there is one set of threads: two would spin against each other."""
    loaded = re.search(r"\S*/libgomp[^/\s]*\.so\S*", read_text_file(Path("/proc/self/maps"), []))
    return [loaded[0]] if loaded else []


def _declared(code: ctypes.CDLL) -> ctypes.CDLL:
    address, number = ctypes.c_void_p, ctypes.c_int64
    code.lossyspec_product.argtypes = (ctypes.POINTER(Matrix), address, number, address, number)
    code.lossyspec_attend.argtypes = (*[address] * 4, *[number] * 9, address)
    code.lossyspec_pass.argtypes = (ctypes.POINTER(Stack), ctypes.POINTER(Pass), address)
    code.lossyspec_chain.argtypes = (
        *code.lossyspec_pass.argtypes, address, number, ctypes.c_float, ctypes.c_float, *[address] * 7
    )  # fmt: skip
    code.lossyspec_softmax.argtypes = (address, number, number, ctypes.c_float, address, number)
    code.lossyspec_entropy.argtypes = (address, number, number, address, number)
    code.lossyspec_largest.argtypes = (address, number, number, address)
    code.lossyspec_judge.argtypes = (address, *[number] * 3, address, number, *[address] * 4, number, *[address] * 4)
    code.lossyspec_draw.argtypes = (address, number, number, address, address)
    return code


def checked(status: int) -> None:
    """Raises MemoryError for a call that got none."""
    if status:
        raise MemoryError("the compiled pass got no memory for its activations")
