"""Replay: the exact perplexity and the expected rounds of any configuration, from a trace, without running a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lossyspec.errors import ConfigurationError
from lossyspec.likelihood import Flags, Floats, Recursion, StepWeights, bootstrap_ratio, forward
from lossyspec.mixed_drafting import least_match
from lossyspec.policy import Walk
from lossyspec.records import Corpus, Estimate, Quality, TrialRecord
from lossyspec.settings import BOUNDARIES, Policy, Settings

from .laws import Answer, GreedyLaw, Law
from .sides import Side, Sides
from .trace import TAUS, Trace, forced_chain

#: tokens of the past that weigh a position when the flow of a lossy decoder is estimated, and the most that one may weigh
_RECENT, _STEP_LIMIT = 16, 3.0


@dataclass(frozen=True)
class Flow:
    """What one configuration does in a row. drafted: (draft_length + 1,) share of rounds that draft 0, 1, .. tokens;
    steps: (draft_length + 1,) share of those that run the draft model 0, 1, .. times."""

    tokens_per_round: float
    acceptance: float | None
    drafted: Floats
    steps: Floats

    @property
    def drafted_per_round(self) -> float:
        """Mean drafted tokens a round."""
        return float(self.drafted @ np.arange(len(self.drafted)))


@dataclass(frozen=True)
class Replayed:
    """Quality and flow of one configuration on one trace. log_ratio: (N,) nats of each text against the reference.
    tv_spread: see `lossyspec.records.Quality`."""

    flow: Flow
    log_ratio: Floats
    tokens: Floats
    tv: float | None
    kl_forward: float | None
    kl_reverse: float | None
    tv_spread: float | None = None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the decoder over the reference target's, over all texts; inf when a text has likelihood 0."""
        mean = float(self.log_ratio.sum() / self.tokens.sum())
        return math.inf if mean >= 700 else math.exp(mean)


def certificate(settings: Settings) -> float | None:
    """Upper bound of the perplexity ratio on ANY text, against the target at the same precision: 1 / (1 - alpha) for the
    rules that keep pi >= (1 - alpha) p; None for the others, and for a target with sparse attention."""
    if settings.attention.side == "verify":  # nothing bounds what a skipped block would have said
        return None
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
        self._policies: dict[tuple[Policy, str], torch.Tensor] = {}
        self._single = len({tau for _, tau in trace.laws}) <= 1
        self._reference = self._padded(trace.plain[trace.reference])

    def _padded(self, flat: Any, fill: float = 0.0) -> Floats:
        """(N, L) from (T,)."""
        values = np.full(self.mask.shape, fill)
        values[self.mask] = np.asarray(flat)
        return values

    def run(self, settings: Settings) -> Replayed:
        """Replays one configuration. Raises ConfigurationError for a precision or tau that was not traced."""
        form, gamma = settings.target_format, settings.draft_length
        sides, greedy = self._sides(settings), isinstance(self._lookup_law(form), GreedyLaw)
        plain = np.ones(self.mask.shape) if greedy else np.exp(self._padded(self.trace.plain[form]))
        weights = StepWeights(
            sides.over(lambda side: [answer.accepted for answer in side.answers]),
            sides.over(lambda side: [answer.rejected for answer in side.answers]),
            sides.over(lambda side: [answer.acceptance for answer in side.answers]),
            sides.over(lambda side: [law.confidence >= side.least for law in side.laws]).astype(bool)
            & ~self._last[..., None],
            plain,
            self.mask,
        )
        recursion = forward(weights, gamma)
        if greedy:
            regret = sides.over(lambda side: [answer.regret for answer in side.answers])
            log_ratio = (recursion.drafted_at * regret).sum((1, 2))
        else:
            log_ratio = (self._reference * self.mask).sum(1) - recursion.log_likelihood
        variation = self._sums(recursion, sides, lambda answer: answer.tv)
        return Replayed(
            self._flow(recursion, settings, sides),
            log_ratio,
            self.tokens,
            self._mean(variation),
            self._mean(self._sums(recursion, sides, lambda answer: answer.kl_forward)),
            self._mean(self._sums(recursion, sides, lambda answer: answer.kl_reverse)),
            self._spread(variation),
        )

    # who drafts

    def _sides(self, settings: Settings) -> Sides:
        """The laws and their answers of who drafts under `settings`."""
        form, gamma = settings.draft_format, settings.draft_length
        theta = max(settings.theta, 0.0)
        law = self._lookup_law(settings.target_format)
        lookup = Side((law,), (self._answer(settings, None, 0, law),), theta)
        if not self.trace.laws or settings.source == "ngram" or gamma == 0:
            return Sides(self._padded, gamma, lookup, None)
        tau = 1.0 if self._single else nearest_tau(settings.tau)
        if (form, tau) not in self.trace.laws:
            raise ConfigurationError(f"the draft was not traced at precision {form} and tau {tau}")
        laws = self.trace.laws[form, tau][:gamma]
        answers = tuple(self._answer(settings, tau, depth, law) for depth, law in enumerate(laws))
        draft = Side(laws, answers, theta)
        if settings.source == "draft":
            return Sides(self._padded, gamma, None, draft)
        return Sides(self._padded, gamma, replace(lookup, least=least_match(settings)), draft)

    def _lookup_law(self, precision: str) -> Law:
        if precision not in self.trace.lookup:
            traced = ", ".join(sorted(self.trace.lookup))
            raise ConfigurationError(f"precision {precision} was not traced; traced: {traced}")
        return self.trace.lookup[precision]

    def _answer(self, settings: Settings, tau: float | None, depth: int, law: Law) -> Answer:
        """tau None: of prompt lookup."""
        rule, alpha = (settings.rule, settings.alpha) if settings.relaxed else ("exact", 0.0)
        key = (settings.draft_format, tau, rule, alpha, depth, settings.policy if settings.relaxed else None)
        if key not in self._answers:
            if len(self._answers) > 1024:
                self._answers.clear()
            self._answers[key] = law.answer(rule, alpha * self._factors(settings))
        return self._answers[key]

    def _factors(self, settings: Settings) -> torch.Tensor:
        """(T,) factors on alpha along the texts, by the same walk as in decoding."""
        trace, policy, precision = self.trace, settings.policy, settings.target_format
        if not settings.relaxed or not policy.active:
            return torch.ones(trace.texts.tokens, dtype=torch.float64)
        key = (policy, precision)
        if key not in self._policies:
            if policy.protect and trace.kinds is None:
                raise ConfigurationError("protected positions cannot be replayed: the trace was made without a tokenizer")
            bits = trace.kinds.tolist() if trace.kinds is not None else [0] * trace.texts.tokens
            sets = [frozenset(kind for bit, kind in enumerate(BOUNDARIES) if mask >> bit & 1) for mask in range(16)]
            chances, entropies = trace.plain[precision].tolist(), trace.entropy[precision].tolist()
            found, place = [], 0
            for output in trace.texts.outputs:
                walk = Walk(policy)
                for token in output:
                    found.append(walk.factor(entropies[place], sets[bits[place]]))
                    walk = walk.then(token, chances[place], entropies[place])
                    place += 1
            self._policies[key] = torch.tensor(found, dtype=torch.float64)
        return self._policies[key]

    # what comes of it

    def _sums(self, recursion: Recursion, sides: Sides, value: Callable[[Answer], torch.Tensor | None]) -> Floats | None:
        """(N,) sum over each text's positions, where the relaxed law rules at a share of them; None if not known or not
        finite."""
        if any(value(answer) is None for side in sides.all for answer in side.answers):
            return None
        padded = sides.over(lambda side: [part for answer in side.answers if (part := value(answer)) is not None])
        share = recursion.drafted_at
        sums: Floats = (np.where(share > 0, padded, 0.0) * share).sum((1, 2))
        return sums if bool(np.isfinite(sums).all()) else None

    def _mean(self, sums: Floats | None) -> float | None:
        """Of emitted positions."""
        return None if sums is None else max(float(sums.sum() / self.tokens.sum()), 0.0)

    def _spread(self, sums: Floats | None) -> float | None:
        """s where the mean of n positions has a standard deviation of s / sqrt(n), from how texts differ; None for one."""
        if sums is None or len(sums) < 2:
            return None
        apart = sums - self.tokens * float(sums.sum() / self.tokens.sum())
        return float(np.sqrt((apart**2).sum() / self.tokens.sum()))

    def _flow(self, recursion: Recursion, settings: Settings, sides: Sides) -> Flow:
        """Expected rounds, and how many tokens are drafted in each, weighed by where rounds begin."""
        gamma = settings.draft_length
        weight = self._own_text(recursion)
        tokens, rounds = float(weight.sum()), float((weight * recursion.ends).sum())
        accepted = float((weight * recursion.kept).sum())
        lengths, drawn = self._lengths(sides, gamma)
        begun = weight * recursion.starts
        shares, steps = np.zeros(gamma + 1), np.zeros(gamma + 1)
        np.add.at(shares, lengths.ravel(), begun.ravel())
        # a row stopped by theta has paid the step that showed it
        more = np.minimum(lengths + (settings.theta > 0), gamma)
        np.add.at(steps, np.where(drawn, more, 0).ravel(), begun.ravel())
        shares, steps = shares / shares.sum(), steps / steps.sum()
        drafted = float(shares @ np.arange(gamma + 1)) * rounds
        return Flow(tokens / rounds, accepted / drafted if drafted > 0 else None, shares, steps)

    def _lengths(self, sides: Sides, gamma: int) -> tuple[Any, Flags]:
        """(N, L) how many tokens a round that begins at each position drafts, and whether the draft model draws them."""
        flat = np.zeros(self.trace.texts.tokens, dtype=int)
        if sides.draft is not None and gamma:
            chain = forced_chain([law.confidence.numpy() for law in sides.draft.laws], self.trace.texts, gamma)
            flat = (chain >= sides.draft.least).cumprod(1).sum(1)
        drawn = np.full(len(flat), sides.draft is not None)
        if sides.lookup is not None and gamma:
            looked = (self.trace.chain[:, :gamma] >= sides.lookup.least).cumprod(1).sum(1)
            drawn &= looked == 0
            flat = np.where(looked > 0, looked, flat)
        lengths = self._padded(flat).astype(int)
        # a round leaves room for the token after it
        room = self.tokens[:, None] - np.arange(self.mask.shape[1]) - 1
        limited = np.array(self.trace.texts.limited)[:, None]
        lengths = np.where(limited, np.minimum(lengths, np.maximum(room, 0)), lengths).astype(int)
        return lengths, self._padded(drawn).astype(bool)

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
            tv_spread=result.tv_spread,
        )

    def upper_ratio(self, record: TrialRecord) -> float:
        """The upper end of a trial's perplexity ratio; its value where there is one text only."""
        ratio = self.quality(record.settings).perplexity_ratio
        return ratio.ci95[1] if ratio.ci95 is not None else ratio.value
