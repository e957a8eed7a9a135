"""The policy node with policies that see earlier frames and states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph import graph
from test_policy_node import Executor, start
from tiny_policy import CAMERAS, history_spec, two_frames_spec, write_tiny_policy
from tiny_robot import write_robot

pytestmark = pytest.mark.graph


def test_chunks_are_made_of_a_newest_and_an_earlier_frame_of_every_camera(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'n17', two_frames_spec())
    with graph() as made:
        # A busy machine's drivers are uneven; a gap must not keep an answer back.
        tolerance = ('-p', 'sync_tolerance_s:=1.0')
        robot = write_robot(tmp_path / 'tiny.yaml')
        executor_inputs = ('-p', 'instruction:=pick up the cup', *tolerance)
        node = start(made, bundle, robot, *executor_inputs)
        executor = Executor(made)
        assert made.transition(executor.node, 'configure')
        assert made.transition(executor.node, 'activate')
        # At first a camera's first frame stands for the earlier one.
        seen = []
        while not seen or seen[-1][0] == seen[-1][1]:
            _, report = executor.chunk()
            seen = [
                (int(report[f'stamp_ns.{name}_before']), int(report[f'stamp_ns.{name}']))
                for name in CAMERAS
            ]
        assert all(before <= newest for before, newest in seen)
        assert report['cache.camera.top_before'] in ('miss', 'hit')
        assert 'Traceback' not in node.output()


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
        assert made.transition(executor.node, 'configure')
        assert made.transition(executor.node, 'activate')
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
