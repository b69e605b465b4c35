"""Training of a feature head: KL to the target's distribution, rolled out several depths on its own features."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lossyspec.feature_head import FeatureHead
from lossyspec.records import write_text

from .data import Shard

#: tokens whose logits over the map are held at a time
_PIECE = 512


@dataclass(frozen=True)
class Recipe:
    """How a head is trained. depths: how many steps it is rolled out on its own features; weights fall by `decay` each.

    batch_tokens: tokens a step. steps: of the whole run, over which the learning rate falls as a cosine.
    """

    depths: int = 3
    decay: float = 0.8
    rate: float = 1.5e-3
    warm_up: int = 50
    batch_tokens: int = 4096
    steps: int = 1000
    clip: float = 1.0
    seed: int = 0


def learning_rate(recipe: Recipe, step: int, spent: float = 0.0) -> float:
    """Linear warm-up, then a cosine to a twentieth over the steps, or over the time where that runs out first.

    spent: share of the time that training may take."""
    if step < recipe.warm_up:
        return recipe.rate * (step + 1) / recipe.warm_up
    done = min(1.0, max((step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up), spent))
    return recipe.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def batches(shards: Sequence[Path], recipe: Recipe, start: int) -> Iterator[Shard]:
    """Endless batches of whole streams from step `start` on: shards in an order drawn anew in each pass, by one seed.

    The batch of a step depends on the seed and the step alone, so that a resumed run sees what an unbroken one would.
    """
    step, passes = 0, 0
    while True:
        order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(recipe.seed + passes)).tolist()
        for index in order:
            shard = Shard.load(shards[index])
            rows = max(1, recipe.batch_tokens // shard.tokens.shape[1])
            mixed = torch.randperm(
                len(shard.tokens), generator=torch.Generator().manual_seed(recipe.seed + 7919 * passes + index)
            )
            for first in range(0, len(mixed), rows):
                if step >= start:
                    pick = mixed[first : first + rows]
                    yield Shard(shard.tokens[pick], shard.forced[pick], shard.features[pick])
                step += 1
        passes += 1


class _Divergence(torch.autograd.Function):
    """KL of two softmaxes over the same output rows. Its gradient in the draft's logits is q - p, so it is taken in the
    forward pass, a piece at a time: no (tokens, vocab) tensor is kept or read twice."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, bias: Tensor, known: Tensor, rows: Tensor, bf16: bool) -> Tensor:
        total = torch.zeros((), device=own.device)
        by_feature, by_bias = torch.empty_like(own), torch.zeros_like(bias)
        count = len(own)
        with torch.autocast(own.device.type, dtype=torch.bfloat16, enabled=bf16):
            for first in range(0, count, _PIECE):
                piece = slice(first, first + _PIECE)
                wanted = F.linear(known[piece], rows).float().log_softmax(-1)
                draft = (F.linear(own[piece], rows).float() + bias).log_softmax(-1)
                p = wanted.exp()
                total += torch.dot(p.flatten(), (wanted - draft).flatten())
                slope = draft.exp_().sub_(p).div_(count)
                by_feature[piece] = (slope @ rows).to(by_feature.dtype)
                by_bias += slope.sum(0)
        ctx.save_for_backward(by_feature, by_bias)
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_feature, by_bias = ctx.saved_tensors
        return by_feature * gradients[0], by_bias * gradients[0], None, None, None


def divergence(own: Tensor, bias: Tensor, known: Tensor, rows: Tensor, bf16: bool = False) -> Tensor:
    """Mean KL(softmax(rows known) || softmax(rows own + bias)) in nats. own, known: (n, hidden). rows: (vocab, hidden)."""
    result: Tensor = _Divergence.apply(own, bias, known, rows, bf16)  # type: ignore[no-untyped-call]
    return result


class Trainer:
    """One training run, resumable to the step."""

    def __init__(self, head: FeatureHead, embeddings: Tensor, rows: Tensor, recipe: Recipe, bf16: bool) -> None:
        self.head = head
        self.embeddings = embeddings
        self.rows = rows
        self.recipe = recipe
        self.bf16 = bf16
        self.step = 0
        self.device = rows.device
        matrices = [part for part in head.parameters() if part.dim() > 1]
        others = [part for part in head.parameters() if part.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95))

    def loss(self, batch: Shard) -> Tensor:
        """Mean KL(p || q) in nats over the tokens of the map, weighted over depths; forced tokens are left out."""
        tokens = batch.tokens.to(self.device).long()
        embedded = F.embedding(tokens[:, 1:], self.embeddings)
        features = batch.features.to(self.device, embedded.dtype)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            outputs = self.head.unroll(embedded[:, :-1], features[:, :-2], self.recipe.depths)
        wanted = ~batch.forced[:, 2:].to(self.device)
        known = features[:, 1:-1]
        total, weight = torch.zeros((), device=self.device), 0.0
        for depth, output in enumerate(outputs):
            mask = wanted.clone()
            mask[:, :depth] = False
            share = self.recipe.decay**depth
            total = total + share * divergence(output[mask], self.head.bias, known[mask], self.rows, self.bf16)
            weight += share
        return total / weight

    def train(
        self,
        stream: Iterator[Shard],
        until: int,
        tick: Callable[[int, float], bool],
        spent: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Steps until `until`; `tick(step, loss)` is called after each, and ends the run when it returns False.
        spent(): share of the time that training may take."""
        self.head.train()
        while self.step < until:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.recipe, self.step, spent())
            loss = self.loss(next(stream))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
            self.optimizer.step()
            self.step += 1
            if not tick(self.step, float(loss.detach())):
                break
        self.head.eval()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint: weights and optimizer state as safetensors, the step as JSON last."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"head.{name}": value.contiguous() for name, value in self.head.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        temporary = folder / "checkpoint.partial"
        save_file(tensors, temporary, metadata={"step": str(self.step)})
        temporary.replace(folder / "checkpoint.safetensors")
        write_text(folder / "progress.json", json.dumps({"step": self.step}))

    def load(self, folder: Path) -> bool:
        """Goes on from a checkpoint; False when there is none."""
        from safetensors import safe_open

        path = folder / "checkpoint.safetensors"
        if not path.exists():
            return False
        states: dict[int, dict[str, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as stored:
            self.step = int(stored.metadata()["step"])
            for key in stored.keys():  # noqa: SIM118
                kind, _, name = key.partition(".")
                if kind == "head":
                    weights[name] = stored.get_tensor(key)
                else:
                    index, _, part = name.partition(".")
                    states.setdefault(int(index), {})[part] = stored.get_tensor(key)
        self.head.load_state_dict(weights)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
        return True


@torch.inference_mode()
def overlap(
    head: FeatureHead, embeddings: Tensor, output_rows: Tensor, batch: Shard, temperature: float, depths: int
) -> list[dict[str, Any]]:
    """How near q is to p at each depth on held-out streams: mean sum(min(p, q)) and the share of equal argmax.

    output_rows: (V, hidden) of the target; p has full support. Forced tokens are left out.
    """
    tokens, device = batch.tokens.to(embeddings.device).long(), embeddings.device
    features = batch.features.to(device=device, dtype=embeddings.dtype)
    outputs = head.unroll(F.embedding(tokens[:, 1:-1], embeddings), features[:, :-2], depths)
    wanted = ~batch.forced[:, 2:].to(device)
    found = []
    for depth, output in enumerate(outputs):
        mask = wanted.clone()
        mask[:, :depth] = False
        shared = equal = 0.0
        for own, true in zip(output[mask].split(512), features[:, 1:-1][mask].split(512), strict=True):
            p = (F.linear(true, output_rows).float() / temperature).softmax(-1)
            q = (head.logits(own, output_rows[head.token_map]).float() / temperature).softmax(-1)
            shared += float(torch.minimum(p[:, head.token_map], q).sum())
            equal += float((head.token_map[q.argmax(-1)] == p.argmax(-1)).sum())
        count = int(mask.sum())
        found.append(
            {
                "depth": depth + 1,
                "temperature": temperature,
                "overlap": shared / count,
                "top1": equal / count,
                "tokens": count,
            }
        )
    return found


def frequent_tokens(shards: Sequence[Path], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the data as rising ids, and the share of the data that they cover."""
    counts = _counts(shards, vocab_size)
    best = counts.argsort(descending=True, stable=True)[: min(size, vocab_size)]
    return best.sort().values, float(counts[best].sum() / counts.sum())


def covered(shards: Sequence[Path], token_map: Tensor, vocab_size: int) -> float:
    """The share of the data that a token map covers."""
    counts = _counts(shards, vocab_size)
    return float(counts[token_map.cpu()].sum() / counts.sum())


def _counts(shards: Sequence[Path], vocab_size: int) -> Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for path in shards:
        shard = Shard.load(path)
        counts += torch.bincount(shard.tokens[~shard.forced].long(), minlength=vocab_size)
    return counts


__all__ = ["Recipe", "Trainer", "batches", "covered", "divergence", "frequent_tokens", "learning_rate", "overlap"]
