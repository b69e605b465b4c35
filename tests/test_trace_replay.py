"""The trace against the models' own logits, and replay against live decoding and against the exact recursion."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from torch import Tensor

from lossyspec.acceptance import entropy
from lossyspec.decoding import Job, decode
from lossyspec.drafting import ModelDraft
from lossyspec.errors import ConfigurationError
from lossyspec.feature_head import FeatureHead, HeadShape
from lossyspec.head_drafting import FeatureDraft
from lossyspec.likelihood import dense_weights, forward
from lossyspec.ngram_drafting import NgramDraft, ngram_chain
from lossyspec.runner import Runner
from lossyspec.settings import NgramSettings, Precisions, Sampling, Settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping
from lossyspec.tuner.laws import BinnedLaw, GreedyLaw, OneHotLaw, bin_masses
from lossyspec.tuner.replay import Replay, Replayed, certificate, nearest_tau
from lossyspec.tuner.trace import (
    TAUS,
    Texts,
    Trace,
    Tracer,
    forced_chain,
    ngram_chains,
    reference_texts,
    text_logits,
)
from lossyspec.tuner.trace_files import load_trace, save_trace

VOCAB = 24
EOS = 1
LIMIT = 24
NGRAM = NgramSettings()


def noisy(model: Any, share: float, seed: int = 5) -> Any:
    """A copy with noise of `share` of each weight's spread: a draft that agrees with the model often."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(share * weight.std() * torch.randn(weight.shape, generator=generator))
    return other


def some_prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(4, 12)).tolist() for _ in range(count)]


@dataclass(frozen=True)
class Pair:
    """A target with peaked choices and a draft like it, with texts drawn from the target: all cut at the limit, or
    ended by the model where it says so."""

    target: Runner
    draft: Runner
    cut: Texts
    ended: Texts
    greedy: Texts
    greedy_cut: Texts

    def live(
        self, settings: Settings, texts: Texts, temperature: float = 1.0, seed: int = 1, repeat: int = 1, eos: bool = False
    ) -> Stats:
        """Decodes the prompts of `texts` with the real loop, each `repeat` times."""
        draft = NgramDraft() if settings.ngram else ModelDraft(self.draft, VOCAB)
        return generate(self.target, draft, settings, texts.prompts * repeat, temperature, seed, eos)[0]


def generate(
    target: Runner, draft: Any, settings: Settings, prompts: list[list[int]], temperature: float, seed: int, eos: bool
) -> tuple[Stats, Texts]:
    stats = Stats()
    stopping = Stopping(LIMIT, frozenset([EOS] if eos else ()))
    job = Job(settings, Sampling(temperature=temperature), stopping, torch.Generator().manual_seed(seed))
    *_, rows = decode(target, draft, prompts, job, stats)
    return stats, Texts(prompts, [row.output for row in rows], [row.finish_reason == "length" for row in rows])


@pytest.fixture(scope="module")
def pair() -> Pair:
    model = tiny_model("llama", seed=0, vocab_size=VOCAB, scale=20.0)
    target, draft = Runner(model), Runner(noisy(model, 0.3), "draft")
    prompts, plain = some_prompts(64, seed=1), Settings(draft_length=0)
    cut, ended, *greedy = (
        generate(target, None, plain, prompts, temperature, seed, eos)[1]
        for temperature, seed, eos in ((1.0, 3, False), (1.0, 4, True), (0.0, 5, True), (0.0, 6, False))
    )
    return Pair(target, draft, cut, ended, *greedy)


def trace_of(pair: Pair, texts: Texts, model: bool, temperature: float = 1.0, length: int = 6) -> Trace:
    tracer = Tracer(Sampling(temperature=temperature), length, NGRAM)
    trace = tracer.begin(texts, "fp32")
    tracer.add(trace, "fp32", pair.target, pair.draft if model else None)
    return trace


@pytest.fixture(scope="module")
def replays(pair: Pair) -> dict[tuple[bool, str], Replay]:
    """By (whether the draft is a model, which texts)."""
    kinds = [(model, name) for model in (False, True) for name in ("cut", "ended")]
    return {(model, name): Replay(trace_of(pair, getattr(pair, name), model)) for model, name in kinds}


def settings_of(model: bool, **values: Any) -> Settings:
    return Settings(ngram=None if model else NGRAM, **values)


def direct_logits(runner: Runner, prompt: list[int], output: list[int]) -> Tensor:
    """Logits of the output's positions by one pass of the bare model, without any cache."""
    with torch.no_grad():
        logits = runner.model(torch.tensor([prompt + output]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].double()


# the trace


def test_text_logits_are_the_models_own_also_over_several_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossyspec.tuner.trace._CHUNK", 7)
    prompt, output = pair.cut.prompts[0], pair.cut.outputs[0]
    pieces = text_logits(pair.target, prompt, output)
    assert [len(piece) for piece in pieces] == [7, 7, 7, 3]
    torch.testing.assert_close(torch.cat(pieces).double(), direct_logits(pair.target, prompt, output), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("model", [False, True])
def test_a_trace_does_not_depend_on_the_size_of_the_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch, model: bool) -> None:
    few = Texts(pair.ended.prompts[:6], pair.ended.outputs[:6], pair.ended.limited[:6])
    whole = trace_of(pair, few, model)
    monkeypatch.setattr("lossyspec.tuner.trace._CHUNK", 5)
    pieces = trace_of(pair, few, model)
    np.testing.assert_allclose(pieces.plain["fp32"], whole.plain["fp32"], atol=1e-4)
    pairs = [(pieces.lookup["fp32"], whole.lookup["fp32"], "p_draft")]
    pairs += [(pieces.laws[key][0], law, "q_text") for key, (law,) in whole.laws.items()]
    assert len(pairs) == (1 + len(TAUS) if model else 1)
    for one, other, own in pairs:
        for name in ("p_text", "confidence", own):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-7)


def test_text_logits_refuse_a_text_that_does_not_fit_the_models_positions(pair: Pair) -> None:
    with pytest.raises(ConfigurationError, match="2048"):
        text_logits(pair.target, [3] * 2048, [4])


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_trace_of_an_ngram_draft_holds_what_the_models_logits_say(pair: Pair, temperature: float) -> None:
    trace = trace_of(pair, pair.cut, model=False, temperature=temperature)
    law = trace.lookup["fp32"]
    assert isinstance(law, OneHotLaw)
    assert not trace.laws
    place = 0
    for prompt, output in zip(pair.cut.prompts[:8], pair.cut.outputs[:8], strict=True):
        p = (direct_logits(pair.target, prompt, output) / temperature).softmax(-1)
        for index, token in enumerate(output):
            chain = ngram_chain(prompt + output[:index], NGRAM, 1)
            drafted, confidence = chain[0] if chain else (None, -1.0)
            chance = 0.0 if drafted is None else float(p[index, drafted])
            assert float(law.p_text[place]) == pytest.approx(float(p[index, token]), rel=1e-3, abs=1e-9)
            assert float(trace.plain["fp32"][place]) == pytest.approx(math.log(float(p[index, token])), abs=1e-3)
            assert float(law.p_draft[place]) == pytest.approx(chance, rel=1e-3, abs=1e-9)
            assert float(law.entropy[place]) == pytest.approx(float(entropy(p[index])), abs=1e-3)
            assert bool(law.hit[place]) is (drafted == token)
            assert float(law.confidence[place]) == confidence
            place += 1


def test_the_trace_of_a_draft_model_holds_what_both_models_logits_say(pair: Pair) -> None:
    trace = trace_of(pair, pair.ended, model=True, temperature=0.8)
    assert set(trace.laws) == {("fp32", tau) for tau in TAUS}
    assert isinstance(trace.lookup["fp32"], OneHotLaw)
    for tau in TAUS:
        (law,) = trace.laws["fp32", tau]
        assert isinstance(law, BinnedLaw)
        place = 0
        for prompt, output in zip(pair.ended.prompts[:8], pair.ended.outputs[:8], strict=True):
            here, text = slice(place, place + len(output)), torch.tensor(output)[:, None]
            p = (direct_logits(pair.target, prompt, output) / 0.8).softmax(-1)
            q = (direct_logits(pair.draft, prompt, output) / (0.8 * tau)).softmax(-1)
            torch.testing.assert_close(law.p_text[here], p.gather(-1, text)[:, 0], rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(law.q_text[here], q.gather(-1, text)[:, 0], rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(law.confidence[here], q.amax(-1), rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(law._tv[here], 0.5 * (p - q).abs().sum(-1), rtol=0, atol=1e-3)
            assert float(law.p_mass[here].sum()) == pytest.approx(len(output), abs=1e-4)
            place += len(output)


def test_sampling_filters_are_left_out_of_the_trace_since_they_put_zeros_under_texts(pair: Pair) -> None:
    tracer = Tracer(Sampling(temperature=0.7, top_k=1, top_p=0.1, repetition_penalty=1.3), 4)
    assert tracer.full_support == Sampling(temperature=0.7)


def test_ngram_chains_are_what_prompt_lookup_proposes_at_each_position(pair: Pair) -> None:
    first, chain = ngram_chains(pair.cut, NGRAM, 5)
    place = longest = 0
    for prompt, output in zip(pair.cut.prompts, pair.cut.outputs, strict=True):
        for index in range(len(output)):
            wanted = ngram_chain(prompt + output[:index], NGRAM, 5)
            assert int(first[place]) == (wanted[0][0] if wanted else -1)
            least = [min(confidence for _, confidence in wanted[: depth + 1]) for depth in range(len(wanted))]
            assert chain[place].tolist() == least + [-1.0] * (5 - len(wanted))
            longest = max(longest, len(wanted))
            place += 1
    assert place == len(chain)
    assert longest == 5


def test_the_chain_of_a_draft_model_runs_along_the_text_and_does_not_end_with_it() -> None:
    texts = Texts([[1], [1]], [[5, 6, 7], [8]], [True, False])
    flat = np.array([0.9, 0.5, 0.7, 0.4])
    chain = forced_chain([flat], texts, 3)
    assert chain.tolist() == [[0.9, 0.5, 0.5], [0.5, 0.5, 0.5], [0.7, 0.7, 0.7], [0.4, 0.4, 0.4]]
    # confidences that depend on the depth; beyond the last one that was traced, it holds
    deeper = forced_chain([flat, np.array([1.0, 0.8, 0.6, 1.0])], texts, 3)
    assert deeper.tolist() == [[0.9, 0.8, 0.6], [0.5, 0.5, 0.5], [0.7, 0.7, 0.7], [0.4, 0.4, 0.4]]


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no tokens"):
        Tracer(Sampling(), 4).begin(Texts([[3], [4]], [[5], []], [True, False]), "fp32")


def test_reference_texts_are_cut_at_the_limit_and_say_so() -> None:
    texts = reference_texts([[1], [2], [3]], [[5] * 4, [6] * 3, [7] * 2], limit=3)
    assert texts.outputs == [[5] * 3, [6] * 3, [7] * 2]
    assert texts.limited == [True, True, False]
    assert texts.tokens == 8


def same_trace(one: Trace, other: Trace) -> None:
    assert one.texts == other.texts
    assert one.reference == other.reference
    assert np.array_equal(one.chain, other.chain) and torch.equal(one.drafted, other.drafted)
    assert one.plain.keys() == other.plain.keys() and one.lookup.keys() == other.lookup.keys()
    assert {key: len(laws) for key, laws in one.laws.items()} == {key: len(laws) for key, laws in other.laws.items()}
    for key, values in one.plain.items():
        assert np.array_equal(values, other.plain[key])
        assert np.array_equal(one.entropy[key], other.entropy[key])
    assert (one.kinds is None) == (other.kinds is None)
    pairs: list[tuple[Any, Any, Any]] = [(key, law, other.lookup[key]) for key, law in one.lookup.items()]
    pairs += [(key, *two) for key, laws in one.laws.items() for two in zip(laws, other.laws[key], strict=True)]
    for key, law, twin in pairs:
        assert type(twin) is type(law)
        for name in law.__dataclass_fields__:  # type: ignore[attr-defined]
            assert torch.equal(getattr(law, name), getattr(twin, name)), (key, name)


def test_a_trace_survives_its_file(pair: Pair, tmp_path: Path) -> None:
    few = Texts(pair.cut.prompts[:3], pair.cut.outputs[:3], pair.cut.limited[:3])
    traces = {
        "search": trace_of(pair, few, model=True),
        "confirm": trace_of(pair, few, model=False),
        "references": trace_of(pair, few, model=True, temperature=0.0),
    }
    law = traces["confirm"].lookup["fp32"]
    assert isinstance(law, OneHotLaw)
    other = {name: getattr(law, name).clone() for name in law.__dataclass_fields__}
    traces["confirm"].lookup["bf16"] = replace(law, **other | {"p_text": law.p_text / 2})
    traces["confirm"].entropy["bf16"] = traces["confirm"].entropy["fp32"] + 0.1
    traces["confirm"].plain["bf16"] = traces["confirm"].plain["fp32"] - 0.1
    path = tmp_path / "trace.safetensors"
    save_trace(path, traces)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = load_trace(path)
    assert list(loaded) == list(traces)
    for name, trace in traces.items():
        same_trace(trace, loaded[name])
    settings = settings_of(True, rule="optimal", alpha=0.4, tau=0.7, draft_length=3)
    assert Replay(loaded["search"]).run(settings).perplexity_ratio == Replay(traces["search"]).run(settings).perplexity_ratio


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "trace.safetensors"
    with pytest.raises(ConfigurationError, match=r"trace\.safetensors: no such file"):
        load_trace(path)
    path.write_bytes(b"not a trace at all")
    with pytest.raises(ConfigurationError, match=r"trace\.safetensors: damaged"):
        load_trace(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"schema": "lossytune.trace/9"})
    with pytest.raises(ConfigurationError, match=r"schema is 'lossytune.trace/9'; expected 'lossytune.trace/2'"):
        load_trace(path)
    for index in ({}, {"index": "{"}, {"index": '{"search": {}}'}):  # another program's, or tensors that lack
        save_file({"x": torch.zeros(1)}, path, metadata={"schema": "lossytune.trace/2", **index})
        with pytest.raises(ConfigurationError, match=r"trace\.safetensors: not a trace"):
            load_trace(path)


# quality


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("texts", ["cut", "ended"])
def test_lossless_replay_is_the_targets_own_perplexity_to_1e_12(
    replays: dict[tuple[bool, str], Replay], model: bool, texts: str
) -> None:
    replay = replays[model, texts]
    for values in (
        {"draft_length": 0},
        {"draft_length": 4, "rule": "exact"},
        {"draft_length": 1, "rule": "optimal", "alpha": 0.0},
        {"draft_length": 6, "rule": "priced", "theta": 0.6},
        {"draft_length": 3, "rule": "typical", "tau": 0.5},
        {"draft_length": 3, "rule": "exact", "alpha": 0.7},
    ):
        replayed = replay.run(settings_of(model, **values))
        assert replayed.perplexity_ratio == pytest.approx(1.0, abs=1e-12)
        assert float(np.abs(replayed.log_ratio).max()) < 1e-12
        assert replayed.tv == pytest.approx(0.0, abs=1e-12)
        assert replayed.kl_forward == pytest.approx(0.0, abs=1e-12)


def direct_log_ratio(pair: Pair, texts: Texts, settings: Settings) -> np.ndarray[Any, np.dtype[np.float64]]:
    """log perplexity over the target's of each text, from full distributions of the bare models."""
    longest = max(map(len, texts.outputs))
    p = torch.full((len(texts.outputs), longest, VOCAB), 1 / VOCAB, dtype=torch.float64)
    q, tokens = p.clone(), torch.zeros(p.shape[:2], dtype=torch.long)
    draftable, mask = torch.zeros(p.shape[:2], dtype=torch.bool), torch.zeros(p.shape[:2], dtype=torch.bool)
    for row, (prompt, output, limited) in enumerate(zip(texts.prompts, texts.outputs, texts.limited, strict=True)):
        count = len(output)
        mask[row, :count], tokens[row, :count] = True, torch.tensor(output)
        p[row, :count] = direct_logits(pair.target, prompt, output).softmax(-1)
        if settings.ngram is None:
            q[row, :count] = (direct_logits(pair.draft, prompt, output) / settings.tau).softmax(-1)
            draftable[row, :count] = q[row, :count].amax(-1) >= settings.theta
        else:
            for place in range(count):
                chain = ngram_chain(prompt + output[:place], settings.ngram, 1)
                if chain and chain[0][1] >= settings.theta:
                    draftable[row, place] = True
                    q[row, place] = torch.nn.functional.one_hot(torch.tensor(chain[0][0]), VOCAB)
        if limited:
            draftable[row, count - 1] = False
    alpha = torch.full(tokens.shape, settings.alpha, dtype=torch.float64)
    weights = dense_weights(p, q[:, :, None], tokens, settings.rule, alpha, draftable[..., None], mask)
    recursion = forward(weights, settings.draft_length)
    return (np.log(weights.plain) * weights.mask).sum(1) - recursion.log_likelihood


LOSSY = [
    {"rule": "optimal", "alpha": 0.3, "draft_length": 4},
    {"rule": "optimal", "alpha": 0.9, "draft_length": 1},
    {"rule": "mixture", "alpha": 0.6, "draft_length": 3, "theta": 0.55},
    {"rule": "priced", "alpha": 0.5, "draft_length": 5},
    {"rule": "lenience", "alpha": 0.4, "draft_length": 2},
    {"rule": "fuzzy", "alpha": 0.15, "draft_length": 3},
]


@pytest.mark.parametrize("texts", ["cut", "ended"])
@pytest.mark.parametrize("values", [*LOSSY, {"rule": "typical", "alpha": 0.7, "draft_length": 3}], ids=str)
def test_lossy_perplexity_with_an_ngram_draft_is_that_of_the_full_distributions(
    pair: Pair, replays: dict[tuple[bool, str], Replay], texts: str, values: dict[str, Any]
) -> None:
    settings = settings_of(False, **values)
    wanted = direct_log_ratio(pair, getattr(pair, texts), settings)
    replayed = replays[False, texts].run(settings)
    np.testing.assert_allclose(replayed.log_ratio, wanted, atol=2e-4, rtol=5e-4)  # fp32 passes with and without a cache
    assert replayed.perplexity_ratio == pytest.approx(math.exp(wanted.sum() / getattr(pair, texts).tokens), abs=1e-5)


@pytest.mark.parametrize("texts", ["cut", "ended"])
@pytest.mark.parametrize(("values", "tau"), list(zip(LOSSY, TAUS, strict=True)), ids=str)
def test_lossy_perplexity_with_a_draft_model_is_that_of_the_full_distributions(
    pair: Pair, replays: dict[tuple[bool, str], Replay], texts: str, values: dict[str, Any], tau: float
) -> None:
    settings = settings_of(True, **values, tau=tau)
    wanted = direct_log_ratio(pair, getattr(pair, texts), settings)
    replayed = replays[True, texts].run(settings)
    np.testing.assert_allclose(replayed.log_ratio, wanted, atol=5e-3)  # masses near a threshold, half a bin off
    assert replayed.perplexity_ratio == pytest.approx(math.exp(wanted.sum() / getattr(pair, texts).tokens), abs=1e-4)


@pytest.mark.parametrize("model", [False, True])
def test_the_certificate_bounds_the_ratio_on_every_text(replays: dict[tuple[bool, str], Replay], model: bool) -> None:
    for rule in ("mixture", "optimal", "priced"):
        for alpha in (0.2, 0.6, 0.9):
            settings = settings_of(model, rule=rule, alpha=alpha, draft_length=4, tau=1.5)
            bound = certificate(settings)
            assert bound == pytest.approx(1 / (1 - alpha))
            replayed = replays[model, "ended"].run(settings)
            assert bool((np.exp(replayed.log_ratio / replayed.tokens) <= bound * (1 + 1e-3)).all())


def test_certificates_are_given_by_the_rules_that_have_one() -> None:
    assert certificate(Settings(draft_length=0, rule="optimal", alpha=0.9)) == 1.0
    assert certificate(Settings(rule="exact", alpha=0.9)) == 1.0
    assert certificate(Settings(rule="fuzzy", alpha=0.0)) == 1.0
    assert certificate(Settings(rule="optimal", alpha=1.0)) is None
    for rule in ("lenience", "typical", "fuzzy"):
        assert certificate(Settings(rule=rule, alpha=0.5)) is None


def test_another_precision_is_judged_against_the_reference_precision(pair: Pair) -> None:
    half = Runner(copy.deepcopy(pair.target.model).to(torch.bfloat16))
    tracer = Tracer(Sampling(), 4)
    trace = tracer.begin(pair.cut, "fp32")
    tracer.add(trace, "fp32", pair.target, None)
    tracer.add(trace, "bf16", half, None)
    replay = Replay(trace)
    wanted = (trace.plain["fp32"] - trace.plain["bf16"]).reshape(-1, LIMIT).sum(1)
    assert np.abs(wanted).max() > 0.01
    for length in (0, 3):
        settings = settings_of(False, rule="exact", draft_length=length, precision=Precisions(target="bf16"))
        np.testing.assert_allclose(replay.run(settings).log_ratio, wanted, atol=1e-12)
    with pytest.raises(ConfigurationError, match=r"precision fp16 was not traced; traced: bf16, fp32"):
        replay.run(settings_of(False, precision=Precisions(target="fp16")))


def test_a_tau_that_was_not_traced_is_refused_with_those_that_were(replays: dict[tuple[bool, str], Replay]) -> None:
    assert [nearest_tau(tau * 1.005) for tau in TAUS] == list(TAUS)
    with pytest.raises(ConfigurationError, match=r"tau is 0.9; the trace holds 0.5, 0.7, 0.85, 1.0, 1.2, 1.5"):
        replays[True, "cut"].run(settings_of(True, tau=0.9))
    # prompt lookup has no temperature: any tau is the same
    one, other = (replays[False, "cut"].run(settings_of(False, alpha=0.5, tau=tau)) for tau in (0.9, 1.0))
    assert one.perplexity_ratio == other.perplexity_ratio


def test_answers_are_kept_and_never_mixed_up(replays: dict[tuple[bool, str], Replay]) -> None:
    replay = replays[True, "ended"]
    tried = [
        settings_of(True, rule=rule, alpha=alpha, tau=tau, draft_length=length, theta=theta)
        for rule, alpha in (("optimal", 0.2), ("optimal", 0.8), ("mixture", 0.2))
        for tau in (0.7, 1.2)
        for length, theta in ((1, 0.0), (2, 0.5))
    ]
    fresh = Replay(replay.trace)
    once = [fresh.run(settings).perplexity_ratio for settings in tried]
    assert [replay.run(settings).perplexity_ratio for settings in reversed(tried)] == once[::-1]
    assert len(set(once)) == len(once)


@pytest.mark.parametrize("model", [False, True])
def test_more_relaxation_costs_more_and_wins_more(replays: dict[tuple[bool, str], Replay], model: bool) -> None:
    runs = [
        replays[model, "cut"].run(settings_of(model, rule="optimal", alpha=alpha, draft_length=3))
        for alpha in (0.0, 0.2, 0.4, 0.6, 0.8)
    ]
    for low, high in itertools.pairwise(runs):
        assert high.flow.tokens_per_round > low.flow.tokens_per_round
        assert high.tv is not None
        assert low.tv is not None
        assert high.tv > low.tv
        assert high.kl_forward is not None
        assert high.kl_reverse is not None
        assert high.kl_forward > 0
        assert high.kl_reverse > 0


def test_the_log_ratio_on_sampled_text_estimates_the_forward_divergence(replays: dict[tuple[bool, str], Replay]) -> None:
    for model in (False, True):
        replayed = replays[model, "cut"].run(settings_of(model, rule="mixture", alpha=0.5, draft_length=3))
        assert replayed.kl_forward is not None
        spread = replayed.log_ratio.std() / math.sqrt(len(replayed.log_ratio)) * len(replayed.log_ratio)
        assert abs(replayed.log_ratio.sum() - replayed.kl_forward * replayed.tokens.sum()) < 3.5 * spread


@pytest.mark.parametrize("model", [False, True])
def test_live_decoding_spends_the_variation_that_replay_foresees(
    pair: Pair, replays: dict[tuple[bool, str], Replay], model: bool
) -> None:
    """So a band around one is a band around the other, as the guard takes it."""
    settings = settings_of(model, rule="mixture", alpha=0.3, draft_length=3)
    replayed = replays[model, "cut"].run(settings)
    assert replayed.tv is not None and replayed.tv_spread is not None
    job = Job(settings, Sampling(), Stopping(LIMIT), torch.Generator().manual_seed(5))
    draft = ModelDraft(pair.draft, VOCAB) if model else NgramDraft()
    *_, rows = decode(pair.target, draft, pair.cut.prompts * 4, job, Stats())
    tokens = sum(len(row.output) for row in rows)
    live = sum(row.variation for row in rows) / tokens
    around = replayed.tv_spread * (1 / tokens + 1 / replayed.tokens.sum()) ** 0.5
    assert abs(live - replayed.tv) < 4 * around + 0.1 * replayed.tv
    sums = np.array([sum(row.variation for row in rows[place::64]) / 4 for place in range(64)])
    apart = sums - sums.mean()
    assert 0.2 < (apart**2).mean() ** 0.5 / (replayed.tv_spread * LIMIT**0.5) < 2.0


def test_the_spread_of_alike_texts_is_0_and_of_one_unknown(replays: dict[tuple[bool, str], Replay]) -> None:
    replay, text = replays[False, "cut"], np.array([1.5, 3.0])
    replay = copy.copy(replay)
    replay.tokens = np.array([10.0, 20.0])
    assert replay._spread(text) == pytest.approx(0.0, abs=1e-12)
    assert replay._spread(np.array([2.5, 3.0])) == pytest.approx((2 * (2.0 / 3) ** 2 / 30) ** 0.5)
    assert replay._spread(text[:1]) is None and replay._spread(None) is None


def test_quality_is_a_record_of_the_replay(replays: dict[tuple[bool, str], Replay]) -> None:
    replay, settings = replays[False, "ended"], settings_of(False, rule="optimal", alpha=0.5, draft_length=4)
    replayed = replay.run(settings)
    quality = replay.quality(settings, replayed, corpus="references")
    low, high = quality.perplexity_ratio.ci95 or (0.0, 0.0)
    assert low < quality.perplexity_ratio.value == replayed.perplexity_ratio < high
    assert (quality.tokens, quality.texts) == (replay.trace.texts.tokens, 64)
    assert (quality.corpus, quality.certificate) == ("references", 2.0)
    assert (quality.tv, quality.kl_forward, quality.kl_reverse) == (replayed.tv, replayed.kl_forward, replayed.kl_reverse)
    assert quality.tv_spread == replayed.tv_spread and replayed.tv_spread is not None and replayed.tv_spread > 0
    assert replay.quality(settings, interval=False).perplexity_ratio.ci95 is None
    assert replay.quality(settings, seed=0) == replay.quality(settings, seed=0)


def test_O3_a_text_without_any_chance_makes_the_ratio_infinite_and_nan_stays_nan() -> None:
    flow: Any = None
    one, two = np.ones(1), np.array([1.0, 3.0])
    assert Replayed(flow, np.array([np.inf]), one, None, None, None).perplexity_ratio == math.inf
    assert Replayed(flow, np.array([4e3]), one, None, None, None).perplexity_ratio == math.inf
    assert math.isnan(Replayed(flow, np.array([np.nan]), one, None, None, None).perplexity_ratio)
    weighted = Replayed(flow, np.array([0.1, 0.1]), two, None, None, None).perplexity_ratio
    assert weighted == pytest.approx(math.exp(0.05))  # over tokens, not a mean over texts


def test_Q9_a_cold_draft_lowers_the_perplexity_of_generated_text_and_is_ranked_worse_all_the_same() -> None:
    logits = 1.5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    p, q = logits.softmax(-1), (logits / 0.3).softmax(-1)
    text = torch.multinomial(p, 25, replacement=True, generator=torch.Generator().manual_seed(1))
    texts = Texts([[3]] * 25, text.T.tolist(), [False] * 25)
    rows = torch.arange(40).repeat(25)
    p_all, q_all, flat = p[rows], q[rows], text.T.reshape(-1)
    pick = flat[:, None]
    p_text, q_text = (part.gather(-1, pick)[:, 0].double() for part in (p_all, q_all))
    law = BinnedLaw(*bin_masses(p_all, q_all), p_text, q_text, q_all.amax(-1).double())
    nothing = OneHotLaw(*torch.zeros(3, 1000).double(), torch.zeros(1000, dtype=torch.bool), -torch.ones(1000).double())
    trace = Trace(texts, "fp32", -np.ones((1000, 4)), -torch.ones(1000), {"fp32": nothing}, {("fp32", 1.0): (law,)})
    trace.plain["fp32"] = p_text.log().numpy()
    settings = Settings(rule="mixture", alpha=0.6, tau=0.3, draft_length=4)
    pi = 0.4 * p + 0.6 * q
    generated = float(((p - pi) * p.log()).sum(-1).mean())  # its own text under the target, over the target's own
    assert math.exp(generated) < 0.75
    lossless, cold = (Replay(trace).run(each).perplexity_ratio for each in (Settings(rule="exact"), settings))
    assert lossless == pytest.approx(1.0, abs=1e-12)
    assert cold > 1.15


# flow, against the real loop


def tails(stats: Stats, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Share of rounds that draft at least 1, 2, .. tokens."""
    drafted = stats.drafted_at + [0] * (length - len(stats.drafted_at))
    return np.array(drafted) / stats.rounds


def check_flow(replayed: Replayed, stats: Stats, length: int, drafted: float) -> None:
    """Standard errors, of the texts and of the live run, are about 1.2 % of tokens per round and 0.015 of a share."""
    flow = replayed.flow
    assert stats.tokens_per_round is not None
    assert stats.acceptance is not None
    assert flow.tokens_per_round == pytest.approx(stats.tokens_per_round, rel=0.045)
    assert flow.acceptance == pytest.approx(stats.acceptance, abs=0.05)
    assert flow.drafted.sum() == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(1 - np.cumsum(flow.drafted)[:-1], tails(stats, length), atol=drafted)
    assert flow.drafted_per_round == pytest.approx(stats.drafted / stats.rounds, abs=drafted * length)


@pytest.mark.parametrize(("length", "theta"), [(1, 0.0), (4, 0.0), (4, 0.6)])
def test_flow_of_an_ngram_draft_is_that_of_live_decoding(
    pair: Pair, replays: dict[tuple[bool, str], Replay], length: int, theta: float
) -> None:
    settings = settings_of(False, rule="exact", draft_length=length, theta=theta)
    stats = pair.live(settings, pair.cut, repeat=4)
    assert stats.accepted > 80
    check_flow(replays[False, "cut"].run(settings), stats, length, drafted=0.04)


@pytest.mark.parametrize(
    ("length", "theta", "tau"), [(1, 0.0, 1.0), (4, 0.0, 1.0), (4, 0.0, 0.5), (1, 0.6, 1.0), (4, 0.6, 0.5), (3, 0.3, 1.5)]
)
def test_flow_of_a_draft_model_is_that_of_live_decoding(
    pair: Pair, replays: dict[tuple[bool, str], Replay], length: int, theta: float, tau: float
) -> None:
    settings = settings_of(True, rule="exact", draft_length=length, theta=theta, tau=tau)
    stats = pair.live(settings, pair.cut, repeat=5)
    # with theta, deeper steps depend on what the draft itself would say next; replay takes the text's own next tokens
    check_flow(replays[True, "cut"].run(settings), stats, length, drafted=0.04 if theta == 0 or length == 1 else 0.06)


@pytest.mark.parametrize("model", [False, True])
def test_flow_on_texts_that_the_model_ends_is_that_of_live_decoding(
    pair: Pair, replays: dict[tuple[bool, str], Replay], model: bool
) -> None:
    assert 0 < sum(pair.ended.limited) < len(pair.ended.limited)
    settings = settings_of(model, rule="exact", draft_length=3)
    stats = pair.live(settings, pair.ended, repeat=8, eos=True)
    check_flow(replays[model, "ended"].run(settings), stats, 3, drafted=0.04)


def test_flow_of_lossy_decoding_is_near_that_of_live_decoding(pair: Pair, replays: dict[tuple[bool, str], Replay]) -> None:
    # the live run goes along its own text, the replay along the target's: near, not equal
    settings = settings_of(True, rule="optimal", alpha=0.3, draft_length=3)
    stats = pair.live(settings, pair.cut, repeat=5)
    lossless = replays[True, "cut"].run(settings_of(True, rule="exact", draft_length=3)).flow.tokens_per_round
    replayed = replays[True, "cut"].run(settings).flow.tokens_per_round
    assert stats.tokens_per_round is not None
    assert replayed == pytest.approx(stats.tokens_per_round, rel=0.08)
    assert replayed > 1.1 * lossless


def test_acceptance_is_a_share_at_every_tau_and_theta(replays: dict[tuple[bool, str], Replay]) -> None:
    for tau in TAUS:
        for theta in (0.0, 0.3, 0.6, 0.8):
            flow = replays[True, "ended"].run(settings_of(True, rule="exact", tau=tau, theta=theta, draft_length=3)).flow
            assert flow.acceptance is None or 0 < flow.acceptance <= 1, (tau, theta)


def test_case_20_acceptance_rises_as_drafts_are_cut_short_while_tokens_per_round_falls(
    replays: dict[tuple[bool, str], Replay],
) -> None:
    full, short = (replays[True, "cut"].run(settings_of(True, theta=theta)).flow for theta in (0.0, 0.8))
    assert full.acceptance is not None
    assert short.acceptance is not None
    assert short.acceptance > full.acceptance
    assert short.tokens_per_round < full.tokens_per_round
    assert short.drafted_per_round < full.drafted_per_round


def test_plain_decoding_is_a_token_a_round_and_has_no_acceptance(replays: dict[tuple[bool, str], Replay]) -> None:
    for replay in replays.values():
        flow = replay.run(Settings(draft_length=0)).flow
        assert flow.tokens_per_round == pytest.approx(1.0, abs=1e-12)
        assert flow.acceptance is None
        assert flow.drafted.tolist() == [1.0]
        assert flow.drafted_per_round == 0.0


def test_the_last_token_before_the_limit_is_never_drafted() -> None:
    # the draft is always right: 4 tokens in a row are free, the last one is not
    certain = OneHotLaw(*(torch.ones(6).double() for _ in range(3)), torch.ones(6, dtype=torch.bool), torch.ones(6).double())
    for limited, rounds, drafted in ((True, 2, [0.0, 0.5, 0.0, 0.0, 0.5]), (False, 2, [0.0, 0.0, 0.0, 0.0, 1.0])):
        texts = Texts([[3]], [[5] * 6], [limited])
        trace = Trace(texts, "fp32", np.ones((6, 4)), torch.full((6,), 5), {"fp32": certain}, plain={"fp32": np.zeros(6)})
        assert trace.last_of_limited().tolist() == [[False] * 5 + [limited]]
        flow = Replay(trace).run(Settings(rule="exact", draft_length=4)).flow
        # 5 tokens in the first round; then one that is plain (limited), or accepted at the end of the text
        assert flow.tokens_per_round == pytest.approx(6 / rounds)
        assert flow.drafted.tolist() == pytest.approx(drafted if not limited else [0.5, 0.0, 0.0, 0.0, 0.5])


# a draft whose law depends on the depth of a round


HEAD_DEPTHS = 3


@dataclass(frozen=True)
class Head:
    """The same target with a random feature head that can propose 20 of its 24 tokens, and its trace to depth 3."""

    target: Runner
    draft: FeatureDraft
    replay: Replay

    def live(self, settings: Settings, texts: Texts, temperature: float, repeat: int = 1) -> Stats:
        return generate(self.target, self.draft, settings, texts.prompts * repeat, temperature, seed=2, eos=False)[0]


def head_trace(target: Runner, draft: FeatureDraft, texts: Texts, temperature: float) -> Trace:
    tracer = Tracer(Sampling(temperature=temperature), HEAD_DEPTHS, NGRAM)
    trace = tracer.begin(texts, "fp32")
    tracer.add(trace, "fp32", target, draft)
    return trace


@pytest.fixture(scope="module")
def head(pair: Pair) -> Head:
    torch.manual_seed(3)
    network = FeatureHead(HeadShape(32, 32, 4, 2, 64, 1, 20), torch.randperm(VOCAB)[:20].sort().values).eval()
    target = Runner(copy.deepcopy(pair.target.model))
    draft = FeatureDraft(network, target.model, VOCAB)
    return Head(target, draft, Replay(head_trace(target, draft, pair.cut, 1.0)))


def exact_log_ratio(
    p: Tensor, q: Tensor, draftable: Tensor, texts: Texts, settings: Settings
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The exact recursion on full laws by depth; all texts are cut at the limit, whose last token is never drafted."""
    draftable[:, -1] = False
    tokens, mask = torch.tensor(texts.outputs), torch.ones(p.shape[:2], dtype=torch.bool)
    alpha = torch.full(tokens.shape, settings.alpha, dtype=torch.float64)
    weights = dense_weights(p, q, tokens, settings.rule, alpha, draftable, mask)
    return np.log(weights.plain).sum(1) - forward(weights, settings.draft_length).log_likelihood


def head_log_ratio(head: Head, texts: Texts, settings: Settings) -> np.ndarray[Any, np.dtype[np.float64]]:
    """As `direct_log_ratio`, with q of each depth of a round; all texts are cut at the limit."""
    depths, both = settings.draft_length, list(zip(texts.prompts, texts.outputs, strict=True))
    p = torch.stack([direct_logits(head.target, prompt, output).softmax(-1) for prompt, output in both])
    q = torch.zeros(*p.shape[:2], depths, VOCAB, dtype=torch.float64)
    for row, (prompt, output) in enumerate(both):
        with torch.no_grad():
            hidden = head.target.model(torch.tensor([prompt + output]), output_hidden_states=True, use_cache=False)
            laws = head.draft.along(prompt, output, hidden.hidden_states[-1][:, :-1], depths)
        for depth, logits in enumerate(laws):
            q[row, :, depth, head.draft.support] = (logits.double() / settings.tau).softmax(-1)
    draftable = q.amax(-1) >= settings.theta
    return exact_log_ratio(p, q, draftable, texts, settings)


@pytest.mark.parametrize(
    "values",
    [
        {"rule": "optimal", "alpha": 0.3, "tau": 1.0},
        {"rule": "mixture", "alpha": 0.6, "tau": 1.5, "theta": 0.2},
        {"rule": "priced", "alpha": 0.4, "tau": 0.7},
        {"rule": "lenience", "alpha": 0.3, "tau": 1.2, "draft_length": 2},
        {"rule": "exact", "alpha": 0.0, "tau": 0.5, "draft_length": 1},
    ],
    ids=str,
)
def test_lossy_perplexity_with_a_feature_head_uses_the_law_of_each_depth(
    pair: Pair, head: Head, values: dict[str, Any]
) -> None:
    settings = Settings(**{"draft_length": HEAD_DEPTHS, **values})
    wanted = head_log_ratio(head, pair.cut, settings)
    replayed = head.replay.run(settings)
    np.testing.assert_allclose(replayed.log_ratio, wanted, atol=0.02)
    assert replayed.perplexity_ratio == pytest.approx(math.exp(wanted.sum() / pair.cut.tokens), abs=1e-3)
    if settings.draft_length > 1:
        trace = head.replay.trace
        only_first = Replay(replace(trace, laws={key: laws[:1] for key, laws in trace.laws.items()})).run(settings)
        assert np.abs(only_first.log_ratio - wanted).max() > 0.1


@pytest.mark.parametrize(("length", "theta"), [(1, 0.0), (3, 0.0), (3, 0.2)])
def test_flow_of_a_feature_head_is_that_of_live_decoding(pair: Pair, head: Head, length: int, theta: float) -> None:
    settings = Settings(rule="exact", draft_length=length, tau=1.5, theta=theta)
    stats = head.live(settings, pair.cut, temperature=1.0, repeat=5)
    assert stats.accepted > 300
    check_flow(head.replay.run(settings), stats, length, drafted=0.04 if theta == 0.0 else 0.06)


def test_greedy_replay_of_a_feature_head_counts_exactly_what_live_greedy_decoding_does(pair: Pair, head: Head) -> None:
    replay = Replay(head_trace(head.target, head.draft, pair.greedy_cut, 0.0))
    for length in (1, 3):
        settings = Settings(rule="exact", draft_length=length)
        stats = head.live(settings, pair.greedy_cut, temperature=0.0)
        assert stats.accepted > 10
        flow = replay.run(settings).flow
        assert flow.tokens_per_round == pytest.approx(stats.tokens_per_round, abs=1e-12)
        assert flow.acceptance == pytest.approx(stats.acceptance, abs=1e-12)


def test_a_head_that_theta_cuts_short_in_every_row_decodes_without_a_warning(pair: Pair, head: Head) -> None:
    torch.set_warn_always(True)  # else torch warns once a process, in whichever test comes first
    try:
        stats = head.live(Settings(rule="exact", draft_length=3, theta=0.7), pair.cut, temperature=1.0)
    finally:
        torch.set_warn_always(False)
    assert 0 < stats.drafted < 3 * stats.rounds


def test_a_trace_by_depth_survives_its_file(pair: Pair, head: Head, tmp_path: Path) -> None:
    few = Texts(pair.cut.prompts[:3], pair.cut.outputs[:3], pair.cut.limited[:3])
    trace = head_trace(head.target, head.draft, few, 1.0)
    assert {len(laws) for laws in trace.laws.values()} == {HEAD_DEPTHS}
    save_trace(tmp_path / "trace.safetensors", {"search": trace})
    loaded = load_trace(tmp_path / "trace.safetensors")["search"]
    same_trace(trace, loaded)
    settings = Settings(rule="optimal", alpha=0.3, draft_length=HEAD_DEPTHS)
    assert Replay(loaded).run(settings).perplexity_ratio == Replay(trace).run(settings).perplexity_ratio


def test_a_round_longer_than_the_traced_depths_goes_on_with_the_last_of_them(head: Head) -> None:
    runs = [head.replay.run(Settings(rule="optimal", alpha=0.3, draft_length=length)) for length in (1, 2, 3, 4, 6)]
    for low, high in itertools.pairwise(runs):
        assert high.flow.tokens_per_round >= low.flow.tokens_per_round
        assert len(high.flow.drafted) > len(low.flow.drafted)


# temperature 0


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize(("length", "theta"), [(1, 0.0), (4, 0.0), (4, 0.6)])
def test_greedy_replay_counts_exactly_what_live_greedy_decoding_does(
    pair: Pair, model: bool, length: int, theta: float, ended: bool
) -> None:
    texts = pair.greedy if ended else pair.greedy_cut
    trace = trace_of(pair, texts, model, temperature=0.0)
    assert isinstance(trace.lookup["fp32"], GreedyLaw)
    assert {type(laws[0]) for laws in trace.laws.values()} == ({GreedyLaw} if model else set())
    settings = settings_of(model, rule="optimal", alpha=0.0, draft_length=length, theta=theta)
    replayed = Replay(trace).run(settings)
    stats = pair.live(settings, texts, temperature=0.0, eos=ended)
    assert replayed.perplexity_ratio == 1.0
    assert stats.accepted > 80
    assert replayed.flow.tokens_per_round == pytest.approx(stats.tokens_per_round, abs=1e-12)
    assert (replayed.tv, replayed.kl_forward, replayed.kl_reverse) == (None, None, None)
    if not ended and (not model or theta == 0.0):
        assert replayed.flow.acceptance == pytest.approx(stats.acceptance, abs=1e-12)
        np.testing.assert_allclose(1 - np.cumsum(replayed.flow.drafted)[:-1], tails(stats, length), atol=1e-12)


def test_greedy_loss_is_the_mean_regret_of_accepted_tokens_along_the_text(pair: Pair) -> None:
    trace = trace_of(pair, pair.greedy, model=True, temperature=0.0)
    alpha, length = 0.6, 3
    total = 0.0
    for prompt, output, limited in zip(pair.greedy.prompts, pair.greedy.outputs, pair.greedy.limited, strict=True):
        p, q = (direct_logits(runner, prompt, output).softmax(-1) for runner in (pair.target, pair.draft))
        state = 0
        for place in range(len(output)):
            token, best = int(q[place].argmax()), float(p[place].max())
            chance = float(p[place, token])
            drafted = state < length and not (limited and place == len(output) - 1)
            if drafted and chance >= (1 - alpha) * best:
                total += math.log(best / chance)
                state += 1
            else:
                state = 0
    replayed = Replay(trace).run(settings_of(True, rule="optimal", alpha=alpha, draft_length=length))
    assert total > 1.0
    assert float(replayed.log_ratio.sum()) == pytest.approx(total, abs=1e-3)
    assert replayed.perplexity_ratio == pytest.approx(math.exp(total / pair.greedy.tokens), abs=1e-5)
    lossless = Replay(trace).run(settings_of(True, rule="exact", alpha=alpha, draft_length=length))
    assert lossless.perplexity_ratio == 1.0


# prompt lookup after long matches, the draft everywhere else


MIXED = {"source": "mixed", "ngram": NgramSettings(min_match=2)}


def mixed_log_ratio(pair: Pair, texts: Texts, settings: Settings) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By the exact recursion on full laws, with each round's drafter looked up; all texts are cut at the limit."""
    assert settings.ngram is not None
    depths, both = settings.draft_length, list(zip(texts.prompts, texts.outputs, strict=True))
    p = torch.stack([direct_logits(pair.target, prompt, output).softmax(-1) for prompt, output in both])
    q = torch.zeros(*p.shape[:2], depths, VOCAB, dtype=torch.float64)
    draftable = torch.ones(*p.shape[:2], depths, dtype=torch.bool)
    for row, (prompt, output) in enumerate(both):
        drawn = (direct_logits(pair.draft, prompt, output) / settings.tau).softmax(-1)
        looked = [ngram_chain(prompt + output[:place], settings.ngram, 1) for place in range(len(output))]
        for place, depth in itertools.product(range(len(output)), range(depths)):
            if place < depth:
                continue
            if not looked[place - depth]:
                q[row, place, depth] = drawn[place]
                draftable[row, place, depth] = float(drawn[place].max()) >= settings.theta
            elif looked[place]:
                q[row, place, depth, looked[place][0][0]] = 1.0
            else:
                draftable[row, place, depth] = False
    return exact_log_ratio(p, q, draftable, texts, settings)


@pytest.mark.parametrize(
    "values",
    [
        {"rule": "optimal", "alpha": 0.3, "draft_length": 3},
        {"rule": "mixture", "alpha": 0.6, "draft_length": 4, "theta": 0.5, "tau": 0.7},
        {"rule": "priced", "alpha": 0.4, "draft_length": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [1, 2, 3])
def test_lossy_perplexity_of_a_mixed_draft_is_that_of_the_exact_recursion(
    pair: Pair, replays: dict[tuple[bool, str], Replay], values: dict[str, Any], least: int
) -> None:
    settings = Settings(source="mixed", ngram=NgramSettings(min_match=least), **values)
    wanted = mixed_log_ratio(pair, pair.cut, settings)
    np.testing.assert_allclose(replays[True, "cut"].run(settings).log_ratio, wanted, atol=0.02)
    for source in ("draft", "ngram"):
        other = replays[True, "cut"].run(Settings(source=source, ngram=NGRAM, **values)).log_ratio
        assert np.abs(other - wanted).max() > 0.1


def test_a_trace_with_a_draft_replays_prompt_lookup_as_one_without(replays: dict[tuple[bool, str], Replay]) -> None:
    for values in ({"rule": "optimal", "alpha": 0.4, "theta": 0.6}, {"rule": "exact"}):
        both = replays[True, "cut"].run(Settings(source="ngram", ngram=NGRAM, draft_length=4, **values))
        alone = replays[False, "cut"].run(Settings(ngram=NGRAM, draft_length=4, **values))
        assert np.array_equal(both.log_ratio, alone.log_ratio)
        assert both.flow.tokens_per_round == alone.flow.tokens_per_round
        assert both.flow.steps.tolist() == alone.flow.steps.tolist() == [1.0, 0, 0, 0, 0]


@pytest.mark.parametrize(("length", "theta"), [(1, 0.0), (4, 0.0), (3, 0.5)])
def test_flow_of_a_mixed_draft_is_that_of_live_decoding(
    pair: Pair, replays: dict[tuple[bool, str], Replay], length: int, theta: float
) -> None:
    settings = Settings(rule="exact", draft_length=length, theta=theta, **MIXED)
    stats, _ = generate(pair.target, ModelDraft(pair.draft, VOCAB), settings, pair.cut.prompts * 5, 1.0, 2, eos=False)
    replayed = replays[True, "cut"].run(settings)
    check_flow(replayed, stats, length, drafted=0.04 if theta == 0 else 0.06)
    assert (replayed.flow.steps >= 0).all() and replayed.flow.steps.sum() == pytest.approx(1.0)
    assert 0.05 < replayed.flow.steps[0] < 0.95  # some rounds are lookup, some are not


def test_greedy_replay_of_a_mixed_draft_counts_exactly_what_live_greedy_decoding_does(pair: Pair) -> None:
    replay = Replay(trace_of(pair, pair.greedy_cut, model=True, temperature=0.0))
    for length in (1, 3):
        settings = Settings(rule="exact", draft_length=length, **MIXED)
        prompts = pair.greedy_cut.prompts
        stats, texts = generate(pair.target, ModelDraft(pair.draft, VOCAB), settings, prompts, 0.0, 1, eos=False)
        flow = replay.run(settings).flow
        assert texts.outputs == pair.greedy_cut.outputs
        assert flow.tokens_per_round == pytest.approx(stats.tokens_per_round, abs=1e-12)
        assert flow.acceptance == pytest.approx(stats.acceptance, abs=1e-12)


@pytest.mark.parametrize("rule", ["exact", "priced"])
def test_a_batch_whose_rows_draft_unalike_emits_the_law_that_replay_scores(pair: Pair, rule: str) -> None:
    """Texts of two tokens from a row that looks up beside one that does not: their frequencies are exp(log likelihood)."""
    prompts = [[3, 4, 5, 3, 4], [6, 7, 8, 9]]
    settings = Settings(rule=rule, alpha=0.4 if rule != "exact" else 0.0, draft_length=2, **MIXED)  # type: ignore[arg-type]
    count = 3000
    draft, stats = ModelDraft(pair.draft, VOCAB), Stats()
    job = Job(settings, Sampling(), Stopping(2), torch.Generator().manual_seed(0))
    *_, rows = decode(pair.target, draft, prompts * count, job, stats)
    assert stats.draft_steps > 0
    for which, prompt in enumerate(prompts):
        seen = np.zeros((VOCAB, VOCAB))
        for row in rows[which::2]:
            seen[tuple(row.output)] += 1
        pairs = list(itertools.product(range(VOCAB), repeat=2))
        texts = Texts([prompt] * len(pairs), [list(pair) for pair in pairs], [True] * len(pairs))
        trace = trace_of(pair, texts, model=True)
        replayed = Replay(trace).run(settings)
        plain = np.array([trace.plain["fp32"][2 * row : 2 * row + 2].sum() for row in range(len(pairs))])
        wanted = np.exp(plain - replayed.log_ratio)
        assert wanted.sum() == pytest.approx(1.0, abs=0.01)
        likely = wanted * count >= 5
        expected, got = wanted[likely] * count, seen.ravel()[likely]
        statistic = ((got - expected) ** 2 / expected).sum()
        assert statistic < likely.sum() + 4.5 * math.sqrt(2 * likely.sum())
