"""The search on a made-up landscape: what Optuna is told, what is stored, and how failures, limits and resuming go."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import Trial, TrialState

from lossyspec.errors import ConfigurationError, EveryTrialFailed, NoFeasiblePoint
from lossyspec.records import Estimate, Prediction, Quality, TrialRecord
from lossyspec.settings import Settings
from lossyspec.tuner.config import make_config
from lossyspec.tuner.objective import Evaluated, Objective
from lossyspec.tuner.replay import Flow, Replayed
from lossyspec.tuner.search import Search
from lossyspec.tuner.search_space import SearchSpace, build_space
from lossyspec.tuner.selection import pareto, to_confirm
from lossyspec.tuner.store import RunFolder
from lossyspec.tuner.study import ALIKE_FAILURES, DIRECTIONS, FIRST_ALPHAS, Limits, Study, kind_of, open_study

Failing = Callable[[Settings, int], Exception | None]


def space_of(batch_sizes: tuple[int, ...] = (1, 4), **config: Any) -> SearchSpace:
    return build_space(
        make_config(batch_sizes=batch_sizes, **config), (), False, {"fp32": None, "bf16": None, "fp16": "no"}, None
    )


def speed_of(settings: Settings, batch: int) -> float:
    """Best at draft length 3 and theta 0; faster with alpha; slower with a bigger batch; bf16 is 1.2 times faster."""
    length = settings.draft_length
    if length == 0:
        drafting = 1.0
    else:
        drafting = 1.3 - 0.05 * (length - 3) ** 2 - 0.1 * settings.theta - 0.1 * (batch > 1) + 0.5 * settings.alpha
    return max(drafting, 0.1) * (1.2 if settings.precision.target == "bf16" else 1.0) / 1.2


def ratio_of(settings: Settings) -> float:
    return 1.0 if settings.lossless else 1 + 0.2 * settings.alpha**2


@dataclass
class Landscape:
    """An objective and a replay in one, without models."""

    failing: Failing = lambda settings, batch: None
    seen: list[Settings] = field(default_factory=list)
    ratio: Callable[[Settings], float] = ratio_of

    @property
    def replay(self) -> Landscape:
        return self

    def run(self, settings: Settings) -> Replayed:
        drafted = np.eye(settings.draft_length + 1)[-1]
        flow = Flow(1 + settings.draft_length / 2, 0.5, drafted, drafted)
        return Replayed(flow, np.array([100 * math.log(self.ratio(settings))]), np.array([100.0]), 0.1, 0.2, 0.3)

    def predict(self, settings: Settings, flow: Flow, batch: int) -> Prediction:
        speed = speed_of(settings, batch)
        return Prediction(
            speedup=speed,
            tokens_per_s=speed * 10,
            tokens_per_round=flow.tokens_per_round,
            drafted_per_round=flow.drafted_per_round,
            acceptance=flow.acceptance,
            round_s=0.1,
            plain_round_s=0.1,
        )

    def evaluate(self, settings: Settings, batch: int) -> Evaluated:
        self.seen.append(settings)
        if (problem := self.failing(settings, batch)) is not None:
            raise problem
        replayed = self.run(settings)
        return Evaluated(replayed, self.predict(settings, replayed.flow, batch))

    def quality(self, settings: Settings, replayed: Replayed, interval: bool = True) -> Quality:
        assert not interval
        return Quality(
            perplexity_ratio=Estimate(value=replayed.perplexity_ratio),
            tokens=100,
            texts=1,
            corpus="target_samples",
            tv=replayed.tv,
            kl_forward=replayed.kl_forward,
            kl_reverse=replayed.kl_reverse,
            certificate=None,
        )


def make_study(
    space: SearchSpace | None = None,
    objective: Any = None,
    store: Callable[[TrialRecord], None] = lambda record: None,
    loss: float = 0.05,
    memory: int | None = None,
    memory_of: Callable[[Settings, int], int] = lambda settings, batch: 100 * batch,
    seed: int = 0,
    name: str = "test",
    **values: Any,
) -> Study:
    return Study(
        space or space_of(),
        objective or Landscape(),
        Limits(loss, memory, memory_of),
        store,
        seed=seed,
        name=name,
        **values,
    )


def never() -> bool:
    return False


def failing_when(yes: Callable[[Settings], bool], problem: Exception) -> Failing:
    return lambda settings, batch: problem if yes(settings) else None


def told(study: Study) -> list[optuna.trial.FrozenTrial]:
    return study.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING))


# what comes first, and what is stored


def test_plain_decoding_at_each_precision_and_batch_comes_first_then_lossless_then_first_alphas() -> None:
    study = make_study()
    study.enqueue_baselines()
    study.run(4 + 2 * (1 + 2 * len(FIRST_ALPHAS)), never)
    plain, rest = study.records[:4], study.records[4:]
    assert [record.kind for record in plain] == ["plain"] * 4
    assert [(record.batch_size, record.settings.precision.target) for record in plain] == [
        (1, "fp32"), (1, "bf16"), (4, "fp32"), (4, "bf16"),
    ]  # fmt: skip
    for batch, part in ((1, rest[:7]), (4, rest[7:])):
        assert part[0].kind == "lossless"
        assert {record.batch_size for record in part} == {batch}
        assert {record.settings.draft_length for record in part} == {3}
        assert {record.settings.precision.target for record in part} == {"bf16"}
        assert {record.settings.theta for record in part} == {0.0}
        wanted = [(rule, alpha) for rule in ("optimal", "priced") for alpha in FIRST_ALPHAS]
        assert [(record.settings.rule, record.settings.alpha) for record in part[1:]] == wanted


def test_a_task_that_is_not_relaxed_starts_with_plain_and_lossless_alone() -> None:
    space = build_space(make_config(batch_sizes=(1,), task="math"), (), False, {"fp32": None}, "it is wrong")
    study = make_study(space)
    study.enqueue_baselines()
    study.run(20, never)
    assert [record.kind for record in study.records[:2]] == ["plain", "lossless"]
    assert "lossy" not in {record.kind for record in study.records}


def test_best_lossless_is_the_best_of_its_whole_grid() -> None:
    study = make_study(space_of(max_draft_length=6))
    params = study.best_lossless(4)
    settings, batch = study.space.settings(params)
    assert batch == 4
    assert settings.lossless
    theta = study.space.distributions["theta"]
    assert isinstance(theta, optuna.distributions.CategoricalDistribution)
    everything = [
        speed_of(study.space.settings(study.space.params(draft_length=d, precision=p, batch_size=4, theta=t))[0], 4)
        for d in range(1, 7)
        for p in ("fp32", "bf16")
        for t in theta.choices
    ]
    assert speed_of(settings, 4) == max(everything)


def test_every_trial_is_stored_before_the_next_one_starts() -> None:
    landscape, stored = Landscape(), []

    def store(record: TrialRecord) -> None:
        assert len(landscape.seen) == len(stored) + 1
        stored.append(record)

    study = make_study(objective=landscape, store=store)
    progress: list[int] = []
    study.run(6, never, progress.append)
    assert stored == study.records
    assert [record.number for record in stored] == list(range(6))
    assert progress == [1, 2, 3, 4, 5, 6]


def test_records_hold_what_was_asked_and_what_was_found() -> None:
    study = make_study(memory=1000)
    study.run(12, never)
    for record, trial in zip(study.records, told(study), strict=True):
        settings, batch = study.space.settings(record.params)
        assert (record.settings, record.batch_size, record.kind) == (settings, batch, kind_of(settings))
        assert record.params == trial.params
        assert record.predicted is not None
        assert record.quality is not None
        assert trial.values == [record.predicted.speedup, record.quality.perplexity_ratio.value]
        assert record.memory_bytes == 100 * batch
        assert record.duration_s >= 0


def test_one_seed_repeats_the_search_and_another_does_not() -> None:
    def params(seed: int) -> list[dict[str, Any]]:
        study = make_study(seed=seed)
        study.run(10, never)
        return [record.params for record in study.records]

    assert params(1) == params(1)
    assert params(1) != params(2)


def test_stop_ends_the_search_between_trials() -> None:
    study = make_study()
    study.run(50, lambda: len(study.records) >= 3)
    assert len(study.records) == 3
    assert {trial.state for trial in told(study)} == {TrialState.COMPLETE}


def test_the_search_finds_the_best_feasible_point_of_the_landscape() -> None:
    study = make_study(space_of(batch_sizes=(1,), rules=("optimal",)))
    study.enqueue_baselines()
    study.run(90, never)
    feasible = [record for record in study.records if record.state == "complete"]
    best = max(feasible, key=lambda record: record.predicted.speedup if record.predicted else 0.0)
    # the limit of 5 % is at alpha 0.5
    assert best.settings.draft_length in (2, 3, 4)
    assert 0.4 <= best.settings.alpha <= 0.5
    assert best.settings.precision.target == "bf16"


# failures


def test_O1_trial_report_cannot_be_used_with_two_objectives_and_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study()
    with pytest.raises(NotImplementedError):
        study.study.ask().report(1.0, 0)
    monkeypatch.setattr(Trial, "report", lambda *args, **values: pytest.fail("trial.report was called"))
    monkeypatch.setattr(Trial, "should_prune", lambda *args: pytest.fail("trial.should_prune was called"))
    study.run(5, never)
    assert len(study.records) == 5


@dataclass
class FakeMeter:
    seconds: float = 0.1

    def round_s(self, precision: str, batch: int, attention: Any = None, compiled: str = "off") -> list[float]:
        return [self.seconds] * 17

    def lookup_s(self, batch: int) -> list[float]:
        return [0.0] * 17

    def judge_s(self, rule: str, batch: int, dense: bool) -> float:
        return 0.0


class BadReplay(Landscape):
    """A replay whose loss of lossy settings is not a finite number."""

    bad = math.nan

    def run(self, settings: Settings) -> Replayed:
        good = super().run(settings)
        if settings.lossless:
            return good
        return Replayed(good.flow, np.array([self.bad]), good.tokens, None, None, None)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(math.nan, "perplexity ratio is nan"), (math.inf, "perplexity ratio is inf: the rule gives some reference token no")],
    ids=["O2_nan_fails_with_its_reason_and_the_search_goes_on", "O3_inf_is_never_told"],
)
def test_objectives_that_are_no_numbers(bad: float, reason: str) -> None:
    replay = BadReplay()
    replay.bad = bad
    real = Objective(replay, FakeMeter(), ("fp32",), dense=False)  # type: ignore[arg-type]
    study = make_study(objective=real)
    study.enqueue_baselines()
    study.run(40, never)
    assert len(study.records) == 40
    lossy = [record for record in study.records if record.kind == "lossy"]
    assert len(lossy) > 10
    for record in lossy:
        assert record.state == "failed"
        assert record.reason is not None
        assert reason in record.reason
        assert (record.predicted, record.quality) == (None, None)
    assert {record.state for record in study.records if record.kind != "lossy"} == {"complete"}
    for record, trial in zip(study.records, told(study), strict=True):
        assert trial.state == (TrialState.FAIL if record.state == "failed" else TrialState.COMPLETE)
        assert trial.values is None or all(map(math.isfinite, trial.values))


@pytest.mark.parametrize("seconds", [math.nan, 0.0])
def test_O3_a_speed_that_is_no_number_is_never_told(seconds: float) -> None:
    real = Objective(Landscape(), FakeMeter(seconds), ("fp32",), dense=False)  # type: ignore[arg-type]
    study = make_study(space_of(batch_sizes=(1,)), objective=real)
    with pytest.raises(EveryTrialFailed):
        study.run(10, never)
    assert {trial.state for trial in told(study)} == {TrialState.FAIL}


def test_R3_one_failure_is_recorded_and_the_rest_runs() -> None:
    calls = iter(range(100))
    problem = RuntimeError("CUDA out of memory")
    study = make_study(objective=Landscape(lambda settings, batch: problem if next(calls) == 2 else None))
    study.run(8, never)
    assert [record.state for record in study.records].count("failed") == 1
    assert study.records[2].state == "failed"
    assert study.records[2].reason == "RuntimeError: CUDA out of memory (at evaluate)"
    assert len(study.records) == 8


@pytest.mark.parametrize(
    "problem",
    [ValueError("v"), ZeroDivisionError("z"), RuntimeError("r"), ConfigurationError("c")],
    ids=repr,
)
def test_R3_each_kind_of_failure_names_itself(problem: Exception) -> None:
    study = make_study(objective=Landscape(failing_when(lambda settings: settings.draft_length > 0, problem)))
    study.enqueue_baselines()
    study.run(6, never)
    failed = [record for record in study.records if record.state == "failed"]
    assert len(failed) == 2
    assert all(str(record.reason).startswith(f"{type(problem).__name__}: {problem}") for record in failed)


def test_a_bug_is_not_taken_for_a_failed_trial() -> None:
    study = make_study(objective=Landscape(failing_when(lambda settings: True, TypeError("bug"))))
    with pytest.raises(TypeError, match="bug"):
        study.run(3, never)


def test_R5_a_failed_trial_is_never_on_the_front_nor_confirmed() -> None:
    fast = lambda settings: settings.alpha > 0.3  # noqa: E731
    study = make_study(objective=Landscape(failing_when(fast, ValueError("broken"))), loss=0.5)
    study.enqueue_baselines()
    study.run(50, never)
    failed = {record.number for record in study.records if record.state == "failed"}
    assert len(failed) > 5
    assert not failed & {record.number for record in pareto(study.records)}
    assert not failed & {record.number for record in to_confirm(study.records, 0.5)}
    best = {trial.number for trial in study.study.best_trials}
    assert not failed & best
    assert best


def test_R7_failures_of_one_cause_stop_the_search_with_that_cause() -> None:
    study = make_study(objective=Landscape(failing_when(lambda settings: True, RuntimeError("no kernel image"))))
    with pytest.raises(EveryTrialFailed, match="5 trials in a row failed alike: RuntimeError: no kernel image") as caught:
        study.run(100, never)
    assert caught.value.exit_code == 5
    assert len(study.records) == ALIKE_FAILURES == 5


def test_failures_of_many_causes_go_on_to_the_end_and_then_say_the_last() -> None:
    calls = iter(range(100))
    study = make_study(objective=Landscape(lambda settings, batch: ValueError(f"cause {next(calls)}")))
    with pytest.raises(EveryTrialFailed, match="all 12 trials failed; the last one: ValueError: cause 11"):
        study.run(12, never)
    assert len(study.records) == 12


def test_a_search_in_which_something_worked_is_not_ended_by_a_part_of_the_space_that_fails() -> None:
    study = make_study(objective=Landscape(failing_when(lambda settings: not settings.lossless, ValueError("lossy"))))
    study.enqueue_baselines()
    study.run(45, never)
    assert [record.state for record in study.records].count("failed") >= 2 * ALIKE_FAILURES


# limits


def test_O6_limits_are_set_as_constraints_of_the_trial() -> None:
    study = make_study(memory=250, loss=0.02)
    study.enqueue_baselines()
    study.run(40, never)
    states = {record.state for record in study.records}
    assert states == {"complete", "infeasible"}
    for record, trial in zip(study.records, told(study), strict=True):
        assert record.quality is not None
        wanted = {
            "quality_loss": record.quality.perplexity_ratio.value - 1 - 0.02,
            "memory": 100 * record.batch_size / 250 - 1,
        }
        assert record.constraints == pytest.approx(wanted, abs=1e-12)
        assert trial.constraints == pytest.approx(wanted, abs=1e-12)
        broken = [name for name, value in wanted.items() if value > 1e-12]
        assert record.state == ("infeasible" if broken else "complete")
        assert record.reason == (f"over the limit: {', '.join(broken)}" if broken else None)
    assert {record.batch_size for record in study.records if record.state == "complete"} == {1}


def test_without_a_known_memory_there_is_no_memory_limit() -> None:
    study = make_study(memory=None)
    study.run(3, never)
    assert all(record.constraints.keys() == {"quality_loss"} for record in study.records)


def test_the_loss_limit_itself_is_within_the_limit() -> None:
    study = make_study(objective=Landscape(ratio=lambda settings: 1.0), loss=0.0)
    study.run(10, never)
    assert {record.state for record in study.records} == {"complete"}


def test_O8_when_nothing_is_within_the_limits_the_nearest_point_is_said_with_exit_code_3() -> None:
    study = make_study(objective=Landscape(ratio=lambda settings: 1.2 + 0.1 * settings.alpha), memory=50)
    study.enqueue_baselines()
    study.run(20, never)
    assert {record.state for record in study.records} == {"infeasible"}
    chosen = to_confirm(study.records, 0.05)
    assert chosen == []
    with pytest.raises(NoFeasiblePoint) as caught:
        Search._refuse_infeasible(SimpleNamespace(), chosen, study.records)  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    nearest = min(study.records, key=lambda record: sum(map(abs, record.constraints.values())))
    assert nearest.batch_size == 1
    assert f"the nearest one, trial {nearest.number} ({nearest.kind}): " in str(caught.value)
    assert "+20.00% perplexity, over the limit: quality_loss, memory" in str(caught.value)


# storage and resuming


def storage_of(path: Path) -> str:
    return f"sqlite:///{path}/study.db"


def test_O11_a_trial_that_a_dead_worker_left_running_is_failed_on_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_study(storage=storage_of(tmp_path))
    first.run(2, never)
    dead = first.study.ask()  # the worker dies here
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        again = make_study(storage=storage_of(tmp_path), done=tuple(first.records))
    assert f"trial {dead.number} of study test was left running: worker died" in caplog.text
    states = [trial.state for trial in again.study.get_trials(deepcopy=False)]
    assert states == [TrialState.COMPLETE] * 2 + [TrialState.FAIL]
    again.run(3, never)
    assert [record.number for record in again.records] == list(range(3))
    assert TrialState.RUNNING not in {trial.state for trial in again.study.get_trials(deepcopy=False)}


def test_O11_a_clean_study_is_opened_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_study(storage=storage_of(tmp_path)).run(1, never)
    with caplog.at_level(logging.WARNING, logger="lossytune"):
        open_study("test", storage_of(tmp_path), 0)
    assert caplog.text == ""


def test_O13_a_study_with_other_directions_is_compared_and_refused(tmp_path: Path) -> None:
    for directions in (["minimize", "maximize"], ["maximize"], ["maximize", "minimize", "minimize"]):
        name = "-".join(directions)
        optuna.create_study(study_name=name, storage=storage_of(tmp_path), directions=directions)
        with pytest.raises(ConfigurationError, match=f"study '{name}' .* this search needs") as caught:
            open_study(name, storage_of(tmp_path), 0)
        assert str(tuple(directions)) in str(caught.value)
        assert str(DIRECTIONS) in str(caught.value)


def test_a_storage_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for storage in (f"sqlite:///{tmp_path}/no/such/folder/x.db", "nonsense"):
        with pytest.raises(ConfigurationError, match="cannot be opened") as caught:
            open_study("test", storage, 0)
        assert repr(storage) in str(caught.value)


def test_O15_a_changed_space_is_another_study_in_the_same_storage(tmp_path: Path) -> None:
    spaces = (space_of(), space_of(batch_sizes=(1, 8)))
    names = [f"dialogue-{space.digest('device')[:12]}" for space in spaces]
    assert names[0] != names[1]
    for space, name in zip(spaces, names, strict=True):
        study = make_study(space, name=name, storage=storage_of(tmp_path))
        assert told(study) == []
        study.enqueue_baselines()
        study.run(3, never)
    assert set(optuna.get_all_study_names(storage_of(tmp_path))) == set(names)
    resumed = make_study(spaces[0], name=names[0], storage=storage_of(tmp_path))
    assert [trial.params["batch_size"] for trial in told(resumed)] == [1, 1, 4]


def mixed_records(count: int = 30) -> list[TrialRecord]:
    """Records with complete, failed and infeasible trials, as they come back from the disk."""
    objective = Landscape(failing_when(lambda settings: settings.alpha == 0.3, ValueError("three")))
    study = make_study(objective=objective, memory=250)
    study.enqueue_baselines()
    study.run(count, never)
    records = [TrialRecord.model_validate_json(record.model_dump_json(by_alias=True)) for record in study.records]
    assert records == study.records
    assert {record.state for record in records} == {"complete", "failed", "infeasible"}
    return records


def test_the_study_is_rebuilt_from_the_records_on_resume() -> None:
    records = mixed_records()
    again = make_study(done=tuple(records), memory=250)
    assert again.records == records
    rebuilt = told(again)
    assert len(rebuilt) == len(records)
    for record, trial in zip(records, rebuilt, strict=True):
        assert trial.params == record.params
        assert trial.distributions == again.space.distributions
        if record.state == "failed":
            assert trial.state == TrialState.FAIL
        else:
            assert record.predicted is not None
            assert record.quality is not None
            assert trial.state == TrialState.COMPLETE
            assert trial.values == [record.predicted.speedup, record.quality.perplexity_ratio.value]
            assert trial.constraints == record.constraints


def test_a_resumed_search_goes_on_with_the_next_number_and_stores_only_new_trials() -> None:
    records, stored = mixed_records(), list[TrialRecord]()
    again = make_study(store=stored.append, done=tuple(records), memory=250)
    again.run(36, never)
    assert [record.number for record in stored] == list(range(30, 36))
    assert again.records == [*records, *stored]
    fresh = make_study(memory=250)
    fresh.run(6, never)
    assert [record.params for record in stored] != [record.params for record in fresh.records]


def test_a_search_that_was_cut_off_among_its_baselines_runs_the_rest_of_them_and_none_twice() -> None:
    whole = make_study()
    whole.enqueue_baselines()
    whole.run(18, never)
    cut = make_study(done=tuple(whole.records[:5]))
    cut.enqueue_baselines()
    cut.run(18, never)
    assert [record.params for record in cut.records] == [record.params for record in whole.records]


def test_a_finished_search_runs_nothing_on_resume() -> None:
    records = mixed_records(12)
    again = make_study(done=tuple(records), store=lambda record: pytest.fail("a trial was run"))
    again.run(12, never)
    assert len(again.records) == 12


def test_trials_go_through_the_run_folder_and_rebuild_the_same_front(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    study = make_study(store=folder.add_trial)
    study.enqueue_baselines()
    study.run(25, never)
    assert list(folder.trials()) == study.records
    assert [record.number for record in pareto(folder.trials())] == [record.number for record in pareto(study.records)]


def test_kinds() -> None:
    assert kind_of(Settings(draft_length=0, rule="optimal", alpha=0.5)) == "plain"
    assert kind_of(Settings(draft_length=3, rule="exact", alpha=0.5)) == "lossless"
    assert kind_of(Settings(draft_length=3, rule="optimal", alpha=0.0)) == "lossless"
    assert kind_of(Settings(draft_length=3, rule="optimal", alpha=0.01)) == "lossy"
