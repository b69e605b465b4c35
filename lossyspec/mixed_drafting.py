"""Who drafts a round: the loaded draft, prompt lookup, or prompt lookup after long matches and the draft everywhere else.

The choice is made for each row as its round begins, from its prefix alone, so the law that a position is drawn from depends
on the prefix and on how far back the round began: the likelihood and the replay stay exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .drafting import Draft, Proposal, Request
from .ngram_drafting import NgramDraft, match_confidence
from .settings import NgramSettings, Settings


def least_match(settings: Settings) -> float:
    """The confidence of the shortest match after which a `mixed` round is prompt lookup, and goes on being so."""
    return match_confidence((settings.ngram or NgramSettings()).min_match)


def propose(draft: Draft, request: Request, vocab_size: int, device: torch.device) -> Proposal:
    """A round's proposal by `request.settings.source`. vocab_size, device: of the target."""
    settings = request.settings
    if settings.source == "draft" or isinstance(draft, NgramDraft):
        return draft.propose(request)
    lookup = NgramDraft(device=device)
    if settings.source == "ngram":
        return lookup.propose(request)
    # theta is about the draft's confidence; how long a match must be is min_match's to say
    looked = lookup.propose(replace(request, settings=settings.model_copy(update={"theta": 0.0})))
    rest = [0 if found else limit for found, limit in zip(looked.lengths, request.limits, strict=True)]
    if not any(rest):
        return looked
    drawn = draft.propose(replace(request, limits=rest))
    return _joined(looked, drawn, vocab_size) if any(looked.lengths) else drawn


def _joined(looked: Proposal, drawn: Proposal, size: int) -> Proposal:
    """Rows that looked up, and rows of the draft, as one proposal; q one-hot where it was lookup, over the draft's support,
    or all `size` tokens where that lacks one that was looked up."""
    width = max(looked.tokens.shape[1], drawn.tokens.shape[1])
    rows = torch.tensor([length > 0 for length in looked.lengths], device=looked.tokens.device)
    tokens = torch.where(rows[:, None], _wide(looked.tokens, width), _wide(drawn.tokens, width))
    lengths = [mine or other for mine, other in zip(looked.lengths, drawn.lengths, strict=True)]
    if drawn.q is None:  # greedy
        return Proposal(tokens, lengths, None, drawn.steps)
    q, places, support = drawn.q, _among(drawn.support, tokens, rows), drawn.support
    if places is None:  # a token that the draft never proposes
        full = drawn.on_all(size).q
        assert full is not None
        q, places, support = full, tokens, None
    one_hot = torch.zeros(*tokens.shape, q.shape[-1], dtype=q.dtype, device=q.device).scatter_(-1, places[..., None], 1.0)
    missing = width - q.shape[1]
    q = torch.cat([q, one_hot[:, width - missing :]], 1) if missing else q
    return Proposal(tokens, lengths, torch.where(rows[:, None, None], one_hot, q), drawn.steps, support)


def _among(support: Tensor | None, tokens: Tensor, rows: Tensor) -> Tensor | None:
    """The places of tokens (rows, n) in a support; None unless those of the marked rows are all in it."""
    if support is None:
        return None
    places = torch.searchsorted(support, tokens).clamp_max_(len(support) - 1)
    return places if bool((support[places] == tokens)[rows].all()) else None


def _wide(tokens: Tensor, width: int) -> Tensor:
    return F.pad(tokens, (0, width - tokens.shape[1]))
