"""Who proposes edits to the polish pass: the target itself, or a seq2seq model."""

from __future__ import annotations

import re
from typing import Any

import torch

from .errors import ConfigurationError
from .polish import Candidate, Scorer, Span

_SENTENCE_END = re.compile(r"[.!?\n](?=\s|$)|[。！？]")


class TargetCorrector:
    """Decodes the span again exactly: the target's own most likely tokens in its place, as many. No second model."""

    def propose(self, scorer: Scorer, output: list[int], span: Span) -> Candidate | None:
        """None where the target would have ended the text."""
        new = scorer.most_likely(output[: span.start], span.end - span.start)
        if scorer.eos_ids.intersection(new):
            return None
        tokens = [*output[: span.start], *new, *output[span.end :]]
        return Candidate(tokens, span.first, scorer.text(output[span.start : span.end]), scorer.text(new))


class Seq2SeqCorrector:
    """Rewrites the sentence around a span with an encoder-decoder model, as T5.

    template: what the model reads; `{text}` is the sentence. It decodes greedily, to at most `most_tokens` tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, template: str = "{text}", most_tokens: int = 128) -> None:
        if "{text}" not in template:
            raise ConfigurationError(f"template is {template!r}; it must hold {{text}}, where the sentence goes")
        self.model, self.tokenizer, self.template, self.most_tokens = model, tokenizer, template, most_tokens

    def propose(self, scorer: Scorer, output: list[int], span: Span) -> Candidate | None:
        """The text with the rewritten sentence, encoded anew; None when it stays as it is."""
        text = scorer.text(output)
        first, last = sentence_around(text, span.first, span.last)
        before = text[first:last]
        after = self.rewrite(before) if before else ""
        if not after or after == before:
            return None
        ids = scorer.tokenizer(text[:first] + after + text[last:], add_special_tokens=False)["input_ids"]
        ending = output[-1:] if output[-1] in scorer.eos_ids else []
        return Candidate([*ids, *ending], first, before, after)

    @torch.inference_mode()
    def rewrite(self, sentence: str) -> str:
        """What the model makes of a sentence."""
        batch = self.tokenizer(self.template.replace("{text}", sentence), return_tensors="pt").to(self.model.device)
        ids = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.most_tokens,
        )
        text: str = self.tokenizer.decode(ids[0], skip_special_tokens=True)
        return text.strip()


def sentence_around(text: str, first: int, last: int) -> tuple[int, int]:
    """Where the sentences that hold characters first .. last - 1 begin and end, without white space around them."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    begin = max((end for end in ends if end <= first), default=0)
    end = min((end for end in ends if end >= last), default=len(text))
    part = text[begin:end]
    return begin + len(part) - len(part.lstrip()), begin + len(part.rstrip())


def load_corrector(name: str, template: str = "{text}", device: str | None = None) -> Seq2SeqCorrector:
    """Loads any encoder-decoder checkpoint that transformers knows, from a hub id or a folder.

    Raises ConfigurationError for a name that cannot be loaded, or another kind of model.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from .loading import quiet_transformers

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with quiet_transformers():
            model = AutoModelForSeq2SeqLM.from_pretrained(name).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError, KeyError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise ConfigurationError(
            f"cannot load the corrector {name!r}: {reason}; allowed: an encoder-decoder model, by hub id or folder"
        ) from problem
    return Seq2SeqCorrector(model, tokenizer, template)
