"""One model with its cache: ragged rows, prompts in pieces, rolling back, and refusing what cannot do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from test_decoding import ARCHITECTURES, lively_model, outputs, random_prompts, run
from torch import Tensor, nn

from lossyspec import runner as runner_module
from lossyspec.errors import ConfigurationError, NumericalError
from lossyspec.runner import Runner, check_rollback
from lossyspec.settings import Settings


@torch.inference_mode()
def logits_without_cache(model: Any, tokens: Sequence[int], last: int) -> Tensor:
    """Logits of the last tokens of one text, read at once."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -last:].float()


def assert_rows_are_right(runner: Runner, rows: Sequence[Sequence[int]], count: int) -> None:
    """Reads the last `count` tokens of each row on the cache, and holds them against the model without one."""
    tokens = torch.tensor([row[-count:] for row in rows])
    got = runner.logits(tokens, [len(row) - count for row in rows])
    assert got.dtype == torch.float32
    for index, row in enumerate(rows):
        torch.testing.assert_close(got[index], logits_without_cache(runner.model, row, count), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ragged_rows_see_their_own_tokens_only(architecture: str, attention: str) -> None:
    """Unequal rows past the window of 16 tokens of gemma3 and mistral; one token, several, after a rollback, reordered."""
    model = lively_model(architecture)
    model.set_attn_implementation(attention)
    runner = Runner(model)
    rows = random_prompts(3, seed=1, longest=12) + random_prompts(1, seed=2, longest=3) + [list(range(10, 45))]
    assert len({len(row) for row in rows}) > 3
    runner.start(rows, 64)
    assert_rows_are_right(runner, rows, 1)
    wrong = [[*row, 7, 8, 9] for row in rows]
    assert_rows_are_right(runner, wrong, 4)
    rejected = [[*row, 40 + index] for index, row in enumerate(rows)]
    assert_rows_are_right(runner, rejected, 1)
    longer = [[*row, 7] if index % 2 else [*row, 50, 51, 52] for index, row in enumerate(rejected)]
    tokens = [row[len(rejected[index]) :] for index, row in enumerate(longer)]
    padded = torch.tensor([[*part, 0, 0, 0][:3] for part in tokens])
    runner.logits(padded, [len(row) for row in rejected])
    assert_rows_are_right(runner, longer, 1)
    runner.select([4, 1, 2])
    assert_rows_are_right(runner, [[*longer[row], 60, 61] for row in (4, 1, 2)], 2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral", "opt"])
def test_rows_of_equal_length_are_right_as_well(architecture: str, attention: str) -> None:
    """They take another path: one slice of the cache, and no mask for one new token."""
    model = lively_model(architecture)
    model.set_attn_implementation(attention)
    runner = Runner(model)
    rows = [list(range(5, 35)), list(range(40, 70))]
    runner.start(rows, 64)
    assert_rows_are_right(runner, rows, 1)
    assert_rows_are_right(runner, [[*row, 7, 8, 9] for row in rows], 4)
    shorter = [[*row, 11] for row in rows]
    assert_rows_are_right(runner, shorter, 1)
    assert_rows_are_right(runner, [[*row, 12] for row in shorter], 1)
    short = [[5, 6, 7], [8, 9, 10]]  # inside the window
    runner.start(short, 16)
    assert_rows_are_right(runner, short, 1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mistral", "opt"])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prompts_in_pieces_equal_one_piece(architecture: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(architecture)
    prompts = [list(range(5, 30)), [9], list(range(50, 54)), list(range(60, 69))]
    last = torch.tensor([[prompt[-1]] for prompt in prompts])
    starts = [len(prompt) - 1 for prompt in prompts]
    whole = Runner(model)
    whole.start(prompts, 40)
    expected = whole.logits(last, starts)
    widths: list[int] = []
    place = Runner._place

    def spy(self: Runner, tokens: Tensor, starts: list[int]) -> Any:
        widths.append(tokens.shape[1])
        return place(self, tokens, starts)

    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(Runner, "_place", spy)
    pieces = Runner(model)
    pieces.start(prompts, 40)
    assert sum(widths) == 24
    assert max(widths) == chunk
    torch.testing.assert_close(pieces.logits(last, starts), expected, rtol=1e-4, atol=1e-4)
    rows, _ = run(pieces, None, prompts, Settings(draft_length=0), new=8)
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 1024)
    again, _ = run(whole, None, prompts, Settings(draft_length=0), new=8)
    assert outputs(rows) == outputs(again)


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    model = lively_model("llama")
    runner = Runner(model)
    runner.start([[5], [6]], 8)
    assert_rows_are_right(runner, [[5], [6]], 1)


def test_a_new_start_forgets_the_old_rows() -> None:
    runner = Runner(lively_model("llama"))
    runner.start([[5, 6, 7, 8, 9], [10, 11]], 16)
    assert_rows_are_right(runner, [[5, 6, 7, 8, 9], [10, 11]], 1)
    runner.start([[20, 21], [22, 23, 24], [25]], 16)
    assert_rows_are_right(runner, [[20, 21], [22, 23, 24], [25]], 1)


def test_logits_past_the_vocabulary_are_cut_off() -> None:
    model = lively_model("llama", vocab_size=120)
    for given, expected in ((VOCAB, VOCAB), (None, 120), (500, 120)):
        runner = Runner(model, vocab_size=given)
        runner.start([[3, 4]], 8)
        assert runner.vocab_size == expected
        assert runner.logits(torch.tensor([[4]]), [1]).shape == (1, 1, expected)


def test_the_position_limit_names_the_numbers() -> None:
    runner = Runner(tiny_model("gpt2"), "draft")
    runner.check_room(2048)
    with pytest.raises(ConfigurationError, match=r"need 2049 positions; the draft model has 2048"):
        runner.check_room(2049)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_case_9_a_broken_logit_names_model_position_and_row(broken: float) -> None:
    model = lively_model("llama")

    def corrupt(_: Any, __: Any, logits: Tensor) -> Tensor:
        logits[1, 2, 17] = broken
        return logits

    runner = Runner(model, "draft")
    runner.start([[3, 4], [5, 6, 7]], 16)
    model.get_output_embeddings().register_forward_hook(corrupt)
    told = rf"the draft model LlamaForCausalLM returned {broken} as a logit at position 4 of row 1"
    with pytest.raises(NumericalError, match=told):
        runner.logits(torch.tensor([[4, 10, 11], [7, 10, 9]]), [1, 2])


def test_minus_infinity_for_some_tokens_is_no_error() -> None:
    model = lively_model("llama")

    def mask(_: Any, __: Any, logits: Tensor) -> Tensor:
        logits[..., 50:] = -torch.inf
        return logits

    model.get_output_embeddings().register_forward_hook(mask)
    rows, _ = run(Runner(model), None, [[3, 4, 5]], Settings(draft_length=0), new=8)
    assert max(rows[0].output) < 50


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_15_check_rollback_accepts_each_architecture(architecture: str) -> None:
    check_rollback(lively_model(architecture), "target")
    check_rollback(lively_model(architecture, seed=1).to(torch.bfloat16), "target")


class RunningSum:
    """A llama that adds to its logits what it has read before, in a state that no cache holds: as a recurrent layer does."""

    def __init__(self, model: Any, strength: float) -> None:
        self.model, self.strength = model, strength
        self.state = torch.zeros(VOCAB)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        if not options["use_cache"]:
            self.state = torch.zeros(VOCAB)
        output = self.model(input_ids=input_ids, **options)
        self.state = self.state + self.strength * nn.functional.one_hot(input_ids, VOCAB).float().sum((0, 1))
        output.logits = output.logits + self.state
        return output


def test_case_15_check_rollback_refuses_a_model_with_hidden_state() -> None:
    model = lively_model("llama")
    check_rollback(RunningSum(model, 0.0), "draft")  # it is the state that is refused, not the wrapper
    told = r"the draft model \(llama\) gives other logits after a rollback.*cannot be used"
    with pytest.raises(ConfigurationError, match=told):
        check_rollback(RunningSum(model, 0.1), "draft")


def test_case_15_check_rollback_refuses_positions_taken_from_elsewhere() -> None:
    """Bloom computes its biases from a mask of ones and zeros, which it is not given here."""
    from transformers import AutoModelForCausalLM, BloomConfig

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ConfigurationError, match=r"the target model \(bloom\)"):
        check_rollback(model, "target")


def test_case_15_check_rollback_refuses_what_has_no_cache_of_rows() -> None:
    with pytest.raises(ConfigurationError, match=r"mamba.*cannot be rolled back"):
        check_rollback(tiny_model("mamba"), "target")


def test_check_rollback_works_on_a_vocabulary_of_few_tokens() -> None:
    check_rollback(lively_model("llama", vocab_size=4), "target")


def test_features_are_the_hidden_states_behind_the_logits() -> None:
    model = lively_model("llama")
    runner = Runner(model)
    prompts = [[5, 6, 7, 8], [9, 10]]
    runner.start(prompts, 16)
    assert runner.features is not None
    assert runner.features.shape == (2, 3, 32)
    with torch.inference_mode():
        expected = model.base_model(input_ids=torch.tensor([prompts[0]]), use_cache=False).last_hidden_state
        torch.testing.assert_close(runner.features[0], expected[0, :3], rtol=1e-3, atol=1e-4)
        got = runner.logits(torch.tensor([[8], [10]]), [3, 1])
        assert runner.features.shape == (2, 1, 32)
        torch.testing.assert_close(model.get_output_embeddings()(runner.features), got, rtol=1e-4, atol=1e-4)
