"""Training data: conversations that the target writes itself, with its final hidden states, in shards on the disk.

Given only its chat template up to the opening of the user's turn, a chat model writes the user's message and then the
answer. The template's own tokens between the turns are forced; everything else is sampled. Rows are streams of equal
length, so that a batch never waits for its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossyspec.errors import ConfigurationError
from lossyspec.prompts import prompt_ids
from lossyspec.runner import Runner
from lossyspec.sampling import draw
from lossyspec.tensor_files import read_tensors, write_tensors

#: streams of an archive that are read at a time
_READ_ROWS = 16
#: share of the users' messages that the target begins itself
_FREE = 0.5
_SENTINELS = ("\ue000", "\ue001", "\ue002")


@dataclass(frozen=True)
class ChatFrame:
    """The template's tokens: before a user's message, between it and the answer, between the answer and the next message.

    ends: ids that end a turn. Without a template: an empty frame, and the target writes plain text.
    """

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]
    ends: frozenset[int]


def chat_frame(tokenizer: Any, eos_ids: frozenset[int]) -> ChatFrame:
    """Reads the frame off the tokenizer's chat template by rendering a conversation of marks."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else next(iter(eos_ids), 0)
    if getattr(tokenizer, "chat_template", None) is None:
        return ChatFrame([start], [], [], frozenset())
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _SENTINELS, strict=True)]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    parts = text.replace(_SENTINELS[1], _SENTINELS[0]).replace(_SENTINELS[2], _SENTINELS[0]).split(_SENTINELS[0])
    if len(parts) != 4:
        raise ConfigurationError("the tokenizer's chat template changes the messages: the turns cannot be told apart")
    opening, to_answer, to_user = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts[:3])
    return ChatFrame(opening or [start], to_answer, to_user, eos_ids | {*to_answer[:1], *to_user[:1]})


@dataclass
class Shard:
    """tokens (B, L) int32; forced (B, L) bool: the template's own; features (B, L, H) bf16: after the token."""

    tokens: Tensor
    forced: Tensor
    features: Tensor

    def save(self, path: Path) -> None:
        """Writes the shard; it is there whole or not at all."""
        write_tensors(path, {"tokens": self.tokens, "forced": self.forced, "features": self.features})

    def rows(self, pick: slice | Tensor) -> Shard:
        """Some of its streams."""
        return Shard(self.tokens[pick], self.forced[pick], self.features[pick])

    @staticmethod
    def load(path: Path, features: bool = True) -> Shard:
        """Reads a shard. features: False leaves them out, which are nearly all of its bytes; their width is then 0.
        Raises ConfigurationError for a damaged one."""
        stored, _ = read_tensors(path, "tokens", "forced", *(("features",) if features else ()))
        tokens = stored["tokens"]
        return Shard(tokens, stored["forced"], stored["features"] if features else _no_features(tokens))


class _Turns:
    """Which tokens of each row are forced: after the end of a turn, the template's way to the next one, and how a user's
    message begins.

    openings: token ids of such beginnings; every other message, at random by `seed`, gets one of them.
    """

    def __init__(self, frame: ChatFrame, rows: int, openings: Sequence[list[int]] = (), seed: int = 0) -> None:
        self.frame = frame
        self.openings, self._random = openings, Random(seed)
        self.pending = [self._opening() for _ in range(rows)]
        self.answering = [False] * rows

    def _opening(self) -> list[int]:
        if not self.openings or self._random.random() < _FREE:
            return []
        return list(self._random.choice(self.openings))

    def next(self, sampled: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The tokens that the rows really take, and which of them were forced."""
        taken, forced = [], []
        for row, token in enumerate(sampled):
            queue = self.pending[row]
            if queue:
                taken.append(queue.pop(0))
                forced.append(True)
                continue
            if token in self.frame.ends:
                way = [*self.frame.to_user, *self._opening()] if self.answering[row] else self.frame.to_answer
                self.answering[row] = not self.answering[row]
                token, self.pending[row] = (way or [token])[0], list(way[1:])
            taken.append(token)
            forced.append(False)
        return taken, forced


@torch.inference_mode()
def write_streams(
    target: Runner,
    frame: ChatFrame,
    rows: int,
    length: int,
    temperatures: tuple[float, float],
    seed: int,
    progress: Callable[[], None] = lambda: None,
    openings: Sequence[list[int]] = (),
) -> Shard:
    """One shard of `rows` streams of `length` tokens after the frame's opening, each at its own temperature. openings: see
    `_Turns`."""
    generator = torch.Generator(device=target.device)
    generator.manual_seed(seed)
    opening = [frame.opening] * rows
    target.start(opening, len(frame.opening) + length + 1)
    spread = torch.rand(rows, 1, generator=generator, device=target.device)
    heat = temperatures[0] + spread * (temperatures[1] - temperatures[0])
    turns = _Turns(frame, rows, openings, seed)
    current = torch.tensor([prompt[-1:] for prompt in opening], device=target.device)
    tokens, forced, features = [], [], []
    was_forced = [True] * rows
    for step in range(length):
        logits = target.logits(current, [len(frame.opening) - 1 + step] * rows)[:, 0]
        assert target.features is not None
        tokens.append(current.int().cpu())
        forced.append(torch.tensor(was_forced))
        features.append(target.features[:, -1].bfloat16().cpu())
        sampled = draw((logits / heat).softmax(-1), torch.rand(rows, generator=generator, device=target.device))
        taken, was_forced = turns.next(sampled.tolist())
        current = torch.tensor(taken, device=target.device)[:, None]
        progress()
    return Shard(torch.cat(tokens, 1), torch.stack(forced, 1), torch.stack(features, 1))


@torch.inference_mode()
def read_conversations(
    target: Runner, tokenizer: Any, conversations: Sequence[list[dict[str, str]]], length: int
) -> Iterator[Shard]:
    """The user's own traffic: each conversation read by the target, one shard each, cut at `length` tokens."""
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False) if tokenizer.chat_template else None
        ids = (
            tokenizer(text, add_special_tokens=False)["input_ids"] if text else prompt_ids(tokenizer, messages[0]["content"])
        )
        ids = ids[: length + 1]
        if len(ids) < 8:
            continue
        target.start([ids], len(ids))
        assert target.features is not None
        row = torch.tensor([ids[:-1]], dtype=torch.int32)
        yield Shard(row, torch.zeros_like(row, dtype=torch.bool), target.features.bfloat16().cpu())


def _no_features(tokens: Tensor) -> Tensor:
    return torch.empty(*tokens.shape, 0, dtype=torch.bfloat16)


def save_archive(shards: Sequence[Path], path: Path) -> None:
    """The streams of shards of equal length in one small file, without their features."""
    parts = [Shard.load(place, features=False) for place in shards]
    if len({part.tokens.shape[1] for part in parts}) != 1:
        return  # the user's own conversations, which the user has
    tokens, forced = torch.cat([part.tokens for part in parts]), torch.cat([part.forced for part in parts])
    small = tokens.to(torch.uint16) if int(tokens.max()) < 1 << 16 else tokens
    bits = torch.from_numpy(np.packbits(forced.numpy(), axis=1))
    write_tensors(path, {"tokens": small, "forced": bits})


def load_archive(path: Path, vocab_size: int) -> Shard:
    """The streams of an archive, with features of width 0: see `with_features`.

    Raises ConfigurationError for a file that is no archive, or holds tokens that the target does not have."""
    try:
        stored, _ = read_tensors(path, "tokens", "forced")
        tokens = stored["tokens"].to(torch.int32)
        forced = torch.from_numpy(np.unpackbits(stored["forced"].numpy(), axis=1, count=tokens.shape[1])).bool()
    except (ConfigurationError, ValueError, IndexError) as problem:
        raise ConfigurationError(f"--streams {path}: not an archive of streams ({problem})") from None
    if int(tokens.max()) >= vocab_size:
        raise ConfigurationError(f"--streams {path} holds the token {int(tokens.max())}; the target has {vocab_size} tokens")
    return Shard(tokens, forced, _no_features(tokens))


def load_archives(paths: Sequence[Path], vocab_size: int) -> Shard:
    """The streams of several archives, in their order. Raises as `load_archive`, and for streams of unlike length."""
    parts = [load_archive(path, vocab_size) for path in paths]
    lengths = {str(path): part.tokens.shape[1] for path, part in zip(paths, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{path}: {length} tokens" for path, length in lengths.items())
        raise ConfigurationError(f"--streams hold streams of unlike length ({said}); give those of one length")
    tokens = torch.cat([part.tokens for part in parts])
    return Shard(tokens, torch.cat([part.forced for part in parts]), _no_features(tokens))


@torch.inference_mode()
def with_features(target: Runner, streams: Shard) -> Shard:
    """The same streams, read by the target again."""
    features = []
    for some in streams.tokens.split(_READ_ROWS):
        target.start([[*row, 0] for row in some.tolist()], some.shape[1] + 1)  # it reads all but the last token
        assert target.features is not None
        features.append(target.features.bfloat16().cpu())
    return Shard(streams.tokens, streams.forced, torch.cat(features))
