"""Predictions on any bag with the robot's cameras and joints, against the motion in it."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from recorded_bag import START_NS, Turn, record
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from vla_runtime.policy import Policy
from vla_runtime.recording.topics import MissingTopicError
from vla_runtime.robot.file import load_robot
from vla_runtime.types import ActionChunk, Observation
from vla_tools.replay.motion import RecordedMotion, open_loop_error
from vla_tools.replay.open_loop_run import run_open_loop
from vla_tools.replay.recorded import ReplayError
from vla_tools.replay.setup import Changes

TYPES = get_typestore(Stores.ROS2_JAZZY)
KINDS = TYPES.types
IMAGE, PACKED, JOINTS = (
    f'sensor_msgs/msg/{name}' for name in ('Image', 'CompressedImage', 'JointState')
)
STRING = 'std_msgs/msg/String'
TASK = 'pick up the red cup'
PERIOD_NS = 50_000_000
STEPS = 60
# Of shoulder (deg), elbow and gripper (rad), a second.
SPEED = np.array([20.0, -0.5, 0.25])


def header(stamp_ns: int):
    stamp = KINDS['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    return KINDS['std_msgs/msg/Header'](stamp=stamp, frame_id='')


def position(stamp_ns: int) -> np.ndarray:
    return SPEED * ((stamp_ns - START_NS) * 1e-9)


def pixels(number: int, shape=(24, 32, 3)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def write(
    folder: Path,
    plugin=StoragePlugin.MCAP,
    prefix: str = '',
    wrist: bool = True,
    instruction: bool = True,
    packed: bool = False,
    other_task: bool = False,
    slow: int = 1,
    ahead_ns: int = 0,
    stamped: bool = True,
) -> Path:
    """A bag as `ros2 bag record` writes it: no policy was there.

    Its clock is `ahead_ns` ahead, with `slow` seconds in one of the stamps'; without `stamped` the
    wrist's frames have no stamps.
    """
    with Writer(folder, version=9, storage_plugin=plugin) as writer:

        def topic(name, kind):
            return writer.add_connection(f'{prefix}/{name}', kind, typestore=TYPES)

        def put(connection, stamp_ns, message):
            data = TYPES.serialize_cdr(message, connection.msgtype)
            recorded_ns = START_NS + ahead_ns + slow * (stamp_ns - START_NS)
            writer.write(connection, recorded_ns, bytes(data))

        top = topic('top/image/compressed' if packed else 'top/image', PACKED if packed else IMAGE)
        hand = topic('wrist/image', IMAGE) if wrist else None
        joints = topic('joint_states', JOINTS)
        if instruction:
            said = topic('task/instruction', STRING)
            put(said, START_NS - 1, KINDS[STRING](data=TASK))
        if other_task:
            others = writer.add_connection('/task/current_instruction', STRING, typestore=TYPES)
            put(others, START_NS, KINDS[STRING](data='wave'))
        for number in range(STEPS):
            stamp_ns = START_NS + number * PERIOD_NS
            names = ['gripper', 'shoulder', 'elbow']
            values = position(stamp_ns)[[2, 0, 1]]
            empty = np.zeros(0)
            put(joints, stamp_ns, KINDS[JOINTS](header(stamp_ns), names, values, empty, empty))
            image = pixels(number)
            if packed:
                data = cv2.imencode('.png', image[:, :, ::-1])[1].ravel()
                put(top, stamp_ns, KINDS[PACKED](header(stamp_ns), 'rgb8; png compressed', data))
            else:
                put(top, stamp_ns, raw(image, stamp_ns))
            if hand is not None:
                put(hand, stamp_ns, raw(pixels(1000 + number, (30, 40, 3)), stamp_ns * stamped))
    return folder


def raw(image: np.ndarray, stamp_ns: int):
    height, width, _ = image.shape
    return KINDS[IMAGE](header(stamp_ns), height, width, 'rgb8', 0, 3 * width, image.ravel())


def run(path, bundle, robot_file, **changes):
    given = {'robot': load_robot(robot_file), 'instruction': None, 'every_s': 0.5} | changes
    return run_open_loop(path, Changes(bundle=bundle, threads=1), **given)


@pytest.mark.parametrize(
    ('plugin', 'prefix', 'packed'),
    [
        (StoragePlugin.MCAP, '', False),
        (StoragePlugin.SQLITE3, '/left', False),
        (StoragePlugin.MCAP, '', True),
    ],
)
def test_predictions_are_compared_with_the_motion_that_followed(
    tmp_path, bundle, robot_file, plugin, prefix, packed
):
    folder = write(tmp_path / 'bag', plugin, prefix, packed=packed)
    result = run(folder, bundle, robot_file)
    error = result.error
    assert error.joints == ('shoulder', 'elbow', 'gripper')
    assert error.units == ('deg', 'rad', 'rad')
    assert error.predictions == 5
    assert (result.missing, result.problems) == ({}, [])
    # Standing still errs by the way that the joints went.
    ahead_s = np.arange(8) * 0.05
    np.testing.assert_allclose(error.still, np.abs(np.outer(ahead_s, SPEED)), atol=1e-6)
    # By hand: a message is looked at once the next one is there.
    policy = Policy.load(bundle)
    errors = []
    for number in (9, 19, 29, 39, 49):
        stamp_ns = START_NS + number * PERIOD_NS
        degrees, *rest = position(stamp_ns)
        state = np.array([np.radians(degrees), *rest])
        images = {'top': pixels(number), 'wrist': pixels(1000 + number, (30, 40, 3))}
        chunk, _ = policy.infer(Observation(images, state, TASK))
        actions = chunk.actions * [180 / np.pi, 1.0, 1.0]
        errors.append(np.abs(actions - [position(stamp_ns + i * PERIOD_NS) for i in range(8)]))
    np.testing.assert_allclose(error.mean, np.mean(errors, axis=0), atol=1e-6)
    np.testing.assert_allclose(error.largest, np.max(errors, axis=0), atol=1e-6)


def test_a_recording_on_another_clock_changes_nothing(tmp_path, bundle, robot_file):
    """A simulation at a third of the speed, with a camera without stamps and a task."""
    plain = run(write(tmp_path / 'plain'), bundle, robot_file)
    folder = write(tmp_path / 'slow', slow=3, ahead_ns=10**17, stamped=False)
    result = run(folder, bundle, robot_file)
    np.testing.assert_array_equal(result.error.mean, plain.error.mean)
    assert plain.times == []
    assert [line.split(':')[0] for line in result.times] == [
        'messages of /wrist/image have no stamps'
    ]
    assert any('/wrist/image have no stamps' in line for line in result.lines())


def test_a_camera_that_is_not_in_the_bag_is_named(tmp_path, bundle, robot_file):
    folder = write(tmp_path / 'bag', wrist=False)
    with pytest.raises(MissingTopicError, match="'wrist'"):
        run(folder, bundle, robot_file)


def test_without_an_instruction_one_must_be_given(tmp_path, bundle, robot_file):
    folder = write(tmp_path / 'bag', instruction=False)
    with pytest.raises(ReplayError, match='--instruction'):
        run(folder, bundle, robot_file)
    assert run(folder, bundle, robot_file, instruction=TASK).error.predictions == 5


def test_the_task_is_that_of_the_robot_and_of_no_other(tmp_path, bundle, robot_file):
    alone = write(tmp_path / 'alone', prefix='/left')
    beside = write(tmp_path / 'beside', prefix='/left', other_task=True)
    first, second = (run(folder, bundle, robot_file).error for folder in (alone, beside))
    np.testing.assert_array_equal(first.mean, second.mean)


def test_bundle_and_robot_of_a_recording_are_taken_from_it(tmp_path, bundle, robot_file):
    folder = record(tmp_path / 'bag', bundle, robot_file, [Turn()] * 12)
    result = run_open_loop(folder, Changes(), robot=None, instruction=TASK, every_s=0.1)
    assert result.error.predictions > 5


def test_without_a_recorded_policy_bundle_and_robot_must_be_given(tmp_path, bundle, robot_file):
    folder = write(tmp_path / 'bag')
    with pytest.raises(ReplayError, match='--robot'):
        run_open_loop(folder, Changes(bundle=bundle), robot=None, instruction=None, every_s=0.5)
    with pytest.raises(ReplayError, match='--bundle'):
        run_open_loop(
            folder, Changes(), robot=load_robot(robot_file), instruction=None, every_s=0.5
        )


def test_times_without_a_measurement_do_not_count(tmp_path, bundle, robot_file):
    result = run(write(tmp_path / 'bag'), bundle, robot_file, every_s=0.05)
    # The last predictions reach beyond the end of the bag.
    assert np.isfinite(result.error.mean).all()
    assert result.error.predictions > 50


STEP_NS = 100_000_000
ROBOT = """
format: 1
name: turning
joints:
  - {name: wheel, unit: rad, continuous: true, velocity: 10.0}
cameras:
  - {name: top, topic: top/image}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [wheel]}
"""


@pytest.mark.parametrize('turns', [0, 1, -3])
def test_whole_turns_of_a_continuous_joint_are_no_error(tmp_path: Path, turns: int) -> None:
    (tmp_path / 'robot.yaml').write_text(ROBOT)
    angles = np.pi - 0.25 + 0.1 * np.arange(11)
    motion = RecordedMotion()
    for index, angle in enumerate(angles):
        # As a driver wraps it, between -pi and pi.
        motion.add('wheel', index * STEP_NS, float(np.arctan2(np.sin(angle), np.cos(angle))))
    # Half a step later than the measured ones, and 0.05 rad off.
    ahead = angles[:8, None] + 0.1 + 2.0 * np.pi * turns
    chunk = ActionChunk(ahead, ('wheel',), ('position',), STEP_NS * 1e-9, ahead)
    error = open_loop_error([(STEP_NS // 2, chunk)], motion, load_robot(tmp_path / 'robot.yaml'))
    np.testing.assert_allclose(error.largest, 0.05, atol=1e-9)
    np.testing.assert_allclose(error.still[:, 0], 0.1 * np.arange(8), atol=1e-9)
