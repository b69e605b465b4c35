"""Whether a head pays: what its steps cost beside the target's, and the lossless speed-up that its overlaps promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossyspec.feature_head import FeatureHead
from lossyspec.head_drafting import FeatureDraft
from lossyspec.runner import Runner
from lossyspec.settings import Sampling

from ..measurement.costs import CostMeter

_CONTEXT = 128
_LONGEST = 6


def payoff(target: Runner, head: FeatureHead, overlaps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Step costs in seconds at batch 1 and a context of 128 tokens (of the draft: the mean over a long round), and by
    temperature the best draft length with its predicted lossless speed-up over plain decoding.

    overlaps: rows of `training.overlap`. Overlap is the chance that a token is accepted, so a round of draft length n
    keeps 1 + sum over j of the product of the first j overlaps (Leviathan et al., arXiv 2211.17192, section 3.1, with a
    rate for each depth); beyond the last depth it holds.
    """
    draft = FeatureDraft(head, target.model, target.vocab_size, packed=target.native)  # as `drafts.make_draft`
    prompt = [token % target.vocab_size for token in range(3, 3 + _CONTEXT)]
    meter = CostMeter(lambda precision: (target, draft), [prompt], _CONTEXT, Sampling(), _LONGEST)
    rounds, drafting = meter.round_s("fp32", 1), meter.draft_s("fp32", 1)
    step = drafting[-1] / _LONGEST
    found: dict[str, Any] = {
        "target_step_s": rounds[0],
        "draft_step_s": step,
        "step_ratio": step / rounds[0],
        "lossless": [],
    }
    for temperature in sorted({row["temperature"] for row in overlaps}):
        rates = [row["overlap"] for row in overlaps if row["temperature"] == temperature]
        length, speedup = best_length(rates, rounds, drafting)
        found["lossless"].append({"temperature": temperature, "draft_length": length, "predicted_speedup": speedup})
    return found


def best_length(rates: Sequence[float], round_s: Sequence[float], draft_s: Sequence[float]) -> tuple[int, float]:
    """The draft length of the largest predicted speed-up, and that speed-up; (0, 1.0) when none is over plain.

    rates: acceptance at depths 1, 2, ... round_s: seconds of a pass that verifies 0, 1, .. drafted tokens. draft_s: of
    drafting as many.
    """
    best, kept, chance = (0, 1.0), 1.0, 1.0
    for length in range(1, len(round_s)):
        chance *= rates[min(length, len(rates)) - 1]
        kept += chance
        speedup = kept * round_s[0] / (round_s[length] + draft_s[length])
        best = max(best, (length, speedup), key=lambda pair: pair[1])
    return best
