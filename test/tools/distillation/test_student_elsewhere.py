"""A student as ONNX files and as TensorRT's plans: its teacher's graphs with other weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_once import made_once
from rtx_plans import GRAPHS, build, needs_rtx
from thorough import thorough_but
from tiny_policy import observation
from tiny_student import write_tiny_student

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.cli.main import main
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

FAMILIES = ['pi05', 'pi0', 'smolvla', 'groot_n15']


@pytest.fixture(scope='module', params=thorough_but(['pi05'], FAMILIES))
def student(request: pytest.FixtureRequest) -> Path:
    """A student and, beside it in `exported`, its bundle with ONNX files."""

    def make(folder: Path) -> None:
        folder.mkdir()
        source = write_tiny_student(folder, request.param)
        assert main(['export', str(source), '--out', str(folder / 'exported')]) == 0

    return made_once(f'student_{request.param}', make) / 'student'


def test_its_export_is_a_student_whose_receipt_names_the_teacher(student: Path) -> None:
    exported = student.with_name('exported')
    assert main(['verify', str(exported)]) == 0
    before, after = read_bundle(student), read_bundle(exported)
    assert after.spec.student_steps == before.spec.student_steps == (1, 2)
    receipt = json.loads((exported / 'verification.json').read_text())
    assert receipt['teacher'] == json.loads((student / 'verification.json').read_text())['teacher']
    assert receipt['onnx']


def test_its_onnx_files_give_its_chunks_in_its_steps_alone(student: Path) -> None:
    chunks = {}
    for backend in ('torch', 'onnxruntime'):
        policy = Policy.load(student.with_name('exported'), backend, threads=1)
        for steps in (1, 2):
            settings = PolicySettings(denoise_steps=steps)
            policy.reset()
            chunk, report = policy.infer(observation(), settings=settings)
            assert report.denoise_steps == steps
            chunks[backend, steps] = chunk.actions
        with pytest.raises(ValueError, match='student_steps'):
            policy.settings = PolicySettings(denoise_steps=3)
        policy.close()
    for steps in (1, 2):
        np.testing.assert_allclose(
            chunks['onnxruntime', steps], chunks['torch', steps], rtol=0, atol=1e-5
        )
    assert np.abs(chunks['torch', 1] - chunks['torch', 2]).max() > 1e-4


@needs_rtx
def test_the_real_builder_takes_its_graphs(student: Path) -> None:
    for name in GRAPHS:
        assert build(student.with_name('exported') / ONNX_FOLDER / name) is not None
