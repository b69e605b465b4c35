"""Figures of money, energy and capacity, drawn where there is a price, a measured energy, or a demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .capacity import Capacity, Demand
from .charts import KIND_COLOURS, PREDICTED, Bars, Chart, Drawn, Line, Mark, Missing, Part, Row, Series
from .figures import Group
from .prices import Price, PriceTerms, cost_per_million, origin_text
from .speeds import joules_per_token, lossless_point, plain_point, served_speed
from .summary import summarise, three

UTILISATIONS = tuple(place / 100 for place in (5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100))


def cost_figure(group: Group, prices: Mapping[str, Price], terms: PriceTerms) -> Drawn:
    """The cost of a million tokens against the utilisation of the device: a curve, never one number."""
    title = "Cost of a million tokens"
    if not terms.given:
        return Missing(title, "no price was given: --price NAME=PER_HOUR, or --capital NAME=COST")
    series: list[Series] = []
    unmeasured = []
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        price = prices.get(run.device)
        best, plain = run.recommended, plain_point(run)
        chosen = [("recommended", best), ("lossless", lossless_point(run)), ("plain", plain)]
        for called, point in chosen:
            if price is None or point is None or (called != "recommended" and point is best):
                continue
            speed = served_speed(run, point)
            if speed is None:
                unmeasured.append(label)
                continue
            marks = tuple(_cost_mark(price, f"{label}, {called}", speed.value, share) for share in UTILISATIONS)
            name = called if len(group.runs) == 1 else f"{label}, {called}"
            colour = group.colour(place, point.kind)
            series.append(Series(name, label, point.kind, "measured", colour, marks, markers=False))
    for device in group.devices():
        price = prices.get(device)
        there = [one for one in group.predicted if one.device == device]
        fastest = max(there, key=lambda one: one.tokens_per_s)
        if price is not None:
            called = f"{device}, {fastest.kind}, batch {fastest.batch}"
            marks = tuple(_cost_mark(price, called, fastest.tokens_per_s, share) for share in UTILISATIONS)
            series.append(Series(f"{called} (predicted)", device, fastest.kind, "predicted", group.predicted_colour(device),
                                 marks, markers=False))  # fmt: skip
    if not series:
        if unmeasured:
            return Missing(title, f"no live run is stored for {', '.join(dict.fromkeys(unmeasured))}")
        return Missing(title, "no device of these runs has a price")
    currency = terms.currency
    bases = "; ".join(f"{price.device}: {price.basis}" for price in prices.values())
    note = f"Measured live, prefill included, at the batch size of the live runs. {origin_text(terms)} {bases}." + (
        f" {PREDICTED} Its decoding alone, without prefill." if any(one.source == "predicted" for one in series) else ""
    )
    return Chart("cost", title, "Utilisation: share of the paid time that serves, %", f"{currency} a million tokens",
                 tuple(series), note, y_log=True)  # fmt: skip


def _cost_mark(price: Price, called: str, tokens_per_s: float, share: float) -> Mark:
    cost = cost_per_million(price.per_hour, tokens_per_s, share)
    return Mark(100 * share, cost, f"{called}: {three(cost)} {price.currency} a million tokens at {share:.0%} utilisation")


def energy_figure(group: Group) -> Drawn:
    """Joules a token, where they were measured."""
    title = "Joules a token"
    rows, reasons, methods = [], [], []
    for run, label in zip(group.runs, group.labels, strict=True):
        points = {"plain": plain_point(run), "lossless": lossless_point(run), "recommended": run.recommended}
        found = False
        for kind, point in points.items():
            joules = joules_per_token(run, point) if point else None
            if joules:
                low, high = joules.ci95 or (None, None)
                text = f"{label}, {kind}: {three(joules.value)} J a token, measured"
                part = Part(kind, joules.value, text, KIND_COLOURS[kind], low, high)
                rows.append(Row(kind if len(group.runs) == 1 else f"{label}, {kind}", label, (part,)))
                found = True
        if found:
            recorded = run.manifest.energy or {}
            how = f"{recorded.get('method', 'method not recorded')} ({recorded.get('scope', 'scope not recorded')})"
            methods.append(f"{label}: {how}")
        else:
            reasons.append(f"{label}: {summarise(run).no_energy_reason}")
    if not rows:
        return Missing(title, "; ".join(reasons))
    note = f"Prefill included; bars are 95 % intervals. {'; '.join(methods)}."
    note += f" Without a figure: {'; '.join(reasons)}." if reasons else ""
    return Bars("energy", title, "Joules a token", tuple(rows), "dots", note)


def prediction_figure(group: Group, reason: str | None = None) -> Drawn:
    """The devices that were not measured beside the measured ones. reason: why what was asked for was not predicted."""
    title = "Devices that were not measured"
    if not group.predicted:
        return Missing(title, reason or "nothing was asked for: --predict NAME")
    rows = []
    for place, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        best = run.recommended
        for point in (plain_point(run), best):
            live = point.measured if point else None
            if point and live and point is not (None if point is best else best):
                kind = "recommended" if point is best else "plain"
                text = f"{label}, {kind}, batch {point.batch_size}: {three(live.tokens_per_s)} tokens/s, measured live"
                part = Part(kind, live.tokens_per_s, text, group.colour(place, point.kind))
                rows.append(Row(f"{label}, {kind} × {point.batch_size}", label, (part,)))
    for device in group.devices():
        batches = {point.batch for point in group.predicted if point.device == device}
        for one in group.predicted:
            if one.device == device and one.batch in (min(batches), max(batches)) and one.kind != "lossless":
                text = f"{device}, {one.kind}, batch {one.batch}: {three(one.tokens_per_s)} tokens/s, predicted"
                colour = group.predicted_colour(device)
                part = Part(one.kind, one.tokens_per_s, text, colour, one.low, one.high, "predicted")
                rows.append(Row(f"{device}, {one.kind} × {one.batch}, predicted", device, (part,)))
    return Bars(
        "predicted-devices",
        title,
        "Tokens/s a device, decoding",
        tuple(rows),
        "dots",
        f"× sequences in a batch. {PREDICTED}",
        x_log=True,
    )


def capacity_figure(group: Group, demand: Demand | None, found: Sequence[Sequence[Capacity]]) -> Drawn:
    """p95 latency against the number of devices."""
    title = "Devices for a load"
    if demand is None:
        return Missing(title, "no load was given: --rate, --input-tokens, --output-tokens and --p95")
    series = []
    for place, (label, results) in enumerate(zip(group.labels, found, strict=True)):
        for result in results:
            if result.p95_by_devices:
                marks = tuple(
                    Mark(count, value, f"{label}, {result.kind}, {count} devices: p95 {three(value)} s (simulated)")
                    for count, value in result.p95_by_devices.items()
                )
                series.append(Series(group.name(place, result.kind), label, result.kind, "derived",
                                     group.colour(place, result.kind), marks))  # fmt: skip
    if not series:
        reasons = [f"{result.kind}: {result.reason}" for results in found for result in results if result.reason]
        return Missing(title, "; ".join(dict.fromkeys(reasons)) or "no run has a cost table and trials")
    note = (
        f"Simulated from the cost table: {demand.requests_per_s:g} requests/s of {demand.input_tokens} tokens in and "
        f"{demand.output_tokens} out, arriving at random."
    )
    return Chart("capacity", title, "Devices", "95 % of the requests within, s", tuple(series), note,
                 (Line("y", demand.p95_s, f"asked for: {demand.p95_s:g} s"),), y_log=True, counted=True)  # fmt: skip
