"""Kernels of the expert's layers and around them, compiled for GPUs at published sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from triton_package import environment, needs_triton

pytestmark = needs_triton

SCRIPT = Path(__file__).with_name('compile_triton.py')
# Compute capabilities of an A100, an Orin, an H100, a B200, a Thor and the RTX 50.
CAPABILITIES = (80, 87, 90, 100, 110, 120)
LAYERS = {'pi05': 18, 'pi0': 18, 'smolvla': 16}
# The update, and projections of actions and state; SmolVLA's first one is part of a larger product.
AROUND = {'pi05': 3, 'pi0': 4, 'smolvla': 2}
# Tensor memory of a multiprocessor, which capability 100 and 110 have.
TENSOR_COLUMNS = 512


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('family', 'capability', 'dtype'),
    [
        ('pi05', 120, 'bfloat16'),
        *(
            pytest.param(family, capability, 'bfloat16', marks=pytest.mark.slow)
            for family in LAYERS
            for capability in CAPABILITIES
            if (family, capability) != ('pi05', 120)
        ),
        *(
            pytest.param('pi05', capability, 'float32', marks=pytest.mark.slow)
            for capability in (90, 120)
        ),
    ],
)
def test_a_layer_is_eight_kernels_that_fit_and_spill_nothing(family, capability, dtype, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, family, str(capability), dtype],
        env={**environment(), 'TRITON_CACHE_DIR': str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *kernels, counted = map(json.loads, done.stdout.splitlines())
    # What the last layer's product adds to the residual stream is one more.
    assert counted == {'launches': [8 * LAYERS[family] + 1 + AROUND[family]] * 2}
    assert len({kernel['kernel'] for kernel in kernels}) == 8
    for kernel in kernels:
        assert kernel['shared'] <= kernel['may_share'], kernel
        assert kernel['tensor_columns'] <= TENSOR_COLUMNS, kernel
        assert kernel['spilled'] == 0, kernel
