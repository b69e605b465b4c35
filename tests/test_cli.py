"""The command line: exit codes, one message an error, results on stdout alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pynvml
import pytest
from conftest import save_tiny
from rich.console import Console
from test_profile import HERE, profile
from test_records import trial

from lossyspec.decoder import Decoder, identify_here
from lossyspec.errors import (
    ConfigurationError,
    EnvironmentProblem,
    EveryTrialFailed,
    LossyspecError,
    NoFeasiblePoint,
    NumericalError,
    ProfileMismatch,
)
from lossyspec.loading import load
from lossyspec.profile import Here, user_profile_folder, write_profile
from lossyspec.records import Front, FrontPoint, Prediction, RunManifest, append_record, dump, write_record
from lossyspec.settings import Sampling, Settings
from lossyspec.tuner import cli_common
from lossyspec.tuner.cli import app, main
from lossyspec.tuner.cli_search import over_budget
from lossyspec.tuner.progress import Reporter

FRAME = re.compile(r"Traceback|File \"")


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The only line on stderr of a command that was refused."""
        assert self.out == ""
        assert not FRAME.search(self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, lines
        return lines[0]


Cli = Callable[..., Said]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Cli]:
    """Runs `lossytune ARGS` in this process, in an empty folder, and as a terminal of 100 columns would show it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before = signal.getsignal(signal.SIGINT)

    def run(*args: str) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lossytune", *args])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return Said(code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a model is loaded."""

    def loads(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lossyspec.tuner.models.load", loads)
    monkeypatch.setattr("lossyspec.decoder.load", loads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def here(tiny: Path) -> Here:
    return identify_here(load(str(tiny)), None)


# help


def commands() -> list[tuple[str, click.Command]]:
    """All commands with their full names."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        for inner, child in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {inner}", child)

    return list(walk("lossytune", app))


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_help_of_every_command_says_what_it_does_and_every_default(cli: Cli, name: str, command: click.Command) -> None:
    said = cli(*name.split()[1:], "--help")
    assert (said.code, said.err) == (0, "")
    assert re.match(rf"Usage: .*lossytune{name.removeprefix('lossytune')} ", said.out)
    assert command.help and command.help.split()[0] in said.out
    about = [" ".join(part.split()) for part in re.split(r"\n  (?=-)", said.out)]
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.multiple:
            (part,) = [part for part in about if part.startswith(f"{option.opts[0]} ")]
            assert "[default: " in part, f"{option.opts[0]}: {part}"
            if option.default is not None:
                assert f"[default: {option.default}" in part


def test_help_of_the_program_names_its_exit_codes_and_commands(cli: Cli) -> None:
    said = cli("-h")
    assert "130 interrupted" in said.out
    assert all(name in said.out for name in ("search", "detect", "generate", "show", "report", "profiles"))
    assert cli().code == 2
    assert cli("--version").out.strip().endswith("0.1.0")


# what is refused


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--task", "dialog"), "task is 'dialog'; allowed: dialogue, multiturn, .*Did you mean 'dialogue'"),
        (
            ("--precision", "fp23"),
            "precision is 'fp23'; allowed: fp32, bf16, fp16, fp8, int8, int4-int8, int4. Did",
        ),
        (("--precision", "int2"), "precision is 'int2'; allowed: fp32, bf16, fp16, fp8, int8, int4-int8, int4"),
        (("--precision", ""), "precision is an empty list; allowed: auto, or some of fp32, bf16, fp16"),
        (("--precision", ","), "precision is an empty list"),
        (("--compile", "inducktor"), "compile is 'inducktor'; allowed: off, inductor, tensorrt. Did you mean 'inductor'?"),
        (("--rules", "optimall"), "rule is 'optimall'; allowed: exact, .*Did you mean 'optimal'"),
        (("--rules", ""), "rule is an empty list; allowed: auto, or some of exact"),
        (("--attention", ""), "attention is an empty list; allowed: auto, dense, or some as b32"),
        (("--target", "/no/such"), "model '/no/such': no such folder"),
        (("--draft", "no/such/model"), "model 'no/such/model': no such folder"),
        (("--target", "none.gguf"), "none.gguf: no such file"),
        (("--target", ""), "model is an empty name"),
        (("--out", "/proc/none"), "--out /proc/none: cannot be made"),
        (("--out", "/dev/null"), "--out /dev/null: cannot be made"),
        (("--resume", "--out", "none"), "--resume: none holds no run"),
        (("--max-quality-loss", "five"), "quality loss is 'five'; allowed: a share or a percentage, such as 0.05 or 5%"),
        (("--max-quality-loss", "-5%"), "quality loss is '-5%'"),
        (("--max-quality-loss", "2000%"), "max_quality_loss is 20.0: .*less than or equal to 10"),
        (("--budget", "5min"), "duration is '5min'; allowed: a number over 0 with s, m or h, such as 90s or 5m"),
        (("--budget", "0"), "duration is '0'"),
        (("--budget", "3"), "budget_s is 3.0: .*greater than or equal to 10"),
        (("--batch", "0"), "batch_sizes is .*: allowed: whole numbers from 1 to 256, such as 1,2,4,8"),
        (("--batch", "one"), "batch is 'one'; allowed: whole numbers with commas, such as 1,2,4"),
        (("--batch", "1,,2"), "batch is '1,,2'"),
        (("--batch", "300"), "batch_sizes is .*300.*1 to 256"),
        (("--trials", "0"), "trials is 0: .*greater than or equal to 1"),
        (("--texts", "1"), "texts is 1: .*greater than or equal to 2"),
        (("--seed", "-1"), "seed is -1"),
        (("--seed", "99999999999"), "seed is 99999999999: .*less than"),
        (("--max-draft-length", "17"), "max_draft_length is 17: .*less than or equal to 16"),
        (("--max-new-tokens", "7"), "max_new_tokens is 7"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--top-p", "0"), "top_p is 0.0"),
        (("--prompts", "nope.jsonl"), "prompts nope.jsonl: no such file"),
        (("--prompts", "a.jsonl", "--dataset", "b"), "give --prompts or --dataset, not both"),
        (("--task", "math"), "task 'math' has no bundled prompts; give --prompts FILE.jsonl or --dataset NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_option_of_search_is_one_clear_line_and_exit_2(cli: Cli, args: tuple[str, ...], said: str) -> None:
    result = cli("search", *args)
    assert result.code == 2
    assert re.match(rf"error: {said}", result.message)
    assert "Value error" not in result.message


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--alpha", "2"), "alpha is 2.0: .*less than or equal to 1"),
        (("--alpha", "nan"), "alpha is nan: .*finite"),
        (("--draft-length", "99"), "draft_length is 99: .*less than or equal to 16"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0; it must be at least 1"),
        (("--temperature", "99"), "temperature is 99.0"),
        (("--top-k", "0"), "top_k is 0"),
        (("--stop", ""), "stop_strings holds an empty string"),
        (("--compile", "yes"), "compile is 'yes': Input should be 'off', 'inductor' or 'tensorrt'"),
        (("--profile", "nope.json"), "nope.json: no such file"),
        (("--profile", "."), "\\.: cannot be read"),
        (("--seed", "-1"), "seed is -1; allowed: a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_option_of_generate_is_refused_before_a_model_is_loaded(cli: Cli, args: tuple[str, ...], said: str) -> None:
    result = cli("generate", "hello", *args)
    assert result.code == 2
    assert re.match(rf"error: {said}", result.message)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("hello\n", "line 1: not JSON"),
        (
            '{"prompt": "a"}\n{"promt": "b"}\n',
            "line 2: needs 'messages' \\(a list\\) or 'prompt' \\(a text\\); it has \\['promt'\\]",
        ),
        ("[1]\n", "line 1: expected a JSON object, found list"),
        ('{"prompt": "a"}\n', "holds 1 prompt; at least 2 are needed"),
        ("", "holds 0 prompts"),
        ('{"messages": [{"role": "bot", "content": "x"}]}\n', "line 1: messages must be a list"),
    ],
)
def test_a_wrong_prompts_file_is_named_with_its_line(cli: Cli, tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(rows, encoding="utf-8")
    result = cli("search", "--prompts", "p.jsonl", "--dry-run")
    assert result.code == 2
    assert re.match(rf"error: p\.jsonl.* ?{said}", result.message)


def test_a_prompts_file_of_windows_is_read(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    plan = json.loads(cli("search", "--prompts", "p.jsonl", "--dry-run").out)
    assert (plan["workload"]["search"], plan["workload"]["confirm"]) == (1, 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serch",), "No such command 'serch'. Did you mean 'search'?"),
        (("profiles", "lst"), "No such command 'lst'. Did you mean 'list'?"),
        (("search", "--tsk", "code"), "--task"),
        (("search", "--trials", "ten"), "'ten' is not a valid integer"),
        (("search", "code"), "unexpected extra argument (code)"),
        (("generate",), "Missing argument 'PROMPT'"),
        (("profiles", "validate"), "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistyped_command_or_option_gets_the_nearest_one_and_exit_2(cli: Cli, args: tuple[str, ...], said: str) -> None:
    result = cli(*args)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert not FRAME.search(result.err)


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "", "nowhere.gguf"])
@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_a_model_that_is_not_there_is_exit_2_without_a_run_folder(
    cli: Cli, tmp_path: Path, tiny: Path, option: str, name: str
) -> None:
    models = {"--target": str(tiny), option: name}
    result = cli("search", *(part for pair in models.items() for part in pair), "--precision", "fp32")
    assert (result.code, result.out) == (2, "")
    assert re.search(r"error: .*(no such|empty name)", result.err.splitlines()[-1])
    assert not FRAME.search(result.err)
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError, 2),
        (NoFeasiblePoint, 3),
        (EnvironmentProblem, 4),
        (NumericalError, 4),
        (EveryTrialFailed, 5),
        (ProfileMismatch, 6),
    ],
)
def test_every_error_on_purpose_has_its_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: type[LossyspecError], code: int
) -> None:
    def fail() -> None:
        raise error("because")

    monkeypatch.setattr("lossyspec.hardware.detect_hardware", fail)
    result = cli("detect")
    assert (result.code, result.message) == (code, "error: because")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "error: No space left on device; "),
        (PermissionError(13, "Permission denied", "runs/x"), "error: runs/x: Permission denied; "),
    ],
)
def test_what_the_system_refuses_is_one_line_and_exit_4(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("lossyspec.hardware.detect_hardware", fail)
    result = cli("detect")
    assert (result.code, result.message.startswith(said)) == (4, True)


@pytest.mark.parametrize(
    ("target", "code", "said"), [("/dev/full", 4, "No space left"), ("| head -c 1 >/dev/null", 141, "")]
)
def test_an_output_that_takes_no_more_is_no_traceback(tmp_path: Path, target: str, code: int, said: str) -> None:
    place = target if target.startswith("|") else f"> {target}"
    command = f"set -o pipefail; {sys.executable} -m lossyspec.tuner search --dry-run {place}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    # a small output may have been written whole before its reader went
    assert result.returncode == code or (code == 141 and result.returncode == 0)
    assert said in result.stderr and not FRAME.search(result.stderr) and "Exception ignored" not in result.stderr


def test_an_interrupt_is_exit_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lossyspec.hardware.detect_hardware", fail)
    result = cli("detect")
    assert (result.code, result.message) == (130, "interrupted")


def test_an_interrupted_search_says_how_to_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(search: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lossyspec.tuner.search.Search.run", fail)
    result = cli("search")
    assert (result.code, result.out) == (130, "")
    assert "what was finished is saved; go on with the same options and --resume" in result.err


def test_a_bug_is_not_hidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("lossyspec.hardware.detect_hardware", fail)
    with pytest.raises(ZeroDivisionError):
        cli("detect")


@pytest.mark.usefixtures("cli")
def test_the_first_interrupt_asks_the_second_stops_and_the_third_aborts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupts = cli_common.Interrupts()
    assert not interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts()
    assert "again stops at once" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    ended: list[int] = []
    monkeypatch.setattr(cli_common.os, "_exit", ended.append)
    signal.raise_signal(signal.SIGINT)
    assert ended == [130]


# detect and the plan


def test_H6_detect_without_a_driver_is_a_cpu_profile_with_exit_0(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    result = cli("detect", "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["device"]["kind"] == "cpu"
    assert found["gpus"] == []
    assert found["precisions"]["fp32"] is None
    assert found["profiles"] == []
    text = cli("detect")
    assert text.code == 0
    assert "--gpus all" in text.out
    assert "lossytune search --task dialogue" in text.out


def test_detect_lists_the_profiles_of_this_device(cli: Cli, here: Here) -> None:
    write_profile(user_profile_folder() / "mine.json", profile(here))
    write_profile(user_profile_folder() / "other.json", profile())
    (row,) = json.loads(cli("detect", "--json").out)["profiles"]
    assert (row["task"], Path(row["path"]).name) == ("dialogue", "mine.json")
    assert "mine.json" in cli("detect").out


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_prints_the_plan_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "search", "--dry-run", "--task", "code", "--precision", "fp32", "--batch", "2,1", "--temperature", "0",
        "--max-quality-loss", "0", "--seed", "0", "--out", "elsewhere", "--draft", "some/draft",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    plan = json.loads(result.out)
    assert (plan["task"], plan["draft"], plan["reference_precision"]) == ("code", "some/draft", "fp32")
    assert plan["max_quality_loss"] == 0.0
    assert plan["sampling"]["temperature"] == 0.0
    assert plan["workload"]["source"] == "bundled"
    assert set(plan["space"]) == {
        "draft_length",
        "precision",
        "batch_size",
        "rule",
        "alpha",
        "theta",
        "source",
        "min_match",
        "protect",
        "exact_prefix",
        "recovery",
        "adaptive",
        "guard",
        "attention",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--target", "/no/such"), "model '/no/such': no such folder"),
        (("--draft", "no/such/model"), "no such folder, and not a hub id"),
        (("--draft", ""), "model is an empty name"),
        (("--out", "/dev/null"), "--out /dev/null: cannot be made"),
        (("--resume",), "--resume: no unfinished run"),
    ],
)
def test_a_dry_run_refuses_what_the_search_would(cli: Cli, args: tuple[str, ...], said: str) -> None:
    result = cli("search", "--dry-run", *args)
    assert (result.code, said in result.message) == (2, True)


@pytest.mark.usefixtures("no_model")
def test_a_task_that_must_not_be_relaxed_says_so_in_the_plan(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    args = ("search", "--dry-run", "--task", "math", "--prompts", "p.jsonl")
    strict, forced = json.loads(cli(*args).out), json.loads(cli(*args, "--force").out)
    assert "alpha" not in strict["space"]
    assert "lossless only" in strict["excluded"]["lossy rules"]
    assert "alpha" in forced["space"]
    assert "lossy rules" not in forced["excluded"]


# stored files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with two trials and a front of plain decoding."""
    folder = tmp_path / "run"
    manifest = RunManifest(
        created="2027-01-01T00:00:00+00:00",
        command=("lossytune", "search"),
        task="dialogue",
        target=HERE.target.model_dump(),
        draft=HERE.draft.model_dump(),
        tokenizer_sha256="t",
        sampling=Sampling(temperature=0.7),
        workload={"source": "bundled"},
        hardware={"name": "abacus"},
        versions={},
        config={},
        space={},
        excluded={},
        seed=0,
        status="complete",
    )
    write_record(folder / "manifest.json", manifest)
    for number in range(2):
        append_record(folder / "trials.jsonl", trial(number))
    predicted = Prediction(
        speedup=1.0,
        tokens_per_s=10,
        tokens_per_round=1,
        drafted_per_round=0,
        acceptance=None,
        round_s=0.1,
        plain_round_s=0.1,
    )
    point = FrontPoint(
        trial=0,
        kind="plain",
        recommended=True,
        settings=Settings(draft_length=0),
        batch_size=1,
        predicted=predicted,
        quality=profile().evidence.quality,
        measured=None,
    )
    front = Front(
        points=(point,),
        verdict="plain decoding, 1.00x: for a test",
        max_quality_loss=0.05,
        transformers_tokens_per_s=None,
        transformers_ratio=None,
    )
    write_record(folder / "front.json", front)
    return folder


def test_show_of_a_run_is_its_front_and_verdict(cli: Cli, run: Path) -> None:
    result = cli("show", str(run))
    assert (result.code, result.err) == (0, "")
    assert "plain" in result.out
    assert result.out.strip().endswith("plain decoding, 1.00x: for a test")
    data = json.loads(cli("show", str(run), "--json").out)
    assert data["verdict"] == "plain decoding, 1.00x: for a test"
    assert len(data["points"]) == 1


def test_show_of_a_profile_is_field_by_field_with_absent_as_na(cli: Cli, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile())
    result = cli("show", "p.json")
    lines = {name: value for name, _, value in (line.partition(" ") for line in result.out.splitlines())}
    assert lines["settings.alpha"].strip() == "0.3"
    assert lines["evidence.acceptance"].strip() == "n/a"
    assert lines["settings.schedule"].strip() == '[{"batch": [1, 4], "draft_length": 5}]'
    assert json.loads(cli("show", "p.json", "--json").out)["settings"]["alpha"] == 0.3


def test_report_rebuilds_its_files_and_prints_their_paths(cli: Cli, run: Path, tmp_path: Path) -> None:
    result = cli("report", str(run))
    assert (result.code, result.err) == (0, "")
    paths = [Path(line) for line in result.out.splitlines()]
    wanted = {"pareto.png", "pareto.svg", "front.csv", "summary.csv", "report.json", "report.pdf", "index.html"}
    assert wanted <= {path.name for path in paths}
    assert all(path.parent == run / "report" and path.stat().st_size for path in paths)
    elsewhere = cli("report", str(run), "--out", "other")
    assert all((tmp_path / line).is_file() for line in elsewhere.out.splitlines())


def _empty(run: Path) -> None:
    (run / "manifest.json").unlink()


def _cut_manifest(run: Path) -> None:
    (run / "manifest.json").write_text("{", encoding="utf-8")


def _newer(run: Path) -> None:
    data = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    (run / "manifest.json").write_text(json.dumps({**data, "schema": "lossytune.run/2"}), encoding="utf-8")


def _broken_front(run: Path) -> None:
    (run / "front.json").write_text("[]", encoding="utf-8")


def _broken_trials(run: Path) -> None:
    (run / "trials.jsonl").write_text("{}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_empty, "manifest.json: no such file"),
        (_cut_manifest, "manifest.json: not a JSON file"),
        (_newer, "manifest.json: schema is 'lossytune.run/2'; it was written by a newer lossytune; upgrade this one"),
        (_broken_front, "front.json: expected a JSON object, found list"),
        (_broken_trials, "trials.jsonl, line 1: schema is None"),
    ],
)
@pytest.mark.parametrize("command", ["report", "show"])
def test_a_broken_run_folder_is_one_line_naming_the_file(
    cli: Cli, run: Path, command: str, damage: Callable[[Path], None], said: str
) -> None:
    damage(run)
    result = cli(command, str(run))
    assert result.code == 2
    assert said in result.message


@pytest.mark.parametrize("command", ["report", "show"])
def test_a_missing_run_folder_is_named(cli: Cli, command: str) -> None:
    result = cli(command, "nowhere")
    assert result.code == 2
    assert re.match(r"error: nowhere: no such", result.message)


def test_profiles_list_shows_good_ones_and_warns_of_broken_ones_on_stderr(cli: Cli) -> None:
    assert cli("profiles", "list").out == "no profiles yet; make one with: lossytune search --task dialogue\n"
    assert json.loads(cli("profiles", "list", "--json").out) == []
    write_profile(user_profile_folder() / "a.json", profile())
    (user_profile_folder() / "b.json").write_text("{", encoding="utf-8")
    text = cli("profiles", "list")
    assert text.code == 0
    assert text.out.startswith("dialogue       1.50x at +2.0 %  h100-sxm-80gb  embedded  ")
    assert text.err.startswith("warning: ")
    assert "b.json" in text.err
    rows = json.loads(cli("profiles", "list", "--json").out)
    assert [(row["task"], row["speedup"]) for row in rows] == [("dialogue", 1.5)]


def test_profiles_validate_names_every_bad_file_and_ends_with_2(cli: Cli, tmp_path: Path) -> None:
    write_profile(tmp_path / "good.json", profile())
    assert cli("profiles", "validate", "good.json") == Said(0, "good.json: ok (dialogue, h100-sxm-80gb)\n", "")
    edited = dump(profile()) | {"id": "sha256:0"}
    (tmp_path / "edited.json").write_text(json.dumps(edited), encoding="utf-8")
    result = cli("profiles", "validate", "good.json", "edited.json", "nope.json")
    assert result.code == 2
    assert result.out == "good.json: ok (dialogue, h100-sxm-80gb)\n"
    assert "edited.json: its content was changed" in result.err
    assert "nope.json: no such file" in result.err


# generate


def test_generate_prints_the_answer_alone_on_stdout(cli: Cli, tiny: Path) -> None:
    args = ("generate", "w1 w2 w1 w2", "--target", str(tiny), "--max-new-tokens", "12", "--seed", "3")
    text, data = cli(*args), cli(*args, "--json")
    assert (text.code, data.code) == (0, 0)
    assert re.search(
        r"\[rule exact; profile match: none; \d+ tokens in \d+ rounds, .* a round; .* tokens/s; ended by \w+\]", text.err
    )
    relaxed = cli(*args, "--alpha", "0.25")
    assert "[rule optimal at alpha 0.25; profile match: none; " in relaxed.err
    answer = json.loads(data.out)
    assert text.out == answer["text"] + "\n"
    assert answer["match"] == "none"
    assert 0 < answer["tokens"] <= 12
    assert answer["settings"]["alpha"] == 0.0
    assert cli(*args).out == text.out, "same seed, same answer"


def test_case_25_zeros_given_by_hand_go_before_the_profiles_values(cli: Cli, here: Here, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile(here, alpha=0.5))
    args = ("generate", "w1 w2 w1 w2", "--profile", "p.json", "--max-new-tokens", "12", "--json")

    def settings(*more: str) -> Any:
        return json.loads(cli(*args, *more).out)["settings"]

    assert settings()["alpha"] == 0.5
    assert settings("--alpha", "0")["alpha"] == 0.0
    plain = json.loads(cli(*args, "--draft-length", "0").out)
    assert (plain["settings"]["draft_length"], plain["drafted"], plain["acceptance"]) == (0, 0, None)
    greedy = {json.loads(cli(*args, "--temperature", "0", "--alpha", "0", "--seed", seed).out)["text"] for seed in "12"}
    assert len(greedy) == 1


def test_a_relaxation_by_hand_takes_effect_on_a_profile_of_the_exact_rule(cli: Cli, here: Here, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile(here, rule="exact", alpha=0.0))
    result = cli("generate", "w1", "--profile", "p.json", "--max-new-tokens", "4", "--json", "--alpha", "0.4")
    found = json.loads(result.out)["settings"]
    assert (found["rule"], found["alpha"]) == ("optimal", 0.4)


def test_a_draft_length_by_hand_holds_for_every_batch_size(cli: Cli, here: Here, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile(here))
    result = cli("generate", "w1", "--profile", "p.json", "--max-new-tokens", "4", "--json", "--draft-length", "2")
    found = json.loads(result.out)["settings"]
    assert (found["schedule"], found["draft_length"]) == ([], 2)


def test_P5_a_profile_of_another_device_is_exit_6_and_forced_on_request(cli: Cli, here: Here, tmp_path: Path) -> None:
    other = replace(here, device=here.device.model_copy(update={"name": "abacus-1gb"}))
    write_profile(tmp_path / "p.json", profile(other))
    args = ("generate", "w1 w2", "--profile", "p.json", "--max-new-tokens", "4")
    refused = cli(*args)
    assert refused.code == 6
    assert re.match(r"error: the profile was tuned for something else: device\.name: tuned on abacus-1gb", refused.message)
    forced = cli(*args, "--allow-mismatch", "--json")
    assert (forced.code, json.loads(forced.out)["match"]) == (0, "forced")


def test_a_seed_that_no_generator_takes_is_refused(cli: Cli, tiny: Path) -> None:
    args = ("generate", "w1", "--target", str(tiny), "--max-new-tokens", "2", "--seed")
    for seed in ("99999999999999999999", "-1"):
        result = cli(*args, seed)
        assert result.code == 2
        assert f"error: seed is {seed}; allowed: a whole number from 0" in result.err
    assert cli(*args, "0").code == 0


def test_a_prompt_without_tokens_is_refused(cli: Cli, tmp_path: Path) -> None:
    bare = save_tiny(tmp_path / "bare", template=False)
    result = cli("generate", "", "--target", str(bare), "--max-new-tokens", "2")
    assert result.code == 2
    assert "error: prompt '' has no tokens; it must have at least one" in result.err


# colours and processes


def test_stdout_of_a_pipe_has_no_escape_codes(cli: Cli, run: Path) -> None:
    assert "\x1b" not in cli("show", str(run)).out


def test_no_color_is_obeyed_on_a_terminal(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*[349][0-9]")

    def bar() -> str:
        screen = Console(file=StringIO(), force_terminal=True, color_system="standard", width=90)
        with Reporter(screen).steps("searching", 3) as step:
            step.advance()
            step.at(3)
        return str(screen.file.getvalue())  # type: ignore[attr-defined]

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(bar())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(bar())
    shown = cli("show", str(run)).out
    assert "\x1b" in shown
    assert not colour.search(shown)


def test_progress_without_a_terminal_is_one_plain_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(Console(file=StringIO(), force_terminal=False))
    with reporter.steps("searching", 3) as step:
        step.advance()
        step.at(2)
    reporter.say("done [red]")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\[ +\d+\.\d s\] searching\n\[ +\d+\.\d s\] done \[red\]\n", err)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [(("serch",), 2, "Did you mean 'search'?"), (("search", "--task", "dialog", "--dry-run"), 2, "error: task is 'dialog'")],
)
def test_the_program_ends_with_its_exit_code_and_no_traceback(
    tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "lossyspec.tuner", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert not FRAME.search(result.stderr)


def test_generate_says_what_a_compiler_lacks(cli: Cli, tiny: Path) -> None:
    result = cli("generate", "w1 w2", "--target", str(tiny), "--compile", "tensorrt")
    assert result.code == 2
    assert "compile is 'tensorrt', which needs an NVIDIA GPU" in result.err


def test_generate_streams_while_it_decodes(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is printed piece by piece, and not once at the end."""
    written: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text="", nl=True, err=False: written.append(text) if not err else None)
    cli("generate", "w1 w2", "--target", str(tiny), "--max-new-tokens", "10", "--draft-length", "0", "--seed", "1")
    decoder = Decoder(load(str(tiny)), settings=Settings(draft_length=0))
    answer = decoder.generate("w1 w2", 10, seed=1)
    assert "".join(written) == answer[0].text
    assert len([piece for piece in written if piece]) > 1


def test_a_search_that_took_longer_than_its_budget_says_so() -> None:
    assert over_budget(310.0, 300.0) is None
    assert str(over_budget(468.0, 300.0)).startswith("it took 7.8 minutes, the budget was 5.0:")
