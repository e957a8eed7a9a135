"""Poses in every form, from a policy's chunk to the commands: the same rotations, within limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation_oracle import FORMS

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.rotations import angles_between
from vla_runtime.processing.actions import ActionSpace, PoseColumns
from vla_runtime.processing.poses import from_matrix, rotation_width, to_matrix
from vla_runtime.robot.written_columns import WrittenColumns
from vla_runtime.types import ActionChunk, ChunkHeader

STEPS, STEP_S, PERIOD_S = 16, 0.05, 0.01
VELOCITY = 1.0
ROS_NS = 10**18


def written_as(form: str) -> WrittenColumns:
    """A hand of x, y, z and a rotation, after a joint."""
    rotation = tuple(f'r{number}' for number in range(rotation_width(form)))
    pose = PoseSpec('tool', ('x', 'y', 'z'), rotation, form, 'absolute', 'base')
    pose = replace(pose, euler_axes='rzyx' if form == 'euler' else None)
    names = ('lift', 'x', 'y', 'z', *rotation)
    return WrittenColumns([Column(name, feedback=False) for name in names], (pose,))


def rows_of(rotations: np.ndarray, form: str) -> np.ndarray:
    """A chunk at rest but for its rotations, (steps, 3, 3)."""
    still = np.repeat([[0.4, 0.3, 0.0, 0.2]], len(rotations), axis=0)
    return np.hstack([still, from_matrix(rotations, form, 'rzyx')])


class Robot:
    """An executor with one pose, on a clock of its own; every published quaternion is kept."""

    def __init__(self, form: str, acceleration: float = np.inf) -> None:
        self.written = written_as(form)
        limit = ColumnLimits(velocity=VELOCITY, acceleration=acceleration)
        names = tuple(column.name for column in self.written.columns)
        config = ExecutorConfig(
            self.written.columns,
            make_limits(names, dict.fromkeys(names[4:], limit)),
            StartParameters(tolerance=4.0),
            clamp_latch=0,
            control_period_s=PERIOD_S,
            form=self.written,
        )
        self.executor = ChunkExecutor(
            config, ExecutorParameters(handover=HandoverParameters('switch'))
        )
        self.now_s, self.number = 0.0, 0
        self.sent: list[tuple[float, np.ndarray]] = []
        self.executor.tick(0.0, ROS_NS)
        assert self.executor.start(0.0, ROS_NS).started

    @property
    def ros_ns(self) -> int:
        return ROS_NS + round(self.now_s * 1e9)

    def tick(self, dt_s: float = PERIOD_S) -> None:
        self.now_s += dt_s
        command = self.executor.tick(self.now_s, self.ros_ns)
        if command.kind is not CommandKind.IDLE:
            self.sent.append((self.now_s, command.setpoints[4:].copy()))

    def submit(self, rows: np.ndarray, request: int | None = None):
        chunk = ActionChunk(
            rows, self.written.names, self.written.kinds, STEP_S, np.zeros((len(rows), 0))
        )
        self.number += 1
        return self.executor.submit_chunk(
            chunk,
            ChunkHeader(self.ros_ns, 0, self.number, request=request),
            self.now_s,
            self.ros_ns,
        )

    def answer(self, rows: np.ndarray) -> None:
        """Answer the open request, if there is one."""
        asked = self.executor.poll_request(self.now_s, self.ros_ns, 64)
        if asked is not None:
            assert self.submit(rows, asked.request).accepted

    def turns(self) -> np.ndarray:
        """Angular velocities between the published rotations, rad/s."""
        times, quaternions = (np.array(column) for column in zip(*self.sent, strict=True))
        return angles_between(quaternions[:-1], quaternions[1:]) / np.diff(times)

    def furthest(self) -> float:
        """Largest angle from the first published rotation, rad."""
        quaternions = np.array([quaternion for _, quaternion in self.sent])
        return float(angles_between(quaternions[:1], quaternions).max())


def rotations(*vectors: tuple[float, float, float]) -> np.ndarray:
    return to_matrix(np.array(vectors), 'axis_angle')


@pytest.mark.parametrize('form', FORMS)
def test_a_tool_that_points_down_and_wobbles_does_not_swing_round(form):
    robot = Robot(form)
    # Half a degree to either side of half a turn: an axis-angle vector flips its sign there.
    rows = rows_of(
        rotations(*((math.pi + (-0.01 if step % 4 < 2 else 0.01), 0.0, 0.0) for step in range(16))),
        form,
    )
    for _ in range(60):
        robot.tick()
        robot.answer(rows)
    assert len(robot.sent) > 50
    assert robot.turns().max() <= VELOCITY * (1.0 + 1e-6)
    assert robot.furthest() <= 0.0201


@pytest.mark.parametrize('form', FORMS)
def test_a_rotation_that_jumps_by_120_degrees_is_turned_at_its_limit_and_counted(form):
    robot = Robot(form)
    rows = rows_of(rotations(*([(0.0, 0.0, 0.0)] * 4 + [(0.0, 0.0, 2.1)] * 12)), form)
    for _ in range(60):
        robot.tick()
        robot.answer(rows)
    assert VELOCITY * 0.999 <= robot.turns().max() <= VELOCITY * (1.0 + 1e-6)
    assert robot.executor.counters.clamped and robot.executor.counters.limited_ticks > 30


@pytest.mark.parametrize('form', FORMS)
def test_a_delta_chunk_past_half_a_turn_continues_the_one_before_it(form):
    width = rotation_width(form)
    names = ('x', 'y', 'z', *(f'r{number}' for number in range(width)))
    columns = tuple(range(3, 3 + width))
    pose = PoseColumns(
        name='tool',
        position=(0, 1, 2),
        rotation=columns,
        form=form,
        euler_axes='rzyx',
        kind='delta',
        frame='base',
        state_position=(0, 1, 2),
        state_rotation=columns,
    )
    space = ActionSpace(names, ('delta',) * len(names), (None,) * len(names), (pose,))
    robot, angles = Robot(form), math.pi - 0.1 + 0.02 * np.arange(40)
    deltas = from_matrix(rotations(*((0.02 * s, 0.0, 0.0) for s in range(16))), form, 'rzyx')
    for _ in range(150):
        robot.tick()
        step = robot.executor.status().step
        # The driver writes the measured rotation canonically, on either side of half a turn.
        here = from_matrix(rotations((angles[step], 0.0, 0.0)), form, 'rzyx')[0]
        state = np.array([0.3, 0.0, 0.2, *here])
        chunk = space.to_robot(np.hstack([np.zeros((16, 3)), deltas]), state)
        robot.answer(np.hstack([np.full((16, 1), 0.4), chunk]))
    assert robot.executor.counters.taken_over >= 3
    # Never faster than a cubic that sets out from rest; at a seam it was a whole turn.
    assert robot.turns().max() <= 1.5 * 0.02 / STEP_S
    assert robot.furthest() > 0.3 and not robot.executor.counters.clamped


@settings(max_examples=20)
@given(
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 2**31),
    scale=st.floats(0.02, 3.0),
    spans=st.lists(st.floats(0.1, 1.9), min_size=1, max_size=20),
    acceleration=st.one_of(st.just(np.inf), st.floats(2.0, 50.0)),
)
def test_no_form_turns_faster_than_its_limit_whatever_the_rows_and_the_ticks(
    form, seed, scale, spans, acceleration
):
    generator, robot = np.random.default_rng(seed), Robot(form, acceleration)
    for tick in range(60):
        robot.tick(PERIOD_S * spans[tick % len(spans)])
        vectors = np.cumsum(generator.normal(scale=scale, size=(16, 3)), axis=0)
        robot.answer(rows_of(rotations(*vectors), form))
    assert robot.turns().max() <= VELOCITY * (1.0 + 1e-6)
    assert not robot.executor.counters.internal_errors


@pytest.mark.parametrize('form', FORMS)
def test_a_slow_rotation_is_followed_exactly_at_its_rows(form):
    robot, axis = Robot(form, 20.0), np.array([0.48, 0.6, 0.64])
    turns = np.concatenate([[0.0, 0.001, 0.004], 0.009 + 0.01 * np.arange(13)])
    wanted = rotations(*((1.0 + turns)[:, None] * axis))
    for _ in range(75):
        robot.tick()
        if len(robot.sent) < 2:
            robot.answer(rows_of(wanted, form))
    quaternions = np.array([quaternion for _, quaternion in robot.sent])
    for matrix in wanted[:8]:
        there = from_matrix(matrix, 'quaternion_wxyz')
        assert angles_between(there, quaternions).min() < 1e-9
    assert not robot.executor.counters.limited_ticks


@pytest.mark.parametrize('form', FORMS)
def test_the_committed_plan_is_written_as_the_policy_wrote_it(form):
    robot = Robot(form)
    rows = rows_of(
        rotations(*((math.pi - 0.05 + 0.02 * step, 0.0, 0.0) for step in range(16))), form
    )
    if form.startswith('quaternion'):
        rows[:, 4:] *= -1.0
    elif form == 'axis_angle':
        rows[rows[:, 4] < 0.0, 4] += 2.0 * math.pi
    for _ in range(4):
        robot.tick()
        robot.answer(rows)
    plan = robot.executor.committed_plan(robot.ros_ns)
    assert plan.names == robot.written.names
    np.testing.assert_allclose(plan.rows[:8], rows[:8], atol=1e-9)


def test_a_plan_keeps_the_policys_own_branch_of_euler_angles_and_its_lengths_in_6d():
    written = written_as('euler')
    rows = np.zeros((3, 7))
    rows[:, 4:] = [[0.1, 1.7, 0.2], [0.3, math.pi / 2, 0.5], [0.3, math.pi / 2 + 1e-12, 7.5]]
    np.testing.assert_array_equal(
        written.to_chunk(written.to_columns(rows, np.zeros(len(written.columns))), rows), rows
    )
    written = written_as('rotation_6d')
    rows = np.array([[0.0] * 4 + [2.0, 0.0, 0.0, 1.0, 3.0, 0.0]])
    np.testing.assert_array_equal(
        written.to_chunk(written.to_columns(rows, np.zeros(len(written.columns))), rows), rows
    )


def test_numbers_that_are_no_rotation_are_refused_with_pose_names_and_row():
    robot = Robot('rotation_6d')
    rows = rows_of(rotations(*([(0.0, 0.0, 0.0)] * 4)), 'rotation_6d')
    rows[2, 4:] = [1.0, 1e-5, 0.0, 1.0, 0.0, 0.0]
    robot.tick()
    result = robot.submit(rows)
    assert result.refusal is ChunkRefusal.NO_ROTATION
    for words in ("pose 'tool'", "'r0', 'r1'", 'row 2', 'parallel'):
        assert words in result.text


def test_a_plan_between_opposite_rotations_is_still_a_plan():
    written = written_as('axis_angle')
    rows = np.zeros((3, 8))
    rows[0, 4:] = [0.0, 1.0, 0.0, 0.0]
    assert written.to_chunk(rows, None)[:, 4:] == pytest.approx(np.array([[math.pi, 0, 0]] * 3))
