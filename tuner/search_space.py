"""What the search may choose from, on this hardware, with this draft; and what was left out, with the reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from lossyspec.errors import ConfigurationError
from lossyspec.settings import (
    SOURCES,
    Attention,
    Compile,
    NgramSettings,
    Policy,
    Precision,
    Precisions,
    Recovery,
    Rule,
    Settings,
    Source,
)

from .config import SearchConfig

_DEFAULT_RULES: tuple[Rule, ...] = ("optimal", "mixture", "priced")
#: thresholds between the confidences 1/2, 2/3, 3/4, 4/5 of matches of 1, 2, 3, 4 tokens
_NGRAM_THETAS = (0.0, 0.6, 0.7, 0.78)
#: shortest match after which a mixed round is prompt lookup
_MIXED_MATCHES = (2, 4)
#: why lanes stay off
_NO_LANES = (
    "the cost table times draft and target one after the other; what they gain beside each other has been measured on no "
    "device yet: set it by hand where benchmarks/lanes.py shows a gain"
)
_NGRAM_TWINS: dict[Rule, Rule] = {"mixture": "optimal"}


#: what each factor on alpha may be; 0 and `off` leave it out
_POLICY: dict[str, tuple[Any, ...]] = {
    "protect": ("off", "sentence", "sentence paragraph list"),
    "exact_prefix": (0, 4, 16),
    "recovery": ("off", "on"),
    "adaptive": (0.0, 1.0, 2.0),
    "guard": (0.0, 10.0),
}


def _policy(params: Mapping[str, Any]) -> Policy:
    return Policy(
        protect=tuple(params["protect"].split()) if params["protect"] != "off" else (),
        exact_prefix=params["exact_prefix"],
        recovery=Recovery() if params["recovery"] == "on" else None,
        adaptive=params["adaptive"] or None,
        guard=params["guard"] or None,
    )


def _policy_params(policy: Policy) -> dict[str, Any]:
    return {
        "protect": " ".join(policy.protect) or "off",
        "exact_prefix": policy.exact_prefix,
        "recovery": "on" if policy.recovery else "off",
        "adaptive": policy.adaptive or 0.0,
        "guard": policy.guard or 0.0,
    }


@dataclass(frozen=True)
class SearchSpace:
    """The choices. taus: draft temperatures, none when the draft does not sample. sources: who may draft, if more than
    prompt lookup. attentions: by name; all of the draft's side where the target drafts itself. excluded: the reason by
    name. compiles: what the target's passes may be compiled by. cuda_graphs: of all settings."""

    rules: tuple[Rule, ...]
    precisions: tuple[Precision, ...]
    batch_sizes: tuple[int, ...]
    max_draft_length: int
    taus: tuple[float, ...]
    relax: bool
    greedy: bool
    excluded: dict[str, str]
    sources: tuple[Source, ...] = SOURCES
    attentions: tuple[str, ...] = ("dense",)
    compiles: tuple[Compile, ...] = ("off",)
    cuda_graphs: bool = True

    @property
    def dense(self) -> bool:
        """Whether the draft samples from a full q."""
        return bool(self.taus)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameters as Optuna knows them."""
        found: dict[str, BaseDistribution] = {
            "draft_length": IntDistribution(0, self.max_draft_length),
            "precision": CategoricalDistribution(self.precisions),
            "batch_size": CategoricalDistribution(self.batch_sizes),
        }
        if self.attentions != ("dense",):
            found["attention"] = CategoricalDistribution(self.attentions)
        if self.compiles != ("off",):
            found["compile"] = CategoricalDistribution(self.compiles)
        if self.relax:
            found["rule"] = CategoricalDistribution(self.rules)
            found["alpha"] = FloatDistribution(0.0, 1.0, step=0.01)
            found |= {name: CategoricalDistribution(choices) for name, choices in _POLICY.items()}
        if self.dense:
            found["source"] = CategoricalDistribution(self.sources)
            found["min_match"] = IntDistribution(*_MIXED_MATCHES)
            found["theta"] = FloatDistribution(0.0, 0.9, step=0.05)
            if not self.greedy:
                found["tau"] = CategoricalDistribution(self.taus)
        else:
            found["theta"] = CategoricalDistribution(_NGRAM_THETAS)
        return found

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Asks the sampler for each parameter."""
        # one call for all of them: Trial has no public way to suggest from a distribution but by its kind
        params: dict[str, Any] = {}
        for name, kind in self.distributions.items():
            if isinstance(kind, CategoricalDistribution):
                params[name] = trial.suggest_categorical(name, kind.choices)
            elif isinstance(kind, IntDistribution):
                params[name] = trial.suggest_int(name, kind.low, kind.high)
            elif isinstance(kind, FloatDistribution):
                params[name] = trial.suggest_float(name, kind.low, kind.high, step=kind.step)
        return params

    def settings(self, params: Mapping[str, Any]) -> tuple[Settings, int]:
        """Settings and batch size of parameters. What is of no effect gets its neutral value."""
        length, alpha = int(params["draft_length"]), round(float(params.get("alpha", 0.0)), 4)
        if length == 0:
            alpha = 0.0
        precision = params["precision"]
        source: Source = params.get("source", "draft") if length else "draft"
        drawn = length > 0 and source != "ngram"
        attention = Attention.named(params.get("attention", "dense"))
        if attention.side == "draft" and not drawn:
            attention = Attention()
        return Settings(
            rule=params["rule"] if alpha > 0 else "exact",
            alpha=alpha,
            draft_length=length,
            theta=float(params["theta"]) if length else 0.0,
            tau=float(params.get("tau", 1.0)) if drawn else 1.0,
            precision=Precisions(target=precision, draft=precision if self.dense else None),
            source=source,
            ngram=self._ngram(source, params),
            policy=_policy(params) if alpha > 0 else Policy(),
            attention=attention,
            compile=params.get("compile", "off"),
            cuda_graphs=self.cuda_graphs,
        ), int(params["batch_size"])

    def _ngram(self, source: Source, params: Mapping[str, Any]) -> NgramSettings | None:
        """Prompt lookup's own settings, where it takes part."""
        if self.dense and source == "draft":
            return None
        return NgramSettings(min_match=int(params["min_match"])) if source == "mixed" else NgramSettings()

    def params(
        self,
        *,
        draft_length: int,
        precision: str,
        batch_size: int,
        theta: float = 0.0,
        alpha: float = 0.0,
        tau: float = 1.0,
        rule: str | None = None,
        source: Source = "draft",
        min_match: int = _MIXED_MATCHES[0],
        policy: Policy | None = None,
        attention: str | None = None,
        compiled: Compile = "off",
    ) -> dict[str, Any]:
        """Parameters of a configuration that is enqueued."""
        values = {
            "draft_length": draft_length,
            "precision": precision,
            "batch_size": batch_size,
            "theta": theta,
            "alpha": alpha,
            "tau": tau,
            "rule": rule or (self.rules[0] if self.rules else None),
            "source": source,
            "min_match": min_match,
            "attention": attention if attention in self.attentions else self.attentions[0],
            "compile": compiled,
            **_policy_params(policy or Policy()),
        }
        return {name: values[name] for name in self.distributions}

    def describe(self) -> dict[str, Any]:
        """The space as JSON data."""
        return {name: json.loads(_as_json(kind)) for name, kind in self.distributions.items()}

    def as_stored(self, described: Mapping[str, Any], excluded: dict[str, str]) -> SearchSpace:
        """The space with the precisions and attentions that a run had left, by what `describe` said of it then."""
        left = {name: described[name]["attributes"]["choices"] for name in ("precision", "attention") if name in described}
        precisions = tuple(name for name in self.precisions if name in left["precision"])
        return replace(self, precisions=precisions, attentions=tuple(left.get("attention", ["dense"])), excluded=excluded)

    def digest(self, *context: str) -> str:
        """A hash of the space and of what else must not change within a study."""
        text = json.dumps([self.describe(), list(context)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _as_json(kind: BaseDistribution) -> str:
    from optuna.distributions import distribution_to_json

    return distribution_to_json(kind)


def build_space(
    config: SearchConfig,
    taus: tuple[float, ...],
    greedy: bool,
    unsupported: Mapping[Precision, str | None],
    unsuitable: str | None,
) -> SearchSpace:
    """The space for a search. taus: of the draft, none if it does not sample. unsupported: the reason by precision, None
    where it runs. unsuitable: why not to relax.

    Raises ConfigurationError when a precision was asked for by name and the hardware lacks it, or a rule cannot be used.
    """
    excluded: dict[str, str] = {}
    for precision in config.precisions or ():
        if (reason := unsupported.get(precision)) is not None:
            raise ConfigurationError(f"precision {precision} was asked for: {reason}")
    excluded.update(
        {
            f"precision {name}": reason
            for name, reason in unsupported.items()
            if reason is not None and config.precisions is None
        }
    )
    precisions = config.precisions or tuple(name for name, reason in unsupported.items() if reason is None)
    relax = unsuitable is None or config.force
    if not relax:
        excluded["lossy rules"] = f"task {config.task} is lossless only: {unsuitable} (--force relaxes it all the same)"
    rules: tuple[Rule, ...] = tuple(rule for rule in config.rules or _DEFAULT_RULES if rule != "exact")
    if greedy and rules:
        excluded.update({f"rule {rule}": "at temperature 0 all rules accept alike" for rule in rules[1:]})
        rules = rules[:1]
    elif not taus:
        for rule, twin in _NGRAM_TWINS.items():
            if rule in rules and twin in rules:
                excluded[f"rule {rule}"] = f"the same law as {twin} for a draft that proposes one token for certain"
                rules = tuple(name for name in rules if name != rule)
    elif "typical" in rules:
        raise ConfigurationError("rule typical cannot be replayed with a draft model; allowed with --draft ngram")
    if not taus:
        excluded["tau"] = "the n-gram draft has no temperature"
    else:
        excluded["lanes"] = _NO_LANES
    return SearchSpace(
        rules,
        tuple(precisions),
        config.batch_sizes,
        config.max_draft_length,
        taus,
        relax and bool(rules),
        greedy,
        excluded,
        compiles=tuple(dict.fromkeys(("off", *config.compiles))),
        cuda_graphs=config.cuda_graphs,
    )
