"""`benchmark/gpu_tensorrt.py` as far as a CPU goes: a tiny policy on a fake GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from int8_bundles import needs_int8
from paths import ROOT
from tensorrt_machine import Machine
from thorough import thorough_but

sys.path.insert(0, str(ROOT / 'benchmark'))

import gpu_tensorrt
from parts.random_policy import sized_dims

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    """A fake GPU with TensorRT, for which a tiny policy stands in for the large one."""
    tiny = replace(sized_dims('pi05', 'tiny', 2), prompt_length=160)
    monkeypatch.setattr(gpu_tensorrt, 'dims_of', lambda size: tiny)
    return Machine(monkeypatch, tmp_path, name='NVIDIA H200', total_bytes=8192 * MIB)


def run(folder: Path, *options: str) -> int:
    return gpu_tensorrt.main([str(folder), '--repeats', '1', *options])


@pytest.mark.parametrize(
    'precision', thorough_but(['bfloat16'], ['bfloat16', pytest.param('int8', marks=needs_int8)])
)
def test_a_policy_is_made_built_compared_and_timed_and_made_once(machine, tmp_path, precision):
    out = tmp_path / 'figures.json'
    assert run(tmp_path / 'work', '--precision', precision, '--json', str(out)) == 0
    figures = json.loads(out.read_text())['figures']
    for rows in ('1 row(s)', '2 row(s)'):
        found = figures['tensorrt'][rows]
        assert (found['backend'], found['precision']) == ('tensorrt', precision)
        assert set(found['milliseconds']) == {'miss', 'one new view', 'hit'}
        assert set(found['cuda_graph'].values()) == {'captured'}
    assert len(figures['receipt']['chunks']) > 0
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / 'work').rglob('*.onnx')}
    assert made and run(tmp_path / 'work', '--precision', precision) == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_engines_that_compute_something_else_end_in_1(machine, tmp_path, capsys):
    machine.trt.distort = ('velocity', 0.5)
    assert run(tmp_path / 'work', '--precision', 'float32') == 1
    assert 'FAILED' in capsys.readouterr().err
