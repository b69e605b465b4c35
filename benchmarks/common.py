"""What the benchmarks share: contestants that take turns on the same prompts, and a line for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lossyspec.records import BlockRecord
from lossyspec.stats import Stats
from lossyspec.tuner.measurement.live import Contestant, measure_blocks, speed_ratio, tokens_per_s
from lossyspec.tuner.stages import named

#: decodes a batch of prompts from a seed
Run = Callable[[list[list[int]], int], BlockRecord]


def play(
    runs: Mapping[str, Run], prompts: list[list[int]], blocks: int, batch: int | Mapping[str, int] = 1
) -> list[BlockRecord]:
    """Runs of all contestants, interleaved. batch: rows of all, or of each."""
    sizes = {name: batch if isinstance(batch, int) else batch[name] for name in runs}
    return measure_blocks(
        [Contestant(name, sizes[name], named(name, run)) for name, run in runs.items()],
        prompts, budget_s=0, min_blocks=blocks, max_blocks=blocks, seed=0,
        on_run=lambda record: None, stop=lambda: False,
    )  # fmt: skip


def line(done: list[BlockRecord], name: str, base: str, end_to_end: bool = True) -> str:
    """A contestant's tokens/s, and its ratio over another's with its 95 % interval. end_to_end: with the prefill."""
    speed, ratio = tokens_per_s(done, name, end_to_end), speed_ratio(done, name, base, end_to_end)
    interval = f"({ratio.ci95[0]:.3f}-{ratio.ci95[1]:.3f})" if ratio.ci95 else "(too few blocks for an interval)"
    return f"{name:40} {speed:7.1f} tokens/s  {ratio.value:.3f} {interval} of {base}"


def one_text(output: list[int], total_s: float, decode_s: float | None = None) -> BlockRecord:
    """What a run of one text, by something that is not the decoder, has counted."""
    return BlockRecord(
        block=0, forward=True, contestant="", batch_size=1, tokens=len(output), total_s=total_s, decode_s=decode_s,
        rounds=None, first_token_s=None, outputs=(tuple(output),),
    )  # fmt: skip


def host_share(stats: Stats) -> float:
    """The share of the rounds that is neither model's."""
    return 1 - (stats.verify_s + stats.draft_s) / stats.decode_s
