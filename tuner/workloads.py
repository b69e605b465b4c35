"""Tasks: which prompts, with which sampling, and whether relaxing is sound for them at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lossyspec.errors import ConfigurationError, nearest
from lossyspec.settings import Sampling

Messages = list[dict[str, str]]


#: prompts of each half where nothing else is asked for
MOST_TEXTS = 16


@dataclass(frozen=True)
class Task:
    """A kind of work. files: bundled prompts. unsuitable: why relaxing it is wrong (None: it may be relaxed)."""

    name: str
    sampling: Sampling
    files: tuple[str, ...] = ()
    unsuitable: str | None = None


@dataclass(frozen=True)
class Item:
    """One prompt as chat messages, with a reference answer where there is one."""

    id: str
    messages: Messages
    reference: str | None


@dataclass(frozen=True)
class Workload:
    """The prompts of a search in two halves: one is searched on, the other is kept for the confirmation."""

    task: Task
    source: str
    search: tuple[Item, ...]
    confirm: tuple[Item, ...]
    sha256: str

    def first(self, count: int) -> Workload:
        """With at most so many prompts in each half."""
        search, confirm = self.search[:count], self.confirm[:count]
        return Workload(self.task, self.source, search, confirm, _hash(search + confirm))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("dialogue", Sampling(temperature=0.7), ("dialogue.jsonl",)),
        Task("multiturn", Sampling(temperature=0.7), ("multiturn.jsonl",)),
        Task("code", Sampling(temperature=0.2), ("code.jsonl",)),
        Task("summarization", Sampling(temperature=0.3), ("summarization.jsonl",)),
        Task("longdoc", Sampling(temperature=0.3), ("longdoc.jsonl",)),
        Task("math", Sampling(temperature=0.2), (), "one wrong step makes a proof or a result wrong"),
        Task("legal", Sampling(temperature=0.2), (), "a changed word can change what a text binds to"),
    )
}

#: columns of common data sets that hold the prompt and the reference, first match wins; the instruction goes before it
_PROMPT_COLUMNS = {
    "article": "Summarize the following article.\n\n",
    "document": "Summarize the following document.\n\n",
    "prompt": "",
    "instruction": "",
    "question": "",
    "dialogue": "Summarize the following dialogue.\n\n",
    "text": "",
    "content": "",
}
_REFERENCE_COLUMNS = ("reference", "highlights", "summary", "answer", "output", "response", "completion")
_HUB_CONFIGS = {
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0"),
    "abisee/cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0"),
    "xsum": ("EdinburghNLP/xsum", None),
}
_DATA_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def find_task(name: str) -> Task:
    """The task of that name. Raises ConfigurationError with the known names."""
    if name not in TASKS:
        raise ConfigurationError(f"task is {name!r}; allowed: {', '.join(TASKS)}.{nearest(name, TASKS)}")
    return TASKS[name]


def _check_messages(value: Any, place: str) -> Messages:
    fine = (
        isinstance(value, list)
        and value
        and all(
            isinstance(part, dict)
            and part.get("role") in ("system", "user", "assistant")
            and isinstance(part.get("content"), str)
            and part["content"].strip()
            for part in value
        )
    )
    if not fine or value[-1]["role"] != "user":
        raise ConfigurationError(
            f"{place}: messages must be a list of {{'role': system|user|assistant, 'content': text}} "
            f"that ends with a user's message"
        )
    return [{"role": part["role"], "content": part["content"]} for part in value]


def item_of(row: Any, index: int, place: str) -> Item:
    """An Item from a row with `messages` or `prompt`, and maybe `reference` and `id`."""
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: expected a JSON object, found {type(row).__name__}")
    if "messages" in row:
        messages = _check_messages(row["messages"], place)
    elif isinstance(row.get("prompt"), str) and row["prompt"].strip():
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise ConfigurationError(f"{place}: needs 'messages' (a list) or 'prompt' (a text); it has {sorted(row)}")
    reference = row.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise ConfigurationError(f"{place}: reference is {reference!r}; it must be a text, or be left out")
    return Item(str(row.get("id", index)), messages, reference or None)


def json_rows(text: str, name: str) -> Iterator[tuple[int, str, Any]]:
    """(line number, place as errors name it, value) of each line of JSONL that is not empty."""
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028 inside a text
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{place}: not JSON ({error})") from None
        yield number, place, row


def _jsonl(text: str, name: str) -> Iterator[Item]:
    for number, place, row in json_rows(text, name):
        yield item_of(row, number, place)


def _bundled(task: Task) -> list[Item]:
    folder = resources.files(__package__) / "data"
    return [item for name in task.files for item in _jsonl((folder / name).read_text(encoding="utf-8"), name)]


def read_text(path: Path) -> str:
    """A file of prompts. Raises ConfigurationError naming the file and what is wrong."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(f"prompts {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"prompts {path}: cannot be read ({error})") from None


def read_prompts(path: Path) -> list[Item]:
    """The rows of a JSONL file. Raises ConfigurationError naming the file, the line and what is wrong."""
    return list(_jsonl(read_text(path), str(path)))


def _from_dataset(name: str, limit: int) -> list[Item]:
    """Rows of a data set through `datasets`: a local file or folder, or a name on the hub."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigurationError("--dataset needs the package datasets; run: pip install 'lossytune[datasets]'") from None
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in _DATA_FORMATS:
                raise ConfigurationError(f"dataset {name}: ends with {path.suffix!r}; allowed: {', '.join(_DATA_FORMATS)}")
            rows = load_dataset(_DATA_FORMATS[path.suffix], data_files=str(path), split="train")
        elif path.is_dir():
            rows = load_dataset(str(path), split="train")
        else:
            hub, config = _HUB_CONFIGS.get(name, (name, None))
            rows = load_dataset(hub, config, split="validation" if name in _HUB_CONFIGS else "train")
    except ConfigurationError:
        raise
    except Exception as error:  # datasets raises many kinds; all of them are about this name
        raise ConfigurationError(f"dataset {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    columns = rows.column_names
    if "messages" in columns:
        return [
            item_of(dict(row), index, f"{name}, row {index}")
            for index, row in enumerate(rows.select(range(min(limit, len(rows)))))
        ]
    prompt = next((column for column in _PROMPT_COLUMNS if column in columns), None)
    if prompt is None:
        raise ConfigurationError(
            f"dataset {name!r} has the columns {columns}; one of messages, {', '.join(_PROMPT_COLUMNS)} is needed"
        )
    reference = next((column for column in _REFERENCE_COLUMNS if column in columns and column != prompt), None)
    items: list[Item] = []
    for index, row in enumerate(rows):
        if len(items) == limit:
            break
        if row[prompt] is None or not str(row[prompt]).strip():  # an empty cell or line is no prompt
            continue
        messages = [{"role": "user", "content": _PROMPT_COLUMNS[prompt] + str(row[prompt])}]
        answer = row[reference] if reference else None
        items.append(Item(str(index), messages, None if answer is None else str(answer) or None))
    return items


def load_workload(
    task_name: str, prompts: Path | None = None, dataset: str | None = None, texts: int = MOST_TEXTS
) -> Workload:
    """The prompts of a search: the task's own, a JSONL file, or a data set; at most `texts` in each half.

    Every second prompt is kept for the confirmation. Raises ConfigurationError for a wrong name, file, row, or fewer
    than two prompts.
    """
    task = find_task(task_name)
    if prompts is not None and dataset is not None:
        raise ConfigurationError("give --prompts or --dataset, not both")
    if prompts is not None:
        source, items = str(prompts), read_prompts(prompts)
    elif dataset is not None:
        source, items = f"dataset {dataset}", _from_dataset(dataset, 2 * texts)
    elif task.files:
        source, items = "bundled", _bundled(task)
    else:
        raise ConfigurationError(f"task {task.name!r} has no bundled prompts; give --prompts FILE.jsonl or --dataset NAME")
    if len(items) < 2:
        count = f"{len(items)} prompt{'s' if len(items) != 1 else ''}"
        raise ConfigurationError(f"{source} holds {count}; at least 2 are needed (one to search on, one to confirm)")
    search, confirm = tuple(items[0::2][:texts]), tuple(items[1::2][:texts])
    return Workload(task, source, search, confirm, _hash(search + confirm))


def _hash(items: Sequence[Item]) -> str:
    text = json.dumps([[item.messages, item.reference] for item in items], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
