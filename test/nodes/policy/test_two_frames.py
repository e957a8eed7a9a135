"""The policy node with a GR00T N1.7 that sees two frames of every camera."""

from __future__ import annotations

import pytest
from graph import graph
from test_policy_node import Executor, start
from tiny_policy import CAMERAS, two_frames_spec, write_tiny_policy
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
