"""`lossytune quality`: a profile against plain decoding on a task's own metric."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Column, Table

from lossyspec.checks import check_seed
from lossyspec.errors import ConfigurationError
from lossyspec.settings import make_sampling

from .cli_common import given, print_json, sampling_options
from .progress import Reporter
from .quality.items import METRICS, choose_metric, read_items

if TYPE_CHECKING:
    from .quality.compare import Comparison


@click.command()
@click.option("--profile", default=None, required=True, metavar="FILE", help="The profile to judge. [default: none]")
@click.option(
    "--prompts", type=click.Path(path_type=Path), default=None, required=True, metavar="FILE",
    help="JSONL: messages or prompt, with reference (a text or a list), or with test and entry_point. "
    "[default: none]",
)  # fmt: skip
@click.option("--metric", default="auto", metavar="NAME", help=f"auto, {', '.join(METRICS)}.")
@click.option("--run-code", is_flag=True, help="Allow pass1 to run the code that the model writes, with limits.")
@click.option("--code-timeout", type=float, default=10.0, metavar="SECONDS", help="Wall clock of one program.")
@click.option("--code-memory", type=int, default=1024, metavar="MIB", help="Address space of one program.")
@click.option("--limit", type=int, default=None, metavar="N", help="Only the first N prompts. [default: all]")
@click.option("--samples", type=int, default=1, metavar="N", help="Answers to each prompt on each side.")
@click.option("--max-new-tokens", type=int, default=256)
@click.option("--seed", type=int, default=0, help="Both sides decode from the same seeds.")
@click.option("--allow-mismatch", is_flag=True, help="Load a profile that was tuned for something else.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@sampling_options
def quality(
    profile: str,
    prompts: Path,
    metric: str,
    run_code: bool,
    code_timeout: float,
    code_memory: int,
    limit: int | None,
    samples: int,
    max_new_tokens: int,
    seed: int,
    allow_mismatch: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Decode prompts plainly and with a profile, and compare them on the task's metric, with intervals."""
    for name, value in (
        ("limit", limit), ("samples", samples), ("max-new-tokens", max_new_tokens), ("code-timeout", code_timeout),
        ("code-memory", code_memory),
    ):  # fmt: skip
        if value is not None and value <= 0:
            raise ConfigurationError(f"--{name} is {value}; it must be over 0")
    check_seed(seed)
    sampling = given(**sampling)
    make_sampling(**sampling)  # wrong values are refused before a model is loaded
    items = read_items(prompts, limit)
    chosen = choose_metric(items, metric, run_code)

    from lossyspec.decoder import Decoder

    from .quality.evaluate import Limits, evaluate

    decoder = Decoder.from_profile(Path(profile), allow_mismatch=allow_mismatch)
    with Reporter().steps(f"decoding {len(items)} prompts on both sides", len(items)) as step:
        result = evaluate(
            decoder, items, chosen, max_new_tokens=max_new_tokens, seed=seed, samples=samples,
            limits=Limits(code_timeout, code_memory << 20), progress=step.advance, **sampling,
        )  # fmt: skip
    if as_json:
        facts = {"profile": profile, "metric": chosen, "prompts": len(items), "samples": samples, "seed": seed}
        answers = [
            {"id": item.id, "plain": plain, "profile": new} for item, (plain, new) in zip(items, result.answers, strict=True)
        ]
        print_json({**facts, "comparisons": [asdict(part) for part in result.comparisons], "answers": answers})
        return
    console = Console()
    console.print(_table(result.comparisons))
    unseen = [part.measure for part in result.comparisons if part.detectable is None]
    if unseen:
        console.print(
            f"nothing can be said about what would be detected in {', '.join(unseen)}: no pair differs, or under 3"
        )


def _table(comparisons: tuple[Comparison, ...]) -> Table:
    columns = ("measure", "prompts", "plain", "profile", "change", "95 %", "detectable")
    # no frame: on 80 columns it would take the ends of names and numbers
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, padding=(0, 1, 0, 0))
    for part in comparisons:
        interval = f"{part.ci95[0]:+.3f} to {part.ci95[1]:+.3f}" if part.ci95 else "-"
        change = f"{part.change:+.3f}"
        if part.ratio:
            interval, change = interval.replace("+", ""), f"{part.change:.3f} times"
        detectable = f"±{part.detectable:.3f}" if part.detectable is not None else "-"
        table.add_row(
            part.measure, str(part.prompts), f"{part.plain:.3f}", f"{part.profile:.3f}", change, interval, detectable
        )
    return table
