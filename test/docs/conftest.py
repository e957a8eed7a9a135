"""The family of docs/howto/adding_a_family.md, put into a folder as the page says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from pages import blocks

from vla_runtime import families
from vla_runtime.families.flow_network import FlowNetwork, build_network
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import find_family

PAGE = 'docs/howto/adding_a_family.md'
FOLDER = 'vla_runtime/families/'


@pytest.fixture(scope='module')
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The page's family, found by listing a folder beside the package's own."""
    folder = tmp_path_factory.mktemp('families')
    for block in blocks(PAGE, 'python'):
        named = re.match(rf'# {FOLDER}(\S+)\n', block)
        if named is None:
            continue
        file = folder / named[1]
        file.parent.mkdir(exist_ok=True)
        file.write_text(block, encoding='utf-8')
    families.__path__.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield find_family('toy')
    finally:
        families.__path__.remove(str(folder))
        for name in [name for name in sys.modules if name.startswith('vla_runtime.families.toy')]:
            del sys.modules[name]


@pytest.fixture
def network(toy: Family) -> FlowNetwork:
    torch.manual_seed(0)
    return build_network('toy', toy.presets['toy']).eval()
