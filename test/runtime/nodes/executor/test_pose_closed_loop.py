"""A policy of step deltas drives the simulated arm through `pose_stamped`, closed loop.

Policy's numbers, action space, executor core, output writer and physics are the package's own; the
Cartesian controller behind the topic is the inverse kinematics of the scripted expert.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_pose_outputs import ARM, GIVEN, drive
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import ActionSpec, NormalisationSpec, PoseSpec, StateSpec
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.nodes.executor.setup import make_core
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot

pytest.importorskip('mujoco')

STEPS, STEP_S, PERIOD_S = 16, 0.05, 0.01
# LIBERO's controller takes no longer steps than 5 cm.
LONGEST_M = 0.01
POSITION, TURN = ('x', 'y', 'z'), ('rx', 'ry', 'rz')


def step_spec():
    """A policy that moves the tool by steps of position and axis-angle, in the base's frame."""
    spec = tiny_spec()
    units = dict.fromkeys(POSITION, 'm') | dict.fromkeys(TURN, 'rad')
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        normalisation=NormalisationSpec('identity', 'identity'),
        state=tuple(StateSpec(name, unit) for name, unit in units.items()),
        actions=tuple(ActionSpec(f'd{name}', unit, 'delta') for name, unit in units.items()),
        step_time_s=STEP_S,
        poses=(
            PoseSpec(
                name='tool',
                position=tuple(f'd{name}' for name in POSITION),
                rotation=tuple(f'd{name}' for name in TURN),
                form='axis_angle',
                kind='delta',
                frame='base',
                state_position=POSITION,
                state_rotation=TURN,
                delta_from='step',
            ),
        ),
    )


class Controller:
    """The Cartesian controller of the arm: the topic's poses to joint setpoints."""

    def __init__(self, expert, joints):
        self.expert, self.joints, self.heard = expert, joints, 0

    def publish(self, message):
        place = message.pose.position
        target = np.array([place.x, place.y, place.z])
        self.joints = self.expert.reach(target, self.joints, iterations=4)
        self.heard += 1


def test_step_deltas_bring_the_simulated_arm_to_its_goal(tmp_path):
    from vla_tabletop.sim.expert import Expert
    from vla_tabletop.sim.world import Tabletop

    bundle = read_bundle(write_tiny_policy(tmp_path / 'steps', step_spec()))
    cameras = [{'name': name, 'topic': f'{name}/image'} for name in bundle.spec.camera_names]
    text = ARM.replace('CAMERAS', str(cameras)).replace('[0.1, -0.3, 0.0]', '[-1.0, -1.0, -0.1]')
    text = text.replace('[0.5, 0.3, 0.4]', '[1.0, 1.0, 1.0]')
    joints = [
        f'  - {{name: {name}, unit: {"m" if name in POSITION else "rad"}, lower: -4.0, upper: 4.0, '
        'velocity: 2.0}'
        for name in bundle.spec.state_names
    ]
    text = text.replace('joints:\n', 'joints:\n' + '\n'.join(joints) + '\n')
    path = tmp_path / 'arm.yaml'
    path.write_text(text)
    robot = load_robot(path)
    match = match_robot(robot, bundle.spec, bundle.folder)
    core = make_core(GIVEN, robot, match, ClampLatch(0), use_sim_time=False)
    space = PolicyCodec(bundle).action_space

    world, expert = Tabletop(1.0 / PERIOD_S), Expert()
    # Upright, where the expert holds the tool.
    start = expert.reach(world.state().tip_m, world.state().joint_rad)
    for _ in range(100):
        world.step(start)
    begin = world.state().tip_m
    goal = begin + np.array([-0.03, 0.04, 0.03])
    arm = Controller(expert, start.copy())
    answers = 0

    def answer() -> np.ndarray:
        nonlocal answers
        answers += 1
        tip = world.state().tip_m
        way, steps = goal - tip, np.zeros((STEPS, 6))
        for row in steps:
            length = np.linalg.norm(way)
            row[:3] = way * min(1.0, LONGEST_M / length) if length > 1e-9 else 0.0
            way = way - row[:3]
        rows = space.to_robot(steps, np.concatenate([tip, np.zeros(3)]))
        assert np.linalg.norm(rows[-1, :3] - goal) < 1e-6
        return rows

    for _ in drive(core, match, arm, answer, 400):
        world.step(arm.joints)
    assert answers > 3
    assert arm.heard > 300
    assert np.linalg.norm(begin - goal) > 0.05
    assert np.linalg.norm(world.state().tip_m - goal) < 0.01
