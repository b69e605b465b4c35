"""The loop. Draft, verify, judge, keep: plain decoding is draft length 0, lossless is alpha 0, greedy is temperature 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from .drafting import Draft, Proposal, Request
from .errors import ConfigurationError, NumericalError, mark_row
from .guard import Watch
from .lanes import Ahead, Lanes, foresee, foreseeable, make_lanes
from .mixed_drafting import propose
from .policy import Seen, factors, moved
from .rows import Job, Row
from .runner import Runner
from .sampling import laws, uniforms
from .self_drafting import attach
from .settings import MAX_DRAFT_LENGTH, Settings
from .stats import Round, Stats
from .stopping import cut
from .verification import Verdict, judge


@torch.inference_mode()
def decode(
    target: Runner,
    draft: Draft | None,
    prompts: list[list[int]],
    job: Job,
    stats: Stats,
    kept: int = 0,
    watch: Watch | None = None,
) -> Iterator[list[Row]]:
    """Decodes a ragged batch; yields the rows after each round (the same objects, grown). Fills `stats` as it goes.

    prompts: token ids, each at least one token. kept: the first tokens of the only prompt that target and draft still hold
    from their last text (a session). Raises ConfigurationError when a text does not fit the target's positions.
    """
    rows, batch = [Row(index, list(prompt), job) for index, prompt in enumerate(prompts)], Batch(target, draft, watch)
    stats.rows += len(rows)
    try:
        stats.prefill_s += batch.start(rows, kept)
        while batch.rows:
            stats.add(batch.round())
            yield rows
            batch.keep([place for place, row in enumerate(batch.rows) if row.finish_reason is None])
    except BaseException as error:
        if watch is not None:
            watch.ended([row for row in batch.rows if row.finish_reason is None], error)
        raise


class Batch:
    """Rows that are decoded together: target and draft hold `rows[i]` at place i. They may join and leave between rounds."""

    def __init__(self, target: Runner, draft: Draft | None, watch: Watch | None = None) -> None:
        self.target, self.draft, self.watch = target, draft, watch
        self.rows: list[Row] = []
        self._ahead: Ahead | None = None

    @cached_property
    def lanes(self) -> Lanes:
        """How a pass and a prefetch run beside each other."""
        return make_lanes(self.target.device)

    @torch.inference_mode()
    def start(self, rows: list[Row], kept: int = 0) -> float:
        """Reads the prompts of new rows, in place of all that was there; returns the seconds that it took.

        kept: see `decode`. Raises ConfigurationError for a text that does not fit, or a policy that lacks the tokenizer.
        """
        for row in rows:
            if row.job.settings.policy.protect and row.job.boundaries is None:
                kinds = ", ".join(row.job.settings.policy.protect)
                raise ConfigurationError(f"protect is {kinds}: positions are known by their text; give a tokenizer")
        attach(self.draft, self.target, rows[0].job.settings)
        longest, prompts, began = max(row.longest for row in rows), [row.prompt for row in rows], perf_counter()
        self.target.check_room(longest)
        capacity = longest + MAX_DRAFT_LENGTH + 1
        for part in (self.target, self.draft):
            if part is not None and kept:
                part.resume(prompts[0], kept, capacity)
            elif part is not None:
                part.start(prompts, capacity)
        if self.draft is not None:
            self.draft.observe(self.target.features, [kept] * len(rows))
            settings = rows[0].job.settings
            if max(_draft_lengths(rows, settings)) > 0 and settings.source != "ngram":
                self.draft.read(prompts)
        self.rows, took = rows, perf_counter() - began
        if self.watch is not None:
            self.watch.began(rows, took)
        return took

    @torch.inference_mode()
    def join(self, other: Batch, room: int = 0) -> None:
        """Takes in the rows of a batch on forks of the same target and draft. room: rows to make room for."""
        if not self.rows and other.rows:
            attach(self.draft, self.target, other.rows[0].job.settings)
        self.target.join(other.target, room)
        if self.draft is not None and other.draft is not None:
            self.draft.join(other.draft, room)
        self.rows = self.rows + other.rows

    @torch.inference_mode()
    def keep(self, live: list[int]) -> None:
        """Keeps the rows at these places, ascending. The last ones fill the gaps, so that little has to be copied."""
        if len(live) == len(self.rows):
            return
        inside, behind = set(live), [place for place in live if place >= len(live)]
        order = [place if place in inside else behind.pop() for place in range(len(live))]
        self.target.select(order)
        if self.draft is not None:
            self.draft.select(order)
        self.rows = [self.rows[place] for place in order]

    @torch.inference_mode()
    def round(self) -> Round:
        """One round: every row grows, and may end. An error that is about one row alone carries its place (`row_of`); it
        leaves the rows as they were, but for what their generators have drawn."""
        rows, began = self.rows, perf_counter()
        settings = self._settings()
        proposal, kept = self._propose(settings)
        numbers = self._numbers(proposal)
        drafted = perf_counter()
        logits, self._ahead = self._verify(proposal, numbers, settings)
        verified = perf_counter()
        verdict, alpha = self._judge(logits, proposal, numbers, settings)
        judged, emitted, variation = perf_counter(), verdict.emitted(proposal.tokens.tolist()), verdict.variation.tolist()
        news, marks, moves = [], [], []
        for place, row in enumerate(rows):
            new, row.finish_reason = cut(row.output, emitted[place], row.job.stopping, row.job.tokenizer)
            relaxed = [depth < proposal.lengths[place] and alpha[place][depth] > 0 for depth in range(len(new))]
            row.output.extend(new)
            row.relaxed.extend(relaxed)
            news.append(len(new))
            marks.append(sum(relaxed))
            moves.append(sum(variation[place][depth] for depth, mark in enumerate(relaxed) if mark))
            row.variation += moves[-1]
        done = Round(
            proposal.lengths, verdict.accepted, news, marks, moves,
            (0 if kept else proposal.steps) + (self._ahead.steps if self._ahead is not None else 0),
            drafted - began, verified - drafted, judged - verified, perf_counter() - began,
            kept, self._ahead is not None,
        )  # fmt: skip
        if self.watch is not None:
            self.watch.saw(rows, done)
        return done

    def _settings(self) -> Settings:
        """The settings of the rows, with the alpha of the most relaxed one."""
        job, alpha = self.rows[0].job, max(row.alpha for row in self.rows)
        return job.settings if alpha == job.alpha else job.settings.model_copy(update={"alpha": alpha})

    def _propose(self, settings: Settings) -> tuple[Proposal, bool]:
        """The round's proposal, and whether it is the one that the last round has prefetched."""
        request = self._request(settings, [[] for _ in self.rows])
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.answers(request):
            return ahead.take(), True
        return self._ask(request), False

    def _request(self, settings: Settings, news: list[list[int]]) -> Request:
        """What a round asks the draft for when each row has grown by `news`."""
        prefixes, limits = [], []
        for row, new, most in zip(self.rows, news, _draft_lengths(self.rows, settings), strict=True):
            limits.append(min(most, row.job.stopping.max_new_tokens - len(row.output) - len(new) - 1))
            prefixes.append([*row.prompt, *row.output, *new])
        return Request(prefixes, limits, settings, [row.job.choice for row in self.rows])

    def _ask(self, request: Request) -> Proposal:
        if self.draft is None or max(request.limits) <= 0:
            return Proposal.empty(len(request.prefixes), self.target.device)
        return propose(self.draft, request, self.target.vocab_size, self.target.device)

    def _numbers(self, proposal: Proposal) -> Tensor:
        """(batch, width + 1) uniform numbers for the verdict; the last column is for the token after the accepted ones."""
        width, device, choices = proposal.tokens.shape[1], self.target.device, [row.job.choice for row in self.rows]
        drawn = uniforms(choices, [length + 1 for length in proposal.lengths], device)
        if min(proposal.lengths) == width:  # the last of each row is the last already
            return drawn
        lengths = torch.tensor(proposal.lengths, device=device)
        numbers = torch.nn.functional.pad(drawn, (0, width + 1 - drawn.shape[1]))
        numbers[:, -1:] = drawn.gather(1, lengths[:, None])
        return numbers

    def _verify(self, proposal: Proposal, numbers: Tensor, settings: Settings) -> tuple[Tensor, Ahead | None]:
        """The target's logits (batch, width + 1, V) after each row's last token and its drafted ones; with lanes, the next
        round's proposal if all of them are accepted."""
        starts = [len(row.prompt) + len(row.output) - 1 for row in self.rows]
        last = torch.tensor([[(row.output or row.prompt)[-1]] for row in self.rows], device=self.target.device)
        tokens, attention, ahead = torch.cat([last, proposal.tokens], 1), settings.attention.on("verify"), None
        if foreseeable(self.draft, settings):
            logits, ahead = self.lanes.beside(
                lambda: self.target.launch(tokens, starts, attention),
                lambda: foresee(self.rows, proposal, numbers, lambda news: self._request(settings, news), self._ask),
            )
            self.target.check(logits, starts)
        else:
            logits = self.target.logits(tokens, starts, attention)
        if self.draft is not None:
            self.draft.observe(self.target.features, starts)
        return logits, ahead

    def _judge(
        self, logits: Tensor, proposal: Proposal, numbers: Tensor, settings: Settings
    ) -> tuple[Verdict, list[list[float]]]:
        """The verdict, and alpha at each drafted token."""
        rows, choices = self.rows, [row.job.choice for row in self.rows]
        p = laws(logits, [row.tokens for row in rows], proposal.tokens, choices)
        shares = [[row.alpha] * proposal.tokens.shape[1] for row in rows]
        seen = Seen(p, settings.policy) if settings.policy.active and settings.relaxed else None
        if seen is not None:
            walks, tokens = [row.walk for row in rows], proposal.tokens.tolist()
            found = factors(seen, walks, rows[0].job.boundaries, tokens, proposal.lengths)
            shares = [[row.alpha * factor for factor in own] for row, own in zip(rows, found, strict=True)]
        alpha = torch.tensor(shares, device=p.device).reshape(proposal.tokens.shape)
        verdict = judge(p, proposal, settings, alpha, numbers, greedy=[choice.greedy for choice in choices])
        if any(choice.penalised for choice in choices):
            _check_choice(p, verdict.accepted, rows)
        if seen is not None:
            for row, walk in zip(rows, moved(seen, walks, verdict.emitted(tokens)), strict=True):
                row.walk = walk
        return verdict, shares


def _draft_lengths(rows: Sequence[Row], settings: Settings) -> list[int]:
    """Most tokens that a round drafts for each row, by its job or the size of the batch."""
    usual = settings.draft_length_for(len(rows))
    return [usual if row.job.draft_length is None else row.job.draft_length for row in rows]


def _check_choice(p: Tensor, accepted: list[int], rows: Sequence[Row]) -> None:
    """Raises NumericalError where processors or the penalty left nothing to choose; behind a rejected token they may."""
    broken = p[..., 0].isnan().tolist()
    for place, (columns, last) in enumerate(zip(broken, accepted, strict=True)):
        if any(columns[: last + 1]):
            error = NumericalError(
                f"the processors or the penalty left NaN or no token at all at position "
                f"{len(rows[place].tokens) - 1 + columns.index(True)} of row {place}"
            )
            mark_row(error, place)
            raise error
