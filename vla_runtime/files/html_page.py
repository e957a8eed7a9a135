"""HTML pages that need no other file and no network."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def html_page(title: str, style: str, body: str) -> str:
    """Return a whole page.

    Args:
        title: title of the window, as text.
        style: CSS.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><style>{style}</style></head><body>\n{body}\n</body></html>\n'
    )


def inline_svg(figure: Figure, salt: str | None = None) -> str:
    """Return a figure as an SVG element, its text as text: it can be searched, and is smaller.

    Args:
        figure: drawn.
        salt: makes the ids of its parts the same in every run, so that pages can be compared.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': salt}):
        figure.savefig(text, format='svg', metadata={'Date': None})
    return text.getvalue()[text.getvalue().index('<svg') :]
