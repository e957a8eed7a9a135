"""Nodes with the policy on a server: what a person has to do, and what is recorded."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import graph, statuses
from remote_robot import EXECUTOR, POLICY, Running, remote_files, start_node
from served_process import ServedProcess
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import Drivers, write_robot

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.success import spec_identity
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_type
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.replay.recorded import ReplayError, read_run
from vla_tools.replay.rerun import Replay
from vla_tools.replay.setup import Changes

pytestmark = pytest.mark.graph


def test_after_a_long_outage_a_person_starts_the_arm_again(
    tmp_path: Path,
) -> None:
    bundle, robot = remote_files(tmp_path, outage_s=0.5)
    server = ServedProcess(bundle)
    with graph() as made:
        running = Running(made, robot, server.url)
        running.start()
        server.kill()
        running.say(EXECUTOR, 'control', '~/start')
        server.start(bundle)
        running.say(POLICY, 'server', f'connected to {server.url}')
        at_rest = running.arm.position()
        running.say(EXECUTOR, 'control', '~/start')
        assert running.arm.position() == at_rest
        running.start()
    server.kill()


@pytest.mark.parametrize('quality', [0, 85])
def test_a_recording_names_the_servers_bundle_and_replays_with_it_bit_for_bit(
    tmp_path: Path, quality: int
) -> None:
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec(advantage='task_newline'))
    robot = write_robot(tmp_path / 'tiny.yaml')
    server = ServedProcess(bundle)
    with graph() as made:
        recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-p', f'robot:={robot}', '-p', f'folder:={tmp_path / "bag"}'),
        )
        start_node(made, 'policy', robot, server.url, backend='remote', jpeg_quality=quality)
        drivers = Drivers(made)
        chunks = made.collect(chunk_type(), '/action_chunk')
        diagnostics = made.collect(DiagnosticArray, '/diagnostics')

        def status() -> dict[str, str]:
            diagnostics.clear()
            found = lambda: next(statuses(diagnostics, '/vla_recorder: recording'), None)  # noqa: E731
            return values_of(made.wait_for(found, "the recorder's status"))

        made.wait_for(lambda: made.state(POLICY) == 'active', 'the policy to be active')
        drivers.instruct('wave')
        drivers.wait_for_listeners(2)
        made.wait_for(lambda: status()['policy_found'] == 'true', 'the policy to be found')
        rows = np.linspace(-0.5, 0.5, 600).reshape(200, 3)
        for name, value in ((None, None), ('cfg_beta', 1.5), ('real_time_chunking', True)):
            if name is not None:
                assert made.set_parameter(POLICY, name, value).successful
            count = len(chunks)
            drivers.request(rows=rows, certain=2, ahead_s=-4.0)
            made.wait_for(lambda c=count: len(chunks) > c, 'a chunk', meanwhile=drivers)
        made.wait_for(lambda: int(status()['chunks']) >= 3, 'the recorded chunks')
        assert recorder.stop(signal.SIGINT) == 0
    server.kill()
    run = read_run(BagReader(tmp_path / 'bag'))
    described = run.inferences[0].description
    assert (described.server, described.bundle_name) == (server.url, 'tiny pi05')
    assert described.bundle_sha256 == spec_identity(read_bundle(bundle).spec)
    assert described.jpeg_quality == quality
    with pytest.raises(ReplayError):
        list(Replay(run, Changes()).inferences())
    replay = Replay(run, Changes(bundle=bundle))
    found = list(replay.inferences())
    assert list(replay.differences) == []
    assert [one.error is not None and one.error.identical for one in found] == [True] * 3
    assert found[2].report.rtc_mode == 'guided'
