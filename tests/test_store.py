"""Run folders: nothing is ever half written, a crash costs the cut line alone, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lossyspec.errors import ConfigurationError, EnvironmentProblem
from lossyspec.records import BlockRecord, Front, RunManifest, TrialRecord, write_bytes, write_text
from lossyspec.settings import Sampling, Settings
from lossyspec.tuner.store import RunFolder, held, new_folder, refuse_changes, unfinished_folder


def manifest(status: Any = "running", task: str = "dialogue", **values: Any) -> RunManifest:
    known: dict[str, Any] = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": ("lossytune", "search"),
        "target": {"id": "embedded"},
        "draft": {"id": "ngram"},
        "tokenizer_sha256": "0" * 64,
        "sampling": Sampling(temperature=0.7),
        "workload": {"sha256": "1" * 64},
        "hardware": {"name": "cpu"},
        "versions": {},
        "config": {"seed": 0},
        "space": {},
        "excluded": {},
        "seed": 0,
    }
    return RunManifest(task=task, status=status, **(known | values))


def trial(number: int, reason: str = "broken") -> TrialRecord:
    return TrialRecord(
        number=number,
        kind="lossy",
        state="failed",
        settings=Settings(alpha=0.1),
        batch_size=1,
        params={"alpha": 0.1},
        reason=reason,
        duration_s=0.1,
    )


def block(number: int) -> BlockRecord:
    return BlockRecord(
        block=number,
        forward=True,
        contestant="3",
        batch_size=1,
        tokens=4,
        total_s=1.0,
        decode_s=None,
        rounds=None,
        first_token_s=None,
        outputs=((1, 2, 3, 4),),
    )


# writing


def test_a_file_is_replaced_in_one_step_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_text(path, "old")
    before = path.stat().st_ino
    write_text(path, "néw\n")
    assert path.read_bytes() == "néw\n".encode()
    assert path.stat().st_ino != before  # another file under the same name, never the old one rewritten
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_the_data_is_on_the_disk_before_the_name_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (steps.append("replace"), replace(self, target))[1])
    write_text(tmp_path / "file.json", "x")
    assert steps == ["fsync", "replace"]


# records of a run


def test_what_a_run_writes_comes_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.trials() == ()
    assert folder.blocks() == ()
    folder.write_manifest(manifest(notes=("ä note",)))
    for number in range(3):
        folder.add_trial(trial(number, reason="line\nbreak \u2028 é"))
        folder.add_block(block(number))
    assert folder.manifest() == manifest(notes=("ä note",))
    assert folder.trials() == tuple(trial(number, reason="line\nbreak \u2028 é") for number in range(3))
    assert folder.blocks() == tuple(block(number) for number in range(3))
    front = Front(points=(), verdict="v", max_quality_loss=0.05, transformers_tokens_per_s=None, transformers_ratio=None)
    folder.write_front(front)
    assert {path.name for path in tmp_path.iterdir()} == {
        "manifest.json", "trials.jsonl", "measurements.jsonl", "front.json",
    }  # fmt: skip
    paths = (folder.trace, folder.costs, folder.profile)
    assert [path.name for path in paths] == ["trace.safetensors", "costs.json", "profile.json"]


def test_a_manifest_that_is_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_manifest(manifest())
    folder.write_manifest(manifest("complete"))
    assert folder.manifest().status == "complete"


def test_every_trial_is_a_line_that_is_on_the_disk_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle))[1])
    folder, path = RunFolder(tmp_path), tmp_path / "trials.jsonl"
    for number in range(3):
        folder.add_trial(trial(number))
        assert synced[-1] == path.stat().st_size
    assert len(synced) == 3
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_line_that_a_crash_cut_off_is_skipped_and_dropped_when_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "trials.jsonl"
    for number in range(3):
        folder.add_trial(trial(number))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = 3 if cut == 1 else 2  # without its newline alone, a line can still be read
    assert len(folder.trials()) == kept
    folder.add_trial(trial(7))
    assert [record.number for record in folder.trials()] == [*range(kept), 7]
    assert path.read_bytes().startswith(whole[: whole[:-1].rfind(b"\n") + 1])


def test_a_first_line_that_was_cut_off_is_dropped_too(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "trials.jsonl"
    path.write_bytes(b'{"schema": "lossytune.tri')
    assert folder.trials() == ()
    folder.add_trial(trial(0))
    assert folder.trials() == (trial(0),)


def test_a_broken_line_that_is_not_the_last_one_is_named(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "trials.jsonl"
    folder.add_trial(trial(0))
    path.write_text(path.read_text() + "{broken\n" + path.read_text())
    with pytest.raises(ConfigurationError, match=r"trials\.jsonl, line 2: not JSON"):
        folder.trials()


# which folder


def test_a_new_folder_is_named_by_time_and_task_or_as_asked(tmp_path: Path) -> None:
    folder = new_folder(None, "code", root=tmp_path / "runs")
    assert folder.path.is_dir()
    assert folder.path.parent == tmp_path / "runs"
    stamp, _, task = folder.path.name.partition("-")
    assert task == "code"
    assert len(stamp) == len("20260101T000000Z")
    asked = new_folder(tmp_path / "mine" / "deeper", "code")
    assert asked.path == tmp_path / "mine" / "deeper"
    assert asked.path.is_dir()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_manifest(manifest())
    with pytest.raises(ConfigurationError, match=r"holds a run already; go on with --resume, or give another --out"):
        new_folder(tmp_path, "dialogue")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match=r"--out .*/file/run: cannot be made \(Not a directory\)"):
        new_folder(tmp_path / "file" / "run", "dialogue")


def test_a_run_folder_takes_one_search_at_a_time(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        with (
            pytest.raises(EnvironmentProblem, match=r"run: another search is using it"),
            held(tmp_path / "run"),
        ):
            raise AssertionError("two searches in one folder")
        (tmp_path / "run" / "manifest.json").write_text("{}")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["manifest.json"]
    with held(tmp_path / "run"):  # free again
        pass


def test_a_search_that_was_refused_leaves_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError), held(tmp_path / "run"):
        raise ConfigurationError("refused")
    assert list(tmp_path.iterdir()) == []


def test_the_newest_unfinished_run_of_the_task_is_resumed(tmp_path: Path) -> None:
    for name, status, task in (
        ("20260101T000000Z-dialogue", "interrupted", "dialogue"),
        ("20260102T000000Z-dialogue", "running", "dialogue"),
        ("20260103T000000Z-dialogue", "complete", "dialogue"),
        ("20260104T000000Z-code", "failed", "code"),
    ):
        RunFolder(tmp_path / name).write_manifest(manifest(status, task))
    (tmp_path / "20260105T000000Z-dialogue").mkdir()  # no manifest: nothing was begun there
    assert unfinished_folder(None, "dialogue", tmp_path).path.name == "20260102T000000Z-dialogue"
    assert unfinished_folder(None, "code", tmp_path).path.name == "20260104T000000Z-code"
    with pytest.raises(ConfigurationError, match=r"--resume: no unfinished run of task 'math' under"):
        unfinished_folder(None, "math", tmp_path)


def test_a_run_that_is_named_is_resumed_as_it_is(tmp_path: Path) -> None:
    RunFolder(tmp_path / "mine").write_manifest(manifest("complete"))
    assert unfinished_folder(tmp_path / "mine", "code").path == tmp_path / "mine"
    with pytest.raises(ConfigurationError, match=r"--resume: .*nothing holds no run \(no manifest\.json\)"):
        unfinished_folder(tmp_path / "nothing", "dialogue")


# what may change


def test_options_that_a_resumed_run_would_change_are_named_with_both_values() -> None:
    stored = {"seed": 0, "rules": ["optimal"], "budget_s": 300.0, "draft": "ngram"}
    refuse_changes(stored, dict(stored), ())
    refuse_changes(stored, stored | {"budget_s": 60.0}, ("budget_s",))
    with pytest.raises(ConfigurationError) as caught:
        refuse_changes(stored, stored | {"budget_s": 60.0, "seed": 1, "rules": None}, ("budget_s",))
    assert str(caught.value) == (
        "--resume with other options: rules: ['optimal'] then, None now; seed: 0 then, 1 now; start a new run instead"
    )


def test_an_option_that_only_one_side_has_is_a_change_unless_it_is_absent() -> None:
    with pytest.raises(ConfigurationError, match="force: None then, True now"):
        refuse_changes({"seed": 0}, {"seed": 0, "force": True}, ())
    with pytest.raises(ConfigurationError, match="force: True then, None now"):
        refuse_changes({"force": True}, {}, ())
    refuse_changes({"prompts": None}, {}, ())


def test_case_25_zero_is_not_the_same_as_absent_or_false_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"max_quality_loss: 0\.0 then, None now"):
        refuse_changes({"max_quality_loss": 0.0}, {"max_quality_loss": None}, ())
