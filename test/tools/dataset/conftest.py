"""Robot that the tests of data sets share, and how they read one."""

from pathlib import Path

import pytest


@pytest.fixture(scope='session')
def robot_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dataset_bag import ROBOT

    path = tmp_path_factory.mktemp('robot') / 'small.yaml'
    path.write_text(ROBOT, encoding='utf-8')
    return path
