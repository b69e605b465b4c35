"""`lossytune detect` and `lossytune generate`."""

from __future__ import annotations

from typing import Any

import click

from lossyspec.checks import check_seed
from lossyspec.settings import Settings, make_sampling, make_settings
from lossyspec.stopping import Stopping

from .cli_common import given, print_json, sampling_options
from .workloads import find_task


@click.command()
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
        print_json(
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


@click.command()
@click.argument("prompt")
@click.option("--profile", default="auto", help="profile.json of a search, or 'auto' for the best match for this machine.")
@click.option("--task", default=None, help="With 'auto': the task that the profile was tuned for. [default: any]")
@click.option("--target", default="embedded", help="With 'auto': the model.")
@click.option("--draft", default=None, help="With 'auto': the draft, as in search. [default: any]")
@click.option("--alpha", type=float, default=None, help="Relaxation, 0 to 1. [default: the profile's]")
@click.option("--draft-length", type=int, default=None, help="Most drafted tokens a round. [default: the profile's]")
@click.option("--compile", default=None, help="off, inductor or tensorrt. [default: the profile's]")
@click.option(
    "--cuda-graphs/--no-cuda-graphs", default=None, help="Short passes as CUDA graphs on a GPU. [default: the profile's]"
)
@click.option("--max-new-tokens", type=int, default=256, help="Most tokens of the answer.")
@sampling_options
@click.option("--stop", multiple=True, help="End at this text; may be given more than once.")
@click.option("--seed", type=int, default=None, help="Same seed, same answer. [default: random]")
@click.option("--allow-mismatch", is_flag=True, help="Load a profile that was tuned for something else.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer and its statistics as JSON.")
def generate(
    *,
    prompt: str,
    profile: str,
    task: str | None,
    target: str,
    draft: str | None,
    alpha: float | None,
    draft_length: int | None,
    compile: str | None,
    cuda_graphs: bool | None,
    max_new_tokens: int,
    stop: tuple[str, ...],
    seed: int | None,
    allow_mismatch: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer one prompt, streamed, with its statistics on stderr."""
    from lossyspec.decoder import Decoder

    sampling, changes = given(**sampling), given(alpha=alpha, draft_length=draft_length)
    changes |= given(compile=compile, cuda_graphs=cuda_graphs)
    make_sampling(**sampling)  # wrong values are refused before a model is loaded
    make_settings(**changes)
    Stopping(max_new_tokens, stop_strings=stop)
    if seed is not None:
        check_seed(seed)
    if task is not None:
        find_task(task)
    decoder = Decoder.from_profile(profile, task, target, draft, allow_mismatch=allow_mismatch)
    decoder.settings = _changed(decoder.settings, changes)
    text, last = [], None
    for piece in decoder.stream(prompt, max_new_tokens, seed=seed, stop=stop, **sampling):
        text.append(piece.text)
        last = piece
        if not as_json:
            click.echo(piece.text, nl=False)
    assert last is not None and last.stats is not None and decoder.match is not None
    facts = {"finish_reason": last.finish_reason, "match": decoder.match.level, **last.stats.summary()}
    if as_json:
        print_json({"text": "".join(text), **facts, "settings": decoder.settings.model_dump(mode="json")})
        return
    click.echo()
    click.echo(_footer(facts, decoder.settings), err=True)


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Settings with some given by hand; a draft length then holds for every batch size."""
    values = {**settings.model_dump(), **changes}
    if "draft_length" in changes:
        values["schedule"] = ()
    if changes.get("alpha") and values["rule"] == "exact":
        values["rule"] = "optimal"
    return make_settings(**values)


def _footer(facts: dict[str, Any], settings: Settings) -> str:
    rule = f"{settings.rule} at alpha {settings.alpha:g}" if settings.relaxed else "exact"
    accepted = (
        f"{facts['accepted']} of {facts['drafted']} drafted tokens accepted" if facts["drafted"] else "nothing drafted"
    )
    return (
        f"[rule {rule}; profile match: {facts['match']}; {facts['tokens']} tokens in {facts['rounds']} rounds, "
        f"{facts['tokens_per_round']:.2f} a round; {accepted}; {facts['tokens_per_s']:.1f} tokens/s; "
        f"ended by {facts['finish_reason']}]"
    )
