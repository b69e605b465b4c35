"""A conversation that keeps what its models have read: each turn reads only what is new since the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .checks import check_kind
from .decoding import decode
from .drafting import shared_length
from .prompts import check_prompt, prompt_ids
from .rows import Job, Row
from .stats import Stats

if TYPE_CHECKING:
    from .answers import Generation, Piece
    from .decoder import Decoder


class Session:
    """Made by `Decoder.session()`. Its caches are its own: other calls of the decoder, and other sessions, may come between
    turns. The tokens are those of decoding the whole conversation anew, whatever the chat template does to earlier turns:
    it only shortens what the new prompt has in common with what was read.
    """

    def __init__(self, decoder: Decoder, messages: Sequence[dict[str, str]] = ()) -> None:
        self.decoder = decoder
        #: the conversation: what was given at the start, and each finished turn with its answer
        self.messages: list[dict[str, str]] = []
        check_kind("messages", messages, (list, tuple), "a list of {'role': text, 'content': text}")
        if messages:
            check_prompt(messages)
            self.messages = [dict(message) for message in messages]
        self._target = decoder.target.fork()
        self._draft = decoder.draft.fork()
        self._read: list[int] = []  # what both caches hold for certain; empty: they have to begin anew

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the caches. The conversation stays, and a later turn reads all of it again."""
        self._target, self._draft, self._read = self._target.fork(), self._draft.fork(), []

    def send(self, text: str, max_new_tokens: int = 256, **options: Any) -> Generation:
        """One turn: the user's text in, a Generation of one answer out. options: as of `Decoder.generate`."""
        prompt = self._prompt(text)
        answer = self.generate_ids(prompt, max_new_tokens, **options)
        self._add(text, answer[0].text)
        return answer

    def stream(self, text: str, max_new_tokens: int = 256, **options: Any) -> Iterator[Piece]:
        """One turn piece by piece, as `Decoder.stream`. A turn that is not read to its end leaves no message."""
        job, stats = self.decoder.make_job(max_new_tokens, **options), Stats()
        shown: list[str] = []
        for piece in self.decoder.pieces(self._rounds(self._prompt(text), job, stats), job, stats):
            shown.append(piece.text)
            if piece.finish_reason is not None:
                self._add(text, "".join(shown))
            yield piece

    def generate_ids(self, prompt: list[int], max_new_tokens: int = 256, **options: Any) -> Generation:
        """Answers a whole conversation given as token ids; what it has in common with the last one is not read again."""
        job, stats = self.decoder.make_job(max_new_tokens, **options), Stats()
        *_, rows = self._rounds(prompt, job, stats)
        return self.decoder.generation(rows, job, stats)

    def _prompt(self, text: str) -> list[int]:
        check_kind("the text of a turn", text, str, "a string")
        return prompt_ids(self.decoder.tokenizer, [*self.messages, {"role": "user", "content": text}])

    def _add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _rounds(self, prompt: list[int], job: Job, stats: Stats) -> Iterator[list[Row]]:
        self.decoder.check_prompts([prompt])
        # the target must read the last token again, for its logits
        kept = shared_length(self._read, prompt[:-1])
        rounds = decode(self._target, self._draft, [prompt], job, stats, kept, self.decoder.watch)
        ended = False
        while not ended:
            self._read = []  # a round that fails, or is interrupted, leaves caches that cannot be trusted
            rows = next(rounds)
            self._read = rows[0].tokens[:-1]
            ended = rows[0].finish_reason is not None
            yield rows
