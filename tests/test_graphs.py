"""Recorded passes: the same logits as passes that run, whatever the cache does. A stand-in for CUDA graphs records here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from test_decoding import lively_model
from torch import Tensor

from lossyspec import graphs
from lossyspec.decoder import Decoder
from lossyspec.graphs import Graphs
from lossyspec.kv_cache import RowCache
from lossyspec.loading import LoadedModel
from lossyspec.quantised import quantise
from lossyspec.runner import Runner
from lossyspec.settings import MAX_DRAFT_LENGTH, Attention, Settings

FAMILY = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


class Recorder:
    """Replays by running the recorded function again on its own tensors, into the result that it had before."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        result = run()

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode():
                result.copy_(run())

        return replay, result


def pair(architecture: str = "llama", precision: str = "fp32") -> tuple[Runner, Runner, Recorder]:
    """A runner that records its passes, one that runs them, and what records."""
    model, recorder = lively_model(architecture), Recorder()
    stack = quantise(model, precision) if precision != "fp32" else None
    return Runner(model, stack=stack, new_capture=lambda: recorder), Runner(model, stack=stack), recorder


def same(recorded: Runner, plain: Runner, tokens: Tensor, starts: list[int]) -> None:
    got, want = recorded.logits(tokens, starts), plain.logits(tokens, starts)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert recorded.features is not None and plain.features is not None
    torch.testing.assert_close(recorded.features, plain.features, rtol=1e-4, atol=1e-4)
    assert (recorded.cache.extent, recorded.cache.rows, recorded.cache.count) == (
        plain.cache.extent,
        plain.cache.rows,
        plain.cache.count,
    )


def words(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(3, 100, (rows, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", FAMILY)
def test_replayed_passes_are_those_that_run(architecture: str) -> None:
    """Ragged and uniform rows, past the window of 16 tokens of gemma3 and mistral, rolled back, and over two buckets."""
    recorded, plain, recorder = pair(architecture)
    for prompts in ([[5, 6, 7], [3, 4, 5, 6, 7, 8], [9] * 12], [[5, 6, 7], [8, 9, 10]]):
        for each in (recorded, plain):
            each.start(prompts, 200)
        starts = [len(prompt) - 1 for prompt in prompts]
        for turn in range(14):
            count = (1, 3)[turn % 2] if turn < 10 else 17
            same(recorded, plain, words(len(prompts), count, turn), starts)
            starts = [start + 1 + (turn + row) % count for row, start in enumerate(starts)]
            if len(prompts) == 2:
                starts = [starts[0]] * 2
    assert recorder.replayed > 10
    assert 4 <= recorder.recorded < recorder.replayed


def test_greedy_decoding_by_graphs_is_that_without_in_every_company() -> None:
    model, recorder = lively_model("qwen3"), Recorder()
    decoder = Decoder(LoadedModel(model, tiny_tokenizer(), {"id": "tiny"}, "fp32"))
    prompts = [[5, 6, 7, 8, 5, 6], [3, 4, 5], [20, 21, 22, 20, 21]]
    plain = decoder.generate_ids(prompts, 40, settings=Settings(draft_length=0), temperature=0.0)
    decoder.target._graphs = Graphs(lambda: recorder)
    for _ in range(2):  # the second time over the memory of the first
        for length in (0, 4):
            got = decoder.generate_ids(prompts, 40, settings=Settings(draft_length=length), temperature=0.0)
            assert [answer.tokens for answer in got] == [answer.tokens for answer in plain]
    assert recorder.replayed > 40
    before = recorder.replayed
    off = decoder.generate_ids(prompts, 40, settings=Settings(draft_length=4, cuda_graphs=False), temperature=0.0)
    assert [answer.tokens for answer in off] == [answer.tokens for answer in plain]
    assert recorder.replayed == before
    with decoder.batcher(max_batch=2) as batcher:
        handles = [batcher.submit(f"w{i} w{i + 1} w1", max_new_tokens=12, temperature=0.0) for i in (2, 9, 17)]
        together = [handle.result().tokens for handle in handles]
    assert recorder.replayed > before
    decoder.target._graphs = None
    alone = [decoder.generate(f"w{i} w{i + 1} w1", 12, temperature=0.0)[0].tokens for i in (2, 9, 17)]
    assert together == alone


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_weights_are_recorded_too(precision: str) -> None:
    recorded, plain, recorder = pair("llama", precision)
    for each in (recorded, plain):
        each.start([[5, 6, 7], [3, 4, 5, 6]], 64)
    for turn in range(4):
        tokens = words(2, 2, turn)
        got, want = (each.logits(tokens, [2 + turn, 3 + turn]) for each in (recorded, plain))
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.1)
    assert recorder.replayed == 3


def test_a_pass_is_recorded_when_it_comes_again_and_by_rows_tokens_and_slots() -> None:
    recorded, _, recorder = pair()
    recorded.start([[5, 6, 7], [3, 4, 5]], 700)
    graphs_of = recorded._graphs
    assert graphs_of is not None
    for place, count in ((2, 1), (3, 1), (4, 1), (9, 2), (130, 1), (131, 1), (300, 1), (301, 1), (600, 1)):
        recorded.logits(words(2, count, place), [place, place])
    assert set(graphs_of._recorded) == {(2, 1, 128), (2, 1, 256), (2, 1, 512)}
    assert (recorder.recorded, recorder.replayed) == (3, 4)
    recorded.select([1])
    for place in (600, 601):
        recorded.logits(words(1, 1, place), [place])
    assert (1, 1, 768) in graphs_of._recorded  # all that is stored, where the next power of two is more
    assert len(graphs_of._recorded) == 4  # dropping rows in place keeps the memory


def test_a_result_stays_when_the_next_pass_is_replayed() -> None:
    recorded, _, recorder = pair()
    recorded.start([[5, 6, 7]], 100)
    kept = []
    for turn in range(4):
        recorded.logits(words(1, 2, turn), [2 + turn])
        assert recorded.features is not None
        kept.append((recorded.features, recorded.features.clone()))
    assert recorder.replayed == 3
    assert all(torch.equal(features, then) for features, then in kept)


def test_graphs_go_with_the_memory_of_the_cache() -> None:
    recorded, plain, recorder = pair()
    for each in (recorded, plain):
        each.start([[5, 6, 7]], 40)
    for place in (2, 3, 4):
        same(recorded, plain, words(1, 1, place), [place])
    assert recorder.recorded == 1
    for each in (recorded, plain):
        each.cache.grow(300)
    graphs_of = recorded._graphs
    assert graphs_of is not None and graphs_of._recorded
    same(recorded, plain, words(1, 1, 5), [5])
    assert not graphs_of._recorded
    same(recorded, plain, words(1, 1, 6), [6])
    same(recorded, plain, words(1, 1, 7), [7])
    assert recorder.recorded == 2
    for each in (recorded, plain):  # a row more takes other memory too
        other = each.fork()
        other.start([[8, 9, 10]], 40)
        each.join(other)
    for place in (8, 9, 10):
        same(recorded, plain, words(2, 1, place), [place, place - 6])
    assert recorder.recorded == 3


def test_a_new_text_reuses_memory_that_is_enough_and_nothing_of_the_old_one_is_left() -> None:
    recorded, plain, recorder = pair()
    recorded.start([[5, 6, 7], [8, 9, 10]], 100)
    for place in (2, 3):
        recorded.logits(words(2, 1, place), [place, place])
    memory = recorded.cache.layers[0].keys
    with torch.inference_mode():  # as a text whose numbers overflowed would leave it
        memory.fill_(torch.nan)
        recorded.cache.layers[0].values.fill_(torch.nan)
    for prompt in ([11, 12, 13, 14], [20, 21]):
        for each in (recorded, plain):
            each.start([prompt], 100)
        assert recorded.cache.layers[0].keys is memory
        assert not memory[:1].isnan().any()
        for turn in range(3):
            same(recorded, plain, words(1, 1, turn), [len(prompt) - 1 + turn])
    assert recorder.recorded == 2
    recorded.start([[5, 6, 7]] * 3, 100)
    assert recorded.cache.layers[0].keys is not memory
    kept = recorded.cache.layers[0].keys
    recorded.start([[5, 6, 7]], 500)
    assert recorded.cache.layers[0].keys is not kept


def test_prompts_long_passes_and_sparse_ones_are_not_recorded() -> None:
    recorded, plain, recorder = pair()
    sparse = Attention(block=8, sink=1, window=1, top=1, side="verify")
    for each in (recorded, plain):
        each.start([list(range(3, 60))], 200)
    for _ in range(3):
        recorded.logits(words(1, MAX_DRAFT_LENGTH + 2, 0), [56])
        got, want = (each.logits(words(1, 2, 1), [56], sparse) for each in (recorded, plain))
        torch.testing.assert_close(got, want)
    assert recorder.recorded == 0
    recorded.start([[5], [6]], 16)  # nothing is stored yet
    for _ in range(3):
        recorded.logits(words(2, 1, 0), [0, 0])
    assert recorder.recorded == 1


def test_what_cannot_be_recorded_runs_as_before_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    recorded, plain, _ = pair()
    tried = []

    def broken(run: Callable[[], Tensor]) -> Any:
        tried.append(run())
        raise RuntimeError("operation not permitted when stream is capturing")

    recorded._graphs = Graphs(lambda: broken)
    for each in (recorded, plain):
        each.start([[5, 6, 7], [8, 9]], 64)
    for turn in range(4):
        same(recorded, plain, words(2, 1, turn), [2 + turn, 1 + turn])
    assert len(tried) == 1
    assert caplog.text.count("could not be recorded: operation not permitted when stream is capturing") == 1


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    recorded, plain, recorder = pair()
    for each in (recorded, plain):
        each.start([[5, 6, 7]], 100)
    for count in (1, 2, 1, 2, 1, 3, 3):  # 1 is used after 2, so 2 makes room for 3
        same(recorded, plain, words(1, count, count), [2])
    assert recorded._graphs is not None
    assert [key[1] for key in recorded._graphs._recorded] == [1, 3]
    assert recorder.recorded == 3


def test_forks_record_for_themselves_and_caches_go_with_their_last_user() -> None:
    recorded, _, recorder = pair()
    fork = recorded.fork()
    assert fork._graphs is not None and fork._graphs is not recorded._graphs
    fork.start([[5, 6, 7]], 16)
    for place in (2, 3, 4):
        fork.logits(words(1, 1, place), [place])
    assert recorder.recorded == 1 and recorded._graphs is not None and not recorded._graphs._recorded
    gc.collect()
    gc.disable()
    try:
        runner = Runner(recorded.model, new_capture=lambda: lambda run: (lambda: None, run()))
        runner.start([[5, 6, 7]], 16)
        for place in (2, 3):
            runner.logits(words(1, 1, place), [place])
        memory = weakref.ref(runner.cache.layers[0].keys)
        del runner
        assert memory() is None  # no cycle holds it
    finally:
        gc.enable()


def test_on_the_cpu_and_without_a_fused_stack_nothing_is_recorded() -> None:
    assert Runner(lively_model("llama"))._graphs is None
    assert Runner(lively_model("gpt2"), new_capture=Recorder)._graphs is None


def test_a_pinned_cache_writes_by_index_and_is_as_before_afterwards() -> None:
    cache = RowCache(1, 100, 2)
    cache.place([3, 3], 1, torch.device("cpu"))
    cache.update(torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), 0)
    with cache.pinned(torch.tensor([[5], [7]]), 64):
        keys, _ = cache.update(torch.full((2, 1, 1, 2), 2.0), torch.full((2, 1, 1, 2), 3.0), 0)
        assert keys.shape == (2, 1, 64, 2)
        assert cache.shared == 0  # what all rows see differs from pass to pass
    assert (cache.extent, cache.uniform_start, cache.slots) == (4, 3, None)
    assert keys[0, 0, :8, 0].tolist() == [0, 0, 0, 1, 0, 2, 0, 0]
    assert keys[1, 0, :8, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 2]
