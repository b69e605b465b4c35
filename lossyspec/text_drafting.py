"""A draft model with another tokenizer: it reads the text, and proposes only tokens that both tokenizers have."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .drafting import Proposal, Request, draw_round, shared_length
from .errors import ConfigurationError
from .runner import Runner
from .sampling import probabilities
from .vocabulary import SharedTokens, Translator, shared_tokens

logger = logging.getLogger("lossytune")

#: the cache grows by so many slots: how many tokens a text has for the draft is known when it is there
_GROW_SLOTS = 256


class TextDraft:
    """Token-level intersection (arXiv 2502.05202): q is the draft's softmax over the shared tokens, renormalised.

    The target's law stays whole, so every rule holds as with any q. Before each token the text is encoded anew: q depends on
    the text alone. What that changes of earlier tokens is found by comparing with what the cache has read.
    """

    def __init__(self, runner: Runner, translate: Translator, shared: SharedTokens, vocab_size: int) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self.support = torch.tensor(shared.target, device=runner.device)
        self._shared = shared
        self._columns = torch.tensor(shared.draft, device=runner.device)
        self._translate = translate
        self._read: list[list[int]] = []

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Reads the prompts' texts."""
        texts = [self._fitting(self._translate(prompt)) for prompt in prompts]
        self.runner.start(texts, max(map(len, texts), default=0) + _GROW_SLOTS)
        self._read = [text[:-1] for text in texts]

    def fork(self) -> TextDraft:
        """The same model with a cache of its own."""
        return TextDraft(self.runner.fork(), self._translate, self._shared, self.vocab_size)

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Nothing to do: each round reads what its cache lacks."""

    def select(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self.runner.select(rows)
        self._read = [self._read[row] for row in rows]

    def join(self, other: TextDraft, room: int = 0) -> None:
        """Appends the other's rows."""
        self.runner.join(other.runner, room)
        self._read += other._read

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """Looks at tokens only."""

    def read(self, prompts: list[list[int]]) -> None:
        """Has read them as it started."""

    @torch.inference_mode()
    def propose(self, request: Request) -> Proposal:
        """Draws from q over the shared tokens; lossless and greedy, says text, see `_say`. A row whose text does not fit the
        draft's positions drafts nothing."""
        prefixes = [list(prefix) for prefix in request.prefixes]
        if request.greedy and request.settings.lossless and not request.penalised:
            return self._say(request, prefixes)

        def law(column: int, drafted: Tensor) -> Tensor:
            grown = [[*prefix, *new] for prefix, new in zip(prefixes, drafted.tolist(), strict=True)]
            logits = self._next(list(map(self._translate, grown)))
            if request.penalised:
                everywhere = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
                logits = everywhere.index_copy_(-1, self.support, logits)
            return request.law(logits, drafted)

        live = [self._fits(self._translate(prefix), limit) for prefix, limit in zip(prefixes, request.limits, strict=True)]
        return draw_round(request, law, live, self.runner.device, None if request.penalised else self.support)

    def _fits(self, text: list[int], limit: int) -> bool:
        room = self.runner.position_limit
        return limit > 0 and (room is None or len(text) + 2 * limit <= room)

    def _say(self, request: Request, prefixes: list[list[int]]) -> Proposal:
        """The draft's own most likely tokens, as many as the row may draft, encoded for the target: also what they do not
        share. Only where the target's greedy choice decides: there what is proposed changes the speed alone."""
        texts = list(map(self._translate, prefixes))
        said: list[list[int]] = [[] for _ in texts]
        live, steps = [self._fits(text, limit) for text, limit in zip(texts, request.limits, strict=True)], 0
        while any(live):
            logits = self._logits([text + new for text, new in zip(texts, said, strict=True)])
            q = probabilities(logits[:, 0], request.choices[0].sampling, request.settings.tau)
            best, steps = q.max(-1), steps + 1
            for row, (confidence, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                live[row] = live[row] and confidence >= request.settings.theta
                if live[row]:
                    said[row].append(token)
                    live[row] = len(said[row]) < request.limits[row] and token != self._translate.draft.eos_token_id
        chains = [
            self._translate.back(prefix, text, new)[:limit]
            for prefix, text, new, limit in zip(prefixes, texts, said, request.limits, strict=True)
        ]
        return Proposal.of_chains(chains, self.runner.device, steps)

    @torch.inference_mode()
    def along(self, prompt: list[int], output: list[int], features: Tensor | None, depths: int) -> list[Tensor]:
        """fp32 logits (len(output), S) of q over the support at each position of an output; the same at all depths."""
        self.start([prompt], 0)
        return [torch.cat([self._next([self._translate(prompt + output[:place])])[0] for place in range(len(output))])]

    def _fitting(self, text: list[int]) -> list[int]:
        """The text as far as it fits the draft's positions; what is behind is never used, see `propose`."""
        return text if self.runner.position_limit is None else text[: self.runner.position_limit]

    def _next(self, texts: list[list[int]]) -> Tensor:
        """fp32 logits (batch, 1, S) of the token after each text, which is in the draft's ids."""
        return self._logits(texts)[..., self._columns]

    def _logits(self, texts: list[list[int]]) -> Tensor:
        """fp32 logits (batch, 1, V of the draft) of the token after each text; reads what the cache lacks of it."""
        texts = list(map(self._fitting, texts))
        starts = [shared_length(read, text[:-1]) for read, text in zip(self._read, texts, strict=True)]
        counts = [len(text) - start for text, start in zip(texts, starts, strict=True)]
        width = max(counts)
        if max(starts) + width > self.runner.cache.capacity:
            self.runner.cache.grow(max(starts) + width + _GROW_SLOTS)
        unread = [(text[start:] + [text[-1]] * width)[:width] for text, start in zip(texts, starts, strict=True)]
        # should the pass fail, what it was to write over is not held any more
        self._read = [text[:start] for text, start in zip(texts, starts, strict=True)]
        logits = self.runner.logits(torch.tensor(unread, device=self.runner.device), starts)
        self._read = texts
        last = torch.tensor(counts, device=logits.device) - 1
        return logits[torch.arange(len(texts), device=logits.device), last][:, None]


def make_text_draft(draft: Any, target_tokenizer: Any, vocab_size: int) -> TextDraft:
    """The draft of a loaded model with another tokenizer. Raises ConfigurationError when the two share no tokens."""
    runner = Runner(draft.model, "draft", stack=draft.stack)
    shared = shared_tokens(target_tokenizer, draft.tokenizer, vocab_size, runner.vocab_size)
    if len(shared.target) < 2:
        raise ConfigurationError(
            f"target and draft have {len(shared.target)} tokens in common; at least 2 are needed: choose another draft"
        )
    logger.info(
        "the draft has another tokenizer: it can propose the %d of the target's %d tokens that both have",
        len(shared.target),
        vocab_size,
    )
    return TextDraft(runner, Translator(target_tokenizer, draft.tokenizer), shared, vocab_size)
