"""What a view knows of a robot, from messages alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from recorded_bag import ROBOT
from sensor_msgs.msg import JointState
from std_msgs.msg import String

from vla_runtime.messages.diagnostics import Level, StatusItem, to_message
from vla_runtime.messages.trajectories import chunk_to_message, ns_to_stamp, plan_to_message
from vla_runtime.nodes.polled_topics import read_items
from vla_runtime.nodes.robot_report import robot_reports
from vla_runtime.nodes.twins import Claim, node_item
from vla_runtime.robot.file import read_robot
from vla_runtime.types import ActionChunk, ChunkHeader, PlanRequest
from vla_tools.view import wire
from vla_tools.view.moment import constants, moment
from vla_tools.view.state import SHOWN_CHUNKS, STRIPS, ViewState

NOW_NS = 1_700_000_000_000_000_000
NAMES = ('shoulder', 'elbow', 'gripper')
STEP_NS = 100_000_000
REPORT = {
    'number': 7,
    'ms.total': 31.5,
    'ms.prefix': 12.0,
    'cache.camera.top': 'hit',
    'cache.camera.wrist': 'miss',
    'cache.rows': 'miss miss',
    'beta': 1.5,
    'denoise_steps': 10,
}


@pytest.fixture
def state(tmp_path) -> ViewState:
    return ViewState('/left', read_robot(ROBOT, tmp_path / 'tiny.yaml', lambda _: None))


def plan(rows: int = 8) -> Any:
    values = 0.1 * np.arange(rows)[:, None] + np.zeros((rows, len(NAMES)))
    return plan_to_message(
        PlanRequest(values, NAMES, ('position',) * 3, STEP_NS * 1e-9, NOW_NS, 1, 2, request=3)
    )


def chunk(stamp_ns: int, number: int = 0) -> Any:
    actions = ActionChunk(
        np.zeros((4, 3)), NAMES, ('position',) * 3, STEP_NS * 1e-9, np.zeros((4, 0))
    )
    return chunk_to_message(actions, ChunkHeader(stamp_ns, 1, number))


def said(item: str, level: Level, text: str, node: str = '/left/vla_executor', **values):
    return to_message(
        [StatusItem(item, level, text, values)], node=node, hardware='', stamp=ns_to_stamp(0)
    )


def states(**positions: float) -> JointState:
    message = JointState(name=list(positions), position=list(positions.values()))
    message.header.stamp = ns_to_stamp(NOW_NS)
    return message


def test_joints_have_positions_limits_and_committed_setpoints_in_the_robots_units(state):
    state.take_joints(states(shoulder=90.0, elbow=0.5, gripper=0.0), NOW_NS)
    state.take(wire.PLAN, plan(), NOW_NS)
    shown = moment(state, NOW_NS + 3 * STEP_NS + 1)['joints']
    assert [joint['at'] for joint in shown] == [90.0, 0.5, 0.0]
    assert [joint['to'] for joint in shown] == [pytest.approx(0.3)] * 3
    first = constants(state)['joints'][0]
    assert (first['unit'], first['lower'], first['upper']) == ('deg', -170.0, 170.0)


def test_a_plan_that_is_over_is_committed_no_more(state):
    state.take(wire.PLAN, plan(), NOW_NS)
    assert state.plan_at(NOW_NS) is not None
    late_ns = NOW_NS + 20 * STEP_NS
    assert state.plan_at(late_ns) is None
    assert [joint['to'] for joint in moment(state, late_ns)['joints']] == [None] * 3


def test_a_request_without_a_plan_commits_nothing(state):
    state.take(wire.PLAN, plan(), NOW_NS)
    state.take(wire.PLAN, plan(rows=0), NOW_NS)
    assert state.plan_at(NOW_NS) is None


def test_the_newest_chunks_are_kept_each_once(state):
    for number in range(SHOWN_CHUNKS + 3):
        for _ in range(2):
            state.take(wire.CHUNK, chunk(NOW_NS + number, number), NOW_NS)
    assert [one.number for one in state.chunks] == [*range(3, SHOWN_CHUNKS + 3)]


def test_an_inference_gives_latency_and_the_share_that_the_cache_found(state):
    message = to_message(
        [StatusItem('inference report', Level.OK, '', REPORT)],
        node='/left/vla_policy',
        hardware='',
        stamp=ns_to_stamp(0),
    )
    state.take(wire.INFERENCE, message, NOW_NS)
    fresh = {name: value for name, _, value, _ in state.fresh_points()}
    assert fresh == {'latency': 31.5, 'cache': 25.0}
    assert state.fresh_points() == []
    assert moment(state, NOW_NS)['beta'] == 1.5


def test_a_late_handover_is_marked(state):
    seam = {
        'stamp_ns': NOW_NS,
        'chunk': 4,
        'delay_steps': 3,
        'late': True,
        'from_hold': False,
        'position_jump': 0.1,
        'velocity_jump': 0.2,
    }
    state.take(wire.HANDOVER, said('seam', Level.WARN, 'late', **seam), NOW_NS)
    assert state.fresh_points() == [('delay', NOW_NS * 1e-9, 3.0, True)]


def test_why_the_robot_stopped_comes_with_the_page_that_mends_it(state):
    values = {'mode': 'stopped', 'kind': 'hold', 'reason': 'tracking_error'}
    stopped = StatusItem('control', Level.ERROR, 'stopped: tracking_error', values)
    who = node_item(Claim('/left/vla_executor', 'process 1', 1, 'active'))
    answered = StatusItem('chunks', Level.OK, '', {'publishers': 1})
    message = to_message(
        [stopped, who, answered], node='/left/vla_executor', hardware='', stamp=ns_to_stamp(0)
    )
    (report,) = robot_reports(read_items(message, 1.0), (), '/left')
    state.take_report(report, NOW_NS)
    shown = moment(state, NOW_NS)
    assert (shown['mode'], shown['reason']) == ('stopped', 'tracking_error')
    assert shown['remedy'] == 'docs/howto/why_stopped.md#a-person-has-to-act'
    assert [node['lifecycle'] for node in shown['nodes']] == ['active']


@pytest.mark.parametrize('role', [*wire.TOPICS])
def test_messages_of_other_programs_change_nothing(state, role):
    kind = wire.TOPICS[role].message_type()
    message = {
        DiagnosticArray: said('other', Level.OK, 'text'),
        String: String(data='{"format": 99}'),
    }.get(kind, kind())
    before = constants(state)
    state.take(role, message, NOW_NS)
    state.take_report(None, NOW_NS)
    assert state.plan_at(NOW_NS) is None and not state.chunks
    assert state.fresh_points() == [] and constants(state) == before


def test_numbers_that_are_none_never_reach_a_page(state):
    state.take_joints(states(shoulder=math.nan, elbow=math.inf, gripper=1.0), NOW_NS)
    assert [joint['at'] for joint in moment(state, NOW_NS)['joints']] == [None, None, 1.0]


def test_the_age_of_a_frame_is_that_of_its_stamp_unless_another_clock_gave_it(state):
    state.take_frame('wrist', NOW_NS, NOW_NS + 30_000_000, 29.7)
    state.take_frame('overhead', 5, NOW_NS, None)
    shown = {camera.name: camera.age_ms(NOW_NS + 50_000_000) for camera in state.cameras.values()}
    assert shown == {'wrist': pytest.approx(50.0), 'overhead': pytest.approx(50.0)}


def test_without_a_robot_file_the_joints_are_shown_as_they_come():
    state = ViewState('')
    before = state.version
    state.take_joints(states(a=1.0, b=2.0), NOW_NS)
    assert state.version > before
    assert [joint['name'] for joint in constants(state)['joints']] == ['a', 'b']
    assert [joint['at'] for joint in moment(state, NOW_NS)['joints']] == [1.0, 2.0]
    assert set(constants(state)['strips']) == set(STRIPS)
