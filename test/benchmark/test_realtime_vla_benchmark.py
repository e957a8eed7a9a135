"""benchmark/realtime_vla.py: turns, figures and refusals; what it measures against needs a GPU.

A stand-in has the interface of theirs, and takes longer than a tiny policy of ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import realtime_vla

STAND_IN = """
import time
import torch

class Pi05Inference:
    def __init__(self, checkpoint, num_views, chunk_size, discrete_state_input):
        assert not discrete_state_input and checkpoint['language_embeds'].shape == (48, 2048)
        self.shapes = (num_views, 28, 28, 3), (chunk_size, 32)
        self.weights = {'w': torch.empty(3)}
        self.buffers = {'decoder_style_attn': torch.empty(3), 'other': None}

    def forward(self, images, noise):
        assert tuple(images.shape) == self.shapes[0] and tuple(noise.shape) == self.shapes[1]
        assert images.dtype == noise.dtype == torch.bfloat16
        time.sleep(SECONDS)
        return noise + self.weights['w'].sum() + self.buffers['decoder_style_attn'].sum()
"""


@pytest.fixture(autouse=True)
def _imported_anew(monkeypatch):
    monkeypatch.delitem(sys.modules, 'pi05_infer', raising=False)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    # Our kernels are for a GPU here.
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    yield
    sys.modules.pop('pi05_infer', None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(realtime_vla, 'WARM_UP', 1)

    def run(seconds: str) -> int:
        (tmp_path / 'pi05_infer.py').write_text(STAND_IN.replace('SECONDS', seconds))
        out = ['--rounds', '3', '--json', str(tmp_path / 'out.json')]
        rehearsal = ['--device', 'cpu', '--size', 'tiny', '--views', '2']
        return realtime_vla.main([str(tmp_path), *out, *rehearsal])

    return run


def test_both_are_measured_by_turns_and_the_target_is_judged(run, tmp_path, capsys):
    assert run('0.5') == 0
    figures = json.loads((tmp_path / 'out.json').read_text())['figures']
    assert set(figures['sides']) == {'realtime-vla', 'ours, operators'}
    assert figures['sides']['realtime-vla']['ms']['count'] == 3
    assert figures['sides']['ours, operators']['of_theirs']['median'] < 1.0
    assert 'its kernels run on device cuda' in figures['why_no_triton']
    assert 'target: the faster of ours' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('seconds', 'why'),
    [
        (
            '0.0) or setattr(self, "weights", {"w": torch.tensor([float("nan")])}',
            'RuntimeError: realtime-vla: a number of its chunk is not finite',
        ),
        ('0.0) or next(iter([])', 'StopIteration'),
        (
            '0.0); import no_such_package #',
            "ModuleNotFoundError: No module named 'no_such_package'",
        ),
    ],
    ids=['not finite', 'fails', 'lacks a package'],
)
def test_whatever_theirs_end_with_ours_are_written(run, tmp_path, capsys, seconds, why):
    assert run(seconds) == 1
    figures = json.loads((tmp_path / 'out.json').read_text())['figures']
    assert set(figures['sides']) == {'ours, operators'}
    assert figures['sides']['ours, operators']['ms']['count'] == 3
    assert figures['why_not_theirs'] == why
    said = capsys.readouterr().out
    assert f'realtime-vla: {why}' in said and 'not measured (at most 1)' in said


def test_our_sides_are_reported_as_a_part_of_theirs():
    found = realtime_vla.figures_of({'realtime-vla': np.full(3, 4.0), 'ours': np.full(3, 2.0)})
    assert found['ours']['of_theirs']['median'] == 0.5
    assert 'of_theirs' not in found['realtime-vla']


def test_without_theirs_it_says_so(tmp_path: Path, capsys):
    assert realtime_vla.main([str(tmp_path), '--device', 'cpu', '--size', 'tiny']) == 2
    assert 'no pi05_infer.py; give a checkout of realtime-vla' in capsys.readouterr().err
