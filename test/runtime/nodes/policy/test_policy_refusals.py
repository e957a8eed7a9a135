"""A policy node whose backend or device is not here: it says so and stays unconfigured."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph import graph
from thorough import thorough_after
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import write_robot

pytestmark = pytest.mark.graph

NODE = '/vla_policy'


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp('refusals') / 'bundle', tiny_spec())


@pytest.mark.parametrize(
    ('backend', 'device', 'told'),
    thorough_after(
        3,  # one of each backend
        [
            ('torch', 'cuda', "device 'cuda': no CUDA device answers here"),
            ('tensorrt', 'cpu', "device 'cpu' is not supported by backend 'tensorrt'"),
            ('onnxruntime', 'cpu', 'vision.onnx: is missing'),
            (
                'torch',
                'gpu',
                "device 'gpu' is unknown to backend 'torch'; use cpu, cuda or cuda:N",
            ),
            (
                'tensorrt',
                'cuda',
                "backend 'tensorrt': the Python package 'tensorrt' is not installed",
            ),
        ],
    ),
)
def test_configure_is_refused_before_pytorch_is_imported(
    monkeypatch, bundle, backend, device, told
):
    # No GPU, should this machine have one.
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    robot = write_robot(bundle.parent / 'robot.yaml')
    given = {'bundle': bundle, 'robot': robot, 'backend': backend, 'device': device}
    options = [word for name, value in given.items() for word in ('-p', f'{name}:={value}')]
    with graph() as made:
        process = made.start('vla_runtime.nodes.policy.node', '--ros-args', *options)
        assert not made.transition(NODE, 'configure')
        made.wait_for(lambda: told in process.text(), 'what is wrong')
        assert made.state(NODE) == 'unconfigured'
        assert process.running
        assert 'libtorch' not in Path(f'/proc/{process.pid}/maps').read_text()
