"""`vla_runtime robot` beside a robot that a hand moves, as a person types it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_rig import Controller, start_driver
from graph import SENSOR, Graph, graph
from paths import ROOT
from sensor_msgs.msg import JointState

from vla_runtime.cli.main import main
from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.robot.draft import MARK
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.limits import urdf_limits

pytestmark = pytest.mark.graph

NAMESPACE = '/led'
JOINTS = ['shoulder', 'elbow', 'gripper']
URDF = """<robot name="arm"><link name="a"/><link name="b"/><link name="c"/>
  <joint name="shoulder" type="revolute"><parent link="a"/><child link="b"/>
    <limit lower="-1.5" upper="1.5" velocity="0.3" effort="1"/></joint>
  <joint name="elbow" type="revolute"><parent link="b"/><child link="c"/>
    <limit lower="-2.5" upper="0.0" velocity="0.3" effort="1"/></joint></robot>"""


class Led:
    """Joints that a hand moves: positions under the names of the driver's messages."""

    def __init__(self, made: Graph) -> None:
        # Inside what a hand will show: a message more or less before it changes no range.
        self.positions = {'shoulder': -0.2, 'elbow': -0.2, 'gripper': 0.3}
        self._publisher = made.node.create_publisher(
            JointState, f'{NAMESPACE}/joint_states', SENSOR
        )
        self._clock = made.node.get_clock()
        made.node.create_timer(0.02, self._publish)

    def _publish(self) -> None:
        message = JointState(name=JOINTS, position=[self.positions[name] for name in JOINTS])
        message.header.stamp = ns_to_stamp(int(self._clock.now().nanoseconds))
        self._publisher.publish(message)


class Person:
    """The command in a terminal, answered question by question."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'vla_runtime', 'robot', *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=0,
            env={**os.environ, 'PYTHONUNBUFFERED': '1'},
        )
        self._ends = threading.Timer(120.0, self._process.kill)
        self._ends.start()
        self.said = ''

    def wait_for(self, question: str) -> None:
        while not (self.said.endswith(': ') and question in self.said.rpartition('\n')[2]):
            letter = self._process.stdout.read(1)
            assert letter, f'ended before it asked for {question}: {self.said}'
            self.said += letter

    def answer(self, text: str = '') -> None:
        self._process.stdin.write(f'{text}\n')
        self._process.stdin.flush()

    def end(self) -> int:
        self._process.stdin.close()
        self.said += self._process.stdout.read()
        code = self._process.wait()
        self._ends.cancel()
        return code


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as one:
        yield one


@pytest.fixture(scope='module')
def led(made: Graph) -> Led:
    image = {'topic': 'top/image_raw', 'rate_hz': 20.0, 'width': 64, 'height': 48}
    urdf = {'topic': f'{NAMESPACE}/robot_description', 'text': URDF}
    start_driver(made, NAMESPACE, 'camera', images=[image], strings=[urdf])
    Controller(made, NAMESPACE, ['elbow', 'shoulder', 'gripper'])
    return Led(made)


def sweep(led: Led, made: Graph, joint: str, low: float, high: float) -> None:
    """Move a joint to both ends; each is published before the next."""
    heard: list[JointState] = made.collect(JointState, f'{NAMESPACE}/joint_states', SENSOR)
    for position in (low, high):
        led.positions[joint] = position
        at = JOINTS.index(joint)
        made.wait_for(
            lambda at=at, position=position: (
                sum(one.position[at] == position for one in list(heard)) > 10
            ),
            f'{joint} at {position}',
        )


def test_a_draft_has_what_the_graph_and_a_hand_show(led: Led, made: Graph, tmp_path: Path) -> None:
    out = tmp_path / 'led.yaml'
    person = Person('new', '--out', str(out), '--namespace', NAMESPACE)
    person.wait_for('shoulder')
    sweep(led, made, 'shoulder', -1.0, 1.25)
    person.answer()
    # The driver calls one joint as it should another.
    person.wait_for('elbow')
    sweep(led, made, 'gripper', 0.0, 0.8)
    person.answer()
    person.wait_for('gripper')
    person.answer('s')
    assert person.end() == 0
    assert "PROBLEM: 'gripper' moved" in person.said
    robot = load_robot(out)
    shoulder, elbow, gripper = robot.joints
    assert (shoulder.lower, shoulder.upper) == (-1.0, 1.25)
    assert elbow.lower is None and urdf_limits(robot)['elbow'].lower == -2.5
    assert gripper.grips and (gripper.lower, gripper.upper) == (0.0, 0.8)
    (camera,) = robot.cameras
    assert (camera.name, camera.topic, camera.width) == ('top', 'top/image_raw', 64)
    assert camera.rate_hz is not None and 10.0 <= camera.rate_hz <= 25.0
    (output,) = robot.outputs
    assert output.joints == ('elbow', 'shoulder', 'gripper')
    assert MARK in out.read_text() and main(['check', str(out)]) == 0
    # A file that is there stays.
    before = out.read_text()
    assert main(['robot', 'new', '--out', str(out)]) == 2 and out.read_text() == before


def test_a_urdf_of_the_same_name_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urdf = tmp_path / 'arm.urdf'
    urdf.write_text('my own')
    words = ['robot', 'new', '--out', str(tmp_path / 'arm.yaml'), '--no-hand', '--seconds', '0.1']
    assert main(words) == 2 and f'{urdf} is there' in capsys.readouterr().err
    assert urdf.read_text() == 'my own' and list(tmp_path.iterdir()) == [urdf]


def test_zero_and_one_of_a_gripper_are_measured(led: Led, made: Graph) -> None:
    person = Person('gripper', 'tabletop', '--joint', 'gripper', '--namespace', NAMESPACE)
    person.wait_for('Close')
    sweep(led, made, 'gripper', 0.5, 0.05)
    person.answer()
    person.wait_for('Open')
    sweep(led, made, 'gripper', 0.5, 0.75)
    person.answer()
    assert person.end() == 0
    assert 'zero: 0.05\n' in person.said and 'one: 0.75\n' in person.said


def test_a_gripper_that_does_not_move_gives_1(led: Led) -> None:
    person = Person('gripper', 'tabletop', '--joint', 'gripper', '--namespace', NAMESPACE)
    for question in ('Close', 'Open'):
        person.wait_for(question)
        person.answer()
    assert person.end() == 1 and 'zero:' not in person.said


def test_joints_that_nobody_looked_at_give_1_and_are_named(led: Led) -> None:
    person = Person('joints', 'tabletop', '--namespace', NAMESPACE)
    person.wait_for('shoulder_pan')
    person.answer('s')
    person.wait_for('shoulder_lift')
    # Its standard input ends, as in a script.
    assert person.end() == 1
    assert 'not looked at: shoulder_lift, elbow_flex' in person.said


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['gripper', 'tabletop'], '--joint'),
        (['gripper', 'tabletop', '--joint', 'griper'], 'griper'),
        (['joints', 'so102'], 'so102'),
        (['new', '--out', '/no/folder/arm.yaml'], '/no/folder'),
        (
            ['joints', 'tabletop', '--seconds', '0.1', '--namespace', '/nobody'],
            '/nobody/joint_states',
        ),
        (['new', '--out', 'arm.yaml', '--namespace', '/nobody', '--seconds', '0.1'], 'doctor'),
        ([], 'WHAT'),
    ],
)
def test_what_cannot_be_used_gives_2_and_is_named(
    words: list[str], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'vla_runtime', 'robot', *words],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and said in done.stderr
    assert not list(tmp_path.iterdir())
