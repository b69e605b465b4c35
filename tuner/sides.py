"""Who may draft at each position of the texts, and what their laws answer there, by depth of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lossyspec.likelihood import Flags, Floats

from .laws import Answer, Law


@dataclass(frozen=True)
class Side:
    """One of who may draft: its laws by depth (one: alike at all), their answers, and the least confidence it drafts at."""

    laws: tuple[Law, ...]
    answers: tuple[Answer, ...]
    least: float


@dataclass(frozen=True)
class Sides:
    """Who drafts: prompt lookup, the draft, or both, where rounds that begin at a long match are lookup.

    padded: (N, L) values of texts from (T,)."""

    padded: Callable[..., Floats]
    draft_length: int
    lookup: Side | None
    draft: Side | None

    @property
    def all(self) -> list[Side]:
        """Those that take part."""
        return [side for side in (self.lookup, self.draft) if side is not None]

    def over(self, values: Callable[[Side], Sequence[torch.Tensor]]) -> Floats:
        """(N, L, 1), or (N, L, draft_length) where the depth matters, from (T,) values of a side at each of its depths;
        beyond the last one that holds."""
        padded = [self._by_depth(values(side)) for side in self.all]
        if len(padded) == 1:
            return padded[0]
        return np.where(self._looked_up(), padded[0], padded[1])

    def _by_depth(self, flat: Sequence[torch.Tensor]) -> Floats:
        padded = [self.padded(values) for values in flat]
        if len(padded) > 1:
            padded += [padded[-1]] * (self.draft_length - len(padded))
        return np.stack(padded, -1)

    def _looked_up(self) -> Flags:
        """(N, L, draft_length) whether a round that began d places before each position was one of prompt lookup."""
        assert self.lookup is not None
        begins = self.padded(self.lookup.laws[0].confidence >= self.lookup.least).astype(bool)
        depths = [np.pad(begins, ((0, 0), (depth, 0)))[:, : begins.shape[1]] for depth in range(max(self.draft_length, 1))]
        return np.stack(depths, -1)
