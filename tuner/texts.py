"""The texts that a search reads: how many of them, how long, and what the target writes to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from lossyspec.prompts import Prompt, prompt_ids
from lossyspec.settings import Sampling, Settings

from .trace import Texts, reference_texts
from .work import Work
from .workloads import Item

#: share of the budget that reading may take, the fewest texts of a half, formats that are confirmed as a rule
_READING_SHARE, _LEAST_TEXTS, _CONFIRMED_FORMATS, _WARM_UP_TOKENS = 0.5, 4, 2, 32


def middle_context(work: Work) -> int:
    """Tokens of the middle prompt of the search half, with half of an answer."""
    lengths = sorted(map(len, _prompts(work, work.workload.search)))
    return lengths[len(lengths) // 2] + work.config.max_new_tokens // 2


def texts_in_budget(work: Work) -> int:
    """How many texts of each half can be read as often as a search reads them, in half of the budget: drawn, traced in each
    format of the space, and confirmed with their references in about two. Says so where it is fewer than there are."""
    have, prompts = max(len(work.workload.search), len(work.workload.confirm)), _prompts(work, work.workload.search)
    middle, target = sorted(prompts, key=len)[len(prompts) // 2], work.pool.decoder(work.reference).target
    target.start([middle[:_WARM_UP_TOKENS]], _WARM_UP_TOKENS + 1)
    began = monotonic()
    target.start([middle], len(middle) + 1)
    read_s = monotonic() - began
    known = any(item.reference for item in work.workload.confirm)
    reads = 2 + len(work.space.precisions) * len(work.space.attentions) + _CONFIRMED_FORMATS * (2 if known else 1)
    fitting = max(_LEAST_TEXTS, int(_READING_SHARE * work.config.budget_s / (reads * read_s)))
    if fitting < have:
        work.reporter.say(
            f"reading {have} texts of each half takes about {have * reads * read_s / 60:.0f} min of a budget of "
            f"{work.config.budget_s / 60:.0f}: {fitting} are used; more --budget, or --texts, narrows the intervals"
        )
    return fitting


def _prompts(work: Work, items: Sequence[Item]) -> list[list[int]]:
    tokenizer = work.pool.decoder(work.reference).tokenizer
    return [prompt_ids(tokenizer, _as_prompt(item)) for item in items]


def _as_prompt(item: Item) -> Prompt:
    """A single user message as a plain string, which a model without a chat template can read too."""
    first, *more = item.messages
    return first["content"] if first["role"] == "user" and not more else item.messages


def sampled_texts(work: Work) -> dict[str, Texts]:
    """Texts drawn from the reference target itself for both halves, and the references of the confirmation half."""
    decoder, limit = work.pool.decoder(work.reference), work.config.max_new_tokens
    full = Sampling(temperature=work.sampling.temperature)
    plain = Settings(draft_length=0, cuda_graphs=work.config.cuda_graphs)
    texts: dict[str, Texts] = {}
    for half, items, seed in (("search", work.workload.search, 1), ("confirm", work.workload.confirm, 2)):
        work.reporter.say(f"sampling {len(items)} texts of at most {limit} tokens from the target ({half} half)")
        prompts = _prompts(work, items)
        drawn = decoder.generate_ids(
            prompts, limit, seed=1000 * work.config.seed + seed, settings=plain, **full.model_dump()
        )
        texts[half] = Texts(
            prompts, [answer.tokens for answer in drawn], [answer.finish_reason == "length" for answer in drawn]
        )
    known = [
        (prompt, item.reference)
        for prompt, item in zip(texts["confirm"].prompts, work.workload.confirm, strict=True)
        if item.reference
    ]
    if known and work.sampling.temperature > 0:
        ids = [decoder.tokenizer(reference, add_special_tokens=False)["input_ids"] for _, reference in known]
        texts["references"] = reference_texts([prompt for prompt, _ in known], ids, limit)
    return texts
