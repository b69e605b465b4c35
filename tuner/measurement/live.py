"""Live measurement: contestants take turns on the same prompts, A B C then C B A, so that a drift of the machine hits all.

A block is one pass over one batch of prompts; successive blocks run in opposite orders. Ratios are of sums over blocks,
intervals resample blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lossyspec.records import BlockRecord, Estimate, Measurement, Prediction

from .clock import Clock, default_clock, ratio_interval


@dataclass(frozen=True)
class Contestant:
    """name: the trial's number, or `transformers`. run(prompts, seed) decodes a batch and returns what it counted.

    every: it takes part in every so many pairs of blocks.
    """

    name: str
    batch_size: int
    run: Callable[[list[list[int]], int], BlockRecord]
    every: int = 1

    def takes_part(self, block: int) -> bool:
        """Whether it runs in a block; both blocks of a pair or none, so that both orders count alike."""
        return (block // 2) % self.every == 0


def measure_blocks(
    contestants: Sequence[Contestant],
    prompts: Sequence[list[int]],
    *,
    budget_s: float,
    min_blocks: int,
    max_blocks: int,
    seed: int,
    on_run: Callable[[BlockRecord], None],
    stop: Callable[[], bool],
    clock: Clock = default_clock,
    done: Sequence[BlockRecord] = (),
) -> list[BlockRecord]:
    """Runs blocks until the budget, and at least `min_blocks`; an even number, so that both orders count alike.

    done: runs of an interrupted measurement; only its finished blocks are kept. The first block is preceded by one short
    run of each contestant that is thrown away.
    """
    by_block: dict[int, dict[str, BlockRecord]] = {}
    for record in done:  # a block that was cut off and run again is stored twice: the last run of each counts
        by_block.setdefault(record.block, {})[record.contestant] = record
    kept = [part for block, part in sorted(by_block.items()) if part.keys() == _names(contestants, block)]
    runs = [record for part in kept for record in part.values()]
    block, began = len(kept), clock()
    if block < max_blocks:
        for contestant in contestants:
            contestant.run([prompts[0]] * contestant.batch_size, seed)
    while block < max_blocks and not stop():
        if block >= min_blocks and block % 2 == 0 and clock() - began + _block_s(runs, block) * 2 > budget_s:
            break
        forward = block % 2 == 0
        playing = [contestant for contestant in contestants if contestant.takes_part(block)]
        for contestant in playing if forward else playing[::-1]:
            size = contestant.batch_size
            batch = [prompts[(block * size + row) % len(prompts)] for row in range(size)]
            record = contestant.run(batch, seed + 1 + block)
            record = record.model_copy(update={"block": block, "forward": forward})
            on_run(record)
            runs.append(record)
        block += 1
    return runs


def _names(contestants: Sequence[Contestant], block: int) -> set[str]:
    return {contestant.name for contestant in contestants if contestant.takes_part(block)}


def _block_s(runs: Sequence[BlockRecord], blocks: int) -> float:
    return sum(record.total_s for record in runs) / blocks if blocks else 0.0


def _blocks(
    runs: Sequence[BlockRecord], name: str, counted: Callable[[BlockRecord], tuple[int, float]]
) -> tuple[list[list[float]], list[list[float]]]:
    both = [counted(record) for record in runs if record.contestant == name]
    return [[float(tokens)] for tokens, _ in both], [[seconds] for _, seconds in both]


def _decoding(record: BlockRecord) -> tuple[int, float]:
    return record.decoding or _all(record)


def _all(record: BlockRecord) -> tuple[int, float]:
    return record.tokens, record.total_s


def speed_ratio(runs: Sequence[BlockRecord], name: str, base: str, end_to_end: bool = False) -> Estimate:
    """Tokens/s of one contestant over another's: total tokens over total seconds on each side, with its interval."""
    counted = _all if end_to_end else _decoding
    theirs, ours = ({record.block for record in runs if record.contestant == who} for who in (name, base))
    shared = theirs & ours
    runs = [record for record in runs if record.block in shared]
    new, old = _blocks(runs, name, counted), _blocks(runs, base, counted)
    sums = [float(np.sum(part)) for part in (*new, *old)]
    return Estimate(value=(sums[0] / sums[1]) / (sums[2] / sums[3]), ci95=ratio_interval(*new, *old))


def tokens_per_s(runs: Sequence[BlockRecord], name: str, end_to_end: bool = False) -> float:
    """Total tokens over total seconds (never a mean of rates)."""
    tokens, seconds = _blocks(runs, name, _all if end_to_end else _decoding)
    return float(np.sum(tokens) / np.sum(seconds))


def repetition(outputs: Sequence[Sequence[int]], size: int = 4) -> float | None:
    """Share of n-grams that occurred before in the same output; None when no output is long enough."""
    total = repeated = 0
    for output in outputs:
        grams = [tuple(output[place : place + size]) for place in range(len(output) - size + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def _outputs(runs: Sequence[BlockRecord]) -> list[tuple[int, ...]]:
    return [output for record in runs for output in record.outputs]


def _depths(mine: Sequence[BlockRecord]) -> tuple[list[int], list[int]]:
    width = max((len(record.drafted_at) for record in mine), default=0)
    drafted, accepted = np.zeros(width, dtype=int), np.zeros(width, dtype=int)
    for record in mine:
        drafted[: len(record.drafted_at)] += np.array(record.drafted_at, dtype=int)
        accepted[: len(record.accepted_at)] += np.array(record.accepted_at, dtype=int)
    return drafted.tolist(), accepted.tolist()


def summarise(
    runs: Sequence[BlockRecord],
    name: str,
    plain: str,
    predicted: Prediction,
    generated_perplexity: Callable[[Sequence[Any]], float] | None = None,
) -> Measurement:
    """All measured figures of one contestant. generated_perplexity: of outputs under the target, for the drift alarm."""
    mine = [record for record in runs if record.contestant == name]
    base = [record for record in runs if record.contestant == plain]
    drafted, accepted = _depths(mine)
    rounds, tokens = sum(record.rounds or 0 for record in mine), sum(record.tokens for record in mine)
    speedup, per_round = speed_ratio(runs, name, plain), tokens / rounds
    gaps = np.array([gap for record in mine for gap in record.gaps_s])
    first = [record.first_token_s for record in mine if record.first_token_s is not None]
    lengths = [np.mean([len(output) for output in _outputs(part)]) for part in (mine, base)]
    drift = None
    if generated_perplexity is not None and name != plain:
        drift = generated_perplexity(mine) / generated_perplexity(base)
    return Measurement(
        speedup=speedup,
        end_to_end_speedup=speed_ratio(runs, name, plain, end_to_end=True),
        tokens_per_s=tokens_per_s(runs, name),
        plain_tokens_per_s=tokens_per_s(runs, plain),
        tokens_per_round=per_round,
        drafted_per_round=sum(drafted) / rounds,
        acceptance=sum(accepted) / sum(drafted) if sum(drafted) else None,
        acceptance_by_depth=tuple(kept / tried for kept, tried in zip(accepted, drafted, strict=True) if tried),
        tokens=tokens,
        rounds=rounds,
        blocks=len({record.block for record in mine}),
        ttft_ms=1000 * float(np.mean(first)) if first else None,
        itl_ms={f"p{level}": 1000 * float(np.percentile(gaps, level)) for level in (50, 95, 99)} if len(gaps) else None,
        length_ratio=float(lengths[0] / lengths[1]),
        repetition=repetition(_outputs(mine)),
        generated_perplexity_ratio=drift,
        prediction_error=predicted.speedup / speedup.value - 1,
        tokens_per_round_error=predicted.tokens_per_round / per_round - 1,
    )
