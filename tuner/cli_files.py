"""`lossytune show` and `profiles`: commands over stored files."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lossyspec.errors import ConfigurationError

from .cli_common import Group, print_json, show_run


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def show(path: Path, as_json: bool) -> None:
    """Show a run's front, or a profile field by field."""
    if path.is_dir():
        if as_json:
            print_json(
                import_module("lossyspec.reports.data").report_data(import_module("lossyspec.reports.load").load_run(path))
            )
        else:
            show_run(path)
            run = import_module("lossyspec.reports.load").load_run(path)
            click.echo(f"\n{run.verdict}")
        return
    from lossyspec.profile import read_profile
    from lossyspec.records import dump

    profile = dump(read_profile(path))
    if as_json:
        print_json(profile)
        return
    for name, value in _flat(profile):
        click.echo(f"{name:48} {'n/a' if value is None else value}")


def _flat(data: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        return [row for name, value in data.items() for row in _flat(value, f"{prefix}.{name}" if prefix else name)]
    return [(prefix, json.dumps(data) if isinstance(data, list | dict) else data)]


@click.group(cls=Group)
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
        print_json(rows)
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


@profiles.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--trial", type=int, default=None, required=True, metavar="N", help="Its number in `lossytune show RUN`. [default: none]"
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="File. [default: among this user's profiles]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def pick(run: Path, trial: int, out: Path | None, as_json: bool) -> None:
    """Write the profile of another point of a run's front than the recommended one."""
    from lossyspec.profile import kept_path, write_profile
    from lossyspec.records import dump

    from .picking import pick as profile_of

    profile = profile_of(run, trial)
    path = out or kept_path(profile)
    profile = write_profile(path, profile)
    if as_json:
        print_json({"path": str(path), **dump(profile)})
        return
    evidence = profile.evidence
    loss = 100 * (evidence.quality.perplexity_ratio.value - 1)
    click.echo(f"{profile.task}: {evidence.speedup.value:.2f}x at {loss:+.1f} %\nprofile     {path}")
    limit = profile.provenance.max_quality_loss
    if loss > 100 * limit:
        click.echo(f"warning: the loss is over the limit of the search, {100 * limit:g} %", err=True)
