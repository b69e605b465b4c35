"""The models of a search: each precision loaded once, when it is first needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from lossyspec.decoder import Decoder, identify_here
from lossyspec.drafting import Draft
from lossyspec.drafts import NGRAM, LoadedDraft, LoadedHead, TargetItself, load_draft, names_head, names_self
from lossyspec.kv_cache import numbers_per_token
from lossyspec.loading import LoadedModel, load
from lossyspec.profile import Here
from lossyspec.records import BlockRecord
from lossyspec.runner import Runner
from lossyspec.settings import CACHE_BYTES, QUANTISED, WEIGHT_BYTES, Precision, Sampling, Settings

from .config import SearchConfig
from .measurement.energy import EnergyMeter
from .trace import HEAD_TAUS, TAUS


class ModelPool:
    """Decoders by precision. `dense`: the draft is a model, which samples from a full q."""

    def __init__(self, config: SearchConfig, say: Callable[[str], None]) -> None:
        self.config = config
        self.say = say
        self.taus = draft_taus(config.draft)
        self.dense = bool(self.taus)
        self._decoders: dict[str, Decoder] = {}
        self.target: LoadedModel | None = None
        self.draft: LoadedDraft = None
        #: the dense precision that transformers is fastest in
        self.outside: Precision = "fp32"
        #: joules of the runs; replaced while runs are measured
        self.energy = EnergyMeter({"reason": "not measured outside the live runs"})

    def decoder(self, precision: Precision) -> Decoder:
        """The decoder at a precision; loads the models on first use, and checks that target and draft go together."""
        if precision not in self._decoders:
            self.say(f"loading {self.config.target} in {precision}")
            target = load(self.config.target, precision)
            draft = load_draft(self.config.draft, target, precision)
            self.target, self.draft = self.target or target, self.draft or draft
            self._decoders[precision] = decoder = Decoder(target, draft)
            for how in self.config.compiles:
                if how != "off":
                    decoder.target.check_compiler(how)
            for runner in (decoder.target, getattr(decoder.draft, "runner", None)):
                if isinstance(runner, Runner):  # also where passes run without settings
                    runner.how = "graphs" if self.config.cuda_graphs else "eager"
            gc.freeze()  # what is loaded stays: looking through it again and again takes 3 % of a run of short passes
        return self._decoders[precision]

    def forget(self, precision: Precision) -> None:
        """Frees a precision that is not searched after all."""
        self._decoders.pop(precision, None)

    def here(self) -> Here:
        """Identity of this machine and the models, once one precision is loaded."""
        assert self.target is not None
        return identify_here(self.target, self.draft)

    def sizes(self) -> dict[str, int | None]:
        """Weights of the target and the draft, as the manifest names them; None: not known, or prompt lookup."""
        assert self.target is not None
        draft = self.draft
        drawn = sum(part.numel() for part in draft.head.parameters()) if isinstance(draft, LoadedHead) else None
        return {
            "target_parameters": self.target.weights or None,
            "draft_parameters": draft.weights or None if isinstance(draft, LoadedModel) else drawn,
        }

    def runners(self, precision: Precision) -> tuple[Runner, Draft | None]:
        """Target runner and draft at a precision."""
        decoder = self.decoder(precision)
        return decoder.target, decoder.draft

    def memory_bytes(self, settings: Settings, batch: int, context: int) -> int:
        """Weights at the settings' precisions and the keys and values of a batch at a context; an estimate."""
        total, decoder = 0.0, self._decoders.get(settings.precision.target)
        native = decoder is not None and decoder.target.native
        for model, precision in ((self.target, settings.precision.target), (self.draft, settings.precision.draft)):
            if isinstance(model, TargetItself):  # its entries are a few copies of the target's
                total += WEIGHT_BYTES[model.model.precision] * model.model.weights if model.model else 0
                continue
            if model is None:
                continue
            own = precision or settings.precision.target
            if isinstance(model, LoadedHead):  # in the format of the target's activations; int8 beside packed weights
                held = 1 if own in QUANTISED or native else CACHE_BYTES[own]
                total += held * sum(part.numel() for part in model.head.parameters())
            else:
                copies = 2 if native and own == "bf16" else 1  # the compiled passes have their own, beside that for prompts
                total += copies * WEIGHT_BYTES[own] * model.weights
                on_cpu = model.model.device.type == "cpu"
                held = 4 if own in QUANTISED and on_cpu and not native else CACHE_BYTES[own]
                total += held * batch * context * numbers_per_token(model.model.config)
        return round(total)

    def run_settings(
        self, settings: Settings, sampling: Sampling, max_new_tokens: int
    ) -> Callable[[list[list[int]], int], BlockRecord]:
        """A contestant's run: decodes a batch with these settings."""
        decoder = self.decoder(settings.precision.target)

        def run(prompts: list[list[int]], seed: int) -> BlockRecord:
            energy = self.energy.read()
            began = perf_counter()
            generation = decoder.generate_ids(prompts, max_new_tokens, seed=seed, settings=settings, **sampling.model_dump())
            total, stats = perf_counter() - began, generation.stats
            full = stats.whole(len(prompts)) if len(prompts) > 1 else (None, None)
            gaps = [
                seconds / max(tokens / len(prompts), 1)
                for seconds, tokens in zip(stats.round_times_s, stats.round_tokens, strict=True)
                for _ in range(max(1, round(tokens / len(prompts))))
            ]
            return BlockRecord(
                block=0,
                forward=True,
                contestant="",
                batch_size=len(prompts),
                tokens=stats.tokens,
                total_s=total,
                decode_s=stats.decode_s,
                full_tokens=full[0],
                full_s=full[1],
                rounds=stats.rounds,
                drafted_at=tuple(stats.drafted_at),
                accepted_at=tuple(stats.accepted_at),
                first_token_s=stats.prefill_s + stats.round_times_s[0],
                gaps_s=tuple(gaps[1:]),
                energy_joules=self.energy.since(energy),
                outputs=tuple(tuple(answer.tokens) for answer in generation),
            )

        return run

    def run_transformers(
        self, precision: Precision, sampling: Sampling, max_new_tokens: int, **generate: Any
    ) -> Callable[[list[list[int]], int], BlockRecord]:
        """The outside reference: transformers' own `generate` with the same model, prompts and sampling; `generate`: more of
        its options."""
        # a quantised model has no forward of its own: transformers then runs the dense format that is fastest here
        decoder = self.decoder(precision if precision not in QUANTISED else self.outside)
        model, device = decoder.target.model, decoder.target.device
        pad = next(iter(decoder.eos_ids), 0)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "pad_token_id": pad,
            "do_sample": sampling.temperature > 0,
        }
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        options |= {"repetition_penalty": sampling.repetition_penalty, **generate}

        def run(prompts: list[list[int]], seed: int) -> BlockRecord:
            width = max(map(len, prompts))
            ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
            torch.manual_seed(seed)
            energy = self.energy.read()
            began = perf_counter()
            with torch.inference_mode():
                result = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()
            total, joules = perf_counter() - began, self.energy.since(energy)
            outputs = [_until_eos(row, decoder.eos_ids) for row in result]
            return BlockRecord(
                block=0,
                forward=True,
                contestant="",
                batch_size=len(prompts),
                tokens=sum(map(len, outputs)),
                total_s=total,
                decode_s=None,
                rounds=None,
                first_token_s=None,
                energy_joules=joules,
                outputs=tuple(tuple(output) for output in outputs),
            )

        return run


def draft_taus(name: str) -> tuple[float, ...]:
    """Draft temperatures that are searched for a draft by name; none for prompt lookup, which does not sample."""
    if name == NGRAM:
        return ()
    return HEAD_TAUS if names_head(name) or names_self(name) else TAUS


def _until_eos(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: place + 1]
    return tokens
