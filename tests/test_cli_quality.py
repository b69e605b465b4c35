"""`lossytune quality` from the outside."""
# ruff: noqa: F811 - the fixtures are imported, and then asked for by name

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import Cli, cli, here, no_model, tiny  # noqa: F401
from test_profile import profile

from lossyspec.profile import Here, write_profile
from lossyspec.tuner.cli_quality import _table
from lossyspec.tuner.quality.compare import Comparison


@pytest.fixture
def given_files(here: Here, tmp_path: Path) -> tuple[str, ...]:
    write_profile(tmp_path / "p.json", profile(here, alpha=0.6))
    rows = [{"id": f"q{index}", "prompt": f"w{index} w2 w{index}", "reference": "w1 w2 w3 w4 w5 w6"} for index in range(4)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "quality", "--profile", "p.json", "--prompts", "q.jsonl", "--max-new-tokens", "10"


def test_the_table_and_the_data_say_the_same(cli: Cli, given_files: tuple[str, ...]) -> None:
    table, data = cli(*given_files), cli(*given_files, "--json")
    assert (table.code, data.code) == (0, 0)
    found = json.loads(data.out)
    assert (found["metric"], found["prompts"], found["samples"], found["seed"]) == ("rouge-l", 4, 1, 0)
    assert [part["measure"] for part in found["comparisons"]] == ["rouge_l", "repeated_4grams", "distinct_2", "length_ratio"]
    assert [answer["id"] for answer in found["answers"]] == ["q0", "q1", "q2", "q3"]
    assert any(answer["plain"] != answer["profile"] for answer in found["answers"])
    for part in found["comparisons"]:
        (line,) = [line for line in table.out.splitlines() if part["measure"] in line and "nothing" not in line]
        assert f"{part['plain']:.3f}" in line and f"{part['change']:.3f}" in line
        assert (f"{part['detectable']:.3f}" in line) if part["detectable"] is not None else " - " in line
    assert "decoding 4 prompts" in table.err
    assert json.loads(cli(*given_files, "--json", "--seed", "5").out)["answers"] != found["answers"]
    assert json.loads(cli(*given_files, "--json", "--limit", "3").out)["answers"] == found["answers"][:3]


def test_nothing_of_the_table_is_cut_off_on_80_columns() -> None:
    out = StringIO()
    part = Comparison("repeated_4grams", 9999, 123.456, 123.456, -0.123, (-0.123, 0.123), 0.123, False)
    ratio = Comparison("length_ratio", 9999, 123.456, 123.456, 1.123, (0.123, 1.123), None, True)
    Console(file=out, width=80).print(_table((part, ratio)))
    assert len(out.getvalue().splitlines()) == 3 and "…" not in out.getvalue()
    assert "-0.123 to +0.123" in out.getvalue() and "detectable" in out.getvalue()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--metric", "rouge"),
            r"metric is 'rouge'; allowed: auto, rouge-l, exact, numeric, pass1. Did you mean 'rouge-l'?",
        ),
        (("--metric", "pass1"), "metric pass1 needs 'test' and 'entry_point' in every row; prompt q0 has none"),
        (("--samples", "0"), "--samples is 0; it must be over 0"),
        (("--code-timeout", "-1"), "--code-timeout is -1.0; it must be over 0"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--prompts", "none.jsonl"), "prompts none.jsonl: no such file"),
    ],
)
def test_what_is_wrong_is_refused_before_a_model_is_loaded(
    cli: Cli,
    given_files: tuple[str, ...],
    more: tuple[str, ...],
    message: str,
) -> None:
    said = cli(*given_files, *more)
    assert said.code == 2
    assert message in said.message


def test_code_is_run_only_when_that_was_allowed(cli: Cli, given_files: tuple[str, ...], tmp_path: Path) -> None:
    row = {"prompt": "w1 w2", "test": "def check(candidate): pass", "entry_point": "w3"}
    (tmp_path / "code.jsonl").write_text(json.dumps(row))
    args = (*given_files, "--prompts", "code.jsonl")
    said = cli(*args)
    assert (said.code, said.message) == (
        2, "error: metric pass1 runs the code that the model writes; allow it with --run-code",
    )  # fmt: skip
    found = json.loads(cli(*args, "--run-code", "--json").out)
    assert (found["metric"], found["comparisons"][0]["measure"], found["comparisons"][0]["plain"]) == ("pass1", "pass1", 0.0)
