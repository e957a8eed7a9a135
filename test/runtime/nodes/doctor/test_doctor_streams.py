"""How often something came while the doctor listened: gaps, streams that stop, leaders."""

from __future__ import annotations

from functools import partial

import pytest
from paths import ROOT
from sensor_msgs.msg import JointState, Joy

from vla_runtime.nodes.doctor import topics
from vla_runtime.nodes.doctor.findings import Finding, problem
from vla_runtime.nodes.doctor.joints import leader_findings
from vla_runtime.nodes.doctor.streams import Source, Stream, subscription_qos
from vla_runtime.nodes.doctor.topics import OLDEST_STATE_S, Pace, pace_findings
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import (
    JointStateTopic,
    LeaderButton,
    LeaderJoint,
    RobotCamera,
    RobotLeader,
)

BAD = partial(problem, 'topics', 'it')
LISTENED_S = 3.0
STATES = JointStateTopic('joint_states')
CAMERA = RobotCamera('wrist', 'wrist/image', 'raw')
HOLDS = Pace(gap_s=(OLDEST_STATE_S, 'the robot holds (max_state_age_s)'))


def heard(
    rate_hz: float, source: Source = STATES, until_s: float = LISTENED_S, begin_s: float = 100.0
) -> Stream:
    """A stream of this rate from 0.1 s to `until_s` of the listening."""
    stream = Stream('/it', source, JointState, subscription_qos(source), newest=JointState())
    count = int((until_s - 0.1) * rate_hz) + 1
    stream.arrivals_s = [begin_s + 0.1 + index / rate_hz for index in range(count)]
    stream.sent_at_s = [one + 1e9 for one in stream.arrivals_s]
    stream.ended_s = begin_s + LISTENED_S
    return stream


def texts(stream: Stream, pace: Pace) -> list[str]:
    found: list[Finding] = list(pace_findings(stream, BAD, pace))
    assert all(one.mend for one in found)
    return [one.text for one in found]


@pytest.mark.parametrize('rate_hz', [8.0, 30.0, 500.0])
def test_joint_states_that_come_often_enough_are_well(rate_hz: float) -> None:
    stream = heard(rate_hz)
    assert texts(stream, HOLDS) == [] and stream.rate_hz == pytest.approx(rate_hz)


def test_joint_states_that_are_too_rare_hold_the_robot() -> None:
    (text,) = texts(heard(2.0), HOLDS)
    assert '0.50 s' in text and 'max_state_age_s' in text and '0.2 s' in text


def test_one_gap_in_good_joint_states_is_found() -> None:
    stream = heard(100.0)
    del stream.arrivals_s[100:130], stream.sent_at_s[100:130]
    (text,) = texts(stream, HOLDS)
    assert '0.31 s' in text


def test_a_doctor_that_stood_still_is_no_gap_of_the_driver() -> None:
    stream = heard(100.0)
    stalled_s = stream.arrivals_s[130]
    stream.arrivals_s[100:130] = [stalled_s] * 30
    assert texts(stream, HOLDS) == []


@pytest.mark.parametrize('source', [STATES, CAMERA])
def test_what_has_stopped_is_found_and_its_rate_is_of_the_time_listened(source: Source) -> None:
    stream = heard(20.0, source, until_s=1.0)
    pace = HOLDS if source is STATES else Pace(rate_hz=(20.0, 'the robot file says'))
    (text,) = texts(stream, pace)
    assert 'has stopped' in text and '2.0 s' in text
    assert stream.rate_hz == pytest.approx(6.3, abs=0.3)


def test_a_slow_stream_between_two_messages_has_not_stopped() -> None:
    assert texts(heard(1.0, CAMERA), Pace(rate_hz=(1.0, 'the robot file says'))) == []


def test_a_button_that_the_joystick_does_not_have_is_found() -> None:
    button = LeaderButton('joy', 4)
    stream = Stream('/joy', button, Joy, subscription_qos(button), newest=Joy(buttons=[0, 1]))
    (found,) = topics._content(stream, BAD)
    assert '2 buttons' in found.text and 'number 4' in found.text
    stream.newest = Joy(buttons=[0] * 5)
    assert list(topics._content(stream, BAD)) == []


def test_joints_that_a_leader_does_not_say_are_named() -> None:
    robot = load_robot(ROOT / 'config' / 'robots' / 'tabletop.yaml')
    joints = (LeaderJoint('shoulder_pan'), LeaderJoint('elbow_flex', name='elbow'))
    leader = RobotLeader('leader/joint_states', joints)
    stream = heard(50.0, leader)
    stream.names = {'shoulder_pan': 0.0, 'elbow_flex': 0.0}
    (found,) = leader_findings(robot, leader, stream)
    assert found.level == 'problem' and found.text.startswith('elbow not in')
    stream.names['elbow'] = 0.0
    assert leader_findings(robot, leader, stream) == []
