"""What is searched and what is left out, with its reason; parameters and settings are two views of one configuration."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lossyspec.errors import ConfigurationError
from lossyspec.settings import SOURCES, NgramSettings, Precision, Precisions, Settings
from lossyspec.tuner.config import make_config
from lossyspec.tuner.search_space import SearchSpace, build_space
from lossyspec.tuner.trace import TAUS

ALL: Mapping[Precision, str | None] = {"fp32": None, "bf16": None, "fp16": None}
NO_BF16: Mapping[Precision, str | None] = {"fp32": None, "bf16": "compute capability 7.5 is under 8.0", "fp16": None}


def space_of(
    dense: bool = False,
    greedy: bool = False,
    unsupported: Mapping[Precision, str | None] = ALL,
    unsuitable: str | None = None,
    **config: Any,
) -> SearchSpace:
    return build_space(make_config(**config), TAUS if dense else (), greedy, unsupported, unsuitable)


SPACES = {
    "ngram": space_of(),
    "dense": space_of(dense=True, draft="some/model"),
    "greedy ngram": space_of(greedy=True),
    "greedy dense": space_of(dense=True, greedy=True),
    "lossless only": space_of(unsuitable="it is wrong"),
    "dense, one of all": space_of(dense=True, rules=("priced",), precisions=("bf16",), batch_sizes=(2,), max_draft_length=1),
}
SPACES["compiled"] = space_of(dense=True, compiles=("inductor",))
by_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def random_params(space: SearchSpace, rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, kind in space.distributions.items():
        if isinstance(kind, CategoricalDistribution):
            params[name] = rng.choice(kind.choices)
        elif isinstance(kind, IntDistribution):
            params[name] = rng.randint(kind.low, kind.high)
        else:
            assert isinstance(kind, FloatDistribution)
            assert kind.step is not None
            params[name] = kind.low + kind.step * rng.randint(0, round((kind.high - kind.low) / kind.step))
    return params


def params_of(space: SearchSpace, settings: Settings, batch: int) -> dict[str, Any]:
    return space.params(
        draft_length=settings.draft_length,
        precision=settings.precision.target,
        batch_size=batch,
        theta=settings.theta,
        alpha=settings.alpha,
        tau=settings.tau,
        rule=settings.rule if settings.alpha > 0 else None,
        source=settings.source,
        policy=settings.policy,
        compiled=settings.compile,
        min_match=settings.ngram.min_match if settings.source == "mixed" and settings.ngram else 2,
    )


@by_space
def test_settings_and_parameters_are_two_views_of_one_configuration(space: SearchSpace) -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(200):
        settings, batch = space.settings(random_params(space, rng))
        again, same_batch = space.settings(params_of(space, settings, batch))
        assert (again, same_batch) == (settings, batch)
        assert batch in space.batch_sizes
        assert settings.draft_length <= space.max_draft_length
        seen.add(settings.draft_length)
    assert seen == set(range(space.max_draft_length + 1))


@by_space
def test_every_configuration_that_is_enqueued_lies_in_the_space(space: SearchSpace) -> None:
    rng = random.Random(1)
    for _ in range(100):
        params = params_of(space, *space.settings(random_params(space, rng)))
        assert params.keys() == space.distributions.keys()
        for name, kind in space.distributions.items():
            assert kind._contains(kind.to_internal_repr(params[name])), (name, params[name])


@by_space
def test_optuna_is_asked_for_exactly_the_distributions_of_the_space(space: SearchSpace) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask()
    params = space.suggest(trial)
    assert trial.params == params
    assert dict(trial.distributions) == space.distributions


@by_space
def test_plain_decoding_has_neutral_values_whatever_else_was_drawn(space: SearchSpace) -> None:
    rng = random.Random(2)
    for _ in range(30):
        settings, _ = space.settings({**random_params(space, rng), "draft_length": 0})
        plain = (settings.rule, settings.alpha, settings.theta, settings.tau)
        assert plain == ("exact", 0.0, 0.0, 1.0)
        assert settings.lossless


def test_a_compiler_is_searched_beside_none_and_cuda_graphs_are_of_all_settings() -> None:
    space = space_of(compiles=("tensorrt", "off"), cuda_graphs=False)
    assert space.compiles == ("off", "tensorrt")
    params = space.params(draft_length=0, precision="fp32", batch_size=1, compiled="tensorrt")
    settings, _ = space.settings(params)
    assert (settings.compile, settings.cuda_graphs) == ("tensorrt", False)
    assert "compile" not in space_of().distributions
    assert space_of().settings(space_of().params(draft_length=0, precision="fp32", batch_size=1))[0].cuda_graphs


def test_alpha_0_is_the_exact_rule_and_an_explicit_zero_is_kept() -> None:
    space = SPACES["dense"]
    params = space.params(draft_length=3, precision="fp32", batch_size=4, theta=0.0, alpha=0.0, tau=0.5, rule="priced")
    settings, batch = space.settings(params)
    wanted = Settings(
        rule="exact", alpha=0.0, draft_length=3, theta=0.0, tau=0.5, precision=Precisions(target="fp32", draft="fp32")
    )
    assert (settings, batch) == (wanted, 4)
    settings, _ = space.settings({**params, "alpha": 0.01 + 0.02})
    assert (settings.rule, settings.alpha) == ("priced", 0.03)


def test_prompt_lookup_has_no_weights_and_no_temperature_a_model_has_both() -> None:
    ngram, _ = SPACES["ngram"].settings(SPACES["ngram"].params(draft_length=2, precision="bf16", batch_size=1))
    assert ngram.precision == Precisions(target="bf16", draft=None)
    assert ngram.ngram == NgramSettings()
    assert "tau" not in SPACES["ngram"].distributions
    assert SPACES["ngram"].excluded["tau"] == "the n-gram draft has no temperature"
    assert "lanes" not in SPACES["ngram"].excluded
    assert "lanes" not in SPACES["dense"].distributions
    assert "measured on no device" in SPACES["dense"].excluded["lanes"]
    assert SPACES["dense"].distributions["tau"] == CategoricalDistribution(TAUS)
    assert "tau" not in SPACES["greedy dense"].distributions
    dense, _ = SPACES["dense"].settings(SPACES["dense"].params(draft_length=2, precision="bf16", batch_size=1))
    assert dense.precision == Precisions(target="bf16", draft="bf16")
    assert dense.ngram is None


def test_with_a_draft_loaded_prompt_lookup_and_both_in_turn_are_choices_too() -> None:
    space = SPACES["dense"]
    sure: dict[str, Any] = {"draft_length": 3, "precision": "fp32", "batch_size": 1, "tau": 0.7}
    found = {source: space.settings(space.params(**sure, source=source, min_match=3))[0] for source in SOURCES}
    assert [found[source].source for source in SOURCES] == list(SOURCES)
    assert [found[source].ngram for source in SOURCES] == [None, NgramSettings(), NgramSettings(min_match=3)]
    assert [found[source].tau for source in SOURCES] == [0.7, 1.0, 0.7]  # prompt lookup does not sample
    assert not {"source", "min_match"} & SPACES["ngram"].distributions.keys()


def test_the_thetas_of_prompt_lookup_lie_between_its_confidences() -> None:
    theta = SPACES["ngram"].distributions["theta"]
    assert isinstance(theta, CategoricalDistribution)
    confidences = [0.0] + [length / (length + 1) for length in (1, 2, 3, 4)]
    kept = [sum(confidence >= level for confidence in confidences[1:]) for level in theta.choices]
    assert kept == [4, 3, 2, 1]  # each leaves out one length of match more


# what is left out


def test_rules_with_the_same_law_are_searched_once_and_the_twin_is_named() -> None:
    ngram = SPACES["ngram"]
    assert ngram.rules == ("optimal", "priced")
    assert ngram.excluded["rule mixture"] == "the same law as optimal for a draft that proposes one token for certain"
    assert SPACES["dense"].rules == ("optimal", "mixture", "priced")
    assert "rule mixture" not in SPACES["dense"].excluded
    assert space_of(rules=("mixture",)).rules == ("mixture",)


@pytest.mark.parametrize("dense", [False, True])
def test_at_temperature_0_one_rule_stands_for_all(dense: bool) -> None:
    space = space_of(dense=dense, greedy=True)
    assert space.rules == ("optimal",)
    for rule in ("mixture", "priced"):
        assert space.excluded[f"rule {rule}"] == "at temperature 0 all rules accept alike"


def test_exact_is_no_relaxation_and_alone_leaves_nothing_to_relax() -> None:
    assert space_of(rules=("exact", "priced")).rules == ("priced",)
    alone = space_of(rules=("exact",))
    assert (alone.rules, alone.relax) == ((), False)
    assert not {"rule", "alpha"} & alone.distributions.keys()
    settings, _ = alone.settings(alone.params(draft_length=3, precision="fp32", batch_size=1))
    assert settings.lossless


def test_typical_needs_a_draft_that_proposes_one_token_for_certain() -> None:
    with pytest.raises(
        ConfigurationError, match=r"typical cannot be replayed with a draft model; allowed with --draft ngram"
    ):
        space_of(dense=True, rules=("typical", "optimal"))
    assert "typical" in space_of(rules=("typical", "optimal")).rules


def test_an_unsuitable_task_has_no_alpha_unless_forced() -> None:
    space = space_of(task="math", unsuitable="one wrong step makes it wrong")
    assert not space.relax
    assert not {"rule", "alpha"} & space.distributions.keys()
    reason = space.excluded["lossy rules"]
    assert reason == "task math is lossless only: one wrong step makes it wrong (--force relaxes it all the same)"
    for params in (random_params(space, random.Random(seed)) for seed in range(20)):
        assert space.settings(params)[0].lossless
    forced = space_of(task="math", unsuitable="one wrong step makes it wrong", force=True)
    assert forced.relax
    assert {"rule", "alpha"} <= forced.distributions.keys()
    assert "lossy rules" not in forced.excluded


def test_Q7_a_precision_that_the_hardware_lacks_is_left_out_with_the_reason() -> None:
    space = space_of(unsupported=NO_BF16)
    assert space.precisions == ("fp32", "fp16")
    assert space.distributions["precision"] == CategoricalDistribution(("fp32", "fp16"))
    assert space.excluded["precision bf16"] == "compute capability 7.5 is under 8.0"


def test_Q7_a_precision_asked_for_by_name_is_a_configuration_error_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"bf16 was asked for: compute capability 7.5 is under 8.0") as caught:
        space_of(unsupported=NO_BF16, precisions=("fp32", "bf16"))
    assert caught.value.exit_code == 2
    chosen = space_of(unsupported=NO_BF16, precisions=("fp16",))
    assert chosen.precisions == ("fp16",)
    assert not [name for name in chosen.excluded if name.startswith("precision")]


# identity


def test_the_space_is_told_as_plain_json() -> None:
    told = json.loads(json.dumps(SPACES["dense"].describe()))
    assert told.keys() == SPACES["dense"].distributions.keys()
    assert told["rule"]["attributes"]["choices"] == ["optimal", "mixture", "priced"]
    assert told["draft_length"]["attributes"]["high"] == 8


def test_O15_the_digest_follows_every_choice_and_the_context() -> None:
    spaces = [
        *SPACES.values(),
        space_of(batch_sizes=(1, 2)),
        space_of(max_draft_length=7),
        space_of(precisions=("fp32",)),
        space_of(rules=("priced",)),
    ]
    digests = [space.digest("device", "model") for space in spaces]
    assert len(set(digests)) == len(spaces)
    space = SPACES["ngram"]
    assert space.digest("device", "model") == space_of().digest("device", "model")
    assert len({space.digest(*context) for context in ((), ("a",), ("a", "b"), ("ab",), ("b", "a"))}) == 5


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from lossyspec.tuner.config import make_config; from lossyspec.tuner.search_space import build_space; "
        "print(build_space(make_config(), (), False, {'fp32': None, 'bf16': None, 'fp16': None}, None).digest('x'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == SPACES["ngram"].digest("x")
