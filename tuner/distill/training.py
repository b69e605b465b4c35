"""Training of a feature head: KL to the target's distribution, rolled out several depths on its own features."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lossyspec.errors import ConfigurationError
from lossyspec.feature_head import FeatureHead
from lossyspec.records import write_text
from lossyspec.tensor_files import read_tensors, write_tensors

from .data import Shard
from .loss import laws_loss
from .muon import Muon

#: learning rate of norms and bias, of the matrices' rate
_OTHERS_RATE = 0.2


@dataclass(frozen=True)
class Recipe:
    """How a head is trained. depths: how many steps it is rolled out on its own features; weights fall by `decay` each.

    batch_tokens: tokens a step. steps: of the whole run, over which the learning rate falls as a cosine.
    """

    depths: int = 3
    decay: float = 0.8
    rate: float = 1e-2
    warm_up: int = 50
    batch_tokens: int = 4096
    steps: int = 1000
    clip: float = 1.0
    reach: float = 4.0
    seed: int = 0


def progress(recipe: Recipe, step: int, spent: float = 0.0) -> float:
    """How far the run is, from 0 to 1: by its steps, or by the time it may take where that runs out first.

    spent: share of the time that training may take."""
    return min(1.0, max((step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up), spent))


def learning_rate(recipe: Recipe, step: int, spent: float = 0.0) -> float:
    """Linear warm-up, then a cosine to a twentieth."""
    if step < recipe.warm_up:
        return recipe.rate * (step + 1) / recipe.warm_up
    return recipe.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress(recipe, step, spent))))


def rolled_out(recipe: Recipe, step: int, spent: float = 0.0) -> int:
    """The depths of a step: one more in each equal part of the run. The first depth teaches most, and costs least."""
    return min(recipe.depths, 1 + int(recipe.depths * progress(recipe, step, spent)))


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
                    yield shard.rows(mixed[first : first + rows])
                step += 1
        passes += 1


class Trainer:
    """One training run, resumable to the step."""

    def __init__(self, head: FeatureHead, embeddings: Tensor, rows: Tensor, recipe: Recipe, bf16: bool) -> None:
        self.head = head
        self.embeddings = embeddings
        self.rows = rows.bfloat16() if bf16 else rows
        self.recipe = recipe
        self.bf16 = bf16
        self.step = 0
        self.device = rows.device
        matrices = [part for part in head.parameters() if part.dim() > 1]
        others = [part for part in head.parameters() if part.dim() <= 1]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, recipe.rate, weight_decay=0.01, bf16=bf16),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def loss(self, batch: Shard, depths: int) -> tuple[Tensor, Tensor]:
        """The loss of `laws_loss` over the tokens of the map, and the overlap at each depth; forced tokens are left out."""
        tokens = batch.tokens.to(self.device).long()
        embedded = F.embedding(tokens[:, 1:], self.embeddings)
        features = batch.features.to(self.device, embedded.dtype)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            outputs = self.head.unroll(embedded[:, :-1], features[:, :-2], depths)
        wanted = ~batch.forced[:, 2:].to(self.device)
        begun = torch.arange(wanted.shape[1], device=self.device).expand_as(wanted)[wanted]
        weights = torch.stack([(begun >= depth).float() for depth in range(depths)])
        shares = self.recipe.decay ** torch.arange(depths, device=self.device)
        weights *= (shares / shares.sum())[:, None] / weights.sum(1, keepdim=True).clamp_min(1.0)
        known = features[:, 1:-1][wanted]
        return laws_loss(
            [output[wanted] for output in outputs],
            self.head.bias,
            known,
            self.rows,
            weights,
            self.recipe.reach,
        )

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
            now = (self.recipe, self.step, spent())
            loss, _ = self.loss(next(stream), rolled_out(*now))
            self.head.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
            for optimizer, share in zip(self.optimizers, (1.0, _OTHERS_RATE), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = share * learning_rate(*now)
                optimizer.step()
            self.step += 1
            if not tick(self.step, float(loss.detach())):
                break
        self.head.eval()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint: weights and optimizer state as safetensors, the step as JSON last."""
        tensors = {f"head.{name}": value.contiguous() for name, value in self.head.state_dict().items()}
        for place, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{place}.{index}.{name}": value for name, value in state.items()}
        write_tensors(folder / "checkpoint.safetensors", tensors, {"step": str(self.step)})
        write_text(folder / "progress.json", json.dumps({"step": self.step}))

    def load(self, folder: Path) -> bool:
        """Goes on from a checkpoint; False when there is none. Raises ConfigurationError for a damaged one."""
        path = folder / "checkpoint.safetensors"
        if not path.exists():
            return False
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        weights: dict[str, Tensor] = {}
        tensors, metadata = read_tensors(path)
        try:
            self.step = int(metadata["step"])
            for key, value in tensors.items():
                kind, _, name = key.partition(".")
                if kind == "head":
                    weights[name] = value
                else:
                    place, index, part = name.split(".")
                    states[int(place)].setdefault(int(index), {})[part] = value
            self.head.load_state_dict(weights)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        except (KeyError, ValueError, IndexError, RuntimeError) as error:
            raise ConfigurationError(f"{path}: not a checkpoint of this head ({error})") from None
        return True


def frequent_tokens(shards: Sequence[Path], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the data as rising ids, and the share of the data that they cover."""
    counts = _counts(shards, vocab_size)
    best = counts.argsort(descending=True, stable=True)[: min(size, vocab_size)]
    return best.sort().values, float(counts[best].sum() / counts.sum())


def over_tokens(head: FeatureHead, token_map: Tensor) -> FeatureHead:
    """The same head over other tokens (ids, rising). Those that it had keep their bias, new ones begin without."""
    weights, old = head.state_dict(), head.token_map.tolist()
    known = dict(zip(old, weights["bias"].tolist(), strict=True))
    weights["bias"] = torch.tensor([known.get(token, 0.0) for token in token_map.tolist()]).to(weights["bias"])
    weights["token_map"] = token_map.to(weights["token_map"])
    other = FeatureHead(replace(head.shape, vocab=len(token_map)), token_map)
    other.load_state_dict(weights)
    return other


def grown(head: FeatureHead, layers: int) -> FeatureHead:
    """The same head with more layers, whose last matrices are 0: they pass on what comes in until they learn. Raises
    ConfigurationError for fewer layers than it has."""
    have = head.shape.layers
    if layers == have:
        return head
    if layers < have:
        raise ConfigurationError(f"layers is {layers}; the head to go on from has {have}: give at least as many")
    other = FeatureHead(replace(head.shape, layers=layers), head.token_map)
    other.load_state_dict(head.state_dict(), strict=False)
    for block in other.blocks[have:]:
        for part in (block.out, block.down):
            assert isinstance(part, torch.nn.Linear)
            torch.nn.init.zeros_(part.weight)
    return other


def _counts(shards: Sequence[Path], vocab_size: int) -> Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for path in shards:
        shard = Shard.load(path, features=False)
        counts += torch.bincount(shard.tokens[~shard.forced].long(), minlength=vocab_size)
    return counts


__all__ = [
    "Recipe",
    "Trainer",
    "batches",
    "frequent_tokens",
    "grown",
    "learning_rate",
    "over_tokens",
    "progress",
    "rolled_out",
]
