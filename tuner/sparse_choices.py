"""Which block-sparse attentions a search may choose from: those that skip something in its contexts and are faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from lossyspec.drafts import SELF, names_self
from lossyspec.errors import ConfigurationError
from lossyspec.runner import Runner
from lossyspec.settings import Attention

from .config import SearchConfig
from .measurement.clock import Clock, default_clock, synchronise
from .models import ModelPool
from .screening import WIDTHS, Times
from .search_space import SearchSpace

DENSE = "dense"
#: of the draft `self`, and of the target: block, sink, window and top, by about the share of a long text that they see
DRAFTING = ("b32-s1-w3-t8-draft", "b64-s1-w2-t4-draft", "b16-s2-w4-t32-draft")
VERIFYING = ("b32-s1-w4-t16-verify", "b64-s1-w3-t12-verify")
_REPEATS = 5


def offer(space: SearchSpace, config: SearchConfig) -> SearchSpace:
    """The space with the attentions that the draft and the task allow, before the contexts are known.

    Raises ConfigurationError for a name asked for that the draft or the task has no use for.
    """
    own = names_self(config.draft)
    if config.attentions is not None:
        for name in config.attentions:
            side = Attention.named(name).side
            if own and side != "draft":
                raise ConfigurationError(f"attention {name!r} was asked for: the draft {SELF} needs the side 'draft'")
            if side == "draft" and not own:
                raise ConfigurationError(f"attention {name!r} was asked for: the side 'draft' needs --draft {SELF}")
            if side == "verify" and not space.relax:
                raise ConfigurationError(f"attention {name!r} was asked for: it is lossy, and this search is lossless only")
        return replace(space, attentions=config.attentions if own else tuple(dict.fromkeys([DENSE, *config.attentions])))
    if own:
        return replace(space, attentions=DRAFTING)
    if not space.relax:
        excluded = space.excluded | {"attention verify": "it is lossy, and this search is lossless only"}
        return replace(space, excluded=excluded)
    return replace(space, attentions=(DENSE, *VERIFYING))


def narrow_attentions(
    space: SearchSpace, pool: ModelPool, context: int, say: Callable[[str], None], clock: Clock = default_clock
) -> SearchSpace:
    """The space without the attentions that cannot win at the workload's context, with the reasons in `excluded`.

    context: tokens of its middle text, half of the answer included. Raises ConfigurationError when nothing is left for the
    draft `self`.
    """
    found: dict[str, str] = {}
    sparse = [name for name in space.attentions if name != DENSE]
    for name in sparse:
        attention = Attention.named(name)
        if not attention.skips(context):
            seen = attention.kept * attention.block
            found[name] = f"skips nothing: it sees {seen} tokens, and the middle context here has {context}"
    verifying = [name for name in sparse if name not in found and Attention.named(name).side == "verify"]
    try:
        times = measure(pool.decoder(space.precisions[0]).target, [*map(Attention.named, verifying)], context, clock)
        found |= {name: slower for name, each in zip(verifying, times, strict=True) if (slower := each.slower) is not None}
    except ConfigurationError as problem:  # a model that has no sparse attention
        found |= dict.fromkeys(verifying, str(problem))
    for name, reason in found.items():
        say(f"attention {name} is left out: {reason}")
    kept = tuple(name for name in space.attentions if name not in found)
    if not kept:
        raise ConfigurationError(
            f"draft {SELF}: no attention skips anything, since the middle context of this workload has {context} tokens; "
            f"use another draft, or name smaller attentions with --attention"
        )
    excluded = space.excluded | {f"attention {name}": reason for name, reason in found.items()}
    return replace(space, attentions=kept, excluded=excluded)


def measure(runner: Runner, attentions: Sequence[Attention], context: int, clock: Clock) -> list[Times]:
    """Times of passes with each attention against dense ones in turns, after `context` tokens, at batch 1."""
    if not attentions:
        return []
    prompt = [3 + 7 * token % max(runner.vocab_size - 3, 1) for token in range(context)]
    runner.start([prompt], context + max(WIDTHS))
    samples: list[list[list[float]]] = []
    for width in WIDTHS:
        tokens = torch.tensor([prompt[:width]], device=runner.device)
        rows: list[list[float]] = [[] for _ in range(len(attentions) + 1)]
        for _ in range(_REPEATS + 1):
            for place, attention in enumerate((Attention(), *attentions)):
                synchronise(runner.device)
                began = clock()
                runner.logits(tokens, [context - 1], attention)
                synchronise(runner.device)
                rows[place].append(clock() - began)
        samples.append(rows)
    middle = [tuple(median(rows[place][1:]) for rows in samples) for place in range(len(attentions) + 1)]
    return [Times(middle[0], each) for each in middle[1:]]
