"""Tests of this room talk to ROS: each process on a domain of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from discovery import announce_often, udp_profile  # noqa: F401 (a fixture)
from graph import isolate
from tabletop_policy import write_tabletop_policy

isolate()
announce_often()


@pytest.fixture(scope='session')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy for the simulated tabletop robot, which no test changes."""
    return write_tabletop_policy(tmp_path_factory.mktemp('bundle') / 'tabletop')
