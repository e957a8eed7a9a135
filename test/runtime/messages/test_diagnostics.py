"""Conditions as messages, and texts that are not said too often."""

import pytest
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.serialization import deserialize_message, serialize_message

from vla_runtime.messages.diagnostics import Level, StatusItem, Throttle, to_message, values_of


def test_condition_becomes_a_status_under_the_nodes_name():
    values = {'count': 3, 'ratio': 1 / 3, 'on': True, 'stamp_ns': 1_732_000_000_123_456_789}
    condition = StatusItem('camera top', Level.WARN, 'late', values)
    message = to_message(
        [condition], node='/cell/vla_policy', hardware='so101', stamp=Time(sec=5, nanosec=6)
    )
    message = deserialize_message(serialize_message(message), DiagnosticArray)
    assert message.header.stamp == Time(sec=5, nanosec=6)
    (status,) = message.status
    assert status.level == DiagnosticStatus.WARN
    assert (status.name, status.message) == ('/cell/vla_policy: camera top', 'late')
    assert status.hardware_id == 'so101'
    assert values_of(status) == {
        'count': '3',
        'ratio': '0.3333333333333333',
        'on': 'true',
        'stamp_ns': '1732000000123456789',
    }


def test_text_passes_once_a_period_whatever_its_numbers():
    throttle = Throttle(10.0)
    assert throttle.passes('camera: 0.5 s old', 100.0)
    assert not throttle.passes('camera: 0.7 s old', 105.0)
    assert throttle.passes('joint missing', 105.0)
    assert not throttle.passes('camera: 9.9 s old', 109.9)
    assert throttle.passes('camera: 1.0 s old', 110.0)


@pytest.mark.parametrize(
    'numbers', [('11.7', '12'), ('0.5', '-0.5'), ('1e-05', '3'), ('nan', '0.1'), ('+2', '1e+10')]
)
def test_a_number_of_another_shape_does_not_make_a_text_new(numbers):
    throttle = Throttle(10.0)
    assert [throttle.passes(f'asked {number} s ago', 100.0) for number in numbers] == [True, False]
    assert [throttle.passes(f'age={number}, late', 100.0) for number in numbers] == [True, False]


def test_a_number_in_a_name_does():
    throttle = Throttle(10.0)
    names = (
        "joint 'wrist_1' is missing",
        "joint 'wrist_2' is missing",
        'camera top2',
        'camera top3',
    )
    assert all(throttle.passes(name, 100.0) for name in names)


def test_texts_that_come_in_turn_pass_once_a_period_each():
    throttle = Throttle(10.0)
    passed = [throttle.passes(text, 0.1 * i) for i in range(50) for text in ('a', 'b')]
    assert sum(passed) == 2
