"""Continuous batching over static batches of the same size: the same requests, whose answers are of unequal length.

CPU time of the process and not of the clock, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import process_time

import torch

from lossyspec.decoder import Decoder
from lossyspec.decoding import Batch
from lossyspec.loading import load
from lossyspec.settings import Precisions, Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--draft-length", type=int, default=0)
    parser.add_argument("--longest", type=int, default=32, help="answers are of 1 to so many tokens")
    options = parser.parse_args()
    settings = Settings(draft_length=options.draft_length, precision=Precisions(target=options.precision))
    decoder = Decoder(load(options.target, options.precision), None, settings)
    decoder.eos_ids = frozenset()
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 5000, (24,), generator=drawn).tolist() for _ in range(options.requests)]
    news = torch.randint(1, options.longest + 1, (options.requests,), generator=drawn).tolist()
    moving = 0.0

    def timed(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            nonlocal moving
            began = process_time()
            function(*arguments)
            moving += process_time() - began

        return call

    began = process_time()
    static = []
    for first in range(0, options.requests, options.batch):
        group = slice(first, first + options.batch)
        # a batch goes on until its longest answer is there; each row stops at its own length
        answers = decoder.generate_ids(prompts[group], max(news[group]), temperature=0.0)
        static += [answer.tokens[:new] for answer, new in zip(answers, news[group], strict=True)]
    static_s = process_time() - began
    Batch.join, Batch.keep = timed(Batch.join), timed(Batch.keep)  # type: ignore[method-assign, assignment]
    began = process_time()
    with decoder.batcher(options.batch, max_length=24 + options.longest) as batcher:
        handles = [batcher.submit_ids(prompt, new, temperature=0.0) for prompt, new in zip(prompts, news, strict=True)]
        continuous = [handle.result().tokens for handle in handles]
    continuous_s = process_time() - began
    tokens = sum(news)
    print(
        f"{options.requests} requests of 1 to {options.longest} tokens, batch {options.batch}, {options.precision}: "
        f"{tokens / static_s:.1f} tokens a CPU second in static batches, {tokens / continuous_s:.1f} continuous: "
        f"{static_s / continuous_s:.2f} times; joining and leaving took {moving / continuous_s:.2%}; "
        f"{'the same' if static == continuous else 'other'} tokens"
    )


if __name__ == "__main__":
    main()
