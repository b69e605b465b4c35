"""One round's verdict: how many drafted tokens of each row stay, and the token that follows them."""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import Verification, accept_one_hot, entropy, greedy_accept, residual, verify
from .drafting import Proposal
from .sampling import draw
from .settings import Settings


def _compact(p: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """p and q on the draft's support and one more token that stands for all others, on which q is 0.

    Each rule but `typical` sees the others through their total p alone, so its verdict is the same.
    """
    assert proposal.q is not None and proposal.support is not None
    inside = p[..., proposal.support]
    outside = (p.sum(-1) - inside.sum(-1)).clamp_min(0.0)
    return torch.cat([inside, outside.unsqueeze(-1)], -1), torch.nn.functional.pad(proposal.q, (0, 1))


def _sampled_chances(p: Tensor, proposal: Proposal, rule: str, alpha: Tensor) -> tuple[Tensor, Verification]:
    """a(x) at each drafted token, and the rule's answer, for a draft that sampled from q."""
    assert proposal.q is not None
    if proposal.support is None:
        verification = verify(rule, p, proposal.q, alpha)
        return verification.accept.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1), verification
    if rule == "typical":
        return _sampled_chances(p, proposal.on_all(p.shape[-1]), rule, alpha)
    verification = verify(rule, *_compact(p, proposal), alpha)
    place = torch.searchsorted(proposal.support, proposal.tokens.contiguous())  # a slice when theta cut all rows short
    return verification.accept.gather(-1, place.unsqueeze(-1)).squeeze(-1), verification


def _after_rejection(
    p: Tensor, proposal: Proposal, verification: Verification | None, from_p: Tensor, place: Tensor
) -> Tensor:
    """The law after a rejection at `place` of each row: (batch, V). from_p: (batch, width) where that law is p itself."""
    rows = torch.arange(p.shape[0], device=p.device)
    here = p[rows, place]
    if verification is None:
        rest = here.scatter(-1, proposal.tokens[rows, place].unsqueeze(-1), 0.0)
        rest = torch.where(from_p[rows, place].unsqueeze(-1), here, rest)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, here)
    assert proposal.q is not None
    q = proposal.q[rows, place]
    if proposal.support is not None:
        q = q.new_zeros(p.shape[0], p.shape[-1]).index_copy_(-1, proposal.support, q)
    factors = verification.residual_target[rows, place], verification.residual_draft[rows, place]
    return residual(here, q, Verification(q, *factors))


def judge(
    p: Tensor, proposal: Proposal, settings: Settings, alpha: Tensor, uniforms: Tensor, greedy: bool
) -> tuple[list[int], list[int]]:
    """Accepted counts and next tokens of each row.

    p: (batch, width + 1, V) of the target. alpha: (batch, width). uniforms: (batch, width + 1), each its own number;
    the last column draws the token after the accepted ones. The accepted count never passes `proposal.lengths`.
    """
    width = proposal.tokens.shape[1]
    if width == 0:
        following = p[:, 0]
        token = following.argmax(-1) if greedy else draw(following, uniforms[:, -1])
        return [0] * p.shape[0], token.tolist()
    lengths = torch.tensor(proposal.lengths, device=p.device)
    inside = torch.arange(width, device=p.device) < lengths[:, None]
    drafted, verification = p[:, :width], None
    if greedy:
        kept = greedy_accept(drafted, proposal.tokens, alpha if settings.rule != "exact" else torch.zeros_like(alpha))
    else:
        if proposal.q is None:
            chosen = drafted.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
            chance = accept_one_hot(settings.rule, chosen, entropy(drafted) if settings.rule == "typical" else None, alpha)
        else:
            chance, verification = _sampled_chances(drafted, proposal, settings.rule, alpha)
        kept = uniforms[:, :width] < chance
    accepted = (kept & inside).long().cumprod(-1).sum(-1)
    following = p[torch.arange(p.shape[0], device=p.device), accepted]
    if greedy:
        return accepted.tolist(), following.argmax(-1).tolist()
    from_p = (alpha > 0) if settings.rule == "typical" else torch.zeros_like(alpha, dtype=torch.bool)
    rest = _after_rejection(drafted, proposal, verification, from_p, accepted.clamp_max(width - 1))
    following = torch.where((accepted == lengths).unsqueeze(-1), following, rest)
    return accepted.tolist(), draw(following, uniforms[:, -1]).tolist()
