"""Bundle, robot and recordings that the tests of a replay share."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_bag import ROBOT, first_turns, record
from tiny_policy import tiny_spec, write_tiny_policy


@pytest.fixture(scope='session')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', spec)


@pytest.fixture(scope='session')
def robot_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('robot') / 'tiny.yaml'
    path.write_text(ROBOT, encoding='utf-8')
    return path


@pytest.fixture(scope='session')
def recording(tmp_path_factory: pytest.TempPathFactory, bundle: Path, robot_file: Path) -> Path:
    return record(tmp_path_factory.mktemp('bags') / 'first', bundle, robot_file, first_turns())
