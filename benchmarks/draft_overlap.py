"""How near a draft head is to its target on answers to prompts that it never saw: overlap and equal argmax, by depth.

The target writes the answers, by plain decoding, at temperature 1 and greedily; the head is measured at each of their
positions. Give --task for the half of a bundled workload that searches confirm on, or --prompts with a JSONL file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lossyspec.decoder import Decoder
from lossyspec.head_files import embedded_head, load_head
from lossyspec.loading import load
from lossyspec.prompts import prompt_ids
from lossyspec.settings import Settings
from lossyspec.tuner.distill.data import Shard
from lossyspec.tuner.distill.loss import overlap
from lossyspec.tuner.workloads import load_workload, read_prompts

DEPTHS = 4


def summary(measured: list[list[dict[str, Any]]], field: str) -> list[dict[str, Any]]:
    """By depth the mean over all tokens, with its 95 % interval over texts."""
    values = np.array([[row[field] for row in text] for text in measured])
    weights = np.array([[row["tokens"] for row in text] for text in measured], dtype=float)
    picks = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    drawn = (values * weights)[picks].sum(1) / weights[picks].sum(1)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    mean = (values * weights).sum(0) / weights.sum(0)
    return [
        {"depth": depth + 1, "value": round(float(mean[depth]), 4), "ci95": [float(low[depth]), float(high[depth])]}
        for depth in range(DEPTHS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument(
        "--draft", type=Path, nargs="+", default=[embedded_head()],
        help="folders of heads, all measured on the same answers [default: the embedded one]",
    )  # fmt: skip
    parser.add_argument("--task", default="dialogue")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    target = load(options.target, "fp32")
    decoder, heads = Decoder(target, settings=Settings(draft_length=0)), [load_head(path, target) for path in options.draft]
    embeddings = target.model.get_input_embeddings().weight.detach()
    rows = target.model.get_output_embeddings().weight.detach()
    items = read_prompts(options.prompts) if options.prompts else load_workload(options.task).confirm
    prompts = [prompt_ids(decoder.tokenizer, item.messages) for item in items[: options.count]]
    results: list[dict[str, Any]] = [{"prompts": len(prompts), "draft": str(path)} for path in options.draft]
    for written, field in ((1.0, "overlap"), (0.0, "top1")):
        measured: list[list[Any]] = [[] for _ in heads]
        for first in range(0, len(prompts), 8):
            batch = prompts[first : first + 8]
            for prompt, answer in zip(
                batch, decoder.generate_ids(batch, options.tokens, temperature=written, seed=first), strict=True
            ):
                ids = prompt + answer.tokens
                decoder.target.start([ids], len(ids))
                assert decoder.target.features is not None
                forced = torch.arange(len(ids) - 1)[None] < len(prompt)
                shard = Shard(torch.tensor([ids[:-1]], dtype=torch.int32), forced, decoder.target.features.float())
                if int((~forced[:, 2:]).sum()) > DEPTHS:
                    for found, head in zip(measured, heads, strict=True):
                        found.append(overlap(head, embeddings, rows, shard, [written or 1.0], DEPTHS))
        for result, found in zip(results, measured, strict=True):
            rates = result[f"{field} at temperature {written:g}"] = summary(found, field)
            if not options.json:
                shown = ", ".join("{:.3f} ({:.3f}-{:.3f})".format(rate["value"], *rate["ci95"]) for rate in rates)
                tokens = sum(text[0]["tokens"] for text in found)
                print(
                    f"{result['draft']}, temperature {written:g}, {tokens} tokens, {field} at depth 1, 2, ..: {shown}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
