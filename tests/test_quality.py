"""Task metrics against values worked out by hand, programs in their limits, and the paired comparison."""

from __future__ import annotations

import json
import math
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import make_decoder
from test_decoding import hf_greedy

from lossyspec.errors import ConfigurationError
from lossyspec.settings import Settings
from lossyspec.tuner.quality.compare import compare_means, compare_totals
from lossyspec.tuner.quality.evaluate import evaluate
from lossyspec.tuner.quality.items import QualityItem, choose_metric, quality_item, read_items
from lossyspec.tuner.quality.metrics import (
    distinct_share,
    exact_match,
    last_number,
    lcs_length,
    numeric_match,
    repeated_share,
    rouge_l,
    word_f1,
)
from lossyspec.tuner.quality.programs import Problem
from lossyspec.tuner.quality.run_code import run_program

DATA = Path("/work/shared/data")

# --- scores ---


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("police killed the gunman", ["police kill the gunman"], 0.75),  # 3 of 4 and 3 of 4 (Lin 2004, section 3)
        ("the gunman kill police", ["police kill the gunman"], 0.5),  # the longest one in order has 2
        ("the cat sat", ["the cat sat on the mat"], 2 * 1.0 * 0.5 / 1.5),  # precision 1, recall 1/2
        ("The CAT, sat!", ["the cat sat"], 1.0),  # neither case nor punctuation count
        ("a b c", ["x y", "b c d e"], 2 * 2 / 7),  # the best of two
        ("", ["a"], 0.0),
        ("...", ["..."], 0.0),
        ("北京 is big", ["北 is"], 2 * 2 / (4 + 2)),  # a Chinese character is a word
    ],
)
def test_rouge_l_is_as_worked_out_by_hand(answer: str, references: list[str], expected: float) -> None:
    assert rouge_l(answer, references) == pytest.approx(expected, abs=1e-12)


def brute_lcs(one: list[int], other: list[int]) -> int:
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return 1 + brute_lcs(one[:-1], other[:-1])
    return max(brute_lcs(one[:-1], other), brute_lcs(one, other[:-1]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_common_subsequence_is_the_longest(one: list[int], other: list[int]) -> None:
    assert lcs_length(one, other) == brute_lcs(one, other)


def test_exact_match_and_f1_are_those_of_squad() -> None:
    assert exact_match("The Eiffel Tower.", ["eiffel tower"]) == 1
    assert exact_match("the tower", ["eiffel tower", "Tower"]) == 1
    assert exact_match("eiffel towers", ["eiffel tower"]) == 0
    assert word_f1("the big eiffel tower", ["eiffel tower"]) == pytest.approx(2 * 2 / (3 + 2))
    assert word_f1("x x y", ["x y y"]) == pytest.approx(2 * 2 / 6)  # as bags: each x and y once
    assert word_f1("no", ["yes", "no"]) == 1
    assert word_f1("the", ["a"]) == 1  # nothing but articles on both sides
    assert word_f1("the", ["b"]) == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"), ("#### 1,234.50 dollars, or 9 a day", "9"), ("12 apples #### 5", "5"), ("it is -3", "-3"),
        ("$1,200", "1200"), ("3.14.", "3.14"), (".5 of it", ".5"), ("10-4", "4"), ("#### none of 8", "8"), ("no", None),
        ("a 2 #### b", "2"),
    ],
)  # fmt: skip
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_numbers_match_as_numbers() -> None:
    assert numeric_match("so it costs $7.00", ["3 + 4 = 7\n#### 7"]) == 1
    assert numeric_match("it is 70", ["7"]) == 0
    assert numeric_match("no number", ["7"]) == 0


def test_repetition_counts_n_grams_that_came_before() -> None:
    assert repeated_share([1, 2, 1, 2, 1, 2, 1]) == 0.5  # 1212, 2121, 1212, 2121: two of four are new
    assert distinct_share([1, 2, 1, 2, 1]) == 0.5
    assert repeated_share([1, 2, 3]) is None
    assert distinct_share([1]) is None


# --- the comparison ---


def test_the_comparison_of_means_has_the_interval_and_the_difference_that_could_be_seen() -> None:
    draws = np.random.default_rng(0)
    plain = draws.normal(0.5, 0.3, 400)
    profile = plain + draws.normal(-0.02, 0.1, 400)
    found = compare_means("m", plain.tolist(), profile.tolist())
    assert found.change == pytest.approx(float(np.mean(profile - plain)), abs=1e-12)
    assert found.ci95 is not None and found.detectable is not None
    # paired: the spread between prompts (0.3) does not enter, the spread of the differences (0.1) does
    assert found.ci95[1] - found.ci95[0] == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.12)
    assert found.detectable == pytest.approx(2.80 * 0.1 / 20, rel=0.12)


def test_the_detectable_difference_is_found_eight_times_in_ten() -> None:
    draws, seen = np.random.default_rng(1), 0
    detectable = 2.801585 * 0.2 / 100**0.5
    for _ in range(200):
        plain = draws.random(100)
        found = compare_means("m", plain.tolist(), (plain + draws.normal(detectable, 0.2, 100)).tolist(), resamples=500)
        assert found.ci95 is not None
        seen += found.ci95[0] > 0 or found.ci95[1] < 0
    assert 0.68 <= seen / 200 <= 0.92


def test_where_no_pair_differs_nothing_is_said_about_what_could_be_seen() -> None:
    same = compare_means("m", [1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (same.change, same.ci95, same.detectable) == (0.0, (0.0, 0.0), None)
    few = compare_means("m", [1.0, 0.0], [0.0, 0.0])
    assert (few.change, few.ci95, few.detectable) == (-0.5, None, None)


def test_the_ratio_of_lengths_is_of_totals() -> None:
    found = compare_totals("length_ratio", [10, 30, 20], [20, 30, 40])
    assert found.change == 1.5
    assert found.ratio and found.ci95 is not None and found.ci95[0] <= 1.5 <= found.ci95[1]
    draws = np.random.default_rng(2)
    old = draws.uniform(50, 150, 500)
    new = old * 1.1 + draws.normal(0, 10, 500)
    wide = compare_totals("length_ratio", old.tolist(), new.tolist())
    assert wide.ci95 is not None and wide.detectable is not None
    half = (wide.ci95[1] - wide.ci95[0]) / 2
    assert half == pytest.approx(1.96 * 10 / 500**0.5 / 100, rel=0.2)
    assert wide.detectable == pytest.approx(half * 2.80 / 1.96, rel=0.1)


# --- programs ---

ADD = Problem(
    'import math\n\n\ndef helper(x):\n    return x\n\n\ndef add(a, b):\n    """Adds."""\n',
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "add",
)


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("    return a + b\n", True),  # a completion
        ("    return a + b\n\n\nprint(add(1))\nfoo bar", True),  # what goes on after the body is cut
        ("Sure!\n```python\ndef add(a, b):\n    return int(math.fsum([a, helper(b)]))\n```\nIt adds.", True),
        ("```\nx = 1\n```\nthen\n```python\ndef add(a, b):\n    return a + b\n```", True),  # the block with the function
        ("```python\ndef add(a, b):\n    return a + b", True),  # cut at the token limit
        ("    return a - b\n", False),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("I can't.", False),
        ("", False),
    ],
)
def test_an_answer_passes_when_its_code_passes_the_tests(answer: str, passes: bool) -> None:
    assert run_program(ADD.program(answer), timeout_s=20).passed is passes


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(0)", "ended early with code 0"),  # not to its end: not passed
        ("import os; os._exit(0)", "ended early with code 0"),
        ("raise ValueError('no')", "ValueError: no"),
        ("def", "SyntaxError: invalid syntax"),
        ("bytearray(600 << 20)", "MemoryError"),
        ("open('big', 'wb').write(bytes(9 << 20))", r"OSError: \[Errno 27\] File too large"),
        ("print('x' * 100_000_000); assert False", "AssertionError"),  # output is thrown away
        ("import sys; print(sys.stdin.read()); assert sys.stdin.read() == 'word'", "AssertionError"),
    ],
)
def test_a_program_that_does_not_reach_its_end_fails_with_its_reason(source: str, reason: str) -> None:
    outcome = run_program(source, timeout_s=20, memory_bytes=512 << 20)
    assert not outcome.passed
    assert outcome.reason is not None
    assert re.fullmatch(reason, outcome.reason)


def test_a_program_over_its_time_is_killed_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    began = time.monotonic()
    outcome = run_program(source, timeout_s=3)
    assert outcome.reason == "ran for more than 3 s"
    assert time.monotonic() - began < 20
    state = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(200):  # killed; who inherits it may take a moment to reap it
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the child lives")


def test_a_program_has_a_folder_of_its_own_and_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    source = (
        "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert os.getcwd() == os.path.realpath(os.environ['HOME'])\n"
    )
    assert run_program(source, timeout_s=20).passed


@pytest.mark.skipif(not (DATA / "humaneval_dev.jsonl").exists(), reason="needs the problems in /work/shared/data")
def test_canonical_solutions_pass_and_empty_ones_fail() -> None:
    items = read_items(DATA / "humaneval_dev.jsonl", limit=3)
    rows = [json.loads(line) for line in (DATA / "humaneval_dev.jsonl").read_text().splitlines()[:3]]
    for item, row in zip(items, rows, strict=True):
        assert item.problem is not None
        fenced = f"```python\n{row['prompt']}{row['canonical_solution']}```"
        assert run_program(item.problem.program(row["canonical_solution"]), timeout_s=30).passed
        assert run_program(item.problem.program(fenced), timeout_s=30).passed
        assert not run_program(item.problem.program("    pass\n"), timeout_s=30).passed


# --- prompts ---


def item(**row: Any) -> QualityItem:
    return quality_item({"prompt": "w1 w2", **row}, 1, "f.jsonl, line 1")


CODE = {"prompt": "def f():\n", "test": "def check(c): pass", "entry_point": "f"}


@pytest.mark.parametrize(
    ("rows", "metric"),
    [
        ([{"reference": "w1 w2 w3 w4 w5 w6"}], "rouge-l"),
        ([{"reference": ["James Ray", "George Harrison"]}], "exact"),
        ([{"reference": "a\n#### 7"}, {"reference": "12.5"}], "numeric"),
        ([{"reference": "7 apples"}], "exact"),
        ([{"reference": "7"}, {}], None),
        ([{}], None),
        ([CODE], "pass1"),
    ],
)
def test_auto_takes_the_metric_that_the_references_fit(rows: list[dict[str, Any]], metric: str | None) -> None:
    assert choose_metric([item(**row) for row in rows], "auto", run_code=True) == metric


@pytest.mark.parametrize(
    ("rows", "metric", "message"),
    [
        ([CODE], "auto", "metric pass1 runs the code that the model writes; allow it with --run-code"),
        ([{"reference": "a"}], "pass1", "needs 'test' and 'entry_point' in every row; prompt 1 has none"),
        ([{"reference": "a"}, {"id": "x"}], "rouge-l", "metric rouge-l needs a reference in every row; prompt x has none"),
        ([{"reference": "a"}], "numeric", "metric numeric needs a number in every reference"),
        ([{}], "rouge", r"metric is 'rouge'; allowed: auto, .* Did you mean 'rouge-l'\?"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(rows: list[dict[str, Any]], metric: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_metric([item(**row) for row in rows], metric, run_code=False)


def test_numbers_of_0_are_numbers() -> None:
    assert choose_metric([item(reference="0")], "auto", run_code=False) == "numeric"
    assert choose_metric([item(reference="is 0")], "numeric", run_code=False) == "numeric"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "f, line 2: expected a JSON object, found list"),
        ({"prompt": "a", "reference": 7}, r"f, line 2: reference is 7; it must be a text, a list of texts"),
        ({"prompt": "a", "reference": ["x", ""]}, r"reference is \['x', ''\]"),
        ({"prompt": "a", "test": "b"}, "f, line 2: a code problem needs 'prompt', 'test' and 'entry_point'"),
        ({"reference": "a"}, "f, line 2: needs 'messages' .a list. or 'prompt'"),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(row: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quality_item(row, 2, "f, line 2")


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="holds no prompts; at least 1 is needed"):
        read_items(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigurationError, match="no such file"):
        read_items(tmp_path / "none.jsonl")


# --- the evaluation ---


def test_a_lossless_greedy_profile_changes_nothing_and_a_lossy_one_does() -> None:
    prompts = [f"w{index} w{index + 1}" for index in range(5)]
    plain = make_decoder(settings=Settings(draft_length=3))
    texts = [
        plain.tokenizer.decode(hf_greedy(plain.target.model, plain.tokenizer(text)["input_ids"], 12)) for text in prompts
    ]
    items = [item(prompt=prompt, reference=text) for prompt, text in zip(prompts, texts, strict=True)]
    lossless = evaluate(plain, items, "rouge-l", max_new_tokens=12, temperature=0.0)
    assert lossless.answers == tuple((text, text) for text in texts)
    by_name = {part.measure: part for part in lossless.comparisons}
    assert list(by_name) == ["rouge_l", "repeated_4grams", "distinct_2", "length_ratio"]
    assert (by_name["rouge_l"].plain, by_name["rouge_l"].change, by_name["length_ratio"].change) == (1.0, 0.0, 1.0)
    lossy = make_decoder(settings=Settings(draft_length=3, alpha=1.0))
    found = evaluate(lossy, items, "rouge-l", max_new_tokens=12, temperature=0.0)
    assert [old for old, _ in found.answers] == texts  # plain decoding is not relaxed
    score = found.comparisons[0]
    assert score.plain == 1.0 and score.profile < 1.0
    expected = [rouge_l(new, one.references) for (_, new), one in zip(found.answers, items, strict=True)]
    assert score.profile == pytest.approx(float(np.mean(expected)))


def test_samples_of_a_prompt_are_one_pair_and_have_seeds_of_their_own() -> None:
    decoder = make_decoder(settings=Settings(draft_length=2, alpha=0.5))
    items = [item(prompt="w1 w2", reference="w3 w4"), item(prompt="w5", reference="w4")]
    found = evaluate(decoder, items, "exact", max_new_tokens=10, seed=4, samples=3, temperature=0.9)
    assert [part.measure for part in found.comparisons] == ["exact", "f1", "repeated_4grams", "distinct_2", "length_ratio"]
    assert all(part.prompts == 2 for part in found.comparisons)
    ids, sides = [4, 5], []
    for settings_ in (Settings(draft_length=0), decoder.settings):
        tokens = [
            decoder.generate_ids([ids], 10, seed=seed, settings=settings_, temperature=0.9)[0].tokens for seed in (4, 5, 6)
        ]
        assert len({tuple(one) for one in tokens}) == 3
        sides.append(np.mean([distinct_share(one) for one in tokens]))
    alone = evaluate(decoder, items[:1], None, max_new_tokens=10, seed=4, samples=3, temperature=0.9)
    distinct = next(part for part in alone.comparisons if part.measure == "distinct_2")
    assert (distinct.plain, distinct.profile) == pytest.approx(tuple(sides))
    assert math.isfinite(distinct.change)


def test_a_model_with_a_template_gets_the_question_and_one_without_the_bare_prompt() -> None:
    problem = item(prompt="w1 w2", test="def check(candidate): pass", entry_point="f")
    bare, chat = make_decoder(), make_decoder(template="{% for m in messages %}w7 {{ m['content'] }}{% endfor %}")
    for decoder, text in ((bare, "w1 w2"), (chat, f"w7 {problem.messages[0]['content']}")):
        found = evaluate(decoder, [problem], "pass1", max_new_tokens=4, temperature=0.0)
        ids = decoder.tokenizer(text)["input_ids"]
        assert found.answers[0][0] == decoder.tokenizer.decode(hf_greedy(decoder.target.model, ids, 4))
        assert (found.comparisons[0].plain, found.comparisons[0].ci95) == (0.0, None)
