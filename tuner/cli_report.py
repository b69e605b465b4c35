"""`lossytune report`: pages, pictures and data from one or more run folders."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder of the outputs. [default: RUN/report, or "
              "./report with several runs]")  # fmt: skip
@click.option("--price", multiple=True, metavar="NAME=PER_HOUR", help="Price of a device for an hour. No price is built in.")
@click.option("--capital", multiple=True, metavar="NAME=COST", help="Price of buying a device, with the four below.")
@click.option("--years", type=float, default=None, help="Years that a bought device is used. [default: none]")
@click.option(
    "--pue", type=float, default=None, help="Energy of the site over that of the device, such as 1.3. [default: none]"
)
@click.option("--electricity", type=float, default=None, help="Price of a kWh. [default: none]")
@click.option("--power", multiple=True, metavar="NAME=WATTS", help="Power of a device. [default: the known board limit]")
@click.option("--currency", default="USD", help="Written beside each price.")
@click.option("--price-source", default=None, help="Where the prices come from, said beside each cost. [default: none]")
@click.option("--price-date", default=None, help="Of when the prices are, said beside each cost. [default: none]")
@click.option("--predict", multiple=True, metavar="NAME", help="Estimate a device that was not measured, by a roofline.")
@click.option(
    "--accelerators", type=click.Path(path_type=Path), default=None, help="More devices, in a file. [default: none]"
)
@click.option(
    "--rate", type=float, default=None, help="Requests a second: how many devices? With the next three. [default: none]"
)
@click.option("--input-tokens", type=int, default=None, help="Tokens in a prompt. [default: none]")
@click.option("--output-tokens", type=int, default=None, help="Tokens in an answer. [default: none]")
@click.option("--p95", type=float, default=None, help="Seconds in which 95 % must be answered. [default: none]")
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the paths.")
def report(
    runs: tuple[Path, ...],
    out: Path | None,
    price: tuple[str, ...],
    capital: tuple[str, ...],
    years: float | None,
    pue: float | None,
    electricity: float | None,
    power: tuple[str, ...],
    currency: str,
    price_source: str | None,
    price_date: str | None,
    predict: tuple[str, ...],
    accelerators: Path | None,
    rate: float | None,
    input_tokens: int | None,
    output_tokens: int | None,
    p95: float | None,
    as_json: bool,
) -> None:
    """Rebuild every output of one or more runs from their stored files: page, PDF, pictures, CSV and JSON.

    Several runs are compared where their models, prompts and sampling agree; where not, the page says so.
    """
    prices = import_module("lossyspec.reports.prices")
    terms = prices.price_terms(
        per_hour=price, capital=capital, power_w=power, years=years, pue=pue, electricity=electricity,
        currency=currency, source=price_source, date=price_date,
    )  # fmt: skip
    demand = import_module("lossyspec.reports.capacity").make_demand(rate, input_tokens, output_tokens, p95)
    options = import_module("lossyspec.reports.assemble").Options(terms, predict, accelerators, demand)
    paths = import_module("lossyspec.reports.build").build_report(runs, out, options)
    if as_json:
        click.echo(next(path for path in paths if path.name == "report.json").read_text(encoding="utf-8"), nl=False)
        return
    for path in paths:
        click.echo(path)
