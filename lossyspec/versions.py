"""Versions of what the numbers depend on, read without importing any of it."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("lossytune", "torch", "transformers", "optuna", "numpy")
#: those that a profile is held against; cpu_kernels: what multiplies packed weights on a CPU
TUNED_WITH = ("torch", "transformers", "cpu_kernels")


def tuned_with(found: dict[str, str]) -> dict[str, str]:
    """Those of some versions that a profile is held against."""
    return {name: version for name, version in found.items() if name in TUNED_WITH}


def versions() -> dict[str, str]:
    """Installed versions by package name, and Python's; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
