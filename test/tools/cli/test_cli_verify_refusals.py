"""Refusals of `verify` and `build` come before PyTorch is imported.

The real command in a process of its own, which lists what it imports. That is the reason why a
refusal is quick, and unlike a time it is the same on every machine. Those that need no process of
their own: `test_cli_refusals.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

import onnxruntime
import pytest
from commands import run_command
from onnx_bundles import tiny_onnx_bundle
from tiny_policy import tiny_spec, write_tiny_policy

_CUDA = 'CUDAExecutionProvider' in onnxruntime.get_available_providers()
_TENSORRT = find_spec('tensorrt') is not None
without_cuda = pytest.mark.skipif(_CUDA, reason='this ONNX Runtime has a CUDA provider')
without_tensorrt = pytest.mark.skipif(_TENSORRT, reason='TensorRT is installed here')


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, str]:
    """A bundle with ONNX files, and one without."""
    plain = write_tiny_policy(tmp_path_factory.mktemp('refusals') / 'plain', tiny_spec())
    return {'onnx': str(tiny_onnx_bundle()), 'plain': str(plain)}


def refused(*arguments: str) -> str:
    """Return the command's output; it must end with 2 and must not import PyTorch."""
    done = run_command(*arguments)
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert 'vla_tools.cli._comparison' in done.imported
    packages = {name.partition('.')[0] for name in done.imported}
    assert not packages & {'torch', 'onnx', 'rclpy'}
    return done.stderr


@pytest.mark.parametrize(
    ('bundle', 'options', 'told'),
    [
        ('plain', [], 'vision.onnx: is missing'),
        pytest.param('onnx', ['--device', 'cuda'], 'no CUDAExecutionProvider', marks=without_cuda),
        pytest.param(
            'onnx',
            ['--backend', 'tensorrt'],
            "the Python package 'tensorrt' is not installed",
            marks=without_tensorrt,
        ),
    ],
)
def test_verify(bundles, bundle, options, told):
    assert told in refused('verify', bundles[bundle], *options)


@pytest.mark.parametrize(
    ('bundle', 'options', 'told'),
    [
        ('plain', [], 'vision.onnx: is missing'),
        pytest.param(
            'onnx', [], "the Python package 'tensorrt' is not installed", marks=without_tensorrt
        ),
    ],
)
def test_build(bundles, bundle, options, told):
    assert told in refused('build', bundles[bundle], *options)
