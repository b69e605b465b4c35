"""The loop. Draft, verify, judge, keep: plain decoding is draft length 0, lossless is alpha 0, greedy is temperature 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from .drafting import Draft, Proposal, Request
from .errors import ConfigurationError, NumericalError
from .mixed_drafting import propose
from .policy import Boundaries, Seen, Walk, factors, moved
from .runner import Runner
from .sampling import Processor, penalise, probabilities
from .settings import MAX_DRAFT_LENGTH, Policy, Sampling, Settings
from .stats import Stats
from .stopping import Stopping, cut
from .verification import judge


@dataclass
class Row:
    """One text: its prompt, its output so far, and why it ended (None while it goes on).

    relaxed: for each output token, whether a rule with alpha over 0 judged its position.
    """

    index: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    walk: Walk = field(default_factory=lambda: Walk(Policy()))
    relaxed: list[bool] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Job:
    """All that a decoding run needs besides the models. processors: as in transformers, applied to target and draft."""

    settings: Settings
    sampling: Sampling
    stopping: Stopping
    generator: torch.Generator
    tokenizer: Any = None  # needed for stop strings only
    processors: Sequence[Processor] = ()
    boundaries: Boundaries | None = None  # needed for protected positions only


@torch.inference_mode()
def decode(
    target: Runner, draft: Draft | None, prompts: list[list[int]], job: Job, stats: Stats, kept: int = 0
) -> Iterator[list[Row]]:
    """Decodes a ragged batch; yields the rows after each round (the same objects, grown). Fills `stats` as it goes.

    prompts: token ids, each at least one token. kept: the first tokens of the only prompt that target and draft still hold
    from their last text (a session). Raises ConfigurationError when a text does not fit the target's positions.
    """
    policy = job.settings.policy
    everything = [Row(index, list(prompt), walk=Walk(policy)) for index, prompt in enumerate(prompts)]
    if policy.protect and job.boundaries is None:
        raise ConfigurationError(
            f"protect is {', '.join(policy.protect)}: positions are known by their text; give a tokenizer"
        )
    longest = max(map(len, prompts)) + job.stopping.max_new_tokens
    target.check_room(longest)
    stats.rows += len(prompts)
    began = perf_counter()
    capacity = longest + MAX_DRAFT_LENGTH + 1
    for part in (target, draft):
        if part is not None and kept:
            part.resume(prompts[0], kept, capacity)
        elif part is not None:
            part.start(prompts, capacity)
    if draft is not None:
        draft.observe(target.features, [kept] * len(prompts))
    stats.prefill_s += perf_counter() - began
    rows = everything
    while rows:
        began = perf_counter()
        before = stats.tokens
        proposal, alpha, accepted, following = _round(target, draft, rows, job, stats)
        drafted = proposal.tokens.tolist()
        for place, row in enumerate(rows):
            emitted = [*drafted[place][: accepted[place]], following[place]]
            new, row.finish_reason = cut(row.output, emitted, job.stopping, job.tokenizer)
            row.output.extend(new)
            row.relaxed.extend(depth < proposal.lengths[place] and alpha[place][depth] > 0 for depth in range(len(new)))
            stats.count_round(proposal.lengths[place], accepted[place], len(new))
        stats.round_times_s.append(perf_counter() - began)
        stats.round_tokens.append(stats.tokens - before)
        stats.decode_s += stats.round_times_s[-1]
        yield everything
        live = [place for place, row in enumerate(rows) if row.finish_reason is None]
        if 0 < len(live) < len(rows):
            target.select(live)
            if draft is not None:
                draft.select(live)
        rows = [rows[place] for place in live]


def _round(
    target: Runner, draft: Draft | None, rows: list[Row], job: Job, stats: Stats
) -> tuple[Proposal, list[list[float]], list[int], list[int]]:
    """One round of all rows: the proposal, alpha at its tokens, how many stay in each row, and the token after them."""
    settings, sampling, began = job.settings, job.sampling, perf_counter()
    prefixes = [row.tokens for row in rows]
    most = settings.draft_length_for(len(rows)) if draft is not None else 0
    limits = [min(most, job.stopping.max_new_tokens - len(row.output) - 1) for row in rows]
    proposal = Proposal.empty(len(rows), target.device)
    if draft is not None and max(limits) > 0:
        request = Request(prefixes, limits, settings, sampling, job.generator, job.processors)
        proposal = propose(draft, request, target.vocab_size)
    drafted = perf_counter()
    last = torch.tensor([[prefix[-1]] for prefix in prefixes], device=target.device)
    starts = [len(prefix) - 1 for prefix in prefixes]
    logits = target.logits(torch.cat([last, proposal.tokens], 1), starts)
    if draft is not None:
        draft.observe(target.features, starts)
    verified = perf_counter()
    p = probabilities(penalise(logits, prefixes, proposal.tokens, sampling, job.processors), sampling)
    uniforms = torch.rand(p.shape[:2], generator=job.generator, device=p.device)
    level = 0.0 if settings.lossless else settings.alpha
    alpha = torch.full(proposal.tokens.shape, level, device=p.device)
    seen, walks = Seen(p) if settings.policy.active and not settings.lossless else None, [row.walk for row in rows]
    if seen is not None:
        alpha = alpha * factors(seen, walks, job.boundaries, proposal)
    accepted, following, _ = judge(p, proposal, settings, alpha, uniforms, greedy=sampling.temperature == 0)
    if seen is not None:
        for row, walk in zip(rows, moved(seen, walks, proposal, accepted, following), strict=True):
            row.walk = walk
    if job.processors or sampling.repetition_penalty != 1.0:
        _check_choice(p, accepted, starts)
    stats.passes += 1
    stats.draft_steps += proposal.steps
    stats.draft_s += drafted - began
    stats.verify_s += verified - drafted
    stats.judge_s += perf_counter() - verified
    return proposal, alpha.tolist(), accepted, following


def _check_choice(p: torch.Tensor, accepted: list[int], starts: list[int]) -> None:
    """Raises NumericalError where processors or the penalty left nothing to choose; behind a rejected token they may."""
    broken = p[..., 0].isnan().tolist()
    for row, (columns, last) in enumerate(zip(broken, accepted, strict=True)):
        if any(columns[: last + 1]):
            raise NumericalError(
                f"the processors or the penalty left NaN or no token at all at position {starts[row] + columns.index(True)} "
                f"of row {row}"
            )
