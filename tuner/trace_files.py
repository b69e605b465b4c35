"""Traces on the disk: one safetensors file a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossyspec.errors import ConfigurationError

from .laws import BinnedLaw, GreedyLaw, OneHotLaw
from .trace import Texts, Trace

#: what a law keeps, by its class, in the order of its fields
_KINDS: dict[str, type[Any]] = {"one_hot": OneHotLaw, "greedy": GreedyLaw, "binned": BinnedLaw}


def save_trace(path: Path, traces: dict[str, Trace]) -> None:
    """Writes the traces of a run as one safetensors file."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for half, trace in traces.items():
        tensors[f"{half}/chain"] = torch.from_numpy(trace.chain)
        if trace.drafted is not None:
            tensors[f"{half}/drafted"] = trace.drafted
        for precision, values in trace.plain.items():
            tensors[f"{half}/plain/{precision}"] = torch.from_numpy(values)
        for (precision, tau), first in trace.laws.items():
            for depth, law in enumerate((first, *trace.deeper.get((precision, tau), ()))):
                kind = next(name for name, cls in _KINDS.items() if isinstance(law, cls))
                for name in law.__dataclass_fields__:  # type: ignore[attr-defined]
                    if not name.startswith("_"):
                        tensors[f"{half}/law/{kind}/{precision}/{tau}/{depth}/{name}"] = getattr(law, name).contiguous()
        index[half] = {
            "reference": trace.reference,
            "prompts": trace.texts.prompts,
            "outputs": trace.texts.outputs,
            "limited": trace.texts.limited,
        }
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"schema": "lossytune.trace/1", "index": json.dumps(index)})
    temporary.replace(path)


def load_trace(path: Path) -> dict[str, Trace]:
    """Reads what `save_trace` wrote. Raises ConfigurationError for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("schema") != "lossytune.trace/1":
                raise ConfigurationError(f"{path}: schema is {metadata.get('schema')!r}; expected 'lossytune.trace/1'")
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: not a trace ({error})") from None
    traces: dict[str, Trace] = {}
    for half, note in json.loads(metadata["index"]).items():
        texts = Texts(note["prompts"], note["outputs"], note["limited"])
        trace = Trace(texts, note["reference"], tensors[f"{half}/chain"].numpy(), drafted=tensors.get(f"{half}/drafted"))
        fields: dict[tuple[str, str, float, int], dict[str, Tensor]] = {}
        for key, value in tensors.items():
            place = key.split("/")
            if place[0] == half and place[1] == "plain":
                trace.plain[place[2]] = value.numpy()
            elif place[0] == half and place[1] == "law":
                fields.setdefault((place[2], place[3], float(place[4]), int(place[5])), {})[place[6]] = value
        for (kind, precision, tau, depth), values in sorted(fields.items(), key=lambda item: item[0][3]):
            law = _KINDS[kind](**values)
            if depth == 0:
                trace.laws[precision, tau] = law
            else:
                trace.deeper[precision, tau] = (*trace.deeper.get((precision, tau), ()), law)
        traces[half] = trace
    return traces
