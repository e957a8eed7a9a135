"""The real TensorRT for RTX parses and builds the graphs of Diffusion Policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from rtx_plans import GRAPHS, build, needs_rtx
from tiny_policy import history_spec, write_tiny_policy

from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.export.onnx.export import write_onnx

pytestmark = needs_rtx


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
@pytest.mark.parametrize('separate', [False, True])
def test_every_graph_is_built(separate: bool, precision, tmp_path: Path):
    spec = history_spec(2, separate_encoders=separate)
    folder = write_tiny_policy(tmp_path / 'policy', spec)
    write_onnx(folder, spec, precision)
    for name in GRAPHS:
        assert build(folder / ONNX_FOLDER / name) is not None
