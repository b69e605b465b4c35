"""Lanes: the draft runs ahead of the verdict, and every text is what it is without, token by token and by law."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_tokenizer
from test_decoding import (
    GREEDY,
    LawRunner,
    chi_square_p,
    histogram,
    lively_model,
    model_draft,
    outputs,
    perturbed,
    random_prompts,
    run,
)
from test_serving import alone, fails
from test_session import loaded, make
from torch import Tensor

from lossyspec.decoder import Decoder
from lossyspec.decoding import Batch
from lossyspec.drafting import ModelDraft, Proposal, Request
from lossyspec.errors import ConfigurationError
from lossyspec.lanes import Ahead, InTurn, OnStreams, foresee, make_lanes
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.rows import Job, Row
from lossyspec.runner import Runner
from lossyspec.sampling import Choice
from lossyspec.settings import NgramSettings, Sampling, ScheduleRow, Settings, make_settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping
from lossyspec.text_drafting import TextDraft

SAMPLED = Sampling(temperature=0.9)


def with_and_without(
    target: Any, make_draft: Callable[[], Any], prompts: list[list[int]], sampling: Sampling = GREEDY, **options: Any
) -> Stats:
    """Checks that lanes change nothing but who drafted when; returns what the run with lanes counted."""
    job = {name: options.pop(name) for name in ("new", "seed", "eos", "stop", "tokenizer", "processors") if name in options}
    settings = Settings(**options)
    (want, plain), (got, stats) = (
        run(target, make_draft(), prompts, settings.model_copy(update={"lanes": lanes}), sampling, **job)
        for lanes in (False, True)
    )
    for one, other in zip(got, want, strict=True):
        assert (one.output, one.finish_reason, one.relaxed) == (other.output, other.finish_reason, other.relaxed)
        assert one.variation == pytest.approx(other.variation, rel=1e-3, abs=1e-4)
    for name in ("passes", "rounds", "drafted_at", "accepted_at", "round_tokens"):
        assert getattr(stats, name) == getattr(plain, name)
    assert plain.prefetched == plain.prefetches_kept == 0
    return stats


# --- token by token ---


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3", "mistral", "opt"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_without_lanes(architecture: str, sampling: Sampling) -> None:
    """One row and ragged batches, lossless and lossy, drafts that stop early; and of the single rows, both kinds of end."""
    model = lively_model(architecture)
    target, near = Runner(model), perturbed(model, 0.04)
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {"draft_length": 3}),
        (1, {"draft_length": 1, "alpha": 0.5, "theta": 0.2}),
        (4, {"draft_length": 2, "alpha": 0.4}),
        (7, {"draft_length": 5, "theta": 0.3, "tau": 0.7}),
    ]
    kept = thrown = 0
    for rows, options in cases:
        stats = with_and_without(
            target, lambda: model_draft(near), random_prompts(rows), sampling, new=30, seed=rows, **options
        )
        assert stats.prefetched > 0
        kept, thrown = kept + stats.prefetches_kept, thrown + stats.prefetches_thrown
    assert kept > 0 < thrown


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_of_a_draft_equal_to_the_target_every_prefetch_is_kept(rows: int, sampling: Sampling) -> None:
    """All but the first round and the last one are drafted ahead, as the guess is what the verdict draws."""
    model = lively_model("llama")
    stats = with_and_without(
        Runner(model), lambda: model_draft(model), random_prompts(rows), sampling, draft_length=3, new=40, seed=1
    )
    assert stats.passes == 10
    assert stats.prefetched == stats.prefetches_kept == 9
    assert stats.prefetches_thrown == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_of_an_unlike_draft_nearly_all_are_thrown_away(sampling: Sampling) -> None:
    model, unlike = lively_model("llama"), lively_model("llama", seed=5)
    stats = with_and_without(Runner(model), lambda: model_draft(unlike), random_prompts(1), sampling, draft_length=3, new=60)
    assert stats.prefetched > 40
    assert stats.prefetches_thrown > 0.9 * stats.prefetched


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_texts_end_where_they_end(noise: float) -> None:
    """By the end of text, a stop string or the length, in rows that leave a batch at different rounds."""
    model, tokenizer, prompts = lively_model("llama"), tiny_tokenizer(), random_prompts(6, seed=9)
    free, _ = run(Runner(model), None, prompts, Settings(draft_length=0), new=24)
    eos, stop = free[0].output[7], tokenizer.decode([free[1].output[11]])
    for sampling in (GREEDY, SAMPLED):
        stats = with_and_without(
            Runner(model), lambda: model_draft(perturbed(model, noise)), prompts, sampling,
            draft_length=4, new=24, eos=[eos], stop=[stop], tokenizer=tokenizer,
        )  # fmt: skip
        assert stats.prefetched > 0


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 8, 9])
def test_nothing_is_prefetched_past_the_length(new: int) -> None:
    model = lively_model("llama")
    stats = with_and_without(Runner(model), lambda: model_draft(model), [[3, 4, 5]], draft_length=3, new=new)
    assert stats.prefetched == stats.prefetches_kept == max(new - 2, 0) // 4


def test_a_text_may_fill_every_position_of_both_models() -> None:
    model = lively_model("gpt2")
    model.config.max_position_embeddings = 48
    with_and_without(Runner(model), lambda: model_draft(model), [[3] * 20, [4, 5]], draft_length=6, new=28)


def test_penalties_processors_schedules_and_rows_that_sample_otherwise() -> None:
    model = lively_model("llama")
    target, prompts = Runner(model), random_prompts(3, seed=4)

    def no_echo(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, ids[0, -1:], -torch.inf)

    for sampling in (
        Sampling(temperature=0.0, repetition_penalty=1.3),
        Sampling(top_k=8, top_p=0.9, repetition_penalty=1.2),
    ):
        stats = with_and_without(
            target, lambda: model_draft(model), prompts, sampling, draft_length=3, processors=[no_echo], new=24
        )
        assert stats.prefetches_kept > 0
    schedule = (ScheduleRow(batch=(1, 2), draft_length=4), ScheduleRow(batch=(3, 3), draft_length=1))
    with_and_without(target, lambda: model_draft(model), prompts, SAMPLED, schedule=schedule, new=24, eos=[9, 10, 11])


def test_mixed_rounds_are_prefetched_and_stay_what_they_are() -> None:
    model = lively_model("llama")
    prompts = [prompt * 3 for prompt in random_prompts(4, seed=12)]
    for rows, sampling in ((1, GREEDY), (1, SAMPLED), (4, SAMPLED)):
        stats = with_and_without(
            Runner(model), lambda: model_draft(perturbed(model, 0.03)), prompts[:rows], sampling,
            draft_length=4, source="mixed", ngram=NgramSettings(min_match=2), new=40,
        )  # fmt: skip
        assert stats.prefetched > 0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.0, "alpha": 0.5}])
def test_a_draft_with_another_tokenizer_runs_ahead_too(options: dict[str, Any]) -> None:
    model, alpha = lively_model("llama"), options.pop("alpha", 0.0)
    draft = loaded(perturbed(lively_model("llama", vocab_size=VOCAB - 20), 0.0))
    draft = replace(draft, tokenizer=tiny_tokenizer(VOCAB - 20))
    decoder = Decoder(loaded(model), draft)
    decoder.eos_ids = frozenset()
    prompts = [[3 + token % (VOCAB - 30) for token in prompt] for prompt in random_prompts(2, seed=3)]
    want, got = (
        decoder.generate_ids(prompts[:1], 24, seed=1, settings=Settings(lanes=lanes, draft_length=2, alpha=alpha), **options)
        for lanes in (False, True)
    )
    assert got[0].tokens == want[0].tokens
    assert got.stats.prefetched > 0


@pytest.mark.parametrize("draft", ["ngram", "head"])
def test_drafts_that_cannot_or_need_not_run_ahead_do_not(draft: str) -> None:
    decoder = make(draft)
    want, got = (
        decoder.generate_ids(random_prompts(2), 12, seed=1, temperature=0.8, settings=Settings(lanes=lanes))
        for lanes in (False, True)
    )
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
    assert got.stats.prefetched == 0
    model = lively_model("llama")
    _, stats = run(Runner(model), model_draft(model), [[3, 4]], Settings(lanes=True, source="ngram"))
    assert stats.prefetched == 0


def test_turns_of_a_session_and_its_streams() -> None:
    answers = []
    for lanes in (False, True):
        decoder = make("model", lanes=lanes, alpha=0.3)
        prompt, said = random_prompts(1, seed=5)[0], []
        with decoder.session() as chat:
            for turn, question in enumerate(random_prompts(4, seed=6)):
                prompt = prompt + question
                said.append(chat.generate_ids(prompt, 11, seed=turn, temperature=0.8 * (turn % 2))[0].tokens)
                prompt = prompt[: len(prompt) - turn] + said[-1]
        answers.append(said)
    assert answers[0] == answers[1]


# --- by law ---


class ChainRunner(LawRunner):
    """The law depends on the last token. launch and check: as of a Runner."""

    def __init__(self, laws: Sequence[Sequence[float]]) -> None:
        self.table = torch.tensor(laws, dtype=torch.float64).log().float()

    def logits(self, tokens: Tensor, starts: list[int], attention: Any = None) -> Tensor:
        return self.table[tokens]

    launch = logits

    def check(self, logits: Tensor, starts: list[int]) -> None:
        pass


P = ((0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.6, 0.1, 0.3))
Q = ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6), (0.5, 0.2, 0.3))


@pytest.mark.parametrize("options", [{"draft_length": 1}, {"draft_length": 2}, {"draft_length": 3, "theta": 0.45}])
def test_the_law_is_the_targets(options: dict[str, Any]) -> None:
    """Transitions of one long text against the target's chain: about a half of the proposals here come from the prefetch."""
    draft = ModelDraft(ChainRunner(Q), 3)  # type: ignore[arg-type]
    rows, stats = run(ChainRunner(P), draft, [[0]], Settings(lanes=True, **options), Sampling(), new=4000, seed=1)
    assert 0.2 * stats.passes < stats.prefetches_kept < 0.9 * stats.passes
    text = [0, *rows[0].output]
    for token in range(3):
        after = [new for old, new in itertools.pairwise(text) if old == token]
        assert chi_square_p(histogram(after, 3), P[token]) > 1e-3
    # of three in a row as well: a verdict that shared its numbers with the draft would tie neighbours to each other
    steps = [9 * one + 3 * two + three for one, two, three in zip(text[:-2], text[1:-1], text[2:], strict=True)]
    for pair in range(9):
        seen = histogram(steps, 27)[3 * pair : 3 * pair + 3]
        assert chi_square_p(seen, P[pair % 3]) > 1e-3


def test_a_lossy_law_is_the_one_without_lanes() -> None:
    """Many texts from seeds of their own: exactly as many as without lanes say each thing."""
    settings, said = Settings(draft_length=2, alpha=0.5, rule="mixture"), []
    for lanes in (False, True):
        texts, kept = [], 0
        for seed in range(300):
            draft = ModelDraft(ChainRunner(Q), 3)  # type: ignore[arg-type]
            ours = settings.model_copy(update={"lanes": lanes})
            rows, stats = run(ChainRunner(P), draft, [[0], [1, 2]], ours, Sampling(), new=9, seed=seed)
            texts.append(outputs(rows))
            kept += stats.prefetches_kept
        said.append(texts)
        assert kept > 100 if lanes else kept == 0
    assert said[0] == said[1]


# --- what is kept, and what is thrown away ---


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made_ahead(generator: torch.Generator, prefixes: Sequence[Sequence[int]] = ((3, 4), (5,))) -> tuple[Request, Ahead]:
    """A request for two rows that share a generator, and a proposal that a model has made for it ahead."""
    model = lively_model("llama")
    draft = model_draft(model)
    draft.start([list(prefix) for prefix in prefixes], 40)
    job = Job(Settings(lanes=True, draft_length=2), SAMPLED, Stopping(20), generator)
    rows = [Row(index, list(prefix), job) for index, prefix in enumerate(prefixes)]
    choice = job.choice

    def request(news: list[list[int]]) -> Request:
        grown = [row.tokens + new for row, new in zip(rows, news, strict=True)]
        return Request(grown, [2] * len(rows), job.settings, [choice] * len(rows))

    first = draft.propose(request([[], []]))
    ahead = foresee(rows, first, torch.rand(2, 3), request, draft.propose)
    assert ahead is not None
    return ahead.request, ahead


def test_a_prefetch_leaves_the_generators_alone_until_it_is_taken() -> None:
    generator = seeded()
    request, ahead = made_ahead(generator)
    other = seeded()
    torch.rand(2, 1, generator=other), torch.rand(2, 1, generator=other)  # what the first proposal has drawn
    assert torch.equal(generator.get_state(), other.get_state())
    assert ahead.answers(request)
    ahead.take()
    torch.rand(2, 1, generator=other), torch.rand(2, 1, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
    assert not ahead.answers(request)  # its numbers are used up


def test_a_prefetch_is_what_the_draft_proposes_when_it_is_asked() -> None:
    request, ahead = made_ahead(seeded())
    draft = model_draft(lively_model("llama"))
    draft.start([list(prefix) for prefix in request.prefixes], 40)
    own = draft.propose(request)
    assert own.tokens.tolist() == ahead.proposal.tokens.tolist() and own.lengths == ahead.proposal.lengths
    assert own.q is not None and ahead.proposal.q is not None
    torch.testing.assert_close(own.q, ahead.proposal.q, rtol=1e-4, atol=1e-5)
    assert ahead.steps == own.steps + 1  # the guess


def test_a_prefetch_answers_only_what_it_was_made_for() -> None:
    generator = seeded()
    request, ahead = made_ahead(generator)
    one, other = request.prefixes
    wrong = [*one[:-1], one[-1] + 1]
    for unlike in (
        replace(request, prefixes=[wrong, other]),
        replace(request, prefixes=[other, one]),
        replace(request, prefixes=[one], limits=[2], choices=request.choices[:1]),
        replace(request, limits=[2, 1]),
        replace(request, settings=request.settings.model_copy(update={"theta": 0.1})),
        replace(request, settings=request.settings.model_copy(update={"alpha": 0.1})),
        replace(request, choices=[Choice(SAMPLED, generator)] * 2),
    ):
        assert not ahead.answers(unlike)
    assert ahead.answers(replace(request))
    torch.rand(1, generator=generator)  # somebody else has drawn
    assert not ahead.answers(request)


def test_the_guess_goes_by_the_number_of_the_verdict() -> None:
    """At the draft's own law, whatever tau and theta are; the proposal behind it goes by other numbers."""
    draft = ModelDraft(ChainRunner(Q), 3)  # type: ignore[arg-type]
    job = Job(Settings(lanes=True, tau=0.01, theta=0.9), Sampling(), Stopping(9), seeded())
    draft.start([[0]], 20)
    row = Row(0, [0], job)

    def request(news: list[list[int]]) -> Request:
        return Request([row.tokens + news[0]], [1], job.settings, [job.choice])

    for number, guess in ((0.1, 0), (0.39, 0), (0.41, 1), (0.79, 1), (0.81, 2)):
        ahead = foresee([row], Proposal.empty(1, draft.runner.device), torch.tensor([[0.5, number]]), request, draft.propose)
        assert ahead is not None
        assert ahead.request.prefixes == [[0, guess]]
        assert ahead.request.settings.tau == 0.01


def test_draft_steps_count_every_pass_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model("llama")
    for other in (model, perturbed(model, 0.05)):
        draft, passes = model_draft(other), Log()
        logits = draft.runner.logits
        monkeypatch.setattr(draft.runner, "logits", lambda *args, real=logits, log=passes: (log("pass"), real(*args))[1])
        _, stats = run(Runner(model), draft, [[3, 4, 5]], Settings(draft_length=3, lanes=True), new=33)
        assert stats.draft_steps == len(passes.calls)
        assert stats.prefetches_kept > 0


def test_plain_rounds_with_lanes_ask_the_draft_for_nothing() -> None:
    model = lively_model("llama")
    _, stats = run(Runner(model), model_draft(model), [[3, 4, 5]], Settings(draft_length=0, lanes=True), new=9)
    assert stats.draft_steps == stats.prefetched == 0


class Breaking:
    """A processor that fails now and then within a prefetch, half-way through what it writes into the draft's cache."""

    def __init__(self) -> None:
        self.ahead, self.calls, self.failed = False, 0, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += self.ahead
        if self.ahead and self.calls % 5 == 0:
            self.failed += 1
            raise KeyError("of a future that may not come")
        return scores

    def foresee(self, *arguments: Any) -> Ahead | None:
        self.ahead = True
        found = foresee(*arguments)
        self.ahead = False
        return found


@pytest.mark.parametrize("source", ["draft", "mixed"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prefetch_that_fails_is_left_to_the_round_that_meets_it(
    source: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees an error of a future that does not come, and what it has left in the draft's cache is not trusted."""
    model, breaking = lively_model("llama"), Breaking()
    monkeypatch.setattr("lossyspec.decoding.foresee", breaking.foresee)
    for rows, draft_length in ((1, 2), (3, 4)):
        stats = with_and_without(
            Runner(model), lambda: model_draft(perturbed(model, 0.03)), [prompt * 2 for prompt in random_prompts(rows)],
            sampling, draft_length=draft_length, processors=[breaking], new=40,
            source=source, ngram=NgramSettings(min_match=3),
        )  # fmt: skip
        assert stats.prefetched < stats.passes
    assert breaking.failed > 2


@pytest.mark.parametrize("kind", ["model", "text"])
def test_a_pass_that_fails_leaves_no_draft_sure_of_what_it_has_overwritten(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After [3, 4, 5, 6] a failed look at [3, 4, 9, 9, 9], then [3, 4, 5, 6] again: 5 and 6 have to be read again."""
    model = lively_model("llama")
    draft: Any = model_draft(model)
    if kind == "text":
        draft = Decoder(loaded(model), replace(loaded(model), tokenizer=tiny_tokenizer(VOCAB - 20))).draft
        assert isinstance(draft, TextDraft)

    def drafted(prefix: list[int]) -> list[list[int]]:
        choice = Choice(GREEDY, seeded())
        return draft.propose(Request([prefix], [3], Settings(alpha=0.5), [choice])).tokens.tolist()

    draft.start([[3]], 30)
    want = drafted([3, 4, 5, 6, 7])
    with monkeypatch.context() as patch:
        patch.setattr(draft.runner, "check", lambda logits, starts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafted([3, 4, 9, 9, 9])
    assert drafted([3, 4, 5, 6, 7]) == want


# --- in the batcher ---


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_requests_that_come_and_go_say_what_they_say_without_lanes(noise: float) -> None:
    """With seeds, samplings and alphas of their own, and others that are cancelled: joins and leaves between the rounds."""
    model, said = lively_model("llama"), []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 5},
        {"alpha": 0.0}, {"repetition_penalty": 1.2}, {"temperature": 0.4},
    ]  # fmt: skip
    for lanes in (False, True):
        decoder = Decoder(loaded(model), loaded(perturbed(model, noise)), Settings(draft_length=3, alpha=0.4, lanes=lanes))
        decoder.eos_ids = frozenset()
        with decoder.batcher(max_batch=3, max_length=128) as batcher:
            handles = []
            for index, (prompt, kind) in enumerate(zip(random_prompts(6, seed=21), kinds, strict=True)):
                handles.append(batcher.submit_ids(prompt, 16 + 4 * index, seed=index, **kind))
                gone = batcher.submit_ids(prompt[:3], 60, seed=90 + index)
                for _ in range(3):
                    batcher.step()
                gone.cancel()
            said.append([handle.result().tokens for handle in handles])
        snapshot = decoder.counters.snapshot()
        assert (snapshot["prefetched"] > snapshot["prefetches_kept"]) is lanes
        assert (snapshot["prefetches_kept"] > 0) is lanes
        assert sum(handle.stats.prefetches_kept for handle in handles) > 0 or not lanes
    assert said[0] == said[1]
    assert f"lossyspec_prefetches_kept_total {snapshot['prefetches_kept']}" in decoder.counters.prometheus()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_request_that_fails_leaves_the_others_their_seeds(noise: float) -> None:
    """Also when it fails in a round whose proposal was prefetched: the others draw the same numbers again."""
    model = lively_model("llama")
    decoder = Decoder(loaded(model), loaded(perturbed(model, noise)), Settings(draft_length=3, alpha=0.4, lanes=True))
    decoder.eos_ids = frozenset()
    with decoder.batcher(max_batch=3, max_length=128) as batcher:
        sampled = batcher.submit_ids([5, 6, 7, 5, 6], 30, seed=3)
        for _ in range(2):
            batcher.step()
        broken = batcher.submit_ids([9, 8], 30, seed=1, processors=[fails])
        greedy = batcher.submit_ids([9, 9, 4], 30, temperature=0.0, seed=2)
        with pytest.raises(KeyError):
            broken.result()
        together = [sampled.result().tokens, greedy.result().tokens]
    plain = Decoder(loaded(model), loaded(perturbed(model, noise)), Settings(draft_length=3, alpha=0.4))
    plain.eos_ids = frozenset()
    assert together[0] == alone(plain, [5, 6, 7, 5, 6], 30, seed=3)
    assert together[1] == alone(plain, [9, 9, 4], 30, temperature=0.0, seed=2)


def test_nan_in_a_pass_with_a_prefetch_ends_its_row_alone() -> None:
    """The target's NaN is seen behind the prefetch; what was prefetched then is not used."""
    target, draft = lively_model("llama"), lively_model("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[3] = torch.nan
    decoder = Decoder(loaded(target), loaded(draft), Settings(draft_length=3, lanes=True))
    decoder.eos_ids = frozenset()
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        good, bad = batcher.submit_ids([7, 8, 9], 20, seed=1), batcher.submit_ids([60, 3], 20)
        with pytest.raises(Exception, match="row 1"):
            bad.result()
        tokens = good.result().tokens
    decoder.settings = decoder.settings.model_copy(update={"lanes": False})
    assert tokens == alone(decoder, [7, 8, 9], 20, seed=1)


# --- the executors ---


class Log:
    """What a device was told, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, call: str) -> str:
        self.calls.append(call)
        return call


class FakeStream:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log, self.count = name, log, 0

    def record_event(self) -> str:
        self.count += 1
        self.log(f"{self.name} records {self.name}{self.count}")
        return f"{self.name}{self.count}"

    def wait_event(self, event: str) -> None:
        self.log(f"{self.name} waits for {event}")


class FakeCuda:
    """torch.cuda as far as `OnStreams` uses it."""

    def __init__(self, log: Log) -> None:
        self.log, self.main, self.side = log, FakeStream("main", log), FakeStream("side", log)
        self.current = self.main

    def Stream(self, device: Any) -> FakeStream:
        return self.side

    def current_stream(self, device: Any) -> FakeStream:
        return self.current

    def stream(self, stream: FakeStream) -> Any:
        cuda = self

        class Inside:
            def __enter__(self) -> None:
                cuda.current = stream

            def __exit__(self, *error: object) -> None:
                cuda.current = cuda.main

        return Inside()


class FakeTensor:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: FakeStream) -> None:
        self.log(f"{self.name} is read on {stream.name}")


class FakeAhead:
    def __init__(self, log: Log) -> None:
        self.tensors = [FakeTensor("tokens", log), FakeTensor("q", log)]


ORDER = [
    "main records main1",
    "pass on main",
    "side waits for main1",
    "prefetch on side",
    "side records side1",
    "main waits for side1",
]


def test_the_streams_wait_for_each_other_before_and_after_but_not_during_a_pass() -> None:
    log = Log()
    cuda = FakeCuda(log)
    lanes = OnStreams(torch.device("cuda"), cuda)
    ahead: Any = FakeAhead(log)

    def prefetch() -> Any:
        log(f"prefetch on {cuda.current.name}")
        return ahead

    logits, found = lanes.beside(lambda: log(f"pass on {cuda.current.name}"), prefetch)  # type: ignore[arg-type,return-value]
    assert (logits, found) == ("pass on main", ahead)
    assert log.calls == [*ORDER, "tokens is read on main", "q is read on main"]
    log.calls.clear()
    lanes.beside(lambda: log("pass"), lambda: None)  # type: ignore[arg-type,return-value]
    assert log.calls[-2:] == ["side records side2", "main waits for side2"]


def test_a_prefetch_that_is_interrupted_is_waited_for_all_the_same() -> None:
    """The draft's cache must not be read while its stream still writes there."""
    log = Log()
    cuda = FakeCuda(log)

    def prefetch() -> Any:
        log(f"prefetch on {cuda.current.name}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OnStreams(torch.device("cuda"), cuda).beside(lambda: log("pass on main"), prefetch)  # type: ignore[arg-type,return-value]
    assert log.calls == ORDER
    assert cuda.current is cuda.main


def test_the_pass_is_queued_before_the_prefetch_and_waited_for_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, log = lively_model("llama"), Log()
    target, draft = Runner(model), model_draft(model)
    launch, check, propose = target.launch, target.check, draft.propose
    monkeypatch.setattr(target, "launch", lambda *args: (log("launch"), launch(*args))[1])
    monkeypatch.setattr(target, "check", lambda *args: (log("check"), check(*args))[1])
    monkeypatch.setattr(draft, "propose", lambda request: (log("propose"), propose(request))[1])
    run(target, draft, [[3, 4, 5]], Settings(draft_length=2, lanes=True), new=9)
    one = ["launch", "propose", "propose", "check"]
    assert log.calls == ["propose", *one, *one, "launch", "check"]


def test_the_executor_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_lanes(torch.device("cpu")), InTurn)
    assert isinstance(Batch(Runner(lively_model("llama")), NgramDraft()).lanes, InTurn)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", Log()))
    assert isinstance(make_lanes(torch.device("cuda:0")), OnStreams)


# --- the setting ---


def test_lanes_are_off_unless_they_are_asked_for() -> None:
    assert Settings().lanes is False
    assert Settings.model_validate(Settings(lanes=True).model_dump(mode="json")).lanes is True
    with pytest.raises(ConfigurationError, match=r"lanes is 'perhaps': Input should be a valid boolean"):
        make_settings(lanes="perhaps")
