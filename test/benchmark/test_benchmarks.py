"""Every benchmark says what it does and takes, what it cannot run without, and what it ran from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

from parts import measurement

STARTERS = sorted(path.name for path in (ROOT / 'benchmark').glob('*.py'))
# `lerobot_turns.py` measures on a CPU too.
ON_A_GPU = ('gpu.py', 'gpu_all.py', 'gpu_tensorrt.py', 'realtime_vla.py')


def started(name: str, *arguments: str, before: str = '') -> subprocess.CompletedProcess[str]:
    """Run a benchmark as a user does; `before` is Python code that runs first."""
    path = str(ROOT / 'benchmark' / name)
    code = (
        f'import runpy, sys; sys.argv = {[path, *arguments]!r}; '
        f'sys.path.insert(0, {str(ROOT / "benchmark")!r}); {before}\n'
        f'runpy.run_path({path!r}, run_name="__main__")'
    )
    command = [sys.executable, '-c', code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize('name', STARTERS)
def test_help_begins_with_what_is_measured(name: str) -> None:
    done = started(name, '--help')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f'usage: {name}') and '--' in done.stdout


def test_the_page_names_each() -> None:
    page = (ROOT / 'benchmark' / 'README.md').read_text(encoding='utf-8')
    assert len(STARTERS) > 5
    assert [name for name in STARTERS if f'`{name}' not in page] == []


@pytest.mark.parametrize('name', ON_A_GPU)
def test_without_a_gpu_it_says_so_and_ends_with_2(name: str, tmp_path) -> None:
    driver = "from vla_runtime.engines import preflight; preflight._DRIVER = 'libcuda-absent.so'"
    (tmp_path / 'pi05_infer.py').write_text('')
    words = {'gpu.py': [], 'gpu_tensorrt.py': ['run', str(tmp_path)]}.get(name, [str(tmp_path)])
    done = started(name, *words, before=driver)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith('error: ') and 'CUDA' in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('typed', ['benchmark/soak.py', 'soak.py', './soak.py'])
def test_the_command_is_that_of_the_projects_root(tmp_path, monkeypatch, typed):
    script = ROOT / 'benchmark' / 'soak.py'
    monkeypatch.chdir(script.parent if '/' not in typed.removeprefix('./') else script.parents[1])
    monkeypatch.setattr(sys, 'argv', [typed, '--json', 'x.json'])
    written = measurement.write_result('soak', {}, (), tmp_path / 'x.json')
    assert json.loads(written.read_text())['command'] == 'python benchmark/soak.py --json x.json'


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
