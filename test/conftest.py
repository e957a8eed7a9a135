"""Shared by all tests: plain helper modules beside this file can be imported by name."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Tiny networks gain nothing from threads, and threads that spin on a busy machine lose tenfold.
os.environ.setdefault('OMP_NUM_THREADS', '1')

sys.path.insert(0, str(Path(__file__).parent))

# The same examples every time, and no verdict that depends on how busy the machine is.
settings.register_profile('vla_runtime', derandomize=True, deadline=None, max_examples=50)
settings.load_profile('vla_runtime')

_HERE = Path(__file__).parent
_GRAPHS = 'graph'


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share the tests between two workers (`-n 2 --dist loadgroup`).

    All that starts nodes is one group, because the executables of two tests at once would starve
    each other; every other file is a group of its own, because its tests share fixtures. The long
    group comes first, so that the other worker does all the rest meanwhile.
    """
    starts_nodes = {item for item in items if _starts_nodes(item)}
    for item in items:
        group = _GRAPHS if item in starts_nodes else str(item.path.relative_to(_HERE))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item not in starts_nodes)


def _starts_nodes(item: pytest.Item) -> bool:
    return item.path.parent.name == 'ros' or item.get_closest_marker('graph') is not None
