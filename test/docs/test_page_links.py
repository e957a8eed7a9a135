"""Pages lead somewhere: links, anchors, the index and the picture."""

from __future__ import annotations

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


def test_the_link_check_reads_links_and_anchors() -> None:
    assert 'running.md#pytorch' in links('docs/backends.md')
    assert 'https://arxiv.org/abs/2506.07339' in links('docs/inference.md')
    assert {'pytorch', 'in-a-colcon-workspace'} <= anchors('docs/running.md')
    assert 'policypy-and-typespy' in anchors('docs/architecture.md')
    assert not resolves('docs/README.md', 'nowhere.md')
    assert not resolves('docs/README.md', 'running.md#nowhere')


def test_the_index_lists_every_page() -> None:
    listed = {Path(link).name for link in links('docs/README.md')}
    assert {path.name for path in (ROOT / 'docs').glob('*.md')} - {'README.md'} <= listed


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = set(), ['README.md']
    while left:
        page = left.pop()
        reached.add(page)
        for link in links(page):
            target = ((ROOT / page).parent / link.partition('#')[0]).resolve()
            name = str(target.relative_to(ROOT)) if ROOT in target.parents else ''
            if name in PAGES and name not in reached:
                left.append(name)
    assert reached == set(PAGES)


def test_the_readme_is_short() -> None:
    assert len(text_of('README.md').splitlines()) <= 150


def test_the_picture_is_small_enough_to_load_with_the_readme() -> None:
    (picture,) = (link for link in links('README.md') if link.endswith(('.gif', '.png')))
    data = (ROOT / picture).read_bytes()
    assert data.startswith((b'GIF8', b'\x89PNG'))
    assert len(data) < 300_000
