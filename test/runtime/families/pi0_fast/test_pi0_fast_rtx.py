"""pi0-FAST's graphs through TensorRT for RTX's own parser and builder, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from network_cases import network_case_paths
from onnx_bundles import write_onnx_once
from pi0_fast_cases import options_of, write_folder
from rtx_plans import GRAPHS, build, needs_rtx, targets_of, unplanned, wrong_products

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.bundle.onnx_files import ONNX_FOLDER

pytestmark = [needs_rtx, pytest.mark.cases]


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
@pytest.mark.parametrize('path', network_case_paths('pi0_fast')[:1], ids=lambda path: path.stem)
def test_files_parse_and_build(path: Path, precision: str, tmp_path: Path):
    folder = write_folder(tmp_path / 'policy', path)
    write_export(
        plan_export(folder, options_of(path, folder), default_name='tiny'),
        tmp_path / 'bundle',
        finish=lambda target, spec: write_onnx_once(target, spec, precision),
    )
    for name in GRAPHS:
        file = tmp_path / 'bundle' / ONNX_FOLDER / name
        built = build(file, (1,), targets_of(precision))
        assert wrong_products(file, built.kernels) == []
        assert unplanned(file, built.kernels) == set()
