"""One round's verdict: how many drafted tokens of each row stay, and the token that follows them."""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import accept_one_hot, entropy, greedy_accept, residual, verify
from .drafting import Proposal
from .sampling import draw
from .settings import Settings


def _chances(p: Tensor, proposal: Proposal, rule: str, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """a(x) at each drafted token, (batch, width), and the law after a rejection there, (batch, width, V)."""
    tokens = proposal.tokens.unsqueeze(-1)
    if proposal.q is None:
        chosen = p.gather(-1, tokens).squeeze(-1)
        surprise = entropy(p) if rule == "typical" else None
        rest = p if rule == "typical" else p.scatter(-1, tokens, 0.0)
        if rule == "typical":  # alpha = 0 is exact there too
            rest = torch.where((alpha > 0).unsqueeze(-1), rest, p.scatter(-1, tokens, 0.0))
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
        return accept_one_hot(rule, chosen, surprise, alpha), rest
    verification = verify(rule, p, proposal.q, alpha)
    return verification.accept.gather(-1, tokens).squeeze(-1), residual(p, proposal.q, verification)


def judge(
    p: Tensor, proposal: Proposal, settings: Settings, alpha: Tensor, uniforms: Tensor, greedy: bool
) -> tuple[list[int], list[int]]:
    """Accepted counts and next tokens of each row.

    p: (batch, width + 1, V) of the target. alpha: (batch, width). uniforms: (batch, width + 1), each its own number;
    the last column draws the token after the accepted ones. The accepted count never passes `proposal.lengths`.
    """
    width = proposal.tokens.shape[1]
    rows = torch.arange(p.shape[0], device=p.device)
    lengths = torch.tensor(proposal.lengths, device=p.device)
    if width == 0:
        following = p[:, 0]
        accepted = torch.zeros_like(lengths)
    else:
        inside = torch.arange(width, device=p.device) < lengths[:, None]
        if greedy:
            relax = alpha if settings.rule != "exact" else torch.zeros_like(alpha)
            kept = greedy_accept(p[:, :width], proposal.tokens, relax)
            rest = p[:, :width]
        else:
            chance, rest = _chances(p[:, :width], proposal, settings.rule, alpha)
            kept = uniforms[:, :width] < chance
        accepted = (kept & inside).long().cumprod(-1).sum(-1)
        bonus = (accepted == lengths).unsqueeze(-1)
        following = torch.where(bonus, p[rows, accepted], rest[rows, accepted.clamp_max(width - 1)])
    token = following.argmax(-1) if greedy else draw(following, uniforms[:, -1])
    return accepted.tolist(), token.tolist()
