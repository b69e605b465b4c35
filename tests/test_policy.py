"""Where alpha acts: positions by their text, the walk by hand, the likelihood against the real loop with each factor on."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from test_trace_replay import noisy

import lossyspec.decoding as decoding
from lossyspec.acceptance import entropy
from lossyspec.decoding import Job, decode
from lossyspec.drafting import ModelDraft
from lossyspec.errors import ConfigurationError
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.policy import Boundaries, Seen, Walk
from lossyspec.runner import Runner
from lossyspec.settings import NgramSettings, Policy, Recovery, Sampling, Settings, make_settings
from lossyspec.stats import Stats
from lossyspec.stopping import Stopping
from lossyspec.tuner.replay import Replay
from lossyspec.tuner.trace import Texts, Trace, Tracer
from lossyspec.tuner.trace_files import load_trace, save_trace

NOTHING: frozenset[Any] = frozenset()


class Words:
    """A tokenizer that knows how to decode only."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(self.words[token] for token in ids)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("It rains.", {"sentence"}),
        ('He said "no!"', {"sentence"}),
        ("Really?) ", {"sentence"}),
        ("It rains", set()),
        ("a, b", set()),
        ("Wait\u2026", {"sentence"}),
        ("\u4eca\u65e5\u306f\u96e8\u3002", {"sentence"}),
        ("\u771f\u7684\u5417\uff1f\u300d", {"sentence"}),
        ("\u4eca\u65e5\u306f", set()),
        ("end.\n", {"sentence", "line"}),
        ("end.\n\n", {"sentence", "paragraph", "line"}),
        ("end.\n \n", {"sentence", "paragraph", "line"}),
        ("x = 1\n    ", {"sentence", "line"}),
        ("Steps:\n1.", {"sentence", "list"}),
        ("Steps:\n- ", {"list"}),
        ("Steps:\n\u2022 ", {"list"}),
        ("a - ", set()),
        ("in 1999", set()),
    ],
)
def test_positions_are_known_by_the_text_before_them(text: str, kinds: set[str]) -> None:
    boundaries = Boundaries(Words(list(text)))
    assert boundaries.after(range(len(text))) == kinds


def test_only_the_last_tokens_count_and_the_first_position_starts_everything() -> None:
    boundaries = Boundaries(Words(["a", ".", "\n"]))
    assert boundaries.after([]) == {"sentence", "paragraph", "line"}
    assert boundaries.after([1, *[0] * 20]) == set()
    assert boundaries.after([*[0] * 20, 1]) == {"sentence"}
    assert boundaries.after([0, 2, 2]) == {"sentence", "paragraph", "line"}


def walked(policy: Policy, chances: list[float], entropy: float = 1.0) -> list[float]:
    """Factors at each position of a text whose tokens have these probabilities, and at the one after it."""
    walk, found = Walk(policy), []
    for chance in chances:
        found.append(walk.factor(entropy, NOTHING))
        walk = walk.then(5, math.log(chance), entropy)
    return [*found, walk.factor(entropy, NOTHING)]


def test_the_first_tokens_are_exact() -> None:
    assert walked(Policy(exact_prefix=2), [0.5] * 3) == [0, 0, 1, 1]


def test_recovery_follows_a_row_of_unlikely_tokens_and_ends() -> None:
    policy = Policy(recovery=Recovery(after=2, floor=0.1, tokens=2))
    assert walked(policy, [0.01, 0.5, 0.01, 0.01, 0.5, 0.5, 0.5]) == [1, 1, 1, 1, 0, 0, 1, 1]
    assert walked(policy, [0.01, 0.01, 0.01, 0.01, 0.5]) == [1, 1, 0, 0, 0, 0]  # two more on the way: again
    assert walked(policy, [0.1] * 4) == [1] * 5  # at the floor is not under it


def test_relaxation_is_in_proportion_to_entropy_up_to_a_limit() -> None:
    for nats, factor in ((0.0, 0.0), (0.5, 0.25), (2.0, 1.0), (7.0, 1.0)):
        assert Walk(Policy(adaptive=2.0)).factor(nats, NOTHING) == pytest.approx(factor)


def test_the_guard_ends_relaxation_for_good_once_surprise_has_drifted() -> None:
    likely, unlikely = math.exp(-1.0), math.exp(-3.1)  # surprise equal to the entropy of 1, and 2 nats over it and the slack
    policy = Policy(guard=3.0)
    assert walked(policy, [likely] * 50) == [1] * 51
    assert walked(policy, [unlikely, unlikely, likely, likely]) == [1, 1, 0, 0, 0]
    assert walked(policy, [unlikely, *[likely] * 30, unlikely, likely]) == [1] * 33 + [1]  # it drains in between
    assert walked(policy, [unlikely, math.exp(-0.1), unlikely, unlikely]) == [1, 1, 1, 1, 0]


def test_a_policy_looks_at_the_laws_only_as_far_as_it_asks() -> None:
    p = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    plain, drifting, tokens = Policy(protect=("sentence",), exact_prefix=4), Policy(guard=5.0), [[7], [3, 9]]
    assert Seen(p, plain).log_p(tokens) == [[0.0], [0.0, 0.0]] and Seen(p, plain).entropies == [[0.0] * 3] * 2
    seen = Seen(p, drifting)
    assert torch.tensor(seen.entropies) == pytest.approx(entropy(p), abs=1e-6)
    first, second = seen.log_p(tokens)
    assert first[0] == pytest.approx(float(p[0, 0, 7].log())) and second[1] == pytest.approx(float(p[1, 1, 9].log()))
    assert Seen(p, Policy(adaptive=1.0)).entropies == seen.entropies
    assert Seen(p, Policy(recovery=Recovery())).log_p(tokens)[1] == second


def test_a_protected_position_is_exact_and_others_are_not() -> None:
    walk = Walk(Policy(protect=("sentence", "list")))
    assert [walk.factor(1.0, frozenset(kinds)) for kinds in ((), ("line",), ("list",), ("line", "sentence"))] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"protect": ["phrase"]}, "policy.protect.0 is 'phrase'"),
        ({"exact_prefix": -1}, "policy.exact_prefix is -1"),
        ({"adaptive": 0.0}, "policy.adaptive is 0.0"),
        ({"recovery": {"floor": 1.5}}, "policy.recovery.floor is 1.5"),
        ({"gaurd": 1.0}, "unknown key 'policy.gaurd'. Did you mean 'guard'"),
    ],
)
def test_wrong_values_are_named(policy: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as problem:
        make_settings(policy=policy)
    assert told in str(problem.value)


# the likelihood against the real loop

SIZE, LENGTH = 5, 4
WORDS = Words(["a", ".", "b", "\n", "c"])
PROMPT = [3, 4, 2, 3, 4, 2, 3]
POLICIES = {
    "protect": Policy(protect=("sentence",)),
    "prefix": Policy(exact_prefix=2),
    "recovery": Policy(recovery=Recovery(after=1, floor=0.12, tokens=1)),
    "adaptive": Policy(adaptive=5.0),
    "guard": Policy(guard=0.2),
    "all": Policy(
        protect=("line",), exact_prefix=1, recovery=Recovery(after=1, floor=0.05, tokens=2), adaptive=1.5, guard=0.9
    ),
}


@pytest.fixture(scope="module")
def traces() -> dict[bool, tuple[Runner, Any, Trace]]:
    """By whether the draft is a model: target, draft, and the trace of every text of LENGTH tokens after PROMPT."""
    model = tiny_model("llama", seed=0, vocab_size=SIZE, scale=6.0)
    target, draft = Runner(model), Runner(noisy(model, 0.4), "draft")
    every = [list(text) for text in itertools.product(range(SIZE), repeat=LENGTH)]
    texts = Texts([PROMPT] * len(every), every, [True] * len(every))
    found: dict[bool, tuple[Runner, Any, Trace]] = {}
    for dense in (False, True):
        tracer = Tracer(Sampling(), 2, boundaries=Boundaries(WORDS))
        trace = tracer.begin(texts, "fp32")
        tracer.add(trace, "fp32", target, draft if dense else None, taus=(1.0,))
        found[dense] = target, ModelDraft(draft, SIZE) if dense else NgramDraft(), trace
    return found


def settings_of(dense: bool, policy: Policy, rule: str = "optimal", alpha: float = 0.7) -> Settings:
    return Settings(
        rule=rule,  # type: ignore[arg-type]
        alpha=alpha,
        draft_length=2,
        ngram=None if dense else NgramSettings(),
        policy=policy,
    )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_the_likelihood_sums_to_one_and_is_what_the_loop_emits(
    traces: dict[bool, tuple[Runner, Any, Trace]], name: str, dense: bool
) -> None:
    target, draft, trace = traces[dense]
    settings = settings_of(dense, POLICIES[name])
    replayed = Replay(trace).run(settings)
    plain = trace.plain["fp32"].reshape(-1, LENGTH).sum(1)
    wanted = np.exp(plain - replayed.log_ratio)
    assert wanted.sum() == pytest.approx(1.0, abs=2e-3 if dense else 1e-6)
    whole = np.exp(plain - Replay(trace).run(settings_of(dense, Policy())).log_ratio)
    assert 0.5 * np.abs(whole - wanted).sum() > 0.01  # the factor does something here
    count, seen = 8_000, np.zeros(len(wanted))
    job = Job(settings, Sampling(), Stopping(LENGTH), torch.Generator().manual_seed(1), boundaries=Boundaries(WORDS))
    *_, rows = decode(target, draft, [PROMPT] * count, job, Stats())
    for row in rows:
        seen[sum(token * SIZE**place for place, token in enumerate(reversed(row.output)))] += 1
    likely = wanted * count >= 5
    rest = [seen[~likely].sum()], [wanted[~likely].sum() * count]
    got, expected = np.concatenate([seen[likely], rest[0]]), np.concatenate([wanted[likely] * count, rest[1]])
    statistic = ((got - expected) ** 2 / expected.clip(1e-9)).sum()
    assert statistic < len(got) + 4.5 * math.sqrt(2 * len(got))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_never_raises_the_loss(traces: dict[bool, tuple[Runner, Any, Trace]], name: str) -> None:
    _, _, trace = traces[True]
    relaxed = Replay(trace).run(settings_of(True, Policy()))
    guarded = Replay(trace).run(settings_of(True, POLICIES[name]))
    weight = np.exp(trace.plain["fp32"].reshape(-1, LENGTH).sum(1))  # over all texts: the divergence itself
    assert 0 < float(weight @ guarded.log_ratio) < float(weight @ relaxed.log_ratio)


def test_no_protected_position_is_ever_relaxed(
    traces: dict[bool, tuple[Runner, Any, Trace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = traces[True]
    boundaries, seen = Boundaries(WORDS), {True: 0, False: 0}
    rounds = decoding.Batch.round
    now: list[Any] = []

    def spy(batch: decoding.Batch) -> Any:
        now[:] = [list(row.output) for row in batch.rows]
        return rounds(batch)

    def check(p: Any, proposal: Any, settings: Settings, alpha: torch.Tensor, *rest: Any, **options: Any) -> Any:
        for row, output in enumerate(now):
            for column in range(proposal.lengths[row]):
                protected = "sentence" in boundaries.after(output + proposal.tokens[row, :column].tolist())
                assert float(alpha[row, column]) == pytest.approx(0.0 if protected else settings.alpha)
                seen[protected] += 1
        return judge(p, proposal, settings, alpha, *rest, **options)

    judge = decoding.judge
    monkeypatch.setattr(decoding, "judge", check)
    monkeypatch.setattr(decoding.Batch, "round", spy)
    settings = settings_of(True, Policy(protect=("sentence",)))
    job = Job(settings, Sampling(), Stopping(24), torch.Generator().manual_seed(1), boundaries=boundaries)
    *_, rows = decode(target, draft, [PROMPT, PROMPT[:3], [1]], job, Stats())
    assert min(seen.values()) > 5
    marks = [(row.relaxed[place], boundaries.after(row.output[:place])) for row in rows for place in range(24)]
    assert any(relaxed for relaxed, _ in marks)
    assert not any(relaxed for relaxed, kinds in marks if "sentence" in kinds)


def test_a_trace_keeps_what_policies_need(traces: dict[bool, tuple[Runner, Any, Trace]], tmp_path: Path) -> None:
    _, _, trace = traces[False]
    save_trace(tmp_path / "trace.safetensors", {"search": trace})
    again = load_trace(tmp_path / "trace.safetensors")["search"]
    settings = settings_of(False, POLICIES["all"])
    assert np.array_equal(Replay(again).run(settings).log_ratio, Replay(trace).run(settings).log_ratio)


def test_protection_without_a_tokenizer_is_refused(traces: dict[bool, tuple[Runner, Any, Trace]]) -> None:
    target, draft, trace = traces[False]
    settings = settings_of(False, POLICIES["protect"])
    job = Job(settings, Sampling(), Stopping(4), torch.Generator())
    with pytest.raises(ConfigurationError, match="protect is sentence"):
        next(decode(target, draft, [PROMPT], job, Stats()))
    bare = Trace(trace.texts, "fp32", trace.chain, trace.drafted, trace.lookup, {}, trace.plain, trace.entropy)
    with pytest.raises(ConfigurationError, match="made without a tokenizer"):
        Replay(bare).run(settings)


def test_lossless_decoding_is_untouched_by_a_policy(traces: dict[bool, tuple[Runner, Any, Trace]]) -> None:
    _, _, trace = traces[True]
    exact = Replay(trace).run(settings_of(True, POLICIES["all"], alpha=0.0))
    assert exact.perplexity_ratio == pytest.approx(1.0, abs=1e-6)
