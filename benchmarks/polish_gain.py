"""Polishing of relaxed answers: what it changes, what it wins in log-likelihood under the target, and what it costs."""

from __future__ import annotations

import argparse

import numpy as np

from lossyspec.correctors import TargetCorrector, load_corrector
from lossyspec.decoder import Decoder
from lossyspec.drafts import load_draft
from lossyspec.loading import load
from lossyspec.polish import Polisher
from lossyspec.prompts import prompt_ids
from lossyspec.settings import Precisions, Settings
from lossyspec.tuner.workloads import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--task", default="dialogue")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--corrector", default="target", help="target, or an encoder-decoder model")
    options = parser.parse_args()
    target = load(options.target, options.precision)
    settings = Settings(alpha=options.alpha, draft_length=4, precision=Precisions(target=options.precision))
    decoder = Decoder(target, load_draft(options.draft, target, options.precision), settings)
    corrector = TargetCorrector() if options.corrector == "target" else load_corrector(options.corrector)
    polisher, gains, decode_s, polish_s, tokens, relaxed, edits, tried = (
        Polisher(decoder, corrector),
        [],
        0.0,
        0.0,
        0,
        0,
        0,
        0,
    )
    for index, item in enumerate(load_workload(options.task).confirm[: options.prompts]):
        prompt = prompt_ids(decoder.tokenizer, item.messages)
        made = decoder.generate_ids([prompt], options.tokens, seed=index, temperature=0.7)
        polished = polisher.polish_ids(prompt, made[0])
        before, after = polished.log_likelihood
        gains.append((after - before) / len(made[0].tokens))
        decode_s, polish_s = decode_s + made.stats.prefill_s + made.stats.decode_s, polish_s + polished.seconds
        tokens, relaxed = tokens + len(made[0].tokens), relaxed + sum(made[0].relaxed)
        edits, tried = edits + len(polished.edits), tried + polished.tried
        for edit in polished.edits:
            print(f"  {edit.before!r} -> {edit.after!r} ({edit.gain_nats:+.2f} nats)")
    picks = np.random.default_rng(0).integers(0, len(gains), (2000, len(gains)))
    low, high = np.quantile(np.array(gains)[picks].mean(1), [0.025, 0.975])
    print(
        f"{tokens} tokens, {relaxed} relaxed; {tried} spans tried, {edits} edits kept; log-likelihood {np.mean(gains):+.4f} "
        f"nats a token ({low:+.4f} to {high:+.4f}); {polish_s:.1f} s on top of {decode_s:.1f} s of decoding"
    )


if __name__ == "__main__":
    main()
