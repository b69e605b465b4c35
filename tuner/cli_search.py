"""`lossytune search`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lossyspec.errors import ConfigurationError, nearest
from lossyspec.settings import COMPILES, PRECISIONS, RULES, make_sampling

from .cli_common import Interrupts, given, print_json, sampling_options, show_run
from .config import SearchConfig, make_config, parse_duration_s, parse_loss, parse_names, parse_numbers
from .workloads import find_task


@click.command()
@click.option(
    "--task", default="dialogue", help="dialogue, multiturn, code, summarization, longdoc; math and legal are lossless only."
)
@click.option("--target", default="embedded", help="Hub id, folder, .gguf file, or 'embedded' (SmolLM2-135M-Instruct).")
@click.option(
    "--draft",
    default="auto",
    help="auto (a head where one ships, else ngram), ngram, self, self:int4, head, a head's folder, or a model.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    default=None,
    help="JSONL with messages or prompt, and maybe reference. [default: the task's own]",
)
@click.option(
    "--dataset", default=None, help="A data set: cnn_dailymail, a hub id, or a local file or folder. [default: none]"
)
@click.option("--max-quality-loss", default="5%", help="Most perplexity over the target's own.")
@click.option("--budget", default="5m", help="Wall-clock time to aim at: 90s, 5m, 1h. A slow machine may need more.")
@click.option("--trials", type=int, default=600, help="Most configurations to replay.")
@click.option("--batch", default="1,4", help="Batch sizes to tune for.")
@click.option("--precision", default="auto", help=f"auto, or a list of {', '.join(PRECISIONS)}.")
@click.option("--rules", default="auto", help=f"auto (optimal, mixture, priced), or a list of {', '.join(RULES)}.")
@click.option(
    "--attention",
    default="auto",
    help="auto, dense, or a list of block-sparse ones as b32-s1-w4-t16-verify: block, sink, window, top, side.",
)
@click.option("--compile", "compiled", default="off", help="off, or a list of inductor, tensorrt to search beside it.")
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, help="On a GPU, replay short passes as CUDA graphs.")
@click.option("--max-draft-length", type=int, default=8, help="Most drafted tokens a round.")
@click.option("--max-new-tokens", type=int, default=64, help="Length of the texts that are traced and decoded.")
@click.option(
    "--texts",
    type=int,
    default=None,
    help="Prompts of each half of the workload. [default: 16, fewer where reading them outlasts the budget]",
)
@sampling_options
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

    interrupts = Interrupts()
    job = Search(config, Reporter(), out=out, resume=resume, command=sys.argv, stop=interrupts)
    if dry_run:
        print_json(job.plan())
        return
    try:
        result = job.run()
    except KeyboardInterrupt:
        click.echo("what was finished is saved; go on with the same options and --resume", err=True)
        raise
    build_report = import_module("lossyspec.reports.build").build_report
    build_report(result.folder)
    if as_json:
        print_json(json.loads((result.folder / "front.json").read_text()))
        return
    show_run(result.folder)
    click.echo(f"\n{result.front.verdict}")
    click.echo(
        f"run folder  {result.folder}\nreport      {result.folder / 'report' / 'index.html'}\n"
        f"picture     {result.folder / 'report' / 'pareto.png'}\nprofile     {result.folder / 'profile.json'}"
    )
    if late := over_budget(result.manifest.timings_s["total"], config.budget_s):
        click.echo(late)


def over_budget(took_s: float, budget_s: float) -> str | None:
    """A line for a search that took longer than it was to; None for one that did not."""
    if took_s <= 1.1 * budget_s:
        return None
    return (
        f"it took {took_s / 60:.1f} minutes, the budget was {budget_s / 60:.1f}: what a search needs at least takes longer "
        f"here; fewer --texts, --max-new-tokens or precisions shorten it"
    )


def search_config(
    *,
    batch: str,
    budget: str,
    max_quality_loss: str,
    precision: str,
    rules: str,
    attention: str,
    compiled: str = "off",
    **options: Any,
) -> SearchConfig:
    """Options as typed in, into a SearchConfig. Raises ConfigurationError naming the option's value and what is allowed."""
    own = find_task(options["task"]).sampling
    sampling = given(**{name: options.pop(name) for name in type(own).model_fields})
    precisions, chosen, compilers = parse_names(precision), parse_names(rules), parse_names(compiled)
    attentions = parse_names(attention)
    if attentions == ():
        raise ConfigurationError("attention is an empty list; allowed: auto, dense, or some as b32-s1-w4-t16-verify")
    lists = (("precision", precisions, PRECISIONS), ("rule", chosen, RULES), ("compile", compilers, COMPILES))
    for name, values, allowed in lists:
        if values == ():
            raise ConfigurationError(f"{name} is an empty list; allowed: auto, or some of {', '.join(allowed)}")
        for value in values or ():
            if value not in allowed:
                raise ConfigurationError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.{nearest(value, allowed)}")
    return make_config(
        **options,
        max_quality_loss=parse_loss(max_quality_loss),
        budget_s=parse_duration_s(budget),
        batch_sizes=parse_numbers(batch, "batch"),
        precisions=precisions,
        rules=chosen,
        attentions=attentions,
        compiles=compilers or ("off",),
        sampling=make_sampling(**{**own.model_dump(), **sampling}) if sampling else None,
    )
