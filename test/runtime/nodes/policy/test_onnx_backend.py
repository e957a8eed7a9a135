"""A bundle that `export` made and `verify` passed, in the ROS graph with `backend: onnxruntime`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, graph
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import Drivers, write_robot

from vla_runtime.cli.main import main
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_type, message_to_chunk
from vla_runtime.policy import Policy

pytestmark = pytest.mark.graph

NODE = '/vla_policy'
TASK = 'pick up the red cup'


@pytest.fixture(
    scope='module', params=['pi05', pytest.param('smolvla', marks=pytest.mark.thorough)]
)
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('onnx')
    spec = tiny_spec(request.param, advantage='task_newline')
    source = write_tiny_policy(folder / 'source', spec)
    target = folder / 'exported'
    assert main(['export', str(source), '--out', str(target)]) == 0
    assert main(['verify', str(target)]) == 0
    return target


def start(made, bundle, *arguments, backend='onnxruntime'):
    robot = write_robot(bundle.parent / 'robot.yaml')
    given = {'bundle': bundle, 'robot': robot, 'backend': backend, 'torch_threads': 1}
    options = [word for name, value in given.items() for word in ('-p', f'{name}:={value}')]
    options += ['-p', 'max_observation_age_s:=1.0', *arguments]
    return made.start('vla_runtime.nodes.policy.node', '--ros-args', *options)


def begin(
    made: Graph, bundle: Path, backend: str = 'onnxruntime'
) -> tuple[Drivers, list[Any], list[DiagnosticArray]]:
    """Start a policy node and activate it; its sources, and lists of its chunks and reports."""
    start(made, bundle, backend=backend)
    drivers = Drivers(made)
    # A joint state may be lost on its way: what lies between two others must not depend on it.
    drivers.moving = False
    chunks = made.collect(chunk_type(), '/action_chunk')
    reports = made.collect(DiagnosticArray, f'{NODE}/report')
    assert made.transition(NODE, 'configure')
    assert made.transition(NODE, 'activate')
    drivers.instruct(TASK)
    return drivers, chunks, reports


def test_its_chunks_are_the_policys_with_and_without_guidance(bundle):
    with graph() as made:
        drivers, chunks, reports = begin(made, bundle)
        for beta in (None, 2.0):
            if beta is not None:
                assert made.set_parameter(NODE, 'cfg_beta', beta).successful
                assert made.set_parameter(NODE, 'cfg_enabled', True).successful
            count = len(chunks)
            drivers.request()
            made.wait_for(
                lambda count=count: min(len(chunks), len(reports)) > count,
                f'a chunk with beta {beta}',
                meanwhile=drivers,
            )
            report = values_of(reports[count].status[0])
            assert float(report['beta']) == (beta or 1.0)
            found = message_to_chunk(chunks[count])[0].actions
            for backend in ('onnxruntime', 'torch'):
                expected = infer(bundle, backend, drivers.observed(report, TASK), report, beta)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def infer(bundle, backend, observation, report, beta):
    """The same inference outside the graph: its noise is of the same seed and number."""
    settings = PolicySettings(cfg_enabled=beta is not None, cfg_beta=beta or 1.5)
    policy = Policy.load(bundle, backend, settings=settings)
    for _ in range(int(report['number']) + 1):
        chunk, _ = policy.infer(observation)
    return chunk.actions
