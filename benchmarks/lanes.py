"""Lossless decoding with lanes over the same without: tokens a second, and how many prefetched proposals were kept.

The tokens are the same (checked), so the ratio is of the seconds alone. Lanes are for a CUDA device; elsewhere they run one
after the other, and the ratio says what throwing prefetches away costs.
"""

from __future__ import annotations

import argparse

from lossyspec.decoder import Decoder
from lossyspec.drafts import load_draft
from lossyspec.loading import load
from lossyspec.settings import Precisions, Settings
from lossyspec.stats import Stats
from lossyspec.tuner.measurement.clock import ratio_interval
from lossyspec.tuner.workloads import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="embedded", help="a draft model: nothing else has a prefetch")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    target = load(options.target, options.precision)
    settings = Settings(
        alpha=options.alpha, draft_length=options.draft_length,
        precision=Precisions(target=options.precision, draft=options.precision),
    )  # fmt: skip
    decoder = Decoder(target, load_draft(options.draft, target, options.precision), settings)
    items = load_workload("dialogue").confirm
    runs: dict[bool, list[Stats]] = {False: [], True: []}
    alike = 0
    for block in range(-1, options.blocks):  # the first warms up
        prompts = [items[(block * options.batch + row) % len(items)].messages for row in range(options.batch)]
        said = {}
        for lanes in (False, True) if block % 2 else (True, False):
            answers = decoder.generate(
                prompts, options.tokens, seed=block + 1, temperature=options.temperature,
                settings=settings.model_copy(update={"lanes": lanes}),
            )  # fmt: skip
            said[lanes] = [answer.tokens for answer in answers]
            if block >= 0:
                runs[lanes].append(answers.stats)
        alike += block >= 0 and said[False] == said[True]
    (base, base_s), (new, new_s) = (
        ([[float(stats.tokens)] for stats in part], [[stats.decode_s] for stats in part]) for part in runs.values()
    )
    interval = ratio_interval(new, new_s, base, base_s)
    speeds = [sum(stats.tokens for stats in part) / sum(stats.decode_s for stats in part) for part in runs.values()]
    kept, made = (sum(getattr(stats, name) for stats in runs[True]) for name in ("prefetches_kept", "prefetched"))
    print(
        f"{options.target}, {options.draft}, {options.precision}, batch {options.batch}, "
        f"draft length {options.draft_length}, {target.model.device}: "
        f"{speeds[1]:.1f} tokens/s with lanes, {speeds[0]:.1f} without, {speeds[1] / speeds[0]:.2f}x {interval}; "
        f"{kept} of {made} prefetches kept; {alike} of {options.blocks} blocks token-identical"
    )


if __name__ == "__main__":
    main()
