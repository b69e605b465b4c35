"""Bundled tasks, JSONL files and data sets: what is loaded, how it is split, and how wrong input is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lossyspec.errors import ConfigurationError
from lossyspec.tuner.workloads import TASKS, Item, Workload, find_task, load_workload

BUNDLED = [name for name, task in TASKS.items() if task.files]
DOCUMENT_TASKS = ("summarization", "longdoc")


def all_items(workload: Workload) -> list[Item]:
    return [*workload.search, *workload.confirm]


def contents(items: tuple[Item, ...] | list[Item]) -> list[str]:
    return [item.messages[-1]["content"] for item in items]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def quiet_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real `datasets`, with its cache inside the test's folder and without bars."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    return tmp_path


# bundled tasks


@pytest.mark.parametrize("task", BUNDLED)
def test_every_bundled_task_has_enough_prompts_that_end_with_a_user(task: str) -> None:
    items = all_items(load_workload(task, texts=512))
    assert len(items) >= 32
    assert len({item.id for item in items}) == len(items)
    assert len({json.dumps(item.messages) for item in items}) == len(items)
    for item in items:
        assert item.messages[-1]["role"] == "user", item.id
        roles = [message["role"] for message in item.messages if message["role"] != "system"]
        assert roles == [("user", "assistant")[index % 2] for index in range(len(roles))], item.id


@pytest.mark.parametrize("task", BUNDLED)
def test_every_bundled_prompt_has_a_reference_that_is_an_answer_and_not_the_prompt(task: str) -> None:
    for item in all_items(load_workload(task, texts=512)):
        assert item.reference is not None, item.id
        assert len(item.reference.split()) >= 20, item.id
        assert item.reference not in item.messages[-1]["content"], item.id


@pytest.mark.parametrize("task", DOCUMENT_TASKS)
def test_documents_have_300_to_1500_words_and_are_longer_than_their_references(task: str) -> None:
    for item in all_items(load_workload(task, texts=512)):
        assert item.reference is not None
        words = len(item.messages[-1]["content"].split())
        assert 300 <= words <= 1500, item.id
        assert len(item.reference.split()) < words / 2, item.id


def test_multiturn_prompts_hold_earlier_turns() -> None:
    assert all(len(item.messages) >= 3 for item in all_items(load_workload("multiturn", texts=512)))


@pytest.mark.parametrize("task", BUNDLED)
def test_halves_are_disjoint_of_like_size_and_stable(task: str) -> None:
    workload = load_workload(task, texts=512)
    search, confirm = ({item.id for item in half} for half in (workload.search, workload.confirm))
    assert not search & confirm
    assert abs(len(search) - len(confirm)) <= 1
    assert load_workload(task, texts=512) == workload


def test_fewer_texts_take_the_first_prompts_of_the_same_halves() -> None:
    few, many = load_workload("dialogue", texts=4), load_workload("dialogue", texts=16)
    assert (len(few.search), len(few.confirm)) == (4, 4)
    assert (few.search, few.confirm) == (many.search[:4], many.confirm[:4])
    assert few.sha256 != many.sha256


def test_every_task_has_its_own_sampling_and_unsuitable_ones_say_why() -> None:
    assert {name: task.sampling.temperature for name, task in TASKS.items()} == {
        "dialogue": 0.7, "multiturn": 0.7, "code": 0.2, "summarization": 0.3, "longdoc": 0.3, "math": 0.2, "legal": 0.2,
    }  # fmt: skip
    assert {name for name, task in TASKS.items() if task.unsuitable} == {"math", "legal"}


def test_an_unknown_task_is_named_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"task is 'sumarization'.*Did you mean 'summarization'\?") as caught:
        find_task("sumarization")
    assert all(name in str(caught.value) for name in TASKS)
    with pytest.raises(ConfigurationError) as caught:
        load_workload("xyzzy")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("task", ["math", "legal"])
def test_a_task_without_prompts_asks_for_some_and_takes_them(task: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"task '{task}' has no bundled prompts; give --prompts .* or --dataset"):
        load_workload(task)
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": "one"}, {"prompt": "two"})
    workload = load_workload(task, prompts=path)
    assert workload.task is TASKS[task]
    assert contents(all_items(workload)) == ["one", "two"]


# --prompts


def test_a_prompts_file_holds_prompts_or_messages_with_optional_ids_and_references(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello", "name": "x"}]
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps({"prompt": "first", "reference": "an answer"})
        + "\n\n   \n"
        + json.dumps({"messages": chat, "id": 7, "extra": 1})
        + "\n"
        + json.dumps({"prompt": "third", "reference": None, "id": "c"}),
        encoding="utf-8",
    )
    workload = load_workload("dialogue", prompts=path)
    first, third = workload.search
    assert first == Item("1", [{"role": "user", "content": "first"}], "an answer")
    assert third == Item("c", [{"role": "user", "content": "third"}], None)
    assert workload.confirm == (Item("7", [chat[0], {"role": "user", "content": "hello"}], None),)
    assert workload.source == str(path)


def test_the_hash_follows_the_texts_and_not_the_file_name(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "reference": "x"}, {"prompt": "b"}]
    one = load_workload("dialogue", prompts=jsonl(tmp_path / "1.jsonl", *rows)).sha256
    assert load_workload("dialogue", prompts=jsonl(tmp_path / "2.jsonl", *rows)).sha256 == one
    rows[0]["reference"] = "y"
    assert load_workload("dialogue", prompts=jsonl(tmp_path / "3.jsonl", *rows)).sha256 != one


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_unicode_line_separators_inside_a_text_do_not_cut_the_row(tmp_path: Path, separator: str) -> None:
    text = f"before{separator}after"
    # control characters must be escaped in JSON; U+0085, U+2028 and U+2029 may stand as they are
    path = jsonl(tmp_path / "p.jsonl", {"prompt": text}, {"prompt": "second"})
    assert contents(load_workload("dialogue", prompts=path).search) == [text]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "not JSON"),
        ('["a", "b"]', "expected a JSON object, found list"),
        ('{"text": "x"}', "needs 'messages' (a list) or 'prompt' (a text); it has ['text']"),
        ('{"prompt": "  "}', "needs 'messages'"),
        ('{"prompt": 3}', "needs 'messages'"),
        ('{"messages": []}', "ends with a user's message"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "ends with a user's message"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "system|user|assistant"),
        ('{"messages": [{"role": "user", "content": ""}]}', "messages must be a list"),
        ('{"messages": "hello"}', "messages must be a list"),
        ('{"prompt": "x", "reference": 3}', "reference is 3; it must be a text, or be left out"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_problem(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_workload("dialogue", prompts=path)
    assert f"{path}, line 3: " in str(caught.value)
    assert problem in str(caught.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.jsonl: no such file"):
        load_workload("dialogue", prompts=tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_workload("dialogue", prompts=tmp_path)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"binary\.jsonl: cannot be read"):
        load_workload("dialogue", prompts=binary)
    for rows in ([], [{"prompt": "only one"}]):
        with pytest.raises(ConfigurationError, match=rf"holds {len(rows)} prompts?; at least 2 are needed"):
            load_workload("dialogue", prompts=jsonl(tmp_path / "few.jsonl", *rows))
    with pytest.raises(ConfigurationError, match="not both"):
        load_workload("dialogue", prompts=binary, dataset="xsum")


# --dataset, through the real `datasets`


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    import csv

    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


ROWS = [
    {"question": "what is it", "answer": "a thing"},
    {"question": "who is it", "answer": None},
    {"question": None, "answer": "no prompt"},
    {"question": "where is it", "answer": "here"},
]


@pytest.mark.parametrize(
    ("name", "write"), [("d.json", write_json), ("d.csv", write_csv), ("d.parquet", write_parquet)], ids=lambda x: str(x)[:9]
)
def test_a_local_table_gives_prompts_and_references_and_an_empty_cell_is_absent(
    quiet_datasets: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    write(quiet_datasets / name, ROWS)
    workload = load_workload("dialogue", dataset=name)
    assert contents(workload.search) == ["what is it", "where is it"]
    assert [item.reference for item in workload.search] == ["a thing", "here"]
    assert contents(workload.confirm) == ["who is it"]
    assert workload.confirm[0].reference is None
    assert workload.source == f"dataset {name}"


def test_a_text_file_gives_a_prompt_a_line_without_empty_lines(quiet_datasets: Path) -> None:
    (quiet_datasets / "d.txt").write_text("one\n\ntwo\n \nthree\n", encoding="utf-8")
    workload = load_workload("dialogue", dataset="d.txt")
    assert contents(workload.search) == ["one", "three"]
    assert contents(workload.confirm) == ["two"]
    assert {item.reference for item in all_items(workload)} == {None}


def test_articles_get_their_instruction_and_highlights_are_the_reference(quiet_datasets: Path) -> None:
    write_json(quiet_datasets / "d.jsonl", [{"id": n, "article": f"long {n}", "highlights": f"short {n}"} for n in range(2)])
    workload = load_workload("summarization", dataset="d.jsonl")
    assert contents(all_items(workload)) == [f"Summarize the following article.\n\nlong {n}" for n in range(2)]
    assert [item.reference for item in all_items(workload)] == ["short 0", "short 1"]


def test_a_table_of_messages_and_a_folder(quiet_datasets: Path) -> None:
    folder = quiet_datasets / "folder"
    folder.mkdir()
    chat = [{"role": "user", "content": "hi"}]
    write_json(folder / "rows.json", [{"messages": chat, "reference": "hello"}, {"messages": chat, "reference": "hey"}])
    workload = load_workload("dialogue", dataset="folder")
    assert [item.messages for item in all_items(workload)] == [chat, chat]
    assert [item.reference for item in all_items(workload)] == ["hello", "hey"]


def test_no_more_rows_are_taken_than_both_halves_need(quiet_datasets: Path) -> None:
    rows = [{"prompt": "" if index % 3 == 0 else f"number {index}"} for index in range(50)]
    write_json(quiet_datasets / "d.json", rows)
    workload = load_workload("dialogue", dataset="d.json", texts=2)
    assert contents(all_items(workload)) == ["number 1", "number 4", "number 2", "number 5"]


def test_a_data_set_that_cannot_be_used_is_named_with_the_problem(quiet_datasets: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"dataset 'no-such-set' cannot be loaded: \w+: .*no-such-set"):
        load_workload("dialogue", dataset="no-such-set")
    with pytest.raises(ConfigurationError, match=r"dataset 'cnn_dailymail' cannot be loaded: .*abisee/cnn_dailymail"):
        load_workload("summarization", dataset="cnn_dailymail")
    (quiet_datasets / "d.pdf").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match=r"dataset d\.pdf: ends with '\.pdf'; allowed: \.json, .*\.txt"):
        load_workload("dialogue", dataset="d.pdf")
    (quiet_datasets / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="dataset 'empty' cannot be loaded"):
        load_workload("dialogue", dataset="empty")
    write_json(quiet_datasets / "columns.json", [{"foo": 1}, {"foo": 2}])
    with pytest.raises(ConfigurationError, match=r"has the columns \['foo'\]; one of messages, article, .* is needed"):
        load_workload("dialogue", dataset="columns.json")
    (quiet_datasets / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"dataset 'broken\.json' cannot be loaded"):
        load_workload("dialogue", dataset="broken.json")


def test_without_the_package_the_install_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lossytune\[datasets\]'"):
        load_workload("dialogue", dataset="xsum")
