"""What all pictures share: colours, a style that no user file changes, and PNG and SVG files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lossyspec.records import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: neutral colours; the HTML page turns them into its own light or dark ones
INK, FAINT, LINE, PAPER = "#1f2328", "#6a737d", "#b4bcc5", "#ffffff"
PNG_DPI = 150
_styled: ContextVar[bool] = ContextVar("styled", default=False)


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg into the folder, atomically; returns their paths."""
    stream = io.BytesIO()
    with canvas_style():
        figure.savefig(stream, format="png", dpi=PNG_DPI, facecolor=PAPER)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    write_bytes(png, stream.getvalue())
    write_text(svg, figure_svg(figure))
    return [png, svg]


def figure_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same info."""
    stream = io.StringIO()
    with canvas_style():
        figure.savefig(stream, format="svg", dpi=PNG_DPI, metadata={"Date": None, "Creator": None}, facecolor=PAPER)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


@contextmanager
def canvas_style() -> Iterator[None]:
    """matplotlib's defaults whatever the user's matplotlibrc says; a missing glyph is a box, not a warning.

    Inside another one it does nothing: setting the defaults takes as long as drawing a small figure.
    """
    if _styled.get():
        yield
        return
    import matplotlib
    import matplotlib.style

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.style.use("default")
        matplotlib.rcParams.update({"svg.hashsalt": "lossytune", "font.size": 10.5, "axes.unicode_minus": False})
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        before = _styled.set(True)
        try:
            yield
        finally:
            _styled.reset(before)


def fitted(figure: Figure, y: float, words: str, **style: Any) -> None:
    """One line of plain text (no mathtext) across the figure, cut where it would leave it."""
    text = figure.text(0.02, y, words[:200], parse_math=False, **style)
    while text.get_window_extent().x1 > 0.95 * figure.bbox.width and len(text.get_text()) > 2:
        text.set_text(text.get_text()[:-2] + "…")
