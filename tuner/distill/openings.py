"""How the users' messages begin that a target writes for itself: without, a small model writes the same few kinds."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from lossyspec.errors import ConfigurationError


def read_openings(text: str) -> list[str]:
    """How a user's message may begin, one a line; a backslash and an n stand for a line break. Spaces at the end are left
    out: tokens begin with theirs."""
    return [line.rstrip(" ").replace("\\n", "\n") for line in text.splitlines() if line.strip()]


def openings_of(tokenizer: Any, path: Path | None) -> list[list[int]]:
    """Token ids of the openings of a file; None: those that come with the tuner, and none for a target without turns.

    Raises ConfigurationError for a file that cannot be read, or is empty."""
    if path is None and tokenizer.chat_template is None:
        return []
    source = path or files("lossyspec.tuner").joinpath("data", "openings.txt")
    allowed = "allowed: a text in UTF-8 with one opening a line"
    try:
        texts = read_openings(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"--openings {path}: {problem}; {allowed}") from None
    if not texts:
        raise ConfigurationError(f"--openings {path} is empty; {allowed}")
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
