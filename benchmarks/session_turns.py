"""Time to the first token of turn 3: a session that kept its caches, against decoding the whole conversation anew."""

from __future__ import annotations

import argparse
from time import perf_counter

from lossyspec.decoder import Decoder
from lossyspec.drafts import load_draft
from lossyspec.loading import load
from lossyspec.prompts import prompt_ids
from lossyspec.session import Session
from lossyspec.settings import Precisions, Settings
from lossyspec.tuner.measurement.clock import ratio_interval
from lossyspec.tuner.workloads import load_workload

FOLLOW_UPS = ("Which of these points matters most, and why?", "Say that again in one sentence.")


def opened(decoder: Decoder, question: str, new: int) -> Session:
    """A conversation after two turns."""
    chat = decoder.session()
    for text in (question, FOLLOW_UPS[0]):
        chat.send(text, new, seed=0)
    return chat


def first_piece_s(begin: object) -> float:
    """Seconds until a stream gives its first text; the stream is then dropped."""
    began = perf_counter()
    stream = begin()  # type: ignore[operator]
    next(stream)
    took = perf_counter() - began
    stream.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each earlier turn")
    options = parser.parse_args()
    target = load(options.target, options.precision)
    draft = load_draft(options.draft, target, options.precision)
    decoder = Decoder(target, draft, Settings(draft_length=4, precision=Precisions(target=options.precision)))
    kept, anew, lengths = [], [], []
    items = load_workload("summarization").confirm
    for index, item in enumerate(items[: options.conversations]):
        chat = opened(decoder, item.messages[-1]["content"], options.tokens)
        whole = [*chat.messages, {"role": "user", "content": FOLLOW_UPS[1]}]
        ways = [
            (kept, lambda chat=chat: chat.stream(FOLLOW_UPS[1], 8, seed=1)),
            (anew, lambda whole=whole: decoder.stream(whole, 8, seed=1)),
        ]
        for seconds, begin in ways if index % 2 else ways[::-1]:
            seconds.append(first_piece_s(begin))
        lengths.append(len(prompt_ids(decoder.tokenizer, whole)))
        print(f"{lengths[-1]:5} tokens of prompt: kept {kept[-1] * 1e3:7.0f} ms, anew {anew[-1] * 1e3:7.0f} ms")
    ones = [[1.0]] * len(kept)
    interval = ratio_interval(ones, [[value] for value in kept], ones, [[value] for value in anew])
    print(
        f"time to first token of turn 3: {sum(kept) / len(kept) * 1e3:.0f} ms kept, "
        f"{sum(anew) / len(anew) * 1e3:.0f} ms anew; "
        f"{sum(anew) / sum(kept):.1f} times sooner {interval} ({options.precision}, {options.draft} draft)"
    )


if __name__ == "__main__":
    main()
