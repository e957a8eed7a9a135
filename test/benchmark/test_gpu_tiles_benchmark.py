"""benchmark/gpu_tiles.py, its kernels interpreted on a CPU: every kernel runs in other tiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from triton_package import interpreted, needs_triton  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmark'))

import gpu_tiles

TINY = ['--device', 'cpu', '--size', 'tiny', '--jobs', '0']


def test_every_kernel_is_tried_for_one_row_and_two_its_own_tiles_first():
    found = gpu_tiles.candidates(gpu_tiles.KERNELS)
    firsts = [one[:2] for one in found if not one.tiles]
    assert firsts == [(kernel, rows) for kernel in gpu_tiles.KERNELS for rows in (1, 2)]
    assert len({str(one) for one in found}) == len(found)


@needs_triton
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize(
    'kernels',
    [['gated'], pytest.param(['project', 'attend', 'out', 'down'], marks=pytest.mark.slow)],
    ids=['one', 'the others'],
)
def test_what_runs_is_timed_and_what_does_not_is_named(kernels, tmp_path, monkeypatch, capsys):
    def of(kernel):
        yield {'QUERIES': 16, 'KEYS': 16} if kernel == 'attend' else {'INNER': 16, 'OUTPUTS': 16}
        if kernel == 'gated':
            # No power of 2.
            yield {'GATE_PAIRS': 24}

    monkeypatch.setattr(gpu_tiles, '_tiles_of', of)
    out = tmp_path / 'tiles.json'
    assert gpu_tiles.main([*TINY, '--kernels', *kernels, '--json', str(out)]) == 0
    figures = json.loads(out.read_text())['figures']
    assert len(figures['tiles']) == 2 * 2 * len(kernels)
    assert len(figures['left_out']) == 2 * kernels.count('gated')
    assert all("'GATE_PAIRS': 24" in name for name in figures['left_out'])
    assert f'{kernels[-1]}, 2 row(s)' in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_tiles, 'device_fault', lambda device: 'no CUDA device answers here')
    assert gpu_tiles.main([]) == 2
    assert 'no CUDA device answers here' in capsys.readouterr().err
