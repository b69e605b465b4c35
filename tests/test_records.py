"""Stored records: schema, ranges, and files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lossyspec.errors import ConfigurationError
from lossyspec.records import (
    BlockRecord,
    Estimate,
    Front,
    RunManifest,
    TrialRecord,
    append_record,
    dump,
    parse,
    read_record,
    read_records,
    write_bytes,
    write_record,
    write_text,
)
from lossyspec.settings import Sampling, Settings


def trial(number: int = 0, **changes: Any) -> TrialRecord:
    values: dict[str, Any] = {
        "number": number,
        "kind": "lossy",
        "state": "complete",
        "settings": Settings(alpha=0.3),
        "batch_size": 2,
        "params": {"alpha": 0.3, "rule": "optimal"},
        "constraints": {"quality_loss": -0.01},
        "duration_s": 0.25,
    }
    return TrialRecord(**{**values, **changes})


def front() -> Front:
    return Front(
        points=(),
        verdict="plain decoding, 1.00x: größer geht nicht",
        max_quality_loss=0.05,
        transformers_tokens_per_s=None,
        transformers_ratio=Estimate(value=1.2, ci95=(1.1, 1.3)),
    )


def changed(record: Any, **values: Any) -> dict[str, Any]:
    return {**dump(record), **values}


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    write_record(tmp_path / "deep" / "front.json", front())
    assert read_record(tmp_path / "deep" / "front.json", Front) == front()
    stored = json.loads((tmp_path / "deep" / "front.json").read_text(encoding="utf-8"))
    assert stored["schema"] == "lossytune.front/1"
    assert stored["transformers_tokens_per_s"] is None, "absent is null, never 0"


def test_lines_survive_the_disk_in_order(tmp_path: Path) -> None:
    records = [trial(number, reason="a\nb" if number else None) for number in range(3)]
    for record in records:
        append_record(tmp_path / "trials.jsonl", record)
    assert list(read_records(tmp_path / "trials.jsonl", TrialRecord)) == records
    assert len((tmp_path / "trials.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_a_missing_list_is_empty_and_a_missing_record_is_named(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "no.jsonl", TrialRecord)) == []
    with pytest.raises(ConfigurationError, match=r"no\.json: no such file"):
        read_record(tmp_path / "no.json", Front)


@pytest.mark.parametrize(
    ("schema", "advice"),
    [
        ("lossytune.front/2", r"written by a newer lossytune; upgrade this one"),
        ("lossytune.front/10", r"written by a newer lossytune"),
        ("lossytune.front/0", r"expected 'lossytune\.front/1'"),
        ("lossytune.trial/1", r"expected 'lossytune\.front/1'"),
        ("lossytune.trial/2", r"expected 'lossytune\.front/1'"),
        ("lossytune.front", r"expected"),
        (None, r"expected"),
        (3, r"expected"),
    ],
)
def test_another_schema_is_refused_with_advice(schema: Any, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^here: schema is {schema!r}; .*{advice}"):
        parse(changed(front(), schema=schema), Front, "here")


def test_data_without_a_schema_is_refused() -> None:
    data = dump(front())
    del data["schema"]
    with pytest.raises(ConfigurationError, match="schema is None"):
        parse(data, Front, "here")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_quality_loss": float("nan")}, "max_quality_loss is nan: .*finite"),
        ({"transformers_tokens_per_s": float("inf")}, "transformers_tokens_per_s is inf: .*finite"),
        ({"max_quality_lost": 1}, "unknown key 'max_quality_lost'. Did you mean 'max_quality_loss'?"),
        ({"transformers_ratio": {"valu": 1.0}}, "unknown key 'transformers_ratio.valu'. Did you mean 'value'?"),
        ({"points": 3}, "points is 3"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    (tmp_path / "front.json").write_text(json.dumps(changed(front(), **values)), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"front\.json: .*{said}"):
        read_record(tmp_path / "front.json", Front)


@pytest.mark.parametrize("text", ["", "{", "nope", "\x00"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "front.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"front\.json: not a JSON file"):
        read_record(tmp_path / "front.json", Front)


def test_bytes_that_are_no_text_and_lists_and_folders_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"front\.json: not UTF-8 text"):
        read_record(path, Front)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="expected a JSON object, found list"):
        read_record(path, Front)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_record(tmp_path, Front)


def test_a_last_line_that_a_crash_cut_off_is_skipped_and_dropped_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_record(path, trial(0))
    with open(path, "ab") as stream:
        stream.write(json.dumps(dump(trial(1))).encode()[:40])
    assert [record.number for record in read_records(path, TrialRecord)] == [0]
    append_record(path, trial(1))
    assert [record.number for record in read_records(path, TrialRecord)] == [0, 1]


def test_a_line_can_be_cut_off_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_record(path, trial(0, reason="größer als 20 €"))
    line = path.read_bytes()
    for end in range(len(line)):
        path.write_bytes(line + line[:end])
        assert len(list(read_records(path, TrialRecord))) == (2 if end == len(line) - 1 else 1), f"cut after byte {end}"


def test_a_cut_off_first_line_is_dropped_too(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_bytes(b'{"schema": "lossy')
    assert list(read_records(path, TrialRecord)) == []
    append_record(path, trial(0))
    assert [record.number for record in read_records(path, TrialRecord)] == [0]


def test_any_other_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_record(path, trial(0))
    with open(path, "ab") as stream:
        stream.write(b"{broken\n")
    append_record(path, trial(1))
    with pytest.raises(ConfigurationError, match=r"trials\.jsonl, line 2: not JSON"):
        list(read_records(path, TrialRecord))


def test_a_whole_line_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    append_record(path, trial(0))
    append_record(path, front())
    with pytest.raises(ConfigurationError, match=r"trials\.jsonl, line 2: schema is 'lossytune\.front/1'"):
        list(read_records(path, TrialRecord))


@pytest.mark.parametrize("broken", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    path = tmp_path / "front.json"
    write_text(path, "old")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(broken, fail)
        with pytest.raises(type(error)):
            write_bytes(path, b"new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["front.json"]


def test_a_written_file_can_be_read_by_others_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "né")
    assert path.read_bytes() == "né".encode()
    assert path.stat().st_mode & 0o777 == 0o644


def test_records_of_a_block_and_a_run_survive_json() -> None:
    block = BlockRecord(
        block=1,
        forward=False,
        contestant="3",
        batch_size=2,
        tokens=7,
        total_s=0.5,
        decode_s=None,
        rounds=None,
        first_token_s=None,
        outputs=((1, 2), (3,)),
    )
    manifest = RunManifest(
        created="2027-01-01T00:00:00+00:00",
        command=("lossytune", "search"),
        task="dialogue",
        target={"id": "embedded"},
        draft={"id": "ngram"},
        tokenizer_sha256="0",
        sampling=Sampling(),
        workload={},
        hardware={},
        versions={},
        config={"seed": 0},
        space={},
        excluded={},
        seed=0,
    )
    for record in (block, manifest, trial()):
        assert parse(json.loads(json.dumps(dump(record))), type(record), "here") == record


def test_a_device_is_no_file_to_read() -> None:
    with pytest.raises(ConfigurationError, match="/dev/zero: cannot be read"):
        read_record(Path("/dev/zero"), RunManifest)
