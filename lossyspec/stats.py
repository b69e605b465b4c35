"""What a decoding run counted: the raw material of every speed and acceptance figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Round:
    """What one round of a batch did. drafted, accepted: tokens of each row; tokens: of those of its text.

    relaxed: tokens of each row's text that a rule with alpha over 0 judged; variation: the sum of TV(pi, p) over them.
    steps: forward passes of the draft. Seconds of the whole batch, by the wall clock: drafting, the target's pass, the
    verdict, and all of the round. With lanes: kept says that the proposal was made in the round before, prefetched that one
    for the next round has been made, whose steps count here and whose seconds are in verify_s.
    """

    drafted: list[int]
    accepted: list[int]
    tokens: list[int]
    relaxed: list[int]
    variation: list[float]
    steps: int
    draft_s: float
    verify_s: float
    judge_s: float
    total_s: float
    kept: bool = False
    prefetched: bool = False


@dataclass
class Stats:
    """Counters of one decoding run, over all its rows.

    rounds counts row-rounds (a batch of 4 rows in one pass is 4); passes counts target passes. drafted and accepted
    are per depth in `drafted_at`, `accepted_at`. emitted tokens include those cut after a stop. Seconds: wall clock.
    prefetched: proposals made ahead of their round, for the whole batch; prefetches_kept: those that were used.
    """

    rows: int = 0
    passes: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_steps: int = 0
    prefetched: int = 0
    prefetches_kept: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    judge_s: float = 0.0
    decode_s: float = 0.0
    round_times_s: list[float] = field(default_factory=list)
    round_tokens: list[int] = field(default_factory=list)
    round_rows: list[int] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def prefetches_thrown(self) -> int:
        """Proposals made ahead of their round that were not used."""
        return self.prefetched - self.prefetches_kept

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens of the texts per row-round."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over decoding seconds, without prefill."""
        return self.tokens / self.decode_s if self.decode_s > 0 else None

    def whole(self, rows: int) -> tuple[int, float]:
        """Tokens and seconds of the rounds that so many rows took part in."""
        rounds = zip(self.round_rows, self.round_tokens, self.round_times_s, strict=True)
        kept = [(tokens, seconds) for there, tokens, seconds in rounds if there == rows]
        return sum(tokens for tokens, _ in kept), sum(seconds for _, seconds in kept)

    def summary(self) -> dict[str, Any]:
        """The main figures by name; None where there is nothing to divide by."""
        names = (
            "tokens",
            "rounds",
            "tokens_per_round",
            "drafted",
            "accepted",
            "acceptance",
            "tokens_per_s",
            "prefill_s",
            "decode_s",
        )
        return {name: getattr(self, name) for name in names}

    def add(self, done: Round, rows: Sequence[int] | None = None) -> None:
        """Adds a round, or what it did for some of its rows; its seconds count as a whole."""
        tokens, counted = 0, range(len(done.tokens)) if rows is None else rows
        for row in counted:
            self._count_row(done.drafted[row], done.accepted[row])
            tokens += done.tokens[row]
        self.tokens += tokens
        self.passes += 1
        self.draft_steps += done.steps
        self.prefetched += done.prefetched
        self.prefetches_kept += done.kept
        self.draft_s += done.draft_s
        self.verify_s += done.verify_s
        self.judge_s += done.judge_s
        self.decode_s += done.total_s
        self.round_times_s.append(done.total_s)
        self.round_tokens.append(tokens)
        self.round_rows.append(len(counted))

    def _count_row(self, drafted: int, accepted: int) -> None:
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for depth in range(drafted):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < accepted
        self.rounds += 1
