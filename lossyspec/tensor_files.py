"""Tensors on the disk: safetensors files that are there whole or not at all, and one clear error where they are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigurationError, EnvironmentProblem

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a file through a temporary one. Raises EnvironmentProblem when it cannot be written; an old one stays whole."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(0o644)
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # the second also where the disk is full
        raise EnvironmentProblem(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    finally:
        if temporary.is_file():
            temporary.unlink()


def read_tensors(path: Path, *names: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of those names, or all, and the metadata of a file. Raises ConfigurationError naming the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in names or stored.keys()}, stored.metadata() or {}
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: damaged, or no safetensors file ({error}); restore it, or make it anew") from None
