"""The project's pages as Markdown: blocks of code, links, headings, tables."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / 'README.md',
        *(ROOT / 'docs').rglob('*.md'),
        ROOT / 'benchmark' / 'README.md',
        ROOT / 'engines' / 'README.md',
    )
)
_BLOCK = re.compile(r'^```(\S*)[^\n]*\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def text_of(page: str | Path) -> str:
    """A page of the project, by its path below the root."""
    return (ROOT / page).read_text(encoding='utf-8')


def blocks(page: str | Path, *languages: str) -> list[str]:
    """Fenced blocks in these languages; '' is a block without one."""
    return [block for language, block in _BLOCK.findall(text_of(page)) if language in languages]


def prose(page: str | Path) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub('', text_of(page))


def links(page: str | Path) -> list[str]:
    """Targets of links and pictures, those in code left out."""
    return re.findall(r'\]\(([^()\s]+)\)', re.sub(r'`[^`\n]*`', '``', prose(page)))


def anchors(page: str | Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and GitLab make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r'^#+ (.+)$', prose(page), re.MULTILINE):
        words = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', heading).lower()
        slug = re.sub(r'[^\w\- ]', '', words).strip().replace(' ', '-')
        found[slug] = found.get(slug, -1) + 1
    return {
        slug if not n else f'{slug}-{n}' for slug, last in found.items() for n in range(last + 1)
    }


def first_cells(page: str | Path) -> list[str]:
    """First cell of every row of every table."""
    rows = re.findall(r'^\| (.*?) \|', prose(page), re.MULTILINE)
    return [row for row in rows if not set(row) <= set('-| ')]
