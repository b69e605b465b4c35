"""Lossless decoding over transformers' assisted generation with the same draft: prompt lookup, and a model.

The draft model is the target's own first layers with its last norm and output rows: not a good draft, but the same one on
both sides. Greedy, so that all sides write the same text (in fp32); one precision, one text at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from common import line, play

from lossyspec.loading import load, quiet_transformers
from lossyspec.prompts import prompt_ids
from lossyspec.settings import NgramSettings, Precisions, Sampling, Settings
from lossyspec.tuner.config import SearchConfig
from lossyspec.tuner.models import ModelPool
from lossyspec.tuner.workloads import load_workload

MATCH = 4  # longest suffix that prompt lookup searches for, on both sides


def first_layers(target: str, layers: int, folder: Path) -> None:
    """Writes a model of the target's first layers."""
    from transformers import AutoModelForCausalLM

    whole = load(target, "fp32")
    config = whole.model.config.__class__.from_dict({**whole.model.config.to_dict(), "num_hidden_layers": layers})
    part = AutoModelForCausalLM.from_config(config)
    names = part.state_dict().keys()
    part.load_state_dict({name: value for name, value in whole.model.state_dict().items() if name in names})
    part.tie_weights()
    part.generation_config = whole.model.generation_config
    with quiet_transformers():
        part.save_pretrained(folder)
    whole.tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--precision", default="fp32", help="A dense one.")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--layers", type=int, default=10, help="Of the draft model.")
    parser.add_argument("--task", default="summarization")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    length, greedy = options.draft_length, Sampling(temperature=0.0)
    settings = Settings(
        rule="exact",
        draft_length=length,
        precision=Precisions(target=options.precision),
        ngram=NgramSettings(max_match=MATCH),
    )
    with TemporaryDirectory() as place:
        first_layers(options.target, options.layers, Path(place))
        pools = [
            ModelPool(SearchConfig(target=options.target, draft=draft), lambda text: None) for draft in ("ngram", place)
        ]
        for pool in pools:
            pool.decoder(options.precision)
    assistant = pools[1].draft.model  # type: ignore[union-attr]
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = length, "constant", 0.0
    theirs = [
        {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": MATCH},
        {"assistant_model": assistant},
    ]
    runs = {
        "plain": pools[0].run_settings(Settings(draft_length=0, precision=settings.precision), greedy, options.tokens),
        "transformers": pools[0].run_transformers(options.precision, greedy, options.tokens),
    }
    for kind, pool, generate in zip(("prompt lookup", "model"), pools, theirs, strict=True):
        runs[f"lossless, {kind}"] = pool.run_settings(settings, greedy, options.tokens)
        runs[f"transformers, {kind}"] = pool.run_transformers(options.precision, greedy, options.tokens, **generate)
    prompts = [
        prompt_ids(pools[0].decoder(options.precision).tokenizer, item.messages)
        for item in load_workload(options.task).confirm
    ]
    done = play(runs, prompts, options.blocks)
    print(f"{options.task}, {options.precision}, {length} drafted, {options.blocks} texts, greedy, with prefill")
    for name, base in (
        ("plain", "transformers"),
        ("lossless, prompt lookup", "transformers, prompt lookup"),
        ("lossless, model", "transformers, model"),
        ("lossless, prompt lookup", "plain"),
        ("lossless, model", "plain"),
        ("transformers, prompt lookup", "transformers"),
        ("transformers, model", "transformers"),
    ):
        print(line(done, name, base))
    texts = {
        name: [record.outputs for record in sorted(done, key=lambda record: record.block) if record.contestant == name]
        for name in runs
    }
    for name in runs:
        same = sum(one == other for one, other in zip(texts[name], texts["plain"], strict=True))
        print(f"{name}: the text of plain decoding in {same} of {options.blocks}")


if __name__ == "__main__":
    main()
