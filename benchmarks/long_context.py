"""Lossless decoding over plain decoding by context length: with the target's own draft, or by the target itself over a few
blocks of its cache.

Batch 1, without prefill. Each block is another text, read once; on its cache the two ways take turns, A B B A.
`--draft self:int4` drafts with the target's int4 weights over copies of its entries; `--draft auto` with the head.
"""

from __future__ import annotations

import argparse
from typing import Any

from lossyspec.decoder import Decoder, Generation
from lossyspec.drafts import load_draft, names_self
from lossyspec.errors import ConfigurationError
from lossyspec.loading import load
from lossyspec.prompts import prompt_ids
from lossyspec.settings import PRECISIONS, Attention, Precisions, Settings
from lossyspec.tuner.measurement.clock import ratio_interval
from lossyspec.tuner.workloads import load_workload


def texts_of(tokenizer: Any, context: int, count: int) -> list[list[int]]:
    """`count` different stretches of `context` tokens of the long documents, each as a question to the model."""
    work = load_workload("longdoc")
    documents = [item.messages[-1]["content"] for item in (*work.search, *work.confirm)]
    found = []
    for index in range(count):
        order = documents[index % len(documents) :] + documents[: index % len(documents)]
        ids = prompt_ids(tokenizer, [{"role": "user", "content": "\n\n".join(order)}])
        found.append([*ids[: context // 2], *ids[-(context - context // 2) :]])
    return found


def turns(decoder: Decoder, prompt: list[int], ways: list[Settings], tokens: int, temperature: float) -> list[Generation]:
    """The runs of one block: the ways in order and back, on one cache."""
    chat = decoder.session()
    chat.generate_ids(prompt, 2, settings=ways[0], temperature=temperature)  # reads the prompt
    order = [*range(len(ways)), *reversed(range(len(ways)))]
    runs = [chat.generate_ids(prompt, tokens, settings=ways[way], temperature=temperature, seed=1) for way in order]
    chat.close()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="int4", choices=PRECISIONS)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="self")
    parser.add_argument("--attention", default="b64-s1-w2-t4-draft", help="Of the draft self.")
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--contexts", default="2000,4000")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    try:
        attention = Attention.named(options.attention)
    except ConfigurationError as problem:
        parser.error(str(problem))
    if not names_self(options.draft):
        attention = Attention()
    elif attention.side != "draft":
        parser.error(f"attention is {options.attention}; the draft self needs the side draft")
    target = load(options.target, options.precision)
    decoder = Decoder(target, load_draft(options.draft, target, options.precision))
    precision = Precisions(target=options.precision, draft=options.precision)
    ways = [
        Settings(draft_length=0, precision=precision),
        Settings(rule="exact", draft_length=options.draft_length, precision=precision, attention=attention),
    ]
    print(f"{options.precision}, draft {options.draft}, {attention.name}, {options.draft_length} drafted, batch 1")
    for context in map(int, options.contexts.split(",")):
        counts: list[list[list[float]]] = [[], []]
        seconds: list[list[list[float]]] = [[], []]
        drafted = accepted = rounds = same = 0
        for prompt in texts_of(decoder.tokenizer, context, options.blocks):
            plain, own, again, plain_again = turns(decoder, prompt, ways, options.tokens, options.temperature)
            for way, runs in enumerate(((plain, plain_again), (own, again))):
                counts[way].append([float(run.stats.tokens) for run in runs])
                seconds[way].append([run.stats.decode_s for run in runs])
            drafted, accepted = drafted + own.stats.drafted, accepted + own.stats.accepted
            rounds, same = rounds + own.stats.rounds, same + (own[0].tokens == plain[0].tokens)
        speeds = [sum(map(sum, count)) / sum(map(sum, spent)) for count, spent in zip(counts, seconds, strict=True)]
        interval = ratio_interval(counts[1], seconds[1], counts[0], seconds[0])
        tokens = sum(run[0] for run in counts[1])
        print(
            f"{context:6} tokens: plain {speeds[0]:5.1f} tokens/s, lossless {speeds[1] / speeds[0]:.3f}x {interval}; "
            f"{accepted / max(drafted, 1):.0%} accepted, {tokens / rounds:.2f} tokens a round; "
            f"the same text as plain in {same} of {options.blocks} blocks",
            flush=True,
        )


if __name__ == "__main__":
    main()
