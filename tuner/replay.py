"""Replay: the exact perplexity and the expected rounds of any configuration, from a trace, without running a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lossyspec.errors import ConfigurationError
from lossyspec.likelihood import Flags, Floats, Recursion, StepWeights, bootstrap_ratio, forward
from lossyspec.records import Corpus, Estimate, Quality
from lossyspec.settings import Settings

from .laws import Answer, GreedyLaw, Law
from .trace import TAUS, Trace, forced_chain

#: tokens of the past that weigh a position when the flow of a lossy decoder is estimated, and the most that one may weigh
_RECENT, _STEP_LIMIT = 16, 3.0


@dataclass(frozen=True)
class Flow:
    """What one configuration does in a row. drafted: (draft_length + 1,) share of rounds that draft 0, 1, .. tokens."""

    tokens_per_round: float
    acceptance: float | None
    drafted: Floats

    @property
    def drafted_per_round(self) -> float:
        """Mean drafted tokens a round."""
        return float(self.drafted @ np.arange(len(self.drafted)))


@dataclass(frozen=True)
class Replayed:
    """Quality and flow of one configuration on one trace. log_ratio: (N,) nats of each text against the reference."""

    flow: Flow
    log_ratio: Floats
    tokens: Floats
    tv: float | None
    kl_forward: float | None
    kl_reverse: float | None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the decoder over the reference target's, over all texts; inf when a text has likelihood 0."""
        mean = float(self.log_ratio.sum() / self.tokens.sum())
        return math.inf if mean >= 700 else math.exp(mean)


def certificate(settings: Settings) -> float | None:
    """Upper bound of the perplexity ratio on ANY text, against the target at the same precision: 1 / (1 - alpha) for the
    rules that keep pi >= (1 - alpha) p; None for the others."""
    if settings.lossless:
        return 1.0
    if settings.rule in ("mixture", "optimal", "priced") and settings.alpha < 1:
        return 1 / (1 - settings.alpha)
    return None


def nearest_tau(tau: float) -> float:
    """The tau of the trace that stands for this one. Raises ConfigurationError when none is within 1 %."""
    best = min(TAUS, key=lambda value: abs(value - tau))
    if abs(best - tau) > 0.01 * tau:
        raise ConfigurationError(f"tau is {tau}; the trace holds {', '.join(map(str, TAUS))}")
    return best


class Replay:
    """Replays configurations on one trace; keeps what depends on (precision, tau, rule, alpha) alone for the next call."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.mask: Flags = trace.mask()
        self.tokens = self.mask.sum(1).astype(float)
        self._last = trace.last_of_limited()
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._single = len({tau for _, tau in trace.laws}) == 1
        self._reference = self._padded(trace.plain[trace.reference])

    def _padded(self, flat: Any, fill: float = 0.0) -> Floats:
        """(N, L) from (T,)."""
        values = np.full(self.mask.shape, fill)
        values[self.mask] = np.asarray(flat)
        return values

    def _answer(self, settings: Settings, tau: float, depth: int) -> Answer:
        rule, alpha = ("exact", 0.0) if settings.lossless else (settings.rule, settings.alpha)
        key = (settings.precision.target, tau, rule, alpha, depth)
        if key not in self._answers:
            if len(self._answers) > 1024:
                self._answers.clear()
            law = self._laws(settings.precision.target, tau)[depth]
            self._answers[key] = law.answer(rule, torch.full_like(law.confidence, alpha, dtype=torch.float64))
        return self._answers[key]

    def run(self, settings: Settings) -> Replayed:
        """Replays one configuration. Raises ConfigurationError for a precision or tau that was not traced."""
        precision, gamma = settings.precision.target, settings.draft_length
        tau = 1.0 if self._single else nearest_tau(settings.tau)
        if (precision, tau) not in self.trace.laws:
            raise ConfigurationError(
                f"precision {precision} was not traced; traced: {', '.join(sorted({name for name, _ in self.trace.laws}))}"
            )
        laws = self._laws(precision, tau)[: max(gamma, 1)]
        answers = [self._answer(settings, tau, depth) for depth in range(len(laws))]
        confidence = self._by_depth([law.confidence for law in laws], gamma, -1.0)
        draftable = (confidence >= max(settings.theta, 0.0)) & ~self._last[..., None]
        greedy = isinstance(laws[0], GreedyLaw)
        plain = np.ones(self.mask.shape) if greedy else np.exp(self._padded(self.trace.plain[precision]))
        weights = StepWeights(
            self._by_depth([answer.accepted for answer in answers], gamma),
            self._by_depth([answer.rejected for answer in answers], gamma),
            self._by_depth([answer.acceptance for answer in answers], gamma),
            draftable,
            plain,
            self.mask,
        )
        recursion = forward(weights, gamma)
        if greedy:
            regret = self._by_depth([answer.regret for answer in answers], gamma)
            log_ratio = (recursion.drafted_at * regret).sum((1, 2))
        else:
            log_ratio = (self._reference * self.mask).sum(1) - recursion.log_likelihood
        return Replayed(
            self._flow(recursion, settings, laws),
            log_ratio,
            self.tokens,
            self._mean(recursion, [answer.tv for answer in answers], gamma),
            self._mean(recursion, [answer.kl_forward for answer in answers], gamma),
            self._mean(recursion, [answer.kl_reverse for answer in answers], gamma),
        )

    def _laws(self, precision: str, tau: float) -> tuple[Law, ...]:
        """The laws by depth; one when it does not depend on the depth."""
        return (self.trace.laws[precision, tau], *self.trace.deeper.get((precision, tau), ()))

    def _by_depth(self, flat: Sequence[torch.Tensor], draft_length: int, fill: float = 0.0) -> Floats:
        """(N, L, 1), or (N, L, draft_length) from (T,) at each depth; beyond the last traced depth that one holds."""
        padded = [self._padded(values, fill) for values in flat]
        if len(padded) > 1:
            padded += [padded[-1]] * (draft_length - len(padded))
        return np.stack(padded, -1)

    def _mean(self, recursion: Recursion, values: Sequence[torch.Tensor | None], draft_length: int) -> float | None:
        """Mean over emitted positions, where the relaxed law rules at a share of them; None if not known or not finite."""
        known = [part for part in values if part is not None]
        if len(known) < len(values):
            return None
        padded, share = self._by_depth(known, draft_length), recursion.drafted_at
        total = float(np.where(share > 0, padded, 0.0).ravel() @ share.ravel())
        return max(total / float(self.tokens.sum()), 0.0) if math.isfinite(total) else None

    def _flow(self, recursion: Recursion, settings: Settings, laws: Sequence[Law]) -> Flow:
        """Expected rounds, and how many tokens are drafted in each, weighed by where rounds begin."""
        gamma = settings.draft_length
        weight = self._own_text(recursion)
        tokens, rounds = float(weight.sum()), float((weight * recursion.ends).sum())
        accepted = float((weight * recursion.kept).sum())
        shares = np.zeros(gamma + 1)
        if gamma:
            stored = self.trace.chain[:, :gamma]
            chain = stored if stored.shape[1] else self._forced(laws, gamma)
            going = chain >= max(settings.theta, 0.0)
            lengths = np.zeros(self.mask.shape, dtype=int)
            lengths[self.mask] = going.cumprod(1).sum(1).astype(int)
            # a round leaves room for the token after it
            room = self.tokens[:, None] - np.arange(self.mask.shape[1]) - 1
            limited = np.array(self.trace.texts.limited)[:, None]
            lengths = np.where(limited, np.minimum(lengths, np.maximum(room, 0)), lengths).astype(int)
            np.add.at(shares, lengths.ravel(), (weight * recursion.starts).ravel())
        else:
            shares[0] = 1.0
        shares /= shares.sum()
        drafted = float(shares @ np.arange(gamma + 1)) * rounds
        return Flow(tokens / rounds, accepted / drafted if drafted > 0 else None, shares)

    def _own_text(self, recursion: Recursion) -> Floats:
        """(N, L) how much likelier the decoder is than the target to have written the last tokens before each position.

        Replay walks along the target's text, live decoding along its own, where a relaxed draft goes on copying itself.
        Weighting each position by its recent past brings the first nearer to the second; over a whole text the weights would
        have no bounded variance. 1 where nothing is relaxed.
        """
        steps = np.clip(recursion.log_step, -_STEP_LIMIT, _STEP_LIMIT)
        before = np.cumsum(steps, axis=1) - steps
        past = before.copy()
        past[:, _RECENT:] -= before[:, :-_RECENT]
        return np.exp(past) * self.mask

    def _forced(self, laws: Sequence[Law], gamma: int) -> Floats:
        return forced_chain([law.confidence.numpy() for law in laws], self.trace.texts, gamma)

    def quality(
        self,
        settings: Settings,
        replayed: Replayed | None = None,
        corpus: Corpus = "target_samples",
        interval: bool = True,
        seed: int = 0,
    ) -> Quality:
        """The quality record of a configuration, with a paired bootstrap interval over texts."""
        result = replayed or self.run(settings)
        span = bootstrap_ratio(result.log_ratio, result.tokens, seed=seed) if interval and len(result.tokens) > 1 else None
        return Quality(
            perplexity_ratio=Estimate(value=result.perplexity_ratio, ci95=span),
            tokens=int(result.tokens.sum()),
            texts=len(result.tokens),
            corpus=corpus,
            tv=result.tv,
            kl_forward=result.kl_forward,
            kl_reverse=result.kl_reverse,
            certificate=certificate(settings),
        )
