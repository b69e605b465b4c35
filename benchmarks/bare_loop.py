"""Draft length 0 over a loop that knows no draft: the target's pass, softmax, a draw. Without prefill."""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from common import Run, line, one_text, play

from lossyspec.decoder import Decoder
from lossyspec.prompts import prompt_ids
from lossyspec.records import BlockRecord
from lossyspec.sampling import draw
from lossyspec.settings import PRECISIONS, Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.workloads import load_workload


def bare(decoder: Decoder, temperature: float, tokens: int) -> Run:
    """The shortest loop over the same target: one text, no settings, no statistics."""

    @torch.inference_mode()
    def run(prompts: list[list[int]], seed: int) -> BlockRecord:
        (prompt,), target = prompts, decoder.target
        generator = torch.Generator().manual_seed(seed)
        began = perf_counter()
        target.start([prompt], len(prompt) + tokens)
        token, output, read = prompt[-1], [], perf_counter()
        while len(output) < tokens:
            p = (target.logits(torch.tensor([[token]]), [len(prompt) - 1 + len(output)])[0] / temperature).softmax(-1)
            token = int(draw(p, torch.rand(1, generator=generator)))
            output.append(token)
            if token in decoder.eos_ids:
                break
        ended = perf_counter()
        return one_text(output, ended - began, ended - read)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--precision", default="int4", choices=PRECISIONS)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    # with the default draft, as a service has it: draft length 0 leaves it idle
    pool = ModelPool(SearchConfig(target=options.target), lambda text: None)
    decoder = pool.decoder(options.precision)
    decoder.eos_ids = frozenset()  # texts of equal length
    settings = Settings(draft_length=0, precision=Precisions(target=options.precision))
    prompts = [prompt_ids(decoder.tokenizer, item.messages) for item in load_workload("dialogue").confirm]
    runs = {
        "bare loop": bare(decoder, options.temperature, options.tokens),
        "draft length 0": pool.run_settings(settings, Sampling(temperature=options.temperature), options.tokens),
    }
    done = play(runs, prompts, options.blocks)
    print(f"{options.precision}, {options.blocks} texts of {options.tokens} tokens")
    for name in runs:
        print(line(done, name, "bare loop", end_to_end=False))


if __name__ == "__main__":
    main()
