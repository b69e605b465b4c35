"""The cost table: what a round takes on this device, measured when first needed, by the loop that production runs.

Costs step where a matrix kernel changes, so each number of verified tokens is measured. A draft's steps are alike, so only
the first, the second and the longest round are measured, and the others lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lossyspec.cost_table import CostTable
from lossyspec.decoding import Batch
from lossyspec.drafting import CompactDraft, Draft, Proposal, Request, StatelessDraft
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.rows import Job, Row
from lossyspec.runner import Runner
from lossyspec.sampling import Choice
from lossyspec.settings import MAX_DRAFT_LENGTH, Attention, Compile, Precision, Sampling, Settings, format_of, make_settings
from lossyspec.stopping import Stopping
from lossyspec.verification import judge

from .clock import Clock, default_clock, synchronise

_WARM_UP = 2
REPEATS = 24
_JUDGE_REPEATS = 5
#: that a draft may write before its text begins again
_TOKENS = 256
#: how far over the fastest plain round others may be and be compared with it by turns, after so many rounds
_NEAR, _SETTLING = 1.5, 16


class _Random(StatelessDraft):
    """A draft of random tokens, as many as it is asked for: the loop pays for the length alone."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def propose(self, request: Request) -> Proposal:
        rows, length = len(request.prefixes), max(request.limits)
        generator = request.choices[0].generator
        tokens = torch.randint(self.vocab_size, (rows, length), generator=generator, device=self.device)
        return Proposal(tokens, list(request.limits), None, 0)


@dataclass(frozen=True, eq=False)
class _Turn:
    """How a round is: who drafts, by which settings, how many tokens."""

    draft: Draft
    settings: Settings
    length: int


class CostMeter:
    """Measures cells of a cost table on first use.

    runners(precision) gives the target (and the draft model or None); prompts: typical prompts, cut or repeated to
    `context` tokens; precision: of the target whose vocabulary `judge_s` is timed with; clock: replaced in tests. repeats:
    most rounds that count for a number of a cell. cell_s: about the seconds that a cell may take; None: no limit.
    """

    def __init__(
        self,
        runners: Callable[[Precision], tuple[Runner, Draft | None]],
        prompts: list[list[int]],
        context: int,
        sampling: Sampling,
        max_draft_length: int,
        clock: Clock = default_clock,
        repeats: int = REPEATS,
        cell_s: float | None = None,
        precision: Precision = "fp32",
        cuda_graphs: bool = True,
    ) -> None:
        self.runners = runners
        self.prompts = prompts
        self.sampling = sampling
        self.max_draft_length = max_draft_length
        self.clock = clock
        self.repeats = repeats
        self.cell_s = cell_s
        self.precision = precision
        self.cuda_graphs = cuda_graphs
        self.table = CostTable(context)

    def _rows(self, batch: int, context: int) -> list[list[int]]:
        """`batch` prompts around `context` tokens; of unequal length in a batch, since real rows are."""
        rows = []
        for index in range(batch):
            prompt = self.prompts[index % len(self.prompts)]
            length = max(2, context - (index % 4) * 3)
            rows.append((prompt * (length // len(prompt) + 1))[:length])
        return rows

    @torch.inference_mode()
    def _run(self, target: Runner, draft: Draft, batch: int, plan: Iterable[_Turn], times: list[float]) -> None:
        """Rounds of the real loop, each as the plan says; their seconds go to `times`. draft: whose state is kept beside the
        target's. After random tokens a row takes back what it wrote: so the context stays as it is, and the draft's state is
        right when its turn comes again. The prompts are read once, which is what takes longest with long ones."""
        room, context = MAX_DRAFT_LENGTH + 2 + (0 if isinstance(draft, _Random) else _TOKENS), self.table.context_tokens
        if target.position_limit is not None:  # near the end of the positions, the context gives way to the rounds
            room = min(room, target.position_limit - 2)
            context = min(context, target.position_limit - room)
        generator = torch.Generator(device=target.device)
        generator.manual_seed(0)
        loop, rows = Batch(target, draft), list[Row]()
        for turn in plan:
            if not rows or any(row.finish_reason for row in rows):  # a good draft has filled its room
                job = Job(turn.settings, self.sampling, Stopping(room), generator)
                rows = [Row(index, prompt, job) for index, prompt in enumerate(self._rows(batch, context))]
                loop.draft = draft
                loop.start(rows)
            loop.draft, written = turn.draft, [len(row.output) for row in rows]
            for row in rows:
                row.job = replace(row.job, settings=turn.settings, draft_length=turn.length)
            times.append(loop.round().total_s)
            if isinstance(turn.draft, _Random):
                for row, kept in zip(rows, written, strict=True):
                    row.finish_reason = None
                    del row.output[kept:], row.relaxed[kept:]

    def round_s(
        self, precision: Precision, batch: int, attention: Attention | None = None, compiled: Compile = "off"
    ) -> list[float]:
        """Median seconds of a round that verifies 1, 2, .. tokens in each row of a batch, after several of its kind, as in
        decoding: what a CPU finds in its caches, and how fast its memory is, depend on what it did before, over some rounds.
        All lengths take turns, twice. attention, compiled: of the target."""
        sparse = attention or Attention()
        key = (format_of(precision, sparse, compiled), batch)
        if key not in self.table.round_s:
            target, _ = self.runners(precision)
            lengths = list(range(self.max_draft_length + 1))
            random, settings = _Random(target.vocab_size, target.device), self._settings(sparse, compiled)
            kinds = [_Turn(random, settings, length) for length in lengths]
            before = target.compile_s if compiled != "off" else 0.0
            samples = self._samples(target, random, batch, kinds)
            if compiled != "off":  # within the warm-up
                self.table.compile_s[key] = target.compile_s - before
            medians = [float(np.median(samples[kind])) for kind in kinds]
            parts = [(np.array(samples[kind]), middle) for kind, middle in zip(kinds, medians, strict=True)]
            spreads = [np.median(np.abs(part - middle)) / middle for part, middle in parts]
            self.table.round_s[key], self.table.spread[key] = medians, float(np.mean(spreads))
        return self.table.round_s[key]

    def draft_s(self, precision: Precision, batch: int, attention: Attention | None = None) -> list[float]:
        """Median seconds that drafting 0, 1, .. tokens by the draft model adds to a round that verifies as many: its steps,
        what the loop does for them, and what they cost the pass behind them, whose caches and memory they have used.
        Rounds with the draft and rounds with as many random tokens take turns. Never negative; 0 when the draft is not a
        model. attention: the draft's."""
        sparse = attention or Attention()
        key = (format_of(precision, sparse), batch)
        if key not in self.table.draft_s:
            target, draft = self.runners(precision)
            if draft is None or isinstance(draft, NgramDraft):
                return [0.0] * (self.max_draft_length + 1)
            lengths = sorted({1, min(2, self.max_draft_length), self.max_draft_length})
            random, plain, drafting = _Random(target.vocab_size, target.device), self._settings(), self._settings(sparse)
            without = [_Turn(random, plain, length) for length in lengths]
            drafted = [_Turn(draft, drafting, length) for length in lengths]
            kinds = [kind for pair in zip(without, drafted, strict=True) for kind in pair]
            samples = self._samples(target, draft, batch, kinds)
            added = [
                max(0.0, float(np.median(samples[one]) - np.median(samples[other])))
                for one, other in zip(drafted, without, strict=True)
            ]
            every = np.interp(range(self.max_draft_length + 1), [0, *lengths], [0.0, *added])
            self.table.draft_s[key] = [float(seconds) for seconds in every]
        return self.table.draft_s[key]

    def _samples(self, target: Runner, draft: Draft, batch: int, kinds: Sequence[_Turn]) -> dict[_Turn, list[float]]:
        """The seconds of rounds of each kind. They take turns up and down, so that a drift of the machine hits all alike;
        the second half of a turn counts. It has as many rounds as the cell has time for, going by those of the warm-up."""
        times: list[float] = []
        turns, half = [*kinds, *kinds[::-1]], 0

        def plan() -> Iterator[_Turn]:
            nonlocal half
            yield from [turn for turn in kinds for _ in range(_WARM_UP)]
            half = self._half(times, len(turns))
            yield from [turn for turn in turns for _ in range(2 * half)]

        self._run(target, draft, batch, plan(), times)
        samples: dict[_Turn, list[float]] = {kind: [] for kind in kinds}
        for place, turn in enumerate(turns):
            end = len(kinds) * _WARM_UP + 2 * half * (place + 1)
            samples[turn] += times[end - half : end]
        return samples

    def _half(self, warm_up: Sequence[float], turns: int) -> int:
        """Rounds of half a turn: such that so many turns take a cell's time, going by the seconds of rounds before them."""
        most = -(-self.repeats // 2)
        if self.cell_s is None:
            return most
        return max(1, min(most, int(self.cell_s / (2 * turns * float(np.mean(warm_up))))))

    def even_out(self, precisions: Sequence[Precision], batch: int) -> None:
        """Puts the rounds of these precisions on one footing: each was measured in a minute of its own, and a machine has
        faster and slower ones. Plain rounds of all that are near the fastest take turns, and the cells are scaled by what
        they take then."""
        cells = {precision: self.round_s(precision, batch) for precision in precisions}
        fastest = min(seconds[0] for seconds in cells.values())
        near = [precision for precision, seconds in cells.items() if seconds[0] < _NEAR * fastest]
        if len(near) < 2:
            return
        samples: dict[Precision, list[float]] = {precision: [] for precision in near}
        for way in (1, -1):
            for precision in near[::way]:
                target, _ = self.runners(precision)
                plain, times = _Turn(_Random(target.vocab_size, target.device), self._settings(), 0), list[float]()
                self._run(target, plain.draft, batch, [plain] * (_SETTLING + -(-self.repeats // 2)), times)
                samples[precision] += times[_SETTLING:]
        for precision, part in samples.items():
            factor = float(np.median(part)) / cells[precision][0]
            self.table.round_s[precision, batch] = [factor * seconds for seconds in cells[precision]]

    def _settings(self, attention: Attention | None = None, compiled: Compile = "off") -> Settings:
        return Settings(
            rule="exact",
            draft_length=MAX_DRAFT_LENGTH,
            attention=attention or Attention(),
            compile=compiled,
            cuda_graphs=self.cuda_graphs,
        )

    def lookup_s(self, batch: int) -> list[float]:
        """Median seconds of drafting at most 0, 1, .. tokens by n-gram in each row of a batch."""
        if batch not in self.table.lookup_s:
            rows, medians = self._rows(batch, self.table.context_tokens), [0.0]
            choice = Choice(self.sampling, torch.Generator())
            draft = NgramDraft()
            for length in range(1, self.max_draft_length + 1):
                request = Request(rows, [length] * batch, Settings(draft_length=length), [choice] * batch)
                samples = []
                for _ in range(_JUDGE_REPEATS):
                    began = self.clock()
                    draft.propose(request)
                    samples.append(self.clock() - began)
                medians.append(float(np.median(samples)))
            self.table.lookup_s[batch] = medians
        return self.table.lookup_s[batch]

    def judge_s(self, rule: str, batch: int, dense: bool) -> float:
        """Seconds a round that `rule` takes over `exact`, for a draft that samples (dense q); never negative."""
        key = (rule, batch)
        if rule == "exact" or not dense:
            return 0.0
        if key not in self.table.judge_s:
            target, _ = self.runners(self.precision)
            self.table.judge_s[key] = max(0.0, self._judge(rule, batch, target) - self._judge("exact", batch, target))
        return self.table.judge_s[key]

    def _judge(self, rule: str, batch: int, target: Runner) -> float:
        generator = torch.Generator(device=target.device)
        generator.manual_seed(0)
        width, device = 4, target.device
        logits = 3 * torch.randn(batch, width + 1, target.vocab_size, generator=generator, device=device)
        draft = self.runners(self.precision)[1]
        support = draft.support if isinstance(draft, CompactDraft) else torch.arange(target.vocab_size, device=device)
        noise = torch.randn(batch, width, len(support), generator=generator, device=device)
        p, q = logits.softmax(-1), (logits[:, :width, support] + noise).softmax(-1)
        proposal = Proposal(support[q.argmax(-1)], [width] * batch, q, width, support)
        uniforms = torch.rand(batch, width + 1, generator=generator, device=device)
        settings = make_settings(rule=rule, alpha=0.3)
        alpha = torch.full((batch, width), 0.3, device=device)
        samples = []
        for _ in range(_JUDGE_REPEATS + 1):
            synchronise(device)
            began = self.clock()
            judge(p, proposal, settings, alpha, uniforms, greedy=False)
            synchronise(device)
            samples.append(self.clock() - began)
        return float(np.median(samples[1:]))
