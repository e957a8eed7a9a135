"""HTML pages that need no other file and no network: one layout, one style sheet.

A page is a Jinja2 template that extends `base.html.j2`. Its values are plain numbers and texts,
which are escaped where they are written; `parts.html.j2` has what pages share.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vla_runtime import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --- Plots for a page, as SVG that is written into it


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


# --------------------------------------------------------------------------------------------------


def render(template: Path, **values: Any) -> str:
    """Return a whole page; jinja2.UndefinedError where the template names a value not given."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(version=__version__, **values)
