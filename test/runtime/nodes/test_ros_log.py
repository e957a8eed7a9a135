"""What Python's logging gets reaches the ROS log."""

from __future__ import annotations

import logging

import pytest
from rclpy.logging import get_logger

from vla_runtime.nodes.node_runner import RosLogHandler


def test_warnings_and_errors_reach_the_ros_log(capfd: pytest.CaptureFixture[str]) -> None:
    source = logging.Logger('engine')
    source.addHandler(RosLogHandler(get_logger('a_node')))
    for name in ('info', 'warning', 'error', 'warning'):
        getattr(source, name)('%s of an engine', name)
    lines = [line for line in capfd.readouterr().err.splitlines() if '[a_node]' in line]
    assert [line.split()[0] for line in lines] == ['[WARN]', '[ERROR]', '[WARN]']
    assert all('of an engine' in line for line in lines)
