"""Whole searches on tiny models: every file of the run folder, the profile at work, interrupts and resuming."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import save_tiny, tiny_config, tiny_tokenizer
from test_text_drafting import pair_tokenizer

from lossyspec.cost_table import CostTable
from lossyspec.decoder import Decoder
from lossyspec.errors import ConfigurationError, NoFeasiblePoint
from lossyspec.profile import known_profiles, read_profile
from lossyspec.records import BlockRecord, Front, RunManifest, TrialRecord, read_record, read_records
from lossyspec.reports.build import build_report
from lossyspec.settings import Sampling
from lossyspec.tuner import texts
from lossyspec.tuner.cli import main
from lossyspec.tuner.config import SearchConfig, make_config
from lossyspec.tuner.laws import BinnedLaw
from lossyspec.tuner.progress import Reporter
from lossyspec.tuner.search import Result, Search
from lossyspec.tuner.study import FIRST_ALPHAS
from lossyspec.tuner.trace_files import load_trace

TRIALS = 40


def write_prompts(path: Path) -> Path:
    """Prompts that repeat words, so that prompt lookup finds something, with references."""
    choose = random.Random(0)
    words = [f"w{choose.randrange(12)}" for _ in range(200)]
    rows = [
        {"prompt": " ".join(words[20 * row : 20 * row + 14]), "reference": " ".join(words[20 * row + 5 : 20 * row + 17])}
        for row in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model `target`, one of other weights `other`, a slow one `slow`, and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("search")
    save_tiny(folder / "target")
    save_tiny(folder / "other", seed=5)
    save_slow(folder / "slow")
    write_prompts(folder / "prompts.jsonl")
    return folder


def save_slow(folder: Path) -> None:
    """A draft with four times the layers of the target."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    config.num_hidden_layers *= 4
    torch.manual_seed(9)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def config_of(place: Path, **changes: Any) -> SearchConfig:
    """A search that ends within seconds: the budget leaves time for no more than the fewest live blocks."""
    values = {
        "target": str(place / "target"),
        "prompts": place / "prompts.jsonl",
        "texts": 4,
        "max_new_tokens": 16,
        "trials": TRIALS,
        "budget_s": 10.0,
        "batch_sizes": (1, 2),
        "precisions": ("fp32",),
        "max_draft_length": 4,
    }
    return make_config(**{**values, **changes})


def search(
    place: Path, out: Path, *, resume: bool = False, stop: Callable[[], bool] = lambda: False, **changes: Any
) -> Result:
    return Search(config_of(place, **changes), Reporter(), out=out, resume=resume, stop=stop).run()


def trials_of(folder: Path) -> list[TrialRecord]:
    return list(read_records(folder / "trials.jsonl", TrialRecord))


def blocks_of(folder: Path) -> list[BlockRecord]:
    return list(read_records(folder / "measurements.jsonl", BlockRecord))


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    """One finished search; its profile is kept in a folder that the tests of it use as the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOSSYTUNE_PROFILES", str(place / "profiles"))
        result = search(place, tmp_path_factory.mktemp("run") / "run")
    yield result


# what a search leaves behind


def test_every_file_of_a_run_is_there_and_parses(done: Result) -> None:
    manifest = read_record(done.folder / "manifest.json", RunManifest)
    assert manifest.status == "complete"
    assert manifest == done.manifest
    assert {"trace", "costs", "search", "live", "confirmation", "total"} <= set(manifest.timings_s)
    assert manifest.peak_memory_bytes is not None and manifest.peak_memory_bytes > 2**20
    assert read_record(done.folder / "front.json", Front) == done.front
    assert read_profile(done.folder / "profile.json") == done.profile
    traces = load_trace(done.folder / "trace.safetensors")
    assert set(traces) == {"search", "confirm", "references"}
    table = CostTable.read(done.folder / "costs.json")
    assert set(table.round_s) == {("fp32", 1), ("fp32", 2)}
    assert all(value > 0 for times in table.round_s.values() for value in times)
    assert {path.name for path in done.folder.iterdir()} >= {"trials.jsonl", "measurements.jsonl"}
    assert [path for path in done.folder.iterdir() if path.name.startswith(".") or path.suffix == ".partial"] == []


def test_all_trials_are_recorded_in_order_and_none_failed(done: Result) -> None:
    records = trials_of(done.folder)
    assert [record.number for record in records] == list(range(TRIALS))
    assert {record.state for record in records} <= {"complete", "infeasible"}
    assert all(record.predicted and record.quality and record.memory_bytes for record in records)
    assert all((record.state == "infeasible") == bool(record.reason) for record in records)
    assert done.profile.provenance.trials == {
        state: sum(record.state == state for record in records) for state in ("complete", "failed", "infeasible")
    }


def test_the_first_trials_are_the_baselines_of_every_batch_size(done: Result) -> None:
    records = trials_of(done.folder)
    assert [(record.kind, record.batch_size) for record in records[:3]] == [("plain", 1), ("plain", 2), ("lossless", 1)]
    relaxed = [record for record in records[3:] if record.batch_size == 1][: 2 * len(FIRST_ALPHAS)]
    assert {record.settings.alpha for record in relaxed} == set(FIRST_ALPHAS)
    assert {record.settings.draft_length for record in relaxed} == {records[2].settings.draft_length}
    assert records[3 + len(relaxed)].kind == "lossless"
    assert records[3 + len(relaxed)].batch_size == 2
    for record in records[:2]:
        assert record.predicted is not None
        assert record.predicted.speedup == pytest.approx(1.0)
        assert record.predicted.tokens_per_round == pytest.approx(1.0)


def test_lossless_trials_cost_nothing_and_lossy_ones_keep_their_certificate(done: Result) -> None:
    for record in trials_of(done.folder):
        assert record.quality is not None
        ratio = record.quality.perplexity_ratio.value
        if record.kind in ("plain", "lossless"):
            assert ratio == pytest.approx(1.0, abs=1e-9)
        elif record.quality.certificate is not None:
            assert ratio <= record.quality.certificate * (1 + 1e-9)


def test_the_front_has_plain_and_lossless_and_one_recommendation(done: Result) -> None:
    points = done.front.points
    assert {"plain", "lossless"} <= {point.kind for point in points}
    assert sum(point.recommended for point in points) == 1
    assert len({point.batch_size for point in points}) == 1
    for point in points:
        assert point.measured is not None
        assert point.measured.speedup.ci95 is not None
        assert point.quality.texts == 4
        assert point.quality_references is not None
        assert point.quality_references.corpus == "references"
    plain = next(point for point in points if point.kind == "plain")
    assert plain.measured is not None
    assert (plain.measured.speedup.value, plain.measured.tokens_per_round) == (1.0, 1.0)
    assert done.front.transformers_tokens_per_s is not None and done.front.transformers_tokens_per_s > 0
    speeds = [point.measured.speedup.value for point in points if point.measured]
    assert speeds == sorted(speeds)


def test_live_blocks_alternate_in_order_and_transformers_plays_in_every_other_pair(done: Result) -> None:
    names = {str(point.trial) for point in done.front.points} | {"transformers"}
    by_block: dict[int, list[BlockRecord]] = {}
    for record in blocks_of(done.folder):
        by_block.setdefault(record.block, []).append(record)
    assert len(by_block) >= 6
    assert len(by_block) % 2 == 0
    assert sorted(by_block) == list(range(len(by_block)))
    order = [record.contestant for record in by_block[0]]
    for number, records in by_block.items():
        here = names if number // 2 % 2 == 0 else names - {"transformers"}
        assert {record.contestant for record in records} == here
        playing = [name for name in order if name in here]
        assert [record.contestant for record in records] == (playing if number % 2 == 0 else playing[::-1])
        assert {record.forward for record in records} == {number % 2 == 0}
        assert all(record.tokens == sum(map(len, record.outputs)) > 0 for record in records)


def test_the_profile_says_what_was_measured(done: Result) -> None:
    point = next(point for point in done.front.points if point.recommended)
    profile = done.profile
    assert profile.evidence.batch_size == point.batch_size
    assert point.measured is not None
    assert profile.evidence.speedup == point.measured.speedup
    assert profile.evidence.quality == point.quality
    assert profile.settings.model_copy(update={"schedule": ()}) == point.settings
    assert [row.batch for row in profile.settings.schedule] == [(1, 1), (2, 2)]
    assert profile.settings.draft_length_for(point.batch_size) == point.settings.draft_length
    assert profile.settings.draft_length_for(3) == 0
    assert profile.provenance.workload["sha256"] == done.manifest.workload["sha256"]


def test_the_profile_matches_exactly_at_load_and_answers(done: Result, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Decoder.from_profile(done.folder / "profile.json")
    assert by_hand.match is not None and by_hand.match.level == "exact"
    assert by_hand.settings == done.profile.settings
    answer = by_hand.generate("w1 w2 w3 w1 w2", 12, seed=0)
    assert 0 < len(answer[0].tokens) <= 12
    monkeypatch.setenv("LOSSYTUNE_PROFILES", str(place / "profiles"))
    assert done.profile in [item for _, item in known_profiles()]
    found = Decoder.from_profile("auto", "dialogue", str(place / "target"))
    assert found.match is not None and found.match.level == "exact"
    assert found.settings == done.profile.settings
    assert found.generate("w1 w2 w3 w1 w2", 12, seed=0)[0].tokens == answer[0].tokens
    other = Decoder.from_profile("auto", "dialogue", str(place / "other"))
    assert other.match is not None and other.match.level == "none"


def test_another_point_of_the_front_becomes_a_profile_with_its_own_figures(
    done: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lossytune", "profiles", "pick", *map(str, arguments)])
        main()

    monkeypatch.setenv("LOSSYTUNE_PROFILES", str(tmp_path / "kept"))
    for point in done.front.points:
        assert point.measured is not None
        pick(done.folder, "--trial", point.trial, "--json")
        said = json.loads(capsys.readouterr().out)
        profile = read_profile(Path(said["path"]))
        assert profile.settings.model_copy(update={"schedule": ()}) == point.settings
        assert profile.settings.draft_length_for(point.batch_size) == point.settings.draft_length
        assert profile.settings.draft_length_for(point.batch_size + 1) == 0
        assert profile.evidence.speedup == point.measured.speedup and profile.evidence.quality == point.quality
        assert (profile.match, profile.provenance) == (done.profile.match, done.profile.provenance)
        if point.recommended:
            assert profile.evidence == done.profile.evidence
    own = tmp_path / "own.json"
    pick(done.folder, "--trial", done.front.points[0].trial, "--out", own)
    assert str(own) in capsys.readouterr().out and read_profile(own)
    for folder, trial, told in (
        (done.folder, 99999, "--trial is 99999; the measured points of"),
        (tmp_path, 0, "no profile"),
    ):
        with pytest.raises(SystemExit) as ended:
            pick(folder, "--trial", trial)
        assert ended.value.code == 2 and told in capsys.readouterr().err


def test_the_report_is_built_from_the_run(done: Result) -> None:
    paths = {path.name: path for path in build_report(done.folder)}
    assert all(path.stat().st_size > 0 for path in paths.values())
    data = json.loads(paths["report.json"].read_text(encoding="utf-8"))
    assert data["verdict"] == done.front.verdict
    assert len(data["points"]) == len(done.front.points)
    assert data["counts"]["complete"] + data["counts"]["infeasible"] == TRIALS
    assert "</html>" in paths["index.html"].read_text(encoding="utf-8")


def test_a_folder_that_holds_a_run_is_not_overwritten(done: Result, place: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds a run already; go on with --resume"):
        search(place, done.folder)


# texts


def test_a_search_reads_as_many_texts_as_its_budget_holds_and_resumes_with_as_many(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trials = tmp_path / "run", tmp_path / "run" / "trials.jsonl"
    monkeypatch.setattr(texts, "_LEAST_TEXTS", 2)
    monkeypatch.setattr(texts, "_READING_SHARE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        search(place, out, texts=None, stop=lambda: len(lines_of(trials)) >= 1)
    said = capsys.readouterr().err
    assert "reading 4 texts of each half takes about" in said and "2 are used; more --budget, or --texts" in said
    monkeypatch.setattr(texts, "_READING_SHARE", 1e6)
    result = search(place, out, texts=None, resume=True)
    assert (result.manifest.workload["search"], result.manifest.workload["confirm"]) == (2, 2)
    plenty = Search(config_of(place, texts=None), Reporter()).work
    assert texts.texts_in_budget(plenty) >= 4
    assert len(load_trace(out / "trace.safetensors")["search"].texts.prompts) == 2


# interrupts


def test_an_interrupted_search_goes_on_where_it_was(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted in the search, then killed in the middle of a live block, then interrupted, then finished."""
    out = tmp_path / "run"
    trials, live = out / "trials.jsonl", out / "measurements.jsonl"

    with pytest.raises(KeyboardInterrupt):
        search(place, out, stop=lambda: len(lines_of(trials)) >= 1)
    assert read_record(out / "manifest.json", RunManifest).status == "interrupted"
    first = lines_of(trials)
    assert len(first) == 1
    assert not live.exists()

    with pytest.raises(KeyboardInterrupt):
        search(place, out, resume=True, stop=lambda: len(lines_of(live)) >= 1)
    assert "trace: from the run folder" in capsys.readouterr().err
    searched = lines_of(trials)
    assert searched[:1] == first
    assert len(searched) == TRIALS
    contestants = len(lines_of(live))
    live.write_text("".join(line + "\n" for line in lines_of(live)[:-1]), encoding="utf-8")  # killed in its first block

    with pytest.raises(KeyboardInterrupt):
        search(place, out, resume=True, stop=lambda: len(lines_of(live)) >= 3 * contestants - 1)
    kept = lines_of(live)

    result = search(place, out, resume=True)
    assert result.manifest.status == read_record(out / "manifest.json", RunManifest).status == "complete"
    assert lines_of(trials) == searched
    assert lines_of(live)[: len(kept)] == kept
    records = trials_of(out)
    assert [record.number for record in records] == list(range(TRIALS))
    assert [record.kind for record in records[:3]] == ["plain", "plain", "lossless"], "the baselines are not lost"
    plain = [record.params for record in records if record.kind == "plain"][:2]
    assert plain[0] != plain[1], "nor repeated"
    whole = {record.block for record in blocks_of(out)}
    for point in result.front.points:
        assert point.measured is not None
        assert point.measured.blocks == len(whole) >= 6
        runs = {record.block: record for record in blocks_of(out) if record.contestant == str(point.trial)}
        assert point.measured.tokens == sum(record.tokens for record in runs.values()), "no block counts twice"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"texts": 3}, r"texts: 4 then, 3 now"),
        ({"seed": 1}, r"seed: 0 then, 1 now"),
        ({"max_quality_loss": 0.1}, r"max_quality_loss: 0\.05 then, 0\.1 now"),
        ({"batch_sizes": (1,), "max_draft_length": 2}, r"batch_sizes: \[1, 2\] then, \[1\] now; max_draft_length: 4 then"),
        ({"sampling": Sampling(temperature=0.0)}, r"sampling: None then"),
    ],
)
def test_resuming_with_other_options_is_refused_naming_them(
    done: Result, place: Path, changes: dict[str, Any], said: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.folder.iterdir()}
    with pytest.raises(ConfigurationError, match=rf"^--resume with other options: {said}.*; start a new run instead$"):
        search(place, done.folder, resume=True, **changes)
    assert {path: path.stat().st_mtime_ns for path in done.folder.iterdir()} == before


def test_resuming_with_other_prompts_or_another_model_is_refused(done: Result, place: Path, tmp_path: Path) -> None:
    prompts, weights = place / "prompts.jsonl", place / "target" / "model.safetensors"
    kept, other = prompts.read_bytes(), weights.read_bytes()
    try:
        prompts.write_text(prompts.read_text(encoding="utf-8").replace("w1 ", "w2 "), encoding="utf-8")
        with pytest.raises(ConfigurationError, match=r"--resume: the workload is another one .*start a new run instead"):
            search(place, done.folder, resume=True)
        prompts.write_bytes(kept)
        weights.write_bytes((place / "other" / "model.safetensors").read_bytes())
        with pytest.raises(ConfigurationError, match="--resume: the target is another one"):
            search(place, done.folder, resume=True)
    finally:
        prompts.write_bytes(kept)
        weights.write_bytes(other)


def test_resuming_nothing_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="--resume: no unfinished run of task 'dialogue' under runs/"):
        Search(config_of(place), Reporter(), resume=True).run()
    with pytest.raises(ConfigurationError, match=r"--resume: .* holds no run \(no manifest\.json\)"):
        search(place, tmp_path / "none", resume=True)


def test_the_newest_unfinished_run_of_the_task_is_resumed(
    done: Result, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lossyspec.records import write_record
    from lossyspec.tuner.store import unfinished_folder

    for name, status in (("1-dialogue", "failed"), ("2-dialogue", "interrupted"), ("3-dialogue", "complete")):
        write_record(tmp_path / name / "manifest.json", done.manifest.model_copy(update={"status": status}))
    write_record(tmp_path / "4-code" / "manifest.json", done.manifest.model_copy(update={"status": "running"}))
    assert unfinished_folder(None, "dialogue", tmp_path).path == tmp_path / "2-dialogue"


# kinds of search


def test_a_task_that_must_not_be_relaxed_is_searched_lossless_in_all_precisions(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = search(place, tmp_path / "run", task="math", precisions=("fp32", "bf16"), trials=20)
    said = capsys.readouterr()
    assert "task math: lossless only; one wrong step makes a proof or a result wrong" in said.err
    assert said.out == ""
    records = trials_of(result.folder)
    assert {record.kind for record in records} == {"plain", "lossless"}
    assert [(record.kind, record.settings.precision.target) for record in records[:2]] == [
        ("plain", "fp32"),
        ("plain", "bf16"),
    ]
    assert {record.settings.precision.target for record in records} == {"fp32", "bf16"}
    assert "lossy rules" in result.manifest.excluded
    assert result.profile.settings.lossless
    ratios = {
        record.settings.precision.target: record.quality.perplexity_ratio.value for record in records if record.quality
    }
    assert ratios["fp32"] == pytest.approx(1.0, abs=1e-9)
    assert 0.5 < ratios["bf16"] < 2.0
    assert ratios["bf16"] != 1.0, "the ratio is against the widest precision"


def test_a_greedy_search_with_the_target_as_its_own_draft(place: Path, tmp_path: Path) -> None:
    result = search(place, tmp_path / "run", draft=str(place / "target"), sampling=Sampling(temperature=0.0), trials=30)
    records = trials_of(result.folder)
    assert {record.settings.rule for record in records} <= {"exact", "optimal"}, "at temperature 0 all rules accept alike"
    assert all(record.settings.tau == 1.0 for record in records)
    for record in records:
        assert record.predicted is not None and record.quality is not None
        lossy_lookup = record.settings.source != "draft" and not record.settings.lossless
        assert lossy_lookup or record.quality.perplexity_ratio.value == pytest.approx(1.0, abs=1e-9)
        drawn = record.settings.draft_length and record.settings.source == "draft"
        if drawn and record.settings.theta == 0:
            assert record.predicted.acceptance == pytest.approx(1.0)
    for point in result.front.points:
        assert point.quality.corpus == "greedy_text"
        assert point.quality_references is None
        assert point.measured is not None
        if point.kind != "plain" and point.settings.source == "draft" and point.settings.theta == 0:
            assert point.measured.acceptance == pytest.approx(1.0)
    outputs: dict[int, set[Any]] = {}
    relaxed_lookup = {str(r.number) for r in records if r.settings.source != "draft" and not r.settings.lossless}
    for block in blocks_of(result.folder):
        if block.contestant not in relaxed_lookup:
            outputs.setdefault(block.block, set()).add(block.outputs)
    assert all(len(texts) == 1 for texts in outputs.values()), "greedy: all others write the same, transformers too"
    assert len({block.contestant for block in blocks_of(result.folder)} - relaxed_lookup) >= 3
    assert result.profile.sampling.temperature == 0.0


@pytest.fixture
def keep_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keep_handler")
def test_case_19_and_Q5_a_slow_draft_is_not_recommended_and_is_no_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {
        "--target": place / "target",
        "--draft": place / "slow",
        "--prompts": place / "prompts.jsonl",
        "--texts": 4,
        "--max-new-tokens": 16,
        "--trials": 30,
        "--budget": "10s",
        "--batch": 1,
        "--precision": "fp32",
        "--max-draft-length": 3,
        "--out": "run",
    }
    monkeypatch.setattr(
        sys, "argv", ["lossytune", "search", "--json", *(str(part) for pair in options.items() for part in pair)]
    )
    main()
    said = capsys.readouterr()
    front = json.loads(said.out)
    assert front["verdict"].startswith("plain decoding, 1.00x: nothing measured is surely faster within the limit")
    (best,) = [point for point in front["points"] if point["recommended"]]
    assert best["kind"] == "plain"
    profile = read_profile(tmp_path / "run" / "profile.json")
    assert profile.settings.draft_length == 0
    assert profile.evidence.speedup.value == 1.0
    assert profile.match.draft.kind == "model"
    assert (tmp_path / "run" / "report" / "index.html").is_file()
    monkeypatch.setattr(sys, "argv", ["lossytune", "generate", "w1 w2", "--profile", "run/profile.json", "--json"])
    main()
    answer = json.loads(capsys.readouterr().out)
    assert (answer["match"], answer["drafted"]) == ("exact", 0)


def test_O8_no_feasible_configuration_ends_with_the_nearest_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lossyspec.tuner.stages._memory_limit_bytes", lambda info: 1000)
    with pytest.raises(
        NoFeasiblePoint, match=r"nearest one, trial \d+ \(plain\): 1\.00x predicted .*over the limit: memory"
    ):
        search(place, tmp_path / "run", trials=10)
    assert read_record(tmp_path / "run" / "manifest.json", RunManifest).status == "failed"
    assert {record.state for record in trials_of(tmp_path / "run")} == {"infeasible"}
    assert not (tmp_path / "run" / "front.json").exists()


def test_a_model_without_a_chat_template_is_searched_on_plain_prompts(place: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", template=False)
    result = search(place, tmp_path / "run", target=str(tmp_path / "base"), batch_sizes=(1,), trials=4, texts=2)
    prompts = load_trace(result.folder / "trace.safetensors")["search"].texts.prompts
    rows = [json.loads(line)["prompt"] for line in lines_of(place / "prompts.jsonl")]
    assert prompts == [tiny_tokenizer()(row)["input_ids"] for row in (rows[0], rows[2])]
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}, {"role": "user", "content": "w3"}]
    (tmp_path / "chat.jsonl").write_text(2 * (json.dumps({"messages": turns}) + "\n"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template"):
        search(place, tmp_path / "chat", target=str(tmp_path / "base"), prompts=tmp_path / "chat.jsonl")


def test_a_draft_with_another_tokenizer_is_searched_like_any_other(place: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "draft", seed=2)
    tiny_tokenizer(90).save_pretrained(tmp_path / "draft")
    result = search(place, tmp_path / "run", draft=str(tmp_path / "draft"), trials=4, texts=2, batch_sizes=(1,))
    (law,) = next(iter(load_trace(result.folder / "trace.safetensors")["search"].laws.values()))
    assert isinstance(law, BinnedLaw)
    assert result.folder.joinpath("profile.json").exists()


def test_a_draft_that_shares_no_tokens_is_refused_before_anything_is_traced(place: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "draft", seed=2)
    pair_tokenizer(letters="xyz").save_pretrained(tmp_path / "draft")
    with pytest.raises(ConfigurationError, match="have 1 tokens in common; at least 2 are needed"):
        search(place, tmp_path / "run", draft=str(tmp_path / "draft"))
    assert not (tmp_path / "run").exists()
