"""The lanes of a round: while the target verifies, the draft goes on as if all that it drafted were accepted.

- *Verify*: the target's pass.
- *Prefetch*: the next round's proposal, behind the drafted tokens and a guess at the token that follows them.
- *Verdict*: prunes and accepts behind the pass, in the pass's own lane: nothing could run beside it, since the next pass
  needs it. The next round keeps the prefetched proposal when it asks for exactly what was foreseen, else throws it away.

What is emitted is what is emitted without lanes, token by token (up to ties in floating point, since the draft may read its
tokens in other passes), so every law stays. A proposal is a function of the request and of the next numbers of the rows'
generators; the draft's cache only saves work. A round takes its draft's numbers and then its verdict's, whose count is known
before the target is done: the loop takes both before the prefetch, which draws from *copies* the very numbers that the next
round would. `Ahead.answers` asks whether request and generators are those that it answers, so a kept proposal is the one
that the draft would make then, by numbers that no verdict has looked at. The guess may look at anything: it decides which
prefix is tried, and not what is drafted behind it.

A batch keeps all of a proposal or nothing: one row that needs a draft of its own costs the passes that all of them need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from .drafting import Draft, ModelDraft, Proposal, Request
from .rows import Row
from .settings import Settings
from .stopping import cut
from .text_drafting import TextDraft

logger = logging.getLogger("lossytune")


def foreseeable(draft: Draft | None, settings: Settings) -> bool:
    """Whether rounds have a prefetch: lanes are on, and the draft is a model that looks at tokens alone.

    A feature head reads the target's hidden states of accepted tokens, and `self` its cache: they have to wait for the pass.
    Prompt lookup costs nothing that a lane could hide.
    """
    return settings.lanes and settings.source != "ngram" and isinstance(draft, ModelDraft | TextDraft)


@dataclass(frozen=True)
class Ahead:
    """A proposal that was made before its round. request: what it answers. steps: draft passes, the guess's among them.
    generators: of the request, each with its state before the proposal's numbers were drawn, and after."""

    request: Request
    proposal: Proposal
    steps: int
    generators: Sequence[tuple[Generator, Tensor, Tensor]]

    def answers(self, request: Request) -> bool:
        """Whether the draft, asked for this now, would propose just that."""
        untouched = all(torch.equal(generator.get_state(), before) for generator, before, _ in self.generators)
        return untouched and self.request == request

    def take(self) -> Proposal:
        """The proposal, with the generators as if it had been drawn now."""
        for generator, _, after in self.generators:
            generator.set_state(after)
        return self.proposal

    @property
    def tensors(self) -> list[Tensor]:
        """What the other lane will read."""
        return [tensor for tensor in (self.proposal.tokens, self.proposal.q) if tensor is not None]


def foresee(
    rows: Sequence[Row],
    proposal: Proposal,
    numbers: Tensor,
    request: Callable[[list[list[int]]], Request],
    ask: Callable[[Request], Proposal],
) -> Ahead | None:
    """The next round's proposal if all of this one is accepted. None where a row would end, or have no room for a draft.

    numbers: (rows, n) of the verdict, the last column for the token that follows. request(news): what the next round asks
    when each row has grown by `news`. An error is about a future that may not come: it is left to the round that meets it.
    """
    try:
        news = [new[:length] for new, length in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)]
        if max(request(news).limits) <= 0 or any(_full(row, new) for row, new in zip(rows, news, strict=True)):
            return None
        guess = ask(_guessing(request(news), numbers))
        if 0 in guess.lengths:
            return None
        news = [[*new, token] for new, (token, *_) in zip(news, guess.tokens.tolist(), strict=True)]
        if any(cut(row.output, new, row.job.stopping, row.job.tokenizer)[1] for row, new in zip(rows, news, strict=True)):
            return None
        return _drawn_ahead(request(news), ask, guess.steps)
    except Exception:
        logger.debug("a prefetch failed: the next round drafts for itself", exc_info=True)
        return None


def _full(row: Row, new: Sequence[int]) -> bool:
    """Whether the row may have no more than one token behind the one that follows `new`."""
    return len(row.output) + len(new) + 2 >= row.job.stopping.max_new_tokens


def _guessing(request: Request, numbers: Tensor) -> Request:
    """Asks for the token that the verdict will draw: at the target's own temperature, by the verdict's own number, so that
    the guess is right whenever draft and target agree well enough, and always where they are the same."""
    settings = request.settings.model_copy(update={"theta": 0.0, "tau": 1.0})
    return replace(request, limits=[1] * len(request.prefixes), settings=settings, numbers=numbers[:, -1:])


def _drawn_ahead(request: Request, ask: Callable[[Request], Proposal], steps: int) -> Ahead:
    """Draws from copies of the generators. Rows that share one share its copy."""
    own = {id(choice.generator): choice.generator for choice in request.choices}
    before = {key: generator.get_state() for key, generator in own.items()}
    copies = {key: generator.clone_state() for key, generator in own.items()}
    choices = [replace(choice, generator=copies[id(choice.generator)]) for choice in request.choices]
    drawn = ask(replace(request, choices=choices))
    states = [(generator, before[key], copies[key].get_state()) for key, generator in own.items()]
    return Ahead(request, drawn, steps + drawn.steps, states)


class Lanes(Protocol):
    """Runs a round's pass and the prefetch beside each other."""

    def beside(self, verify: Callable[[], Tensor], prefetch: Callable[[], Ahead | None]) -> tuple[Tensor, Ahead | None]:
        """verify() queues the target's pass and does not wait for it; prefetch() may wait for what it has queued itself."""


class InTurn:
    """One after the other, where the device has no streams: the same results, and no gain."""

    def beside(self, verify: Callable[[], Tensor], prefetch: Callable[[], Ahead | None]) -> tuple[Tensor, Ahead | None]:
        """See `Lanes`."""
        return verify(), prefetch()


class OnStreams:
    """The pass on the current stream, the prefetch on one of its own. One thread is enough: the pass is queued first.

    The prefetch begins when all that was queued before the pass is done, and all that is queued later, the verdict included,
    waits for both: the streams run apart for that long only, so neither reuses memory that the other still reads. Proposals
    are recorded on the stream that reads them as well, since they outlive the round. cuda: replaced in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)

    def beside(self, verify: Callable[[], Tensor], prefetch: Callable[[], Ahead | None]) -> tuple[Tensor, Ahead | None]:
        """See `Lanes`."""
        main = self._cuda.current_stream(self._device)
        ready = main.record_event()
        logits = verify()
        self._stream.wait_event(ready)
        try:
            with self._cuda.stream(self._stream):
                ahead = prefetch()
        finally:
            main.wait_event(self._stream.record_event())
        for tensor in ahead.tensors if ahead is not None else ():
            tensor.record_stream(main)
        return logits, ahead


def make_lanes(device: torch.device) -> Lanes:
    """The executor for a device."""
    return OnStreams(device) if device.type == "cuda" else InTurn()
