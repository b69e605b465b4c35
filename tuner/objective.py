"""From a configuration to its two objectives: predicted speed-up and exact perplexity ratio."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from lossyspec.likelihood import Floats
from lossyspec.records import Prediction
from lossyspec.settings import Compile, Precision, Settings

from .measurement.costs import CostMeter
from .replay import Flow, Replay, Replayed


@dataclass(frozen=True)
class Evaluated:
    """One configuration: what replay says of its quality, and what the cost table makes of its speed."""

    replayed: Replayed
    predicted: Prediction


def _longest(drafted: Floats, batch: int) -> Floats:
    """Distribution of the longest of `batch` independent rows: a pass verifies as many tokens as its longest row drafted."""
    return np.diff(np.concatenate([[0.0], np.cumsum(drafted) ** batch]))


class Objective:
    """Evaluates configurations on one half of the workload.

    precisions, compiles: those that plain decoding may use; the fastest of them at a batch size is the baseline there.
    dense: the draft samples from a full q (a model), so that rules cost time on its V numbers.
    """

    def __init__(
        self,
        replay: Replay,
        meter: CostMeter,
        precisions: tuple[Precision, ...],
        dense: bool,
        compiles: tuple[Compile, ...] = ("off",),
    ) -> None:
        self.replay = replay
        self.meter = meter
        self.precisions = precisions
        self.dense = dense
        self.compiles = compiles

    def plain_round_s(self, batch: int) -> tuple[float, Precision]:
        """Seconds of the fastest plain round at a batch size, and its precision."""
        formats = itertools.product(self.precisions, self.compiles)
        return min((self.meter.round_s(precision, batch, compiled=how)[0], precision) for precision, how in formats)

    def round_s(self, settings: Settings, flow: Flow, batch: int) -> float:
        """Expected seconds of one pass of the whole batch, drafting and judging included."""
        precision = settings.precision.target
        verify = self.meter.round_s(precision, batch, settings.attention.on("verify"), settings.compile)
        lengths = _longest(flow.drafted, batch)
        total = float(sum(share * verify[length] for length, share in enumerate(lengths)))
        if settings.draft_length == 0:
            return total
        if self.dense and settings.source != "ngram":
            drafting = self.meter.draft_s(precision, batch, settings.attention.on("draft"))
            steps = _longest(flow.steps, batch)
            total += float(steps @ np.interp(range(len(steps)), range(len(drafting)), drafting))
        if not self.dense or settings.source != "draft":
            total += self.meter.lookup_s(batch)[settings.draft_length]
        return total + self.meter.judge_s(settings.rule, batch, self.dense and settings.source != "ngram")

    def predict(self, settings: Settings, flow: Flow, batch: int) -> Prediction:
        """Speed from the cost table; the ratio is to the fastest plain decoding at the same batch size."""
        seconds, (plain_s, _) = self.round_s(settings, flow, batch), self.plain_round_s(batch)
        return Prediction(
            speedup=flow.tokens_per_round * plain_s / seconds,
            tokens_per_s=batch * flow.tokens_per_round / seconds,
            tokens_per_round=flow.tokens_per_round,
            drafted_per_round=flow.drafted_per_round,
            acceptance=flow.acceptance,
            round_s=seconds,
            plain_round_s=plain_s,
        )

    def evaluate(self, settings: Settings, batch: int) -> Evaluated:
        """Both objectives. Raises ValueError when one is not a finite number, with the reason."""
        replayed = self.replay.run(settings)
        ratio = replayed.perplexity_ratio
        if not math.isfinite(ratio):
            cause = ": the rule gives some reference token no chance at all" if ratio == math.inf else ""
            raise ValueError(f"perplexity ratio is {ratio}{cause}")
        predicted = self.predict(settings, replayed.flow, batch)
        if not math.isfinite(predicted.speedup) or predicted.speedup <= 0:
            raise ValueError(f"predicted speed-up is {predicted.speedup}")
        return Evaluated(replayed, predicted)
