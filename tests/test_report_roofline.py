"""Devices that were not measured: a fit with a known answer, its stated error, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import CACHED, DRAFT_STEP_S, PARAMETERS, TRUE_FIT, Machine, write_machine

from lossyspec.errors import ConfigurationError
from lossyspec.reports.accelerators import known_accelerators
from lossyspec.reports.assemble import Options, assemble
from lossyspec.reports.load import Run, load_run
from lossyspec.reports.predict import Roofline, fit_runs, predict_device
from lossyspec.reports.roofline import Cell, Fit, achieved, cells_of, fit_cells, model_size, pass_s, seconds, suspect
from lossyspec.reports.serving import round_parts

KNOWN = known_accelerators()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("machines")
    machines = {
        "l4": Machine("l4-24gb"),
        "a100": Machine("a100-sxm-80gb"),
        "h100": Machine("h100-sxm-80gb", fit=Fit(0.5, 0.3, 0.002, 0.0, True)),
    }
    return {name: load_run(write_machine(root / name, machine)) for name, machine in machines.items()}


def test_a_pass_by_hand() -> None:
    """A100 80 GB: 2 bytes x (1.5e9 + 4 x 3e6) over 2.039e12 B/s; 2 x 1.5e9 x 4 x 3 FLOP over 312e12."""
    cell = pass_s(KNOWN["a100-sxm-80gb"], PARAMETERS, CACHED, "bf16", 4, 3)
    assert cell is not None
    assert cell.memory_s == pytest.approx(2 * 1.512e9 / 2.039e12)
    assert cell.arithmetic_s == pytest.approx(3.6e10 / 3.12e14)
    fit = Fit(0.5, 0.25, 0.001, 0.0, True)
    assert seconds(cell, fit) == pytest.approx(2 * cell.memory_s + 0.001)
    heavy = replace(cell, arithmetic_s=1.0)
    assert seconds(heavy, fit) == pytest.approx(4.001)
    assert pass_s(KNOWN["t4-16gb"], PARAMETERS, CACHED, "bf16", 1, 1) is None  # no bf16 unit


def test_sizes_come_from_the_manifest_or_from_the_memory_of_a_draft_without_weights(runs: dict[str, Run]) -> None:
    run = runs["l4"]
    size = model_size(run)
    assert not isinstance(size, str)
    assert (size.parameters, size.cached) == (pytest.approx(PARAMETERS), pytest.approx(CACHED))
    told = run.manifest.model_copy(update={"target_parameters": 10**9, "draft_parameters": 2 * 10**8})
    sized = model_size(replace(run, manifest=told))
    assert not isinstance(sized, str) and (sized.parameters, sized.draft_parameters) == (10**9, 2 * 10**8)
    drafted = run.manifest.model_copy(update={"draft": {"kind": "model", "id": "x"}})
    assert "does not record" in str(model_size(replace(run, manifest=drafted)))
    alone = replace(run, trials=tuple(trial for trial in run.trials if trial.batch_size == 1))
    assert "one batch size" in str(model_size(alone))
    assert model_size(replace(run, trials=())) == "no trial has a memory estimate"


def test_the_fit_finds_what_the_times_were_made_from(runs: dict[str, Run]) -> None:
    size = model_size(runs["l4"])
    assert not isinstance(size, str)
    cells = [cell for name in ("l4", "a100") for cell in cells_of(runs[name], KNOWN[runs[name].device], size)]
    assert len(cells) == 2 * 2 * 3 * 9
    fit = fit_cells(cells)
    assert fit.e_bandwidth == pytest.approx(TRUE_FIT.e_bandwidth, rel=0.02)
    assert fit.e_flops == pytest.approx(TRUE_FIT.e_flops, rel=0.02)
    assert fit.overhead_s == pytest.approx(TRUE_FIT.overhead_s, rel=0.05)
    assert fit.rms_log < 0.01 and fit.compute_bound


def test_a_side_of_the_roofline_that_no_cell_touches_is_called_a_guess() -> None:
    cells = [Cell("bf16", 1, n, 0.01, 1e-6 * n, 0.02) for n in range(1, 4)]
    fit = fit_cells(cells)
    assert not fit.compute_bound and fit.e_flops == 0.5


def test_a_prediction_for_a_machine_that_is_known_is_right(runs: dict[str, Run]) -> None:
    """The A100 from the L4 alone: made from one fit, so the plain speeds must come out."""
    roofline = fit_runs([runs["l4"]], ["l4"], KNOWN)
    assert isinstance(roofline, Roofline)
    points, reason = predict_device(runs["l4"], KNOWN["a100-sxm-80gb"], roofline)
    assert reason is None
    found = {(point.kind, point.batch): point for point in points}
    truth = Machine("a100-sxm-80gb")
    for batch in (1, 4, 16):
        plain = found["plain", batch]
        assert plain.tokens_per_s == pytest.approx(batch / truth.pass_s("bf16", batch, 1), rel=0.05)
        assert (plain.low, plain.high) == (pytest.approx(plain.tokens_per_s / 2), pytest.approx(plain.tokens_per_s * 2))
        lossy = found["lossy", batch]
        trial = next(trial for trial in runs["l4"].trials if trial.number == lossy.trial)
        assert trial.state == "complete" and trial.predicted is not None
        assert lossy.tokens_per_round == trial.predicted.tokens_per_round  # acceptance transfers


def test_a_draft_model_is_timed_by_the_roofline_too(tmp_path: Path) -> None:
    sizes = {"target_parameters": int(PARAMETERS), "draft_parameters": 2 * 10**8}
    run = load_run(write_machine(tmp_path / "run", Machine(ngram=False, precisions=("bf16",), manifest=sizes), 12))
    parts = round_parts(run, next(trial for trial in run.trials if trial.kind == "lossless"))
    assert parts is not None and parts["drafting"] == pytest.approx(3 * DRAFT_STEP_S)
    roofline, device = fit_runs([run], ["l4"], KNOWN), KNOWN["a100-sxm-80gb"]
    assert isinstance(roofline, Roofline)
    points, _ = predict_device(run, device, roofline)
    found = next(point for point in points if (point.kind, point.batch) == ("lossless", 4))
    target, draft = pass_s(device, PARAMETERS, CACHED, "bf16", 4, 4), pass_s(device, 2e8, 0.0, "bf16", 4, 1)
    assert target is not None and draft is not None
    assert found.round_s == pytest.approx(seconds(target, roofline.fit) + 3 * seconds(draft, roofline.fit))
    unknown = run.manifest.model_copy(update={"draft_parameters": None})
    kinds = {point.kind for point in predict_device(replace(run, manifest=unknown), device, roofline)[0]}
    assert kinds == {"plain"}  # a draft of unknown size cannot be timed


def test_one_machine_gives_no_error_estimate_and_says_so(runs: dict[str, Run]) -> None:
    roofline = fit_runs([runs["l4"]], ["l4"], KNOWN)
    assert isinstance(roofline, Roofline)
    assert roofline.factor == 2.0
    assert roofline.error.startswith("no error estimate: fitted on l4-24gb alone")


def test_the_range_is_the_largest_error_on_a_machine_that_was_left_out(runs: dict[str, Run]) -> None:
    alike = fit_runs([runs["l4"], runs["a100"]], ["l4", "a100"], KNOWN)
    unlike = fit_runs(list(runs.values()), list(runs), KNOWN)
    assert isinstance(alike, Roofline) and isinstance(unlike, Roofline)
    assert 1.0 <= alike.factor < 1.05  # both follow one law
    assert 1.1 < unlike.factor < 2.0  # the H100 reaches less of its peaks
    assert unlike.error.startswith("leave-one-out") and "h100-sxm-80gb a factor of" in unlike.error


def test_a_device_without_room_or_unit_gets_no_prediction(runs: dict[str, Run]) -> None:
    roofline = fit_runs([runs["l4"]], ["l4"], KNOWN)
    assert isinstance(roofline, Roofline)
    points, _ = predict_device(runs["l4"], KNOWN["t4-16gb"], roofline)
    precision = {trial.number: trial.settings.precision.target for trial in runs["l4"].trials}
    assert points and {precision[point.trial] for point in points} == {"fp32"}
    tiny = KNOWN["t4-16gb"].model_copy(update={"memory_bytes": 10**9})
    assert predict_device(runs["l4"], tiny, roofline) == (
        [],
        "no configuration of the search fits t4-16gb: memory or precision",
    )


def test_a_prediction_that_was_asked_for_and_failed_says_why(runs: dict[str, Run], tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "run", count=12)
    (folder / "costs.json").unlink()
    (group,) = assemble([folder], Options(predict=("t4",))).groups
    reasons = {item.title: item.reason for item in group.gallery.missing}
    assert reasons["Devices that were not measured"].startswith("l4-24gb: no cost table")


def test_nothing_to_fit_on_is_said(runs: dict[str, Run]) -> None:
    hardware = runs["l4"].manifest.hardware | {"name": "cpu-made-up-2c"}
    there = replace(runs["l4"], manifest=runs["l4"].manifest.model_copy(update={"hardware": hardware}))
    assert fit_runs([there], ["here"], KNOWN) == (
        "here: the peaks of cpu-made-up-2c are not known; give them with --accelerators FILE"
    )
    bare = replace(runs["l4"], costs=None)
    assert "no cost table" in str(fit_runs([bare], ["l4"], KNOWN))


@pytest.mark.parametrize(
    ("measured", "said"),
    [(0.02, None), (0.01, None), (0.07, "14% of the roofline"), (0.009, "111% of the roofline")],
)
def test_a_measurement_that_is_not_plausible_is_suspect(measured: float, said: str | None) -> None:
    cell = Cell("bf16", 1, 1, 0.01, 0.001, measured)
    assert achieved(cell) == pytest.approx(0.01 / measured)
    found = suspect([cell, Cell("bf16", 1, 5, 0.01, 0.001, 9.0)])  # only plain passes are judged
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_a_run_that_is_too_slow_or_too_fast_for_its_device_is_marked_without_being_asked(tmp_path: Path) -> None:
    slow = write_machine(tmp_path / "slow", Machine(fit=Fit(0.05, 0.4, 0.0, 0.0, True), precisions=("bf16",)), 12)
    fine = write_machine(tmp_path / "fine", Machine(precisions=("bf16",)), 12)
    found = assemble([slow, fine]).runs
    assert [len(item.suspects) for item in found] == [3, 0]  # a cell a batch size
    assert found[0].suspects[0].startswith("suspect measurement: bf16, batch 1 reaches 5% of the roofline (15%-100% is")


def test_an_unknown_device_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "run", count=12)
    with pytest.raises(ConfigurationError, match=r"--predict 'h300' is not known; allowed: a10-24gb, .*t4-16gb"):
        assemble([folder], Options(predict=("h300",)))
    with pytest.raises(ConfigurationError, match="'h200' is not one device"):
        assemble([folder], Options(predict=("h200",)))
    with pytest.raises(ConfigurationError, match="given twice"):
        assemble([folder, folder])
