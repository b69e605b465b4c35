"""A picture inside the page: one `<svg>` in the page's colours, with what is said on hover and what can be filtered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from .canvas import FAINT, INK, LINE, PAPER
from .draw import Tip

#: colours of the pictures that follow the page's light or dark theme
THEMED = {
    INK: "--ink", FAINT: "--faint", LINE: "--line", PAPER: "--paper", "#0072b2": "--blue", "#d55e00": "--red",
    "#009e73": "--green", "#cc79a7": "--pink", "#e69f00": "--orange", "#56b4e9": "--sky",
}  # fmt: skip


def inline_svg(svg_text: str, name: str, alt: str, tips: Mapping[str, Tip] | None = None, cut_pt: float = 0.0) -> str:
    """The `<svg>` element alone, named for screen readers. Ids begin with `name`, so that many fit into one page.

    tips: by element id; cut_pt: points that are cut off below (the note, which the page writes as text).
    """
    svg = svg_text[svg_text.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    if cut_pt:
        head = re.sub(r'(viewBox="\S+ \S+ \S+ )([\d.]+)"', lambda found: f'{found[1]}{float(found[2]) - cut_pt:.2f}"', head)
    for colour, variable in THEMED.items():
        rest = rest.replace(colour, f"var({variable})")
    rest = re.sub(r'(\bid="|href="#|url\(#)', lambda found: f"{found[1]}{name}-", rest)
    for element, tip in (tips or {}).items():
        about = f'data-run="{escape(tip.run)}" data-kind="{escape(tip.kind)}"'
        rest = rest.replace(
            f'<g id="{name}-{element}">',
            f'<g id="{name}-{element}" class="mark" {about}><title>{escape(tip.text)}</title>',
        )
    return f'{head} role="img" aria-label="{escape(alt)}">{rest.strip()}'
