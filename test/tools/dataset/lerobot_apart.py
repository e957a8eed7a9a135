"""LeRobot's own loader, in an environment of its own, whose Python a variable names.

VLA_RUNTIME_LEROBOT_PYTHON: `pip install 'lerobot[dataset]==0.6.1'`, of Python 3.12.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

LEROBOT = os.environ.get('VLA_RUNTIME_LEROBOT_PYTHON')
needs_lerobot = pytest.mark.skipif(
    not LEROBOT, reason='VLA_RUNTIME_LEROBOT_PYTHON names no Python with LeRobot'
)


def read_by_lerobot(folder: Path) -> dict[str, Any]:
    """What the loader gives of a data set."""
    # Variables of this environment lead the other Python astray.
    kept = {'PATH', 'HOME', 'LANG', 'TMPDIR'}
    environment = {name: value for name, value in os.environ.items() if name in kept}
    done = subprocess.run(
        [str(LEROBOT), str(Path(__file__).with_name('lerobot_reader.py')), str(folder)],
        capture_output=True,
        text=True,
        env=environment | {'HF_HUB_OFFLINE': '1'},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
