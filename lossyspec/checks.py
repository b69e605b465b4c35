"""What a caller of the Python API may pass: one error that names the value and what is allowed, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from .errors import ConfigurationError
from .settings import Settings


def check_count(name: str, value: Any) -> None:
    """Refuses all but whole numbers of 1 or more."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigurationError(f"{name} is {value!r}; it must be a whole number")
    if int(value) < 1:
        raise ConfigurationError(f"{name} is {value}; it must be at least 1")


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Refuses what is of none of these kinds."""
    if not isinstance(value, kinds):
        raise ConfigurationError(f"{name} is {value!r:.200}; allowed: {allowed}")


def check_seed(seed: Any) -> None:
    """Refuses what a generator does not take."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise ConfigurationError(f"seed is {seed!r}; allowed: a whole number from 0 to 2**63 - 1")


def check_options(stop: Any, processors: Any, settings: Any) -> None:
    """Refuses stop strings, logits processors and settings of other kinds."""
    if not isinstance(stop, str):
        check_kind("stop", stop, Iterable, "a string, or strings")
        for one in stop:
            check_kind("stop", one, str, "a string, or strings")
    check_kind("processors", processors, Iterable, "functions of (input_ids, scores), in a list")
    for one in processors:
        if not callable(one):
            raise ConfigurationError(f"processors holds {one!r}; allowed: functions of (input_ids, scores)")
    check_kind("settings", settings, (Settings, type(None)), "a Settings, or None")


def check_ids(prompts: Any, size: int) -> None:
    """Refuses a prompt without tokens, and whatever is no token id under `size`."""
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not all(isinstance(token, Integral) for token in prompt):
            raise ConfigurationError(f"prompt {index} is {prompt!r:.80}; allowed: a list of token ids, each a whole number")
        if not prompt:
            raise ConfigurationError(f"prompt {index} has no tokens; it must have at least one")
        if unknown := [token for token in prompt if not 0 <= int(token) < size]:
            raise ConfigurationError(f"prompt {index} holds the token id {unknown[0]}; allowed: 0 to {size - 1}")
