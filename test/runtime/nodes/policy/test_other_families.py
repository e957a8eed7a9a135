"""The policy node with policies of other kinds: families, histories, none that has a language."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graph import graph
from test_onnx_backend import TASK, begin, infer
from test_policy_node import Executor, start
from tiny_policy import history_spec, tiny_spec, write_tiny_policy
from tiny_robot import write_robot

from vla_runtime.family.declaration import with_cameras
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_chunk

pytestmark = pytest.mark.graph


FAMILIES = (
    *('pi0', 'evo1', 'groot_n15', 'groot_n16', 'bitvla', 'diffusion', 'multi_task_dit'),
    *('multi_task_dit_flow', 'openvla_oft', 'xvla', 'vla_jepa'),
)


@pytest.mark.thorough
@pytest.mark.parametrize('family', FAMILIES)
def test_its_chunks_are_the_policys(family, tmp_path):
    spec = tiny_spec(family)
    if spec.images.padding == 'none':
        # The camera whose images are as large as the policy's.
        spec = replace(spec, cameras=spec.cameras[:1], dims=with_cameras(spec.dims, 1))
    bundle = write_tiny_policy(tmp_path / family, spec)
    with graph() as made:
        drivers, chunks, reports = begin(made, bundle, 'torch')
        drivers.request()
        made.wait_for(lambda: chunks and reports, 'a chunk', meanwhile=drivers)
        report = values_of(reports[0].status[0])
        found = message_to_chunk(chunks[0])[0].actions
    seen = drivers.observed(report, TASK, spec.camera_names)
    expected = infer(bundle, 'torch', seen, report, None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_history_begins_with_an_episode_and_is_in_the_report(tmp_path):
    spec = history_spec(3)
    # The camera whose images are as large as the policy's.
    top = tuple(camera for camera in spec.cameras if camera.name.startswith('top'))
    spec = replace(spec, cameras=top, dims=replace(spec.dims, cameras=len(top)))
    bundle = write_tiny_policy(tmp_path / 'history', spec)
    earlier = [f'{name}_{ago}_steps_ago' for name in ('top', 'state') for ago in (1, 2)]
    with graph() as made:
        robot = write_robot(tmp_path / 'tiny.yaml')
        node = start(made, bundle, robot, '-p', 'sync_tolerance_s:=1.0')
        executor = Executor(made)
        executor.activate()
        _, report = executor.chunk()
        stamps = {name: int(report[f'stamp_ns.{name}']) for name in ('top', *earlier)}
        # The first observation of an episode stands for those before it.
        assert stamps['top_2_steps_ago'] == stamps['top']
        assert report['state_1_steps_ago'] == report['state_2_steps_ago'] == report['state']
        while stamps['state_2_steps_ago'] == stamps['state_1_steps_ago']:
            _, report = executor.chunk()
            stamps = {name: int(report[f'stamp_ns.{name}']) for name in ('top', *earlier)}
        newest = int(report['stamp_ns'])
        assert newest - stamps['state_1_steps_ago'] == 50_000_000
        for name in ('top', 'state'):
            assert stamps[f'{name}_2_steps_ago'] <= stamps[f'{name}_1_steps_ago'] <= newest
        assert 'Traceback' not in node.output()


def test_chunks_come_without_an_instruction_and_one_that_is_given_is_said_to_be_unused(tmp_path):
    spec = tiny_spec('act')
    # The sizes that this robot's cameras send.
    spec = replace(spec, dims=replace(spec.dims, images=((48, 64), (32, 32))))
    bundle = write_tiny_policy(tmp_path / 'act', spec)
    with graph() as made:
        node = start(made, bundle, write_robot(tmp_path / 'tiny.yaml'))
        executor = Executor(made)
        executor.activate()
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
