"""A short run of benchmark/soak.py on the real graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

BENCHMARK = ROOT / 'benchmark'


@pytest.mark.graph
@pytest.mark.slow
def test_a_short_run_moves_through_its_faults_and_every_process_ends_well(tmp_path):
    result = tmp_path / 'soak.json'
    words = ['--minutes', '0.4', '--steps', '50', '--only', 'push', 'stray_chunks', 'policy_frozen']
    run = subprocess.run(
        [sys.executable, str(BENCHMARK / 'soak.py'), *words, '--json', str(result)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert result.exists(), run.stdout + run.stderr
    (session,) = json.loads(result.read_text())['figures']['sessions']
    assert session['commands'] > 1000
    assert session['chunks'] > 10
    assert {'start', 'push'} <= set(session['faults'])
    assert all(code == 0 for codes in session['exit_codes'].values() for code in codes)
    # What depends on how busy the machine is (`ticks`, `allowed_s`) is judged by the benchmark.
    held = [text for text in session['failures'] if 'traceback' in text or 'refused' in text]
    assert not held
    assert session['limits']['position']['violations'] == 0
