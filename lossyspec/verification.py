"""One round's verdict: how many drafted tokens of each row stay, and the token that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance import (
    Verification,
    accept_one_hot,
    capped_ratio,
    entropy,
    greedy_accept,
    relaxed_variation,
    verify,
)
from .drafting import Proposal
from .native import laws as native
from .sampling import draw
from .settings import Settings


class Verdict(NamedTuple):
    """Of each row: how many drafted tokens stay, and the token after them.

    variation: (batch, width) TV between the law that the rule gives a drafted position and the target's p; only those that
    were reached count, the one that was rejected among them.
    """

    accepted: list[int]
    following: list[int]
    variation: Tensor

    def emitted(self, tokens: list[list[int]]) -> list[list[int]]:
        """What each row emits of its drafted tokens, and what follows them."""
        ends = zip(tokens, self.accepted, self.following, strict=True)
        return [[*drafted[:count], last] for drafted, count, last in ends]


def _compact(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """p and q on the draft's support and one more token that stands for all others, on which q is 0.

    Each rule but `typical` sees the others through their total p alone, so its verdict is the same.
    """
    assert proposal.q is not None and proposal.support is not None
    inside = p[..., proposal.support]
    outside = (p.sum(-1) - inside.sum(-1)).clamp_min(0.0)
    return torch.cat([inside, outside.unsqueeze(-1)], -1), torch.nn.functional.pad(proposal.q, (0, 1))


def _place(proposal: Proposal) -> Tensor:
    """Where q holds the drafted tokens."""
    if proposal.support is None:
        return proposal.tokens
    return torch.searchsorted(proposal.support, proposal.tokens.contiguous())  # a slice when theta cut all rows short


def _at(laws: Tensor, tokens: Tensor) -> Tensor:
    """(batch, width) of laws (batch, width, V)."""
    return laws.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _sampled(p: Tensor, proposal: Proposal, rule: str, alpha: Tensor) -> tuple[Tensor, Tensor, Verification]:
    """a(x) at each drafted token, TV(pi, p) there, and the rule's answer, for a draft that sampled from q."""
    assert proposal.q is not None
    if rule == "exact":  # which looks at the drafted tokens alone
        place = _place(proposal)
        chance = capped_ratio(_at(p, proposal.tokens), _at(proposal.q, place))
        one = torch.ones_like(chance)
        return chance, torch.zeros_like(chance), Verification(chance, one, one)
    if rule == "typical":
        proposal = proposal.on_all(p.shape[-1])
    assert proposal.q is not None
    target, draft, place = p, proposal.q, proposal.tokens
    if proposal.support is not None:
        target, draft = _compact(p, proposal)
        place = _place(proposal)
    verification = verify(rule, target, draft, alpha)
    chance = _at(verification.accept, place)
    return chance, relaxed_variation(rule, target, draft, verification), verification


def _after_rejection(
    p: Tensor, proposal: Proposal, verification: Verification | None, from_p: Tensor, place: Tensor
) -> Tensor:
    """The law after a rejection at `place` of each row, (batch, V), up to a factor. from_p: (batch, width) where it is p."""
    rows = torch.arange(p.shape[0], device=p.device)
    here = p[rows, place]
    if verification is None:
        rest = here.scatter(-1, proposal.tokens[rows, place].unsqueeze(-1), 0.0)
        rest = torch.where(from_p[rows, place].unsqueeze(-1), here, rest)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, here)
    assert proposal.q is not None
    q, factor = proposal.q[rows, place], verification.residual_draft[rows, place].unsqueeze(-1)
    rest = here * verification.residual_target[rows, place].unsqueeze(-1)
    if proposal.support is None:
        rest.sub_(q * factor)
    else:
        rest.scatter_add_(-1, proposal.support.expand_as(q), q * -factor)  # index_add_ takes ten times as long
    rest.clamp_min_(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, here)  # p = q, and rounding: see `acceptance.residual`


def judge(
    p: Tensor, proposal: Proposal, settings: Settings, alpha: Tensor, uniforms: Tensor, greedy: bool | Sequence[bool]
) -> Verdict:
    """The verdict of a round.

    p: (batch, width + 1, V) of the target. alpha: (batch, width), at most that of the settings. uniforms:
    (batch, width + 1), each its own number; the last column draws the token after the accepted ones. greedy: of all rows,
    or of each. The accepted count never passes `proposal.lengths`.
    """
    if isinstance(greedy, bool):
        return _judge(p, proposal, settings, alpha, uniforms, greedy)
    if len(set(greedy)) == 1:
        return _judge(p, proposal, settings, alpha, uniforms, greedy[0])
    accepted, following, variation = [0] * len(greedy), [0] * len(greedy), torch.zeros_like(alpha)
    for kind in (False, True):
        rows = [row for row, own in enumerate(greedy) if own is kind]
        index = torch.tensor(rows, device=p.device)
        verdict = _judge(p[index], proposal.of_rows(rows), settings, alpha[index], uniforms[index], kind)
        variation[index] = verdict.variation
        for row, count, token in zip(rows, verdict.accepted, verdict.following, strict=True):
            accepted[row], following[row] = count, token
    return Verdict(accepted, following, variation)


def _judge(p: Tensor, proposal: Proposal, settings: Settings, alpha: Tensor, uniforms: Tensor, greedy: bool) -> Verdict:
    width = proposal.tokens.shape[1]
    if width == 0:
        following = p[:, 0]
        token = following.argmax(-1) if greedy else draw(following, uniforms[:, -1])
        return Verdict([0] * p.shape[0], token.tolist(), p.new_zeros(p.shape[0], 0))
    rule = settings.rule if settings.relaxed else "exact"
    if not greedy and rule in native.RULES and native.takes(p):
        return Verdict(
            *native.judge(rule, p, proposal.q, proposal.support, proposal.tokens, proposal.lengths, alpha, uniforms)
        )
    lengths = torch.tensor(proposal.lengths, device=p.device)
    inside = torch.arange(width, device=p.device) < lengths[:, None]
    drafted, verification = p[:, :width], None
    if greedy:
        kept = greedy_accept(drafted, proposal.tokens, alpha if settings.rule != "exact" else torch.zeros_like(alpha))
        variation = (kept & (proposal.tokens != drafted.argmax(-1))).to(p.dtype)  # both laws are one token
    elif proposal.q is None:
        chosen, typical = _at(drafted, proposal.tokens), settings.rule == "typical"
        chance = accept_one_hot(settings.rule, chosen, entropy(drafted) if typical else None, alpha)
        variation = torch.where(alpha > 0, chance * (1 - chosen), 0.0) if typical else chance - chosen
    else:
        chance, variation, verification = _sampled(drafted, proposal, rule, alpha)
    if not greedy:
        kept = uniforms[:, :width] < chance
    accepted = (kept & inside).long().cumprod(-1).sum(-1)
    following = p[torch.arange(p.shape[0], device=p.device), accepted]
    if greedy:
        return Verdict(accepted.tolist(), following.argmax(-1).tolist(), variation)
    rejected = accepted < lengths
    if p.device.type != "cpu" or bool(rejected.any()):  # elsewhere, to ask would be to wait
        from_p = (alpha > 0) if settings.rule == "typical" else torch.zeros_like(alpha, dtype=torch.bool)
        rest = _after_rejection(drafted, proposal, verification, from_p, accepted.clamp_max(width - 1))
        following = torch.where(rejected.unsqueeze(-1), rest, following)
    return Verdict(accepted.tolist(), draw(following, uniforms[:, -1]).tolist(), variation)
