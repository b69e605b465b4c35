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
    ends, kept: (N, L) expected rounds that end and drafted tokens that are accepted at the position, summing to `rounds` and
    `accepted`. log_step: (N, L) log of the decoder's probability of the token over the target's own, given the prefix.
    """

    log_likelihood: Floats
    rounds: Floats
    accepted: Floats
    starts: Floats
    drafted: Floats
    drafted_at: Floats
    ends: Floats
    kept: Floats
    log_step: Floats


def forward(weights: StepWeights, draft_length: int) -> Recursion:
    """Runs the recursion for all texts at once; O(L * draft_length). A text of likelihood 0 gives -inf."""
    count, length = weights.mask.shape
    if 1 < weights.draftable.shape[2] < draft_length:
        raise ValueError(
            f"weights at {weights.draftable.shape[2]} depths for draft length {draft_length}; 1, or one for each"
        )
    state = np.zeros((count, draft_length + 1))
    state[:, 0] = 1.0
    log_likelihood = np.zeros(count)
    starts, drafted, ends, kept_at, log_step = (np.zeros((count, length)) for _ in range(5))
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
        kept_at[:, t] = gained * mask
        ends[:, t] = (drafting - gained + plain) * mask
        moved = np.empty_like(state)
        moved[:, 1:] = draft * weights.accepted[:, t, :depths]
        moved[:, 0] = (draft * weights.rejected[:, t, :depths]).sum(1) + plain * weights.plain[:, t]
        total = moved.sum(1)
        with np.errstate(divide="ignore"):
            log_total = np.where(mask, np.log(total), 0.0)
        ratio = np.maximum(total, 1e-300) / np.maximum(weights.plain[:, t], 1e-300)
        log_step[:, t] = np.where(mask, np.log(ratio), 0.0)
        log_likelihood += log_total
        dead = total <= 0  # the text is impossible; go on from a fresh round so that the counts stay finite
        moved[dead], total[dead] = np.eye(1, draft_length + 1), 1.0
        state = np.where(mask[:, None], moved / total[:, None], state)
        live = state[:, :draft_length]
    last = np.maximum(weights.mask.sum(1) - 1, 0)
    ends[np.arange(count), last] += 1.0 - state[:, 0]  # a text that ends inside an accepted block ends that round
    return Recursion(log_likelihood, ends.sum(1), kept_at.sum(1), starts, drafted, drafted_at, ends, kept_at, log_step)


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
