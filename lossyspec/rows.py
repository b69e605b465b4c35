"""What the loop works on: a text as it grows, and what it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from .policy import Boundaries, Walk
from .sampling import Choice, Processor
from .settings import Sampling, Settings
from .stopping import Stopping


@dataclass(frozen=True)
class Job:
    """All that a text needs besides the models. processors: as in transformers, applied to target and draft.

    Rows of one batch may have jobs of their own that differ in anything but the settings, and in those in alpha alone.
    draft_length: most drafted tokens a round, whatever the number of rows; None: as the settings say for it.
    """

    settings: Settings
    sampling: Sampling
    stopping: Stopping
    generator: torch.Generator
    tokenizer: Any = None  # needed for stop strings only
    processors: Sequence[Processor] = ()
    boundaries: Boundaries | None = None  # needed for protected positions only
    draft_length: int | None = None

    @cached_property
    def choice(self) -> Choice:
        """How the tokens are chosen."""
        return Choice(self.sampling, self.generator, self.processors)

    @cached_property
    def alpha(self) -> float:
        """The relaxation that the settings come to."""
        return self.settings.alpha if self.settings.relaxed else 0.0


@dataclass
class Row:
    """One text: its prompt, its output so far, and why it ended (None while it goes on).

    relaxed: for each output token, whether a rule with alpha over 0 judged its position. variation: the sum over those of
    the total variation between the law that the rule gave the position and the target's. guarded: which guard has made the
    rest of the text lossless.
    """

    index: int
    prompt: list[int]
    job: Job
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    relaxed: list[bool] = field(default_factory=list)
    variation: float = 0.0
    guarded: Literal["request", "rolling"] | None = None

    def __post_init__(self) -> None:
        self.walk = Walk(self.job.settings.policy)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest output."""
        return len(self.prompt) + self.job.stopping.max_new_tokens

    @property
    def alpha(self) -> float:
        """Relaxation of the next round, before what a policy makes of it."""
        return self.job.alpha if self.guarded is None else 0.0
