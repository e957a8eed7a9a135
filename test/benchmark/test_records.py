"""Records of benchmarks: the command, and the file that it goes to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import cpu_paths
import measurement


@pytest.mark.parametrize('typed', ['benchmark/kernels.py', 'kernels.py', './kernels.py'])
def test_the_command_is_that_of_the_projects_root(tmp_path, monkeypatch, typed):
    script = Path(measurement.__file__).parent / 'kernels.py'
    monkeypatch.chdir(script.parent if '/' not in typed.removeprefix('./') else script.parents[1])
    monkeypatch.setattr(sys, 'argv', [typed, '--json', 'x.json'])
    written = measurement.write_result('kernels', {}, (), tmp_path / 'x.json')
    assert json.loads(written.read_text())['command'] == 'python benchmark/kernels.py --json x.json'


@pytest.mark.parametrize(('words', 'name'), [([], 'cpu_paths'), (['--products'], 'cpu_products')])
def test_the_two_tables_of_cpu_paths_have_a_file_each(monkeypatch, words, name):
    asked = []
    monkeypatch.setattr(sys, 'argv', ['cpu_paths.py', '--policies', 'demo', *words])
    monkeypatch.setattr(cpu_paths, 'demo_observations', lambda bundle: ())
    monkeypatch.setattr(cpu_paths, 'load_policies', lambda *given: {})
    monkeypatch.setattr(cpu_paths, 'measure', lambda policies, rounds: {})
    monkeypatch.setattr(cpu_paths, 'write_result', lambda name, *given: asked.append(name))
    cpu_paths.main()
    assert asked == [name]
