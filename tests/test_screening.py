"""Which precisions a search leaves out before it traces anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_tiny, tiny_model
from test_search_end_to_end import search, write_prompts

import lossyspec.tuner.screening as screening
from lossyspec.errors import ConfigurationError
from lossyspec.runner import Runner
from lossyspec.settings import PRECISIONS, Sampling
from lossyspec.tuner.screening import Times, left_out, measure
from lossyspec.tuner.store import RunFolder


class Timed:
    """A runner whose passes take what a table says, on a clock of its own."""

    device = torch.device("cpu")
    vocab_size = 50

    def __init__(self, clock: list[float], seconds: dict[int, float]) -> None:
        self.clock, self.seconds, self.passes = clock, seconds, 0

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        assert capacity >= len(prompts[0])

    def logits(self, tokens: torch.Tensor, starts: list[int]) -> None:
        self.clock[0] += self.seconds[tokens.shape[1]]
        self.passes += 1


def verdict(reference: dict[int, float], other: dict[int, float]) -> tuple[str | None, int]:
    clock = [0.0]
    ours, theirs = Timed(clock, reference), Timed(clock, other)
    found = measure(ours, theirs, lambda: clock[0])  # type: ignore[arg-type]
    return found.slower, theirs.passes


def test_a_precision_that_is_faster_at_any_width_is_kept() -> None:
    assert verdict({1: 0.030, 4: 0.040}, {1: 0.020, 4: 0.090})[0] is None
    assert verdict({1: 0.030, 4: 0.040}, {1: 0.031, 4: 0.039})[0] is None


def test_a_precision_that_is_slower_at_each_width_is_left_out_with_the_times() -> None:
    reason, passes = verdict({1: 0.030, 4: 0.040}, {1: 0.035, 4: 0.052})
    assert reason == "slower than the reference here: 35 against 30 ms for 1 token, 52 against 40 ms for 4 tokens"
    assert passes == 2 * 6


def test_a_hopeless_precision_is_not_timed_again_and_again() -> None:
    reason, passes = verdict({1: 0.030, 4: 0.040}, {1: 0.5, 4: 2.0})
    assert reason is not None
    assert passes == 2 * 2


def test_a_search_leaves_out_what_is_slower_keeps_what_is_not_and_resumes_with_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    save_tiny(place / "target")
    write_prompts(place / "prompts.jsonl")
    asked: list[int] = []

    def screened(*given: Any) -> dict[str, str]:
        asked.append(1)
        return {"bf16": "too slow", "int8": "too slow", "int4-int8": "too slow"}

    monkeypatch.setattr(screening, "screen", screened)
    search(place, tmp_path / "run", precisions=None, trials=20)
    assert asked == [1]
    manifest = RunFolder(tmp_path / "run").manifest()
    assert manifest.space["precision"]["attributes"]["choices"] == ["fp32", "fp16", "int4"]
    assert manifest.excluded["precision bf16"] == manifest.excluded["precision int8"] == "too slow"
    RunFolder(tmp_path / "run").write_manifest(manifest.model_copy(update={"status": "interrupted"}))
    asked.clear()
    result = search(place, tmp_path / "run", precisions=None, trials=24, resume=True)
    assert not asked
    assert result.manifest.space == manifest.space


def test_of_those_that_could_win_the_fastest_two_are_kept() -> None:
    times = {
        "bf16": Times((0.030, 0.040), (0.025, 0.050)),
        "fp16": Times((0.030, 0.040), (0.033, 0.041)),
        "int8": Times((0.030, 0.040), (0.015, 0.030)),
        "int4": Times((0.030, 0.040), (0.010, 0.020)),
    }
    reasons = left_out(times)  # type: ignore[arg-type]
    assert set(reasons) == {"bf16", "fp16"}
    assert reasons["bf16"].startswith("int4 and int8 are faster here, and a search looks at 3 precisions")
    assert reasons["fp16"].startswith("slower than the reference here: 33 against 30 ms")
    assert left_out({}) == {}


def test_a_precision_that_does_not_run_with_the_model_says_so() -> None:
    reference = Runner(tiny_model("llama"))

    def decoder(precision: str) -> Any:
        if precision == "int8":
            raise ConfigurationError("int8 needs a model of the Llama family")
        return SimpleNamespace(target=reference)

    pool: Any = SimpleNamespace(decoder=decoder, outside="fp32")
    space: Any = SimpleNamespace(precisions=("fp32", "int8"))
    assert screening.screen(space, pool, "fp32") == {"int8": "int8 needs a model of the Llama family"}


class Outside:
    """A pool whose transformers takes so many seconds in each format; the first turn of each is a slow one."""

    outside = "fp32"

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.turns, self.loaded = seconds, [], set[str]()

    def decoder(self, precision: str) -> Any:
        self.loaded.add(precision)
        return SimpleNamespace(target=SimpleNamespace(vocab_size=100, name=precision))

    def forget(self, precision: str) -> None:
        self.loaded.discard(precision)

    def run_transformers(self, precision: str, sampling: Sampling, tokens: int, **options: Any) -> Any:
        assert sampling.temperature == 0 and options["min_new_tokens"] == tokens

        def run(prompts: list[list[int]], seed: int) -> Any:
            self.turns.append(precision)
            return SimpleNamespace(total_s=self.seconds[precision] + 9.0 * (self.turns.count(precision) == 1))

        return run


def test_transformers_runs_in_the_dense_format_in_which_it_is_fastest_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"bf16": (0.9, 2.0), "fp16": (0.5, 0.5), "int4": (0.3, 0.3)}

    def timed(reference: Any, other: Any) -> Times:
        return Times((1.0, 1.0), ours[other.name])

    monkeypatch.setattr(screening, "measure", timed)
    pool: Any = Outside({"fp32": 2.0, "bf16": 1.0, "fp16": 3.0})
    space: Any = SimpleNamespace(precisions=("fp32", *ours))
    found = screening.screen(space, pool, "fp32")
    assert pool.outside == "bf16"  # by the fused forward fp16 is faster
    assert pool.turns == ["fp32", "bf16", "fp16"] * 3
    assert set(found) == {"bf16"}


def test_named_precisions_leave_transformers_its_fastest_dense_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "supported_precisions", lambda info: dict.fromkeys(PRECISIONS))
    hardware: Any = None
    for seconds, kept, best, left in (
        ({"fp32": 2.0, "bf16": 1.0, "fp16": 3.0}, ("fp32", "int4"), "bf16", {"fp32", "bf16"}),
        ({"fp32": 2.0, "bf16": 5.0, "fp16": 1.0}, ("int4",), "fp16", {"fp16"}),
    ):
        pool: Any = Outside(seconds)
        for name in seconds:
            pool.decoder(name)
        assert screening.fastest_dense(pool, hardware, kept) == best
        assert pool.loaded == left
    monkeypatch.setattr(screening, "supported_precisions", lambda info: {**dict.fromkeys(PRECISIONS), "bf16": "too old"})
    pool = Outside({"fp32": 2.0, "bf16": 1.0, "fp16": 1.5})
    assert screening.fastest_dense(pool, hardware, ()) == "fp16" and "bf16" not in pool.turns
