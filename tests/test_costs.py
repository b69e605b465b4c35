"""The cost table: which rounds are measured and in which order, with which clock; and what the objective makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model

from lossyspec.compiled import CompiledStack
from lossyspec.cost_table import CostTable
from lossyspec.drafting import ModelDraft, Request
from lossyspec.errors import ConfigurationError
from lossyspec.ngram_drafting import NgramDraft
from lossyspec.runner import Runner
from lossyspec.settings import NgramSettings, Precisions, Sampling, Settings
from lossyspec.tuner.measurement import costs
from lossyspec.tuner.measurement.clock import synchronise
from lossyspec.tuner.measurement.costs import CostMeter
from lossyspec.tuner.objective import Objective
from lossyspec.tuner.replay import Flow

VOCAB = 101
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


class Target(Runner):
    """A runner that notes how many tokens of how many rows each pass reads, and how far."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.passes: list[tuple[int, int]] = []
        self.furthest = 0

    def logits(self, tokens: torch.Tensor, starts: list[int], attention: Any = None) -> torch.Tensor:
        self.passes.append((tokens.shape[0], tokens.shape[1]))
        self.furthest = max(self.furthest, max(starts) + tokens.shape[1])
        return super().logits(tokens, starts)


def meter_of(target: Any, draft: Any = None, context: int = 40, length: int = 3, **values: Any) -> CostMeter:
    return CostMeter(lambda precision: (target, draft), PROMPTS, context, Sampling(temperature=0.7), length, **values)


# rounds


def test_every_number_of_verified_tokens_is_measured_in_turns_up_and_down(model: Any) -> None:
    target = Target(model)
    meter = meter_of(target, NgramDraft(), repeats=4)
    seconds = meter.round_s("fp32", 2)
    up = [1, 2, 3, 4]
    warm_up = [width for width in up for _ in range(2)]
    assert [width for _, width in target.passes] == warm_up + [width for width in up + up[::-1] for _ in range(4)]
    assert {rows for rows, _ in target.passes} == {2}
    assert len(seconds) == 4
    assert all(second > 0 for second in seconds)
    assert meter.table.round_s == {("fp32", 2): seconds}
    assert meter.table.spread["fp32", 2] >= 0


def test_a_cell_is_measured_once(model: Any) -> None:
    target = Target(model)
    meter = meter_of(target, repeats=2)
    first = meter.round_s("fp32", 1)
    count = len(target.passes)
    assert meter.round_s("fp32", 1) is first
    assert len(target.passes) == count
    meter.round_s("fp32", 2)
    meter.round_s("bf16", 1)
    assert len(target.passes) == 3 * count
    assert set(meter.table.round_s) == {("fp32", 1), ("fp32", 2), ("bf16", 1)}


def test_a_compiled_target_has_cells_of_its_own_and_the_seconds_of_its_compilation(model: Any, tmp_path: Path) -> None:
    target = Target(model)
    target._compiled["inductor"] = CompiledStack(target.check_sparse(), "inductor", lambda step, **options: step)
    meter = meter_of(target, repeats=2, length=1)
    meter.round_s("fp32", 1)
    meter.round_s("fp32", 1, compiled="inductor")
    assert set(meter.table.round_s) == {("fp32", 1), ("fp32+inductor", 1)}
    assert meter.table.compile_s == {("fp32+inductor", 1): target.compile_s}
    assert target.compile_s > 0
    meter.table.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == meter.table
    older = {name: value for name, value in meter.table.dump().items() if name != "compile_s"}
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert CostTable.read(tmp_path / "older.json").compile_s == {}
    older |= {"schema": "lossytune.costs/1", "draft_step_s": {"fp32/1": 0.1}}  # one number a step
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert CostTable.read(tmp_path / "older.json").draft_s["fp32", 1][:3] == [0.0, 0.1, 0.2]
    assert CostTable.read(tmp_path / "older.json").round_s == meter.table.round_s


def test_rows_have_about_the_context_and_unequal_lengths() -> None:
    meter = meter_of(None)
    rows = meter._rows(5, 40)
    assert [len(row) for row in rows] == [40, 37, 34, 31, 40]
    for index, row in enumerate(rows):
        prompt = PROMPTS[index % 2]
        assert row == (prompt * 40)[: len(row)]
    assert min(map(len, meter._rows(4, 1))) == 2


@pytest.mark.parametrize("context", [200, 250, 256, 1000])
def test_a_context_near_the_models_last_position_gives_way_to_the_rounds(context: int) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 256
    target = Target(model)
    assert len(meter_of(target, context=context, length=8).round_s("fp32", 2)) == 9
    assert min(context, 238) < target.furthest <= 256


def fake_loop(
    monkeypatch: pytest.MonkeyPatch, seconds_of: Any, extra: Any = lambda drafted: 0.0, ends: int = 10**6
) -> list[int]:
    """Replaces the loop: each round asks the draft for as many tokens as the row's job says and takes seconds_of(round,
    drafted tokens), `extra` more when it is not random tokens that are drafted. A row `ends` after so many rounds of the
    draft. Returns the number of rows of each start."""
    starts: list[int] = []
    taken: list[float] = []

    class Loop:
        def __init__(self, target: Any, draft: Any) -> None:
            self.draft = draft

        def start(self, rows: list[Any]) -> None:
            starts.append(len(rows))
            self.rows, self.drafted = rows, 0

        def round(self) -> Any:
            job, prompts = self.rows[0].job, [row.prompt for row in self.rows]
            request = Request(prompts, [job.draft_length] * len(prompts), job.settings, [job.choice] * len(prompts))
            width = self.draft.propose(request).tokens.shape[1]
            random = isinstance(self.draft, costs._Random)
            taken.append(seconds_of(len(taken), width) + (0.0 if random else extra(width)))
            self.drafted += not random
            self.rows[-1].finish_reason = "length" if random or self.drafted == ends else None
            return SimpleNamespace(total_s=taken[-1])

    monkeypatch.setattr(costs, "Batch", Loop)
    return starts


def plain_target(vocab: int = VOCAB, limit: int | None = None) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), vocab_size=vocab, position_limit=limit)


def test_medians_are_of_the_rounds_after_the_warm_up_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_loop(monkeypatch, lambda index, drafted: 99.0 if index < 8 else 1.0 + drafted + (50.0 if index == 13 else 0.0))
    meter = meter_of(plain_target(), repeats=5)
    assert meter.round_s("fp32", 1) == [1.0, 2.0, 3.0, 4.0]
    assert meter.table.spread["fp32", 1] == 0.0


def test_a_round_counts_after_several_others_of_its_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran before decides what a CPU finds in its caches."""
    seen: dict[int, int] = {}

    def seconds(index: int, drafted: int) -> float:
        seen[index] = drafted
        return 1.0 + drafted + (0.0 if {seen.get(index - 1), seen.get(index - 2)} == {drafted} else 7.0)

    fake_loop(monkeypatch, seconds)
    for repeats in (3, 7):
        assert meter_of(plain_target(), repeats=repeats).round_s("fp32", 1) == [1.0, 2.0, 3.0, 4.0]


def test_a_slow_cell_repeats_its_rounds_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is as long as a fast one's, where it can be: a round in each turn counts at least."""
    lengths: dict[float, int] = {}
    for seconds in (0.001, 0.01, 0.1, 5.0):
        rounds: list[float] = []
        fake_loop(monkeypatch, lambda index, drafted: rounds.append(0) or seconds)  # noqa: B023
        meter_of(plain_target(), Proposing(), repeats=24, cell_s=4.0).round_s("fp32", 1)
        lengths[seconds] = len(rounds) - 8
    assert lengths == {0.001: 8 * 24, 0.01: 8 * 24, 0.1: 8 * 2 * 2, 5.0: 8 * 2}


def test_the_context_stays_what_it_is_while_rounds_are_timed(model: Any) -> None:
    target = Target(model)
    meter_of(target, context=40, repeats=8, length=5).round_s("fp32", 1)
    assert len(target.passes) == 6 * 2 + 12 * 8
    assert target.furthest == 40 + 5  # the prompt's last token is read again


def test_a_machine_that_slows_down_hits_all_lengths_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_loop(monkeypatch, lambda index, drafted: (1.0 + drafted) * (1 + 0.01 * index))
    seconds = meter_of(plain_target(), repeats=8, length=5).round_s("fp32", 1)
    ratios = np.array(seconds) / seconds[0] / np.arange(1, 7)
    np.testing.assert_allclose(ratios, 1.0, atol=0.02)
    assert seconds[0] > 1.2


def test_the_spread_is_the_median_deviation_over_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_loop(monkeypatch, lambda index, drafted: 1.0 + 0.1 * (index % 3 - 1))
    meter = meter_of(plain_target(), repeats=6, length=1)
    assert meter.round_s("fp32", 1) == pytest.approx([1.0, 1.0])
    assert meter.table.spread["fp32", 1] == pytest.approx(0.1)


def test_precisions_are_put_on_one_footing_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured in a slow minute is scaled to what its plain rounds take beside the others'."""
    speeds = {"int4": 1.0, "int8": 1.1, "fp32": 9.0}
    slow = {"int4": 1.4, "int8": 1.0, "fp32": 1.0}  # the minute that each was measured in
    targets = {name: SimpleNamespace(device=torch.device("cpu"), vocab_size=9, position_limit=None) for name in speeds}
    asked: list[str] = []

    def run(self: CostMeter, target: Any, draft: Any, batch: int, plan: Any, times: list[float]) -> None:
        name = next(name for name, other in targets.items() if other is target)
        asked.append(name)
        drift = slow[name] if len(asked) <= 3 else 1.0 + 0.1 * len(asked)
        times.extend(speeds[name] * drift * (1.0 + turn.length) for turn in plan)

    monkeypatch.setattr(CostMeter, "_run", run)
    meter = CostMeter(lambda name: (targets[name], None), PROMPTS, 9, Sampling(), 2)  # type: ignore[index, return-value, arg-type]
    for name in speeds:
        meter.round_s(name, 1)  # type: ignore[arg-type]
    assert meter.table.round_s["int4", 1][0] > meter.table.round_s["int8", 1][0]
    meter.even_out(("int4", "int8", "fp32"), 1)
    assert asked[3:] == ["int4", "int8", "int8", "int4"]
    four, eight = meter.table.round_s["int4", 1], meter.table.round_s["int8", 1]
    assert eight[0] / four[0] == pytest.approx(1.1)
    assert four == pytest.approx([four[0] * (1 + length) for length in range(3)])
    assert meter.table.round_s["fp32", 1] == [9.0, 18.0, 27.0]  # far behind: nothing to be compared with
    before = dict(meter.table.round_s)
    meter.even_out(("int4", "fp32"), 1)
    assert meter.table.round_s == before
    assert len(asked) == 7


# drafting and judging


class Proposing:
    """A draft that is no lookup: as many zeros as it is asked for."""

    def propose(self, request: Request) -> Any:
        return SimpleNamespace(tokens=torch.zeros(len(request.prefixes), max(request.limits)))


def test_only_a_draft_model_has_steps_that_cost(model: Any) -> None:
    for draft in (None, NgramDraft()):
        assert meter_of(Target(model), draft).draft_s("fp32", 1) == [0.0] * 4
    target = Target(model)
    meter = meter_of(target, ModelDraft(Runner(model, "draft"), VOCAB), repeats=4)
    seconds = meter.draft_s("fp32", 2)
    assert len(seconds) == 4
    assert seconds[0] == 0.0 < max(seconds)
    assert meter.draft_s("fp32", 2) is seconds
    assert {rows for rows, _ in target.passes} == {2}
    up = [2, 2, 3, 3, 4, 4]  # random tokens and drafted ones by turns
    turns = [width for width in up + up[::-1] for _ in range(4)]
    assert [width for _, width in target.passes] == [width for width in up for _ in range(2)] + turns


def test_drafting_is_what_a_round_takes_more_than_one_of_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_loop(monkeypatch, lambda index, drafted: 1.0 + drafted, extra=lambda drafted: 0.5 + 0.1 * drafted)
    meter = meter_of(plain_target(), Proposing(), length=8)
    assert meter.draft_s("fp32", 1) == pytest.approx([0.0, *[0.5 + 0.1 * count for count in range(1, 9)]])
    assert calls == [1]  # the prompts are read once
    assert meter_of(plain_target(), Proposing(), length=1).draft_s("fp32", 1) == pytest.approx([0.0, 0.6])


def test_a_machine_that_slows_down_is_no_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_loop(monkeypatch, lambda index, drafted: 1.0 + 0.1 * index, extra=lambda drafted: 0.5)
    seconds = meter_of(plain_target(), Proposing()).draft_s("fp32", 1)
    assert seconds[1:] == pytest.approx([0.5] * 3, abs=1e-6)


def test_drafting_is_never_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_loop(monkeypatch, lambda index, drafted: 1.0, extra=lambda drafted: -0.1)
    assert meter_of(plain_target(), Proposing()).draft_s("fp32", 1) == [0.0] * 4


def test_rows_that_end_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good draft has soon filled the room there is; what random tokens end is taken back."""
    starts = fake_loop(monkeypatch, lambda index, drafted: 1.0 + drafted, ends=7)
    meter = meter_of(plain_target(), Proposing(), repeats=4)
    assert meter.round_s("fp32", 2) == [1.0, 2.0, 3.0, 4.0]
    assert starts == [2]
    assert meter.draft_s("fp32", 2) == [0.0] * 4
    assert starts == [2] * (1 + 5)  # 6 rounds of the draft to warm up, 24 in turns


@dataclass
class Queue:
    """A device that works through its queue only when it is waited for: its seconds pass in `synchronise`."""

    now: float = 0.0
    pending: float = 0.0
    waits: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def synchronise(self, device: Any) -> None:
        self.waits += 1
        self.now += self.pending
        self.pending = 0.0

    def judge(self, p: Any, proposal: Any, settings: Settings, alpha: Any, uniforms: Any, greedy: bool) -> None:
        assert not greedy
        assert p.shape[:2] == (proposal.q.shape[0], proposal.q.shape[1] + 1)
        self.pending += self.seconds[settings.rule]


def test_N4_what_is_queued_on_the_device_is_waited_for_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(seconds={"exact": 0.5, "optimal": 0.75, "mixture": 0.25})
    queue.pending = 100.0  # what was queued before is not counted
    monkeypatch.setattr(costs, "synchronise", queue.synchronise)
    monkeypatch.setattr(costs, "judge", queue.judge)
    meter = meter_of(plain_target(), clock=queue.clock)
    assert meter._judge("optimal", 2, plain_target()) == pytest.approx(0.75)
    assert queue.waits == 12  # before and after each of six runs
    assert meter.judge_s("optimal", 2, dense=True) == pytest.approx(0.25)
    assert meter.judge_s("mixture", 2, dense=True) == 0.0  # never a gain
    assert meter.table.judge_s == {("optimal", 2): pytest.approx(0.25), ("mixture", 2): 0.0}


def test_the_first_run_of_a_rule_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, taken = Queue(), iter([90.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(costs, "judge", lambda *args, greedy: setattr(queue, "now", queue.now + next(taken)))
    assert meter_of(plain_target(), clock=queue.clock)._judge("exact", 1, plain_target()) == 3.0


def test_N4_only_a_cuda_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (torch.device("cpu"), "cpu", None):
        synchronise(device)
    assert waited == []
    synchronise(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_exact_and_one_hot_drafts_cost_nothing_to_judge() -> None:
    meter = meter_of(None)
    assert meter.judge_s("exact", 4, dense=True) == 0.0
    assert meter.judge_s("optimal", 4, dense=False) == 0.0
    assert meter.table.judge_s == {}


@pytest.mark.parametrize("rule", ["optimal", "mixture", "priced", "lenience", "fuzzy"])
def test_every_rule_can_be_timed_with_the_real_judge(rule: str) -> None:
    ticks = iter(range(10**6))
    meter = meter_of(plain_target(), clock=lambda: float(next(ticks)))
    assert meter._judge(rule, 3, plain_target()) == 1.0
    assert meter.judge_s(rule, 3, dense=True) == 0.0


def test_looking_up_is_timed_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    asked: list[list[int]] = []

    def propose(self: NgramDraft, request: Request) -> None:
        asked.append(list(request.limits))
        queue.now += 0.01 * request.limits[0] + (5.0 if len(asked) == 3 else 0.0)

    monkeypatch.setattr(NgramDraft, "propose", propose)
    meter = meter_of(None, clock=queue.clock)
    assert meter.lookup_s(2) == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert asked == [[length] * 2 for length in (1, 2, 3) for _ in range(5)]
    assert meter.lookup_s(2) is meter.table.lookup_s[2]
    assert len(asked) == 15


def test_looking_up_really_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[list[int]] = []
    propose = NgramDraft.propose

    def noted(self: NgramDraft, request: Request) -> Any:
        proposal = propose(self, request)
        drafted.append(proposal.lengths)
        return proposal

    monkeypatch.setattr(NgramDraft, "propose", noted)
    meter_of(None).lookup_s(1)
    assert drafted == [[length] for length in (1, 2, 3) for _ in range(5)]  # the prompts repeat: full drafts


# the table as a file


def filled_table() -> CostTable:
    return CostTable(
        120,
        round_s={("fp32", 1): [0.1, 0.2], ("bf16", 16): [0.3, 0.4]},
        draft_s={("fp32", 1): [0.0, 0.01]},
        lookup_s={1: [0.0, 0.001], 16: [0.0, 0.002]},
        judge_s={("optimal", 1): 0.0005},
        spread={("fp32", 1): 0.02},
    )


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table, path = filled_table(), tmp_path / "costs.json"
    table.write(path)
    assert CostTable.read(path) == table
    assert json.loads(path.read_text())["schema"] == "lossytune.costs/2"
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]
    empty = CostTable(7)
    empty.write(path)
    assert CostTable.read(path) == empty


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    filled_table().write(tmp_path / "costs.json")
    meter = CostMeter(lambda precision: pytest.fail("models were asked for"), PROMPTS, 120, Sampling(), 1)
    meter.table = CostTable.read(tmp_path / "costs.json")
    assert meter.round_s("bf16", 16) == [0.3, 0.4]
    assert meter.draft_s("fp32", 1) == [0.0, 0.01]
    assert meter.lookup_s(16) == [0.0, 0.002]
    assert meter.judge_s("optimal", 1, dense=True) == 0.0005


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "not a cost table"),
        ("{", "not a cost table"),
        ("[]", "not a cost table"),
        ("{}", "not a cost table"),
        ('{"schema": "lossytune.costs/3"}', "schema is 'lossytune.costs/3'; expected 'lossytune.costs/2'"),
        ('{"schema": "lossytune.costs/2", "context": 3}', "not a cost table"),
        ('{"schema": "lossytune.costs/2", "context": 3, "round_s": []}', "not a cost table"),
        ('{"schema": "lossytune.costs/2", "context": 3, "round_s": {"fp32": 1}}', "not a cost table"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        CostTable.read(path)
    assert f"{path}: {problem}" in str(caught.value)


# what the objective makes of it


@dataclass
class FixedCosts:
    """Rounds cost 10 + tokens; a draft step 3; a lookup 0.5 a token; judging 0.25. bf16 is twice as fast at batch 1."""

    def round_s(self, precision: str, batch: int, attention: Any = None, compiled: str = "off") -> list[float]:
        scale = 0.5 if precision == "bf16" and batch == 1 else 1.0
        return [scale * (10.0 + drafted + 1) for drafted in range(9)]

    def draft_s(self, precision: str, batch: int, attention: Any = None) -> list[float]:
        return [3.0 * drafted for drafted in range(9)]

    def lookup_s(self, batch: int) -> list[float]:
        return [0.5 * drafted for drafted in range(9)]

    def judge_s(self, rule: str, batch: int, dense: bool) -> float:
        return 0.25 if dense and rule != "exact" else 0.0


def objective(dense: bool) -> Objective:
    return Objective(None, FixedCosts(), ("fp32", "bf16"), dense)  # type: ignore[arg-type]


FLOW = Flow(2.0, 0.5, drafted=np.array([0.25, 0.25, 0.5]), steps=np.array([0.25, 0.25, 0.5]))


def settings_of(dense: bool, **values: Any) -> Settings:
    precision = values.pop("precision", "fp32")
    return Settings(
        draft_length=2,
        precision=Precisions(target=precision, draft=precision if dense else None),
        ngram=None if dense else NgramSettings(),
        **values,
    )


def test_a_round_costs_its_drafting_its_verification_and_its_judging() -> None:
    verify = 0.25 * 11 + 0.25 * 12 + 0.5 * 13
    assert objective(False).round_s(settings_of(False, rule="exact"), FLOW, 1) == pytest.approx(verify + 1.0)
    steps = 0.25 * 1 + 0.5 * 2
    exact = objective(True).round_s(settings_of(True, rule="exact"), FLOW, 1)
    assert exact == pytest.approx(verify + 3.0 * steps)
    lossy = objective(True).round_s(settings_of(True, rule="optimal", alpha=0.3), FLOW, 1)
    assert lossy == pytest.approx(exact + 0.25)


def test_a_round_pays_for_the_draft_steps_it_runs_and_looks_up_only_where_lookup_takes_part() -> None:
    stopped = replace(FLOW, steps=np.array([0.0, 0.25, 0.75]))  # rows that theta stopped have paid a step more
    exact = objective(True).round_s(settings_of(True, rule="exact"), FLOW, 1)
    assert objective(True).round_s(settings_of(True, rule="exact"), stopped, 1) - exact == pytest.approx(3.0 * 0.5)
    mixed = objective(True).round_s(settings_of(True, rule="exact", source="mixed"), FLOW, 1)
    assert mixed == pytest.approx(exact + 1.0)
    looked = objective(True).round_s(settings_of(True, rule="optimal", alpha=0.3, source="ngram"), FLOW, 1)
    assert looked == pytest.approx(objective(False).round_s(settings_of(False, rule="exact"), FLOW, 1))


def test_a_batch_pays_for_its_longest_row() -> None:
    longest = [0.25**2, 0.5**2 - 0.25**2, 1 - 0.5**2]
    verify = float(np.dot(longest, [11, 12, 13]))
    assert objective(False).round_s(settings_of(False, rule="exact"), FLOW, 2) == pytest.approx(verify + 1.0)


def test_speed_is_over_the_fastest_plain_decoding_at_the_same_batch_size() -> None:
    assert objective(False).plain_round_s(1) == (5.5, "bf16")
    assert objective(False).plain_round_s(2) == (11.0, "bf16")
    predicted = objective(False).predict(settings_of(False, rule="exact"), FLOW, 1)
    assert predicted.round_s == pytest.approx(13.25)
    assert predicted.speedup == pytest.approx(2.0 * 5.5 / 13.25)
    assert predicted.tokens_per_s == pytest.approx(2.0 / 13.25)
    assert predicted.plain_round_s == 5.5
    assert (predicted.tokens_per_round, predicted.drafted_per_round, predicted.acceptance) == (2.0, 1.25, 0.5)


def test_plain_decoding_at_the_fastest_precision_is_1x_exactly() -> None:
    plain = Settings(draft_length=0, precision=Precisions(target="bf16"))
    flow = Flow(1.0, None, np.array([1.0]), np.array([1.0]))
    for dense in (False, True):
        for batch in (1, 2, 8):
            predicted = objective(dense).predict(plain, flow, batch)
            assert predicted.speedup == 1.0
            assert predicted.acceptance is None
    slower = Settings(draft_length=0, precision=Precisions(target="fp32"))
    assert objective(False).predict(slower, flow, 1).speedup == 0.5


def test_case_19_Q5_a_slow_draft_is_predicted_to_be_slower_than_plain() -> None:
    predicted = objective(True).predict(settings_of(True, rule="exact"), Flow(1.1, 0.05, *np.eye(3)[[2, 2]]), 1)
    assert predicted.speedup < 1
