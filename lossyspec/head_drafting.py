"""Drafting with a feature head: it reads the target's hidden states of accepted tokens, and its own beyond them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .drafting import Proposal, Request, draw_round, round_numbers
from .feature_head import FeatureHead
from .fused import Dense
from .kv_cache import RowCache
from .native.heads import NativeHead, native_head
from .quantised import Int8


class _Product(nn.Module):
    """A packed matrix in the place of a linear layer."""

    def __init__(self, matrix: Int8) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x)


def _pack(head: FeatureHead) -> None:
    for module in list(head.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear):
                setattr(module, name, _Product(Int8.of(Dense(part.weight.detach(), None))))


class FeatureDraft:
    """Proposes from a FeatureHead over the target's own token embeddings and output rows.

    For a prefix of L tokens the target has read L - 1 of them, so entries 0 .. L - 2 have true features; deeper ones use
    the head's own output and are written over in the next round.
    """

    def __init__(self, head: FeatureHead, target: Any, vocab_size: int, packed: bool = False) -> None:
        """packed: the head's own matrices, and the output rows it uses, in int8, beside a target that is quantised;
        the dense ones of `head` are replaced."""
        weight = target.get_input_embeddings().weight
        self.head = head.to(device=weight.device, dtype=weight.dtype).eval()
        self.embeddings: Tensor = weight
        self.device: torch.device = weight.device
        self.vocab_size = vocab_size
        self.support: Tensor = self.head.token_map
        rows = Dense(target.get_output_embeddings().weight[self.support].contiguous(), None)
        self.rows: Dense | Int8 = Int8.of(rows) if packed else rows
        if packed:
            _pack(self.head)
        self._native: NativeHead | None = None
        if packed:
            self._native = native_head(self.head, weight.detach(), self.rows)
        self._cache = RowCache(head.shape.layers, 0)
        self._rope = (weight.new_zeros(1, 1, 0, 0), weight.new_zeros(1, 1, 0, 0))
        self._features = weight.new_zeros(0)
        self._known: list[int] = []

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """A new batch; the prompts are read when their features have been observed."""
        self._cache = RowCache(self.head.shape.layers, capacity, len(prompts))
        self._features = self.embeddings.new_zeros(len(prompts), capacity, self.head.shape.hidden)
        self._known = [0] * len(prompts)

    def fork(self) -> FeatureDraft:
        """The same head with entries of its own."""
        other = copy.copy(self)
        other.start([], 0)
        return other

    def resume(self, prompt: list[int], kept: int, capacity: int) -> None:
        """Keeps the entries whose token and feature are among the first `kept`: entry i holds token i + 1."""
        self._cache.grow(capacity)
        more = max(capacity - self._features.shape[1], 0)
        self._features = F.pad(self._features, (0, 0, 0, more))
        self._known = [min(self._known[0], kept - 1)]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows of the batch."""
        self._cache.select(rows)
        self._features = self._features[torch.tensor(rows, dtype=torch.long, device=self.device)]
        self._known = [self._known[row] for row in rows]

    def join(self, other: FeatureDraft, room: int = 0) -> None:
        """Appends the other's rows."""
        self._cache.join(other._cache, room)
        size = max(self._features.shape[1], other._features.shape[1])
        both = [F.pad(part, (0, 0, 0, size - part.shape[1])) for part in (self._features, other._features)]
        self._features = torch.cat(both)
        self._known += other._known

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        """Keeps the target's features of each row from slot starts[i] on."""
        if features is None:  # prompts of one token: nothing has been read yet
            return
        for row, start in enumerate(starts):
            self._features[row, start : start + features.shape[1]] = features[row]

    @torch.inference_mode()
    def read(self, prompts: list[list[int]]) -> None:
        """Reads the entries that have got features."""
        if any(len(prompt) - 1 > known for prompt, known in zip(prompts, self._known, strict=True)):
            self._step(*self._unread(prompts))

    @torch.inference_mode()
    def propose(self, request: Request) -> Proposal:
        """Draws from q at depth j of the round; q is 0 outside the head's token map."""
        prefixes = request.prefixes
        live = [limit > 0 and len(prefix) > 1 for limit, prefix in zip(request.limits, prefixes, strict=True)]
        temperature = request.softmax_temperature
        if self._native is not None and temperature is not None and any(live):
            return self._chain(self._native, request, temperature, live)
        feature, logits = self._step(*self._unread(prefixes))

        def law(column: int, drafted: Tensor) -> Tensor:
            nonlocal feature, logits
            if column:
                places = [len(prefix) - 2 + column for prefix in prefixes]
                feature, logits = self._step(drafted[:, -1:], feature, places, [0] * len(places))
            return self._law(logits, request, drafted)

        return draw_round(request, law, live, self.device, None if request.penalised else self.support)

    def _chain(self, native: NativeHead, request: Request, temperature: float, live: list[bool]) -> Proposal:
        """The same in one call of the compiled code: as `draw_round`."""
        greedy, limits = request.greedy, [limit if on else 0 for on, limit in zip(live, request.limits, strict=True)]
        numbers = None if greedy else round_numbers(request, live, self.device)[:, : max(limits)]
        tokens, features, starts, last = self._unread(request.prefixes)
        self._cache.place(starts, tokens.shape[1], self.device)
        theta = request.settings.theta
        drawn, laws, lengths, steps = native.chain(
            tokens, features, starts, self._cache, last, limits, temperature, theta, numbers
        )
        one_hot = greedy or not drawn.shape[1]
        return Proposal(drawn, lengths, None if one_hot else laws, steps, None if one_hot else self.support)

    @torch.inference_mode()
    def along(self, prompt: list[int], output: list[int], features: Tensor | None, depths: int) -> list[Tensor]:
        """fp32 logits (len(output), S) of q at depths 1, 2, .. at each position of an output: what a round that began
        depth - 1 tokens earlier would draw from. features: (1, n, hidden) of the target for all tokens but the last. After a
        prompt of one token there is no entry for the first position; its logits are 0 (a uniform q)."""
        assert features is not None
        ids = torch.tensor([[*prompt, *output]], device=self.device)
        embedded = F.embedding(ids[:, 1:-1], self.embeddings)
        first = max(len(prompt) - 2, 0)
        outputs = self.head.unroll(embedded, features[:, : embedded.shape[1]], depths)
        laws = [self._logits(part[0, first:]) for part in outputs]
        return [F.pad(law, (0, 0, len(output) - len(law), 0)) for law in laws]

    def _unread(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """What `_step` takes to read the entries of each row that have got true features."""
        longest = max(max(len(prefix) - 1 - known, 1) for prefix, known in zip(prefixes, self._known, strict=True))
        # rows that lack fewer read as many, so that none writes past its own end
        counts = [min(longest, max(len(prefix) - 1, 1)) for prefix in prefixes]
        starts = [max(len(prefix) - 1 - count, 0) for prefix, count in zip(prefixes, counts, strict=True)]
        tokens = [[*prefix[start + 1 :], *[0] * longest][:longest] for prefix, start in zip(prefixes, starts, strict=True)]
        place = torch.tensor(starts, device=self.device)[:, None] + torch.arange(longest, device=self.device)
        place = place.clamp_max(self._features.shape[1] - 1)
        features = self._features.gather(1, place.unsqueeze(-1).expand(-1, -1, self._features.shape[-1]))
        self._known = [len(prefix) - 1 for prefix in prefixes]
        return torch.tensor(tokens, device=self.device), features, starts, [count - 1 for count in counts]

    def _step(self, tokens: Tensor, features: Tensor, starts: list[int], last: list[int]) -> tuple[Tensor, Tensor]:
        """The head over n entries of each row, written from slot starts[i]: its feature (batch, 1, hidden) of entry last[i],
        and the logits there, (batch, 1, S) fp32."""
        count = tokens.shape[1]
        self._cache.place(starts, count, self.device)
        if self._native is not None:
            output, logits = self._native.step(tokens, features, starts, self._cache, last)
            return self._at(output, last), logits
        x = self.head.entry(F.embedding(tokens, self.embeddings), features)
        rope, visible = self._places(starts, count)
        for layer, block in enumerate(self.head.blocks):
            q, k, v = block.project(x, rope)  # type: ignore[operator]
            keys, values = self._cache.update(k, v, layer)
            x = block.finish(x, F.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True))  # type: ignore[operator]
        feature = self._at(self.head.output(x), last)
        return feature, self._logits(feature)

    def _at(self, output: Tensor, last: list[int]) -> Tensor:
        """Column last[i] of row i of (batch, n, hidden), as (batch, 1, hidden)."""
        if output.shape[1] == 1:
            return output
        place = torch.tensor(last, device=self.device)
        return output[torch.arange(len(last), device=self.device), place].unsqueeze(1)

    def _places(self, starts: list[int], count: int) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Rotary positions of the entries, and what each may see (batch, 1, n, extent); None: everything."""
        extent, first = self._cache.extent, self._cache.uniform_start
        if self._rope[0].shape[2] < extent:
            every = torch.arange(self._cache.capacity, device=self.device)
            self._rope = self.head.rope(every[None], self.embeddings.dtype)
        cos, sin = self._rope
        if first is not None and count == 1:
            return (cos[:, :, first:extent], sin[:, :, first:extent]), None
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(count, device=self.device)
        visible = torch.arange(extent, device=self.device) <= positions[..., None]
        return (cos[0, 0, positions].unsqueeze(1), sin[0, 0, positions].unsqueeze(1)), visible.unsqueeze(1)

    def _logits(self, feature: Tensor) -> Tensor:
        """fp32 logits (.., S) over the support."""
        return (self.rows(feature) + self.head.bias).float()

    def _law(self, logits: Tensor, request: Request, drafted: Tensor) -> Tensor:
        """q of each row over the support, (batch, S), from logits there; over all tokens with penalties or processors."""
        if request.penalised:
            everywhere = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
            logits = everywhere.index_copy_(-1, self.support, logits)
        return request.law(logits, drafted)
