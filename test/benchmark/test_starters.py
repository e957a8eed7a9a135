"""Every benchmark says what it does and takes, and what it cannot run without."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT

STARTERS = sorted(path.name for path in (ROOT / 'benchmark').glob('*.py'))
# These measure on a GPU alone; `gpu_tensorrt.py` and `lerobot_turns.py` prepare on any machine.
ON_A_GPU = ('gpu.py', 'gpu_all.py', 'realtime_vla.py')


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
    assert len(STARTERS) > 10
    assert [name for name in STARTERS if f'`{name}' not in page] == []


@pytest.mark.parametrize('name', ON_A_GPU)
def test_without_a_gpu_it_says_so_and_ends_with_2(name: str, tmp_path) -> None:
    driver = "from vla_runtime.engines import preflight; preflight._DRIVER = 'libcuda-absent.so'"
    (tmp_path / 'pi05_infer.py').write_text('')
    words = [str(tmp_path)] if name in ('gpu_all.py', 'realtime_vla.py') else []
    done = started(name, *words, before=driver)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith('error: ') and 'CUDA' in done.stderr
    assert len(done.stderr.splitlines()) == 1
