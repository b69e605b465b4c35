"""What the guard and the counters cost: their CPU seconds over those of the rounds, drafting left out.

CPU time of the process and not of the clock, so that other work on the machine does not count; the draft is the target
itself, so that q is over the whole vocabulary, which is the worst case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any

from lossyspec import decoding, verification
from lossyspec.decoder import Decoder
from lossyspec.guard import Guard, Watch
from lossyspec.loading import load
from lossyspec.settings import Precisions, Settings


class Timed:
    """A function whose CPU seconds are added up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = process_time()
        try:
            return self.function(*arguments, **options)
        finally:
            self.seconds += process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    model = load(options.target, options.precision)
    settings = Settings(alpha=0.5, draft_length=options.draft_length, precision=Precisions(target=options.precision))
    decoder = Decoder(model, model, settings, guard=Guard(request=0.9, rolling=0.9))
    rounds, drafting = Timed(decoding.Batch.round), Timed(decoding.Batch._propose)
    variation, watch = Timed(verification.relaxed_variation), Timed(Watch.saw)
    decoding.Batch.round = lambda self: rounds(self)  # type: ignore[method-assign]
    decoding.Batch._propose = lambda self, settings: drafting(self, settings)  # type: ignore[method-assign]
    Watch.saw = lambda self, rows, done: watch(self, rows, done)  # type: ignore[method-assign]
    verification.relaxed_variation = variation
    prompt = [(7 * place) % 5000 + 10 for place in range(64)]
    result = decoder.generate_ids([prompt] * options.batch, options.tokens, seed=0, temperature=0.8)
    whole = rounds.seconds - drafting.seconds
    print(
        f"{result.stats.passes} rounds, batch {options.batch}, draft length {options.draft_length}, {options.precision}: "
        f"{whole / result.stats.passes * 1e3:.1f} CPU ms a round without drafting; variation "
        f"{variation.seconds / whole:.2%} of it, counters and guard {watch.seconds / whole:.3%}; "
        f"guard trips {decoder.counters.snapshot()['guard_trips']}"
    )


if __name__ == "__main__":
    main()
