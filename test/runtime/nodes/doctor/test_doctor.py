"""`vla_runtime doctor` on a real graph: it finds what is wrong, and nothing where all is well."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doctor_rig import Controller, doctor, problems, start_driver
from graph import Graph, graph
from sensor_msgs.msg import Joy
from tiny_robot import write_robot

from vla_runtime.cli.main import main
from vla_runtime.nodes.middleware import PROFILE_VARIABLES
from vla_runtime.processes.domains import claim_domain

pytestmark = pytest.mark.graph

JOINTS = ['shoulder', 'elbow', 'gripper']
HOME = [0.1, -1.5, 0.5]
# One image in more pieces than the shared memory of Fast DDS itself has room for.
LARGE = {'width': 640, 'height': 480}
SMALL = {'width': 64, 'height': 48}
ROBOT = """
format: 1
name: {name}
joints:
  - {{name: shoulder, unit: rad, lower: -0.5, upper: 0.5, velocity: 1.0}}
  - {{name: elbow, unit: rad, lower: -2.0, upper: -1.0, velocity: 1.0}}
  - {{name: gripper, unit: rad, lower: -1.0, upper: 1.0, velocity: 1.0}}
joint_states:
  - {{topic: joint_states}}
cameras:
{cameras}
outputs:
  - {{kind: float64_multi_array, topic: arm/commands, joints: [shoulder, elbow, gripper]}}
leader:
  topic: {leader}/joint_states
  joints: [{{joint: shoulder}}, {{joint: elbow}}]
  engage: button
  button: {{topic: {leader}/joy, number: 1}}
"""


def robot_file(folder: Path, name: str, leader: str = 'leader', **cameras: str) -> Path:
    """A robot whose cameras have these further fields."""
    lines = [
        f'  - {{name: {camera}, topic: {camera}/image{fields and f", {fields}"}}}'
        for camera, fields in cameras.items()
    ]
    return write_robot(
        folder / f'{name}.yaml', ROBOT.format(name=name, leader=leader, cameras='\n'.join(lines))
    )


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as one:
        yield one


@pytest.fixture(scope='module')
def healthy(made: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A robot in `/healthy` of which nothing is wrong."""
    states = {'topic': 'joint_states', 'names': JOINTS, 'positions': HOME}
    start_driver(
        made,
        '/healthy',
        'well',
        images=[{'topic': 'top/image', 'rate_hz': 30.0, **SMALL}],
        joints=[states, {**states, 'topic': 'leader/joint_states'}],
    )
    joystick = made.node.create_publisher(Joy, '/healthy/leader/joy', 10)
    made.node.create_timer(0.05, lambda: joystick.publish(Joy(buttons=[0, 0])))
    Controller(made, '/healthy', JOINTS)
    return robot_file(tmp_path_factory.mktemp('healthy'), 'healthy', top='rate_hz: 30')


@pytest.fixture(scope='module')
def sick(made: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings about a robot in `/sick` with a fault in each of its parts."""
    swapped = [JOINTS[1], JOINTS[0], JOINTS[2]]
    start_driver(
        made,
        '/sick',
        'sick',
        images=[
            {'topic': 'unreliable/image', 'rate_hz': 30.0, **SMALL},
            {'topic': 'slow/image', 'rate_hz': 15.0, **SMALL},
        ],
        joints=[{'topic': 'joint_states', 'names': swapped, 'positions': HOME, 'offset_s': -2.0}],
    )
    with pytest.MonkeyPatch.context() as patch:
        for variable in PROFILE_VARIABLES:
            patch.delenv(variable)
        images = [{'topic': 'bare/image', 'rate_hz': 30.0, **LARGE}]
        start_driver(made, '/sick', 'bare', images=images)
    Controller(made, '/sick', swapped)
    file = robot_file(
        tmp_path_factory.mktemp('sick'),
        'sick',
        leader='leeder',
        unreliable='reliability: reliable',
        slow='rate_hz: 30',
        bare='',
        gone='',
    )
    code, findings, _ = doctor('--robot', str(file), '--namespace', '/sick')
    assert code == 1
    return findings


def test_a_robot_that_is_well_has_no_problem_and_every_topic_its_rate(healthy: Path) -> None:
    # A busy machine starves a driver now and then, and a gap of 0.2 s is a problem.
    for _ in range(3):
        code, findings, _ = doctor('--robot', str(healthy), '--namespace', 'healthy')
        if code == 0:
            break
    assert [one for one in findings if one['level'] == 'problem'] == []
    assert code == 0
    told = {one['what']: one['text'] for one in findings if one['area'] == 'topics'}
    assert told.keys() == {'camera top', 'joint states', 'leader', 'leader button'}
    assert 'sensor_msgs/msg/Image' in told['camera top'] and '64x48' in told['camera top']
    assert 'a second' in told['joint states'] and 'reliable' in told['joint states']


def test_qualities_of_service_that_do_not_match_are_found(sick) -> None:
    (text,) = problems(sick, 'camera unreliable')
    assert 'reliability best_effort' in text and 'reliability reliable' in text


def test_a_camera_at_half_its_rate_is_found(sick) -> None:
    (text,) = [one for one in problems(sick, 'camera slow') if 'frames a second' in one]
    found = re.search(r'([\d.]+) frames a second', text)
    assert found and 5.0 < float(found[1]) < 17.0 and '30' in text and 'rate_hz' in text


def test_a_camera_without_a_publisher_is_found(sick) -> None:
    (text,) = problems(sick, 'camera gone')
    assert '/sick/gone/image' in text and '/sick/' in text.partition('published near')[2]


def test_a_leader_and_its_button_without_a_publisher_are_notes(sick) -> None:
    told = {one['what']: one for one in sick if one['what'].startswith('leader')}
    assert {one['level'] for one in told.values()} == {'note'}
    assert '/sick/leeder/joint_states: no node publishes it' in told['leader']['text']
    assert '/sick/leeder/joy: no node publishes it' in told['leader button']['text']
    assert 'leader.button' in told['leader button']['mend']


def test_a_driver_without_the_profile_for_large_images_is_found(sick) -> None:
    assert any('/bare' in text and '512 KiB' in text for text in problems(sick, 'camera bare'))
    assert not any('512 KiB' in text for text in problems(sick, 'camera slow'))


def test_a_clock_that_is_2_s_off_is_found(sick) -> None:
    (text,) = [one for one in problems(sick, 'joint states') if 'ago' in one]
    assert '2.0' in text and 'chrony' in text


def test_swapped_joints_are_found_in_the_states_and_in_the_commands(sick) -> None:
    (states,) = problems(sick, 'shoulder, elbow')
    assert 'swapped' in states
    (commands,) = problems(sick, 'float64_multi_array')
    assert 'elbow, shoulder, gripper' in commands and 'order' in commands


def test_the_domain_that_the_robot_is_in_is_found(healthy: Path) -> None:
    other = str(claim_domain())
    code, findings, _ = doctor(
        '--robot', str(healthy), '--namespace', 'healthy', environment={'ROS_DOMAIN_ID': other}
    )
    (text,) = problems(findings, 'domain')
    assert code == 1 and f'export ROS_DOMAIN_ID={os.environ["ROS_DOMAIN_ID"]}' in text


def test_the_namespace_that_the_robot_is_in_is_found(healthy: Path) -> None:
    code, findings, _ = doctor('--robot', str(healthy), '--namespace', '/elsewhere')
    (text,) = problems(findings, 'namespace')
    assert code == 1 and ('/healthy' in text or '/sick' in text)


def test_a_full_shared_memory_is_found(healthy: Path) -> None:
    before = 'mount -t tmpfs -o size=256k tmpfs /dev/shm'
    try:
        subprocess.run(
            ['unshare', '--mount', 'sh', '-c', before], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, 'stderr', '') or error
        pytest.skip(f'a small /dev/shm needs a mount namespace, as root: {said}')
    code, findings, _ = doctor(
        '--robot', str(healthy), '--namespace', 'healthy', '--seconds', '0.5', before=before
    )
    (text,) = problems(findings, 'shared memory')
    assert code == 1 and '--shm-size' in text and 'UDP' in text


def test_a_profile_that_is_no_file_is_found(healthy: Path, tmp_path: Path) -> None:
    given = dict.fromkeys(PROFILE_VARIABLES, str(tmp_path / 'gone.xml'))
    code, findings, _ = doctor('--seconds', '0.5', environment=given)
    assert code == 1 and len(problems(findings, 'profile')) == len(PROFILE_VARIABLES)


def test_a_policy_server_that_does_not_answer_is_found_and_the_rest_looked_at(
    healthy: Path,
) -> None:
    code, findings, _ = doctor(
        *('--robot', str(healthy), '--namespace', 'healthy', '--bundle', 'ws://127.0.0.1:9')
    )
    (text,) = problems(findings, 'server')
    assert code == 1 and '127.0.0.1:9' in text
    assert 'camera top' in {one['what'] for one in findings if one['level'] == 'ok'}


def test_a_middleware_that_is_not_installed_is_found() -> None:
    code, findings, _ = doctor(environment={'RMW_IMPLEMENTATION': 'rmw_nobodys_cpp'})
    (text,) = problems(findings, 'ROS 2')
    assert code == 1 and 'ros-$ROS_DISTRO-rmw-nobodys-cpp' in text


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--robot', 'so102'], 'so102'),
        (['--robot', '/no/file.yaml'], '/no/file.yaml'),
        (['--bundle', 'nowhere'], 'nowhere'),
        (['--namespace', 'left arm'], 'left arm'),
        (['--seconds', '0'], '--seconds'),
    ],
)
def test_what_cannot_be_used_gives_2_and_is_named(words: list[str], said: str, capsys) -> None:
    assert main(['doctor', *words]) == 2
    assert said in capsys.readouterr().err
