"""Traces on the disk: one safetensors file a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossyspec.errors import ConfigurationError
from lossyspec.tensor_files import read_tensors, write_tensors

from .laws import BinnedLaw, GreedyLaw, Law, OneHotLaw
from .trace import Texts, Trace

SCHEMA = "lossytune.trace/2"
#: what a law keeps, by its class, in the order of its fields
_KINDS: dict[str, type[Any]] = {"one_hot": OneHotLaw, "greedy": GreedyLaw, "binned": BinnedLaw}


def save_trace(path: Path, traces: dict[str, Trace]) -> None:
    """Writes the traces of a run as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for half, trace in traces.items():
        tensors[f"{half}/chain"] = torch.from_numpy(trace.chain)
        tensors[f"{half}/drafted"] = trace.drafted
        if trace.kinds is not None:
            tensors[f"{half}/kinds"] = trace.kinds
        for precision, values in trace.plain.items():
            tensors[f"{half}/plain/{precision}"] = torch.from_numpy(values)
            tensors[f"{half}/entropy/{precision}"] = torch.from_numpy(trace.entropy[precision])
        for precision, law in trace.lookup.items():
            tensors |= _fields(f"{half}/lookup/{precision}", law)
        for (precision, tau), by_depth in trace.laws.items():
            for depth, law in enumerate(by_depth):
                tensors |= _fields(f"{half}/law/{precision}/{tau}/{depth}", law)
        index[half] = {
            "reference": trace.reference,
            "prompts": trace.texts.prompts,
            "outputs": trace.texts.outputs,
            "limited": trace.texts.limited,
        }
    write_tensors(path, tensors, {"schema": SCHEMA, "index": json.dumps(index)})


def load_trace(path: Path) -> dict[str, Trace]:
    """Reads what `save_trace` wrote. Raises ConfigurationError for another file."""
    tensors, metadata = read_tensors(path)
    if metadata.get("schema") != SCHEMA:
        raise ConfigurationError(f"{path}: schema is {metadata.get('schema')!r}; expected {SCHEMA!r}")
    try:
        return _traces(tensors, metadata)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigurationError(f"{path}: not a trace ({type(error).__name__}: {error})") from None


def _traces(tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Trace]:
    traces: dict[str, Trace] = {}
    for half, note in json.loads(metadata["index"]).items():
        texts = Texts(note["prompts"], note["outputs"], note["limited"])
        trace = Trace(texts, note["reference"], tensors[f"{half}/chain"].numpy(), tensors[f"{half}/drafted"])
        trace.kinds = tensors.get(f"{half}/kinds")
        laws: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            place = key.split("/")
            if place[0] == half and place[1] == "plain":
                trace.plain[place[2]] = value.numpy()
            elif place[0] == half and place[1] == "entropy":
                trace.entropy[place[2]] = value.numpy()
            elif place[0] == half and place[1] in ("law", "lookup"):
                laws.setdefault(tuple(place[1:-1]), {})[place[-1]] = value
        depths: dict[tuple[str, float], dict[int, Law]] = {}
        for (what, precision, *rest), values in laws.items():
            kind = rest.pop()
            if what == "lookup":
                trace.lookup[precision] = _KINDS[kind](**values)
            else:
                depths.setdefault((precision, float(rest[0])), {})[int(rest[1])] = _KINDS[kind](**values)
        trace.laws = {key: tuple(by_depth[depth] for depth in sorted(by_depth)) for key, by_depth in depths.items()}
        traces[half] = trace
    return traces


def _fields(place: str, law: Law) -> dict[str, Tensor]:
    """A law's tensors under `place`/kind/field."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(law, cls))
    kept = [name for name in law.__dataclass_fields__ if not name.startswith("_")]  # type: ignore[attr-defined]
    return {f"{place}/{kind}/{name}": getattr(law, name).contiguous() for name in kept}
