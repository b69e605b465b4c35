"""`lossytune distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .cli_common import Interrupts, print_json
from .config import parse_duration_s


@click.command()
@click.option("--target", default="embedded", help="Hub id, folder, .gguf file, or 'embedded' (SmolLM2-135M-Instruct).")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="Your own traffic as JSONL. [default: the target writes it]",
)
@click.option(
    "--streams",
    type=click.Path(path_type=Path),
    multiple=True,
    help="streams.safetensors of an earlier distillation: its streams are read again instead of written; may be repeated. "
    "[default: none]",
)
@click.option(
    "--openings",
    type=click.Path(path_type=Path),
    default=None,
    help="Text with how users' messages may begin, one a line: half of those that the target writes do. [default: built in]",
)
@click.option("--tokens", type=int, default=300_000, help="Tokens that the target writes.")
@click.option("--budget", default=None, help="Wall-clock time: 10m, 2h. [default: none]")
@click.option("--from", "start", type=click.Path(path_type=Path), default=None, help="A head to go on from. [default: none]")
@click.option(
    "--layers", type=int, default=None, help="Decoder layers; new ones begin as if not there. [default: 1, or --from's]"
)
@click.option("--width", type=int, default=None, help="Hidden size of the head. [default: the target's]")
@click.option("--vocab", type=int, default=8192, help="Most frequent tokens that the head can propose.")
@click.option("--depths", type=int, default=3, help="Steps that training rolls the head out on its own features.")
@click.option("--epochs", type=float, default=6.0, help="Passes over the data.")
@click.option("--rows", type=int, default=64, help="Streams that the target writes at a time.")
@click.option("--length", type=int, default=384, help="Tokens of a stream.")
@click.option("--batch-tokens", type=int, default=4096, help="Tokens of a training step.")
@click.option("--rate", type=float, default=1e-2, help="Highest learning rate, of matrices under Muon.")
@click.option("--seed", type=int, default=0, help="Seed of data, weights and order.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("distilled"), help="Folder; a run in it is resumed.")
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
def distill(*, out: Path, as_json: bool, budget: str | None, **options: Any) -> None:
    """Train a draft head from the target itself. Run it again with the same --out to go on."""
    from .distill.run import Distillation, make_distill_config
    from .progress import Reporter

    config = make_distill_config(**options, budget_s=parse_duration_s(budget) if budget else None)
    result = Distillation(config, out, Reporter(), Interrupts()).run()
    if as_json:
        print_json(result.card)
        return
    for row in result.card["overlap"]:
        shown = f"overlap {row['overlap']:.3f}, same argmax {row['top1']:.3f}"
        click.echo(f"temperature {row['temperature']}, depth {row['depth']}: {shown}")
    pay = result.card["payoff"]
    click.echo(
        f"a draft step takes {pay['draft_step_s'] * 1e3:.2f} ms, {pay['step_ratio']:.1%} of a target step "
        f"({pay['target_step_s'] * 1e3:.1f} ms)"
    )
    for row in pay["lossless"]:
        click.echo(
            f"temperature {row['temperature']}: lossless {row['predicted_speedup']:.2f}x predicted "
            f"at draft length {row['draft_length']}"
        )
    click.echo(f"head  {result.folder}\nuse it with: lossytune search --target {config.target} --draft {result.folder}")
