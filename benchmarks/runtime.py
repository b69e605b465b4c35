"""The runtime beside transformers: plain and lossless decoding in several precisions, its `generate`, and its prompt lookup.

All in one run, interleaved; every ratio is over transformers' `generate` in its faster dense precision, prefill included.
Then where a round's time goes, and what lossless decoding adds to the peak memory of a process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from common import Run, host_share, line, one_text, play

from lossyspec.cpu import peak_memory_bytes
from lossyspec.prompts import prompt_ids
from lossyspec.records import BlockRecord
from lossyspec.settings import PRECISIONS, QUANTISED, Precision, Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.measurement.live import tokens_per_s
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.workloads import load_workload


def settings_of(precision: Precision, draft_length: int) -> Settings:
    return Settings(draft_length=draft_length, precision=Precisions(target=precision))


def llama_cpp(path: Path, sampling: Sampling, tokens: int) -> dict[str, Run]:
    """llama.cpp through llama-cpp-python, which the project does not need otherwise: plain decoding of a GGUF file, on as
    many threads as torch has; each prompt is read anew. Greedy too: its draws from a whole vocabulary sort that first."""
    import torch
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    model = Llama(str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: list[list[int]], seed: int, temperature: float) -> BlockRecord:
        (prompt,) = prompts
        model.reset()
        model.set_seed(seed)
        began, output = perf_counter(), []
        stream = model.generate(prompt, top_k=0, top_p=1.0, min_p=0.0, temp=temperature, repeat_penalty=1.0, reset=True)
        for token in stream:
            output.append(token)
            if token == model.token_eos() or len(output) == tokens:
                break
        return one_text(output, perf_counter() - began)

    return {
        "llama.cpp": lambda prompts, seed: run(prompts, seed, sampling.temperature),
        "llama.cpp, greedy": lambda prompts, seed: run(prompts, seed, 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="bf16,int8,int4", help=f"Comma-separated, of {', '.join(PRECISIONS)}.")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-length", default="3", help="Of lossless decoding, comma-separated; 0: plain only.")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--task", default="dialogue")
    parser.add_argument("--llama-cpp", type=Path, help="GGUF file that llama.cpp plays with; needs llama-cpp-python.")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted: list[Precision] = options.precision.split(",")
    if unknown := sorted(set(wanted) - set(PRECISIONS)):
        parser.error(f"precision is {', '.join(unknown)}; allowed: {', '.join(PRECISIONS)}")
    if options.llama_cpp and options.batch != 1:
        parser.error(f"--llama-cpp decodes one text at a time; --batch is {options.batch}, allowed: 1")
    pool = ModelPool(SearchConfig(target=options.target, draft=options.draft), lambda text: None)
    lengths = [length for length in map(int, options.draft_length.split(",")) if length]
    sampling = Sampling(temperature=options.temperature)
    dense: list[Precision] = [name for name in wanted if name not in QUANTISED] or ["fp32"]
    tokenizer = pool.decoder(wanted[0] if options.peak is not None else dense[0]).tokenizer
    prompts = [prompt_ids(tokenizer, item.messages) for item in load_workload(options.task).confirm]
    if options.peak is not None:
        run = pool.run_settings(settings_of(wanted[0], options.peak), sampling, options.tokens)
        run(prompts[: options.batch], 0)
        print(peak_memory_bytes())
        return
    runs = {}
    for precision in wanted:
        for length in (0, *lengths):
            name = f"lossless {precision}, draft length {length}" if length else f"plain {precision}"
            runs[name] = pool.run_settings(settings_of(precision, length), sampling, options.tokens)
    for precision in dense:
        runs[f"transformers {precision}"] = pool.run_transformers(precision, sampling, options.tokens)
        if options.batch == 1:  # its prompt lookup decodes one text at a time
            runs[f"transformers {precision}, prompt lookup"] = pool.run_transformers(
                precision, sampling, options.tokens, prompt_lookup_num_tokens=10
            )
    if options.llama_cpp:
        runs |= llama_cpp(options.llama_cpp, sampling, options.tokens)
    done = play(runs, prompts, options.blocks, options.batch)
    speeds = {name: tokens_per_s(done, name, end_to_end=True) for name in runs}
    base = max((f"transformers {precision}" for precision in dense), key=lambda name: speeds[name])
    print(f"{options.blocks} blocks of batch {options.batch}, temperature {options.temperature}, with prefill")
    for name in runs:
        print(line(done, name, base), flush=True)
    if options.llama_cpp:
        best = max((name for name in runs if name.startswith("llama.cpp")), key=lambda name: speeds[name])
        for name in runs:
            print(line(done, name, best), flush=True)
    for precision in wanted:
        for length in (0, *lengths):
            made = pool.decoder(precision).generate_ids(
                prompts[: options.batch], options.tokens, settings=settings_of(precision, length), seed=0,
                temperature=options.temperature,
            )  # fmt: skip
            stats = made.stats
            print(
                f"{precision}, draft length {length}: {stats.decode_s / stats.passes * 1e3:.2f} ms a round: "
                f"target {stats.verify_s / stats.decode_s:.1%}, draft {stats.draft_s / stats.decode_s:.1%}, "
                f"the rest {host_share(stats):.1%}"
            )
    peaks = {}
    for length in {0, *lengths[:1]}:
        command = [sys.executable, __file__, *sys.argv[1:], "--precision", wanted[-1], "--peak", str(length)]
        peaks[length] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    for length in lengths[:1]:
        print(f"peak memory {wanted[-1]}: {peaks[length] / peaks[0] - 1:+.1%} over plain's {peaks[0] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
