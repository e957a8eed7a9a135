"""What `replay --rerun` writes is read by Rerun itself, with every inference in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vla_runtime.cli import main as program

pytest.importorskip('rerun', reason='rerun-sdk is an extra of its own')


def test_a_file_for_rerun_has_frames_chunks_and_latency(tmp_path, recording):
    path = tmp_path / 'replay.rrd'
    assert program.main(['replay', str(recording), '--rerun', str(path)]) == 0
    printed = subprocess.run(
        [sys.executable, '-m', 'rerun', 'rrd', 'print', '-vv', str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    entities = {'/cameras/top', '/cameras/wrist', '/joints/elbow/recorded', '/latency_ms/replayed'}
    assert {one for one in entities if one in printed} == entities
    assert 'ros_time' in printed
