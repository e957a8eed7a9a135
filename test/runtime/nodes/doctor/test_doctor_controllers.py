"""The doctor beside ros2_control: a controller that is inactive, joints that its states swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from built_messages import ros2_control_messages
from doctor_rig import doctor, problems, start_driver
from graph import Graph, graph
from tiny_robot import write_robot

pytestmark = [pytest.mark.graph, pytest.mark.thorough]

ROBOT = """
format: 1
name: arm
joints:
  - {name: shoulder, unit: rad, lower: -3.0, upper: 3.0, velocity: 1.0}
  - {name: elbow, unit: rad, lower: -3.0, upper: 3.0, velocity: 1.0}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [shoulder, elbow]}
"""
MEASURED = {'shoulder': 0.1, 'elbow': -1.5}


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as one:
        yield one


@pytest.mark.parametrize(
    ('state', 'swapped', 'what', 'words'),
    [
        ('active', False, '', ()),
        ('inactive', False, 'joint_trajectory', ('inactive', 'switch_controllers')),
        ('active', True, 'shoulder, elbow', ('swapped', 'controller')),
    ],
)
def test_a_controller_tells(
    made: Graph, tmp_path: Path, state: str, swapped: bool, what: str, words: tuple[str, ...]
) -> None:
    variables = ros2_control_messages()
    namespace = f'/{state}_{"swapped" if swapped else "straight"}'
    names = [*reversed(MEASURED)] if swapped else [*MEASURED]
    controller = {'name': 'arm', 'state': state, 'positions': MEASURED}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        start_driver(
            made,
            namespace,
            'hardware',
            joints=[{'topic': 'joint_states', 'names': names, 'positions': [*MEASURED.values()]}],
            controllers={'manager': namespace, 'controllers': [controller]},
        )
        file = write_robot(tmp_path / 'arm.yaml', ROBOT)
        code, findings, _ = doctor('--robot', str(file), '--namespace', namespace)
    found = [one['what'] for one in findings if one['level'] == 'problem']
    assert (code, found) == ((1, [what]) if what else (0, []))
    for text in problems(findings, what):
        assert all(word in text for word in words)
