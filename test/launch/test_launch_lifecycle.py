"""Without autostart the nodes wait, and whoever launches them takes them through their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)

import launch_pytest
from graph import Graph, graph
from launch import LaunchDescription
from launch_pytest.actions import ReadyToTest
from launch_robot import write_files
from launch_tools import included
from lifecycle_msgs.msg import TransitionEvent

pytestmark = pytest.mark.graph

NODES = ('/vla_policy', '/vla_executor')
# Each transition with the state before and behind it; those in between have their own events.
WALK = (
    ('configure', 'inactive'),
    ('activate', 'active'),
    ('deactivate', 'inactive'),
    ('cleanup', 'unconfigured'),
    ('configure', 'inactive'),
    ('activate', 'active'),
)


@launch_pytest.fixture(scope='module')
def waiting(tmp_path_factory: pytest.TempPathFactory) -> LaunchDescription:
    files = write_files(tmp_path_factory.mktemp('launch'))
    runtime = included('vla.launch.py', **files.arguments(autostart='false'))
    return LaunchDescription([runtime, ReadyToTest()])


@pytest.fixture(scope='module')
def peer(waiting: Any) -> Iterator[Graph]:
    with graph() as made:
        yield made


@pytest.mark.launch(fixture=waiting)
@pytest.mark.parametrize('node', NODES)
def test_a_node_waits_unconfigured_and_goes_through_its_states_in_order(
    peer: Graph, node: str
) -> None:
    assert peer.state(node) == 'unconfigured'
    events = peer.collect(TransitionEvent, f'{node}/transition_event')
    peer.wait_for(lambda: peer.node.count_publishers(f'{node}/transition_event'), 'its events')
    before, passed = 'unconfigured', []
    for transition, after in WALK:
        assert peer.transition(node, transition)
        assert peer.state(node) == after
        passed += [(before, after)]
        before = after
    peer.wait_for(lambda: steps(events)[-len(WALK) :] == passed, 'an event for each transition')


def steps(events: list[TransitionEvent]) -> list[tuple[str, str]]:
    """Primary states from which and to which a node went."""
    primary = ('unconfigured', 'inactive', 'active')
    reached = [e.goal_state.label for e in list(events) if e.goal_state.label in primary]
    return list(zip(['unconfigured', *reached], reached, strict=False))
