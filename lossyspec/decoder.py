"""`Decoder`: the runtime as production code uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .answers import Completion, Generation, Piece
from .checks import check_ids, check_kind, check_options, check_seed
from .counters import Counters
from .decoding import decode
from .drafting import Draft
from .drafts import NGRAM, SELF, LoadedDraft, automatic, draft_identity, draft_name, load_draft, make_draft
from .errors import ProfileMismatch
from .guard import Guard, Watch
from .hardware import detect_hardware
from .loading import LoadedModel, load, same_tokenizer, shared_vocab_size, tokenizer_sha256
from .native.build import kernels
from .policy import Boundaries
from .profile import Here, Match, ModelIdentity, Profile, choose, compare, device_of, read_profile
from .prompts import Prompt, as_list, prompt_ids
from .rows import Job, Row
from .runner import Runner
from .sampling import Processor
from .serving import Batcher
from .session import Session
from .settings import Sampling, Settings, make_sampling
from .stats import Stats
from .stopping import Stopping, final_text, stable_text
from .versions import tuned_with, versions

logger = logging.getLogger("lossytune")


class Decoder:
    """Speculative decoding with one target, one draft and one set of settings.

    draft: None for prompt lookup (n-gram), the target itself, a feature head, or a loaded model.
    match: how the profile that the settings come from fits this machine (None: settings given by hand).
    guard: limits on how far a request may move from the target (None: none), see `lossyspec.guard`.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedDraft = None,
        settings: Settings | None = None,
        sampling: Sampling | None = None,
        match: Match | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.tokenizer = target.tokenizer
        check_options((), (), settings)
        self.settings = settings or Settings(draft_length=4)
        self.sampling = sampling or Sampling()
        self.match = match
        #: totals of all requests: `counters.snapshot()`, `counters.prometheus()`
        self.counters = Counters(match.level if match is not None else "given")
        self.watch = Watch(self.counters, guard)
        size = target.model.config.get_text_config().vocab_size
        if self.tokenizer is not None:
            size = min(size, max(self.tokenizer.get_vocab().values()) + 1)
        if isinstance(draft, LoadedModel) and same_tokenizer(self.tokenizer, draft.tokenizer):
            size = shared_vocab_size(target.model, target.tokenizer, draft.tokenizer)
        self.target = Runner(target.model, "target", size, target.stack)
        self.draft: Draft = make_draft(draft, self.target, size, self.tokenizer)
        self.boundaries = Boundaries(self.tokenizer) if self.tokenizer is not None else None
        eos = target.model.generation_config.eos_token_id
        ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = frozenset(int(token) for token in ids if token is not None)

    @classmethod
    def from_profile(
        cls,
        profile: str | Path | Profile = "auto",
        task: str | None = None,
        target: str = "embedded",
        draft: str | None = None,
        *,
        allow_mismatch: bool = False,
        strict: bool = False,
        guard: Guard | Literal["profile"] | None = "profile",
    ) -> Decoder:
        """A decoder with the settings of a profile: a path, a Profile, or `auto` for the best match for this machine.

        `auto` without a match: lossless defaults, said in the log; with `strict` a ProfileMismatch instead. A profile
        given by hand that does not fit raises ProfileMismatch with the fields that differ, unless `allow_mismatch`.
        draft: with `auto`, the draft that the profile was tuned with (None: any); a profile given by hand brings its own.
        guard: `profile` for the band of the profile's evidence, limits of your own, or None for none.
        """
        check_kind("profile", profile, (str, Path, Profile), "'auto', a path, or a Profile")
        check_kind("target", target, str, "a model's name")
        check_kind("draft", draft, (str, type(None)), "a draft's name, or None")
        if guard != "profile":
            check_kind("guard", guard, (Guard, type(None)), "'profile', a Guard, or None")
        if profile == "auto":
            return cls._best(task, target, draft, strict, guard)
        chosen = profile if isinstance(profile, Profile) else read_profile(Path(profile))
        precision = chosen.settings.precision.target
        target_model = load(chosen.match.target.id, precision)
        draft_model = load_draft(draft_name(chosen.match.draft), target_model, chosen.settings.precision.draft or precision)
        hard, soft = compare(chosen, identify_here(target_model, draft_model))
        if hard and not allow_mismatch:
            raise ProfileMismatch(
                "the profile was tuned for something else: "
                + "; ".join(hard)
                + ". --allow-mismatch (allow_mismatch=True) loads it all the same"
            )
        match = Match("forced" if hard else "compatible" if soft else "exact", tuple(hard + soft))
        return cls._tuned(target_model, draft_model, chosen, match, guard)

    @classmethod
    def _best(
        cls, task: str | None, target: str, draft: str | None, strict: bool, guard: Guard | Literal["profile"] | None
    ) -> Decoder:
        """The decoder of the best known profile; without a named draft, of any draft that this target can have."""
        precision = Settings().precision.target
        target_model = load(target, precision)
        names = [draft] if draft is not None else list(dict.fromkeys([automatic(target), NGRAM, SELF]))
        drafts = [load_draft(name, target_model, precision) for name in names]
        found = [
            (*choose(identify_here(target_model, loaded), task), loaded, name)
            for name, loaded in zip(names, drafts, strict=True)
        ]
        best, match, draft_model, name = min(found, key=lambda item: ("exact", "compatible", "none").index(item[1].level))
        if best is None:
            if strict:
                raise ProfileMismatch("; ".join(match.reasons))
            logger.warning("no profile: lossless defaults (%s)", "; ".join(match.reasons))
            return cls(target_model, draft_model, match=match, guard=None if guard == "profile" else guard)
        wanted = best.settings.precision
        if best.match.draft.kind == "self":  # in which precision it drafts is not in its identity
            name = draft_name(best.match.draft)
            draft_model = load_draft(name, target_model, precision)
        if wanted.target != precision or (wanted.draft or precision) != precision:  # the identity does not depend on it
            target_model = load(target, wanted.target)
            draft_model = load_draft(name, target_model, wanted.draft or wanted.target)
        return cls._tuned(target_model, draft_model, best, match, guard)

    @classmethod
    def _tuned(
        cls,
        target: LoadedModel,
        draft: LoadedDraft,
        profile: Profile,
        match: Match,
        guard: Guard | Literal["profile"] | None,
    ) -> Decoder:
        if match.reasons:
            logger.warning("profile %s is %s here: %s", profile.id, match.level, "; ".join(match.reasons))
        limits = Guard.of(profile.evidence) if guard == "profile" else guard
        return cls(target, draft, profile.settings, profile.sampling, match, limits)

    def make_job(
        self,
        max_new_tokens: int,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        processors: Sequence[Processor] = (),
        settings: Settings | None = None,
        **sampling: Any,
    ) -> Job:
        """All that a run needs besides the prompts. Raises ConfigurationError for a wrong value."""
        generator = torch.Generator(device=self.target.device)
        if seed is None:
            generator.seed()
        else:
            check_seed(seed)
            generator.manual_seed(int(seed))
        check_options(stop, processors, settings)
        chosen = make_sampling(**{**self.sampling.model_dump(), **sampling})
        return Job(
            settings or self.settings,
            chosen,
            Stopping(max_new_tokens, self.eos_ids, (stop,) if isinstance(stop, str) else tuple(stop)),
            generator,
            self.tokenizer,
            processors,
            self.boundaries,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        processors: Sequence[Processor] = (),
        settings: Settings | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answers prompts, as one ragged batch. A prompt is a string or a list of messages.

        sampling: temperature, top_k, top_p, repetition_penalty; what is not given comes from the profile.
        """
        many = as_list(prompts)
        if not many:
            return Generation([])
        return self.generate_ids(
            [prompt_ids(self.tokenizer, prompt) for prompt in many],
            max_new_tokens,
            seed=seed,
            stop=stop,
            processors=processors,
            settings=settings,
            **sampling,
        )

    def generate_ids(
        self,
        prompts: list[list[int]],
        max_new_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        processors: Sequence[Processor] = (),
        settings: Settings | None = None,
        **sampling: Any,
    ) -> Generation:
        """As `generate`, for prompts that are token ids already."""
        if len(prompts) == 0:
            return Generation([])
        self.check_prompts(prompts)
        job = self.make_job(max_new_tokens, seed=seed, stop=stop, processors=processors, settings=settings, **sampling)
        stats = Stats()
        *_, rows = decode(self.target, self.draft, prompts, job, stats, watch=self.watch)
        return self.generation(rows, job, stats)

    def generation(self, rows: list[Row], job: Job, stats: Stats) -> Generation:
        """What a finished run answered."""
        return Generation([self.completion(row, job.stopping) for row in rows], stats)

    def session(self, messages: Sequence[dict[str, str]] = ()) -> Session:
        """A conversation that keeps the caches between its turns. messages: what it begins with, as a system prompt."""
        return Session(self, messages)

    def batcher(self, max_batch: int = 8, max_length: int = 4096, max_waiting: int = 256) -> Batcher:
        """Answers requests that come and go, in one batch. max_batch: how many run at once. max_length: most tokens of
        prompt and answer of one. max_waiting: how many may wait. Raises ConfigurationError when the caches of `max_batch`
        such requests do not fit the memory that is free."""
        return Batcher(self, max_batch, max_length, max_waiting)

    def check_prompts(self, prompts: list[list[int]]) -> None:
        """Raises ConfigurationError for a prompt without tokens or with an id that the models do not share."""
        check_ids(prompts, self.target.vocab_size)

    def completion(self, row: Row, stopping: Stopping) -> Completion:
        """What a finished row answered."""
        text = final_text(row.output, stopping, self.tokenizer) if self.tokenizer is not None else ""
        assert row.finish_reason is not None
        return Completion(text, row.output, len(row.prompt), row.finish_reason, tuple(row.relaxed), row.variation)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        processors: Sequence[Processor] = (),
        settings: Settings | None = None,
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Answers one prompt piece by piece; the last piece carries the finish reason and the statistics."""
        job = self.make_job(max_new_tokens, seed=seed, stop=stop, processors=processors, settings=settings, **sampling)
        stats = Stats()
        prompts = [prompt_ids(self.tokenizer, prompt)]
        self.check_prompts(prompts)
        yield from self.pieces(decode(self.target, self.draft, prompts, job, stats, watch=self.watch), job, stats)

    def pieces(self, rounds: Iterator[list[Row]], job: Job, stats: Stats) -> Iterator[Piece]:
        """The text of a run of one row, as it grows."""
        sent = 0
        for (row,) in rounds:
            show = stable_text if row.finish_reason is None else final_text
            text = show(row.output, job.stopping, self.tokenizer)
            piece, sent = text[sent:], max(sent, len(text))
            if row.finish_reason is not None:
                yield Piece(piece, row.finish_reason, stats)
            elif piece:
                yield Piece(piece)


def identify_here(target: LoadedModel, draft: LoadedDraft) -> Here:
    """This machine and these models, as a profile's match fields name them."""
    found = versions() | ({"cpu_kernels": kernels()} if target.model.device.type == "cpu" else {})
    return Here(
        device_of(detect_hardware()),
        ModelIdentity(**target.identity),
        draft_identity(draft),
        tokenizer_sha256(target.tokenizer),
        tuned_with(found),
    )
