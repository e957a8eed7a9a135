"""Nodes that configure and activate themselves, and end where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from graph import Graph, graph

from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.parameter_table import COULD_NOT_START

pytestmark = pytest.mark.graph

NODES = ('policy', 'executor')


@pytest.fixture
def made() -> Iterator[Graph]:
    with graph() as running:
        yield running


def arguments(bundle: Path, *, autostart: bool = True) -> tuple[str, ...]:
    given = {'bundle': bundle, 'robot': 'tabletop', 'autostart': str(autostart).lower()}
    return ('--ros-args', *(word for k, v in given.items() for word in ('-p', f'{k}:={v}')))


@pytest.mark.parametrize('node', NODES)
def test_a_node_that_cannot_be_configured_says_why_as_an_error_and_ends(
    made: Graph, tmp_path: Path, node: str
) -> None:
    process = made.start(MODULES[f'{node}_node'], *arguments(tmp_path / 'no_bundle'))
    made.wait_for(lambda: not process.running, 'the node to end')
    assert process.stop() == COULD_NOT_START
    lines = process.text().splitlines()
    (why,) = (line for line in lines if 'configure failed: ' in line)
    assert '[ERROR]' in why and str(tmp_path / 'no_bundle') in why
    assert any('could not configure, so this node ends (autostart)' in line for line in lines)


def test_without_autostart_a_node_waits_and_outlives_a_failed_configure(
    made: Graph, tmp_path: Path
) -> None:
    missing = arguments(tmp_path / 'no_bundle', autostart=False)
    process = made.start(MODULES['executor_node'], *missing)
    assert not made.transition('/vla_executor', 'configure')
    assert made.state('/vla_executor') == 'unconfigured'
    assert process.running
