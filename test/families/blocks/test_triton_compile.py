"""The kernels of the expert's layers, compiled for NVIDIA's GPUs at published sizes in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from triton_package import environment, needs_triton

pytestmark = needs_triton

SCRIPT = Path(__file__).with_name('compile_triton.py')
# Bytes that the programs of one multiprocessor share, of an Orin, an H100 and an RTX 5090.
SHARED = {87: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
LAYERS = {'pi05': 18, 'smolvla': 16}


@pytest.mark.parametrize(
    ('family', 'capability'),
    [
        ('pi05', 120),
        *(
            pytest.param(family, capability, marks=pytest.mark.slow)
            for family in LAYERS
            for capability in SHARED
            if (family, capability) != ('pi05', 120)
        ),
    ],
)
def test_a_layer_is_six_kernels_that_fit_and_spill_nothing(family, capability, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, family, str(capability)],
        env={**environment(), 'TRITON_CACHE_DIR': str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *kernels, counted = map(json.loads, done.stdout.splitlines())
    assert counted == {'launches': 6 * LAYERS[family]}
    assert len({kernel['kernel'] for kernel in kernels}) == 5
    for kernel in kernels:
        assert kernel['shared'] <= SHARED[capability], kernel
        assert kernel['spilled'] == 0, kernel
