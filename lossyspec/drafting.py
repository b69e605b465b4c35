"""Drafts: who proposes the tokens that the target verifies. All behind one interface that returns the q sampled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .runner import Runner
from .sampling import Choice, draw, laws, softmax_temperature, uniforms
from .settings import MAX_DRAFT_LENGTH, Settings


@dataclass(frozen=True)
class Request:
    """What a draft may look at when it proposes: the prefix of each row, nothing of what is drafted later.

    prefixes: prompt and output of each row. limits: most tokens to draft for each row, already within draft_length.
    settings: of all rows, lossless only when each of them is. choices: how each row chooses its tokens.
    numbers: (rows, n) uniform numbers to draw the first n tokens with; None: from the rows' generators.
    """

    prefixes: Sequence[Sequence[int]]
    limits: Sequence[int]
    settings: Settings
    choices: Sequence[Choice]
    numbers: Tensor | None = None

    @property
    def penalised(self) -> bool:
        """Whether a penalty or processors change the logits of any row, which then have to be over the whole vocabulary."""
        return any(choice.penalised for choice in self.choices)

    @property
    def greedy(self) -> bool:
        """Whether no row draws its tokens by chance."""
        return all(choice.greedy for choice in self.choices)

    @property
    def softmax_temperature(self) -> float | None:
        """The temperature whose softmax is q for all rows; None: there is more to it."""
        sampling, settings = self.choices[0].sampling, self.settings
        alike = all(choice.sampling == sampling for choice in self.choices)
        if self.penalised or not alike:
            return None
        return softmax_temperature(sampling, settings.tau)

    def law(self, logits: Tensor, drafted: Tensor) -> Tensor:
        """q of each row (batch, V) from logits (batch, 1, V), after the same penalties and filters as the target's p.
        drafted: (batch, n) what the round has drafted so far."""
        grown = self.prefixes
        if self.penalised:
            grown = [[*prefix, *new] for prefix, new in zip(self.prefixes, drafted.tolist(), strict=True)]
        return laws(logits, grown, drafted, self.choices, self.settings.tau)[:, 0]


@dataclass(frozen=True)
class Proposal:
    """tokens: (batch, width) drafted; lengths: how many of them count in each row; steps: draft forward passes spent.

    q: (batch, width, V) the probabilities that the tokens were drawn from, or None when q is one-hot at the token.
    support: (S,) rising token ids that the last dimension of q stands for; None: all V.
    """

    tokens: Tensor
    lengths: list[int]
    q: Tensor | None
    steps: int
    support: Tensor | None = None

    def on_all(self, size: int) -> Proposal:
        """The same with q over all `size` tokens."""
        if self.q is None or self.support is None:
            return self
        q = self.q.new_zeros(*self.q.shape[:-1], size).index_copy_(-1, self.support, self.q)
        return Proposal(self.tokens, self.lengths, q, self.steps)

    def of_rows(self, rows: Sequence[int]) -> Proposal:
        """Of these rows alone."""
        index = torch.tensor(rows, device=self.tokens.device)
        q = None if self.q is None else self.q[index]
        return Proposal(self.tokens[index], [self.lengths[row] for row in rows], q, self.steps, self.support)

    @staticmethod
    def of_chains(chains: Sequence[Sequence[int]], device: torch.device, steps: int = 0) -> Proposal:
        """What a deterministic draft says for each row."""
        width = max(map(len, chains), default=0)
        padded = [[*chain, *[0] * (width - len(chain))] for chain in chains]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(chains), width)
        return Proposal(tokens, [len(chain) for chain in chains], None, steps)

    @staticmethod
    def empty(rows: int, device: torch.device) -> Proposal:
        """Nothing drafted in any row."""
        return Proposal(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows, None, 0)


class Draft(Protocol):
    """A draft keeps its own state for the rows of a batch; the loop tells it what became of them."""

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """A new batch of rows."""

    def fork(self) -> Draft:
        """The same draft with rows of its own."""

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Goes on with the one row: the target has kept the prompt's first `kept` tokens, at least one, from before."""

    def propose(self, request: Request) -> Proposal:
        """Drafts at most `limits[i]` tokens for row i; stops a row before a position whose confidence is under theta."""

    def select(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""

    def join(self, other: Self, room: int = 0) -> None:
        """Appends the rows of another fork of the same draft. room: rows to make room for when it has to grow."""

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """The target's final hidden states (batch, n, hidden) of the tokens that it has just read, from slot starts[i]."""

    def read(self, prompts: list[list[int]]) -> None:
        """Reads what it lacks of the prompts, after `observe`: what it has not read by then, its next round does."""


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


@runtime_checkable
class CompactDraft(Protocol):
    """A draft whose q is 0 outside a support, and whose law along a given text can be computed."""

    support: Tensor

    def along(self, prompt: list[int], output: list[int], features: Tensor | None, depths: int) -> list[Tensor]:
        """fp32 logits (len(output), S) of q at each position of an output, by depth in the round; one: the same at all."""


class StatelessDraft:
    """Base of drafts that keep nothing about their rows: the prefixes come with each request."""

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Nothing to prepare."""

    def fork(self) -> Self:
        """Itself."""
        return self

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Nothing to prepare."""

    def select(self, rows: list[int]) -> None:
        """No state of rows."""

    def join(self, other: Self, room: int = 0) -> None:
        """No state of rows."""

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """Looks at tokens only."""

    def read(self, prompts: list[list[int]]) -> None:
        """Nothing to prepare."""


def draw_round(
    request: Request,
    law: Callable[[int, Tensor], Tensor],
    live: list[bool],
    device: torch.device,
    support: Tensor | None = None,
) -> Proposal:
    """Drafts a round token by token, for any draft that samples.

    law(column, drafted) gives q of each row, (batch, V) or over `support`, after the columns drafted so far; each call is
    a step. live: the rows that draft at all. A row stops at its limit, and before a position of a confidence under theta.
    Its numbers are drawn for all of its limit at once, so that what a round takes from a generator does not depend on q.
    """
    rows, width = len(request.prefixes), max(request.limits, default=0)
    greedy = [choice.greedy for choice in request.choices]
    drafted = torch.zeros(rows, width, dtype=torch.long, device=device)
    lengths, drawn_from, steps = [0] * rows, [], 0
    numbers = None if request.greedy else round_numbers(request, live, device)
    for column in range(width):
        if not any(live):
            break
        q = law(column, drafted[:, :column])
        steps += 1
        confident = (q.amax(-1) >= request.settings.theta).tolist()  # not where q is NaN
        live = [live[row] and confident[row] and column < limit for row, limit in enumerate(request.limits)]
        if not any(live):
            break
        if numbers is None:
            chosen = q.argmax(-1)
        else:
            # a row that processors left no token has no q: it drafts nothing here, and the target's turn says so
            chosen = draw(q, numbers[:, column]).clamp_max(q.shape[-1] - 1)
            if any(greedy):
                chosen = torch.where(torch.tensor(greedy, device=device), q.argmax(-1), chosen)
        drafted[:, column] = chosen if support is None else support[chosen]
        drawn_from.append(q)
        lengths = [length + alive for length, alive in zip(lengths, live, strict=True)]
    stacked = torch.stack(drawn_from, 1) if drawn_from and not request.greedy else None
    return Proposal(drafted[:, : len(drawn_from)], lengths, stacked, steps, None if stacked is None else support)


def round_numbers(request: Request, live: list[bool], device: torch.device) -> Tensor:
    """(rows, most) the uniform numbers that the round's tokens are drawn by: for all of the limit of each live row."""
    if request.numbers is not None:
        return request.numbers
    rows = zip(live, request.limits, request.choices, strict=True)
    counts = [limit if alive and not choice.greedy else 0 for alive, limit, choice in rows]
    if not any(counts):  # a row by itself would still take one
        return torch.zeros(len(counts), max(request.limits), device=device)
    drawn = uniforms(request.choices, counts, device)
    return pad(drawn, (0, max(request.limits) - drawn.shape[1]))  # greedy rows may draft further


class ModelDraft:
    """Any causal LM with the target's tokenizer as the draft.

    What its cache holds of a row is compared with the row's tokens at each round: rejected tokens are read over, and
    tokens that it never read (all accepted: the last one; rounds without drafting: more) are read first.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self._read: list[list[int]] = []

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Reads the prompts. Raises ConfigurationError when the texts do not fit the draft model's positions."""
        self.runner.check_room(capacity - MAX_DRAFT_LENGTH - 1)
        self.runner.start(prompts, capacity)
        self._read = [list(prompt[:-1]) for prompt in prompts]

    def fork(self) -> ModelDraft:
        """The same model with a cache of its own."""
        return ModelDraft(self.runner.fork(), self.vocab_size)

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Reads what its own cache does not hold of the prompt; that need not be what the target lacks."""
        self.runner.check_room(capacity - MAX_DRAFT_LENGTH - 1)
        self.runner.resume(prompt, shared_length(self._read[0], prompt[:-1]), capacity)
        self._read = [list(prompt[:-1])]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.runner.select(rows)
        self._read = [self._read[row] for row in rows]

    def join(self, other: ModelDraft, room: int = 0) -> None:
        """Appends the other's rows."""
        self.runner.join(other.runner, room)
        self._read += other._read

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """Looks at tokens only."""

    def read(self, prompts: list[list[int]]) -> None:
        """Has read them as it started."""

    def _unread(self, row: int, prefix: Sequence[int]) -> int:
        """How many of the row's last tokens have to be read; at least the last one."""
        return len(prefix) - shared_length(self._read[row], list(prefix[:-1]))

    def _logits(self, tokens: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """(batch, 1, V) after the first counts[i] tokens of each row."""
        last = torch.tensor(counts, device=tokens.device) - 1
        logits = self.runner.logits(tokens, starts)[torch.arange(len(counts), device=tokens.device), last]
        logits = logits[:, None, : self.vocab_size]
        missing = self.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    @torch.inference_mode()
    def propose(self, request: Request) -> Proposal:
        """Draws from q, the draft's softmax at tau times the request's temperature, under the same filters as the target."""
        device, prefixes = self.runner.device, request.prefixes
        back = max(map(self._unread, range(len(prefixes)), prefixes))
        counts = [min(back, len(prefix)) for prefix in prefixes]  # one that has just joined may be shorter

        def law(column: int, drafted: Tensor) -> Tensor:
            if column:
                ends = [len(prefix) + column - 1 for prefix in prefixes]
                return request.law(self._logits(drafted[:, -1:], ends, [1] * len(ends)), drafted)
            unread = [[*prefix[-count:], *[0] * back][:back] for prefix, count in zip(prefixes, counts, strict=True)]
            starts = [len(prefix) - count for prefix, count in zip(prefixes, counts, strict=True)]
            # should the pass fail, what it was to write over is not held any more
            self._read = [list(prefix[:start]) for prefix, start in zip(prefixes, starts, strict=True)]
            return request.law(self._logits(torch.tensor(unread, device=device), starts, counts), drafted)

        proposal = draw_round(request, law, [limit > 0 for limit in request.limits], device)
        if read := proposal.steps:
            grown = proposal.tokens[:, : read - 1].tolist()
            self._read = [[*prefix, *new] for prefix, new in zip(prefixes, grown, strict=True)]
        return proposal
