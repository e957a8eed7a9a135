"""HTML pages that need no other file and no network: one layout, one style sheet.

A page is a Jinja2 template that extends `base.html.j2`. Its values are plain numbers and texts,
which are escaped where they are written; `parts.html.j2` has what pages share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vla_runtime import __version__


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
