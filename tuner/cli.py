"""The command line: options into a typed config, one call, one place where errors become messages and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lossyspec.errors import ConfigurationError, LossyspecError, nearest
from lossyspec.settings import PRECISIONS, RULES, make_sampling

from .config import SearchConfig, make_config, parse_duration_s, parse_loss, parse_names, parse_numbers

_INTERRUPTED = 130


class _Group(click.Group):
    """Unknown commands get the nearest right spelling."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message}{nearest(args[0], self.commands)}", ctx) from None


@click.group(cls=_Group, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lossytune")
def app() -> None:
    """Tunes lossy speculative decoding for this device, a model pair and a task, and says what it costs in quality.

    Exit codes: 0 ok, 1 bug, 2 usage or configuration, 3 no feasible point, 4 environment, 5 every trial failed,
    6 profile mismatch, 130 interrupted.
    """


def main() -> None:
    """Entry point: every error on purpose becomes one message and its exit code, without a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)
    except KeyboardInterrupt:
        click.echo("interrupted; what was finished is saved, go on with --resume", err=True)
        sys.exit(_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except LossyspecError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def _json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


class _Interrupts:
    """The first Ctrl-C ends the current trial or block and saves, the second stops at once, the third aborts."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.count == 1:
            click.echo("\nending the current step; Ctrl-C again stops at once", err=True)
        elif self.count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(_INTERRUPTED)

    def __call__(self) -> bool:
        return self.count > 0


def _sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--temperature and its companions; None: the task's or the profile's own."""
    for option in (
        click.option("--repetition-penalty", type=float, default=None, help="1 is off. [default: off]"),
        click.option("--top-p", type=float, default=None, help="Nucleus sampling. [default: off]"),
        click.option("--top-k", type=int, default=None, help="Only the k likeliest tokens. [default: off]"),
        click.option("--temperature", type=float, default=None, help="0 is greedy. [default: the task's or profile's own]"),
    ):
        command = option(command)
    return command


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@app.command()
@click.option(
    "--task", default="dialogue", help="dialogue, multiturn, code, summarization, longdoc; math and legal are lossless only."
)
@click.option("--target", default="embedded", help="Hub id, folder, .gguf file, or 'embedded' (SmolLM2-135M-Instruct).")
@click.option("--draft", default="ngram", help="'ngram' (prompt lookup), or a model as --target takes.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), default=None, help="JSONL with messages or prompt, and maybe reference."
)
@click.option("--dataset", default=None, help="A data set: cnn_dailymail, a hub id, or a local file or folder.")
@click.option("--max-quality-loss", default="5%", help="Most perplexity over the target's own.")
@click.option("--budget", default="5m", help="Wall-clock time of the whole search: 90s, 5m, 1h.")
@click.option("--trials", type=int, default=600, help="Most configurations to replay.")
@click.option("--batch", default="1,4", help="Batch sizes to tune for.")
@click.option("--precision", default="auto", help="auto, or a list of fp32, bf16, fp16.")
@click.option("--rules", default="auto", help=f"auto (optimal, mixture, priced), or a list of {', '.join(RULES)}.")
@click.option("--max-draft-length", type=int, default=8, help="Most drafted tokens a round.")
@click.option("--max-new-tokens", type=int, default=64, help="Length of the texts that are traced and decoded.")
@click.option("--texts", type=int, default=16, help="Prompts of each half of the workload.")
@_sampling_options
@click.option("--seed", type=int, default=0, help="Seed of the sampler, the texts and the live runs.")
@click.option(
    "--storage", default=None, help="Optuna storage URL, to keep or share the study. [default: rebuilt from the run folder]"
)
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run of the task, or with the one in --out.")
@click.option("--force", is_flag=True, help="Relax a task that is known as unsuitable (math, legal).")
@click.option("--strict", is_flag=True, help="Refuse to measure while another process uses the device.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; run no model.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Run folder. [default: runs/<time>-<task>]")
@click.option("--json", "as_json", is_flag=True, help="Print the front as JSON.")
def search(*, resume: bool, dry_run: bool, out: Path | None, as_json: bool, **options: Any) -> None:
    """Search the knobs, confirm the front live, and write a profile."""
    config = search_config(**options)
    from .progress import Reporter
    from .search import Search

    interrupts = _Interrupts()
    job = Search(config, Reporter(), out=out, resume=resume, command=sys.argv, stop=interrupts)
    if dry_run:
        _json(job.plan())
        return
    result = job.run()
    build_report = import_module("lossyspec.reports.build").build_report
    build_report(result.folder)
    if as_json:
        _json(json.loads((result.folder / "front.json").read_text()))
        return
    _show_run(result.folder)
    click.echo(f"\n{result.front.verdict}")
    click.echo(
        f"run folder  {result.folder}\nreport      {result.folder / 'report' / 'index.html'}\n"
        f"picture     {result.folder / 'report' / 'pareto.png'}\nprofile     {result.folder / 'profile.json'}"
    )


def search_config(
    *,
    task: str,
    target: str,
    draft: str,
    prompts: Path | None,
    dataset: str | None,
    max_quality_loss: str,
    budget: str,
    trials: int,
    batch: str,
    precision: str,
    rules: str,
    max_draft_length: int,
    max_new_tokens: int,
    texts: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int,
    storage: str | None,
    force: bool,
    strict: bool,
) -> SearchConfig:
    """Options as typed in, into a SearchConfig. Raises ConfigurationError naming the option's value and what is allowed."""
    from .workloads import find_task

    sampling = _given(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    own = find_task(task).sampling
    precisions, chosen = parse_names(precision), parse_names(rules)
    for name, values, allowed in (("precision", precisions, PRECISIONS), ("rule", chosen, RULES)):
        for value in values or ():
            if value not in allowed:
                raise ConfigurationError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.{nearest(value, allowed)}")
    return make_config(
        task=task,
        target=target,
        draft=draft,
        prompts=prompts,
        dataset=dataset,
        max_quality_loss=parse_loss(max_quality_loss),
        budget_s=parse_duration_s(budget),
        trials=trials,
        batch_sizes=parse_numbers(batch, "batch"),
        precisions=precisions,
        rules=chosen,
        max_draft_length=max_draft_length,
        max_new_tokens=max_new_tokens,
        texts=texts,
        seed=seed,
        storage=storage,
        force=force,
        strict=strict,
        sampling=make_sampling(**{**own.model_dump(), **sampling}) if sampling else None,
    )


def _show_run(folder: Path) -> None:
    run = import_module("lossyspec.reports.load").load_run(folder)
    console = Console()
    console.print(import_module("lossyspec.reports.tables").front_table(run, console.width))


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def detect(as_json: bool) -> None:
    """Say what this machine is, and which profiles would match."""
    from lossyspec.hardware import detect_hardware, render_lines, supported_precisions
    from lossyspec.profile import Profile, device_of, known_profiles

    info = detect_hardware()
    device = device_of(info)
    matching = [
        {"path": str(path), "task": item.task, "id": item.id}
        for path, item in known_profiles()
        if isinstance(item, Profile) and item.match.device.name == device.name
    ]
    if as_json:
        _json(
            {
                **info.model_dump(mode="json"),
                "device": device.model_dump(mode="json"),
                "precisions": supported_precisions(info),
                "profiles": matching,
            }
        )
        return
    click.echo("\n".join(render_lines(info)))
    click.echo(
        "\nprofiles for this device:"
        if matching
        else "\nno profile for this device; make one with: lossytune search --task dialogue"
    )
    for row in matching:
        click.echo(f"  {row['task']:14} {row['path']}")


@app.command()
@click.argument("prompt")
@click.option("--profile", default="auto", help="profile.json of a search, or 'auto' for the best match for this machine.")
@click.option("--task", default=None, help="With 'auto': the task that the profile was tuned for. [default: any]")
@click.option("--target", default="embedded", help="With 'auto': the model.")
@click.option("--draft", default=None, help="With 'auto': the draft model. [default: n-gram]")
@click.option("--alpha", type=float, default=None, help="Relaxation, instead of the profile's.")
@click.option("--draft-length", type=int, default=None, help="Draft length, instead of the profile's.")
@click.option("--max-new-tokens", type=int, default=256, help="Most tokens of the answer.")
@_sampling_options
@click.option("--stop", multiple=True, help="End at this text; may be given more than once.")
@click.option("--seed", type=int, default=None, help="Same seed, same answer. [default: random]")
@click.option("--allow-mismatch", is_flag=True, help="Load a profile that was tuned for something else.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer and its statistics as JSON.")
def generate(
    prompt: str,
    profile: str,
    task: str | None,
    target: str,
    draft: str | None,
    alpha: float | None,
    draft_length: int | None,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    stop: tuple[str, ...],
    seed: int | None,
    allow_mismatch: bool,
    as_json: bool,
) -> None:
    """Answer one prompt, streamed, with its statistics on stderr."""
    from lossyspec.decoder import Decoder
    from lossyspec.settings import make_settings

    sampling = _given(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    make_sampling(**sampling)
    make_settings(**_given(alpha=alpha, draft_length=draft_length))
    decoder = Decoder.from_profile(profile, task, target, draft, allow_mismatch=allow_mismatch)
    changes = _given(alpha=alpha, draft_length=draft_length)
    if changes:
        values = {**decoder.settings.model_dump(), **changes}
        if draft_length is not None:
            values["schedule"] = ()
        if alpha and values["rule"] == "exact":
            values["rule"] = "optimal"
        decoder.settings = make_settings(**values)
    text, last = [], None
    for piece in decoder.stream(prompt, max_new_tokens, seed=seed, stop=stop, **sampling):
        text.append(piece.text)
        last = piece
        if not as_json:
            click.echo(piece.text, nl=False)
    assert last is not None and last.stats is not None and decoder.match is not None
    stats = last.stats
    if as_json:
        _json(
            {
                "text": "".join(text),
                "finish_reason": last.finish_reason,
                "match": decoder.match.level,
                "tokens": stats.tokens,
                "rounds": stats.rounds,
                "tokens_per_round": stats.tokens_per_round,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "acceptance": stats.acceptance,
                "tokens_per_s": stats.tokens_per_s,
                "prefill_s": stats.prefill_s,
                "decode_s": stats.decode_s,
                "settings": decoder.settings.model_dump(mode="json"),
            }
        )
        return
    click.echo()
    accepted = f"{stats.accepted} of {stats.drafted} drafted tokens accepted" if stats.drafted else "nothing drafted"
    click.echo(
        f"[profile: {decoder.match.level}; {stats.tokens} tokens in {stats.rounds} rounds, "
        f"{stats.tokens_per_round:.2f} a round; {accepted}; {stats.tokens_per_s:.1f} tokens/s; "
        f"ended by {last.finish_reason}]",
        err=True,
    )


@app.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def show(path: Path, as_json: bool) -> None:
    """Show a run's front, or a profile field by field."""
    if path.is_dir():
        if as_json:
            _json(
                import_module("lossyspec.reports.build").report_data(import_module("lossyspec.reports.load").load_run(path))
            )
        else:
            _show_run(path)
            run = import_module("lossyspec.reports.load").load_run(path)
            click.echo(f"\n{run.verdict}")
        return
    from lossyspec.profile import read_profile
    from lossyspec.records import dump

    profile = dump(read_profile(path))
    if as_json:
        _json(profile)
        return
    for name, value in _flat(profile):
        click.echo(f"{name:48} {'n/a' if value is None else value}")


def _flat(data: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        return [row for name, value in data.items() for row in _flat(value, f"{prefix}.{name}" if prefix else name)]
    return [(prefix, json.dumps(data) if isinstance(data, list | dict) else data)]


@app.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder of the outputs. [default: RUN/report]")
def report(run: Path, out: Path | None) -> None:
    """Rebuild every output of a run from its stored files."""
    for path in import_module("lossyspec.reports.build").build_report(run, out):
        click.echo(path)


@app.group(cls=_Group)
def profiles() -> None:
    """Profiles on this machine."""


@profiles.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_profiles(as_json: bool) -> None:
    """List this user's profiles and the bundled ones."""
    from lossyspec.profile import Profile, known_profiles

    rows: list[dict[str, Any]] = []
    for path, item in known_profiles():
        if isinstance(item, Profile):
            rows.append(
                {
                    "path": str(path),
                    "task": item.task,
                    "device": item.match.device.name,
                    "target": item.match.target.id,
                    "speedup": item.evidence.speedup.value,
                    "perplexity_ratio": item.evidence.quality.perplexity_ratio.value,
                }
            )
        else:
            click.echo(f"warning: {item}", err=True)
    if as_json:
        _json(rows)
        return
    for row in rows:
        loss = 100 * (row["perplexity_ratio"] - 1)
        click.echo(
            f"{row['task']:14} {row['speedup']:.2f}x at {loss:+.1f} %  {row['device']}  {row['target']}  {row['path']}"
        )
    if not rows:
        click.echo("no profiles yet; make one with: lossytune search --task dialogue")


@profiles.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
def validate(paths: tuple[Path, ...]) -> None:
    """Check profile files: schema, ranges, and that the content is what was written."""
    from lossyspec.profile import read_profile

    problems = []
    for path in paths:
        try:
            profile = read_profile(path)
            click.echo(f"{path}: ok ({profile.task}, {profile.match.device.name})")
        except ConfigurationError as error:
            problems.append(str(error))
            click.echo(f"{path}: not valid", err=True)
    if problems:
        raise ConfigurationError("\n".join(problems))
