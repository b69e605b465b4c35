"""What replay needs to know of p and q at each position of a text, small enough to keep, enough for any rule and alpha.

A law answers, for (rule, alpha): q(y) a(y), (1 - sum q a) s(y), sum q a, and the distances between the emitted law and p.
All tensors are fp64 of shape (T,), T positions of all texts one after the other, unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lossyspec.acceptance import accept_one_hot, price
from lossyspec.errors import ConfigurationError

#: log(p/q) is binned over +-SPAN nats; the first and the last bin take the rest, with p = 0 and q = 0
SPAN = 12.0
BINS = 800


@dataclass(frozen=True)
class Answer:
    """The weights of `lossyspec.likelihood`, and per position TV(pi, p), KL(p||pi), KL(pi||p) in nats (None: not known).

    regret: nats lost by an accepted token at temperature 0 (0 elsewhere).
    """

    accepted: Tensor
    rejected: Tensor
    acceptance: Tensor
    tv: Tensor | None
    kl_forward: Tensor | None
    kl_reverse: Tensor | None
    regret: Tensor


class Law(Protocol):
    """Positions of a trace under one precision and one tau."""

    confidence: Tensor  # of the draft at the position; -1 where it proposes nothing

    def answer(self, rule: str, alpha: Tensor) -> Answer:
        """Applies a rule with alpha (T,)."""


def _xlogx(x: Tensor, y: Tensor) -> Tensor:
    """x log(x / y) with 0 log 0 = 0; +inf where y = 0 < x."""
    return torch.where(x > 0, x * (x.clamp_min(1e-300).log() - y.clamp_min(0).log()), 0.0)


@dataclass(frozen=True)
class OneHotLaw:
    """A deterministic draft (n-gram). p_draft: p at the drafted token, p_text: p at the text's token, hit: both are one."""

    p_draft: Tensor
    p_text: Tensor
    entropy: Tensor
    hit: Tensor
    confidence: Tensor

    def answer(self, rule: str, alpha: Tensor) -> Answer:
        """Closed form: pi moves mass between the drafted token and all others in proportion."""
        p = self.p_draft
        accept = accept_one_hot(rule, p, self.entropy, alpha)
        from_p = (alpha > 0) if rule == "typical" else torch.zeros_like(alpha, dtype=torch.bool)
        others = torch.where(self.hit, 0.0, self.p_text / (1 - p).clamp_min(1e-300))
        after = torch.where(from_p, self.p_text, torch.where(p >= 1, self.p_text, others))
        pi = torch.where(from_p, accept + (1 - accept) * p, accept)
        return Answer(
            self.hit * accept,
            (1 - accept) * after,
            accept,
            (pi - p).abs(),
            _xlogx(p, pi) + _xlogx(1 - p, 1 - pi),
            _xlogx(pi, p) + _xlogx(1 - pi, 1 - p),
            torch.zeros_like(p),
        )


@dataclass(frozen=True)
class GreedyLaw:
    """Temperature 0. p_draft: p at the draft's argmax; p_best: max p; hit: they are the same token.

    An accepted token other than the target's choice leaves the text; replay goes on along the text, and counts its regret.
    """

    p_draft: Tensor
    p_best: Tensor
    hit: Tensor
    confidence: Tensor

    def answer(self, rule: str, alpha: Tensor) -> Answer:
        """Accepts the target's choice, and what is within (1 - alpha) of it."""
        relaxed = (alpha > 0) & (self.p_draft > 0) & (self.p_draft >= (1 - alpha) * self.p_best)
        accept = (self.hit if rule == "exact" else self.hit | relaxed).double()
        regret = torch.where(self.hit | (accept == 0), 0.0, self.p_best.log() - self.p_draft.clamp_min(1e-300).log())
        return Answer(accept, 1 - accept, accept, None, None, None, regret)


@dataclass(frozen=True)
class BinnedLaw:
    """A draft with a full q. p_mass, q_mass: (T, BINS) masses of p and q by log(p/q), in fp32, ratio rising."""

    p_mass: Tensor
    q_mass: Tensor
    p_text: Tensor
    q_text: Tensor
    confidence: Tensor
    # derived once, read by every query
    _p_below: Tensor = field(init=False, repr=False)
    _q_below: Tensor = field(init=False, repr=False)
    _ratio: Tensor = field(init=False, repr=False)
    _tv: Tensor = field(init=False, repr=False)
    _impossible: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        p, q = self.p_mass.double(), self.q_mass.double()
        keep = object.__setattr__
        keep(self, "_p_below", p.cumsum(-1))
        keep(self, "_q_below", q.cumsum(-1))
        middle = torch.linspace(-SPAN, SPAN, BINS + 1, dtype=torch.float64)
        ratio = torch.where((p > 0) & (q > 0), p / q.clamp_min(1e-300), torch.exp(0.5 * (middle[:-1] + middle[1:])))
        ratio = torch.where((q <= 0) & (p > 0), torch.inf, torch.where((p <= 0) & (q > 0), 0.0, ratio))
        keep(self, "_ratio", ratio.cummax(-1).values)
        keep(self, "_tv", 0.5 * (p - q).abs().sum(-1))
        keep(self, "_impossible", torch.where(self._ratio <= 0, q, 0.0).sum(-1))

    def _masses(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Masses of p and of q on tokens whose p/q is under `ratio` (T,)."""
        count = torch.searchsorted(self._ratio, ratio.unsqueeze(-1), right=False)
        some, at = count > 0, (count - 1).clamp_min(0)
        return (
            torch.where(some, self._p_below.gather(-1, at), 0.0).squeeze(-1),
            torch.where(some, self._q_below.gather(-1, at), 0.0).squeeze(-1),
        )

    def _capped(self, lo: Tensor) -> Tensor:
        """sum(q - p/lo)+"""
        p, q = self._masses(lo)
        return (q - p / lo).clamp_min(0)

    def _floored(self, hi: Tensor) -> Tensor:
        """sum(p/hi - q)+"""
        p, q = self._masses(hi)
        return ((self._p_below[:, -1] - p) / hi - (self._q_below[:, -1] - q)).clamp_min(0)

    def _bisect(self, over: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
        """Where a rising condition turns true, in log space."""
        for _ in range(44):
            middle = (low * high).sqrt()
            yes = over(middle)
            low, high = torch.where(yes, low, middle), torch.where(yes, middle, high)
        return (low * high).sqrt()

    def _clip(self, rule: str, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """lo, hi and the rejected mass of the clip rules."""
        tiny, one = torch.full_like(alpha, math.exp(-2 * SPAN)), torch.ones_like(alpha)
        if rule == "optimal":
            excess = torch.maximum((1 - alpha) * self._tv, self._impossible)
            lo = self._bisect(lambda x: self._capped(x) >= excess, tiny, one)
            hi = self._bisect(lambda x: self._floored(x) <= excess, one, 1 / tiny)
            return lo, hi, excess
        kappa = price(alpha)
        lo = self._bisect(
            lambda x: self._capped(x) >= self._floored((x + kappa).clamp_min(1.0)),
            (1 - kappa).clamp_min(math.exp(-2 * SPAN)),
            one,
        )
        hi = (lo + kappa).clamp_min(1.0)
        return lo, hi, torch.maximum(0.5 * (self._capped(lo) + self._floored(hi)), self._impossible)

    def answer(self, rule: str, alpha: Tensor) -> Answer:
        """From the masses; the text's own p and q are exact, the masses beside a threshold are off by half a bin at most."""
        p, q, tv = self.p_text, self.q_text, self._tv
        spare, lost = (p - q).clamp_min(0), (q - p).clamp_min(0)
        if rule in ("optimal", "priced"):
            lo, hi, excess = self._clip(rule, alpha)
            floor, cap = (1 / hi).unsqueeze(-1), (1 / lo).unsqueeze(-1)
            pi = torch.minimum(torch.maximum(self.q_mass, self.p_mass * floor), self.p_mass * cap)
            return self._measured(pi, torch.minimum(q, p / lo), (p / hi - q).clamp_min(0), 1 - excess)
        if rule in ("exact", "mixture"):
            share = alpha if rule == "mixture" else torch.zeros_like(alpha)
            pi = self.p_mass + share.unsqueeze(-1) * (self.q_mass - self.p_mass)
            return self._measured(
                pi, torch.where(p > 0, q - (1 - share) * lost, 0.0), (1 - share) * spare, 1 - (1 - share) * tv
            )
        if rule == "lenience":
            below, q_below = self._masses(1 - alpha)
            gained = below / (1 - alpha).clamp_min(1e-300) + (self._q_below[:, -1] - q_below)
            left = ((1 - gained) / tv.clamp_min(1e-300)).clamp(0, 1)
            capped = torch.minimum(self.q_mass, self.p_mass / (1 - alpha).clamp_min(1e-300).unsqueeze(-1))
            pi = capped + left.unsqueeze(-1) * (self.p_mass - self.q_mass).clamp_min(0)
            return self._measured(pi, torch.minimum(q, p / (1 - alpha).clamp_min(1e-300)), left * spare, gained)
        if rule == "fuzzy":
            near = (self._jensen_shannon() <= alpha * math.log(2.0)) & (alpha > 0)
            pi = torch.where(near.unsqueeze(-1), self.q_mass, self.p_mass)
            return self._measured(
                pi,
                torch.where(near & (p > 0), q, torch.minimum(p, q)),
                torch.where(near, 0.0, spare),
                torch.where(near, 1.0, 1 - tv),
            )
        raise ConfigurationError(
            f"rule {rule!r} cannot be replayed with a draft that samples: it depends on p(x) alone, which the "
            f"trace does not keep; use it with the n-gram draft, or in `generate`"
        )

    def _jensen_shannon(self) -> Tensor:
        p, q = self.p_mass.double(), self.q_mass.double()
        middle = 0.5 * (p + q)
        return 0.5 * (_xlogx(p, middle) + _xlogx(q, middle)).sum(-1)

    def _measured(self, pi: Tensor, accepted: Tensor, rejected: Tensor, acceptance: Tensor) -> Answer:
        """Distances of the emitted masses `pi` (T, BINS) to p; KLs of binned masses are (close) lower bounds."""
        p = self.p_mass
        ratio = (p.clamp_min(1e-38) / pi.clamp_min(1e-38)).log()
        zero = torch.zeros_like(ratio)
        return Answer(
            accepted,
            rejected,
            acceptance.clamp(0, 1),
            0.5 * (pi - p).abs().sum(-1).double(),
            torch.where(p > 0, p * ratio, zero).sum(-1).double(),
            -torch.where(pi > 0, pi * ratio, zero).sum(-1).double(),
            torch.zeros_like(accepted),
        )


def bin_masses(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Masses of p and q (T, V) by log(p/q): two (T, BINS) fp32 tensors."""
    ratio = (p.clamp_min(1e-38) / q.clamp_min(1e-38)).log()
    index = ((ratio + SPAN) * (BINS / (2 * SPAN))).floor().clamp(0, BINS - 1).long()
    index = torch.where((p <= 0) & (q > 0), 0, torch.where((q <= 0) & (p > 0), BINS - 1, index))
    empty = torch.zeros(p.shape[0], BINS, dtype=torch.float64)
    return (empty.scatter_add(1, index, p.double()).float(), empty.scatter_add(1, index, q.double()).float())
