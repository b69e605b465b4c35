"""The loop: lossless means token-identical when greedy and law-identical when sampled, whatever is drafted."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model, tiny_tokenizer
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from lossyspec import decoding
from lossyspec.decoder import Decoder
from lossyspec.decoding import Job, Row, decode
from lossyspec.drafting import Draft, ModelDraft, Proposal, Request
from lossyspec.errors import ConfigurationError, NumericalError
from lossyspec.loading import LoadedModel
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.runner import Runner
from lossyspec.settings import RULES, NgramSettings, Sampling, ScheduleRow, Settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping, final_text

ARCHITECTURES = ("llama", "gpt2", "qwen2", "qwen3", "gemma3", "opt", "phi", "gpt_neox", "mistral")
GREEDY = Sampling(temperature=0.0)


# --- helpers, used by the other runtime tests as well ---


def lively_model(architecture: str = "llama", seed: int = 0, vocab_size: int = VOCAB, spread: float = 3.0) -> Any:
    """A tiny model whose next token depends on all of its context.

    The default initialisation is so small, and the head so often tied, that a tiny model mostly repeats its last token:
    it would not notice a wrong position or a stale cache entry.
    """
    model = tiny_model(architecture, seed, vocab_size, scale=1.0)
    model.config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.copy_(torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5)
        head.weight.mul_(spread)
    return model


def perturbed(model: Any, noise: float = 0.1, seed: int = 7) -> Any:
    """A copy that agrees with `model` on some tokens and not on others."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in other.parameters():
            if weights.ndim >= 2:
                weights.add_(torch.randn(weights.shape, generator=generator) * weights.std() * noise)
    return other


def random_prompts(count: int, seed: int = 3, longest: int = 24, vocab_size: int = VOCAB) -> list[list[int]]:
    """Prompts of unequal lengths, from 1 token up."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def model_draft(model: Any, vocab_size: int = VOCAB) -> ModelDraft:
    return ModelDraft(Runner(model, "draft"), vocab_size)


def run(
    target: Any,
    draft: Any,
    prompts: list[list[int]],
    settings: Settings,
    sampling: Sampling = GREEDY,
    *,
    new: int = 24,
    seed: int = 0,
    eos: Sequence[int] = (),
    stop: Sequence[str] = (),
    **job: Any,
) -> tuple[list[Row], Stats]:
    """Decodes to the end."""
    stopping = Stopping(new, frozenset(eos), tuple(stop))
    stats = Stats()
    generator = torch.Generator().manual_seed(seed)
    *_, rows = decode(target, draft, prompts, Job(settings, sampling, stopping, generator, **job), stats)
    return rows, stats


def outputs(rows: Sequence[Row]) -> list[list[int]]:
    return [row.output for row in rows]


def said_tokens(rows: Sequence[Row]) -> list[int]:
    return [token for row in rows for token in row.output]


def hf_greedy(model: Any, prompt: list[int], new: int, eos: int | None = None, **options: Any) -> list[int]:
    """transformers' own greedy decoding of one prompt."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=eos,
        pad_token_id=0,
        **options,
    )
    return answer[0, len(prompt) :].tolist()


class LawRunner:
    """A model that answers every position with the same law: p is known exactly and a round costs microseconds."""

    device = torch.device("cpu")
    vocab_size = 0
    features = None

    def __init__(self, law: Sequence[float]) -> None:
        self.row = torch.tensor(law, dtype=torch.float64).log().float()

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass

    def check_room(self, longest: int) -> None:
        pass

    def logits(self, tokens: Tensor, starts: list[int], attention: Any = None) -> Tensor:
        return self.row.expand(*tokens.shape, -1).clone()


class ScriptRunner(LawRunner):
    """A model whose most likely token at each position is written down; positions count from the end of the prompt."""

    def __init__(self, script: Sequence[int], prompt_length: int, vocab_size: int = 32) -> None:
        self.script, self.prompt_length, self.size = list(script), prompt_length, vocab_size

    def logits(self, tokens: Tensor, starts: list[int], attention: Any = None) -> Tensor:
        answer = torch.zeros(*tokens.shape, self.size)
        for row, start in enumerate(starts):
            for column in range(tokens.shape[1]):
                place = start + column + 1 - self.prompt_length
                if place < len(self.script):
                    answer[row, column, self.script[place]] = 9.0
        return answer


class FixedDraft:
    """Drafts what `choose(prefix, depth)` says, as a deterministic draft: one-hot q."""

    def __init__(self, choose: Callable[[list[int], int], int]) -> None:
        self.choose = choose

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass

    def observe(self, features: Tensor | None, starts: list[int]) -> None:
        pass

    def read(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, request: Request) -> Proposal:
        width = max(request.limits)
        tokens = [[self.choose(list(prefix), depth) for depth in range(width)] for prefix in request.prefixes]
        return Proposal(torch.tensor(tokens).reshape(len(tokens), width), list(request.limits), None, 0)


def law_draft(law: Sequence[float]) -> ModelDraft:
    return ModelDraft(LawRunner(law), len(law))  # type: ignore[arg-type]


def chi_square_p(counts: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of counts against expected probabilities; cells under 5 expected counts are taken together."""
    seen, law = torch.tensor(counts, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert not bool(((law == 0) & (seen > 0)).any()), "an impossible token was emitted"
    wanted = law / law.sum() * seen.sum()
    small = wanted < 5
    cells = [*zip(seen[~small].tolist(), wanted[~small].tolist(), strict=True)]
    rest_seen, rest_wanted = float(seen[small].sum()), float(wanted[small].sum())
    if rest_wanted >= 5:
        cells.append((rest_seen, rest_wanted))
    else:  # too little to be a cell: it may hold next to nothing
        assert rest_seen <= 5 + 5 * rest_wanted
    if len(cells) == 1:
        return 1.0
    got, want = torch.tensor(cells, dtype=torch.float64).T
    return float(chisquare(got, want * got.sum() / want.sum()).pvalue)


def histogram(tokens: Sequence[int], size: int) -> list[int]:
    return torch.bincount(torch.tensor(tokens), minlength=size).tolist()


@torch.inference_mode()
def block_law(model: Any, prompt: list[int], length: int, vocab_size: int, temperature: float = 1.0) -> Tensor:
    """The model's exact law of the next `length` tokens, without any cache: (V,) * length."""
    blocks = list(itertools.product(range(vocab_size), repeat=length))
    ids = torch.tensor([[*prompt, *block] for block in blocks])
    logs = (model(input_ids=ids, use_cache=False).logits.double() / temperature).log_softmax(-1)
    total = torch.zeros(len(blocks), dtype=torch.float64)
    for depth in range(length):
        total += logs[:, len(prompt) + depth - 1].gather(-1, ids[:, len(prompt) + depth, None])[:, 0]
    return total.exp().reshape((vocab_size,) * length)


def block_counts(rows: Sequence[Row], length: int, vocab_size: int) -> list[int]:
    index = [sum(token * vocab_size ** (length - 1 - d) for d, token in enumerate(row.output[:length])) for row in rows]
    return histogram(index, vocab_size**length)


# --- lossless and greedy: token-identical to transformers ---


@pytest.fixture(scope="module", params=ARCHITECTURES)
def greedy_case(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, 20 prompts of unequal lengths, and transformers' greedy answer to each of them alone."""
    model = lively_model(request.param)
    prompts = random_prompts(20)
    return model, prompts, [hf_greedy(model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 8])
def test_case_21_greedy_is_token_identical_to_transformers_one_by_one(
    greedy_case: tuple[Any, list[list[int]], list[list[int]]], batch: int
) -> None:
    model, prompts, expected = greedy_case
    assert sum(len(set(text)) for text in expected) > 3 * len(expected)  # the texts say something
    target = Runner(model)
    drafts: dict[str, Draft | None] = {"plain": None, "ngram": NgramDraft(), "model": model_draft(perturbed(model))}
    if batch == 8:
        drafts["same"] = model_draft(model)
        drafts["unlike"] = model_draft(lively_model(model.config.model_type.removesuffix("_text"), seed=5))
    for name, draft in drafts.items():
        drafted = accepted = 0
        for first in range(0, len(prompts), batch):
            settings = Settings(draft_length=4 if draft else 0, alpha=0.0)
            rows, stats = run(target, draft, prompts[first : first + batch], settings, new=16)
            assert outputs(rows) == expected[first : first + batch], name
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
        if name == "plain":
            assert drafted == 0
        elif name == "same":
            assert accepted == drafted > 0
        elif name == "unlike":
            assert accepted < drafted / 2
        else:
            assert 0 < accepted < drafted, name  # both an acceptance and a rejection happened


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4), (2, 2), (2, 16), (3, 3), (4, 4)])
def test_case_18_ngram_drafts_change_no_greedy_text(lengths: tuple[int, int]) -> None:
    model = lively_model("llama")
    prompts = [prompt + prompt for prompt in random_prompts(8, seed=11)]
    target = Runner(model)
    off, _ = run(target, None, prompts, Settings(draft_length=0), new=32)
    ngram = NgramSettings(min_match=lengths[0], max_match=lengths[1])
    on, stats = run(target, NgramDraft(), prompts, Settings(draft_length=8, ngram=ngram), new=32)
    assert stats.drafted > 0
    assert outputs(on) == outputs(off)


@pytest.mark.parametrize("rule", RULES)
def test_alpha_0_is_token_identical_when_greedy_under_each_rule(rule: str) -> None:
    model = lively_model("qwen3")
    prompts, target, draft = random_prompts(8, seed=5), Runner(model), model_draft(perturbed(model))
    expected, _ = run(target, None, prompts, Settings(draft_length=0))
    rows, stats = run(target, draft, prompts, Settings(rule=rule, alpha=0.0))
    assert 0 < stats.accepted < stats.drafted
    assert outputs(rows) == outputs(expected)


def test_greedy_relaxation_accepts_near_ties_and_no_other_token() -> None:
    """p = (.5, .3, .2): at alpha .4 the token of .3 = .6 * .5 may stay, at alpha .39 it may not; .2 never."""
    law, prompts = (0.5, 0.3, 0.2), [[0]]
    kept, _ = run(LawRunner(law), FixedDraft(lambda *_: 1), prompts, Settings(alpha=0.401, draft_length=2), new=3)
    assert kept[0].output == [1, 1, 0]
    refused, _ = run(LawRunner(law), FixedDraft(lambda *_: 1), prompts, Settings(alpha=0.39, draft_length=2), new=3)
    assert refused[0].output == [0, 0, 0]
    far, _ = run(LawRunner(law), FixedDraft(lambda *_: 2), prompts, Settings(alpha=0.401, draft_length=2), new=3)
    assert far[0].output == [0, 0, 0]
    exact, _ = run(
        LawRunner(law), FixedDraft(lambda *_: 1), prompts, Settings(rule="exact", alpha=0.9, draft_length=2), new=3
    )
    assert exact[0].output == [0, 0, 0]


def test_case_17_bf16_differs_from_plain_only_at_numeric_ties() -> None:
    model = lively_model("llama", spread=1.0).to(torch.bfloat16)
    target, prompts = Runner(model), random_prompts(16, seed=21)
    plain, _ = run(target, None, prompts, Settings(draft_length=0))
    for draft in (NgramDraft(), model_draft(perturbed(model)), model_draft(model)):
        rows, stats = run(target, draft, prompts, Settings(draft_length=4))
        assert stats.accepted > 0
        equal = 0
        for ours, theirs in zip(rows, plain, strict=True):
            pairs = zip(ours.output, theirs.output, strict=True)
            place = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
            equal += place is None
            if place is not None:
                prefix = theirs.prompt + theirs.output[:place]
                target.start([prefix], len(prefix) + 1)
                logits = target.logits(torch.tensor([prefix[-1:]]), [len(prefix) - 1])[0, 0]
                best, other = float(logits[theirs.output[place]]), float(logits[ours.output[place]])
                assert best - other <= 2 * torch.finfo(torch.bfloat16).eps * abs(best)  # a step of bf16 for each of the two
        assert equal >= len(rows) // 2


def test_case_13_repetition_penalty_is_that_of_plain_decoding() -> None:
    model = lively_model("llama")
    prompts = random_prompts(6, seed=8)
    sampling = Sampling(temperature=0.0, repetition_penalty=1.4)
    expected = [hf_greedy(model, prompt, 40, repetition_penalty=1.4) for prompt in prompts]
    without = [hf_greedy(model, prompt, 40) for prompt in prompts]
    assert expected != without
    target = Runner(model)
    for draft in (NgramDraft(), model_draft(perturbed(model, 0.05))):
        for draft_length in (2, 8, 16):
            rows, stats = run(target, draft, prompts, Settings(draft_length=draft_length), sampling, new=40)
            assert stats.drafted > 0
            assert outputs(rows) == expected, draft_length


# --- acceptance and rollback over a long text ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_14_a_draft_equal_to_the_target_is_always_accepted(temperature: float) -> None:
    model = lively_model("llama")
    rows, stats = run(
        Runner(model), model_draft(model), [[3, 4, 5]], Settings(draft_length=4), Sampling(temperature=temperature), new=500
    )
    assert len(rows[0].output) == 500
    assert stats.drafted == stats.accepted == 400
    assert stats.rounds == 100


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_case_15_all_drafts_rejected_equals_plain_for_1000_tokens(architecture: str) -> None:
    """gemma3 and mistral have a window of 16 tokens here, which the text passes many times."""
    model = lively_model(architecture)
    target, prompt = Runner(model), [5, 6, 7]
    plain, _ = run(target, None, [prompt], Settings(draft_length=0), new=1000)
    text = plain[0].output
    assert text[:24] == hf_greedy(model, prompt, 24)

    def wrong(prefix: list[int], depth: int) -> int:
        return (text[min(len(prefix) - len(prompt) + depth, 999)] + 1 + depth) % VOCAB

    rows, stats = run(target, FixedDraft(wrong), [prompt], Settings(draft_length=3), new=1000)
    assert stats.drafted > 2900
    assert stats.accepted == 0
    assert rows[0].output == text


def test_case_15_a_model_that_cannot_roll_back_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba")

    def forward(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(ConfigurationError, match=r"mamba.*linear_attention.*cannot be rolled back"):
        Runner(model)
    with pytest.raises(ConfigurationError, match="cannot be rolled back"):
        Decoder(LoadedModel(model, tiny_tokenizer(), {}, "fp32"))
    llama = LoadedModel(tiny_model("llama"), tiny_tokenizer(), {}, "fp32")
    with pytest.raises(ConfigurationError, match="cannot be rolled back"):
        Decoder(llama, LoadedModel(model, tiny_tokenizer(), {}, "fp32"))


# --- processors, vocabularies, broken numbers ---


def ban(token: int) -> Callable[[Tensor, Tensor], Tensor]:
    def processor(_: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, token] = -torch.inf
        return scores

    return processor


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_4_a_processor_reaches_target_and_draft(temperature: float) -> None:
    from transformers import SuppressTokensLogitsProcessor

    model = lively_model("llama")
    target, prompts, sampling = Runner(model), random_prompts(8, seed=2), Sampling(temperature=temperature)
    free, _ = run(target, None, prompts, Settings(draft_length=0), sampling)
    said = histogram(said_tokens(free), VOCAB)
    banned = max(range(VOCAB), key=said.__getitem__)
    suppress = SuppressTokensLogitsProcessor([banned], device="cpu")
    for processor in (ban(banned), suppress):
        plain, _ = run(target, None, prompts, Settings(draft_length=0), sampling, processors=[processor])
        for draft in (model_draft(model), model_draft(perturbed(model)), NgramDraft()):
            rows, stats = run(target, draft, prompts, Settings(draft_length=4), sampling, processors=[processor])
            assert banned not in said_tokens(rows)
            assert stats.accepted > 0
            if draft is not None and getattr(getattr(draft, "runner", None), "model", None) is model:
                assert stats.accepted == stats.drafted  # the draft was told as well
            if temperature == 0.0:
                assert outputs(rows) == outputs(plain)


def test_a_processor_sees_the_accepted_prefix_of_each_position() -> None:
    """A processor that forbids the last token of its input: no token is ever said twice in a row."""

    def no_echo(ids: Tensor, scores: Tensor) -> Tensor:
        return ban(int(ids[0, -1]))(ids, scores)

    model = lively_model("gpt2")
    target, prompts = Runner(model), random_prompts(6, seed=4)
    plain, _ = run(target, None, prompts, Settings(draft_length=0), processors=[no_echo])
    for draft in (NgramDraft(), model_draft(perturbed(model)), model_draft(model)):
        rows, stats = run(target, draft, prompts, Settings(draft_length=5), processors=[no_echo])
        assert stats.drafted > 0
        assert outputs(rows) == outputs(plain)
        assert all(one != two for row in rows for one, two in itertools.pairwise(row.tokens[len(row.prompt) - 1 :]))


@pytest.mark.parametrize("sizes", [(120, 110), (110, 120), (120, 101), (101, 120)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_16_padded_vocabularies_of_unequal_size(sizes: tuple[int, int], temperature: float) -> None:
    """Padded rows of the embeddings answer with huge logits here: an id past the tokenizer is emitted nonetheless never."""
    base = lively_model("llama")

    def padded(model: Any, size: int) -> Any:
        wide = lively_model("llama", vocab_size=size)
        state = model.state_dict()
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = torch.randn(size - VOCAB, 32, generator=torch.Generator().manual_seed(1)) * 1000
            state[key] = torch.cat([state[key], rows])
        wide.load_state_dict(state)
        return wide

    tokenizer = tiny_tokenizer()
    target, other = padded(base, sizes[0]), padded(perturbed(base), sizes[1])
    if sizes[0] > VOCAB:
        said = target(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1]
        assert int(said.argmax()) >= VOCAB  # the trap is set
    loaded = [LoadedModel(model, tokenizer, {}, "fp32") for model in (target, other)]
    prompts = random_prompts(8, seed=6)
    options: dict[str, Any] = {"max_new_tokens": 24, "seed": 1, "temperature": temperature}
    for draft in (loaded[1], None):
        decoder = Decoder(loaded[0], draft, Settings(draft_length=4))
        decoder.eos_ids = frozenset()
        result = decoder.generate_ids(prompts, **options)
        assert result.stats.drafted > 0
        assert all(token < VOCAB for answer in result for token in answer.tokens)
        if temperature == 0.0:
            assert [answer.tokens for answer in result] == [hf_greedy(base, prompt, 24) for prompt in prompts]


def test_case_9_nan_logits_name_the_target_and_the_position() -> None:
    model = lively_model("llama")
    model.get_input_embeddings().weight.data[9] = torch.nan
    prompts = [[3, 4, 5, 6], [3, 4, 9]]
    for draft in (None, NgramDraft()):
        with pytest.raises(NumericalError, match=r"the target model .*nan as a logit at position 2 of row 1"):
            run(Runner(model), draft, prompts, Settings(draft_length=2 if draft else 0))


def test_case_9_nan_logits_name_the_draft_and_the_position() -> None:
    model = lively_model("llama")
    broken = copy.deepcopy(model)
    broken.get_input_embeddings().weight.data[9] = torch.nan
    with pytest.raises(NumericalError, match=r"the draft model .*nan as a logit at position 2 of row 1"):
        run(Runner(model), model_draft(broken), [[3, 4, 5, 6], [3, 4, 9]], Settings(draft_length=2))


def test_case_9_an_infinite_logit_is_refused_as_well() -> None:
    model = lively_model("llama")
    model.get_output_embeddings().weight.data[7] = torch.inf
    with pytest.raises(NumericalError, match="the target model"):
        run(Runner(model), None, [[3, 4, 5]], Settings(draft_length=0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_9_a_processor_that_leaves_no_token_is_an_error_and_not_an_empty_or_unknown_token(temperature: float) -> None:
    def nothing(_: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(NumericalError, match="left NaN or no token at all at position 1 of row 0"):
        run(
            Runner(lively_model("llama")),
            None,
            [[3, 4]],
            Settings(draft_length=0),
            Sampling(temperature=temperature),
            processors=[nothing],
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_9_a_processor_that_leaves_the_draft_no_token_is_an_error_too(temperature: float) -> None:
    """Row 1 has no token after its second one; row 0 is fine, so the draft goes on there."""

    def dead_end(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if ids[0, 0] == 4 and ids.shape[1] == 3 else scores

    model = lively_model("llama")
    with pytest.raises(NumericalError, match="left NaN or no token at all at position 2 of row 1"):
        run(
            Runner(model),
            model_draft(model),
            [[3, 4], [4, 5]],
            Settings(draft_length=2),
            Sampling(temperature=temperature),
            processors=[dead_end],
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_without_an_answer_behind_a_rejected_token_is_no_error(temperature: float) -> None:
    """A grammar has nothing to allow after a token that it forbids; a draft that ignores it may propose such a token."""

    def grammar(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if 2 in ids[0].tolist() else ban(2)(ids, scores)

    rows, stats = run(
        LawRunner((0.5, 0.3, 0.2)),
        FixedDraft(lambda _, depth: 2 if depth == 1 else 0),
        [[0]] * 20,
        Settings(draft_length=3),
        Sampling(temperature=temperature),
        processors=[grammar],
    )
    assert 0 < stats.accepted < stats.drafted
    assert all(2 not in row.output for row in rows)


def test_case_9_a_penalty_that_overflows_is_an_error() -> None:
    sampling = Sampling(repetition_penalty=1e-39)
    for draft in (None, model_draft(lively_model("llama", seed=1))):
        with pytest.raises(NumericalError, match="the penalty left NaN or no token at all at position 3 of row 0"):
            run(Runner(lively_model("llama")), draft, [[3, 4, 5, 6]], Settings(draft_length=2 if draft else 0), sampling)


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-46])
def test_case_9_a_temperature_next_to_0_is_greedy(temperature: float) -> None:
    model = lively_model("llama")
    for draft in (None, model_draft(perturbed(model))):
        settings = Settings(draft_length=3 if draft else 0)
        rows, _ = run(Runner(model), draft, [[3, 4, 5]], settings, Sampling(temperature=temperature), new=12)
        assert rows[0].output == hf_greedy(model, [3, 4, 5], 12)


# --- where a text ends ---


@pytest.mark.parametrize("position", range(10))
def test_case_5_eos_at_each_position_of_a_block_ends_the_text_there(position: int) -> None:
    model = lively_model("gemma3", seed=1)
    prompt = [7, 8, 9, 10]
    text = hf_greedy(model, prompt, 10)
    eos = text[position]
    expected = text[: text.index(eos) + 1]
    assert expected == hf_greedy(model, prompt, 10, eos=eos)
    target = Runner(model)
    plain, _ = run(target, None, [prompt], Settings(draft_length=0), eos=[eos])
    rows, stats = run(target, model_draft(model), [prompt], Settings(draft_length=4), eos=[eos])
    assert outputs(plain) == outputs(rows) == [expected]
    assert rows[0].finish_reason == plain[0].finish_reason == "stop"
    assert stats.tokens == len(expected)


def test_case_5_a_row_that_ended_leaves_the_batch_and_the_others_go_on() -> None:
    model = lively_model("mistral")
    prompts = random_prompts(8, seed=13)
    texts = [hf_greedy(model, prompt, 30) for prompt in prompts]
    eos = texts[0][5]
    expected = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    assert len({len(text) for text in expected}) > 1
    for draft in (None, NgramDraft(), model_draft(perturbed(model))):
        rows, stats = run(Runner(model), draft, prompts, Settings(draft_length=4 if draft else 0), new=30, eos=[eos])
        assert outputs(rows) == expected
        assert [row.index for row in rows] == list(range(8))
        assert [row.finish_reason for row in rows] == ["stop" if text[-1] == eos else "length" for text in expected]
        assert stats.tokens == sum(map(len, expected))


@pytest.mark.parametrize("place", range(1, 7))
@pytest.mark.parametrize("split", [False, True])
def test_case_6_a_stop_string_inside_an_accepted_block_ends_the_text(place: int, split: bool) -> None:
    model, tokenizer, prompt = lively_model("qwen2", seed=3), tiny_tokenizer(), [7, 8]
    text = hf_greedy(model, prompt, 10)
    words = tokenizer.decode(text).split(" ")
    assert len(words) == 10
    assert len(set(words[:8])) == 8
    # the whole word at `place`, or the end of the word before it and its beginning
    stop = f"{words[place - 1][-1]} {words[place][:2]}" if split else words[place]
    whole = tokenizer.decode(text)
    begin = whole.index(stop)
    count = next(n for n in range(1, 11) if stop in tokenizer.decode(text[:n]))
    for draft, draft_length in ((None, 0), (model_draft(model), 5), (model_draft(model), 16), (NgramDraft(), 5)):
        settings = Settings(draft_length=draft_length)
        rows, stats = run(Runner(model), draft, [prompt], settings, new=10, stop=[stop], tokenizer=tokenizer)
        assert rows[0].output == text[:count]  # the tokens end with the one that completes the string
        assert rows[0].finish_reason == "stop"
        assert stats.tokens == count
        assert final_text(rows[0].output, Stopping(10, stop_strings=(stop,)), tokenizer) == whole[:begin]


def test_case_7_max_new_tokens_does_not_hide_an_earlier_stop() -> None:
    script, stop = [10, 11, 2, 20, 21, 22], 2
    target = ScriptRunner(script, prompt_length=1)
    draft = FixedDraft(lambda prefix, depth: script[min(len(prefix) - 1 + depth, 5)])
    for draft_length in (0, 2, 4, 8):
        rows, stats = run(target, draft, [[5]], Settings(draft_length=draft_length), new=5, eos=[stop])
        assert rows[0].output == [10, 11, stop]
        assert rows[0].finish_reason == "stop"
        assert stats.tokens == 3
        free, _ = run(target, draft, [[5]], Settings(draft_length=draft_length), new=5)
        assert free[0].output == [10, 11, 2, 20, 21]
        assert free[0].finish_reason == "length"


@pytest.mark.parametrize("new", [1, 2, 3, 5, 7])
def test_max_new_tokens_is_exact(new: int) -> None:
    model = lively_model("llama")
    expected = hf_greedy(model, [3, 4, 5], new)
    rows, stats = run(Runner(model), model_draft(model), [[3, 4, 5]], Settings(draft_length=16), new=new)
    assert rows[0].output == expected
    assert rows[0].finish_reason == "length"
    assert stats.drafted == new - 1  # and nothing is drafted that could not be used


# --- lossless and sampled: the same law ---


@pytest.fixture(scope="module")
def small_pair() -> tuple[Any, Any, Tensor]:
    """A target and a draft over 5 tokens that are far from each other, and the target's exact law of 3 tokens."""
    target, draft = lively_model("llama", vocab_size=5, spread=1.5), lively_model("llama", seed=4, vocab_size=5, spread=1.5)
    p, q = (block_law(model, [3, 4, 2], 1, 5) for model in (target, draft))
    assert 0.2 < float((p - q).abs().sum() / 2) < 0.9
    return target, draft, block_law(target, [3, 4, 2], 3, 5)


SAMPLES = 12_000


@pytest.mark.parametrize("rule", RULES)
def test_case_1_alpha_0_keeps_the_target_law_under_each_rule(small_pair: tuple[Any, Any, Tensor], rule: str) -> None:
    target, draft, law = small_pair
    rows, stats = run(
        Runner(target),
        model_draft(draft, 5),
        [[3, 4, 2]] * SAMPLES,
        Settings(rule=rule, alpha=0.0, draft_length=2),
        Sampling(),
        new=3,
        seed=RULES.index(rule),
    )
    assert 0.1 < stats.acceptance < 0.9
    assert chi_square_p(block_counts(rows, 3, 5), law.flatten().tolist()) > 1e-3


def test_case_1_a_wrong_law_would_be_seen(small_pair: tuple[Any, Any, Tensor]) -> None:
    """The same test fails for a lossy setting: it has the power to see a difference."""
    target, draft, law = small_pair
    rows, _ = run(
        Runner(target), model_draft(draft, 5), [[3, 4, 2]] * 6000, Settings(alpha=0.2, draft_length=2), Sampling(), new=3
    )
    assert chi_square_p(block_counts(rows, 3, 5), law.flatten().tolist()) < 1e-6


@pytest.mark.parametrize("tau", [0.3, 1.7])
@pytest.mark.parametrize("theta", [0.0, 0.5])
def test_tau_and_theta_keep_the_target_law(small_pair: tuple[Any, Any, Tensor], tau: float, theta: float) -> None:
    target, draft, _ = small_pair
    settings = Settings(alpha=0.0, tau=tau, theta=theta, draft_length=2)
    rows, stats = run(Runner(target), model_draft(draft, 5), [[3, 4, 2]] * 6000, settings, Sampling(temperature=0.7), new=3)
    assert stats.drafted > 0
    law = block_law(target, [3, 4, 2], 3, 5, temperature=0.7)
    assert chi_square_p(block_counts(rows, 3, 5), law.flatten().tolist()) > 1e-3


def test_case_2_an_ngram_draft_keeps_the_law(small_pair: tuple[Any, Any, Tensor]) -> None:
    target = small_pair[0]
    prompt = [3, 4, 2, 3, 4, 2]
    rows, stats = run(Runner(target), NgramDraft(), [prompt] * SAMPLES, Settings(draft_length=2), Sampling(), new=3)
    assert 0 < stats.accepted < stats.drafted
    law = block_law(target, prompt, 3, 5)
    assert chi_square_p(block_counts(rows, 3, 5), law.flatten().tolist()) > 1e-3


def test_case_2_a_deterministic_draft_keeps_the_law() -> None:
    """The bug gives (.83, 0, .17)."""
    p = (0.5, 0.3, 0.2)
    rows, _ = run(LawRunner(p), FixedDraft(lambda *_: 0), [[0]] * SAMPLES, Settings(draft_length=1), Sampling(), new=2)
    assert chi_square_p(histogram([row.output[0] for row in rows], 3), p) > 1e-3
    assert chi_square_p(histogram([row.output[1] for row in rows], 3), p) > 1e-3


def test_case_3_the_law_holds_when_both_are_filtered_by_top_k() -> None:
    """Both get the same filter: p = (.5, .3, .15, .05) at top-2 is (.625, .375); the draft's own top-2 is another pair."""
    p, q = (0.5, 0.3, 0.15, 0.05), (0.1, 0.4, 0.3, 0.2)
    sampling = Sampling(top_k=2)
    rows, stats = run(LawRunner(p), law_draft(q), [[0]] * SAMPLES, Settings(draft_length=2), sampling, new=3)
    assert 0 < stats.accepted < stats.drafted
    for depth in range(3):
        counts = histogram([row.output[depth] for row in rows], 4)
        assert counts[2:] == [0, 0]
        assert chi_square_p(counts[:2], (0.625, 0.375)) > 1e-3


@pytest.mark.parametrize("rule", ["mixture", "optimal", "priced", "lenience", "typical", "fuzzy"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_lossy_rule_emits_its_closed_form_law(rule: str, one_hot: bool) -> None:
    from lossyspec.acceptance import accept_one_hot, emitted_law, entropy

    p, q, alpha = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.4, 0.3]), torch.tensor(0.4)
    if one_hot:
        a = accept_one_hot(rule, p[2], entropy(p), alpha)
        rest = p if rule == "typical" else p.scatter(-1, torch.tensor(2), 0.0)
        law = (1 - a) * rest / rest.sum() + a * torch.nn.functional.one_hot(torch.tensor(2), 4)
    else:
        law = emitted_law(rule, p, q, alpha)
    draft: Any = FixedDraft(lambda *_: 2) if one_hot else law_draft(q.tolist())
    rows, _ = run(
        LawRunner(p.tolist()), draft, [[0]] * SAMPLES, Settings(rule=rule, alpha=0.4, draft_length=1), Sampling(), new=2
    )
    assert chi_square_p(histogram([row.output[0] for row in rows], 4), law.tolist()) > 1e-3
    kept = (torch.tensor(outputs(rows))[:, 1]).tolist()
    assert chi_square_p(histogram(kept, 4), p.tolist()) > 1e-3  # the last token of a text is never drafted


def test_case_11_draft_and_verify_share_no_noise_with_one_seed_a_request() -> None:
    """Each request has its own seed, as a server gives it; over 4,000 of them the law is p."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    target, draft = LawRunner(p), law_draft(q)
    texts = [run(target, draft, [[0]], Settings(draft_length=1), Sampling(), new=2, seed=seed)[0] for seed in range(4000)]
    joint = histogram([3 * rows[0].output[0] + rows[0].output[1] for rows in texts], 9)
    assert chi_square_p(joint, [one * two for one in p for two in p]) > 1e-3


def test_case_12_consecutive_uniforms_differ_and_acceptance_is_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)  # accepted with probability 0.7
    uniforms: list[float] = []
    accepted: list[int] = []
    judge = decoding.judge

    def spy(*arguments: Any, **options: Any) -> tuple[list[int], list[int]]:
        uniforms.extend(arguments[4].flatten().tolist())
        verdict = judge(*arguments, **options)
        accepted.extend(verdict[0])
        return verdict

    monkeypatch.setattr(decoding, "judge", spy)
    rows, _ = run(LawRunner(p), law_draft(q), [[0]], Settings(draft_length=1), Sampling(), new=3000)
    pairs = torch.tensor(accepted[:-1]).reshape(-1)
    assert len(set(uniforms)) > len(uniforms) - 5  # 24 random bits: a few may meet by chance
    assert chi_square_p([len(pairs) - int(pairs.sum()), int(pairs.sum())], [0.3, 0.7]) > 1e-3
    table = torch.zeros(2, 2)
    for one, two in itertools.pairwise(pairs.tolist()):
        table[one, two] += 1
    assert chi2_contingency(table.numpy(), correction=False).pvalue > 1e-3
    assert chi_square_p(histogram(rows[0].output, 3), p) > 1e-3


def test_case_22_a_row_cut_at_an_accepted_position_does_not_draw_anew() -> None:
    """p = (.5, .3, .2), q = (.7, .2, .1) in batches: the law is p at each place, not (.40, .34, .26)."""
    p, q = (0.5, 0.3, 0.2), (0.7, 0.2, 0.1)
    target, draft = LawRunner(p), law_draft(q)
    rows: list[Row] = []
    for seed in range(1000):
        rows += run(target, draft, [[0], [0, 1], [0, 1, 2], [2]], Settings(draft_length=3), Sampling(), new=5, seed=seed)[0]
    for place in range(5):
        assert chi_square_p(histogram([row.output[place] for row in rows], 3), p) > 1e-3
    joint = histogram([3 * row.output[0] + row.output[1] for row in rows], 9)
    assert chi_square_p(joint, [one * two for one in p for two in p]) > 1e-3
    lone = [row.output[0] for row in rows[3::4]]
    assert chi_square_p(histogram(lone, 3), p) > 1e-3


# --- seeds, statistics, explicit zeros ---


def test_case_23_one_seed_reproduces_the_text_and_greedy_is_argmax() -> None:
    model = lively_model("phi")
    target, draft, prompts = Runner(model), model_draft(perturbed(model)), random_prompts(4)
    for settings in (Settings(draft_length=0), Settings(draft_length=4), Settings(draft_length=4, alpha=0.5)):
        first, _ = run(target, draft, prompts, settings, Sampling(), seed=9)
        torch.manual_seed(123)  # the global generator has no part in it
        again, _ = run(target, draft, prompts, settings, Sampling(), seed=9)
        other, _ = run(target, draft, prompts, settings, Sampling(), seed=10)
        assert outputs(first) == outputs(again) != outputs(other)
    state = torch.get_rng_state()
    run(target, draft, prompts, Settings(draft_length=4), Sampling())
    assert torch.equal(state, torch.get_rng_state())
    greedy = [outputs(run(target, draft, prompts, Settings(draft_length=4), seed=seed)[0]) for seed in range(3)]
    assert greedy == [[hf_greedy(model, prompt, 24) for prompt in prompts]] * 3


def test_case_20_statistics_show_the_drafted_count_and_the_tokens_per_round() -> None:
    """A draft that is cut short has 100 % acceptance and is worth nothing: the counts say so."""
    script = [10 + step % 7 for step in range(40)]
    target = ScriptRunner(script, prompt_length=1)
    settings = Settings(draft_length=4)

    def short(prefix: list[int], depth: int) -> int:
        return script[min(len(prefix) - 1 + depth, 39)]

    class Shy(FixedDraft):
        def propose(self, request: Request) -> Proposal:
            proposal = super().propose(request)
            return Proposal(
                proposal.tokens, [int(len(request.prefixes[0]) % 5 == 1 and limit > 0) for limit in request.limits], None, 0
            )

    rows, full = run(target, FixedDraft(short), [[5]], settings, new=40)
    assert rows[0].output == script
    assert (full.rounds, full.drafted, full.accepted, full.acceptance) == (8, 32, 32, 1.0)
    assert full.tokens_per_round == 5.0
    assert full.drafted_at == full.accepted_at == [8, 8, 8, 8]
    rows, shy = run(target, Shy(short), [[5]], settings, new=40)
    assert rows[0].output == script
    assert shy.acceptance == 1.0
    assert shy.drafted < 12
    assert shy.tokens_per_round == 40 / shy.rounds < 1.3


def test_statistics_add_up() -> None:
    model = lively_model("llama")
    prompts = random_prompts(8)
    for draft in (None, NgramDraft(), model_draft(perturbed(model))):
        rows, stats = run(Runner(model), draft, prompts, Settings(draft_length=3 if draft else 0))
        assert stats.rows == 8
        assert stats.tokens == sum(len(row.output) for row in rows) == sum(stats.round_tokens)
        assert len(stats.round_times_s) == len(stats.round_tokens) == stats.passes
        assert stats.passes <= stats.rounds <= 8 * stats.passes
        assert all(kept <= drafted for kept, drafted in zip(stats.accepted_at, stats.drafted_at, strict=True))
        assert stats.tokens == stats.rounds + stats.accepted  # no text ended inside a block here
        assert stats.drafted_at == sorted(stats.drafted_at, reverse=True)
        if draft is None:
            assert stats.acceptance is None
            assert stats.drafted == stats.draft_steps == 0
            assert stats.tokens_per_round == 1.0


def test_case_25_an_explicit_zero_is_kept() -> None:
    model, tokenizer = lively_model("llama"), tiny_tokenizer()
    target = LoadedModel(model, tokenizer, {}, "fp32")
    other = LoadedModel(perturbed(model, 0.5), tokenizer, {}, "fp32")
    decoder = Decoder(target, other, Settings(alpha=0.95, theta=0.9, draft_length=4), Sampling(temperature=0.8))
    decoder.eos_ids = frozenset()
    prompts = random_prompts(6)
    expected = [hf_greedy(model, prompt, 24) for prompt in prompts]
    lossy = decoder.generate_ids(prompts, 24, seed=0, temperature=0.0, settings=Settings(alpha=0.95, theta=0.0))
    assert [answer.tokens for answer in lossy] != expected
    exact = decoder.generate_ids(prompts, 24, seed=0, temperature=0.0, settings=Settings(alpha=0.0, theta=0.0))
    assert [answer.tokens for answer in exact] == expected
    rounds = exact.stats.rounds
    assert exact.stats.drafted_at[0] >= rounds - len(prompts)  # theta 0 never stops a draft
    pruned = decoder.generate_ids(prompts, 24, seed=0, temperature=0.0, settings=Settings(alpha=0.0, theta=0.9))
    assert pruned.stats.drafted < exact.stats.drafted / 2
    assert Settings(alpha=0.0, theta=0.0, draft_length=0).model_dump()["draft_length"] == 0
    none = decoder.generate_ids(prompts, 24, seed=0, temperature=0.0, settings=Settings(draft_length=0))
    assert none.stats.drafted == 0


# --- batches ---


def test_the_schedule_drafts_by_the_number_of_live_rows() -> None:
    """Plain while 3 rows or more are live, drafts for 1 and 2, and the texts stay those of plain decoding."""
    model = lively_model("llama")
    prompts = random_prompts(4, seed=31)
    texts = [hf_greedy(model, prompt, 40) for prompt in prompts]
    eos = texts[0][6]
    expected = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    lengths = sorted(map(len, expected))
    assert lengths[1] < 40
    schedule = (ScheduleRow(batch=(1, 2), draft_length=4), ScheduleRow(batch=(4, None), draft_length=2))
    for draft in (model_draft(model), model_draft(perturbed(model))):
        rows, stats = run(Runner(model), draft, prompts, Settings(schedule=schedule), new=40, eos=[eos])
        assert outputs(rows) == expected
        assert stats.drafted > 0
    rows, stats = run(Runner(model), model_draft(model), prompts[:3], Settings(schedule=schedule[1:]), new=12)
    assert outputs(rows) == [text[:12] for text in texts[:3]]
    assert stats.drafted == 0


def test_rows_grow_round_by_round_and_keep_their_order() -> None:
    model = lively_model("gpt_neox")
    prompts = random_prompts(5)
    job = Job(Settings(draft_length=3), GREEDY, Stopping(12), torch.Generator().manual_seed(0))
    before = [0] * 5
    for rows in decode(Runner(model), NgramDraft(), prompts, job, Stats()):
        assert [row.prompt for row in rows] == prompts
        now = [len(row.output) for row in rows]
        assert all(was <= length for was, length in zip(before, now, strict=True))
        assert any(was < length for was, length in zip(before, now, strict=True))
        before = now
    assert before == [12] * 5


def test_a_text_that_does_not_fit_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    monkeypatch.setattr(model, "forward", None)
    monkeypatch.setattr(model.base_model, "forward", None)
    with pytest.raises(ConfigurationError, match=r"need 2049 positions; the target model has 2048"):
        run(Runner(model), None, [[3, 4], [3]], Settings(draft_length=0), new=2047)


def test_a_text_may_fill_every_position_of_the_model() -> None:
    """Drafted columns of the shorter rows, and the padding of the last rounds, never leave the learned positions."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.mul_(8.0)
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
    expected = [hf_greedy(model, prompt, 24) for prompt in prompts]
    for draft in (None, NgramDraft(), model_draft(model), model_draft(perturbed(model))):
        rows, _ = run(Runner(model), draft, prompts, Settings(draft_length=8 if draft else 0))
        assert outputs(rows) == expected
