"""Launch tests: the package's launch files run by the real `launch`, with the real nodes.

`launch_ros`, `launch_testing` and `launch_pytest` come with an installed ROS 2 and are not on the
package index, so every module here is skipped in an environment of wheels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from discovery import announce_often, udp_profile  # noqa: F401 (a fixture)
from graph import isolate

isolate()
announce_often()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Give the environment back: `launch` runs in this process and sets variables in it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
