"""What `vla_runtime status` makes of the nodes' status: right, wrong and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vla_runtime.nodes.heard_status import HeardItem
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


def test_two_robots_are_told_apart_and_one_can_be_asked_for() -> None:
    left, right = ('/left/vla_executor', '/right/vla_executor')
    heard = [who(left), control(node=left), who(right), control('stopped', 2, right, **IDLE)]
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
