"""The target as its own draft: it drafts over a few blocks of its own cache, and verifies over all of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .drafting import Draft, Proposal, Request, draw_round
from .errors import ConfigurationError
from .runner import Runner
from .settings import SELF_ATTENTION, Attention, Settings
from .sparse import Excerpt


class SelfDraft:
    """Proposes from the target itself with block-sparse attention (as MagicDec, arXiv 2408.11049, and TriForce, 2404.11912).

    The first pass of a round chooses the blocks by its queries and copies them out of the target's cache; the round goes on
    in the copy, so the cache only ever holds what the target wrote. A row whose text skips nothing drafts nothing: its
    draft would cost what a pass of the target costs.
    """

    def __init__(
        self,
        target: Runner,
        vocab_size: int,
        attention: Attention = SELF_ATTENTION,
        reader: Runner | None = None,
    ) -> None:
        """attention: where the settings of a request name none for the draft. reader: the same model in another precision,
        which reads the copies of the target's entries; None: the target. Raises ConfigurationError when it cannot run
        sparse."""
        self.reader = reader or target
        self.reader.check_sparse()
        self.runner = target
        self.vocab_size = vocab_size
        self.attention = attention
        self.support = torch.arange(vocab_size, device=target.device)
        self._excerpt: Excerpt | None = None

    @property
    def least_prefix(self) -> int:
        """Tokens of the shortest text after which it drafts."""
        return self.attention.kept * self.attention.block + 1

    def seeing(self, attention: Attention) -> SelfDraft:
        """The same with another attention where none is named."""
        other = self.fork()
        other.attention = attention
        return other

    def forget(self) -> None:
        """Lets go of the last round's copy and of the cache that it was taken from."""
        self._excerpt = None

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Nothing of its own: the target has read the prompts."""

    def fork(self) -> SelfDraft:
        """A draft of the same target; `attach` gives it the cache to read."""
        other = copy.copy(self)
        other._excerpt = None
        return other

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Nothing of its own, as `start`."""

    def select(self, rows: list[int]) -> None:
        """The target's cache has lost the other rows."""

    def join(self, other: Draft, room: int = 0) -> None:
        """The target's cache has taken in the other rows."""
        self.forget()

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """Looks at the target's cache only."""

    def read(self, prompts: list[list[int]]) -> None:
        """Nothing of its own, as `start`."""

    @torch.inference_mode()
    def propose(self, request: Request) -> Proposal:
        """Draws from q, the sparse target's softmax at tau times the request's temperature, filtered as the target's p."""
        wanted, prefixes = request.settings.attention.on("draft"), request.prefixes
        attention = wanted if wanted.block else self.attention
        live = [limit > 0 and attention.skips(len(prefix)) for limit, prefix in zip(request.limits, prefixes, strict=True)]
        if not any(live):
            return Proposal.empty(len(prefixes), self.runner.device)
        last = torch.tensor([[prefix[-1]] for prefix in prefixes], device=self.runner.device)
        starts = [len(prefix) - 1 for prefix in prefixes]
        excerpt = self._begin(attention, starts)

        def law(column: int, drafted: Tensor) -> Tensor:
            tokens = drafted[:, -1:] if column else last
            return request.law(self._step(excerpt, tokens, starts, column), drafted)

        drawn = replace(request, limits=[limit if alive else 0 for limit, alive in zip(request.limits, live, strict=True)])
        return draw_round(drawn, law, live, self.runner.device)

    @torch.inference_mode()
    def along(self, prompt: list[int], output: list[int], features: Tensor | None, depths: int) -> list[Tensor]:
        """fp32 logits (len(output), V) of q at depths 1, 2, .. at each position of an output that the target has just read:
        what a round that began depth - 1 tokens earlier would draw from, on the text. Where no round of the output can have
        begun so early, of the earliest one."""
        text, first = [*prompt, *output], len(prompt) - 1
        laws = [torch.empty(len(output), self.vocab_size) for _ in range(depths)]
        for begin in range(0, len(output), _ROUNDS):
            starts = list(range(first + begin, min(first + begin + _ROUNDS, len(text) - 1)))
            excerpt = self._begin(self.attention, starts)
            for depth in range(min(depths, len(text) - 1 - starts[0])):
                tokens = torch.tensor([[text[min(start + depth, len(text) - 1)]] for start in starts])
                logits = self._step(excerpt, tokens.to(self.runner.device), starts, depth)[:, 0].cpu()
                place = starts[0] - first + depth
                inside = min(len(starts), len(output) - place)
                laws[depth][place : place + inside] = logits[:inside]
        for depth in range(1, depths):
            laws[depth][:depth] = laws[depth - 1][:depth]
        return laws

    def _begin(self, attention: Attention, starts: Sequence[int]) -> Excerpt:
        """A round of rows that have read starts[i] tokens. The copy of the last round is used again where it can be."""
        target, excerpt = self.runner, self._excerpt
        if excerpt is None or excerpt.source is not target.cache or excerpt.attention != attention:
            excerpt = self._excerpt = Excerpt(self.reader.check_sparse(), target.cache, attention)
        excerpt.begin(starts)
        return excerpt

    def _step(self, excerpt: Excerpt, tokens: Tensor, starts: Sequence[int], column: int) -> Tensor:
        """fp32 logits (batch, 1, V) after tokens (batch, 1), the round's `column`-th; the first one chooses the blocks."""
        slots = [start - shift + column for start, shift in zip(starts, excerpt.shifts, strict=True)]
        if column:
            logits = self.reader.logits_beside(excerpt.cache, tokens, slots, excerpt.shifts)
        else:
            logits = self.reader.logits_beside(excerpt.cache, tokens, slots, excerpt.shifts, excerpt.take)
        return logits[..., : self.vocab_size]


#: rounds that are drafted side by side along a text
_ROUNDS = 32


def attach(draft: Draft | None, target: Runner, settings: Settings) -> None:
    """Gives a self-draft the target whose cache it reads, and tells target and draft how their passes run.

    Raises ConfigurationError when the attention of the settings is on a side that the target or the draft does not have, or
    the target has no such compiler; EnvironmentProblem when that one is not installed.
    """
    if isinstance(draft, SelfDraft):
        if draft.reader is draft.runner:
            draft.reader = target
        draft.runner = target
        draft.forget()  # a cache that the target is about to replace must not be held
    elif settings.attention.side == "draft":
        raise ConfigurationError(
            f"attention.side is 'draft', and the draft is {type(draft).__name__}: only the draft 'self' reads the target's "
            f"cache in blocks; use --draft self, the side 'verify', or attention.block 0"
        )
    target.how = settings.passes
    if isinstance(own := getattr(draft, "runner", None), Runner) and own is not target:
        own.how = "graphs" if settings.cuda_graphs else "eager"
    if settings.compile != "off":
        target.check_compiler(settings.compile)
    if settings.attention.block:
        target.check_sparse()
