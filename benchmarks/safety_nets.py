"""Each safety net by itself and all together at one alpha: perplexity ratio and TV by exact likelihood, speed-up live.

Quality comes from the trace of a run (the target's own texts for both halves of the workload, and the references), speed
from blocks of the confirmation half with plain decoding, interleaved. The last but one column is the share of relaxed
tokens at the start of a sentence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lossyspec.likelihood import bootstrap_ratio
from lossyspec.policy import Boundaries
from lossyspec.prompts import prompt_ids
from lossyspec.records import RunManifest, read_record
from lossyspec.settings import Policy, Precisions, Recovery, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.measurement.live import Contestant, measure_blocks, speed_ratio
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.replay import Replay
from lossyspec.tuner.stages import named
from lossyspec.tuner.trace_files import load_trace
from lossyspec.tuner.workloads import load_workload

NETS = {
    "none": Policy(),
    "sentence starts": Policy(protect=("sentence",)),
    "all boundaries": Policy(protect=("sentence", "paragraph", "list", "line")),
    "exact prefix 8": Policy(exact_prefix=8),
    "recovery": Policy(recovery=Recovery()),
    "adaptive 2 nats": Policy(adaptive=2.0),
    "guard 8 nats": Policy(guard=8.0),
}
NETS["all"] = Policy(
    protect=("sentence", "paragraph", "list", "line"), exact_prefix=8, recovery=Recovery(), adaptive=2.0, guard=8.0
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a search, whose models, draft, task and sampling are used")
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--rule", default="optimal")
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--precision", default=None, help="of the trace [default: its reference]")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    config = SearchConfig.model_validate(read_record(options.run / "manifest.json", RunManifest).config)
    traces = load_trace(options.run / "trace.safetensors")
    precision = options.precision or traces["confirm"].reference
    pool, workload = ModelPool(config, lambda text: None), load_workload(config.task, config.prompts, config.dataset)
    sampling, decoder = config.sampling or workload.task.sampling, pool.decoder(precision)
    assert decoder.tokenizer is not None
    prompts, bounds = (
        [prompt_ids(decoder.tokenizer, item.messages) for item in workload.confirm],
        Boundaries(decoder.tokenizer),
    )
    base = Settings(
        rule=options.rule, alpha=options.alpha, draft_length=options.draft_length, precision=Precisions(target=precision)
    )
    variants = {"lossless": base.model_copy(update={"alpha": 0.0})}
    variants |= {name: base.model_copy(update={"policy": policy}) for name, policy in NETS.items()}
    runs = {name: pool.run_settings(settings, sampling, options.tokens) for name, settings in variants.items()}
    runs["plain"] = pool.run_settings(base.model_copy(update={"draft_length": 0}), sampling, options.tokens)
    blocks = measure_blocks(
        [Contestant(name, 1, named(name, run)) for name, run in runs.items()],
        prompts, budget_s=0, min_blocks=options.blocks, max_blocks=options.blocks, seed=0,
        on_run=lambda record: None, stop=lambda: False,
    )  # fmt: skip
    print(
        f"{precision}, {options.rule}, alpha {options.alpha}, draft length {options.draft_length}; {options.blocks} blocks\n"
    )
    print("| net | perplexity ratio | TV | tokens a round | relaxed at sentence starts | speed-up over plain |")
    print("|---|---|---|---|---|---|")
    replays = [Replay(trace) for trace in traces.values()]
    for name, settings in variants.items():
        parts = [replay.run(settings) for replay in replays]
        logs, tokens = (np.concatenate([getattr(part, field) for part in parts]) for field in ("log_ratio", "tokens"))
        low, high = bootstrap_ratio(logs, tokens, seed=0)
        tv = np.average([part.tv or 0.0 for part in parts], weights=[part.tokens.sum() for part in parts])
        flow = np.mean([part.flow.tokens_per_round for part in parts])
        starts = relaxed = 0
        for index, prompt in enumerate(prompts[:8]):
            made = decoder.generate_ids([prompt], options.tokens, settings=settings, seed=index, **sampling.model_dump())[0]
            at = [place for place, flag in enumerate(made.relaxed) if flag]
            relaxed += len(at)
            starts += sum("sentence" in bounds.after(made.tokens[:place]) for place in at)
        speed = speed_ratio(blocks, name, "plain")
        share = f"{starts / relaxed:.1%}" if relaxed else "-"
        print(
            f"| {name} | {np.exp(logs.sum() / tokens.sum()):.3f} ({low:.3f}-{high:.3f}) | {tv:.4f} | {flow:.2f} | {share} | "
            f"{speed.value:.3f} ({speed.ci95[0]:.3f}-{speed.ci95[1]:.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
