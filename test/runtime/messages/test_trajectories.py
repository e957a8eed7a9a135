"""Chunks and plans survive the wire exactly; anything else is refused by field."""

import numpy as np
import pytest
from builtin_interfaces.msg import Duration
from hypothesis import given
from hypothesis import strategies as st
from rclpy.serialization import deserialize_message, serialize_message
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_runtime.messages import trajectories
from vla_runtime.messages.trajectories import (
    TrajectoryError,
    chunk_to_message,
    chunk_type,
    message_to_chunk,
    message_to_plan,
    ns_to_stamp,
    plan_to_message,
    plan_type,
    stamp_to_ns,
    trajectory_of,
    typed_messages,
)
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest, same_step_time

MANY = '9' * 5000  # digits, more than Python makes a number of


TYPED = typed_messages()


@pytest.fixture(params=['typed', 'tagged'])
def form(request, monkeypatch):
    """Chunks and plans as they are where `vla_interfaces` is built, and where it is not."""
    if request.param == 'tagged':
        monkeypatch.setattr(trajectories, 'typed_messages', lambda: None)
    elif TYPED is None:
        pytest.skip('vla_interfaces is not built: no C++ compiler, or not set up by ./run')
    return request.param


def a_chunk(kinds=('position', 'velocity'), rows=4, step_time_s=0.05):
    actions = np.random.default_rng(1).normal(size=(rows, len(kinds)))
    names = tuple(f'joint_{index}' for index in range(len(kinds)))
    return ActionChunk(actions, names, kinds, step_time_s, np.zeros((rows, 32), np.float32))


def a_plan(rows, kinds=('position',) * 2, **others):
    names = [chr(ord('a') + column) for column in range(len(kinds))]
    given = {'stamp_ns': 9, 'episode': 1, 'certain': 0, **others}
    return PlanRequest(rows, names, list(kinds), 0.1, **given)


def over_the_wire(message):
    return deserialize_message(serialize_message(message), type(message))


@given(st.integers(0, (2**31 - 1) * 10**9))
def test_stamps_are_exact_integers(stamp_ns):
    assert stamp_to_ns(ns_to_stamp(stamp_ns)) == stamp_ns


@pytest.mark.parametrize(
    'kinds', [('position', 'position'), ('velocity', 'velocity'), ('position', 'velocity')]
)
def test_chunk_survives_the_wire(kinds, form):
    chunk = a_chunk(kinds)
    stamp = 1_732_000_000_123_456_789
    chunk_read, header = message_to_chunk(
        over_the_wire(chunk_to_message(chunk, ChunkHeader(stamp, 7, 3, tied=False)))
    )
    np.testing.assert_array_equal(chunk_read.actions, chunk.actions)
    assert chunk_read.names == chunk.names
    assert chunk_read.kinds == kinds
    assert chunk_read.step_time_s == 0.05
    assert (header.observation_ns, header.episode, header.number) == (stamp, 7, 3)


def test_positions_only_chunk_is_an_ordinary_trajectory(form):
    message = trajectory_of(
        chunk_to_message(a_chunk(('position',) * 2), ChunkHeader(5 * 10**9 + 7, 0, 0, tied=False))
    )
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (5, 7)
    assert list(message.joint_names) == ['joint_0', 'joint_1']
    assert [stamp_to_ns(point.time_from_start) for point in message.points] == [
        0,
        50_000_000,
        100_000_000,
        150_000_000,
    ]
    assert all(len(point.positions) == 2 and not len(point.velocities) for point in message.points)


def test_step_time_that_is_no_whole_nanosecond_keeps_even_spacing(form):
    chunk = a_chunk(step_time_s=1 / 30, rows=50)
    chunk_read, _ = message_to_chunk(chunk_to_message(chunk, ChunkHeader(0, 0, 0, tied=False)))
    assert chunk_read.step_time_s == pytest.approx(1 / 30, abs=1e-9)


@pytest.mark.parametrize('way', ['step', 'floor', 'nearest', 'single precision'])
def test_every_rate_up_to_120_hz_survives_the_rounding_of_its_times(way: str):
    for rate_hz in range(1, 121):
        step_s = 1 / rate_hz
        message = chunk_to_message(
            a_chunk(step_time_s=step_s, rows=50), ChunkHeader(0, 0, 0, tied=False)
        )
        for index, point in enumerate(trajectory_of(message).points):
            time_ns = {
                'step': index * round(step_s * 1e9),
                'floor': int(index * step_s * 1e9),
                'nearest': round(index * step_s * 1e9),
                'single precision': round(index * float(np.float32(step_s)) * 1e9),
            }[way]
            point.time_from_start = Duration(sec=time_ns // 10**9, nanosec=time_ns % 10**9)
        chunk, _ = message_to_chunk(message)
        assert chunk.step_time_s == pytest.approx(step_s, abs=1e-6)


def test_a_single_row_that_is_not_meant_for_its_stamp_is_refused():
    message = chunk_to_message(a_chunk(rows=1), ChunkHeader(0, 0, 0, tied=False))
    trajectory_of(message).points[0].time_from_start.nanosec = 50_000_000
    with pytest.raises(TrajectoryError, match='time_from_start'):
        message_to_chunk(message, step_time_s=0.05)


def test_single_row_needs_to_be_told_the_step_time(form):
    message = chunk_to_message(a_chunk(rows=1), ChunkHeader(0, 0, 0, tied=False))
    with pytest.raises(TrajectoryError, match='step time'):
        message_to_chunk(message)
    assert message_to_chunk(message, step_time_s=0.1)[0].step_time_s == 0.1


def test_not_finite_actions_travel_so_that_the_executor_can_refuse_them(form):
    chunk = a_chunk(('position', 'position'))
    chunk.actions[2, 1] = np.nan
    chunk_read, _ = message_to_chunk(chunk_to_message(chunk, ChunkHeader(0, 0, 0, tied=False)))
    assert np.isnan(chunk_read.actions[2, 1])


def test_plan_survives_the_wire(form):
    rows = np.random.default_rng(2).normal(size=(3, 2))
    asked = a_plan(rows, ('position', 'velocity'), stamp_ns=12, episode=4, certain=2)
    message = plan_to_message(asked)
    plan = message_to_plan(over_the_wire(message))
    np.testing.assert_array_equal(plan.rows, rows)
    assert plan.names == ('a', 'b')
    assert plan.kinds == ('position', 'velocity')
    assert (plan.step_time_s, plan.stamp_ns, plan.episode, plan.certain) == (0.1, 12, 4, 2)


def test_empty_plan_is_a_request_all_the_same(form):
    plan = message_to_plan(over_the_wire(plan_to_message(a_plan(np.zeros((0, 2))))))
    assert plan.rows.shape == (0, 2)
    assert (plan.stamp_ns, plan.episode, plan.step_time_s) == (9, 1, None)


def _points(*rows, step=50_000_000, field='positions'):
    points = []
    for index, row in enumerate(rows):
        point = JointTrajectoryPoint(**{field: row})
        point.time_from_start.nanosec = index * step
        points.append(point)
    return points


def _message(names, points, tag='chunk episode=0 number=0'):
    message = JointTrajectory(joint_names=names, points=points)
    message.header.frame_id = tag
    return message


def test_rows_that_were_rounded_one_by_one_are_on_the_grid_of_their_steps():
    points = _points(*([1.0] for _ in range(100)))
    for index, point in enumerate(points):
        second, nanosecond = divmod(round(index * 1e9 / 30), 1_000_000_000)
        point.time_from_start.sec, point.time_from_start.nanosec = second, nanosecond
    chunk, _ = message_to_chunk(_message(['a'], points))
    assert same_step_time(chunk.step_time_s, 1 / 30)


@pytest.mark.parametrize(
    ('message', 'reason'),
    [
        (_message(['a'], _points([1.0], [2.0]), tag='base_link'), 'frame_id'),
        (_message(['a'], _points([1.0], [2.0]), tag='plan episode=0 certain=1'), 'frame_id'),
        (_message(['a'], []), 'at least one'),
        (_message([], _points([1.0], [2.0])), 'joint_names'),
        (_message(['a', 'a'], _points([1.0, 1.0], [2.0, 1.0])), "'a'"),
        (
            _message(['a'], _points([1.0], [2.0]), tag=f'chunk episode={MANY} number=0'),
            'frame_',
        ),
        (_message(['a'], _points([1.0], [2.0]), tag='chunk episode=\u0661 number=0'), 'frame_id'),
        (_message(['a', 'b'], _points([1.0], [2.0])), r'positions have \[1\] numbers for 2'),
        (_message(['a', 'b'], _points([1.0, 2.0], [2.0])), r'positions have \[1, 2\] numbers'),
        (_message(['a'], _points([1.0], [2.0], field='effort')), 'neither positions nor'),
        (_message(['a'], _points([1.0], [2.0], step=0)), 'time_from_start'),
        (_message(['a'], [*_points([1.0], [2.0]), *_points([3.0])]), 'time_from_start'),
    ],
)
def test_what_is_not_a_chunk_is_refused_by_field(message, reason):
    with pytest.raises(TrajectoryError, match=reason):
        message_to_chunk(message)


def test_column_that_changes_its_kind_is_refused(form):
    message = chunk_to_message(a_chunk(), ChunkHeader(0, 0, 0, tied=False))
    trajectory_of(message).points[2].velocities[0] = 1.0
    with pytest.raises(TrajectoryError, match='joint_0'):
        message_to_chunk(message)


def test_number_of_thousands_of_digits_is_refused_in_a_short_sentence():
    message = _message(['a'], _points([1.0]), tag=f'plan episode=0 certain={MANY}')
    with pytest.raises(TrajectoryError, match='characters') as caught:
        message_to_plan(message)
    assert len(str(caught.value)) < 200


def test_plan_with_a_number_that_is_not_finite_is_refused():
    message = _message(['a'], _points([1.0], [np.inf]), tag='plan episode=0 certain=1')
    with pytest.raises(TrajectoryError, match='not finite'):
        message_to_plan(message)


def test_rows_that_do_not_fit_the_names_are_a_programming_error():
    with pytest.raises(ValueError, match='2 columns'):
        plan_to_message(a_plan(np.zeros((1, 3))))


@pytest.mark.parametrize('step', [None, 0, 7, -12])
def test_the_step_of_row_0_travels_with_plan_and_chunk(step, form):
    plan = plan_to_message(a_plan(np.zeros((2, 1)), ('position',), certain=1, step=step))
    assert message_to_plan(over_the_wire(plan)).step == step
    chunk = chunk_to_message(a_chunk(), ChunkHeader(5, 1, 2, tied=True, step=step, request=3))
    _, header = message_to_chunk(over_the_wire(chunk))
    assert (header.step, header.request, header.tied) == (step, 3, True)


@pytest.mark.parametrize('request_number', [None, 0, 40])
@pytest.mark.parametrize('open_requests', [1, 3])
def test_every_fact_of_a_header_travels(request_number, open_requests, form):
    header = ChunkHeader(
        5, 7, 3, tied=True, step=-4, request=request_number, open_requests=open_requests
    )
    assert message_to_chunk(over_the_wire(chunk_to_message(a_chunk(), header)))[1] == header
    plan = plan_to_message(a_plan(np.zeros((2, 2)), certain=2, step=0, request=request_number))
    assert isinstance(plan, plan_type())
    assert message_to_plan(over_the_wire(plan)).request == request_number


def test_messages_are_of_the_types_of_their_topics(form):
    chunk = chunk_to_message(a_chunk(), ChunkHeader(0, 0, 0, tied=False))
    assert type(chunk) is chunk_type()
    assert (type(chunk) is JointTrajectory) is (form == 'tagged')
    assert (chunk_type() is plan_type()) is (form == 'tagged')


@pytest.mark.skipif(TYPED is None, reason='vla_interfaces is not built')
def test_a_trajectory_with_tags_is_read_where_typed_messages_are_spoken(monkeypatch):
    header = ChunkHeader(5, 7, 3, tied=False, request=2)
    with monkeypatch.context() as before:
        before.setattr(trajectories, 'typed_messages', lambda: None)
        chunk, plan = chunk_to_message(a_chunk(), header), plan_to_message(a_plan(np.zeros((2, 2))))
    assert chunk_type() is not JointTrajectory
    assert message_to_chunk(chunk)[1] == header
    assert message_to_plan(plan).episode == 1


@pytest.mark.skipif(TYPED is None, reason='vla_interfaces is not built')
@pytest.mark.parametrize('name', ['episode', 'number', 'request', 'step'])
def test_a_count_beyond_what_a_tag_could_say_is_refused_by_field(name):
    header = ChunkHeader(0, 1, 2, tied=True, step=1, request=1)
    message = chunk_to_message(a_chunk(), header)
    setattr(message, name, 2**63 - 1)
    with pytest.raises(TrajectoryError, match=name):
        message_to_chunk(message)


@pytest.mark.skipif(TYPED is None, reason='vla_interfaces is not built')
def test_a_sender_that_knows_of_one_request_alone_may_leave_the_field_out():
    message = chunk_to_message(a_chunk(), ChunkHeader(0, 1, 2, tied=True))
    message.max_open_requests = 0
    assert message_to_chunk(message)[1].open_requests == 1
