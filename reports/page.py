"""What the page is made of: its frame, style and script, and the small pieces that its sections share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .charts import Bars, Figure
from .draw import Tip
from .inline import inline_svg
from .load import flatten
from .tables import NA

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #5b646d; --line: #c3cad1; --paper: #ffffff;
  --panel: #f4f6f8; --blue: #0072b2; --star: #b34700; --red: #d55e00; --green: #009e73; --pink: #cc79a7;
  --orange: #e69f00; --sky: #56b4e9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --faint: #a3adb7; --line: #4a545e; --paper: #15191d;
  --panel: #1e242a; --blue: #4aa3e0; --star: #ff9a4d; --red: #ff8a3d; --green: #2ecc9b; --pink: #e5a3c9;
  --orange: #f2b632; --sky: #9bd5f7; } }
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
figure svg { display: block; width: 100%; max-width: 40rem; height: auto; }
figure .wide svg { min-width: 33rem; max-width: 56rem; }
.gallery { columns: 2 29rem; column-gap: 2rem; }
.gallery figure { margin: 0 0 1.8rem; break-inside: avoid; }
figcaption { max-width: 46rem; }
.mark { cursor: default; }
.mark:hover { filter: brightness(1.25); }
.off { display: none; }
#tip { position: fixed; z-index: 9; max-width: min(20rem, 90vw); padding: .35rem .6rem; border-radius: .3rem;
  font-size: .88rem; background: var(--ink); color: var(--paper); pointer-events: none; display: none; }
.filter { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; border: 1px solid var(--line); border-radius: .4rem;
  margin: 1rem 0; padding: .4rem .8rem .6rem; }
.filter legend { color: var(--faint); font-size: .9rem; padding: 0 .3rem; }
.filter label { white-space: nowrap; }
.refused { border-left: .3rem solid var(--red); background: var(--panel); padding: .5rem 1rem; max-width: none; }
td.unlike { font-weight: 700; }
details > summary { cursor: pointer; font-weight: 600; margin: 1rem 0; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; padding-bottom: .4rem; }
caption span { display: inline-block; position: sticky; left: 0; max-width: calc(100vw - 2rem); }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; }
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
#: without it the page shows all, and browsers show the titles of the marks by themselves
SCRIPT = """
(() => {
  const tip = document.getElementById("tip");
  const hide = () => { tip.style.display = "none"; };
  const titles = new Map();
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    if (!title) continue;
    titles.set(mark, title.textContent);
    title.remove();
    mark.setAttribute("aria-label", titles.get(mark));
    const show = (event) => {
      tip.textContent = titles.get(mark);
      tip.style.display = "block";
      const box = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
      tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
    };
    mark.addEventListener("pointermove", show);
    mark.addEventListener("pointerdown", show);
    mark.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
  const boxes = [...document.querySelectorAll(".filter input")];
  const apply = () => {
    const off = new Set(boxes.filter((box) => !box.checked).map((box) => box.name + " " + box.value));
    for (const mark of titles.keys()) {
      const hidden = off.has("run " + mark.dataset.run) || off.has("kind " + mark.dataset.kind);
      mark.classList.toggle("off", hidden);
    }
  };
  for (const box of boxes) box.addEventListener("change", apply);
  for (const bar of document.querySelectorAll(".filter")) bar.hidden = false;
})();
"""


@dataclass(frozen=True)
class Drawing:
    """A figure that was drawn: the name of its files, its SVG text, and what is said of its elements."""

    name: str
    item: Figure
    svg: str
    tips: Mapping[str, Tip]
    note_pt: float


def frame(title: str, body: Iterable[str]) -> str:
    """The whole page around its body; it needs no other file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: lossytune report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f'\n<div id="tip" role="status"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def section(heading: str, content: str, mark: str = "") -> str:
    """A section with a heading; `mark` keeps the ids of several runs apart."""
    name = mark + re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(heading)}</h2>\n{content}</section>'


def gallery(drawings: Iterable[Drawing]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="gallery">{"".join(figure_block(drawing) for drawing in drawings)}</div>'


def figure_block(drawing: Drawing) -> str:
    """One figure with its note as text."""
    item = drawing.item
    count = sum(len(row.parts) for row in item.rows) if isinstance(item, Bars) else sum(len(s.marks) for s in item.series)
    alt = f"{item.title}: {item.x_label}{'' if isinstance(item, Bars) else ' against ' + item.y_label}, {count} values."
    svg = inline_svg(drawing.svg, drawing.name, alt, drawing.tips, drawing.note_pt)
    return f"<figure>{svg}<figcaption>{escape(item.note)}</figcaption></figure>"


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table of cells that are escaped already; the first `text_columns` are text, the others numbers."""

    def kind(place: int) -> str:
        return ' class="text"' if place < text_columns else ""

    head = "".join(f'<th scope="col"{kind(place)}>{escape(name)}</th>' for place, name in enumerate(heads))
    body = "".join(
        f'<tr><th scope="row" class="text">{first}</th>'
        + "".join(f"<td{kind(place)}>{cell}</td>" for place, cell in enumerate(rest, start=1))
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bullets(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in lines) + "</ul>"


def facts(data: Mapping[str, Any]) -> str:
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


def two_lines(cell: str) -> str:
    """A cell with its interval, if it has one, on a second line."""
    value, bracket, interval = cell.partition(" [")
    return escape(value) + (f"<small>{escape(bracket.strip() + interval)}</small>" if bracket else "")


def span(values: Sequence[int]) -> str:
    """1,200 to 3,400, or one number."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
