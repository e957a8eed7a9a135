"""Plots for a page, as SVG that is written into it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg_plot(
    draw: Callable[[Figure], None],
    width: float,
    height: float,
    *,
    font_size: float = 9.0,
    salt: str | None = None,
) -> str:
    """Draw a figure and return it as an SVG element, its text as text: it can be searched.

    Args:
        width, height: inches.
        font_size: points.
        salt: makes the ids of its parts the same in every run, so that pages can be compared.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {'font.size': font_size, 'svg.fonttype': 'none', 'svg.hashsalt': salt}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout='constrained')
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format='svg', metadata={'Date': None})
    return text.getvalue()[text.getvalue().index('<svg') :]
