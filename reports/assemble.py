"""Run folders and options to one `Report`: everything that the page, the files and the pictures say, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lossyspec.errors import ConfigurationError

from .accelerators import Accelerator, find_name, known_accelerators
from .capacity import Capacity, Demand, devices_needed, services
from .charts import Gallery
from .compare import ComparedField, comparability, footnotes, groups, ranking, refusals
from .figures import Group, group_figures
from .load import Run, load_run
from .money_figures import capacity_figure, cost_figure, energy_figure, prediction_figure
from .pareto import ParetoInfo, pareto_info
from .predict import PredictedPoint, Roofline, fit_runs, predict_device
from .prices import Price, PriceTerms, price_devices
from .roofline import suspect_run
from .run_figures import acceptance_figure, importance_figure, round_figure
from .summary import Summary, run_labels, summarise


@dataclass(frozen=True)
class Options:
    """What the user asks for beyond what was measured. predict: device names; accelerators: a file of more devices."""

    prices: PriceTerms = field(default_factory=PriceTerms)
    predict: tuple[str, ...] = ()
    accelerators: Path | None = None
    demand: Demand | None = None


@dataclass(frozen=True)
class RunReport:
    """One run by itself."""

    run: Run
    label: str
    summary: Summary
    pareto: ParetoInfo
    gallery: Gallery
    suspects: tuple[str, ...]  # measurements that the device's peaks make implausible


@dataclass(frozen=True)
class GroupReport:
    """Runs that are drawn together. roofline: None unless a prediction was asked for, a text when there is none."""

    group: Group
    gallery: Gallery
    ranking: tuple[str, ...]
    footnotes: tuple[str, ...]
    capacity: tuple[tuple[Capacity, ...], ...]
    roofline: Roofline | str | None
    unpredicted: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """A report over one or more runs."""

    runs: tuple[RunReport, ...]
    groups: tuple[GroupReport, ...]
    compared: tuple[ComparedField, ...]
    refusals: tuple[str, ...]
    prices: dict[str, Price]
    options: Options


def assemble(folders: Sequence[Path], options: Options | None = None) -> Report:
    """Reads the run folders and computes all. Raises ConfigurationError for a broken file or an option that fits nothing."""
    options = options or Options()
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ConfigurationError("a run folder is given twice: " + ", ".join(str(folder) for folder in folders))
    runs = [load_run(folder) for folder in folders]
    labels = run_labels(runs)
    known = known_accelerators(options.accelerators)
    wanted = tuple(dict.fromkeys(find_name(name, known, "--predict") for name in options.predict))
    devices = [*dict.fromkeys(run.device for run in runs), *wanted]
    board = {name: device.power_w for name, device in known.items() if device.power_w is not None}
    prices = price_devices(options.prices, devices, board)
    return Report(
        runs=tuple(_run_report(run, label, known.get(run.device)) for run, label in zip(runs, labels, strict=True)),
        groups=tuple(
            _group_report(
                [runs[place] for place in group], [labels[place] for place in group], wanted, known, prices, options
            )
            for group in groups(runs)
        ),
        compared=tuple(comparability(runs)) if len(runs) > 1 else (),
        refusals=tuple(refusals(runs, labels)),
        prices=prices,
        options=options,
    )


def _run_report(run: Run, label: str, device: Accelerator | None) -> RunReport:
    gallery = Gallery()
    for figure in (acceptance_figure, round_figure, importance_figure):
        gallery.add(figure(run, label))
    return RunReport(run, label, summarise(run, label), pareto_info(run), gallery, tuple(suspect_run(run, device)))


def _group_report(
    runs: Sequence[Run],
    labels: Sequence[str],
    wanted: Sequence[str],
    known: dict[str, Accelerator],
    prices: dict[str, Price],
    options: Options,
) -> GroupReport:
    roofline = fit_runs(runs, labels, known) if wanted else None
    predicted: list[PredictedPoint] = []
    unpredicted = []
    for name in wanted:
        if isinstance(roofline, Roofline):
            points, reason = predict_device(runs[0], known[name], roofline)
            predicted += points
            if reason:
                unpredicted.append(f"{name}: {reason}")
    group = Group(tuple(runs), tuple(labels), tuple(predicted))
    demand = options.demand
    found = tuple(
        tuple(devices_needed(service, demand) for service in services(run, demand)) if demand else () for run in runs
    )
    gallery = Gallery()
    for figure in group_figures(group):
        gallery.add(figure)
    gallery.add(cost_figure(group, prices, options.prices))
    gallery.add(energy_figure(group))
    gallery.add(capacity_figure(group, demand, found))
    gallery.add(prediction_figure(group, roofline if isinstance(roofline, str) else "; ".join(unpredicted) or None))
    speeds = [(label, summarise(run).speed_tokens_per_s) for run, label in zip(runs, labels, strict=True)]
    return GroupReport(
        group,
        gallery,
        tuple(ranking(speeds)) if len(runs) > 1 else (),
        tuple(footnotes(runs)) if len(runs) > 1 else (),
        found,
        roofline,
        tuple(unpredicted),
    )
