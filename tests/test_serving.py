"""Continuous batching: whoever comes, goes, is cancelled or fails, each request gets the answer that it gets alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_decoding import lively_model, random_prompts
from test_session import loaded, make
from torch import Tensor

from lossyspec import serving
from lossyspec.decoder import Decoder
from lossyspec.decoding import Batch
from lossyspec.errors import ConfigurationError, NumericalError, Overloaded
from lossyspec.handle import Handle
from lossyspec.kv_cache import RowCache
from lossyspec.sampling import probabilities
from lossyspec.serving import Batcher
from lossyspec.settings import Sampling, ScheduleRow, Settings

GREEDY = {"temperature": 0.0}


def alone(decoder: Decoder, prompt: list[int], new: int, **options: Any) -> list[int]:
    """What a batcher says to the only request that it ever gets."""
    with decoder.batcher(max_batch=4, max_length=128) as batcher:
        return batcher.submit_ids(prompt, new, **options).result().tokens


def plain(decoder: Decoder, prompt: list[int], new: int, **options: Any) -> list[int]:
    return decoder.generate_ids([prompt], new, settings=Settings(draft_length=0), **options)[0].tokens


# --- token-identical ---


@pytest.mark.parametrize(
    ("architecture", "draft", "source"),
    [
        ("llama", "ngram", "draft"), ("llama", "model", "draft"), ("llama", "head", "draft"), ("llama", "model", "mixed"),
        ("gpt2", "model", "draft"), ("gemma3", "head", "mixed"),
    ],
)  # fmt: skip
def test_greedy_requests_that_come_and_go_say_what_plain_decoding_says(architecture: str, draft: str, source: str) -> None:
    decoder = make(draft, architecture, source=source)
    prompts, generator = random_prompts(9, seed=11, longest=40), torch.Generator().manual_seed(2)
    news = torch.randint(1, 24, (9,), generator=generator).tolist()
    with decoder.batcher(max_batch=3, max_length=80) as batcher:
        handles: list[Handle] = []
        while len(handles) < 9 or batcher.step():
            if len(handles) < 9 and torch.rand(1, generator=generator) < 0.5:
                handles.append(batcher.submit_ids(prompts[len(handles)], news[len(handles)], **GREEDY))
            batcher.step()
        for prompt, new, handle in zip(prompts, news, handles, strict=True):
            assert handle.result().tokens == plain(decoder, prompt, new, **GREEDY)
            assert handle.result().finish_reason == "length"
    assert decoder.counters.snapshot()["running"] == decoder.counters.snapshot()["waiting"] == 0


@pytest.mark.parametrize("draft", ["ngram", "model", "head"])
def test_a_seed_gives_the_same_answer_in_any_company(draft: str) -> None:
    """Lossy, with a schedule by batch size, and neighbours that sample, penalise, are greedy, or come and go."""
    rows = (ScheduleRow(batch=(1, 2), draft_length=4), ScheduleRow(batch=(3, None), draft_length=2))
    decoder = make(draft, alpha=0.5, theta=0.05, schedule=rows)
    prompts = random_prompts(8, seed=21)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.7, "alpha": 0.0}, {"repetition_penalty": 1.3},
        GREEDY, {"temperature": 1.5, "alpha": 0.9}, {"top_k": 3, "top_p": 0.9}, {"temperature": 0.5},
    ]  # fmt: skip
    with decoder.batcher(max_batch=4, max_length=128) as batcher:
        handles = []
        for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
            handles.append(batcher.submit_ids(prompt, 12, seed=index, **kind))
            batcher.submit_ids(prompt, 3 + index)  # without a seed
            batcher.step()
        together = [handle.result().tokens for handle in handles]
    for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        assert together[index] == alone(decoder, prompt, 12, seed=index, **kind)
    assert len({tuple(alone(decoder, prompts[0], 12, seed=seed)) for seed in range(3)}) == 3


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_seed_without_a_schedule_gives_the_answer_of_generate(draft: str) -> None:
    decoder, prompts = make(draft, alpha=0.5), random_prompts(3, seed=23)
    with decoder.batcher(max_batch=3, max_length=64) as batcher:
        handles = [batcher.submit_ids(prompt, 12, seed=7, temperature=0.9) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.result() == decoder.generate_ids([prompt], 12, seed=7, temperature=0.9)[0]


def test_alpha_0_of_a_greedy_request_is_plain_beside_a_relaxed_one() -> None:
    decoder = make("model", alpha=1.0)
    prompt = random_prompts(1, seed=4)[0]
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        exact, relaxed = (batcher.submit_ids(prompt, 24, alpha=alpha, **GREEDY) for alpha in (0.0, None))
        assert exact.result().tokens == plain(decoder, prompt, 24, **GREEDY) != relaxed.result().tokens
        assert not any(exact.result().relaxed) and any(relaxed.result().relaxed)
        assert exact.result().variation == 0.0 < relaxed.result().variation


@pytest.mark.parametrize("source", ["draft", "mixed"])
def test_a_draft_misses_no_token_when_shorter_rows_join(source: str) -> None:
    """The target as its own draft is always right, unless it has not read something: after rounds in which all was accepted,
    or that did not draft, a row lacks more tokens than a newcomer has."""
    model = lively_model("llama")
    rows = (ScheduleRow(batch=(1, 2), draft_length=3), ScheduleRow(batch=(4, 4), draft_length=3))
    decoder = Decoder(loaded(model), loaded(model), Settings(draft_length=3, source=source, schedule=rows))  # type: ignore[arg-type]
    decoder.eos_ids = frozenset()
    with decoder.batcher(max_batch=4, max_length=128) as batcher:
        handles = []
        for index in range(12):
            handles.append(batcher.submit_ids([30 + index], 9 + 3 * (index % 4), **GREEDY))
            batcher.step()
        for index, handle in enumerate(handles):
            assert handle.result().tokens == plain(decoder, [30 + index], 9 + 3 * (index % 4), **GREEDY)
        if source == "draft":
            assert sum(handle.stats.drafted for handle in handles) > 40
            assert all(handle.stats.drafted == handle.stats.accepted for handle in handles)


@pytest.mark.parametrize("draft", ["head", "model", "ngram"])
def test_a_long_prompt_may_join_a_row_that_is_near_its_end(draft: str) -> None:
    decoder, drawn = make(draft), torch.Generator().manual_seed(5)
    first, second = (torch.randint(3, VOCAB, (length,), generator=drawn).tolist() for length in (465, 440))
    with decoder.batcher(max_batch=2, max_length=512) as batcher:
        one = batcher.submit_ids(first, 28, **GREEDY)
        for _ in range(4):
            batcher.step()
        other = batcher.submit_ids(second, 12, **GREEDY)
        assert other.result().tokens == plain(decoder, second, 12, **GREEDY)
        assert one.result().tokens == plain(decoder, first, 28, **GREEDY)
        assert one.stats.drafted > 0 or draft == "ngram"


# --- by law ---


def test_samples_of_unlike_neighbours_follow_their_own_laws() -> None:
    size, count, prompt = 6, 800, [1, 4, 2]
    model = tiny_model("llama", seed=3, vocab_size=size, scale=4.0)
    decoder = Decoder(
        loaded(model), loaded(tiny_model("llama", seed=4, vocab_size=size, scale=4.0)), Settings(draft_length=2)
    )
    decoder.tokenizer, decoder.eos_ids = None, frozenset()
    kinds = (Sampling(), Sampling(temperature=0.6, top_k=3))
    with decoder.batcher(max_batch=64, max_length=8, max_waiting=4 * count) as batcher:
        handles = [batcher.submit_ids(prompt, 2, **kind.model_dump()) for _ in range(count) for kind in kinds]
        while batcher.step():
            pass
        said = [handle.result().tokens for handle in handles]
    for place, kind in enumerate(kinds):
        laws = [probabilities(model(torch.tensor([prompt + more])).logits[0, -1], kind) for more in [[], *_each(size)]]
        joint = (laws[0][:, None] * torch.stack(laws[1:])).detach().double().flatten()
        seen = torch.bincount(torch.tensor([one * size + two for one, two in said[place::2]]), minlength=size * size)
        assert seen[joint == 0].sum() == 0
        likely = joint * count >= 5
        got = [*seen[likely].tolist(), float(seen[~likely].sum())]
        want = [*(joint[likely] * count).tolist(), float(joint[~likely].sum() * count)]
        got, want = (got[:-1], want[:-1]) if want[-1] < 1e-6 else (got, want)
        assert chisquare(got, [value * sum(got) / sum(want) for value in want]).pvalue > 1e-3


def _each(size: int) -> list[list[int]]:
    return [[token] for token in range(size)]


# --- coming and going ---


def test_a_cancelled_request_keeps_what_it_has_said_and_frees_its_row() -> None:
    decoder = make("model")
    first, second, third = random_prompts(3, seed=6)
    with decoder.batcher(max_batch=1, max_length=256) as batcher:
        handles = [batcher.submit_ids(prompt, 40, **GREEDY) for prompt in (first, second, third)]
        batcher.step()
        handles[0].cancel()
        handles[1].cancel()  # still waits
        assert handles[2].result().tokens == plain(decoder, third, 40, **GREEDY)
        said = handles[0].result()
        assert said.finish_reason == handles[1].result().finish_reason == "cancelled"
        assert said.tokens and said.tokens == plain(decoder, first, 40, **GREEDY)[: len(said.tokens)]
        assert handles[1].result().tokens == []
        handles[2].cancel()
        assert handles[2].result().finish_reason == "length"
    assert decoder.counters.snapshot()["finished"] == {"stop": 0, "length": 3, "cancelled": 1, "error": 0}


def test_pieces_are_the_text_and_end_with_the_reason_and_the_statistics() -> None:
    decoder = make("ngram")
    prompt = random_prompts(1, seed=9)[0]
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        beside = batcher.submit_ids(prompt[:2], 30)
        pieces = list(batcher.submit_ids(prompt, 16, **GREEDY))
        assert not beside.done
        answer = decoder.generate_ids([prompt], 16, **GREEDY)
        assert "".join(piece.text for piece in pieces) == answer[0].text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        stats = pieces[-1].stats
        assert pieces[-1].finish_reason == "length" and stats is not None
        assert (stats.rows, stats.tokens, stats.rounds, stats.drafted) == (
            1, 16, answer.stats.rounds, answer.stats.drafted,
        )  # fmt: skip
        assert stats.prefill_s > 0 and 0 < stats.verify_s <= stats.decode_s


def test_settings_are_those_of_when_the_batcher_was_made() -> None:
    decoder = make("model")
    with decoder.batcher(max_batch=2, max_length=64) as batcher:
        first = batcher.submit_ids([5, 6], 12, **GREEDY)
        batcher.step()
        decoder.settings = Settings(alpha=1.0, draft_length=6)
        second = batcher.submit_ids([7, 8], 12, **GREEDY)
        assert second.result().tokens == plain(decoder, [7, 8], 12, **GREEDY)
        assert first.result().tokens == plain(decoder, [5, 6], 12, **GREEDY)
        assert len(second.stats.drafted_at) == 4


def test_stop_strings_and_the_end_of_text_end_a_row_alone() -> None:
    decoder = make("model")
    prompts = random_prompts(2, seed=13)
    texts = [plain(decoder, prompt, 20, **GREEDY) for prompt in prompts]
    stop = decoder.tokenizer.decode([texts[0][5]])
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        stopped, whole = (
            batcher.submit_ids(prompt, 20, stop=ends, **GREEDY) for prompt, ends in zip(prompts, ([stop], []), strict=True)
        )
        assert whole.result().tokens == texts[1]
        assert stopped.result().finish_reason == "stop"
        assert stopped.result().tokens == texts[0][: texts[0].index(texts[0][5]) + 1]


def test_many_threads_share_the_rounds_and_one_may_run_them_all() -> None:
    decoder = make("model")
    prompts = random_prompts(12, seed=15)
    wanted = [plain(decoder, prompt, 10, **GREEDY) for prompt in prompts]
    for served in (False, True):
        batcher = decoder.batcher(max_batch=4, max_length=128)
        server = threading.Thread(target=batcher.run)
        if served:
            server.start()
        found: dict[int, list[int]] = {}

        def ask(index: int, batcher: Batcher = batcher, found: dict[int, list[int]] = found) -> None:
            found[index] = batcher.submit_ids(prompts[index], 10, **GREEDY).result(timeout_s=300).tokens

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        batcher.close()
        if served:
            server.join(timeout=60)
            assert not server.is_alive()
        assert [found[index] for index in range(12)] == wanted


def test_draft_length_follows_the_schedule_and_is_fixed_for_seeds() -> None:
    rows = (ScheduleRow(batch=(1, 1), draft_length=4), ScheduleRow(batch=(2, 2), draft_length=1))
    decoder = make("model", schedule=rows)
    with decoder.batcher(max_batch=3, max_length=256) as batcher:
        for requests, seeds, longest in ((1, [None], 4), (2, [None] * 2, 1), (3, [None] * 3, 0), (1, [5], 0)):
            handles = [batcher.submit_ids([7, 8, 9], 30, seed=seed) for _, seed in zip(range(requests), seeds, strict=True)]
            for _ in range(3):
                batcher.step()
            assert {len(handle.stats.drafted_at) for handle in handles} == {longest}
            for handle in handles:
                handle.cancel()


# --- failures ---


def fails(ids: Tensor, scores: Tensor) -> Tensor:
    if ids.shape[1] > 8:
        raise KeyError("no such thing")
    return scores


def nothing_left(ids: Tensor, scores: Tensor) -> Tensor:
    return scores if ids.shape[1] <= 8 else torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize(("processor", "kind"), [(fails, KeyError), (nothing_left, NumericalError)])
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_request_that_fails_takes_nobody_with_it(processor: Any, kind: type[Exception], draft: str) -> None:
    decoder = make(draft, alpha=0.4)
    with decoder.batcher(max_batch=3, max_length=128) as batcher:
        sampled = batcher.submit_ids([5, 6, 7, 5, 6], 20, seed=3)
        broken = batcher.submit_ids([9, 8], 20, seed=1, processors=[processor])
        greedy = batcher.submit_ids([9, 9, 4], 20, **GREEDY)
        with pytest.raises(kind):
            broken.result()
        with pytest.raises(kind):
            list(broken)
        assert greedy.result().finish_reason == "length"
        together = sampled.result().tokens
    assert together == alone(decoder, [5, 6, 7, 5, 6], 20, seed=3)
    assert decoder.counters.snapshot()["finished"]["error"] == 1


def test_nan_of_one_row_ends_that_request_and_leaves_no_trace_in_its_place() -> None:
    """The token 3 makes the model return NaN; the next request gets the row whose cache was poisoned."""
    decoder = make("ngram")
    with torch.no_grad():
        decoder.target.model.get_input_embeddings().weight[3] = torch.nan
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        good, bad = batcher.submit_ids([7, 8, 9], 20, **GREEDY), batcher.submit_ids([60, 3], 20, **GREEDY)
        after = batcher.submit_ids([11, 12], 20, **GREEDY)
        with pytest.raises(NumericalError, match="row 1"):
            bad.result()
        assert good.result().tokens == plain(decoder, [7, 8, 9], 20, **GREEDY)
        assert after.result().tokens == plain(decoder, [11, 12], 20, **GREEDY)


def test_a_round_that_fails_for_no_row_ends_the_running_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make("model")
    with decoder.batcher(max_batch=2, max_length=128) as batcher:
        handles = [batcher.submit_ids([3 + index, 4], 10, **GREEDY) for index in range(3)]
        with monkeypatch.context() as patch:

            def broken(self: Batch) -> Any:
                raise RuntimeError("out of memory")

            patch.setattr(Batch, "round", broken)
            batcher.step()
        for handle in handles[:2]:
            with pytest.raises(RuntimeError, match="out of memory"):
                handle.result()
        assert handles[2].result().tokens == plain(decoder, [5, 4], 10, **GREEDY)


def test_what_cannot_be_served_is_refused_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make("ngram")
    batcher = decoder.batcher(max_batch=1, max_length=32, max_waiting=2)
    for arguments, options, words in [
        (([3] * 20, 13), {}, "need 33 positions; this batcher has 32"),
        (([3], 0), {}, "max_new_tokens is 0"),
        (([], 4), {}, "prompt 0 has no tokens"),
        (([VOCAB], 4), {}, f"holds the token id {VOCAB}"),
        (([3], 4), {"temperature": -1.0}, "temperature is -1.0"),
        (([3], 4), {"alpha": 1.5}, "alpha is 1.5"),
        (([3], 4), {"seed": -1}, "seed is -1"),
    ]:  # fmt: skip
        with pytest.raises(ConfigurationError, match=words):
            batcher.submit_ids(*arguments, **options)
    batcher.submit_ids([3], 4), batcher.submit_ids([3], 4)
    with pytest.raises(Overloaded, match="2 requests wait; max_waiting is 2"):
        batcher.submit_ids([3], 4)
    batcher.close()
    with pytest.raises(ConfigurationError, match="closed"):
        batcher.submit_ids([3], 4)
    with pytest.raises(ConfigurationError, match=r"alpha is 0\.5; .*\(rule exact, draft_length 4\)"):
        make("ngram", rule="exact").batcher(max_length=32).submit_ids([3], 4, alpha=0.5)
    with pytest.raises(ConfigurationError, match="max_batch is 0"):
        decoder.batcher(max_batch=0)
    monkeypatch.setattr(serving, "_free_bytes", lambda device: 10_000)
    with pytest.raises(ConfigurationError, match=r"8 rows of 2048 tokens need 0\.\d GB of cache"):
        decoder.batcher()


def test_waiting_has_an_end() -> None:
    batcher = make("ngram").batcher(max_batch=1, max_length=64)
    handle = batcher.submit_ids([3, 4], 20)
    with pytest.raises(TimeoutError, match=r"0\.0 s"):
        handle.result(timeout_s=0.0)
    assert len(handle.result().tokens) == 20


# --- properties ---


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, list[list[int]], list[list[int]]]:
    """A decoder, prompts, and what plain decoding says to them."""
    decoder = make("model")
    prompts = random_prompts(6, seed=33, longest=12)
    return decoder, prompts, [plain(decoder, prompt, 8, **GREEDY) for prompt in prompts]


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(st.tuples(st.just("ask"), st.integers(0, 5)), st.tuples(st.just("stop"), st.integers(0, 9)),
                          st.tuples(st.just("step"), st.just(0))), max_size=16), st.integers(1, 3))  # fmt: skip
def test_any_order_of_events_leaves_every_answer_a_prefix_of_its_own(
    pair: tuple[Decoder, list[list[int]], list[list[int]]], events: list[tuple[str, int]], max_batch: int
) -> None:
    decoder, prompts, texts = pair
    asked: list[tuple[int, Handle]] = []
    with decoder.batcher(max_batch=max_batch, max_length=24) as batcher:
        for event, number in events:
            if event == "ask":
                asked.append((number, batcher.submit_ids(prompts[number], 8, **GREEDY)))
            elif event == "step":
                batcher.step()
            elif asked:
                asked[number % len(asked)][1].cancel()
        for number, handle in asked:
            answer = handle.result()
            assert answer.tokens == texts[number][: len(answer.tokens)]
            assert answer.finish_reason == ("length" if len(answer.tokens) == 8 else "cancelled")
    assert not batcher._running and not batcher._waiting and not batcher._batch.rows


@torch.inference_mode()
def stored(cache: RowCache, value: float, starts: Sequence[int]) -> None:
    """Writes one entry of `value` in each row."""
    cache.place(list(starts), 1, torch.device("cpu"))
    entry = torch.full((len(starts), 1, 1, 2), value)
    for layer in range(2):
        cache.update(entry, -entry, layer)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "select", "write"]), st.integers(0, 99)), max_size=14))
def test_a_cache_whose_rows_join_and_leave_holds_what_a_list_of_rows_does(events: list[tuple[str, int]]) -> None:
    cache, rows, value = RowCache(2, 0), list[list[float]](), 0.0
    for event, number in events:
        value += 1
        if event == "join":
            other, length = RowCache(2, 4 + number % 300, 1), number % 4
            for place in range(length):
                stored(other, value + 100 * place, [place])
            cache.join(other, room=number % 5)
            rows.append([value + 100 * place for place in range(length)])
        elif event == "select" and rows:
            kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))[
                : 1 + number % len(rows)
            ].tolist()
            cache.select(kept)
            rows = [rows[row] for row in kept]
        elif event == "write" and rows and all(len(row) < 4 for row in rows):
            stored(cache, value, [len(row) for row in rows])
            for row in rows:
                row.append(value)
    assert cache.rows == len(rows)
    for layer in cache.layers:
        for place, row in enumerate(rows):
            if row:
                assert layer.keys[place, 0, : len(row), 0].tolist() == row
                assert layer.values[place, 0, : len(row), 1].tolist() == [-item for item in row]


def test_a_fused_target_serves_as_it_decodes() -> None:
    model = lively_model("qwen3")
    decoder = Decoder(loaded(model), None, Settings(draft_length=3))
    decoder.eos_ids = frozenset()
    assert decoder.target._fused is not None
    with decoder.batcher(max_batch=2, max_length=64) as batcher:
        prompts = random_prompts(4, seed=41)
        handles = [batcher.submit_ids(prompt, 9, **GREEDY) for prompt in prompts]
        assert [handle.result().tokens for handle in handles] == [plain(decoder, prompt, 9, **GREEDY) for prompt in prompts]
