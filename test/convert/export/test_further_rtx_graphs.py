"""The real TensorRT for RTX parses and builds graphs of forms that no tiny policy has."""

from __future__ import annotations

from pathlib import Path

import pytest
from rtx_plans import GRAPHS, build, needs_rtx, unplanned, wrong_products
from tiny_policy import history_spec, write_tiny_policy

from vla_convert.export.onnx.export import write_onnx
from vla_runtime.bundle.onnx_files import ONNX_FOLDER

pytestmark = needs_rtx


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
@pytest.mark.parametrize('separate', [False, True])
def test_every_graph_is_built(separate: bool, precision, tmp_path: Path):
    spec = history_spec(2, separate_encoders=separate)
    folder = write_tiny_policy(tmp_path / 'policy', spec)
    write_onnx(folder, spec, precision)
    for name in GRAPHS:
        assert build(folder / ONNX_FOLDER / name) is not None


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_a_step_of_four_velocities_is_built(precision, tmp_path: Path):
    spec = history_spec(2, 'multi_task_dit_flow', integrator='rk4')
    folder = write_tiny_policy(tmp_path / 'policy', spec)
    write_onnx(folder, spec, precision)
    for name in GRAPHS:
        path = folder / ONNX_FOLDER / name
        kernels = build(path).kernels
        assert wrong_products(path, kernels) == []
        assert unplanned(path, kernels) == set()
