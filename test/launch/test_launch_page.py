"""The launch test that docs/howto/testing.md shows passes as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks
from paths import ROOT

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)

pytestmark = pytest.mark.graph


@pytest.mark.skipif(
    not (ROOT / 'engines' / 'demo' / 'policy.yaml').is_file(),
    reason='this checkout has no engines/demo',
)
def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    (example,) = blocks('docs/howto/testing.md', 'python')
    file = tmp_path / 'test_example.py'
    file.write_text(example, encoding='utf-8')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', str(file)],
        cwd=tmp_path,
        # `colcon test` gives its arguments for pytest by this variable.
        env={**os.environ, 'PYTEST_ADDOPTS': ''},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '1 passed' in done.stdout
