"""Sphinx configuration of the pages: ./run docs

Two pages are made here and not written: the command line's from argparse, and those that live
beside what they describe (engines/README.md, benchmark/README.md, CHANGELOG.rst is not one).
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]

from site_pages import source_of  # noqa: E402

from vla_runtime import __version__  # noqa: E402

project = 'vla_runtime'
author = 'The vla_runtime authors'
copyright = f'2026, {author}'
release = version = __version__

extensions = ['myst_parser']
root_doc = 'index'
exclude_patterns = ['_build']
# Dashes of options stay as they are.
smartquotes = False
# A block without a language is a command line: no word of it is a keyword.
highlight_language = 'none'
nitpicky = True
# Anchors of headings are GitHub's, so that a link works on the site and in the repository.
myst_heading_anchors = 4
myst_enable_extensions = ['deflist']

html_theme = 'sphinx_rtd_theme'
html_theme_options = {'navigation_depth': 3, 'collapse_navigation': False}
html_static_path = ['_static']
html_css_files = ['pages.css']
html_js_files = ['tables.js']
html_show_sphinx = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Put what is made in place of what is read."""

    def read(app: Sphinx, name: str, content: list[str]) -> None:
        content[0] = source_of(name, content[0])

    app.connect('source-read', read)
