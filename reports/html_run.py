"""The sections of the page that are about one run: its front, how it was measured, machine, models, search."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lossyspec.records import FrontPoint

from .assemble import RunReport
from .inline import inline_svg
from .load import Run
from .page import Drawing, bullets, facts, gallery, section, span, two_lines
from .pareto import ParetoInfo
from .plots import pareto_tips
from .tables import HEADINGS, TEXT_HEADINGS, describe_point, loss_text, number, speedup_text, table_cells

CORPORA = {
    "target_samples": "text sampled exactly from the target",
    "references": "human reference texts",
    "greedy_text": "the decoder's own greedy text (mean log-probability regret)",
}


def run_head(run: Run) -> str:
    """How the run ended, and the recommended point in large numbers."""
    return _status(run) + _numbers(run)


def run_sections(report: RunReport, pareto: tuple[str, str], drawings: Sequence[Drawing], mark: str = "") -> str:
    """All about one run but its head. pareto: name and SVG text of its front; mark: keeps ids of several runs apart."""
    run, manifest = report.run, report.run.manifest
    sampling = {name: "off" if value is None else value for name, value in manifest.sampling.model_dump().items()}
    parts = [
        section("Speed-up against loss", _pareto(report.pareto, report.label, *pareto), mark),
        section("The front", _front_table(run), mark),
        section("Inside the run", gallery(drawings), mark) if drawings else "",
        section("How it was measured", _measured(run), mark),
        section("Machine", facts(manifest.hardware), mark),
        section("Models", _models(run), mark),
        section("Workload and sampling", facts(manifest.workload) + facts(sampling), mark),
        section("The search", _search(run), mark),
        section("Versions", facts(manifest.versions), mark),
        section("Notes", bullets(manifest.notes), mark) if manifest.notes else "",
        f'<p class="faint">Command: <code>{escape(" ".join(manifest.command))}</code></p>',
    ]
    return "\n".join(part for part in parts if part)


def _status(run: Run) -> str:
    """A sentence when the run did not end as planned."""
    if run.manifest.status == "complete":
        return ""
    return f"<p><strong>This run is not complete</strong> (status: {escape(run.manifest.status)}).</p>"


def _numbers(run: Run) -> str:
    """The recommended point in large numbers."""
    best = run.recommended
    if not best:
        return ""
    live = best.measured
    items = [
        ("Speed-up", speedup_text(live.speedup if live else None)),
        ("Speed-up with prefill", speedup_text(live.end_to_end_speedup if live else None)),
        ("Perplexity loss, %", loss_text(best.quality.perplexity_ratio)),
        ("Tokens per second", number(live.tokens_per_s if live else None, 1)),
        ("Plain, tokens per second", number(live.plain_tokens_per_s if live else None, 1)),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{two_lines(text)}</dd></div>" for name, text in items)
    return f'<p>Recommended: {escape(describe_point(best))}</p><dl class="numbers">{cells}</dl>'


def _pareto(info: ParetoInfo, label: str, name: str, svg_text: str) -> str:
    """The inline front with its text alternative and caption."""
    places = [f"{point.label} {point.place[1]:.2f}x at {point.place[0]:+.2f} %" for point in info.drawn]
    said = "; ".join(places) or f"no confirmed point, {len(info.searched)} searched points by their prediction"
    alt = f"{info.title}, {info.subtitle}. {said}."
    caption = "Coloured: measured live, with 95 % intervals. Grey: searched, by their prediction."
    if info.noise_band:
        low, high = info.noise_band
        caption += f" Grey band: plain decoding against itself, {low:.2f}x to {high:.2f}x; what lies inside it is noise."
    if info.lossless_speedup:
        caption += f" Dotted: lossless alone, {info.lossless_speedup:.2f}x."
    if not info.drawn:
        caption = "No point was confirmed: all points are predictions of the search."
    svg = inline_svg(svg_text, name, alt, pareto_tips(info, label))
    return (
        f'<figure><div class="scroll wide" tabindex="0" role="region" aria-label="Figure">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _front_table(run: Run) -> str:
    """The front, one row a point."""
    if not run.points:
        return "<p>No point was confirmed by a live measurement.</p>"
    head = "".join(f'<th scope="col"{_text_class(name)}>{two_lines(name)}</th>' for name in HEADINGS)
    head = head.replace("speed-up", "speed&#8209;up").replace("tokens/round", "tokens/<wbr>round")
    rows = "".join(_row(point) for point in run.points)
    notes = [f"{describe_point(point)}: {point.note}" for point in run.points if point.note]
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the front"><table>'
        "<caption><span>Confirmed points, slowest first; * is recommended. Intervals are 95 %.</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>" + (bullets(notes) if notes else "")
    )


def _row(point: FrontPoint) -> str:
    first, *rest = zip(HEADINGS, table_cells(point), strict=True)
    cells = "".join(f"<td{_text_class(name)}>{two_lines(cell)}</td>" for name, cell in rest)
    style = ' class="best"' if point.recommended else ""
    return f'<tr{style}><th scope="row" class="text">{escape(first[1])}</th>{cells}</tr>'


def _text_class(heading: str) -> str:
    return ' class="text"' if heading in TEXT_HEADINGS else ""


def _measured(run: Run) -> str:
    """What the numbers mean, and on how much they rest."""
    lines = [
        "Loss is the exact perplexity of the decoder over that of the reference target on the same held-out text, "
        "computed from both models' probabilities, without sampling; its interval is a paired bootstrap over texts.",
        "Confirmed points carry the loss on the half of the workload that the search never saw.",
    ]
    for corpus in dict.fromkeys(point.quality.corpus for point in run.points):
        sizes = [(p.quality.tokens, p.quality.texts) for p in run.points if p.quality.corpus == corpus]
        tokens, texts = (span(values) for values in zip(*sizes, strict=True))
        lines.append(f"Text: {CORPORA[corpus]}, {tokens} tokens in {texts} texts.")
    live = [point.measured for point in run.points if point.measured]
    if live:
        lines.append(
            f"Speed-up is of decoding, over the fastest plain decoding, in interleaved blocks ({live[0].design}, "
            f"{span([one.blocks for one in live])} blocks a point, {span([one.tokens for one in live])} tokens)."
        )
    if run.front and run.front.transformers_ratio:
        lines.append(f"Plain decoding here over transformers' generate: {speedup_text(run.front.transformers_ratio)}.")
    lines.append("Searched points were never run: their speed-up is predicted by replay and a measured cost table.")
    return bullets(lines)


def _models(run: Run) -> str:
    manifest = run.manifest
    parts = [f"<h3>Target</h3>{facts(manifest.target)}", f"<h3>Draft</h3>{facts(manifest.draft)}"]
    return "".join(parts) + facts({"tokenizer_sha256": manifest.tokenizer_sha256})


def _search(run: Run) -> str:
    """What was tried, what failed and why, and what was left out."""
    manifest, counts = run.manifest, run.counts
    parts = [f"<p>{counts.complete} complete, {counts.infeasible} infeasible, {counts.failed} failed trials.</p>"]
    for state, heading in (("failed", "Why trials failed"), ("infeasible", "Why trials were infeasible")):
        if reasons := run.reasons(state):
            parts.append(f"<h3>{heading}</h3>" + bullets(f"{count} × {reason}" for reason, count in reasons))
    parts.append("<h3>Left out of the space</h3>")
    parts.append(facts(manifest.excluded) if manifest.excluded else "<p>Nothing.</p>")
    parts.append(f"<h3>Space</h3>{facts(manifest.space)}<h3>Configuration</h3>{facts(manifest.config)}")
    cost: dict[str, Any] = {f"{name}_s": value for name, value in manifest.timings_s.items()}
    cost |= {"peak_memory_bytes": manifest.peak_memory_bytes, "seed": manifest.seed}
    return "".join(parts) + f"<h3>Cost and seed</h3>{facts(cost)}"
