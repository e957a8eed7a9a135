"""Pages of the families name what the code has: families, heads, sizes, options of `export`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pytest
from pages import prose, text_of
from paths import ROOT

from vla_runtime.bundle.schema import PACKED
from vla_runtime.families.flow_network import weight_shapes
from vla_runtime.family.listing import family_folders, family_names, find_family
from vla_tools.cli.export import add_arguments

INDEX = 'docs/reference/families.md'
FOLDERS = sorted(family_folders())


def row_of(name: str) -> list[str]:
    """Cells of a family's row in the index."""
    title = find_family(name).title.partition(' (')[0]
    (row,) = re.findall(rf'^\| {re.escape(title)} \| (.*) \|$', prose(INDEX), re.MULTILINE)
    return row.split(' | ')


def test_every_family_folder_has_its_page() -> None:
    assert (
        sorted(path.stem for path in (ROOT / 'docs' / 'reference' / 'families').glob('*.md'))
        == FOLDERS
    )


@pytest.mark.parametrize('name', family_names())
def test_the_readme_names_a_family(name: str) -> None:
    title = re.split(r' \(|,', find_family(name).title)[0]
    (listed,) = re.findall(
        r'^- \*\*Policies\*\*: (.*?)\n- ', text_of('README.md'), re.MULTILINE | re.DOTALL
    )
    assert re.search(rf'\b{re.escape(title)}\b', ' '.join(listed.split()))


@pytest.mark.parametrize('name', family_names())
def test_a_row_of_the_index_is_that_of_the_declaration(name: str) -> None:
    family = find_family(name)
    head, language, _, _, guidance, tied, size, page = row_of(name)
    assert head == f'`{family.head}`'
    assert (language != 'none') is family.has_language
    assert (guidance != 'refused') is (family.has_language and family.takes_steps)
    assert (tied == 'yes') is family.takes_steps
    (dims,) = family.presets.values()
    shapes = weight_shapes(name, dims).items()
    count = sum(math.prod(shape) * (4 if one.endswith(PACKED) else 1) for one, shape in shapes)
    assert size == f'{count / 1e9:.2f} B'
    arxiv = re.findall(r'arXiv (\S+?)[,)]', family.title)
    (linked,) = re.findall(r'\((\S+)\)', page)
    assert all(
        f'arxiv.org/abs/{paper}' in text_of(Path('docs/reference') / linked) for paper in arxiv
    )


@pytest.mark.parametrize(
    'page', [INDEX, *(f'docs/reference/families/{name}.md' for name in FOLDERS)]
)
def test_options_of_a_familys_page_are_those_of_export(page: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    spans = re.findall(r'`([^`\n]+)`', prose(page))
    # Options of other verbs stand behind the verb.
    options = ' '.join(span for span in spans if span.startswith('--'))
    named = set(re.findall(r'--[a-z-]+', options))
    assert named <= set(parser._option_string_actions)
