"""Scores of one answer against its references: pure functions on text and tokens, each in [0, 1]."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from decimal import Decimal

#: runs of a-z and 0-9 as in the common ROUGE packages; a Chinese, Japanese or Korean character is a word of its own
_ROUGE_TOKEN = re.compile(r"[a-z0-9]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def lcs_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence; O(len(one) * len(other))."""
    row = [0] * (len(other) + 1)
    for item in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = row[place]
            row[place] = diagonal + 1 if item == candidate else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _f_measure(common: int, said: int, wanted: int) -> float:
    return 2 * common / (said + wanted) if common else 0.0


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure (C.-Y. Lin 2004; precision and recall weigh the same, no stemming), the best over the references."""
    said = _ROUGE_TOKEN.findall(answer.lower())
    wanted = [_ROUGE_TOKEN.findall(reference.lower()) for reference in references]
    return max(_f_measure(lcs_length(said, words), len(said), len(words)) for words in wanted)


def _normal(text: str) -> list[str]:
    """Words without case, punctuation and articles, as SQuAD's evaluation has them."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 when the answer is a reference, up to case, punctuation and articles (Rajpurkar et al., arXiv 1606.05250)."""
    said = _normal(answer)
    return float(any(said == _normal(reference) for reference in references))


def word_f1(answer: str, references: Sequence[str]) -> float:
    """F1 of the bags of words, normalised as for `exact_match`; the best over the references."""
    said = Counter(_normal(answer))

    def score(reference: str) -> float:
        wanted = Counter(_normal(reference))
        if not said or not wanted:
            return float(said == wanted)
        return _f_measure((said & wanted).total(), said.total(), wanted.total())

    return max(map(score, references))


def last_number(text: str) -> Decimal | None:
    """The number after the last `####`, or the last number of the text; thousands separators are dropped."""
    found = _NUMBER.findall(text.rsplit("####", 1)[-1]) or _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def numeric_match(answer: str, references: Sequence[str]) -> float:
    """1 when the answer's last number equals that of a reference as a number: 7, 7.0 and 7.00 are the same."""
    said = last_number(answer)
    return float(said is not None and any(said == last_number(reference) for reference in references))


def repeated_share(tokens: Sequence[Hashable], size: int = 4) -> float | None:
    """Share of n-grams that occurred before in the same answer; None when it has no n-gram."""
    grams = [tuple(tokens[place : place + size]) for place in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def distinct_share(tokens: Sequence[Hashable], size: int = 2) -> float | None:
    """distinct-n: different n-grams over all n-grams (Li et al., arXiv 1510.03055); None when there is none."""
    repeated = repeated_share(tokens, size)
    return None if repeated is None else 1 - repeated
