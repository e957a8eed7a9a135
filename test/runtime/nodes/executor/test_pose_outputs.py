"""Poses as they are published: from a robot file and a policy to the messages of the topic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from rotation_oracle import FORMS
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, PoseSpec
from vla_runtime.execution.command import CommandKind
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.nodes.executor.outputs import OutputWriter
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.executor.setup import make_core
from vla_runtime.processing.poses import from_matrix, rotation_width, to_matrix
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import RobotMatch, match_robot
from vla_runtime.types import ActionChunk, ChunkHeader

GIVEN = {row.name: row.default for row in EXECUTOR_PARAMETERS}
ROS_NS = 10**18
ARM = """
format: 1
name: arm
joints:
  - {name: shoulder, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
  - {name: elbow, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
  - {name: gripper, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
cameras: CAMERAS
poses:
  - {name: tool, frame_id: base, lower: [0.1, -0.3, 0.0], upper: [0.5, 0.3, 0.4], velocity: 0.5,
     angular_velocity: 1.0, angular_acceleration: 8.0}
outputs:
  - {kind: pose_stamped, topic: target_pose, pose: tool}
"""


class Wire:
    """Keeps the quaternions that are published, w, x, y, z."""

    def __init__(self):
        self.sent = []

    def publish(self, message):
        q = message.pose.orientation
        self.sent.append(np.array([q.w, q.x, q.y, q.z]))


def drive(
    core: ChunkExecutor, match: RobotMatch, wire: Any, answer: Callable[[], np.ndarray], ticks: int
) -> Iterator[None]:
    """Start a robot and answer each request with rows; a pause after each tick."""
    (output,) = match.outputs
    writer, number = OutputWriter(output, wire, 0.01), 0
    core.tick(0.0, ROS_NS)
    assert core.start(0.0, ROS_NS).started
    for tick in range(1, ticks + 1):
        now_s, ros_ns = 0.01 * tick, ROS_NS + 10_000_000 * tick
        command = core.tick(now_s, ros_ns)
        if command.kind is not CommandKind.IDLE:
            writer.send(command.setpoints, Time(), follows=True)
        asked = core.poll_request(now_s, ros_ns)
        if asked is not None:
            number += 1
            rows = answer()
            empty = np.zeros((len(rows), 0))
            chunk = ActionChunk(rows, match.action_names, match.action_kinds, 0.05, empty)
            header = ChunkHeader(ros_ns, 0, number, request=asked.request)
            core.submit_chunk(chunk, header, now_s, ros_ns)
        yield
    assert core.counters.accepted and not core.counters.internal_errors


def published(folder: Path, form: str, matrices: np.ndarray) -> np.ndarray:
    """What is published in 0.8 s by a policy that says one chunk again and again, (n, 4)."""
    rotation = tuple(f'r{number}' for number in range(rotation_width(form)))
    axes = 'sxyz' if form == 'euler' else None
    pose = PoseSpec('tool', ('x', 'y', 'z'), rotation, form, 'absolute', 'base', axes)
    units = dict.fromkeys('xyz', 'm')
    spec = tiny_spec()
    spec = replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        actions=tuple(ActionSpec(name, units.get(name, '1'), 'absolute') for name in pose.actions),
        poses=(pose,),
    )
    cameras = [{'name': camera.name, 'topic': f'{camera.name}/image'} for camera in spec.cameras]
    path = folder / 'arm.yaml'
    path.write_text(ARM.replace('CAMERAS', str(cameras)))
    robot = load_robot(path)
    match = match_robot(robot, spec, folder)
    core = make_core(GIVEN, robot, match, ClampLatch(0), use_sim_time=False)
    wire = Wire()
    rows = np.hstack([np.repeat([[0.3, 0.0, 0.2]], 16, axis=0), from_matrix(matrices, form)])
    for _ in drive(core, match, wire, lambda: rows, 80):
        pass
    return np.array(wire.sent)


def angles(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Angles between quaternions of length 1, rad: (..., 4) and (..., 4) to (...)."""
    together, apart = (
        np.linalg.norm(first + second, axis=-1),
        np.linalg.norm(first - second, axis=-1),
    )
    return 4.0 * np.arctan2(np.minimum(apart, together), np.maximum(apart, together))


@pytest.mark.parametrize('form', FORMS)
def test_a_tool_that_points_down_and_wobbles_stays_there(tmp_path, form):
    wobble = [math.pi + (-0.01 if step % 4 < 2 else 0.01) for step in range(16)]
    sent = published(tmp_path, form, to_matrix(np.outer(wobble, [1.0, 0.0, 0.0]), 'axis_angle'))
    assert len(sent) > 70
    assert np.linalg.norm(sent, axis=1) == pytest.approx(1.0, abs=1e-12)
    assert angles(sent[:-1], sent[1:]).max() <= 0.01 * (1.0 + 1e-6)
    assert angles(sent[:1], sent).max() < 0.025


@pytest.mark.parametrize('form', FORMS)
def test_a_policy_that_turns_the_tool_at_once_turns_it_within_the_limits(tmp_path, form):
    turns = np.array([0.0] * 4 + [2.1] * 12)
    sent = published(tmp_path, form, to_matrix(np.outer(turns, [0.0, 0.0, 1.0]), 'axis_angle'))
    steps = angles(sent[:-1], sent[1:])
    assert 0.0099 < steps.max() <= 0.01 * (1.0 + 1e-6)
    # About one axis all the way, so the change of the angle is that of the rate.
    assert np.abs(np.diff(steps)).max() <= 8.0 * 0.01**2 * (1.0 + 1e-6)
