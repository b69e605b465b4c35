"""One self-contained index.html for a run: no script, no external resource, light and dark, readable on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lossyspec.records import FrontPoint

from .load import Run, flatten, machine_name, model_name
from .pareto import pareto_info
from .plots import COLOURS, FAINT, INK, LINE, PAPER
from .tables import HEADINGS, NA, TEXT_HEADINGS, describe_point, loss_text, number, speedup_text, table_cells

CORPORA = {
    "target_samples": "text sampled exactly from the target",
    "references": "human reference texts",
    "greedy_text": "the decoder's own greedy text (mean log-probability regret)",
}
#: colours of the figure that follow the page's light or dark theme
THEMED = {INK: "--ink", FAINT: "--faint", LINE: "--line", PAPER: "--paper", COLOURS["lossy"]: "--blue"}
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #5b646d; --line: #c3cad1; --paper: #ffffff;
  --panel: #f4f6f8; --blue: #0072b2; --star: #b34700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --faint: #a3adb7; --line: #4a545e; --paper: #15191d;
  --panel: #1e242a; --blue: #56b4e9; --star: #ff9a4d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main, header, footer { max-width: 70rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1.6rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
.faint, figcaption, caption { color: var(--faint); font-size: .9rem; }
.verdict { border-left: .3rem solid var(--star); background: var(--panel); padding: .8rem 1rem; font-size: 1.15rem;
  margin: 1.2rem 0; max-width: none; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.numbers div { background: var(--panel); padding: .7rem .9rem; border-radius: .4rem; }
.numbers dt { color: var(--faint); font-size: .85rem; }
.numbers dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.numbers dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--faint); }
.whole { white-space: nowrap; }
figure { margin: 1rem 0; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--blue); }
figure svg { display: block; width: 100%; min-width: 33rem; max-width: 56rem; height: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; padding-bottom: .4rem; }
caption span { display: inline-block; position: sticky; left: 0; max-width: calc(100vw - 2rem); }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
tbody th { position: sticky; left: 0; background: var(--paper); font-weight: 400; }
tr.best > * { font-weight: 700; }
tr.best > th { color: var(--star); }
td small, th small { color: var(--faint); font-weight: 400; display: block; }
dl.facts { display: grid; grid-template-columns: minmax(8rem, 15rem) 1fr; gap: .15rem 1rem; margin: .4rem 0; }
dl.facts dt { color: var(--faint); overflow-wrap: anywhere; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .88em; overflow-wrap: anywhere; }
footer { margin: 2.5rem auto 2rem; }
@media (max-width: 30rem) { dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: .45rem; } }
@media print { .scroll { overflow: visible; } }
"""


def render_index(run: Run, svg_text: str) -> str:
    """The page of a run around its figure; `svg_text` is the text of pareto.svg, all else is escaped."""
    manifest = run.manifest
    title = f"{manifest.task} on {machine_name(manifest.hardware)}"
    sampling = {name: "off" if value is None else value for name, value in manifest.sampling.model_dump().items()}
    head = '<header><h1>{}</h1><p class="faint">{} · <span class="whole">{}</span></p></header>'
    pair = f"{model_name(manifest.target)} with {model_name(manifest.draft)}"
    body = [
        head.format(escape(title), escape(pair), escape(manifest.created)),
        f'<main><p class="verdict">{escape(run.verdict)}</p>',
        _status(run),
        _numbers(run),
        _section("Speed-up against loss", _figure(run, svg_text)),
        _section("The front", _front_table(run)),
        _section("How it was measured", _measured(run)),
        _section("Machine", _facts(manifest.hardware)),
        _section("Models", _models(run)),
        _section("Workload and sampling", _facts(manifest.workload) + _facts(sampling)),
        _section("The search", _search(run)),
        _section("Versions", _facts(manifest.versions)),
        _section("Notes", _list(manifest.notes)) if manifest.notes else "",
        "</main>",
        _footer(run),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: lossytune report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _section(heading: str, content: str) -> str:
    name = re.sub(r"[^a-z]+", "-", heading.lower())
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(heading)}</h2>\n{content}</section>'


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
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{_two_lines(text)}</dd></div>" for name, text in items)
    return f'<p>Recommended: {escape(describe_point(best))}</p><dl class="numbers">{cells}</dl>'


def _two_lines(cell: str) -> str:
    """A cell with its interval, if it has one, on a second line."""
    value, bracket, interval = cell.partition(" [")
    return escape(value) + (f"<small>{escape(bracket.strip() + interval)}</small>" if bracket else "")


def _figure(run: Run, svg_text: str) -> str:
    """The inline figure with its text alternative and caption."""
    info = pareto_info(run)
    places = [f"{point.label} {point.place[1]:.2f}x at {point.place[0]:+.2f} %" for point in info.drawn]
    said = "; ".join(places) or f"no confirmed point, {len(info.searched)} searched points by their prediction"
    alt = f"{info.title}, {info.subtitle}. {said}."
    caption = "Coloured: measured live, with 95 % intervals. Grey: searched, by their prediction."
    if not info.drawn:
        caption = "No point was confirmed: all points are predictions of the search."
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="Figure">{_inline(svg_text, alt)}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _inline(svg_text: str, alt: str) -> str:
    """The `<svg>` element alone, named for screen readers, with the theme's colours."""
    svg = svg_text[svg_text.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    for colour, variable in THEMED.items():
        rest = rest.replace(colour, f"var({variable})")
    return f'{head} role="img" aria-label="{escape(alt)}">{rest.strip()}'


def _front_table(run: Run) -> str:
    """The front, one row a point."""
    if not run.points:
        return "<p>No point was confirmed by a live measurement.</p>"
    head = "".join(f'<th scope="col"{_text_class(name)}>{_two_lines(name)}</th>' for name in HEADINGS)
    head = head.replace("speed-up", "speed&#8209;up").replace("tokens/round", "tokens/<wbr>round")
    rows = "".join(_row(point) for point in run.points)
    notes = [f"{describe_point(point)}: {point.note}" for point in run.points if point.note]
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the front"><table>'
        "<caption><span>Confirmed points, slowest first; * is recommended. Intervals are 95 %.</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>" + (_list(notes) if notes else "")
    )


def _row(point: FrontPoint) -> str:
    first, *rest = zip(HEADINGS, table_cells(point), strict=True)
    cells = "".join(f"<td{_text_class(name)}>{_two_lines(cell)}</td>" for name, cell in rest)
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
        tokens, texts = (_span(values) for values in zip(*sizes, strict=True))
        lines.append(f"Text: {CORPORA[corpus]}, {tokens} tokens in {texts} texts.")
    live = [point.measured for point in run.points if point.measured]
    if live:
        lines.append(
            f"Speed-up is of decoding, over the fastest plain decoding, in interleaved blocks ({live[0].design}, "
            f"{_span([one.blocks for one in live])} blocks a point, {_span([one.tokens for one in live])} tokens)."
        )
    if run.front and run.front.transformers_ratio:
        lines.append(f"Plain decoding here over transformers' generate: {speedup_text(run.front.transformers_ratio)}.")
    lines.append("Searched points were never run: their speed-up is predicted by replay and a measured cost table.")
    return _list(lines)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _models(run: Run) -> str:
    manifest = run.manifest
    parts = [f"<h3>Target</h3>{_facts(manifest.target)}", f"<h3>Draft</h3>{_facts(manifest.draft)}"]
    return "".join(parts) + _facts({"tokenizer_sha256": manifest.tokenizer_sha256})


def _search(run: Run) -> str:
    """What was tried, what failed and why, and what was left out."""
    manifest, counts = run.manifest, run.counts
    parts = [f"<p>{counts.complete} complete, {counts.infeasible} infeasible, {counts.failed} failed trials.</p>"]
    for state, heading in (("failed", "Why trials failed"), ("infeasible", "Why trials were infeasible")):
        if reasons := run.reasons(state):
            parts.append(f"<h3>{heading}</h3>" + _list(f"{count} × {reason}" for reason, count in reasons))
    parts.append("<h3>Left out of the space</h3>")
    parts.append(_facts(manifest.excluded) if manifest.excluded else "<p>Nothing.</p>")
    parts.append(f"<h3>Space</h3>{_facts(manifest.space)}<h3>Configuration</h3>{_facts(manifest.config)}")
    cost: dict[str, Any] = {f"{name}_s": value for name, value in manifest.timings_s.items()}
    cost |= {"peak_memory_bytes": manifest.peak_memory_bytes, "seed": manifest.seed}
    return "".join(parts) + f"<h3>Cost and seed</h3>{_facts(cost)}"


def _footer(run: Run) -> str:
    command = " ".join(run.manifest.command)
    return f'<footer class="faint">Command: <code>{escape(command)}</code>. All numbers: report.json.</footer>'


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _facts(data: Mapping[str, Any]) -> str:
    """Nested data as a list of names and values."""
    if not data:
        return "<p>Nothing recorded.</p>"
    items = ("".join((f"<dt>{escape(_name(path))}</dt>", f"<dd>{_value(path[-1], value)}</dd>"))
             for path, value in flatten(dict(data)))  # fmt: skip
    return f'<dl class="facts">{"".join(items)}</dl>'


def _name(path: Sequence[str]) -> str:
    return " / ".join(part.removesuffix("_bytes").removesuffix("_s").replace("_", " ") for part in path)


def _value(key: str, value: Any) -> str:
    """A value for people: n/a for None, bytes and seconds with their unit, hashes as code."""
    if value is None or value == {} or value == []:
        return NA if value is None else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.1f} MiB"
    if isinstance(value, int | float) and key.endswith("_s"):
        return f"{value:,.4g} s"
    if isinstance(value, list | tuple):
        simple = all(isinstance(item, str | int | float) for item in value)
        return escape(", ".join(map(str, value)) if simple else json.dumps(value, ensure_ascii=False))
    text = escape(str(value))
    return f"<code>{text}</code>" if "sha256" in key or key in ("revision", "path") else text
