"""The report over several runs: what is drawn, what is refused, the page, the PDF, the files and the command."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import Machine, scale_run, write_machine
from test_reports import read_page

from lossyspec.records import Front, TrialRecord, append_record, write_record
from lossyspec.reports.assemble import GroupReport, Options, Report, assemble
from lossyspec.reports.build import build_report
from lossyspec.reports.canvas import PAPER
from lossyspec.reports.capacity import Demand
from lossyspec.reports.charts import Bars, Chart, Figure, Mark, Series
from lossyspec.reports.data import summary_rows
from lossyspec.reports.draw import Tip, draw_figure
from lossyspec.reports.html import render_page
from lossyspec.reports.inline import inline_svg
from lossyspec.reports.prices import price_terms
from lossyspec.tuner.cli import main

OPTIONS = Options(
    price_terms(per_hour=["l4=0.8"], capital=["h100=30000"], years=3, pue=1.3, electricity=0.15, source="quote 17",
                date="2026-03-01"),
    ("h200-sxm", "rtx-4090"),
    None,
    Demand(8.0, 200, 32, 6.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two machines with the same work, and a third run of other prompts."""
    root = tmp_path_factory.mktemp("page")
    code = {"task": "code", "workload": {"sha256": "99" * 32, "max_new_tokens": 64}}
    return [
        write_machine(root / "l4", Machine("l4-24gb", energy=True), 50),
        write_machine(root / "h100", Machine("h100-sxm-80gb", driver="570.12", seed=3), 50),
        write_machine(root / "code", Machine("l4-24gb", manifest=code), 50),
    ]


@pytest.fixture(scope="module")
def report(folders: list[Path]) -> Report:
    return assemble(folders, OPTIONS)


def figures(group: GroupReport) -> dict[str, Figure]:
    return {item.name: item for item in group.gallery.drawn}


def chart(group: GroupReport, name: str) -> Chart:
    found = figures(group)[name]
    assert isinstance(found, Chart)
    return found


# what is drawn


def test_unlike_runs_are_in_no_figure_together(report: Report) -> None:
    assert [group.group.labels for group in report.groups] == [("l4-24gb (dialogue)", "h100-sxm-80gb"), ("l4-24gb (code)",)]
    assert report.refusals == ("l4-24gb (dialogue) and l4-24gb (code) are not drawn together: unlike prompts",)
    assert report.groups[0].footnotes == ("driver differs: 580.65, 570.12",)
    for group in report.groups:
        allowed = {*group.group.labels, *group.group.devices()}
        for item in group.gallery.drawn:
            parts = item.rows if isinstance(item, Bars) else item.series
            assert {part.run for part in parts} <= allowed, item.name


def test_every_figure_of_a_group_has_its_data(report: Report) -> None:
    assert set(figures(report.groups[0])) == {
        "speed-against-loss", "user-and-device", "batch-sizes", "memory", "predicted-and-measured", "cost", "energy",
        "capacity", "predicted-devices",
    }  # fmt: skip
    assert report.groups[0].gallery.missing == []
    assert [item.name for item in report.runs[0].gallery.drawn] == ["acceptance", "round-time", "importance"]
    assert [(item.title, "no energy" in item.reason) for item in report.groups[1].gallery.missing] == [
        ("Joules a token", True)
    ]


def test_what_did_not_run_live_says_so(report: Report) -> None:
    group = report.groups[0]
    devices = set(group.group.devices())
    assert devices == {"h200-sxm-141gb", "rtx-4090-24gb"}
    for item in group.gallery.drawn:
        if isinstance(item, Chart):
            for series in item.series:
                if series.run in devices:
                    assert series.source == "predicted" and "(predicted)" in series.name, item.name
                elif item.name != "memory":
                    assert series.source != "predicted", item.name
            if any(series.source == "derived" for series in item.series):
                assert re.search("cost table|estimate", item.note), item.name
        elif item.name == "predicted-devices":
            assert all((part.source == "predicted") == (row.run in devices) for row in item.rows for part in row.parts)
    assert "no error estimate" not in str(group.roofline)
    assert "no error estimate" in str(report.groups[1].roofline)  # one machine


def test_the_cost_is_a_curve_that_falls_with_the_utilisation(report: Report) -> None:
    found = chart(report.groups[0], "cost")
    for series in found.series:
        costs = [mark.y for mark in series.marks]
        assert [mark.x for mark in series.marks][:: len(costs) - 1] == [5, 100]
        assert costs == sorted(costs, reverse=True) and costs[0] == pytest.approx(20 * costs[-1])
    assert "quote 17, 2026-03-01" in found.note and "0.8 USD an hour" in found.note


def test_speed_a_user_times_the_batch_is_speed_a_device(report: Report) -> None:
    for series in chart(report.groups[0], "user-and-device").series:
        for mark in series.marks:
            assert mark.y == pytest.approx(mark.x * int(mark.label or 1))


def missing_of(folder: Path) -> dict[str, str]:
    found = assemble([folder])
    return {
        item.title: item.reason for gallery in (found.groups[0].gallery, found.runs[0].gallery) for item in gallery.missing
    }


def test_nothing_is_drawn_for_what_is_absent(tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "run", Machine(batches=(1,)), 20)
    (folder / "costs.json").unlink()
    (folder / "measurements.jsonl").unlink()
    said = missing_of(folder)
    assert said["Where a round's time goes"] == "the run folder has no cost table"
    assert said["What each knob does"] == "20 finished trials; 30 are needed"
    assert "neither a GPU's counter nor RAPL was read" in said["Joules a token"]
    assert said["Cost of a million tokens"].startswith("no price was given")
    assert said["Devices for a load"].startswith("no load was given")
    assert said["Devices that were not measured"].startswith("nothing was asked for")
    memory = chart(assemble([folder]).groups[0], "memory")
    assert "the largest batch is not known, one batch size alone was searched" in memory.note and not memory.lines


def test_a_run_without_front_or_with_failed_trials_alone_draws_no_live_figure(tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "run", Machine(), 12, front=False)
    said = missing_of(folder)
    live = {"Tokens/s against loss", "Predicted against measured", "Acceptance by depth", "Where a round's time goes"}
    assert live <= set(said)
    trials = [TrialRecord.model_validate_json(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    (folder / "trials.jsonl").unlink()
    for trial in trials:
        broken = {"state": "failed", "predicted": None, "quality": None, "memory_bytes": None, "reason": "no kernel"}
        append_record(folder / "trials.jsonl", trial.model_copy(update=broken))
    found = assemble([folder])
    assert found.groups[0].gallery.drawn == [] and found.runs[0].gallery.drawn == []
    assert "All 12 trials failed (12 of them: no kernel)" in found.runs[0].summary.sentence


def test_no_feasible_lossy_point_and_a_front_of_one(tmp_path: Path) -> None:
    folder = write_machine(tmp_path / "run", Machine(), 12)
    front = Front.model_validate_json((folder / "front.json").read_text())
    plain = front.points[0].model_copy(update={"recommended": True})
    write_record(folder / "front.json", front.model_copy(update={"points": (plain,)}))
    (folder / "report").mkdir()
    for name in ("cost.png", "capacity-group2.svg", "pareto-run3.png", "mine.png", "cost.txt"):
        (folder / "report" / name).write_text("older")
    paths = {path.name: path for path in build_report(folder)}
    left = {path.name for path in (folder / "report").iterdir()}
    assert left == {*paths, "mine.png", "cost.txt"}  # pictures of an older report are gone, all else stays
    page = read_page(paths["index.html"])
    assert "speculation does not pay" in page.text
    assert "Acceptance by depth: no drafting point was measured live." in page.text
    assert "predicted-and-measured.png" not in paths and "speed-against-loss.png" in paths
    data = json.loads(paths["report.json"].read_text())
    assert data["summary"]["lossless_tokens_per_s"] is None and data["summary"]["joules_per_token"] is None
    assert data["absolute"]["demand"] is None and data["absolute"]["capacity"] is None


# pictures


def one_chart(source: Any) -> Chart:
    marks = (Mark(1, 2, "first <b>", 1, 3), Mark(2, 4, "second", 3, 5))
    return Chart("c", "A $title$", "x", "y", (Series("s", "r<un", "lossy", source, "#0072b2", marks),), "A note.")


@pytest.mark.parametrize(("source", "face", "dashed"), [("predicted", PAPER, True), ("measured", "#0072b2", False)])
def test_predicted_points_are_hollow_and_their_lines_dashed(source: str, face: str, dashed: bool) -> None:
    axes = draw_figure(one_chart(source)).canvas.axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() for line in points] == [face, face]
    (joined,) = [line for line in axes.lines if len(line.get_xdata()) == 2 and list(line.get_xdata()) == [1, 2]]
    assert (joined.get_linestyle() == "--") is dashed


def test_the_page_says_of_a_mark_what_it_is_and_whose() -> None:
    svg = (
        '<?xml version="1.0"?><svg width="9pt" height="90pt" viewBox="0 0 9 90" xmlns:xlink="x">'
        '<g id="e0"><use xlink:href="#m"/>'
        '<path clip-path="url(#p)" style="fill: #0072b2; stroke: #ffffff"/></g></svg>'
    )
    found = inline_svg(svg, "fig", 'a "b"', {"e0": Tip("1 < 2 & more", "run", "lossy")}, 20.0)
    assert 'viewBox="0 0 9 70.00"' in found and "width" not in found and 'aria-label="a &quot;b&quot;"' in found
    assert '<g id="fig-e0" class="mark" data-run="run" data-kind="lossy"><title>1 &lt; 2 &amp; more</title>' in found
    assert 'href="#fig-m"' in found and "url(#fig-p)" in found
    assert "fill: var(--blue); stroke: var(--paper)" in found


# the files


@pytest.fixture(scope="module")
def built(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("out")
    return {path.name: path for path in build_report(folders[:2], out, OPTIONS)}


def test_the_page_of_two_machines_needs_no_other_file_and_hides_nothing(built: dict[str, Path]) -> None:
    page = read_page(built["index.html"])
    html = built["index.html"].read_text(encoding="utf-8")
    for said in (
        "h100-sxm-80gb is faster than l4-24gb", "driver differs: 580.65, 570.12", "certified at most", "leave-one-out",
        "Arrivals are Poisson", "quote 17, 2026-03-01", "the board's limit", "NVML energy counter (the whole board)",
        "Without a figure: h100-sxm-80gb: the run recorded no energy",
    ):  # fmt: skip
        assert said in page.text, said
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\((?!#)""", html)
    assert html.count('class="mark"') > 150
    runs = set(re.findall(r'<input type="checkbox" name="run" value="([^"]*)"', html))
    assert runs == {"l4-24gb", "h100-sxm-80gb", "h200-sxm-141gb", "rtx-4090-24gb"}
    assert set(re.findall(r'data-run="([^"]*)"', html)) == runs
    assert "Nothing: every figure has its data." in page.text


def test_every_figure_is_a_file_and_in_report_json(built: dict[str, Path]) -> None:
    data = json.loads(built["report.json"].read_text(encoding="utf-8"))
    assert data["schema"] == "lossytune.comparison/1" and [run["label"] for run in data["runs"]] == [
        "l4-24gb",
        "h100-sxm-80gb",
    ]
    (group,) = data["groups"]
    names = [item["name"] for item in group["figures"]]
    assert len(names) == 9 and {f"{name}.{end}" for name in names for end in ("png", "svg")} <= set(built)
    assert group["roofline"]["factor"] > 1 and len(group["predicted"]) == 18
    assert {point["device"] for point in group["predicted"]} == {"h200-sxm-141gb", "rtx-4090-24gb"}
    assert group["capacity_assumptions"] and group["price_date"] == "2026-03-01"
    devices = {item["run"]: [result["devices"] for result in item["results"]] for item in group["capacity"]}
    assert devices["l4-24gb"][0] >= devices["h100-sxm-80gb"][0] >= 1
    first = group["capacity"][0]["results"][0]
    assert first["price_per_hour"] == pytest.approx(0.8 * first["devices"])


def test_the_csv_has_a_row_a_run_and_a_row_a_point(built: dict[str, Path]) -> None:
    rows = list(csv.DictReader(built["summary.csv"].read_text(encoding="utf-8").splitlines()))
    assert [row["device"] for row in rows] == ["l4-24gb", "h100-sxm-80gb"]
    assert float(rows[0]["joules_per_token"]) > 0 and rows[1]["joules_per_token"] == ""
    assert float(rows[0]["cost_per_million_tokens_at_10_percent"]) == pytest.approx(
        10 * float(rows[0]["cost_per_million_tokens_at_100_percent"])
    )
    points = list(csv.DictReader(built["front.csv"].read_text(encoding="utf-8").splitlines()))
    assert {(point["run"], point["device"]) for point in points} == {("l4", "l4-24gb"), ("h100", "h100-sxm-80gb")}


def test_the_pdf_is_one_page(built: dict[str, Path]) -> None:
    data = built["report.pdf"].read_bytes()
    assert data.startswith(b"%PDF") and len(re.findall(rb"/Type /Page\b(?!s)", data)) == 1


# the command


def said_by(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Any, str, str]:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["lossytune", "report", *args])
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails when something is drawn: options are judged before."""

    def draws(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was drawn")

    monkeypatch.setattr("lossyspec.reports.build.save_figure", draws)
    monkeypatch.setattr("lossyspec.reports.build.save_pareto", draws)
    yield


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--price", "l4"], "error: --price 'l4': expected NAME=NUMBER"),
        (["--price", "t4=2"], "error: --price 't4' is not known; allowed: l4-24gb"),
        (["--capital", "l4=2500"], "error: --capital l4: --years, --pue, --electricity must be given with it"),
        (["--predict", "h2000"], "error: --predict 'h2000' is not known; allowed: a10-24gb"),
        (["--rate", "4"], "error: capacity needs --input-tokens, --output-tokens, --p95 as well"),
        (["--predict", "t4", "--accelerators", "absent.json"], "error: absent.json: no such file"),
        (["nowhere"], "error: nowhere: no such run folder"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(
    folders: list[Path],
    unread: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    said: str,
) -> None:
    code, out, err = said_by(capsys, monkeypatch, str(folders[0]), *args)
    assert (code, out) == (2, "")
    assert err.startswith(said) and err.count("\n") == 1


def test_reports_add_little_to_the_start(tmp_path: Path) -> None:
    """In CPU seconds beside the records, best of three: what else runs on the machine does not count."""
    code = (
        "import time, lossyspec.records, importlib.resources; began = time.process_time(); import lossyspec.reports.build; "
        "print(time.process_time() - began)"
    )
    taken = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout)
        for _ in range(3)
    ]
    assert min(taken) < 0.3


def test_a_run_that_was_not_measured_is_marked_everywhere(folders: list[Path], tmp_path: Path) -> None:
    copy = scale_run(folders[0], tmp_path / "copy", "a100-sxm-80gb", 4.0)
    found = assemble([folders[0], copy])
    assert [item.label for item in found.runs] == ["l4-24gb", "a100-sxm-80gb (made up)"]
    assert found.runs[1].summary.made_up == "a copy of l4, measured on l4-24gb, with every time divided by 4"
    speeds = [item.summary.speed_tokens_per_s for item in found.runs]
    assert speeds[0] and speeds[1] and speeds[1].value == pytest.approx(4 * speeds[0].value)
    assert found.refusals == () and "a100-sxm-80gb (made up) is faster than l4-24gb" in found.groups[0].ranking[0]
    rows = summary_rows(found)
    assert rows[0]["made_up"] is None and "divided by 4" in rows[1]["made_up"]
    page = render_page(found, [("pareto-1", "<svg></svg>"), ("pareto-2", "<svg></svg>")], [[], []], [[]])
    assert page.count("Not measured, made up:") == 1


def test_the_command_passes_all_options_and_prints_paths_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def build(*args: Any) -> list[Path]:
        seen.append(args)
        (tmp_path / "report.json").write_text('{"schema": "x"}\n')
        return [tmp_path / "front.csv", tmp_path / "report.json"]

    monkeypatch.setattr("lossyspec.reports.build.build_report", build)
    args = ["a", "b", "--out", "o", "--price", "l4=0.8", "--capital", "h100=9", "--years", "3", "--pue", "1.3"]
    args += ["--electricity", "0.1", "--power", "h100=500", "--currency", "EUR", "--price-source", "s", "--price-date", "d"]
    args += ["--predict", "t4", "--accelerators", "x.json", "--rate", "2", "--input-tokens", "3", "--output-tokens", "4"]
    code, out, err = said_by(capsys, monkeypatch, *args, "--p95", "5")
    assert (code, out, err) == (0, f"{tmp_path}/front.csv\n{tmp_path}/report.json\n", "")
    terms = price_terms(
        per_hour=["l4=0.8"], capital=["h100=9"], power_w=["h100=500"], years=3.0, pue=1.3, electricity=0.1, currency="EUR",
        source="s", date="d",
    )  # fmt: skip
    wanted = Options(terms, ("t4",), Path("x.json"), Demand(2.0, 3, 4, 5.0))
    assert seen == [((Path("a"), Path("b")), Path("o"), wanted)]
    assert said_by(capsys, monkeypatch, "a", "--json") == (0, '{"schema": "x"}\n', "")
    assert seen[1] == ((Path("a"),), None, Options())
