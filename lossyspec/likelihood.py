"""Exact likelihood of the lossy decoder on given text, by a forward recursion over the tokens drafted so far in a round.

At a position with prefix y_<t and j drafted tokens accepted in the current round:
- a drafted position (j < draft_length, and the draft does not stop here): y_t is accepted with q(y) a(y), and the round
  goes on with j + 1; or it follows a rejection with (1 - sum q a) s(y), and a new round begins with j = 0;
- otherwise y_t is the token after the accepted ones, drawn from p(y), and a new round begins.
The same states, normalised, are the distribution of j given the prefix, which gives expected rounds and acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .acceptance import residual, verify

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepWeights:
    """What each position of each text weighs. N texts of at most L tokens; D is 1, or the depth j of each draft.

    accepted: (N, L, D) q(y) a(y). rejected: (N, L, D) (1 - sum q a) s(y). acceptance: (N, L, D) sum q a.
    draftable: (N, L, D) whether the draft proposes here. plain: (N, L) p(y). mask: (N, L) real tokens, from the left.
    """

    accepted: Floats
    rejected: Floats
    acceptance: Floats
    draftable: Flags
    plain: Floats
    mask: Flags


@dataclass(frozen=True)
class Recursion:
    """log_likelihood: (N,) nats. rounds: (N,) expected rounds. accepted: (N,) expected accepted tokens.

    starts: (N, L) probability that a round begins at the position, given the prefix. drafted: (N, L) probability that
    the position is a drafted one, where the relaxed law rules; drafted_at: (N, L, D) the same by depth of the weights.
    """

    log_likelihood: Floats
    rounds: Floats
    accepted: Floats
    starts: Floats
    drafted: Floats
    drafted_at: Floats


def forward(weights: StepWeights, draft_length: int) -> Recursion:
    """Runs the recursion for all texts at once; O(L * draft_length). A text of likelihood 0 gives -inf."""
    count, length = weights.mask.shape
    state = np.zeros((count, draft_length + 1))
    state[:, 0] = 1.0
    log_likelihood, rounds, accepted = np.zeros(count), np.zeros(count), np.zeros(count)
    starts, drafted = np.zeros((count, length)), np.zeros((count, length))
    depths = min(weights.draftable.shape[2], draft_length)
    drafted_at = np.zeros((count, length, max(depths, 1)))
    live = state[:, :draft_length]
    for t in range(length):
        mask = weights.mask[:, t]
        draft = live * weights.draftable[:, t, :depths] if draft_length else live
        drafting = draft.sum(1)
        plain = 1.0 - drafting
        starts[:, t], drafted[:, t] = state[:, 0] * mask, drafting * mask
        drafted_at[:, t] = (draft if depths > 1 else drafting[:, None]) * mask[:, None]
        kept = draft * weights.acceptance[:, t, :depths]
        gained = kept.sum(1)
        accepted += gained * mask
        rounds += (drafting - gained + plain) * mask
        moved = np.empty_like(state)
        moved[:, 1:] = draft * weights.accepted[:, t, :depths]
        moved[:, 0] = (draft * weights.rejected[:, t, :depths]).sum(1) + plain * weights.plain[:, t]
        total = moved.sum(1)
        with np.errstate(divide="ignore"):
            log_likelihood += np.where(mask, np.log(total), 0.0)
        dead = total <= 0  # the text is impossible; go on from a fresh round so that the counts stay finite
        moved[dead], total[dead] = np.eye(1, draft_length + 1), 1.0
        state = np.where(mask[:, None], moved / total[:, None], state)
        live = state[:, :draft_length]
    rounds += 1.0 - state[:, 0]  # a text that ends inside an accepted block ends that round
    return Recursion(log_likelihood, rounds, accepted, starts, drafted, drafted_at)


def dense_weights(
    target: Tensor, draft: Tensor, tokens: Tensor, rule: str, alpha: Tensor, draftable: Tensor, mask: Tensor
) -> StepWeights:
    """Weights from full distributions, for any rule.

    target: (N, L, V) p at each position of `tokens` (N, L). draft: (N, L, D, V) q at each depth (D = 1: the same at all).
    alpha: (N, L). draftable: (N, L, D). mask: (N, L). Probabilities in fp64 keep the sum over all texts at 1 to 1e-12.
    """
    depths = draft.shape[2]
    p = target.unsqueeze(2).expand_as(draft)
    verification = verify(rule, p, draft, alpha.unsqueeze(-1).expand(*alpha.shape, depths))
    kept = draft * verification.accept
    gained = kept.sum(-1)
    index = tokens[:, :, None, None].expand(*tokens.shape, depths, 1)
    after = residual(p, draft, verification).gather(-1, index).squeeze(-1)
    return StepWeights(
        kept.gather(-1, index).squeeze(-1).numpy(),
        ((1 - gained) * after).numpy(),
        gained.numpy(),
        draftable.numpy(),
        target.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).numpy(),
        mask.numpy(),
    )


def bootstrap_ratio(log_ratio: Floats, tokens: Floats, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of exp(sum of `log_ratio` over sum of `tokens`), resampling whole texts (paired)."""
    picks = np.random.default_rng(seed).integers(0, len(tokens), (resamples, len(tokens)))
    values = np.exp(log_ratio[picks].sum(1) / tokens[picks].sum(1))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


__all__ = ["Recursion", "StepWeights", "bootstrap_ratio", "dense_weights", "forward"]
