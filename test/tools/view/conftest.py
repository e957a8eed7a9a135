"""A recording for the tests of a view, on a ROS domain of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from discovery import announce_often, udp_profile  # noqa: F401 (a fixture)
from graph import isolate
from recorded_bag import ROBOT, first_turns, record
from tiny_policy import tiny_spec, write_tiny_policy

pytest.importorskip('viser', reason='viser and yourdfpy are the extra view')

isolate()
announce_often()


@pytest.fixture(scope='session')
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('view')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot = folder / 'tiny.yaml'
    robot.write_text(ROBOT, encoding='utf-8')
    return record(folder / 'first', bundle, robot, first_turns())
