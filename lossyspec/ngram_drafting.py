"""Prompt lookup: what followed the last tokens when they occurred before. Needs no weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .drafting import Proposal, Request, StatelessDraft
from .settings import NgramSettings


def find_match(tokens: Sequence[int], settings: NgramSettings) -> tuple[int, int]:
    """Prompt lookup: (position after the match, match length) for the longest suffix of `tokens` that occurs before,
    the most recent occurrence first; (-1, 0) when none of at least `min_match` tokens does."""
    size = len(tokens)
    best, best_length = -1, settings.min_match - 1
    last = tokens[-1] if size else None
    for end in range(size - 2, -1, -1):  # `end`: index of the last token of an earlier occurrence
        if tokens[end] != last:
            continue
        length = 1
        while length < settings.max_match and length <= end and tokens[end - length] == tokens[size - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end + 1, length
            if length == settings.max_match:
                break
    return (best, best_length) if best >= 0 else (-1, 0)


def match_confidence(length: int) -> float:
    """Confidence of prompt lookup: n / (n + 1) after a match of n tokens. Its q is one-hot, so max q says nothing."""
    return length / (length + 1)


def ngram_chain(tokens: Sequence[int], settings: NgramSettings, limit: int) -> list[tuple[int, float]]:
    """What prompt lookup would draft after `tokens`: (token, confidence) pairs, each looked up anew on the prefix that
    ends with the drafted tokens, so that the draft at a position depends on the prefix there and on nothing else."""
    grown = list(tokens)
    chain: list[tuple[int, float]] = []
    while len(chain) < limit:
        place, length = find_match(grown, settings)
        if place < 0:
            break
        chain.append((grown[place], match_confidence(length)))
        grown.append(grown[place])
    return chain


class NgramDraft(StatelessDraft):
    """Prompt lookup over prompt and output (A. Saxena 2023; Yang et al., arXiv 2304.04487). No weights, one-hot q."""

    def __init__(self, settings: NgramSettings | None = None, device: torch.device | None = None) -> None:
        self.settings = settings or NgramSettings()
        self.device = device or torch.device("cpu")

    def propose(self, request: Request) -> Proposal:
        """Drafts while a match is found and its confidence is at least theta."""
        settings = request.settings.ngram or self.settings
        chains: list[list[int]] = []
        for prefix, limit in zip(request.prefixes, request.limits, strict=True):
            chain: list[int] = []
            for token, confidence in ngram_chain(prefix, settings, limit):
                if confidence < request.settings.theta:
                    break
                chain.append(token)
            chains.append(chain)
        return Proposal.of_chains(chains, self.device)
