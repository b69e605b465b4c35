"""The search itself: Optuna asks and is told, every finished or failed trial is on the disk before the next one."""

from __future__ import annotations

import itertools
import logging
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState, create_trial

from lossyspec.errors import ConfigurationError, EveryTrialFailed, LossyspecError
from lossyspec.records import TrialRecord
from lossyspec.settings import Settings

from .objective import Evaluated, Objective
from .search_space import SearchSpace

logger = logging.getLogger("lossytune")

DIRECTIONS = ("maximize", "minimize")
SAMPLER = "optuna TPE, multi-objective, constrained"
#: random trials before the sampler learns; with fewer it settled on one precision too early
STARTUP_TRIALS = 60
#: shares of alpha that are tried first, at the best lossless draft length
FIRST_ALPHAS = (0.1, 0.3, 0.5)
#: this many failures of one kind in a row end a search
ALIKE_FAILURES = 5


@dataclass(frozen=True)
class Limits:
    """What makes a configuration infeasible."""

    max_quality_loss: float
    memory_bytes: int | None
    memory_of: Callable[[Settings, int], int]


def kind_of(settings: Settings) -> Literal["plain", "lossless", "lossy"]:
    """plain, lossless or lossy, which a target with sparse attention is at any draft length."""
    if settings.draft_length == 0 and settings.lossless:
        return "plain"
    return "lossless" if settings.lossless else "lossy"


class Study:
    """One Optuna study and its records.

    store(record) is called with every finished or failed trial, in order, before the next one starts.
    """

    def __init__(
        self,
        space: SearchSpace,
        objective: Objective,
        limits: Limits,
        store: Callable[[TrialRecord], None],
        *,
        seed: int,
        name: str,
        storage: str | None = None,
        done: tuple[TrialRecord, ...] = (),
    ) -> None:
        self.space = space
        self.objective = objective
        self.limits = limits
        self.store = store
        self.records: list[TrialRecord] = list(done)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._failures: list[str] = []
        self.study = open_study(name, storage, seed + len(done))
        if storage is None:
            for record in done:  # the records are the truth; the study is only the sampler's memory
                self.study.add_trial(_frozen(record, space))

    def enqueue_baselines(self) -> None:
        """Plain decoding at each precision and batch size, and lossless at its own best draft length, come first."""
        attentions = self.space.attentions if self.space.attentions[0] == "dense" else (None,)
        formats = list(itertools.product(self.space.precisions, attentions, self.space.compiles))
        for batch in self.space.batch_sizes:
            for precision, attention, how in formats:
                plain = self.space.params(
                    draft_length=0, precision=precision, batch_size=batch, attention=attention, compiled=how
                )
                self.study.enqueue_trial(plain, skip_if_exists=True)
        for batch in self.space.batch_sizes:
            lossless = self.best_lossless(batch)
            self.study.enqueue_trial(lossless, skip_if_exists=True)
            for rule, alpha in itertools.product(self.space.rules if self.space.relax else (), FIRST_ALPHAS):
                self.study.enqueue_trial({**lossless, "rule": rule, "alpha": alpha}, skip_if_exists=True)

    def best_lossless(self, batch: int) -> dict[str, Any]:
        """Parameters of the fastest predicted lossless configuration at a batch size, by trying all of the small grid."""
        theta = self.space.distributions["theta"]
        thetas = theta.choices if hasattr(theta, "choices") else (0.0, 0.2, 0.4, 0.6)
        best, params = -1.0, self.space.params(draft_length=1, precision=self.space.precisions[0], batch_size=batch)
        sources = self.space.sources if self.space.dense else ("draft",)
        lengths = range(1, self.space.max_draft_length + 1)
        # with the target's own sparse attention it would not be lossless
        attentions = ("dense",) if self.space.attentions[0] == "dense" else self.space.attentions
        grid = itertools.product(self.space.precisions, lengths, thetas, sources, attentions, self.space.compiles)
        for precision, length, level, source, attention, how in grid:
            tried = self.space.params(
                draft_length=length,
                precision=precision,
                batch_size=batch,
                theta=level,
                source=source,
                attention=attention,
                compiled=how,
            )
            settings, _ = self.space.settings(tried)
            flow = self.objective.replay.run(settings).flow
            speedup = self.objective.predict(settings, flow, batch).speedup
            if speedup > best:
                best, params = speedup, tried
        return params

    def run(self, trials: int, stop: Callable[[], bool], progress: Callable[[int], None] = lambda done: None) -> None:
        """Runs until there are `trials` records or `stop` says so. Raises EveryTrialFailed after a row of like failures."""
        while len(self.records) < trials and not stop():
            trial = self.study.ask()
            record = self._trial(trial)
            self.store(record)
            self.records.append(record)
            if record.state == "failed":
                self.study.tell(trial, state=TrialState.FAIL)
                self._count_failure(record.reason or "")
            else:
                assert record.predicted is not None and record.quality is not None
                self.study.tell(trial, [record.predicted.speedup, record.quality.perplexity_ratio.value])
                self._failures.clear()
            progress(len(self.records))
        if self.records and all(record.state == "failed" for record in self.records):
            raise EveryTrialFailed(f"all {len(self.records)} trials failed; the last one: {self.records[-1].reason}")

    def _count_failure(self, reason: str) -> None:
        self._failures.append(reason)
        last = self._failures[-ALIKE_FAILURES:]
        none_worked = all(record.state == "failed" for record in self.records)
        if none_worked and len(last) == ALIKE_FAILURES and len(set(last)) == 1:
            raise EveryTrialFailed(f"{ALIKE_FAILURES} trials in a row failed alike: {reason}")

    def _trial(self, trial: Trial) -> TrialRecord:
        began = time.perf_counter()
        params = self.space.suggest(trial)
        settings, batch = self.space.settings(params)
        base: dict[str, Any] = {
            "number": len(self.records),
            "kind": kind_of(settings),
            "settings": settings,
            "batch_size": batch,
            "params": params,
        }
        try:
            evaluated = self.objective.evaluate(settings, batch)
        except (ValueError, ArithmeticError, RuntimeError, LossyspecError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, ValueError | LossyspecError):
                reason += f" (at {traceback.extract_tb(problem.__traceback__)[-1].name})"
            return TrialRecord(**base, state="failed", reason=reason, duration_s=time.perf_counter() - began)
        constraints = self._constraints(trial, evaluated, settings, batch)
        broken = [name for name, value in constraints.items() if value > 0]
        return TrialRecord(
            **base,
            state="infeasible" if broken else "complete",
            predicted=evaluated.predicted,
            quality=self.objective.replay.quality(settings, evaluated.replayed, interval=False),
            memory_bytes=self.limits.memory_of(settings, batch),
            constraints=constraints,
            reason=f"over the limit: {', '.join(broken)}" if broken else None,
            duration_s=time.perf_counter() - began,
        )

    def _constraints(self, trial: Trial, evaluated: Evaluated, settings: Settings, batch: int) -> dict[str, float]:
        values = {"quality_loss": evaluated.replayed.perplexity_ratio - 1 - self.limits.max_quality_loss}
        if self.limits.memory_bytes:
            values["memory"] = self.limits.memory_of(settings, batch) / self.limits.memory_bytes - 1
        for name, value in values.items():
            trial.set_constraint(name, value)
        return values


def open_study(name: str, storage: str | None, seed: int) -> optuna.Study:
    """Creates or opens a study. Trials that a dead worker left running are failed, saying so.

    Raises ConfigurationError for a study with other directions, or a storage that cannot be opened.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, sampler=sampler, directions=["maximize", "minimize"], load_if_exists=True
        )
    except Exception as problem:  # the storage's own driver decides the type
        raise ConfigurationError(f"storage {storage!r} cannot be opened: {problem}") from problem
    found = tuple(direction.name.lower() for direction in study.directions)
    if found != DIRECTIONS:
        raise ConfigurationError(f"study {name!r} in {storage!r} has the directions {found}; this search needs {DIRECTIONS}")
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        logger.warning("trial %d of study %s was left running: worker died; it counts as failed", trial.number, name)
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def _frozen(record: TrialRecord, space: SearchSpace) -> optuna.trial.FrozenTrial:
    """A stored trial as the sampler remembers it."""
    if record.state == "failed" or record.predicted is None or record.quality is None:
        return create_trial(state=TrialState.FAIL, params=record.params, distributions=space.distributions)
    return create_trial(
        params=record.params,
        distributions=space.distributions,
        constraints=record.constraints,
        values=[record.predicted.speedup, record.quality.perplexity_ratio.value],
    )
