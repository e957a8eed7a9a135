"""The family of docs/howto/adding_a_family.md, put into a folder as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from families_beside import FOLDERS, beside
from pages import blocks

from vla_runtime.families.flow_network import FlowNetwork, build_network
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import find_family

PAGE = 'docs/howto/adding_a_family.md'


@pytest.fixture(scope='module')
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The page's family, found by listing a folder beside the package's own."""
    root = tmp_path_factory.mktemp('packages')
    for block in blocks(PAGE, 'python'):
        named = re.match(rf'# ({"|".join(FOLDERS)})(\S+)\n', block)
        if named is None:
            continue
        file = root / named[1] / named[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block, encoding='utf-8')
    with beside(root, 'toy'):
        yield find_family('toy')


@pytest.fixture
def network(toy: Family) -> FlowNetwork:
    torch.manual_seed(0)
    return build_network('toy', toy.presets['toy']).eval()
