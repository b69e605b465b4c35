"""Compiled passes: the same tokens as operation by operation, few shapes, and clear errors where there is no compiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from test_decoding import lively_model

from lossyspec import compiled
from lossyspec.compiled import SIZES, CompiledStack, check_compiler
from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.loading import LoadedModel
from lossyspec.quantised import quantise
from lossyspec.runner import Runner
from lossyspec.settings import Attention, Settings

FAMILY = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]
PROMPTS = [[5, 6, 7, 8, 5, 6], [3, 4, 5]]
SPARSE = Attention(block=8, sink=1, window=1, top=1, side="verify")


#: inductor's own imports warn of what torch has deprecated
torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


def traced(step: Any, **options: Any) -> Any:
    """torch.compile without generated code: it traces the layer whole, as inductor would, and fails where it cannot."""
    assert options["fullgraph"] and not options["dynamic"]
    return torch.compile(step, backend="eager", fullgraph=True, dynamic=False)


def noting(step: Any, **options: Any) -> Any:
    """No compiler at all, so that tests about shapes are fast."""
    return step


def decoder_of(architecture: str, compiler: Callable[..., Any], precision: Any = "fp32") -> Decoder:
    model = lively_model(architecture)
    stack = quantise(model, precision) if precision != "fp32" else None
    decoder = Decoder(LoadedModel(model, tiny_tokenizer(), {"id": "tiny"}, precision, stack))
    with_compiler(decoder.target, compiler)
    return decoder


def with_compiler(runner: Runner, compiler: Callable[..., Any]) -> CompiledStack:
    assert runner._fused is not None
    runner._compiled["inductor"] = CompiledStack(runner._fused, "inductor", compiler)
    return runner._compiled["inductor"]


def greedy(decoder: Decoder, prompts: list[list[int]] = PROMPTS, new: int = 12, **settings: Any) -> list[list[int]]:
    answers = decoder.generate_ids(prompts, new, settings=Settings(**settings), temperature=0.0)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("architecture", FAMILY)
def test_compiled_greedy_decoding_is_that_of_single_operations(architecture: str) -> None:
    decoder = decoder_of(architecture, traced)
    plain = greedy(decoder, draft_length=0)
    assert not decoder.target.compile_s
    assert greedy(decoder, draft_length=3, compile="inductor") == plain
    assert decoder.target.compile_s > 0
    assert greedy(decoder, draft_length=3) == plain


@torch_warns
def test_inductor_itself_gives_the_same_tokens_and_says_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    decoder = decoder_of("llama", torch.compile)
    plain = greedy(decoder, [PROMPTS[0]], draft_length=0)
    with caplog.at_level(logging.INFO, logger="lossytune"):
        assert greedy(decoder, [PROMPTS[0]], draft_length=1, compile="inductor") == plain
    stack = decoder.target._compiled["inductor"]
    assert set(stack.seconds) == {1, 2}  # a token alone at the end, and one with a drafted one
    assert "inductor compiled the passes of 2 tokens in" in caplog.text


@torch_warns
def test_inductor_multiplies_packed_weights_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossyspec.native.products.library", lambda: None)  # torch's kernels
    model = lively_model("llama")
    stack = quantise(model, "int4-int8")
    plain, runner = (Runner(model, stack=stack) for _ in range(2))
    runner.how = "inductor"
    for each in (plain, runner):
        each.start(PROMPTS, 24)
    tokens = torch.tensor([[6], [5]])
    assert torch.equal(plain.logits(tokens, [5, 2]), runner.logits(tokens, [5, 2]))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packed_stacks_are_traced_whole(precision: str) -> None:
    decoder = decoder_of("qwen3", traced, precision)
    plain = greedy(decoder, draft_length=0)
    assert greedy(decoder, draft_length=0, compile="inductor") == plain


def test_a_shape_is_a_number_of_tokens_and_there_are_few() -> None:
    runner = Runner(lively_model("llama"))
    stack = with_compiler(runner, noting)
    plain = Runner(runner.model)
    shapes: list[tuple[int, ...]] = []

    def spy(step: Any, **options: Any) -> Any:
        def seen(layer: Any, x: Any, *rest: Any) -> Any:
            shapes.append(tuple(x.shape))
            return step(layer, x, *rest)

        return seen

    stack.compiler = spy
    runner.how = "inductor"
    for rows in (1, 2, 3, 5):
        prompts = [[5 + row, *range(6, 6 + row)] for row in range(rows)]
        for each in (runner, plain):
            each.start(prompts, 64)
        starts = [len(prompt) - 1 for prompt in prompts]
        for count in (1, 2, 7, 9, 17, 40):
            tokens = torch.arange(rows * count).view(rows, count) % 90 + 3
            torch.testing.assert_close(runner.logits(tokens, starts), plain.logits(tokens, starts), rtol=1e-4, atol=1e-5)
            assert runner.features is not None and runner.features.shape == (rows, count, 32)
    assert {shape[:1] for shape in shapes} == {(1,)} and {shape[1] for shape in shapes} <= set(SIZES)
    assert set(stack.seconds) == {shape[1] for shape in shapes}


def test_longer_passes_and_prompts_are_not_compiled() -> None:
    runner = Runner(lively_model("llama"))
    stack = with_compiler(runner, noting)
    runner.how = "inductor"
    runner.start([list(range(3, 40))], 256)
    assert not stack.seconds
    runner.logits(torch.full((1, SIZES[-1] + 1), 7), [36])
    assert not stack.seconds
    runner.logits(torch.full((1, SIZES[-1]), 7), [36])
    assert set(stack.seconds) == {SIZES[-1]}


def test_each_size_has_code_of_its_own_so_that_none_exhausts_torchs_limit_of_recompilations() -> None:
    runner = Runner(lively_model("llama"))
    stack = with_compiler(runner, traced)
    runner.how = "inductor"
    runner.start([[5, 6]], 64)
    with torch._dynamo.config.patch(recompile_limit=2):
        for count in range(1, 5):
            runner.logits(torch.full((1, count), 7), [1])
    assert len(stack.seconds) == 4


def test_sparse_attention_of_the_target_runs_compiled() -> None:
    decoder = decoder_of("llama", traced)
    prompts = [[3 + 7 * place % 90 for place in range(60)], [4, 5, 6]]
    plain = greedy(decoder, prompts, draft_length=2, attention=SPARSE)
    assert greedy(decoder, prompts, draft_length=2, attention=SPARSE, compile="inductor") == plain


def test_forks_share_what_is_compiled() -> None:
    decoder = decoder_of("llama", noting)
    decoder.settings = Settings(draft_length=2, compile="inductor")
    greedy(decoder, draft_length=0, compile="inductor")
    with decoder.batcher(max_batch=2) as batcher:
        batcher.submit("w1 w2 w3", max_new_tokens=4, temperature=0.0).result()
    assert decoder.target.fork()._compiled is decoder.target._compiled
    assert 1 in decoder.target._compiled["inductor"].seconds


def test_a_model_that_is_not_fused_is_refused_before_it_reads() -> None:
    decoder = Decoder(LoadedModel(lively_model("gpt2"), tiny_tokenizer(), {"id": "tiny"}, "fp32"))
    with pytest.raises(ConfigurationError, match=r"compile 'inductor' needs a model of the Llama family.*gpt2.*to 'off'"):
        greedy(decoder, compile="inductor")


def test_tensorrt_needs_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(LoadedModel(lively_model("llama"), tiny_tokenizer(), {"id": "tiny"}, "fp32"))
    with pytest.raises(ConfigurationError, match=r"compile is 'tensorrt', which needs an NVIDIA GPU, .* runs on cpu"):
        greedy(decoder, compile="tensorrt")
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"torch_tensorrt is not installed; run: pip install torch-tensorrt"):
        check_compiler("tensorrt", torch.device("cuda"))
    monkeypatch.setattr(compiled, "find_spec", lambda name: object())
    loaded: list[str] = []
    monkeypatch.setattr(compiled, "import_module", loaded.append)
    check_compiler("tensorrt", torch.device("cuda"))
    assert loaded == ["torch_tensorrt"]


def test_inductor_without_a_cpp_compiler_says_what_to_install() -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with (
        config.patch("cpp.cxx", ("no-such-compiler",)),
        pytest.raises(EnvironmentProblem, match=r"no C\+\+ compiler was found; install one, such as: apt-get install g\+\+"),
    ):
        check_compiler("inductor", torch.device("cpu"))
    cpp_builder.cpp_compiler_search.cache_clear()


def test_compiled_code_is_kept_beside_converted_models_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSSYTUNE_CACHE", str(tmp_path))
    seen: list[str | None] = []

    def looking(step: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
            return step(*args)

        return run

    for given, wanted in ((None, str(tmp_path / "inductor")), (str(tmp_path / "mine"), str(tmp_path / "mine"))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        runner, seen = Runner(lively_model("llama")), []
        with_compiler(runner, looking)
        runner.how = "inductor"
        runner.start([[5, 6]], 8)
        runner.logits(torch.tensor([[6]]), [1])
        assert set(seen) == {wanted}
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == given


def test_the_options_of_the_compilers() -> None:
    assert compiled._options("inductor")["options"] == {"emulate_precision_casts": True}
    options = compiled._options("tensorrt")
    assert options["backend"] == "torch_tensorrt" and options["dynamic"] is False
    assert options["options"]["engine_cache_dir"].endswith("tensorrt")
