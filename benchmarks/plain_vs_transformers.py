"""Plain decoding here over transformers' generate: same model, precision, prompts and sampling, batch 1, interleaved."""

from __future__ import annotations

import argparse

from lossyspec.prompts import prompt_ids
from lossyspec.settings import Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.measurement.live import Contestant, measure_blocks, speed_ratio, tokens_per_s
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.stages import named
from lossyspec.tuner.workloads import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    pool, sampling = ModelPool(SearchConfig(target=options.target), print), Sampling(temperature=0.7)
    tokenizer = pool.decoder(options.precision).tokenizer
    prompts = [prompt_ids(tokenizer, item.messages) for item in load_workload("dialogue").confirm]
    settings = Settings(draft_length=0, precision=Precisions(target=options.precision))
    contestants = [
        Contestant("plain", 1, named("plain", pool.run_settings(settings, sampling, options.tokens))),
        Contestant(
            "transformers", 1, named("transformers", pool.run_transformers(options.precision, sampling, options.tokens))
        ),
    ]
    runs = measure_blocks(
        contestants, prompts, budget_s=0, min_blocks=options.blocks, max_blocks=options.blocks, seed=0,
        on_run=lambda record: None, stop=lambda: False,
    )  # fmt: skip
    ratio = speed_ratio(runs, "plain", "transformers", end_to_end=True)
    for name in ("plain", "transformers"):
        print(f"{name:14} {tokens_per_s(runs, name, end_to_end=True):6.1f} tokens/s, prefill included")
    print(f"ratio          {ratio.value:.3f} {ratio.ci95} ({options.precision}, {options.blocks} blocks)")


if __name__ == "__main__":
    main()
