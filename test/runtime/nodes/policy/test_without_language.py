"""The policy node with a policy that has no language: no instruction is needed or used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph import graph
from test_policy_node import Executor, start
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import write_robot

pytestmark = pytest.mark.graph


def test_chunks_come_without_an_instruction_and_one_that_is_given_is_said_to_be_unused(tmp_path):
    spec = tiny_spec('act')
    # The sizes that this robot's cameras send.
    spec = replace(spec, dims=replace(spec.dims, images=((48, 64), (32, 32))))
    bundle = write_tiny_policy(tmp_path / 'act', spec)
    with graph() as made:
        node = start(made, bundle, write_robot(tmp_path / 'tiny.yaml'))
        executor = Executor(made)
        assert made.transition(executor.node, 'configure')
        assert made.transition(executor.node, 'activate')
        _, report = executor.chunk()
        assert report['instruction'] == '' and report['denoise_steps'] == '1'
        assert made.set_parameter(executor.node, 'instruction', 'stack the cups').successful
        _, report = executor.chunk()
        assert report['instruction'] == 'stack the cups'
        made.wait_for(
            lambda: 'instruction: not used' in node.output(), 'the log', meanwhile=executor.drivers
        )
        executor.chunk()
        assert node.output().count('instruction: not used') == 1
