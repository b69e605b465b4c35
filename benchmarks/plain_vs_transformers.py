"""Plain decoding here in several precisions over transformers' generate in its faster dense one: batch 1, interleaved."""

from __future__ import annotations

import argparse

from lossyspec.prompts import prompt_ids
from lossyspec.settings import PRECISIONS, QUANTISED, Precision, Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.measurement.live import Contestant, measure_blocks, speed_ratio, tokens_per_s
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.stages import named
from lossyspec.tuner.workloads import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32", help=f"Comma-separated, of {', '.join(PRECISIONS)}.")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    wanted: list[Precision] = options.precision.split(",")
    if unknown := sorted(set(wanted) - set(PRECISIONS)):
        parser.error(f"precision is {', '.join(unknown)}; allowed: {', '.join(PRECISIONS)}")
    dense: list[Precision] = [name for name in wanted if name not in QUANTISED] or ["fp32"]
    pool, sampling = ModelPool(SearchConfig(target=options.target), print), Sampling(temperature=0.7)
    tokenizer = pool.decoder(dense[0]).tokenizer
    prompts = [prompt_ids(tokenizer, item.messages) for item in load_workload("dialogue").confirm]
    contestants = []
    for name in wanted:
        settings = Settings(draft_length=0, precision=Precisions(target=name))
        contestants.append(Contestant(name, 1, named(name, pool.run_settings(settings, sampling, options.tokens))))
    for name in dense:
        outside = f"transformers {name}"
        contestants.append(Contestant(outside, 1, named(outside, pool.run_transformers(name, sampling, options.tokens))))
    runs = measure_blocks(
        contestants, prompts, budget_s=0, min_blocks=options.blocks, max_blocks=options.blocks, seed=0,
        on_run=lambda record: None, stop=lambda: False,
    )  # fmt: skip
    speeds = {each.name: tokens_per_s(runs, each.name, end_to_end=True) for each in contestants}
    base = max((f"transformers {name}" for name in dense), key=lambda name: speeds[name])
    print(f"{options.blocks} blocks, prefill included; ratios are over {base}")
    for name, speed in speeds.items():
        ratio = speed_ratio(runs, name, base, end_to_end=True)
        print(f"{name:18} {speed:6.1f} tokens/s  {ratio.value:.3f} {ratio.ci95}")


if __name__ == "__main__":
    main()
