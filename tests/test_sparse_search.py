"""Sparse attention in the search: laws by format against the models' own, the space, what it leaves out, whole searches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_tiny
from test_decoding import lively_model
from test_search_end_to_end import search, trials_of, write_prompts
from test_sparse import tokens_of

from lossyspec.cost_table import CostTable
from lossyspec.decoder import Decoder
from lossyspec.decoding import Job, decode
from lossyspec.errors import ConfigurationError
from lossyspec.likelihood import dense_weights, forward
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.profile import read_profile
from lossyspec.runner import Runner
from lossyspec.self_drafting import SelfDraft
from lossyspec.settings import Attention, NgramSettings, Sampling, Settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping
from lossyspec.tuner import sparse_choices
from lossyspec.tuner.config import make_config
from lossyspec.tuner.measurement.costs import CostMeter
from lossyspec.tuner.replay import Replay, certificate
from lossyspec.tuner.screening import Times
from lossyspec.tuner.search_space import SearchSpace, build_space
from lossyspec.tuner.sparse_choices import DRAFTING, VERIFYING, measure, narrow_attentions, offer
from lossyspec.tuner.study import kind_of
from lossyspec.tuner.trace import HEAD_TAUS, Texts, Trace, Tracer
from lossyspec.tuner.trace_files import load_trace, save_trace

VERIFY = Attention(block=8, sink=1, window=1, top=2, side="verify")
DRAFT = VERIFY.model_copy(update={"side": "draft"})
LIMIT, VOCAB = 20, 101


@pytest.fixture(scope="module")
def target() -> Runner:
    return Runner(lively_model("llama"))


@pytest.fixture(scope="module")
def texts(target: Runner) -> Texts:
    """Texts of the dense target, all cut at the limit; the first prompt is so short that its text begins to skip midway."""
    prompts = [tokens_of(24), *(tokens_of(60 + 3 * seed, seed) for seed in range(1, 4))]
    job = Job(Settings(draft_length=0), Sampling(), Stopping(LIMIT), torch.Generator().manual_seed(3))
    *_, rows = decode(target, None, prompts, job, Stats())
    return Texts(prompts, [row.output for row in rows], [True] * len(rows))


def logits_at(target: Runner, prompt: list[int], output: list[int], attention: Attention) -> torch.Tensor:
    """fp64 laws of an output, each by a pass of one token."""
    target.start([prompt], 128)
    read = enumerate([prompt[-1], *output[:-1]], len(prompt) - 1)
    found = [target.logits(torch.tensor([[token]]), [place], attention)[0, 0] for place, token in read]
    return torch.stack(found).double().softmax(-1)


def traced(target: Runner, texts: Texts, temperature: float = 1.0) -> Trace:
    """Dense, with the target sparse, and with the target as its own draft."""
    tracer = Tracer(Sampling(temperature=temperature), 4, NgramSettings())
    trace = tracer.begin(texts, "fp32")
    tracer.add(trace, "fp32", target, None)
    tracer.add(trace, "fp32", target, None, attention=VERIFY)
    draft = SelfDraft(target, target.vocab_size).seeing(DRAFT)
    tracer.add(trace, "fp32", target, draft, taus=HEAD_TAUS, attention=DRAFT)
    return trace


@pytest.fixture(scope="module")
def trace(target: Runner, texts: Texts) -> Trace:
    return traced(target, texts)


def test_the_loss_of_a_sparse_target_is_that_of_its_own_single_passes(target: Runner, texts: Texts, trace: Trace) -> None:
    replayed = Replay(trace).run(Settings(draft_length=0, attention=VERIFY))
    for row, (prompt, output) in enumerate(zip(texts.prompts, texts.outputs, strict=True)):
        pick = torch.tensor(output)[:, None]
        dense, sparse = (
            logits_at(target, prompt, output, each).gather(-1, pick).log().sum() for each in (Attention(), VERIFY)
        )
        assert replayed.log_ratio[row] == pytest.approx(float(dense - sparse), abs=2e-3)
    assert replayed.perplexity_ratio > 1.001
    assert Replay(trace).run(Settings(draft_length=0)).log_ratio == pytest.approx(0.0, abs=1e-12)


def test_drafting_losslessly_for_a_sparse_target_changes_no_likelihood(trace: Trace) -> None:
    replay = Replay(trace)
    plain = replay.run(Settings(draft_length=0, attention=VERIFY))
    drafted = replay.run(Settings(draft_length=3, rule="exact", ngram=NgramSettings(), attention=VERIFY, source="ngram"))
    assert drafted.log_ratio == pytest.approx(plain.log_ratio, abs=1e-9)
    assert drafted.flow.tokens_per_round > 1


@pytest.fixture(scope="module")
def laws(target: Runner, texts: Texts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p (N, L, V), logits of q (N, L, 3, V), whether the draft proposes (N, L, 3): by rounds begun anew for each depth."""
    draft, length = SelfDraft(target, target.vocab_size).seeing(DRAFT), 3
    p = torch.stack([logits_at(target, *text, Attention()) for text in zip(texts.prompts, texts.outputs, strict=True)])
    q, draftable = torch.zeros(*p.shape[:2], length, VOCAB), torch.ones(*p.shape[:2], length, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(texts.prompts, texts.outputs, strict=True)):
        text = [*prompt, *output]
        for begin in range(len(prompt), len(text)):  # tokens before the round
            target.start([text[:begin]], 128)
            excerpt, first = draft._begin(DRAFT, [begin - 1]), begin - len(prompt)
            for depth in range(min(length, LIMIT - first)):
                token = torch.tensor([[text[begin - 1 + depth]]])
                q[row, first + depth, depth] = draft._step(excerpt, token, [begin - 1], depth)[0, 0]
                draftable[row, first + depth, depth] = DRAFT.skips(begin)
    draftable[:, -1] = False
    return p, q, draftable


@pytest.mark.parametrize(("rule", "alpha", "tau"), [("optimal", 0.4, 1.0), ("mixture", 0.7, 1.2), ("exact", 0.0, 0.7)])
def test_lossy_perplexity_of_a_self_draft_uses_the_law_of_each_depth(
    texts: Texts, trace: Trace, laws: tuple[torch.Tensor, ...], rule: Any, alpha: float, tau: float
) -> None:
    settings, (p, logits, draftable) = Settings(draft_length=3, rule=rule, alpha=alpha, tau=tau, attention=DRAFT), laws
    assert not draftable[0, :-1].all()
    mask, level = torch.ones(p.shape[:2], dtype=torch.bool), torch.full(p.shape[:2], alpha, dtype=torch.float64)
    q = (logits.double() / tau).softmax(-1)
    weights = dense_weights(p, q, torch.tensor(texts.outputs), rule, level, draftable, mask)
    replayed = Replay(trace).run(settings)
    wanted = np.log(weights.plain).sum(1) - forward(weights, 3).log_likelihood
    assert replayed.log_ratio == pytest.approx(wanted, abs=0.02)
    if rule == "exact":
        assert replayed.perplexity_ratio == pytest.approx(1.0, abs=1e-9)
        assert replayed.flow.tokens_per_round > 1.2
    else:
        assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("attention", [DRAFT, VERIFY])
def test_greedy_replay_counts_exactly_what_live_greedy_decoding_does(
    target: Runner, texts: Texts, attention: Attention
) -> None:
    own = attention.side == "draft"
    source: Any = {} if own else {"source": "ngram", "ngram": NgramSettings()}
    draft: Any = SelfDraft(target, target.vocab_size) if own else NgramDraft()
    plain = Settings(draft_length=0, attention=attention.on("verify"))
    greedy = Sampling(temperature=0)
    job = Job(plain, greedy, Stopping(LIMIT), torch.Generator())
    *_, rows = decode(target, None, texts.prompts, job, Stats())
    own_texts = Texts(texts.prompts, [row.output for row in rows], [True] * len(rows))
    settings, stats = Settings(draft_length=3, rule="exact", attention=attention, **source), Stats()
    *_, rows = decode(target, draft, texts.prompts, Job(settings, greedy, Stopping(LIMIT), torch.Generator()), stats)
    assert [row.output for row in rows] == own_texts.outputs
    flow = Replay(traced(target, own_texts, 0.0)).run(settings).flow
    assert flow.tokens_per_round == pytest.approx(stats.tokens / stats.rounds)


def test_formats_survive_the_file_of_a_trace_and_of_a_cost_table(trace: Trace, tmp_path: Path) -> None:
    save_trace(tmp_path / "trace.safetensors", {"search": trace})
    again = load_trace(tmp_path / "trace.safetensors")["search"]
    assert set(again.plain) == {"fp32", "fp32+b8-s1-w1-t2-verify"}
    assert set(again.laws) == {("fp32+b8-s1-w1-t2-draft", tau) for tau in HEAD_TAUS}
    settings = Settings(draft_length=2, alpha=0.3, attention=DRAFT)
    assert Replay(again).run(settings).log_ratio == pytest.approx(Replay(trace).run(settings).log_ratio)
    table = CostTable(9, round_s={("fp32+b8-s1-w1-t2-verify", 4): [1.0, 2.0]})
    table.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json").round_s == table.round_s


def test_what_a_sparse_target_emits_has_no_certificate_and_is_lossy() -> None:
    sparse = Settings(draft_length=0, attention=VERIFY)
    assert certificate(sparse) is None
    assert kind_of(sparse) == "lossy"
    assert not sparse.lossless
    assert not sparse.relaxed
    drafting = Settings(draft_length=3, rule="exact", attention=DRAFT)
    assert (certificate(drafting), kind_of(drafting), drafting.lossless) == (1.0, "lossless", True)


def test_costs_are_kept_by_format(target: Runner) -> None:
    draft, ticks = SelfDraft(target, target.vocab_size), iter(range(10**6))
    meter = CostMeter(
        lambda precision: (target, draft), [tokens_of(60)], 60, Sampling(), 2, clock=lambda: float(next(ticks)), repeats=1
    )
    meter.round_s("fp32", 1)
    meter.round_s("fp32", 1, VERIFY)
    meter.draft_s("fp32", 1, DRAFT)
    assert set(meter.table.round_s) == {("fp32", 1), ("fp32+b8-s1-w1-t2-verify", 1)}
    assert set(meter.table.draft_s) == {("fp32+b8-s1-w1-t2-draft", 1)}
    assert all(max(values) > 0 for values in meter.table.draft_s.values())


# the space


def space_of(**config: Any) -> SearchSpace:
    chosen = make_config(precisions=("fp32",), **config)
    taus = HEAD_TAUS if chosen.draft.startswith("self") else ()
    return offer(build_space(chosen, taus, False, {"fp32": None}, None), chosen)


def test_the_draft_decides_the_side_and_plain_decoding_stays_dense() -> None:
    own, other = space_of(draft="self"), space_of(draft="ngram")
    assert own.attentions == DRAFTING
    assert other.attentions == ("dense", *VERIFYING)
    base: Any = {"precision": "fp32", "batch_size": 1}
    assert own.settings(own.params(draft_length=0, **base))[0].attention == Attention()
    assert own.settings(own.params(draft_length=2, **base))[0].attention.name == DRAFTING[0]
    assert own.settings(own.params(draft_length=2, source="ngram", **base))[0].attention == Attention()
    assert other.settings(other.params(draft_length=0, **base))[0].attention == Attention()
    sparse = other.params(draft_length=0, attention=VERIFYING[1], **base)
    assert other.settings(sparse)[0].attention.name == VERIFYING[1]
    assert other.as_stored(other.describe(), {}).attentions == other.attentions
    assert space_of(attentions=("dense",)).as_stored(space_of(attentions=("dense",)).describe(), {}).attentions == ("dense",)


def test_a_lossless_search_has_no_sparse_target_and_says_why() -> None:
    space = space_of(rules=("exact",))
    assert space.attentions == ("dense",)
    assert space.excluded["attention verify"] == "it is lossy, and this search is lossless only"
    assert "attention" not in space.distributions


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attentions": ("b8-s1-w1-t2-draft",)}, r"the side 'draft' needs --draft self"),
        ({"draft": "self", "attentions": ("b8-s1-w1-t2-verify",)}, r"the draft self needs the side 'draft'"),
        ({"rules": ("exact",), "attentions": ("b8-s1-w1-t2-verify",)}, r"it is lossy, and this search is lossless only"),
        ({"attentions": ("b7-s1-w1-t2-verify",)}, r"block is 7; allowed: 0 \(dense\), 8, 16, 32, 64, 128"),
        (
            {"attentions": ("sparse",)},
            r"attention is 'sparse'; allowed: dense, or block, sink, window, top and side as in b32",
        ),
    ],
)
def test_an_attention_that_is_of_no_use_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        space_of(**config)


class Ticking:
    """A runner whose passes take what a table says by attention, on a clock of its own."""

    device, vocab_size = torch.device("cpu"), 50

    def __init__(self, seconds: dict[str, float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        assert capacity > len(prompts[0])

    def logits(self, tokens: torch.Tensor, starts: list[int], attention: Attention) -> None:
        self.now += self.seconds[attention.name] * (1 if tokens.shape[1] == 1 else 1.5)


def test_attentions_that_skip_nothing_or_are_slower_are_left_out_with_the_reason() -> None:
    names = ("b8-s1-w1-t2-verify", "b16-s1-w1-t2-verify", "b32-s1-w2-t60-verify")
    runner = Ticking({"dense": 0.030, names[0]: 0.020, names[1]: 0.040})
    pool: Any = SimpleNamespace(decoder=lambda precision: SimpleNamespace(target=runner))
    said: list[str] = []
    space = narrow_attentions(space_of(attentions=names), pool, 400, said.append, lambda: runner.now)
    assert space.attentions == ("dense", names[0])
    slow = "slower than the reference here: 40 against 30 ms for 1 token, 60 against 45 ms for 4 tokens"
    assert space.excluded[f"attention {names[1]}"] == slow
    assert (
        space.excluded[f"attention {names[2]}"] == "skips nothing: it sees 2016 tokens, and the middle context here has 400"
    )
    assert len(said) == 2


def test_a_self_draft_without_anything_to_skip_is_refused() -> None:
    pool: Any = SimpleNamespace(decoder=lambda precision: SimpleNamespace(target=None))
    with pytest.raises(
        ConfigurationError, match=r"draft self: no attention skips anything, since the middle context .* 100"
    ):
        narrow_attentions(space_of(draft="self"), pool, 100, lambda text: None)


def test_a_model_without_sparse_attention_leaves_it_out() -> None:
    runner = Runner(lively_model("gpt2"))
    pool: Any = SimpleNamespace(decoder=lambda precision: SimpleNamespace(target=runner))
    space = narrow_attentions(space_of(attentions=("b8-s1-w1-t2-verify",)), pool, 100, lambda text: None)
    assert space.attentions == ("dense",)
    assert "runs as transformers runs it" in space.excluded["attention b8-s1-w1-t2-verify"]


def test_measured_times_are_by_attention_in_the_order_given(target: Runner) -> None:
    ticks = iter(range(10**6))
    times = measure(target, [VERIFY, VERIFY], 60, lambda: float(next(ticks)))
    assert [len(each.other_s) for each in times] == [2, 2]
    assert measure(target, [], 60, lambda: 0.0) == []


# whole searches


@pytest.mark.parametrize(
    ("draft", "attention", "side"), [("self", "b8-s0-w1-t0-draft", "draft"), ("ngram", "b8-s0-w1-t0-verify", "verify")]
)
def test_a_search_confirms_a_profile_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str, attention: str, side: str
) -> None:
    place = tmp_path / "place"
    save_tiny(place / "target")
    write_prompts(place / "prompts.jsonl")
    fast = Times((2.0, 2.0), (1.0, 1.0))  # the model is so small that sparse attention is slower
    monkeypatch.setattr(sparse_choices, "measure", lambda runner, attentions, *more: [fast for _ in attentions])
    result = search(place, tmp_path / "run", draft=draft, attentions=(attention,), trials=12, rules=("optimal",))
    choices = result.manifest.space["attention"]["attributes"]["choices"]
    assert choices == ([attention] if side == "draft" else ["dense", attention])
    sparse = [record for record in trials_of(tmp_path / "run") if record.settings.attention.block]
    assert {record.settings.attention.side for record in sparse if record.state != "failed"} == {side}
    assert {record.kind for record in sparse} <= ({"lossy"} if side == "verify" else {"lossless", "lossy"})
    for point in result.front.points:
        if point.settings.attention.side == "verify":
            assert point.quality.certificate is None
    profile = read_profile(tmp_path / "run" / "profile.json")
    assert Decoder.from_profile(profile).generate(["w1 w2 w3"], 8, temperature=0.0)[0].tokens
