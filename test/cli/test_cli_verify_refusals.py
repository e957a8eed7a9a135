"""Refusals of `verify` and `build` come before PyTorch is imported.

The real command in a process of its own, which lists what it imports. That is the reason why a
refusal is quick, and unlike a time it is the same on every machine.
"""

from __future__ import annotations

from importlib.util import find_spec

import onnxruntime
import pytest
from commands import run_command
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from onnx_faults import change_weight
from tiny_policy import tiny_spec, write_tiny_policy

_CUDA = 'CUDAExecutionProvider' in onnxruntime.get_available_providers()
_TENSORRT = find_spec('tensorrt') is not None
without_cuda = pytest.mark.skipif(_CUDA, reason='this ONNX Runtime has a CUDA provider')
without_tensorrt = pytest.mark.skipif(_TENSORRT, reason='TensorRT is installed here')


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, str]:
    """A bundle with ONNX files, one without, one with changed weights, and a name for none."""
    folder = tmp_path_factory.mktemp('refusals')
    changed = copy_bundle(tiny_onnx_bundle(), folder / 'changed')
    change_weight(changed, 'expert.blocks.0.mlp', 1.01)
    plain = write_tiny_policy(folder / 'plain', tiny_spec())
    return {
        'onnx': str(tiny_onnx_bundle()),
        'plain': str(plain),
        'changed': str(changed),
        'nowhere': str(folder / 'nowhere'),
        'file': str(plain / 'policy.yaml' / 'x'),
        'folder': str(folder),
    }


def refused(*arguments: str) -> str:
    """Return the command's output; it must end with 2 and must not import PyTorch."""
    done = run_command(*arguments)
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert 'vla_runtime.cli._comparison' in done.imported
    packages = {name.partition('.')[0] for name in done.imported}
    assert not packages & {'torch', 'onnx', 'rclpy'}
    return done.stderr


@pytest.mark.parametrize(
    ('bundle', 'options', 'told'),
    [
        ('nowhere', [], 'error: {nowhere}: no such folder; expected a policy bundle'),
        ('folder', [], 'policy.yaml: is missing; is this folder a policy bundle?'),
        ('plain', [], 'vision.onnx: is missing'),
        ('changed', [], 'weights.data: has changed'),
        pytest.param('onnx', ['--device', 'cuda'], 'no CUDAExecutionProvider', marks=without_cuda),
        ('onnx', ['--device', 'tpu'], "device 'tpu' is unknown to backend 'onnxruntime'"),
        ('onnx', ['--json', '/not/there/x.json'], "there is no folder '/not/there'"),
        ('onnx', ['--json', '{folder}'], 'is a folder; name a file in it'),
        ('onnx', ['--backend', 'cuda'], "invalid choice: 'cuda'"),
        ('nowhere', ['--backend', 'tensorrt'], 'no such folder; expected a policy bundle'),
        pytest.param(
            'onnx',
            ['--backend', 'tensorrt'],
            "the Python package 'tensorrt' is not installed",
            marks=without_tensorrt,
        ),
        (
            'onnx',
            ['--backend', 'tensorrt', '--device', 'cpu'],
            "device 'cpu' is not supported by backend 'tensorrt'",
        ),
    ],
)
def test_verify(bundles, bundle, options, told):
    said = refused('verify', bundles[bundle], *(option.format(**bundles) for option in options))
    assert told.format(**bundles) in said


@pytest.mark.parametrize(
    ('bundle', 'options', 'told'),
    [
        ('nowhere', [], 'error: {nowhere}: no such folder; expected a policy bundle'),
        ('file', [], 'expected a policy bundle'),
        ('plain', [], 'vision.onnx: is missing'),
        ('onnx', ['--device', 'cpu'], "device 'cpu' is not supported by backend 'tensorrt'"),
        ('onnx', ['--workspace', '0'], "'0' is not a whole number of at least 1"),
        pytest.param(
            'onnx', [], "the Python package 'tensorrt' is not installed", marks=without_tensorrt
        ),
    ],
)
def test_build(bundles, bundle, options, told):
    assert told.format(**bundles) in refused('build', bundles[bundle], *options)
