"""benchmark/gpu_persistent.py, its kernels interpreted on a CPU: forms are compared, and named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from triton_package import interpreted, needs_triton  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmark'))

import gpu_persistent

TINY = ['--device', 'cpu', '--size', 'tiny', '--jobs', '0', '--budget-s', '3600']


def test_both_kernels_as_they_are_come_first_and_no_form_twice():
    found = gpu_persistent.forms(quick=False)
    assert [form.module for form in found[:2]] == [gpu_persistent.EIGHT, gpu_persistent.ONE]
    assert not any(form.tiles for form in found[:2])
    assert len({form.name for form in found}) == len(found)


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
def test_a_form_with_wrong_numbers_is_named(tmp_path, monkeypatch, capsys):
    from vla_runtime.families.blocks import triton_persistent

    monkeypatch.setattr(gpu_persistent, 'STEPS', 1)
    monkeypatch.setattr(gpu_persistent, 'FORM_S', 600.0)
    monkeypatch.setattr(gpu_persistent, 'TWO_ROWS', [])
    monkeypatch.setattr(triton_persistent, '_multiprocessors', lambda device: 1)
    for name in ('INNER', 'GATE_PAIRS', 'DOWN_OUTPUTS', 'DOWN_INPUTS', 'KEYS'):
        monkeypatch.setattr(triton_persistent, name, 16)
    out = tmp_path / 'out.json'
    assert gpu_persistent.main([*TINY, '--quick', '--json', str(out)]) == 0
    forms = json.loads(out.read_text())['figures']['forms']
    assert forms['triton_persistent, 1 row(s)']['fault'] == ''

    real = triton_persistent.PersistentExpert.load

    def one_key_too_few(self, *past):
        real(self, *past)
        self._own.lengths -= 1

    monkeypatch.setattr(triton_persistent.PersistentExpert, 'load', one_key_too_few)
    assert gpu_persistent.main([*TINY, '--quick', '--json', str(out)]) == 1
    assert 'WRONG: triton_persistent, 1 row(s)' in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_persistent, 'device_fault', lambda device: 'no CUDA device here')
    assert gpu_persistent.main([]) == 2
    assert 'no CUDA device here' in capsys.readouterr().err
