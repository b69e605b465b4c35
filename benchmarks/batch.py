"""Throughput of a batch over that of one text, plain and lossless, and the host's share of a round at both sizes."""

from __future__ import annotations

import argparse

from common import host_share, line, play

from lossyspec.prompts import prompt_ids
from lossyspec.settings import PRECISIONS, Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.workloads import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--precision", default="int4", choices=PRECISIONS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draft-length", type=int, default=1)
    parser.add_argument("--task", default="dialogue")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    pool = ModelPool(SearchConfig(target=options.target, draft=options.draft), lambda text: None)
    decoder, sampling = pool.decoder(options.precision), Sampling(temperature=options.temperature)
    prompts = [prompt_ids(decoder.tokenizer, item.messages) for item in load_workload(options.task).confirm]
    ways = {
        name: Settings(rule="exact", draft_length=length, precision=Precisions(target=options.precision))
        for name, length in (("plain", 0), ("lossless", options.draft_length))
    }
    runs, sizes = {}, {}
    for name, settings in ways.items():
        for size in (1, options.batch):
            runs[f"{name}, batch {size}"] = pool.run_settings(settings, sampling, options.tokens)
            sizes[f"{name}, batch {size}"] = size
    done = play(runs, prompts, options.blocks, sizes)
    print(f"{options.precision}, {options.task}, {options.blocks} blocks, without prefill")
    for name in ways:
        for size in (1, options.batch):
            print(line(done, f"{name}, batch {size}", f"{name}, batch 1", end_to_end=False))
    for size in (1, options.batch):
        print(line(done, f"lossless, batch {size}", f"plain, batch {size}", end_to_end=False))
    for name, settings in ways.items():
        for size in (1, options.batch):
            stats = decoder.generate_ids(
                prompts[:size], options.tokens, settings=settings, seed=0, temperature=options.temperature
            ).stats
            round_s = stats.decode_s / stats.passes
            print(f"{name}, batch {size}: {round_s * 1e3:.2f} ms a round, {host_share(stats):.1%} of it neither model's")


if __name__ == "__main__":
    main()
