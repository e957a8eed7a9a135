"""The real TensorRT for RTX parses and builds graphs of forms that `FAMILIES` does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from rtx_plans import GRAPHS, build, needs_rtx, targets_of, tiny_graphs, unplanned, wrong_products
from thorough import thorough_but
from tiny_policy import history_spec, write_tiny_policy

from vla_convert.export.onnx.export import write_onnx
from vla_runtime.bundle.onnx_files import ONNX_FOLDER

pytestmark = [
    needs_rtx,
    pytest.mark.parametrize('precision', thorough_but(['bfloat16'], ['float32', 'bfloat16'])),
]
SPECS = {
    'two frames': history_spec(2, separate_encoders=False),
    'encoders for each camera': history_spec(2, separate_encoders=True),
    'a step of four velocities': history_spec(2, 'multi_task_dit_flow', integrator='rk4'),
}


def check_plans(folder: Path, lengths: tuple[int, ...], targets: tuple[str, ...]) -> None:
    for name in GRAPHS:
        kernels = build(folder / name, lengths, targets).kernels
        assert wrong_products(folder / name, kernels) == []
        assert unplanned(folder / name, kernels) == set()


@pytest.mark.parametrize('form', SPECS)
def test_graphs_of_a_history_are_built(form: str, precision, tmp_path: Path):
    folder = write_tiny_policy(tmp_path / 'policy', SPECS[form])
    write_onnx(folder, SPECS[form], precision)
    check_plans(folder / ONNX_FOLDER, (1, 2), targets_of(precision))


@pytest.mark.parametrize('family', ['openvla', 'pi0_fast'])
def test_graphs_that_answer_in_tokens_are_built(family: str, precision):
    check_plans(tiny_graphs(family, precision), (1,), targets_of(precision))
