"""OpenVLA and OpenVLA-OFT through TensorRT for RTX's own parser and builder, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from network_cases import network_case_paths
from oft_cases import oft_options, write_oft_folder
from onnx_bundles import write_onnx_once
from openvla_folders import options_of, write_folder
from rtx_plans import GRAPHS, build, needs_rtx, targets_of, unplanned, wrong_products

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.bundle.onnx_files import ONNX_FOLDER

pytestmark = [needs_rtx, pytest.mark.cases]
PATHS = network_case_paths('openvla_full')


@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
@pytest.mark.parametrize('path', PATHS[:1], ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ('write', 'options'),
    [(write_folder, options_of), (write_oft_folder, oft_options)],
    ids=['openvla', 'openvla_oft'],
)
def test_files_parse_and_build(
    path: Path, precision: str, write: Any, options: Any, tmp_path: Path
):
    source = write(tmp_path / 'policy', path)
    write_export(
        plan_export(source, options(path), default_name='tiny'),
        tmp_path / 'bundle',
        finish=lambda target, spec: write_onnx_once(target, spec, precision),
    )
    for name in GRAPHS:
        file = tmp_path / 'bundle' / ONNX_FOLDER / name
        built = build(file, (1,), targets_of(precision))
        assert wrong_products(file, built.kernels) == []
        assert unplanned(file, built.kernels) == set()
