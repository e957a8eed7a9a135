"""Recorded cases: what a bundle carries, and a robot that compares with numpy alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from tensorrt_machine import linked_copy, write_exported_policy

from vla_convert.export.onnx.cases import seeded_cases
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import CASES_FILE, ONNX_FOLDER
from vla_runtime.engines.recorded_cases import SAMPLE, Case, read_cases, sample
from vla_runtime.inference.denoise import flow_times

# A machine with a stand-in GPU, where nothing of ours can import what a robot lacks. The stand-in
# keeps the ONNX Runtime that it computes with.
ROBOT = """
import sys
from pathlib import Path
import fake_cuda, fake_tensorrt
for name in ('torch', 'onnx', 'onnxruntime'):
    sys.modules[name] = None
cuda = fake_cuda.FakeCuda()
trt = fake_tensorrt.FakeTensorRT('10.3.0', cuda)
sys.modules['tensorrt'], sys.modules['cuda.bindings.driver'] = trt, cuda
from vla_runtime.cli.main import main
bundle = sys.argv[1]
for arguments in (
    ['build', bundle, '--precision', 'float32'],
    ['verify', bundle, '--backend', 'tensorrt'],
):
    assert main(arguments) == 0, arguments
trt.distort = ('velocity', 1e-3)
assert main(['verify', bundle, '--backend', 'tensorrt']) == 1
"""


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('recorded') / 'policy')


def test_a_robot_with_numpy_alone_builds_and_verifies(exported, tmp_path):
    bundle = linked_copy(exported, tmp_path / 'policy')
    done = subprocess.run(
        [sys.executable, '-c', ROBOT, str(bundle)],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join((str(ROOT), str(ROOT / 'test')))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compared with PyTorch's recorded chunks" in done.stdout
    assert 'all within the bounds' in done.stdout
    assert "tensor 'velocity' differs from PyTorch" in done.stderr


def test_what_is_read_is_what_was_drawn_and_what_pytorch_gave(exported):
    bundle = read_bundle(exported)
    cases, facts = read_cases(exported)
    assert set(facts) == {'torch', 'seed'}
    steps = bundle.spec.denoise_steps
    for found, drawn in zip(cases, seeded_cases(exported, bundle.spec), strict=True):
        assert found.words == drawn.words
        for name in ('image_mask', 'x', 'row_weight', 'plan', 'plan_weight'):
            np.testing.assert_array_equal(getattr(found, name), getattr(drawn, name))
        for a, b in zip(found.images, drawn.images, strict=True):
            np.testing.assert_array_equal(a, b)
        for name, tokens in drawn.prefix_inputs.items():
            np.testing.assert_array_equal(found.prefix_inputs[name], tokens)
        trace, velocity = found.reference['trace'], found.reference['velocity']
        np.testing.assert_array_equal(trace[0], drawn.x)
        # x_next = x + dt v without a plan, v the weighted sum of the rows.
        if not drawn.plan_weight.any():
            mixed = np.einsum('r,nrha->nha', drawn.row_weight, velocity)[:, None]
            np.testing.assert_allclose(trace[1:], trace[:-1] - mixed / steps, atol=1e-5)
        assert set(found.samples) >= {'image_tokens', 'past_key', 'past_value', 'prefix_mask'}
    assert len(flow_times(steps)) == steps == len(cases[0].reference['velocity'])


def test_the_recording_is_small(exported):
    size = (exported / ONNX_FOLDER / CASES_FILE).stat().st_size
    cases, _ = read_cases(exported)
    assert all(array.size <= SAMPLE for case in cases for array in case.samples.values())
    # The tiny policy's own ONNX files are ten times as large.
    assert size < 200_000


def test_a_sample_is_spread_over_the_whole_array():
    array = np.arange(1_000_000).reshape(1000, 1000)
    found = sample(array)
    assert len(found) == SAMPLE == len(np.unique(found))
    assert (found[0], found[-1]) == (0, 999_999)
    np.testing.assert_array_equal(sample(array[:2, :3]), [0, 1, 2, 1000, 1001, 1002])


def test_hidden_places_are_left_out_of_samples(exported):
    case = read_cases(exported)[0][0]
    mask = case.past['prefix_mask'].copy()
    mask[:, 3:] = False
    case = Case(**{**vars(case), 'past': {'prefix_mask': mask}})
    shape = (2, *mask.shape, 4)
    past = {'prefix_mask': mask, 'past_key': np.zeros(shape)}
    case.row_axes['past_key'] = 1
    rows, places = mask.shape
    assert len(case.sampled(np.zeros(1), past)['past_key']) == rows * 3 * 2 * 4
    assert places > 3


@pytest.mark.parametrize('damage', [b'', b'not an archive'])
def test_damaged_recordings_are_told(exported, tmp_path, damage):
    bundle = linked_copy(exported, tmp_path / 'policy')
    path = bundle / ONNX_FOLDER / CASES_FILE
    path.unlink()
    with pytest.raises(ValueError, match=r'cases\.npz.*vla_runtime'):
        read_cases(bundle)
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r'cases\.npz'):
        read_cases(bundle)
