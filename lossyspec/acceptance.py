"""Acceptance rules: pure functions over rows of (target p, draft q, alpha).

A rule accepts the drafted token x with probability a(x) and draws from s on a rejection, so the emitted law is
pi = q a + (1 - sum q a) s. At alpha = 0 every rule is `exact` (Leviathan et al. 2023, arXiv 2211.17192), hence lossless.

Shapes: `target` and `draft` are (..., V) probabilities in fp32 or fp64, each row summing to 1; `alpha` is (...).
A deterministic draft (n-gram, argmax) has a one-hot q; `OneHot` holds its token instead of V numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigurationError, nearest
from .settings import RULES

#: Newton steps on a piecewise-linear monotone function end by themselves; this bound is never met in practice
_MAX_STEPS = 64


@dataclass(frozen=True)
class Verification:
    """What a rule says at each position.

    accept: (..., V) for a dense draft, (...,) for a one-hot draft (at its token): a(x) in [0, 1].
    residual_target, residual_draft: (...,) factors with s = normalise(residual_target * p - residual_draft * q)+;
    where that sums to 0, s = p.
    """

    accept: Tensor
    residual_target: Tensor
    residual_draft: Tensor


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """TV distance of each row, in [0, 1]; shape (...)."""
    return 0.5 * (target - draft).abs().sum(-1)


def _mass(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum(-1)


def _target_factor(target: Tensor, draft: Tensor, excess: Tensor) -> Tensor:
    """f = 1/lo >= 1 with sum(q - f p)+ = excess. Newton from the left on a convex, falling, piecewise-linear function:
    it never passes the root and ends when its set of active tokens stops changing, so the result is exact.

    Where q has more than `excess` on tokens with p = 0, no finite f exists: the largest ratio q/p over p > 0 is returned.
    """
    factor = torch.ones_like(excess)
    for _ in range(_MAX_STEPS):
        active = draft > factor.unsqueeze(-1) * target
        slope = _mass(target, active)
        step = (_mass(draft, active) - excess) / slope
        moved = torch.where(slope > 0, torch.maximum(step, factor), factor)
        if torch.equal(moved, factor):
            break
        factor = moved
    return factor


def _draft_floor(target: Tensor, draft: Tensor, excess: Tensor) -> Tensor:
    """m = 1/hi <= 1 with sum(m p - q)+ = excess; Newton from the right on a convex, rising function."""
    factor = torch.ones_like(excess)
    for _ in range(_MAX_STEPS):
        active = factor.unsqueeze(-1) * target > draft
        slope = _mass(target, active)
        step = (_mass(draft, active) + excess) / slope
        moved = torch.where(slope > 0, torch.minimum(step, factor), factor)
        if torch.equal(moved, factor):
            break
        factor = moved
    return factor


def _impossible(target: Tensor, draft: Tensor) -> Tensor:
    """Draft mass on tokens that the target excludes: it can never be accepted."""
    return _mass(draft, target <= 0)


def clip_bounds(target: Tensor, draft: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(1/lo, 1/hi) of the `optimal` rule: sum(q - p/lo)+ = sum(p/hi - q)+ = (1 - alpha) TV.

    Source: V. Tran-Thien 2023, "A provably optimal lossy variant of speculative decoding"; arXiv 2609.30474.
    """
    excess = torch.maximum((1 - alpha) * total_variation(target, draft), _impossible(target, draft))
    return _target_factor(target, draft, excess), _draft_floor(target, draft, excess)


def price(alpha: Tensor) -> Tensor:
    """kappa = alpha / (1 - alpha): the price of `priced`. With it, pi >= (1 - alpha) p holds there as well."""
    return alpha / (1 - alpha).clamp_min(1e-12)


def _priced_step(p: Tensor, q: Tensor, lo: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """(gap, root) at `lo`: gap = sum(q - p/lo)+ - sum(p/(lo + kappa) - q)+, rising in lo; root = its zero if no token
    changed sides: the positive root of (Qc + Qf) lo (lo + kappa) - Pc (lo + kappa) - Pf lo = 0."""
    hi = lo + kappa
    capped, floored = q * lo.unsqueeze(-1) > p, p > q * hi.unsqueeze(-1)
    p_cap, p_floor = _mass(p, capped), _mass(p, floored)
    a = _mass(q, capped) + _mass(q, floored)
    gap = a - p_cap / lo - p_floor / hi
    b = a * kappa - p_cap - p_floor
    spread = (b * b + 4 * a * p_cap * kappa).sqrt()
    # the form without cancellation, by the sign of b
    root = torch.where(b > 0, 2 * p_cap * kappa / (spread + b), (spread - b) / (2 * a))
    return gap, root


def priced_bounds(target: Tensor, draft: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(1/lo, 1/hi) of the `priced` rule: hi - lo = kappa at every position, and sum(q - p/lo)+ = sum(p/hi - q)+.

    An active-set step (exact between two breakpoints) inside a bracket, which halves in log lo when the step leaves it.
    """
    p, q = target.double(), draft.double()
    kappa = price(alpha).double()
    floor = _impossible(p, q)
    ratio = torch.where((p > 0) & (q > 0), p / q.clamp_min(1e-300), 1.0).amin(-1)
    low, high = torch.maximum(1 - kappa, ratio).clamp(1e-300, 1.0), torch.ones_like(kappa)
    lo, done = high.clone(), kappa <= 0
    for _ in range(_MAX_STEPS):
        gap, root = _priced_step(p, q, lo, kappa)
        done = done | (gap.abs() <= 1e-15) | ((root - lo).abs() <= 1e-14 * lo) | (high - low <= 1e-15 * high)
        if bool(done.all()):
            break
        high, low = torch.where(gap > 0, lo, high), torch.where(gap > 0, low, lo)
        inside = (root > low) & (root < high)
        lo = torch.where(done, lo, torch.where(inside, root, low.sqrt() * high.sqrt()))  # no underflow
    cap, under = 1 / lo, 1 / (lo + kappa).clamp_min(1.0)
    # where p excludes tokens of q, their mass must go somewhere: no side may hold less, as for `optimal`
    forced = (under.unsqueeze(-1) * p - q).clamp_min(0).sum(-1) < floor
    if bool(forced.any()):
        cap = torch.where(forced, _target_factor(p, q, floor), cap)
        under = torch.where(forced, _draft_floor(p, q, floor), under)
    return cap.to(target.dtype), under.to(target.dtype)


def jensen_shannon(target: Tensor, draft: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each row in nats: symmetric, between 0 and ln 2."""
    middle = 0.5 * (target + draft)
    left = torch.xlogy(target, target / middle.clamp_min(1e-45)).sum(-1)
    right = torch.xlogy(draft, draft / middle.clamp_min(1e-45)).sum(-1)
    return (0.5 * (left + right)).clamp(0.0, math.log(2.0))


def entropy(target: Tensor) -> Tensor:
    """Shannon entropy of each row in nats."""
    return -torch.xlogy(target, target).sum(-1)


def typical_threshold(target: Tensor, alpha: Tensor) -> Tensor:
    """min(eps, delta exp(-H)) with eps = (1 - alpha)^2 and delta = 1 - alpha, so delta = sqrt(eps) as in Medusa
    (arXiv 2401.10774); alpha = 0.7 gives its published eps = 0.09, delta = 0.3."""
    strict = 1 - alpha
    return torch.minimum(strict * strict, strict * torch.exp(-entropy(target)))


def capped_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """min(1, n/d), with 0/d = 0 and n/0 = 1 for n > 0: a(x) of `exact` at n = p(x), d = q(x)."""
    return torch.where(numerator >= denominator, (numerator > 0).to(numerator.dtype), numerator / denominator)


def _exact(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    one = torch.ones_like(alpha)
    return Verification(capped_ratio(target, draft), one, one)


def _mixture(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    share = alpha.unsqueeze(-1)
    accept = torch.where(target > 0, capped_ratio((1 - share) * target + share * draft, draft), 0.0)
    one = torch.ones_like(alpha)
    return Verification(accept, one, one)


def _clipped(target: Tensor, draft: Tensor, bounds: tuple[Tensor, Tensor]) -> Verification:
    factor, floor = bounds
    factor = factor.clamp_max(torch.finfo(factor.dtype).max)  # q/p of a subnormal p overflows, and 0 * inf is NaN
    return Verification(capped_ratio(target * factor.unsqueeze(-1), draft), floor, torch.ones_like(floor))


def _optimal(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    return _clipped(target, draft, clip_bounds(target, draft, alpha))


def _priced(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    return _clipped(target, draft, priced_bounds(target, draft, alpha))


def _lenience(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    one = torch.ones_like(alpha)
    return Verification(capped_ratio(target, (1 - alpha).unsqueeze(-1) * draft), one, one)


def _baseline(accepts: Tensor, target: Tensor, draft: Tensor, fallback_exact: bool) -> Verification:
    """A yes/no rule. On a rejection: drawn from p; or, with `fallback_exact`, the exact rule decides instead."""
    one = torch.ones_like(accepts[..., 0], dtype=target.dtype)
    yes = (accepts & (target > 0)).to(target.dtype)
    if fallback_exact:
        return Verification(torch.maximum(yes, capped_ratio(target, draft)), one, one)
    return Verification(yes, one, torch.zeros_like(one))


def _typical(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    accepts = target > typical_threshold(target, alpha).unsqueeze(-1)
    return _baseline(accepts, target, draft, fallback_exact=False)


def _fuzzy(target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    near = jensen_shannon(target, draft) <= alpha * math.log(2.0)
    return _baseline(near.unsqueeze(-1).expand_as(target), target, draft, fallback_exact=True)


_RULES = {
    "exact": _exact,
    "mixture": _mixture,
    "optimal": _optimal,
    "priced": _priced,
    "lenience": _lenience,
    "typical": _typical,
    "fuzzy": _fuzzy,
}


def check_rule(rule: str) -> None:
    """Raises ConfigurationError for an unknown rule."""
    if rule not in _RULES:
        raise ConfigurationError(f"rule is {rule!r}; allowed: {', '.join(RULES)}.{nearest(rule, RULES)}")


def verify(rule: str, target: Tensor, draft: Tensor, alpha: Tensor) -> Verification:
    """Applies a rule to dense rows. Rows with alpha = 0 get `exact`, whatever the rule."""
    check_rule(rule)
    result = _RULES[rule](target, draft, alpha)
    if rule in ("typical", "fuzzy") and bool((alpha == 0).any()):
        strict, zero = _exact(target, draft, alpha), alpha == 0
        result = Verification(
            torch.where(zero.unsqueeze(-1), strict.accept, result.accept),
            torch.where(zero, strict.residual_target, result.residual_target),
            torch.where(zero, strict.residual_draft, result.residual_draft),
        )
    return result


def residual(target: Tensor, draft: Tensor, verification: Verification) -> Tensor:
    """s, normalised; (..., V). Where the residual sums to 0 (p = q, and rounding), s = p."""
    rest = (
        verification.residual_target.unsqueeze(-1) * target - verification.residual_draft.unsqueeze(-1) * draft
    ).clamp_min(0.0)
    total = rest.sum(-1, keepdim=True)
    some = total > 0
    return torch.where(some, rest / torch.where(some, total, 1.0), target)


def emitted_law(rule: str, target: Tensor, draft: Tensor, alpha: Tensor) -> Tensor:
    """pi = q a + (1 - sum q a) s in closed form; (..., V)."""
    verification = verify(rule, target, draft, alpha)
    kept = draft * verification.accept
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_min(0.0) * residual(target, draft, verification)


def relaxed_variation(rule: str, target: Tensor, draft: Tensor, verification: Verification) -> Tensor:
    """TV(pi, p) of each row in closed form, (...,), for `target` and `draft` as they were verified: sum (q a - p)+, since no
    rule's residual lifts a token over p; for `typical`, where s is p itself, sum (q a - R p)+ with R = sum q a."""
    kept = draft * verification.accept
    if rule == "typical":
        share = torch.where(verification.residual_draft > 0, 1.0, kept.sum(-1))  # 1: a row with alpha 0, which is exact
        return (kept - share.unsqueeze(-1) * target).clamp_min_(0.0).sum(-1)
    return kept.sub_(target).clamp_min_(0.0).sum(-1)


def accept_one_hot(rule: str, target_probability: Tensor, target_entropy: Tensor | None, alpha: Tensor) -> Tensor:
    """a(x) of a one-hot draft in closed form, from p(x) alone; same shape as `target_probability`.

    `target_entropy` is needed by `typical` only. The residual is p without x for every rule but `typical`, where it is p.
    """
    check_rule(rule)
    p = target_probability
    if rule == "exact":
        accept = p
    elif rule in ("mixture", "optimal"):  # the clip of a one-hot q is the mixture
        accept = p + alpha * (1 - p)
    elif rule == "priced":
        kappa = price(alpha)
        drop = 1 - kappa
        root = (drop * drop + 4 * p * kappa).sqrt()
        lo = torch.where(drop >= 0, 0.5 * (drop + root), 2 * p * kappa / (root - drop).clamp_min(1e-30))
        accept = capped_ratio(p, lo)
    elif rule == "lenience":
        accept = capped_ratio(p, 1 - alpha)
    elif rule == "typical":
        if target_entropy is None:
            raise ValueError("the typical rule needs target_entropy")
        strict = 1 - alpha
        accept = (p > torch.minimum(strict * strict, strict * torch.exp(-target_entropy))).to(p.dtype)
    else:  # fuzzy: JS of p and a one-hot at x depends on p(x) alone
        divergence = 0.5 * (torch.xlogy(p, 2 * p / (1 + p)) + (1 - p) * math.log(2.0) + torch.log(2 / (1 + p)))
        accept = torch.where(divergence <= alpha * math.log(2.0), 1.0, p)
    accept = torch.where(alpha > 0, accept, p)
    return torch.where(p > 0, accept, 0.0)


def greedy_accept(target: Tensor, tokens: Tensor, alpha: Tensor) -> Tensor:
    """Temperature 0: accept the argmax, and with alpha > 0 any token with p(x) >= (1 - alpha) max p.

    target: (..., V) the softmax of the raw logits; tokens: (...) drafted. Returns a boolean (...).
    """
    best, index = target.max(-1)
    chosen = target.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    relaxed = (alpha > 0) & (chosen > 0) & (chosen >= (1 - alpha) * best)
    return (tokens == index) | relaxed
