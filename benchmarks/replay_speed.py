"""Configurations a second that replay evaluates on the trace of a run, cold (each rule and alpha for the first time)."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from time import perf_counter

from lossyspec.settings import make_settings
from lossyspec.tuner.replay import Replay
from lossyspec.tuner.trace_files import load_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    trace = load_trace(options.run / "trace.safetensors")["search"]
    precisions = sorted(trace.lookup)
    taus = sorted({tau for _, tau in trace.laws}) or [1.0]
    grid = list(
        itertools.product(
            ("optimal", "priced"), [step / 25 for step in range(1, 20)], (1, 2, 4, 8), (0.0, 0.6), precisions, taus
        )
    )
    replay = Replay(trace)
    began = perf_counter()
    for rule, alpha, length, theta, precision, tau in grid:
        replay.run(
            make_settings(rule=rule, alpha=alpha, draft_length=length, theta=theta, tau=tau, precision={"target": precision})
        )
    seconds = perf_counter() - began
    print(
        f"{len(grid)} configurations on {trace.texts.tokens} tokens in {seconds:.2f} s: {len(grid) / seconds:.0f} a second"
    )


if __name__ == "__main__":
    main()
