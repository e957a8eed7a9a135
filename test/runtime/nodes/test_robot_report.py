"""What `vla_runtime status` makes of the nodes' status: right, wrong and why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from paths import ROOT

from vla_runtime.execution.command import Reason
from vla_runtime.nodes.doctor.graph import node_findings
from vla_runtime.nodes.graph_faults import NOTHING_THERE
from vla_runtime.nodes.polled_topics import HeardItem
from vla_runtime.nodes.robot_report import NOTHING, RIGHT, WRONG, exit_code, robot_reports
from vla_runtime.nodes.twins import Claim, node_item

EXECUTOR, POLICY = '/vla_executor', '/vla_policy'


def item(node: str, name: str, text: str = 'fine', level: int = 0, **values: str) -> HeardItem:
    return HeardItem(node, name, level, text, values, 10.0)


def who(node: str, lifecycle: str = 'active', since_ns: int = 1, problem: str = '') -> HeardItem:
    said = node_item(Claim(node, 'process 1 on robot', since_ns, lifecycle), problem)
    values = {name: str(value).lower() for name, value in said.values.items()}
    return HeardItem(node, said.name, int(said.level), said.text, values, 10.0, values['since_ns'])


def control(text: str = 'executing', level: int = 0, node: str = EXECUTOR, **values: str) -> Any:
    given = {'mode': 'running', 'kind': 'track', 'reason': 'tracking'} | values
    return item(node, 'control', text, level, **given)


POLICY_ITEMS = (who(POLICY), item(POLICY, 'observation'))
IDLE = {'mode': 'idle', 'kind': 'idle', 'reason': 'not_started'}
HELD = {'kind': 'hold', 'reason': 'starved'}


@pytest.mark.parametrize(
    ('heard', 'code', 'state'),
    [
        ([control()], RIGHT, 'moving'),
        ([control('not started: call ~/start', **IDLE)], RIGHT, 'ready: call ~/start'),
        ([control('not started', 1, start_refused='motors', **IDLE)], WRONG, 'not started'),
        ([control('holding: late', 1, **HELD)], WRONG, 'held'),
        ([control('holding: slider', **(HELD | {'reason': 'speed'}))], WRONG, 'held'),
        ([control('waiting', **(HELD | {'reason': 'waiting_for_chunk'}))], RIGHT, 'held'),
        ([control('unconfigured', mode='inactive', kind='', reason='')], WRONG, 'not active'),
        ([control(), item(EXECUTOR, 'tick', 'late', 1)], RIGHT, 'moving'),
        ([control(), item(POLICY, 'camera top', 'gone', 2)], WRONG, 'moving'),
        ([control(), item(POLICY, 'requests', 'two executors', 1)], WRONG, 'moving'),
        ([control(), item(POLICY, 'camera top', 'repeats one picture', 1)], RIGHT, 'moving'),
    ],
)
def test_a_robot_is_right_that_moves_or_waits_for_a_start_alone(
    heard: list[HeardItem], code: int, state: str
) -> None:
    robots = robot_reports([who(EXECUTOR), *POLICY_ITEMS, *heard], [])
    assert [robot.state() for robot in robots] == [state]
    assert exit_code(robots) == code
    (robot,) = robots
    # Whatever is wrong is said, with the page that helps.
    assert bool(robot.why()) == bool(robot.remedy()) == (code == WRONG)
    assert robot.why() in '\n'.join(robot.lines(11.0))


@pytest.mark.parametrize(
    ('text', 'level', 'others', 'found'),
    [
        ('paused until ~/resume', 0, [], 'note'),
        ('paused until ~/resume; no controller is active', 1, [], 'problem'),
        ('paused until ~/resume', 0, [item(POLICY, 'camera top', 'gone', 2)], 'problem'),
    ],
)
def test_a_pause_alone_is_no_problem_of_the_doctor(
    text: str, level: int, others: list[HeardItem], found: str
) -> None:
    heard = [who(EXECUTOR), *POLICY_ITEMS, control(text, level, kind='hold', reason='paused')]
    (finding,) = node_findings(robot_reports([*heard, *others], []))
    assert finding.level == found and finding.mend
    assert (finding.text == text) == (not others)


def test_two_robots_are_told_apart_and_one_can_be_asked_for() -> None:
    left, right = ('/left/vla_executor', '/right/vla_executor')
    answered = {node: item(node, 'chunks', publishers='1') for node in (left, right)}
    heard = [who(left), control(node=left), who(right), control('stopped', 2, right, **IDLE)]
    heard += answered.values()
    robots = robot_reports(heard, [])
    assert [robot.namespace for robot in robots] == ['/left', '/right']
    assert [exit_code([robot]) for robot in robots] == [RIGHT, WRONG]
    assert exit_code(robots) == WRONG
    assert [robot.namespace for robot in robot_reports(heard, [], '/left')] == ['/left']
    assert exit_code(robot_reports(heard, [], '/middle')) == NOTHING


def test_a_node_that_says_nothing_is_named() -> None:
    (robot,) = robot_reports([who(EXECUTOR), control()], [POLICY, EXECUTOR])
    assert POLICY in robot.why() and EXECUTOR not in robot.why()


def test_others_on_the_topic_are_left_out() -> None:
    # Such as a controller manager's.
    assert not robot_reports([item('controller_manager', 'Controllers Activity', 'bad', 2)], [])


def test_two_nodes_of_one_name_are_both_shown() -> None:
    inactive = {'mode': 'inactive', 'kind': '', 'reason': ''}
    heard = [
        who(EXECUTOR, since_ns=1),
        replace(control(), since_ns='1'),
        who(EXECUTOR, 'unconfigured', 2),
        replace(control('unconfigured', **inactive), since_ns='2'),
    ]
    (robot,) = robot_reports(heard, [])
    shown = {
        node.claim.lifecycle: item.text
        for node in robot.nodes
        if node.claim is not None and (item := node.item('control')) is not None
    }
    assert shown == {'active': 'executing', 'unconfigured': 'unconfigured'}
    # The robot is what moves it.
    assert robot.is_moving and exit_code([robot]) == WRONG


def test_the_json_has_what_the_text_has() -> None:
    said = control('not started', 1, start_refused='motors', policy_waits='a camera', **IDLE)
    (robot,) = robot_reports([who(EXECUTOR), said, *POLICY_ITEMS], [])
    document = robot.as_json(11.0)
    assert document['start_refused'] == 'motors' and document['policy_waits'] == 'a camera'
    assert (document['mode'], document['reason']) == ('idle', 'not_started')
    first = document['nodes'][0]
    assert (first['name'], first['lifecycle']) == (EXECUTOR, 'active')
    (shown,) = (one for one in first['items'] if one['item'] == 'control')
    assert (shown['level'], shown['heard_s_ago']) == ('warning', 1.0)


@pytest.mark.parametrize(
    ('mode', 'level', 'text'),
    [
        ('idle', 0, 'not started: call ~/start'),
        ('idle', 1, 'not started; the motors are off'),
        ('stopped', 2, 'stopped: the policy has not answered'),
    ],
)
def test_a_robot_without_a_policy_is_not_ready(mode: str, level: int, text: str) -> None:
    said = control(text, level, **(IDLE | {'mode': mode}))
    alone = [who(EXECUTOR), said, item(EXECUTOR, 'chunks', publishers='0')]
    (robot,) = robot_reports(alone, [])
    assert (robot.state(), exit_code([robot])) == ('not started', WRONG)
    assert 'no policy node' in robot.why() and bool(robot.remedy())
    assert 'call ~/start' not in robot.why()
    # One that answers from another namespace is one.
    elsewhere = [*alone[:2], item(EXECUTOR, 'chunks', publishers='1')]
    assert exit_code(robot_reports(elsewhere, [])) == (WRONG if level else RIGHT)
    assert 'no policy node' not in robot_reports(elsewhere, [])[0].why()


def test_a_policy_that_is_not_active_yet_is_named() -> None:
    said = control('not started: call ~/start', **IDLE)
    (robot,) = robot_reports([who(EXECUTOR), said, who(POLICY, 'unconfigured')], [])
    assert exit_code([robot]) == WRONG
    assert POLICY in robot.why() and 'no policy node' not in robot.why()


def section(remedy: str) -> str:
    """Text of the section that a remedy leads to; fails where there is none."""
    page, _, anchor = remedy.partition('#')
    heading, found = '', []
    for line in (ROOT / page).read_text(encoding='utf-8').splitlines():
        if line.startswith('#'):
            words = re.sub(r'[^\w\- ]', '', line.lstrip('#').strip().lower())
            heading = words.strip().replace(' ', '-')
        if heading == anchor:
            found.append(line)
    assert found, remedy
    return '\n'.join(found)


def remedy_of(reason: str, **values: str) -> str:
    given = {'mode': 'running', 'kind': 'hold', 'reason': reason} | values
    (robot,) = robot_reports([who(EXECUTOR), control('bad', 2, **given), *POLICY_ITEMS], [])
    return robot.remedy()


WHY = 'docs/howto/why_stopped.md'
MEASURED = ('missing', 'stale', 'from_future', 'not_finite', 'implausible')
BY_ITSELF = [
    *(f'state_{name}' for name in MEASURED),
    *('speed_scaled_to_zero', 'step_from_measured', 'overrun'),
    *('tick_late', 'clock_jump', 'clock_stopped', 'clock_invalid'),
]
PERSON = [
    *('not_started', 'stopped', 'released', 'tracking_error', 'approach_timeout'),
    *('clamp_latch', 'state_doubled', 'internal_error'),
]
NO_CHUNK = 'docs/reference/messages.md#no-chunk-comes'


@pytest.mark.parametrize(
    ('reasons', 'expected'),
    [
        (BY_ITSELF, f'{WHY}#the-robot-goes-on-by-itself'),
        (PERSON, f'{WHY}#a-person-has-to-act'),
        (['starved', 'waiting_for_chunk', 'synchronous_wait'], NO_CHUNK),
        (['tracking', 'approaching', 'braking'], f'{WHY}#no-reason-and-no-motion'),
        (['controller'], 'docs/howto/ros2_control.md#what-the-executor-finds-out'),
    ],
)
def test_each_reason_leads_to_its_section(reasons: list[str], expected: str) -> None:
    assert {reason: remedy_of(reason) for reason in reasons} == dict.fromkeys(reasons, expected)
    text = section(expected)
    if expected.rpartition('#')[2] in ('a-person-has-to-act', 'the-robot-goes-on-by-itself'):
        assert [one for one in reasons if f'`{one}`' not in text and one != 'overrun'] == []


def test_no_reason_is_without_a_section() -> None:
    assert [reason for reason in Reason if '#' not in remedy_of(reason.value)] == []


def test_what_would_refuse_a_start_has_its_section() -> None:
    nothing = f'{NOTHING_THERE} (ROS_DOMAIN_ID 0): is its driver on?'
    cases = {
        'nothing-in-the-graph': {'start_refused': nothing},
        'start-is-refused': {'start_refused': 'the motors are off'},
        'no-chunk-comes': {'policy_waits': 'a camera'},
    }
    for anchor, values in cases.items():
        remedy = remedy_of('not_started', mode='idle', kind='idle', **values)
        assert remedy.rpartition('#')[2] == anchor
        section(remedy)
    # What the policy waits for is no remedy while a start would be refused besides.
    both = {'start_refused': 'the motors are off', 'policy_waits': 'a camera'}
    assert remedy_of('not_started', mode='idle', kind='idle', **both).endswith('#start-is-refused')
