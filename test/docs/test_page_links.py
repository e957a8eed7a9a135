"""Pages lead somewhere: links, anchors, the index and the picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, anchors, links, text_of
from paths import ROOT


def resolves(page: str, link: str) -> bool:
    name, _, anchor = link.partition('#')
    target = (ROOT / page).parent / name if name else ROOT / page
    inside = ROOT in (target.resolve(), *target.resolve().parents)
    return inside and target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize('page', PAGES)
def test_relative_links_and_anchors_resolve(page: str) -> None:
    assert [link for link in links(page) if '://' not in link and not resolves(page, link)] == []


def listed_pages(page: str) -> list[str]:
    """Pages in a page's tables of contents, by their path in the repository."""
    toctrees = re.findall(r'^```\{toctree\}\n(.*?)^```$', text_of(page), re.MULTILINE | re.DOTALL)
    names = [line for tree in toctrees for line in tree.splitlines() if re.match(r'\w', line)]
    return [str(Path(page).parent / f'{name}.md') for name in names]


def test_the_site_lists_every_page_once() -> None:
    listed, left = [], ['docs/index.md']
    while left:
        page = left.pop()
        listed.append(page)
        left += listed_pages(page)
    assert sorted(listed) == [page for page in PAGES if page.startswith('docs/')]
