"""A policy node whose backend or device is not here: it says so and stays unconfigured."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph import graph
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import write_robot

pytestmark = pytest.mark.graph

NODE = '/vla_policy'


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp('refusals') / 'bundle', tiny_spec())


def test_configure_is_refused_before_pytorch_is_imported(monkeypatch, bundle):
    """All that is refused is in `test_preflight`."""
    # No GPU, should this machine have one.
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    robot = write_robot(bundle.parent / 'robot.yaml')
    given = {'bundle': bundle, 'robot': robot, 'backend': 'torch', 'device': 'cuda'}
    options = [word for name, value in given.items() for word in ('-p', f'{name}:={value}')]
    with graph() as made:
        process = made.start('vla_runtime.nodes.policy.node', '--ros-args', *options)
        assert not made.transition(NODE, 'configure')
        told = "device 'cuda': no CUDA device answers here"
        made.wait_for(lambda: told in process.text(), 'what is wrong')
        assert made.state(NODE) == 'unconfigured'
        assert process.running
        assert 'libtorch' not in Path(f'/proc/{process.pid}/maps').read_text()
