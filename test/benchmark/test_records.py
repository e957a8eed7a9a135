"""Records of benchmarks: the command, the commit, and the file that they go to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

from parts import measurement


@pytest.mark.parametrize('typed', ['benchmark/kernels.py', 'kernels.py', './kernels.py'])
def test_the_command_is_that_of_the_projects_root(tmp_path, monkeypatch, typed):
    script = ROOT / 'benchmark' / 'kernels.py'
    monkeypatch.chdir(script.parent if '/' not in typed.removeprefix('./') else script.parents[1])
    monkeypatch.setattr(sys, 'argv', [typed, '--json', 'x.json'])
    written = measurement.write_result('kernels', {}, (), tmp_path / 'x.json')
    assert json.loads(written.read_text())['command'] == 'python benchmark/kernels.py --json x.json'


@pytest.mark.skipif(shutil.which('git') is None, reason='git is not installed')
def test_the_commit_is_that_of_the_checkout_and_says_whether_it_was_changed(tmp_path, monkeypatch):
    results = tmp_path / 'results'
    results.mkdir()
    monkeypatch.setattr(measurement, 'RESULTS', results)
    # Whatever this test itself is run from.
    monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
    assert measurement.commit() is None
    (results / 'x').write_text('1')
    who = ['-c', 'user.name=x', '-c', 'user.email=x']
    for words in (['init', '-q'], ['add', '.'], [*who, 'commit', '-q', '-m', 'x']):
        subprocess.run(['git', '-C', str(results), *words], check=True)
    clean = measurement.commit()
    assert re.fullmatch('[0-9a-f]{7,}', clean)
    (results / 'x').write_text('2')
    assert measurement.commit() == clean + '+'
