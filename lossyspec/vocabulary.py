"""What two tokenizers have in common: the tokens that stand for the same text in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: with so many of the target's last tokens a continuation is encoded, the first that stay as they are
_TAILS = (8, 2, 0)
#: put before a token so that a decoder which drops a leading space has nothing to drop
_ANCHORS = ("a", "x", "0", ".")


def token_texts(tokenizer: Any) -> dict[int, str]:
    """The text of each token as it reads after other text; special tokens and parts of a character are left out."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids) | {
        index for index, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    plain = [index for index in vocabulary.values() if index not in special]
    anchor = next((ids[-1] for text in _ANCHORS if (ids := _encode(tokenizer, text)) and ids[-1] not in special), plain[0])
    before = _decode(tokenizer, [anchor])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pairs = [[anchor, index] for index in plain]
    if backend is not None:  # all at once: a large vocabulary takes a second, not ten
        found = backend.decode_batch(pairs, skip_special_tokens=False)
    else:
        found = [_decode(tokenizer, pair) for pair in pairs]
    texts = {}
    for index, text in zip(plain, found, strict=True):
        if text.startswith(before) and len(text) > len(before) and "\ufffd" not in text:
            texts[index] = text[len(before) :]
    return texts


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class SharedTokens:
    """target[i] and draft[i] are ids of the same text; target ids rise, and no id of either side occurs twice."""

    target: tuple[int, ...]
    draft: tuple[int, ...]


def shared_tokens(target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int) -> SharedTokens:
    """The intersection of two vocabularies by text (arXiv 2502.05202, token-level intersection), with the end of text.

    target_size, draft_size: how many ids have logits. Of several tokens of the same text the lowest id counts.
    """
    by_text: dict[str, int] = {}
    for index, text in sorted(token_texts(draft_tokenizer).items()):
        if index < draft_size:
            by_text.setdefault(text, index)
    pairs: dict[int, int] = {}
    for index, text in sorted(token_texts(target_tokenizer).items()):
        if index < target_size and text in by_text:
            pairs[index] = by_text.pop(text)
    ours, theirs = target_tokenizer.eos_token_id, draft_tokenizer.eos_token_id
    if ours is not None and theirs is not None and ours < target_size and theirs < draft_size:
        pairs[ours] = theirs
    return SharedTokens(tuple(sorted(pairs)), tuple(pairs[index] for index in sorted(pairs)))


class Translator:
    """The target's tokens as the draft's: the text so far, encoded again by the draft's tokenizer.

    An unfinished character at the end is left out until it is whole. It depends on the tokens alone, not on what was
    translated before.
    """

    def __init__(self, target_tokenizer: Any, draft_tokenizer: Any) -> None:
        self.target, self.draft = target_tokenizer, draft_tokenizer
        begin = draft_tokenizer("a")["input_ids"][:1]
        bos = draft_tokenizer.bos_token_id
        self._begin = [bos] if bos is not None and begin == [bos] else []
        #: what an empty text is read as: a model needs one token to predict the first
        self._empty = next((index for index in (bos, draft_tokenizer.eos_token_id) if index is not None), 0)

    def __call__(self, tokens: list[int]) -> list[int]:
        """Ids of the draft, at least one."""
        text = self.target.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [*self._begin, *_encode(self.draft, text.rstrip("\ufffd"))] or [self._empty]

    def back(self, tokens: list[int], read: list[int], new: list[int]) -> list[int]:
        """The target's tokens for what the draft's `new` tokens say after `read`, the translation of `tokens`.

        They go on from `tokens` as far as the encoding of its end stays as it is. The draft's end of text is the target's.
        """
        ended = bool(new) and new[-1] == self.draft.eos_token_id
        old, grown = (
            self.draft.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (read, read + new)
        )
        said = grown[len(old) :].rstrip("\ufffd") if grown.startswith(old) else ""
        found: list[int] = []
        for size in _TAILS if said else ():
            tail = tokens[len(tokens) - size :] if size else []
            found = _encode(self.target, _decode(self.target, tail) + said)
            if found[: len(tail)] == tail:
                found = found[len(tail) :]
                break
        return [*found, self.target.eos_token_id] if ended and self.target.eos_token_id is not None else found
