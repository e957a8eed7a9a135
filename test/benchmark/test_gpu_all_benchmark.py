"""benchmark/gpu_all.py: what is run with what is given, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import gpu
import gpu_all
import gpu_tensorrt
import lerobot_turns
import realtime_vla

from vla_runtime.engines import preflight

GIVEN = ['--lerobot-python', 'lr/bin/python', '--realtime-vla', 'rv']


def planned(monkeypatch, *given: str, missing: str | None = None):
    monkeypatch.setattr(preflight, 'missing_package', lambda *names: missing)
    return gpu_all.commands(gpu_all._arguments(['out', *given]))


def test_with_everything_given_nothing_is_left_out(monkeypatch):
    found, left_out = planned(monkeypatch, *GIVEN)
    assert list(found) == [
        'gpu',
        'tensorrt bfloat16',
        'tensorrt int8',
        'lerobot',
        'realtime-vla',
    ]
    assert not left_out


def test_the_commands_are_those_that_the_scripts_take(monkeypatch):
    found, _ = planned(monkeypatch, *GIVEN)
    for name in ('tensorrt bfloat16', 'tensorrt int8'):
        assert gpu_tensorrt._arguments(found[name][1:]).work == Path('out/tensorrt')
    assert lerobot_turns.parse_arguments(found['lerobot'][1:]).device == 'cuda'
    assert realtime_vla._arguments(found['realtime-vla'][1:]).repository == Path('rv')
    assert all((ROOT / 'benchmark' / script).is_file() for script, *_ in found.values())


def test_what_is_missing_is_named(monkeypatch):
    found, left_out = planned(monkeypatch, missing='tensorrt')
    assert list(found) == ['gpu']
    assert left_out['tensorrt'] == "needs the Python package 'tensorrt'"
    assert set(left_out) == {'tensorrt', 'lerobot', 'realtime-vla'}


@pytest.mark.parametrize(('codes', 'code'), [((0, 0), 0), ((1, 0), 1)])
def test_a_failure_does_not_stop_the_others(codes, code, tmp_path, monkeypatch, capsys):
    steps = {
        name: [str(script), str(number)]
        for name, number, script in zip('ab', codes, (tmp_path / 'end.py',) * 2, strict=True)
    }
    (tmp_path / 'end.py').write_text('import sys; sys.exit(int(sys.argv[1]))')
    monkeypatch.setattr(gpu_all, 'device_fault', lambda device: '')
    monkeypatch.setattr(gpu_all, 'commands', lambda arguments: (steps, {'c': 'needs more'}))
    assert gpu_all.main([str(tmp_path / 'out')]) == code
    said = capsys.readouterr().out
    assert 'b                  done' in said
    assert 'c                  left out: needs more' in said
    assert ('end.py ended with 1' in said) == bool(code)


def test_what_hangs_is_cut_off_with_all_that_it_started_and_the_others_run(
    tmp_path, monkeypatch, capsys
):
    pid, written = tmp_path / 'pid', tmp_path / 'written'
    (tmp_path / 'hang.py').write_text(
        'import os, subprocess, sys, time\n'
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"with open({str(written)!r}, 'w') as file:\n"
        '    file.write(str(child.pid))\n'
        f'os.rename({str(written)!r}, {str(pid)!r})\n'
        'time.sleep(600)\n'
    )
    (tmp_path / 'end.py').write_text('')
    steps = {name: [str(tmp_path / f'{name}.py')] for name in ('hang', 'end')}

    class Begun(subprocess.Popen):
        """Its limit begins when it hangs: a busy machine takes seconds to start Python."""

        def wait(self, timeout=None):
            if not str(self.args[1]).endswith('hang.py'):
                return super().wait()
            while timeout is not None and not pid.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_all.subprocess, 'Popen', Begun)
    monkeypatch.setattr(gpu_all, 'device_fault', lambda device: '')
    monkeypatch.setattr(gpu_all, 'commands', lambda arguments: (steps, {}))
    assert gpu_all.main([str(tmp_path / 'out'), '--most-s', '3']) == 1
    said = capsys.readouterr().out
    assert 'hang.py was cut off after 3 s' in said
    assert 'end                done' in said
    stat, end_s = Path('/proc') / pid.read_text() / 'stat', time.monotonic() + 60.0
    while _runs(stat):
        assert time.monotonic() < end_s, 'its child goes on'
        time.sleep(0.01)


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(') ')[2][0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_command_has_a_limit(monkeypatch):
    found, _ = planned(monkeypatch, *GIVEN)
    assert {script for script, *_ in found.values()} == set(gpu_all.LIMITS_S)
    assert gpu_all.LIMITS_S['gpu.py'] > gpu.BUDGET_S + gpu.LAST_S
