"""Every error a user can meet, with the exit code of the command line that it maps to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LossyspecError(Exception):
    """Base of all errors raised on purpose; its message names the value and what is allowed."""

    exit_code = 2


class ConfigurationError(LossyspecError):
    """A setting, file or combination of settings that cannot be used (exit code 2)."""


class NoFeasiblePoint(LossyspecError):
    """A search ended without a point inside its limits (exit code 3)."""

    exit_code = 3


class EnvironmentProblem(LossyspecError):
    """Something is missing on or wrong with this machine; the message says the fix (exit code 4)."""

    exit_code = 4


class EveryTrialFailed(LossyspecError):
    """No trial of a search completed (exit code 5)."""

    exit_code = 5


class ProfileMismatch(LossyspecError):
    """A profile was tuned for another device, model or tokenizer (exit code 6)."""

    exit_code = 6


class NumericalError(LossyspecError):
    """A model returned NaN or infinite logits; the message names the model and the position (exit code 4)."""

    exit_code = 4


class Overloaded(LossyspecError):
    """A batcher's queue is full (exit code 4)."""

    exit_code = 4


def mark_row(error: BaseException, row: int) -> None:
    """Notes on an error which row of the batch it is about; a batcher then ends that request alone."""
    error.row = row  # type: ignore[attr-defined]


def row_of(error: BaseException) -> int | None:
    """The row that `mark_row` noted; None: the error is about no row in particular."""
    row: int | None = getattr(error, "row", None)
    return row


def nearest(value: str, allowed: Iterable[str]) -> str:
    """A ' Did you mean X?' for an unknown `value`, or an empty string when nothing is close."""
    close = difflib.get_close_matches(value, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
