"""Reports: stored files in, files out. Every run here is built through the pydantic models."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.records import (
    Estimate,
    Front,
    FrontPoint,
    Measurement,
    Prediction,
    Quality,
    RunManifest,
    TrialRecord,
    append_record,
    dump,
    write_record,
)
from lossyspec.reports.build import build_report
from lossyspec.reports.canvas import figure_svg
from lossyspec.reports.load import load_run, pair_name
from lossyspec.reports.pareto import (
    ParetoInfo,
    SearchedPoint,
    footnote,
    non_dominated,
    pareto_info,
    point_labels,
    view,
)
from lossyspec.reports.plots import draw_pareto, save_pareto
from lossyspec.reports.tables import (
    COLUMNS,
    describe_point,
    front_markdown,
    front_rows,
    front_table,
    loss_text,
    speedup_text,
    write_front_csv,
)
from lossyspec.settings import Precisions, Sampling, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def prediction(speedup: float) -> Prediction:
    return Prediction(
        speedup=speedup,
        tokens_per_s=40.0 * speedup,
        tokens_per_round=1.0 + speedup,
        drafted_per_round=4.0,
        acceptance=0.61,
        round_s=0.05,
        plain_round_s=0.025,
    )


def quality(ratio: float, interval: tuple[float, float] | None = None, **values: Any) -> Quality:
    known = {"tv": 0.04, "kl_forward": 0.03, "kl_reverse": 0.02, "certificate": None} | values
    return Quality(
        perplexity_ratio=Estimate(value=ratio, ci95=interval), tokens=4410, texts=40, corpus="target_samples", **known
    )


def measurement(speedup: float, interval: tuple[float, float] | None = None, **values: Any) -> Measurement:
    known: dict[str, Any] = {"acceptance": 0.6, "ttft_ms": 12.5, "itl_ms": {"p50": 9.0, "p95": 14.0, "p99": 20.0}}
    known |= {"length_ratio": 1.01, "repetition": 0.02, "generated_perplexity_ratio": 0.98, "prediction_error": 0.03}
    return Measurement(
        speedup=Estimate(value=speedup, ci95=interval),
        end_to_end_speedup=Estimate(value=speedup * 0.95),
        tokens_per_s=40.0 * speedup,
        plain_tokens_per_s=40.0,
        tokens_per_round=2.4,
        drafted_per_round=4.0,
        acceptance_by_depth=(0.8, 0.6, 0.4),
        tokens=9000,
        rounds=3700,
        blocks=12,
        tokens_per_round_error=-0.01,
        **(known | values),
    )


def trial(number: int, state: str = "complete", speedup: float = 1.5, ratio: float = 1.03, **values: Any) -> TrialRecord:
    known: dict[str, Any] = {"kind": "lossy", "settings": Settings(alpha=0.5), "batch_size": 1, "params": {}}
    known |= {"predicted": prediction(speedup), "quality": quality(ratio), "duration_s": 0.4}
    return TrialRecord(number=number, state=state, **(known | values))


def point(number: int, kind: str, speedup: float, ratio: float, **values: Any) -> FrontPoint:
    lossy = kind == "lossy"
    known: dict[str, Any] = {
        "recommended": False,
        "settings": Settings(
            rule="optimal" if lossy else "exact",
            alpha=values.pop("alpha", 0.6) if lossy else 0.0,
            tau=0.9,
            theta=0.3,
            draft_length=0 if kind == "plain" else 5,
            precision=Precisions(target="bf16", draft=None if kind == "plain" else "bf16"),
        ),
        "batch_size": 1,
        "predicted": prediction(speedup * 1.03),
        "quality": quality(ratio, (1 + (ratio - 1) * 0.8, 1 + (ratio - 1) * 1.2)),
        "measured": measurement(speedup, (speedup * 0.97, speedup * 1.03)),
    }
    return FrontPoint(trial=number, kind=kind, **(known | values))


def front(*points: FrontPoint, **values: Any) -> Front:
    known: dict[str, Any] = {
        "verdict": "Lossy decoding is worth it here: 1.88x at +3.1 % perplexity, against 1.45x lossless.",
        "max_quality_loss": 0.05,
        "transformers_tokens_per_s": 31.0,
        "transformers_ratio": Estimate(value=1.29, ci95=(1.25, 1.33)),
    }
    return Front(points=points, **(known | values))


def usual_front() -> Front:
    return front(
        point(0, "plain", 1.0, 1.0),
        point(1, "lossless", 1.45, 1.0),
        point(40, "lossy", 1.62, 1.008, alpha=0.2),
        point(41, "lossy", 1.6, 1.02, alpha=0.3),
        point(42, "lossy", 1.88, 1.031, alpha=0.6, recommended=True),
        point(43, "lossy", 1.93, 1.045, alpha=0.7),
    )


def manifest(**values: Any) -> RunManifest:
    known: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "command": ("lossytune", "search", "--task", "dialogue"),
        "task": "dialogue",
        "target": {"id": "HuggingFaceTB/SmolLM2-360M-Instruct", "revision": "abc", "weights_sha256": "ef" * 32},
        "draft": {"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "kind": "model"},
        "tokenizer_sha256": "ab" * 32,
        "sampling": Sampling(temperature=0.7),
        "workload": {"name": "dialogue", "prompts": 80, "sha256": "cd" * 32},
        "hardware": {
            "device": {"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 150_000_000_000},
            "power_w": None,
        },
        "versions": {"torch": "2.13.0", "transformers": "5.24.0", "lossytune": "0.1.0"},
        "config": {"max_quality_loss": 0.05, "trials": 200},
        "space": {"rule": ["optimal", "mixture"], "alpha": [0.0, 1.0]},
        "excluded": {"int4": "torchao is not installed", "fp16": "slower than bf16 at every length that was timed"},
        "seed": 0,
        "status": "complete",
        "timings_s": {"trace": 41.0, "search": 60.5},
        "peak_memory_bytes": 5_400_000_000,
        "notes": ("telemetry gap of 3 s",),
    }
    return RunManifest(**(known | values))


def usual_trials(count: int = 120) -> list[TrialRecord]:
    source = random.Random(0)
    trials = []
    for number in range(count):
        loss = source.random() ** 2 * 0.4
        speedup = 0.7 + 1.2 * source.random() * (0.6 + min(loss, 0.08) * 8)
        trials.append(trial(number, "infeasible" if loss > 0.2 else "complete", speedup, 1 + loss))
    trials.append(trial(count, "failed", predicted=None, quality=None, reason="CUDA out of memory. Tried 2.50 GiB"))
    trials.append(trial(count + 1, "failed", predicted=None, quality=None, reason="CUDA out of memory. Tried 12 GiB"))
    trials.append(trial(count + 2, "complete", quality=None))
    return trials


def write_run(folder: Path, trials: list[TrialRecord], stored: Front | None, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "manifest.json", manifest(**values))
    (folder / "trials.jsonl").unlink(missing_ok=True)
    for record in trials:
        append_record(folder / "trials.jsonl", record)
    if stored:
        write_record(folder / "front.json", stored)
    return folder


def info_of(folder: Path, trials: list[TrialRecord], stored: Front | None, **values: Any) -> ParetoInfo:
    return pareto_info(load_run(write_run(folder, trials, stored, **values)))


# --- load


def test_load_reads_what_was_written(tmp_path: Path) -> None:
    trials = usual_trials(5)
    run = load_run(write_run(tmp_path, trials, usual_front()))
    assert run.trials == tuple(trials)
    assert run.front == usual_front()
    assert run.manifest == manifest()
    assert (run.counts.complete, run.counts.failed, run.counts.infeasible) == (4, 2, 2)
    assert run.recommended is not None and run.recommended.trial == 42


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("manifest.json", None, "no such file"),
        ("manifest.json", "{", "not a JSON file"),
        ("manifest.json", '{"schema": "lossytune.run/2"}', "newer lossytune"),
        ("trials.jsonl", '{"schema": "nonsense"}\n', "line 1: schema is 'nonsense'"),
        ("trials.jsonl", b"\xff\n", "not UTF-8"),
        ("front.json", "[]", "expected a JSON object"),
        ("front.json", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_load_names_the_broken_file(tmp_path: Path, name: str, text: str | bytes | None, said: str) -> None:
    path = write_run(tmp_path, usual_trials(2), usual_front()) / name
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        load_run(tmp_path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_load_refuses_a_missing_folder_and_a_folder_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such run folder"):
        load_run(tmp_path / "absent")
    folder = write_run(tmp_path / "run", [], None)
    (folder / "front.json").mkdir()
    with pytest.raises(ConfigurationError, match=r"front\.json: cannot be read"):
        load_run(folder)


def test_reasons_that_differ_in_numbers_are_one_group(tmp_path: Path) -> None:
    trials = [
        trial(0, "failed", reason="worker died"),
        trial(1, "failed", reason="out of memory: 2.5 GiB\nmore"),
        trial(2, "failed", reason="out of memory: 12 GiB"),
        trial(3, "infeasible", constraints={"quality_loss": 0.1, "memory": -3.0}),
        trial(4, "failed"),
    ]
    run = load_run(write_run(tmp_path, trials, None))
    assert run.reasons("failed") == [("out of memory: 2.5 GiB", 2), ("worker died", 1), ("no reason recorded", 1)]
    assert run.reasons("infeasible") == [("over the limit: quality_loss", 1)]


# --- the front


def brute_force(points: list[tuple[float, float]]) -> list[bool]:
    def beaten(one: tuple[float, float]) -> bool:
        return any(other[0] >= one[0] and other[1] <= one[1] and other != one for other in points)

    return [not beaten(point) for point in points]


@settings_of_hypothesis(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, math.inf]), st.sampled_from([0.9, 1.0, 1.1, 2.0, math.inf]))
    )
)
def test_non_dominated_is_brute_force(points: list[tuple[float, float]]) -> None:
    assert non_dominated(points) == brute_force(points)


def test_non_dominated_on_many_random_points_and_nan() -> None:
    source = random.Random(1)
    points = [(source.random(), source.random()) for _ in range(400)]
    assert non_dominated(points) == brute_force(points)
    assert non_dominated([]) == []
    assert non_dominated([(math.nan, 1.0), (1.0, math.nan), (1.0, 1.0), (1.0, 1.0)]) == [False, False, True, True]


def test_a_pair_is_named_in_one_phrase() -> None:
    target, head = {"id": "models/a", "weights_sha256": "1"}, {"id": "models/a", "weights_sha256": "2"}
    assert pair_name(target, {"id": "models/b"}) == "models/a with models/b"
    assert pair_name(target, {"id": "models/b"}, paths=False) == "a with b"
    assert pair_name(target, head) == "models/a with a head of its own"
    assert pair_name(target, target, paths=False) == "a with a"  # the model drafts for itself


def test_info_holds_the_confirmed_points(tmp_path: Path) -> None:
    info = info_of(tmp_path, usual_trials(), usual_front())
    assert [point.label for point in info.confirmed] == [
        "plain", "lossless", "optimal α 0.20", "optimal α 0.30", "optimal α 0.60", "optimal α 0.70",
    ]  # fmt: skip
    best = info.confirmed[4]
    assert (best.trial, best.kind, best.recommended, best.dominated) == (42, "lossy", True, False)
    assert (best.speedup, best.perplexity_ratio) == (1.88, 1.031)
    assert best.speedup_ci95 == pytest.approx((1.8236, 1.9364))
    assert best.perplexity_ratio_ci95 == pytest.approx((1.0248, 1.0372))
    assert best.place == pytest.approx((3.1, 1.88))
    assert [point.dominated for point in info.confirmed] == [True, False, False, True, False, False]
    assert (info.loss_limit, info.has_front, info.confirmed_left_out) == (0.05, True, 0)
    assert "dialogue" in info.title
    assert info.subtitle == "SmolLM2-360M-Instruct with SmolLM2-135M-Instruct, temperature 0.7, on NVIDIA H200"


def test_labels_say_more_only_where_points_are_alike() -> None:
    alike = [
        point(1, "lossy", 1.5, 1.01),
        point(2, "lossy", 1.6, 1.02, batch_size=4),
        point(3, "lossy", 1.7, 1.03, alpha=0.7),
    ]
    assert point_labels(alike) == [
        "optimal α 0.60, 5 drafted, batch 1", "optimal α 0.60, 5 drafted, batch 4", "optimal α 0.70",
    ]  # fmt: skip
    twins = [point(7, "lossy", 1.5, 1.01), point(8, "lossy", 1.6, 1.02)]
    assert [label.rpartition(", ")[2] for label in point_labels(twins)] == ["trial 7", "trial 8"]


def test_a_failed_trial_is_never_on_the_front(tmp_path: Path) -> None:
    """R5: values of a failed trial, zeros or splendid ones, do not count."""
    trials = [
        trial(0, speedup=1.4, ratio=1.02),
        trial(1, "failed", speedup=99.0, ratio=0.5),
        trial(2, "failed", speedup=0.0, ratio=0.0),
        trial(3, "infeasible", speedup=50.0, ratio=1.0),
        trial(4, speedup=1.3, ratio=1.03),
    ]
    info = info_of(tmp_path, trials, None)
    assert [(found.trial, found.dominated, found.infeasible) for found in info.searched] == [
        (0, False, False), (3, True, True), (4, True, False),
    ]  # fmt: skip
    assert (info.counts.complete, info.counts.failed, info.counts.infeasible, info.counts.total) == (2, 2, 1, 5)


def test_absent_values_are_left_out_and_counted(tmp_path: Path) -> None:
    """H17: absent is not 0. Neither is a 0 a value: it would win on the loss axis."""
    trials = [
        trial(0),
        trial(1, predicted=None),
        trial(2, quality=None),
        trial(3, ratio=0.0),
        trial(4, "failed", predicted=None, quality=None),
    ]
    stored = front(
        point(0, "plain", 1.0, 1.0),
        point(5, "lossy", 1.9, 1.03, measured=None, recommended=True),
        point(6, "lossy", 1.5, 1.02, measured=measurement(1.5), quality=quality(1.02)),
    )
    info = info_of(tmp_path, trials, stored)
    assert [found.trial for found in info.searched] == [0]
    assert (info.searched_left_out, info.confirmed_left_out) == (3, 1)
    assert info.confirmed[1].speedup is None and math.isnan(info.confirmed[1].place[1])
    assert [found.trial for found in info.drawn] == [0, 6]
    assert info.confirmed[2].bars == (None, None)
    assert footnote(info, view(info)) == "Bars: 95 % intervals. Not drawn: 4 without a value, 1 failed."


# --- the view and the figure


@pytest.mark.parametrize("loss", [0.02, 0.4, 3.0])
def test_a_picture_without_a_feasible_point_shows_the_infeasible_ones(tmp_path: Path, loss: float) -> None:
    trials = [trial(number, "infeasible", speedup=1.5 + number / 20, ratio=1 + loss + number / 1000) for number in range(9)]
    limits = view(info_of(tmp_path, trials, None))
    assert limits.outside == 0 and limits.holds(100 * loss, 1.5)


def test_the_view_shows_what_is_confirmed_and_clips_what_is_far(tmp_path: Path) -> None:
    trials = [
        trial(100, speedup=1.4, ratio=1.03),
        trial(101, ratio=1.9),
        trial(102, speedup=9.0),
        trial(103, speedup=0.01),
    ]
    info = info_of(tmp_path, trials, usual_front())
    limits = view(info)
    assert limits.outside == 3
    assert limits.x[0] < 0.0 and 5.0 < limits.x[1] < 9.0
    assert all(limits.holds(*found.place) for found in info.drawn)
    assert limits.holds(5.4, 1.93)  # the interval of the last point
    assert "3 searched outside the axes" in footnote(info, limits)


def test_a_limit_far_from_every_point_does_not_squash_them(tmp_path: Path) -> None:
    info = info_of(tmp_path, [], front(*usual_front().points, max_quality_loss=2.0))
    limits = view(info)
    assert limits.x[1] < 10.0
    assert "the limit of +200 %" in footnote(info, limits)
    only_plain = info_of(tmp_path, [], front(point(0, "plain", 1.0, 1.0, measured=measurement(1.0)), max_quality_loss=0.0))
    low, high = view(only_plain).x
    assert low < 0.0 < high


def texts_in(figure: Figure) -> list[Any]:
    return [text for text in figure.axes[0].texts if text.get_text() and "limit" not in text.get_text()]


def test_labels_do_not_overlap_each_other(tmp_path: Path) -> None:
    close = [point(50 + i, "lossy", 1.5 + 0.01 * i, 1.02 + 0.001 * i, alpha=i / 10) for i in range(10)]
    for points in (usual_front().points, (*close, point(9, "plain", 1.0, 1.0), point(8, "lossless", 1.01, 1.0))):
        figure = draw_pareto(info_of(tmp_path, usual_trials(), front(*points)))
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [text.get_window_extent(renderer) for text in texts_in(figure)]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        area = figure.bbox
        assert all(area.x0 <= box.x0 and box.x1 <= area.x1 and box.y1 <= area.y1 for box in boxes)


def test_figure_marks_plain_lossless_and_the_recommended_point(tmp_path: Path) -> None:
    figure = draw_pareto(info_of(tmp_path, usual_trials(), usual_front()))
    said = [text.get_text() for text in texts_in(figure)]
    assert {"plain", "lossless", "recommended: optimal α 0.60"} <= set(said)
    assert [text.get_text() for text in figure.legends[0].texts][:5] == [
        "recommended", "plain", "lossless", "lossy", "lossy, beaten",
    ]  # fmt: skip
    assert len(figure.axes[0].containers) == 6  # a pair of error bars a point
    assert any(text.get_text() == "limit +5 %" for text in figure.axes[0].texts)


def test_svg_is_the_same_every_time(tmp_path: Path) -> None:
    info = info_of(tmp_path, usual_trials(), usual_front())
    first = figure_svg(draw_pareto(info))
    assert first == figure_svg(draw_pareto(info))
    assert "dc:date" not in first


def test_names_with_mathtext_and_unknown_glyphs_are_drawn_as_they_are(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info = info_of(tmp_path, [], usual_front(), task="$\\frac{$ 对话 " + "long " * 60)
        figure = draw_pareto(info)
        save_pareto(info, tmp_path)
    assert all(text.get_window_extent().x1 <= figure.bbox.width for text in figure.texts)


def test_many_searched_points_do_not_swell_the_svg(tmp_path: Path) -> None:
    info = info_of(tmp_path, [], usual_front())
    many = tuple(SearchedPoint(i, "lossy", 1 + i % 97 / 100, 1 + i % 89 / 2000, True, False) for i in range(5000))
    assert len(figure_svg(draw_pareto(replace(info, searched=many)))) < 600_000


# --- tables


def test_rows_have_units_in_their_names_and_none_for_absent(tmp_path: Path) -> None:
    stored = front(point(0, "plain", 1.0, 1.0), point(5, "lossy", 1.9, 1.03, measured=None, quality=quality(1.03, tv=None)))
    plain, lossy = front_rows(load_run(write_run(tmp_path, [], stored)))
    assert plain["speedup_ratio"] == 1.0 and plain["itl_ms_p95"] == 14.0
    assert (plain["rule"], plain["alpha"], plain["tau"], plain["draft_precision"]) == (None, None, None, None)
    assert (lossy["rule"], lossy["alpha"], lossy["draft_length_tokens"]) == ("optimal", 0.6, 5)
    assert lossy["loss_percent"] == pytest.approx(3.0)
    absent = {name for name, value in lossy.items() if value is None}
    assert {"speedup_ratio", "tokens_per_s", "acceptance_share", "tv", "loss_percent_ci95_low", "ttft_ms"} <= absent
    assert list(plain) == list(COLUMNS)


def test_csv_leaves_absent_cells_empty(tmp_path: Path) -> None:
    stored = front(point(5, "lossy", 1.9, 1.03, measured=None, note='a, "quoted" note'))
    path = write_front_csv([load_run(write_run(tmp_path, [], stored))], tmp_path / "front.csv")
    (row,) = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    assert row["speedup_ratio"] == "" and row["tokens_per_s"] == ""
    assert float(row["perplexity_ratio"]) == 1.03
    assert row["note"] == 'a, "quoted" note'


def test_table_texts(tmp_path: Path) -> None:
    assert speedup_text(Estimate(value=1.884, ci95=(1.83, 1.93))) == "1.88x [1.83, 1.93]"
    assert speedup_text(None) == "n/a"
    assert loss_text(Estimate(value=0.99999999, ci95=(0.98, 1.031))) == "+0.00 [-2.00, +3.10]"
    run = load_run(write_run(tmp_path, [], usual_front()))
    assert describe_point(run.points[0]) == "plain, batch 1, bf16"
    said = describe_point(run.points[4])
    assert said == "lossy, optimal alpha 0.60, tau 0.90, theta 0.30, 5 drafted, batch 1, bf16/bf16"
    lines = front_markdown(run).splitlines()
    assert len(lines) == 8 and {line.count("|") for line in lines} == {15}
    assert "**1.88x [1.82, 1.94]**" in lines[6]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_terminal_table_fits(tmp_path: Path, width: int) -> None:
    stored = front(*usual_front().points, point(5, "lossy", 1.2, 1.01, measured=None))
    run = load_run(write_run(tmp_path, [], stored, task="[bold]task"))
    stream = io.StringIO()
    Console(file=stream, width=width).print(front_table(run, width))
    text = stream.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert "[bold]task" in text and "lossy *" in text and "n/a" in text and "…" not in text
    assert "[+2.48, +3.72]" in text
    assert ("not shown here" in text) == (width < 160)


# --- the page and the whole report


class Balance(HTMLParser):
    """Checks that tags are balanced, and collects headings, ids and references to other resources."""

    VOID = frozenset({"meta", "wbr", "br", "img", "link", "hr", "input"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.collect(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.collect(attrs)

    def collect(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")
            assert not name.startswith("on"), name

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data


def read_page(path: Path) -> Balance:
    parser = Balance()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert not parser.open
    assert parser.tags.count("script") == 1 and "link" not in parser.tags
    assert all(reference.startswith(("#", "data:image/png")) for reference in parser.references)
    assert len(parser.ids) == len(set(parser.ids))
    return parser


def check_report(paths: list[Path]) -> tuple[Balance, dict[str, Any]]:
    """Every file is there and can be parsed; no temporary file is left, and no two have one name."""
    names = [path.name for path in paths]
    assert [name for name in names if "pareto" in name] == ["pareto.png", "pareto.svg"]
    assert names[-5:] == ["report.pdf", "front.csv", "summary.csv", "report.json", "index.html"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(names) == sorted(set(names))
    for path in paths[:-5]:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n")
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert paths[-5].read_bytes().startswith(b"%PDF")
    header = next(csv.reader(paths[-4].read_text(encoding="utf-8").splitlines()))
    assert header == ["run", "device", "task", *COLUMNS]
    data = json.loads(paths[-2].read_text(encoding="utf-8"))
    assert data["schema"] == "lossytune.report/1"
    return read_page(paths[-1]), data


def test_report_of_a_complete_run(tmp_path: Path) -> None:
    page, data = check_report(build_report(write_run(tmp_path / "run", usual_trials(), usual_front())))
    assert data["verdict"] == usual_front().verdict
    assert [row["trial"] for row in data["points"]] == [0, 1, 40, 41, 42, 43]
    assert data["points"][4]["record"] == dump(usual_front().points[4])
    assert data["counts"] == {"complete": 83, "failed": 2, "infeasible": 38}
    assert data["failures"] == [{"reason": "CUDA out of memory. Tried 2.50 GiB", "trials": 2}]
    assert data["machine"]["power_w"] is None
    assert page.tags.count("h1") == 1 and page.tags.count("table") == page.tags.count("caption") == 1
    expected = "1.88x|NVIDIA H200|139.70 GiB|torchao is not installed|2 × CUDA out of memory|ABBA|2.13.0|4,410 tokens"
    expected += "|telemetry gap of 3 s|paired bootstrap|1.29x [1.25, 1.33]"
    for said in expected.split("|"):
        assert said in page.text, said
    html = (tmp_path / "run/report/index.html").read_text(encoding="utf-8")
    assert html.index("verdict") < html.index("<svg") < html.index("<table")
    assert 'role="img"' in html and "prefers-color-scheme: dark" in html and "viewport" in html


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_report_of_a_run_without_a_front(tmp_path: Path, status: str) -> None:
    page, data = check_report(build_report(write_run(tmp_path, usual_trials(), None, status=status), tmp_path / "out"))
    assert data["points"] == [] and data["max_quality_loss_share"] == 0.05
    assert "nothing is recommended" in data["verdict"]
    assert "This run is not complete" in page.text and "all points are predictions" in page.text


def test_report_of_a_run_without_trials_and_of_one_where_all_failed(tmp_path: Path) -> None:
    page, data = check_report(build_report(write_run(tmp_path / "a", [], None, config={})))
    assert data["counts"] == {"complete": 0, "failed": 0, "infeasible": 0} and data["max_quality_loss_share"] is None
    assert "No trial was recorded" in page.text
    failed = [trial(i, "failed", predicted=None, quality=None, reason="no kernel") for i in range(3)]
    page, data = check_report(build_report(write_run(tmp_path / "b", failed, None, status="failed")))
    assert "All 3 trials failed (3 of them: no kernel)" in data["verdict"]


@pytest.mark.parametrize("measured", [None, measurement(1.0, acceptance=None, ttft_ms=None, itl_ms=None)])
def test_report_of_a_front_of_one_point(tmp_path: Path, measured: Measurement | None) -> None:
    one = point(0, "plain", 1.0, 1.0, recommended=True, measured=measured, quality=quality(1.0, tv=None))
    bare = front(one, transformers_ratio=None, transformers_tokens_per_s=None)
    page, data = check_report(build_report(write_run(tmp_path, [], bare)))
    assert "n/a" in page.text
    assert data["points"][0]["speedup_ratio"] == (None if measured is None else 1.0)
    assert data["points"][0]["acceptance_share"] is None


def test_nothing_that_was_stored_becomes_markup(tmp_path: Path) -> None:
    evil = '--><script>alert("x")</script><img src=x onerror=alert(1)>\'&amp;</title>]]>'
    stored = front(point(0, "plain", 1.0, 1.0, note=evil, recommended=True), verdict=evil)
    names = {"id": evil, evil: evil, "nested": {evil: [evil, {"a": evil}]}, "path": evil, "x_sha256": evil}
    folder = write_run(
        tmp_path, [trial(1, "failed", reason=evil), trial(2, "infeasible", reason=evil)], stored, task=evil,
        target=names, draft=names, hardware=names, workload=names, versions={evil: evil}, excluded={evil: evil},
        notes=(evil,), command=(evil,), created=evil, config=names, space=names, timings_s={evil: 1.0},
    )  # fmt: skip
    page, data = check_report(build_report(folder))
    assert "img" not in page.tags and data["task"] == evil
    assert page.text.count("<script>") >= 15


def test_report_is_rebuilt_over_an_older_one_and_reports_a_folder_it_cannot_write(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", usual_trials(5), None, status="running")
    check_report(build_report(folder))
    write_run(folder, usual_trials(5), usual_front())
    _, data = check_report(build_report(folder))
    assert data["status"] == "complete" and len(data["points"]) == 6
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        build_report(folder, tmp_path / "file")


def test_importing_reports_is_light() -> None:
    folder = Path(__file__).resolve().parents[1] / "reports"
    modules = ", ".join(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"))
    code = (
        f"import sys; from lossyspec.reports import {modules}; "
        "heavy = {'torch', 'optuna', 'transformers', 'matplotlib', 'numpy', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment, timeout=60)


def test_building_needs_no_torch_optuna_or_pyplot(tmp_path: Path) -> None:
    write_run(tmp_path, usual_trials(10), usual_front())
    code = (
        "import sys; from pathlib import Path; from lossyspec.reports.build import build_report; "
        "build_report(Path(sys.argv[1])); "
        "heavy = {'torch', 'optuna', 'transformers', 'matplotlib.pyplot', 'tkinter'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
