"""The package's own pages, for the link beside a hold: Markdown as HTML, without a network."""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response

from vla_runtime.files.package_files import share_folder
from vla_runtime.pages.page import render

_TEMPLATE = Path(__file__).with_name('help.html.j2')
_PICTURES = ('.svg', '.png', '.gif')
_NOT_FOUND = 404


def help_page(path: str) -> Response:
    """Return a page or picture of `docs/`, by its path in there."""
    docs = (share_folder() / 'docs').resolve()
    file = (docs / path).resolve()
    if docs not in file.parents or not file.is_file():
        return _missing(path)
    if file.suffix in _PICTURES:
        return FileResponse(file)
    if file.suffix != '.md':
        return _missing(path)
    text = file.read_text(encoding='utf-8')
    title = next((line[2:] for line in text.splitlines() if line.startswith('# ')), file.stem)
    return HTMLResponse(render(_TEMPLATE, title=title, body=_html(text)))


def _html(text: str) -> str:
    markdown = MarkdownIt('commonmark', {'html': False}).enable('table')
    tokens = markdown.parse(text)
    for head, inline in pairwise(tokens):
        if head.type == 'heading_open':
            head.attrSet('id', _anchor(inline))
    return markdown.renderer.render(tokens, markdown.options, {})


def _anchor(inline: Token) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    words = ''.join(child.content for child in inline.children or ())
    return re.sub(r'[^\w\- ]', '', words.lower()).strip().replace(' ', '-')


def _missing(path: str) -> Response:
    return PlainTextResponse(
        f'{escape(path)} is no page that came with this package\n', status_code=_NOT_FOUND
    )
