"""`lossytune distill` from end to end: data, token map, training, evaluation, a folder with the head and its card."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from lossyspec.cpu import multiplies_bf16
from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError
from lossyspec.feature_head import FeatureHead, HeadShape
from lossyspec.head_files import head_identity, load_head, save_head
from lossyspec.loading import LoadedModel, load
from lossyspec.records import write_text
from lossyspec.tensor_files import read_tensors, write_tensors
from lossyspec.versions import versions

from ..progress import Reporter
from ..workloads import read_prompts
from .config import DistillConfig, make_distill_config
from .data import (
    Shard,
    chat_frame,
    load_archives,
    read_conversations,
    save_archive,
    with_features,
    write_streams,
)
from .loss import overlap
from .openings import openings_of
from .payoff import payoff
from .training import Recipe, Trainer, batches, frequent_tokens, grown, over_tokens, progress

#: share of a budget that is spent on writing data
_DATA_SHARE = 0.5
ARCHIVE = "streams.safetensors"
_HELD_OUT = 1  # shards kept for evaluation
_EVALUATED = (8192, 32768)  # of their tokens: as training goes on, and in the end
_DEPTHS = 4  # to which overlaps are measured
_EVALUATIONS, _EVALUATE_EVERY = 20, 200  # at least so many, at most so many steps apart
_PATIENCE = 4  # evaluations without a rise that end the training
_LATE = 0.5  # of the schedule: before, the rate is high, and a head that goes on is worse than it was for a while


@dataclass(frozen=True)
class Distilled:
    """What a distillation ends with."""

    folder: Path
    card: dict[str, Any]


class Distillation:
    """One distillation in a folder; everything in it is resumed when the folder has it already."""

    def __init__(
        self, config: DistillConfig, folder: Path, reporter: Reporter, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.config = config
        self.folder = folder
        self.reporter = reporter
        self.stop = stop
        self.began = monotonic()
        self._check_resumed()
        self.bf16 = torch.cuda.is_available() or multiplies_bf16()
        self.loaded: LoadedModel = load(config.target, "bf16" if self.bf16 else "fp32")
        self.decoder = Decoder(self.loaded)
        self._check_inputs()
        # last, so that what is refused leaves no folder that the right options would be held against
        write_text(folder / "distill.json", json.dumps(config.model_dump(mode="json"), indent=2) + "\n")

    def _check_inputs(self) -> None:
        """Refuses files and sizes that do not fit the target before any data are written."""
        if self.config.data is not None:
            read_prompts(self.config.data)
        if self.config.streams:
            load_archives(self.config.streams, self.decoder.target.vocab_size)
        if self.config.start is not None:
            self._start()
        self.openings = openings_of(self.loaded.tokenizer, self.config.openings)
        limit = self.decoder.target.position_limit
        if limit is not None and self.config.length >= limit:
            raise ConfigurationError(f"length is {self.config.length}; the target has {limit} positions: give less --length")

    def _start(self) -> FeatureHead:
        assert self.config.start is not None
        torch.manual_seed(self.config.seed)
        head = load_head(self.config.start, self.loaded)
        return grown(head, self.config.layers or head.shape.layers)

    def _check_resumed(self) -> None:
        """Raises ConfigurationError when the folder holds another distillation; only what limits the run may differ."""
        path = self.folder / "distill.json"
        now = self.config.model_dump(mode="json")
        if path.exists():
            try:
                then = dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise ConfigurationError(f"{path}: cannot be read ({error}); give another --out") from None
            free = ("tokens", "budget_s", "epochs")
            changed = [
                f"{name}: {then.get(name)!r} then, {now[name]!r} now"
                for name in now
                if name not in free and then.get(name) != now[name]
            ]
            if changed:
                raise ConfigurationError(
                    f"--out {self.folder} holds a distillation with other options: " + "; ".join(changed)
                )

    def run(self) -> Distilled:
        """Data, training, evaluation, files. Raises KeyboardInterrupt when `stop` said so; all work so far is kept."""
        shards = self._data()
        held, used = shards[:_HELD_OUT], shards[_HELD_OUT:]
        if not used:
            raise ConfigurationError(
                f"{len(shards)} shards of data; at least {_HELD_OUT + 1} are needed: give more "
                + ("--tokens" if self.config.data is None else f"conversations of 8 tokens or more in {self.config.data}")
            )
        head, coverage = self._head(used)
        model = self.loaded.model
        embeddings = model.get_input_embeddings().weight.detach().float()
        output_rows = model.get_output_embeddings().weight.detach().float()
        tokens = sum(Shard.load(path, features=False).tokens.numel() for path in used)
        recipe = Recipe(
            depths=self.config.depths,
            rate=self.config.rate,
            batch_tokens=self.config.batch_tokens,
            seed=self.config.seed,
            steps=max(1, int(self.config.epochs * tokens / self.config.batch_tokens)),
        )
        trainer = Trainer(head.to(model.device), embeddings, output_rows[head.token_map], recipe, self.bf16)
        if trainer.load(self.folder / "checkpoint"):
            self.reporter.say(f"going on from step {trainer.step}")
        test = Shard.load(held[0])
        glance, look = (test.rows(slice(max(1, count // test.tokens.shape[1]))) for count in _EVALUATED)

        def measured(batch: Shard, temperatures: Sequence[float]) -> list[dict[str, Any]]:
            return overlap(head, embeddings, output_rows, batch, temperatures, _DEPTHS)

        history = self._train(trainer, used, lambda: measured(glance, [1.0]))
        return self._finish(head, trainer, tokens, coverage, history, measured(look, (0.7, 1.0)))

    # data

    def _data(self) -> list[Path]:
        place = self.folder / "shards"
        if self.config.data is not None:
            return self._traffic(place)
        frame = chat_frame(self.loaded.tokenizer, self.decoder.eos_ids)
        size = self.config.rows * self.config.length
        wanted = max(_HELD_OUT + 1, -(-self.config.tokens // size))
        have = sorted(place.glob("*.safetensors"))
        if self.config.streams:
            have = self._archive(place, have)
        with self.reporter.steps(
            f"writing {wanted * size} tokens with the target", (wanted - len(have)) * self.config.length
        ) as step:
            for index in range(len(have), wanted):
                if self.stop() or (index > _HELD_OUT and self._spent(_DATA_SHARE)):
                    break
                began = monotonic()
                shard = write_streams(
                    self.decoder.target,
                    frame,
                    self.config.rows,
                    self.config.length,
                    self.config.temperatures,
                    self.config.seed + 1000 + index,
                    step.advance,
                    self.openings,
                )
                shard.save(place / f"{index:05d}.safetensors")
                self.reporter.say(f"shard {index + 1} of {wanted}: {size / (monotonic() - began):.0f} tokens/s")
        if self.stop():
            raise KeyboardInterrupt
        shards = sorted(place.glob("*.safetensors"))
        save_archive(shards, self.folder / ARCHIVE)
        return shards

    def _archive(self, place: Path, have: list[Path]) -> list[Path]:
        """Shards of streams that other distillations wrote; what is wanted beyond them is written anew."""
        streams, rows = load_archives(self.config.streams, self.decoder.target.vocab_size), self.config.rows
        todo = range(len(have), -(-len(streams.tokens) // rows))
        with self.reporter.steps(f"reading {streams.tokens.numel()} tokens with the target", len(todo)) as step:
            for index in todo:
                if self.stop() or (index > _HELD_OUT and self._spent(_DATA_SHARE)):
                    break
                shard = with_features(self.decoder.target, streams.rows(slice(index * rows, (index + 1) * rows)))
                shard.save(place / f"{index:05d}.safetensors")
                step.advance()
        return sorted(place.glob("*.safetensors"))

    def _traffic(self, place: Path) -> list[Path]:
        assert self.config.data is not None
        conversations = []
        for item in read_prompts(self.config.data):
            answer = [{"role": "assistant", "content": item.reference}] if item.reference else []
            conversations.append(item.messages + answer)
        for index, shard in enumerate(
            read_conversations(self.decoder.target, self.loaded.tokenizer, conversations, self.config.length)
        ):
            shard.save(place / f"{index:05d}.safetensors")
        return sorted(place.glob("*.safetensors"))

    def _spent(self, share: float) -> bool:
        return self.config.budget_s is not None and monotonic() - self.began > share * self.config.budget_s

    # training

    def _head(self, shards: Sequence[Path]) -> tuple[FeatureHead, float]:
        """A head over the most frequent tokens of the data: fresh, of the configured sizes, or the one to go on from. The
        token map is kept, so that more data does not change it on resume."""
        config, path = self.config, self.folder / "token_map.safetensors"
        if not path.exists():
            ids, coverage = frequent_tokens(shards, config.vocab, self.decoder.target.vocab_size)
            write_tensors(path, {"token_map": ids, "coverage": torch.tensor(coverage)})
        stored, _ = read_tensors(path, "token_map", "coverage")
        ids, coverage = stored["token_map"], float(stored["coverage"])
        if config.start is not None:
            return over_tokens(self._start(), ids), coverage
        text, hidden = self.loaded.model.config.get_text_config(), self.loaded.model.get_input_embeddings().weight.shape[1]
        width = config.width or hidden
        size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
        size = size if width % size == 0 else 32
        kv_heads = max(1, width // size // 3) if (width // size) % 3 == 0 else width // size
        torch.manual_seed(config.seed)
        intermediate = -(-width * 8 // 3 // 64) * 64
        shape = HeadShape(hidden, width, width // size, kv_heads, intermediate, config.layers or 1, len(ids))
        return FeatureHead(shape, ids), coverage

    def _train(
        self, trainer: Trainer, shards: Sequence[Path], test: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = []
        total, begun = trainer.recipe.steps, monotonic()
        first, every = trainer.step, max(1, min(_EVALUATE_EVERY, total // _EVALUATIONS))

        def tick(step: int, loss: float) -> bool:
            bar.advance()
            if step % every == 0 or step == total:
                found = test()
                share = round(progress(trainer.recipe, step, spent()), 3)
                history.append({"step": step, "share": share, "loss": loss, "overlap": [row["overlap"] for row in found]})
                left = (monotonic() - begun) / (step - first) * (total - step)
                shown = " ".join(f"{row['overlap']:.3f}" for row in found)
                self.reporter.say(
                    f"step {step} of {total}: loss {loss:.3f}, held-out overlap {shown}, {left / 60:.0f} min left"
                )
                trainer.save(self.folder / "checkpoint")
            late = [row for row in history if row["share"] >= _LATE]
            return not (self.stop() or self._spent(1.0) or _stalled(late))

        before = begun - self.began  # of the budget, spent on data

        def spent() -> float:
            return (monotonic() - begun) / max(self.config.budget_s - before, 1.0) if self.config.budget_s else 0.0

        with self.reporter.steps(f"training for {total} steps", total - first) as bar:
            stream: Iterator[Shard] = batches(shards, trainer.recipe, trainer.step)
            trainer.train(stream, total, tick, spent)
        trainer.save(self.folder / "checkpoint")
        if self.stop():
            raise KeyboardInterrupt
        return history

    def _finish(
        self,
        head: FeatureHead,
        trainer: Trainer,
        tokens: int,
        coverage: float,
        history: list[dict[str, Any]],
        overlaps: list[dict[str, Any]],
    ) -> Distilled:
        card = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self.loaded.identity,
            "config": self.config.model_dump(mode="json"),
            "recipe": asdict(trainer.recipe),
            "steps": trainer.step,
            "tokens": tokens,
            "token_map_coverage": coverage,
            "parameters": sum(part.numel() for part in head.parameters()),
            "started_from": head_identity(self.config.start) if self.config.start else None,
            "overlap": overlaps,
            "payoff": payoff(
                self.decoder.target, copy.deepcopy(head), overlaps
            ),  # a draft turns its head to the target's dtype
            "history": history,
            "versions": versions(),
        }
        save_head(self.folder / "head", head, card)
        return Distilled(self.folder / "head", card)


def _stalled(history: list[dict[str, Any]]) -> bool:
    """Whether the held-out overlap at depth 1 has not risen for some evaluations."""
    values = [row["overlap"][0] for row in history]
    return len(values) > _PATIENCE and max(values[-_PATIENCE:]) <= max(values[:-_PATIENCE])


__all__ = ["Distillation", "Distilled", "make_distill_config"]
