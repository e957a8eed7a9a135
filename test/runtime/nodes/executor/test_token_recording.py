"""What a policy that writes tokens did on a real graph, packed, is recorded and replays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import RELIABLE, graph
from std_srvs.srv import Trigger
from test_open_requests_graph import CAMERAS, FIRST, POLICY, SECOND, Scene, write_token_policy

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.recording.bag_reader import BagReader
from vla_tools.replay.recorded import read_run
from vla_tools.replay.rerun import Replay, ReplayedInference
from vla_tools.replay.setup import Changes

pytestmark = [pytest.mark.graph, pytest.mark.thorough]


def test_its_packed_chunks_replay_bit_for_bit(tmp_path: Path) -> None:
    """Each alone now: packed with whatever was open, a request wrote what it writes alone."""
    bundle = write_token_policy(tmp_path / 'tabletop', 0.05)
    with graph() as made:
        said: dict[str, Any] = {}

        def on_diagnostics(message: DiagnosticArray) -> None:
            for status in message.status:
                if status.name == '/vla_recorder: recording':
                    said.update(values_of(status))

        made.node.create_subscription(DiagnosticArray, '/diagnostics', on_diagnostics, RELIABLE)
        robot = tmp_path / 'patient.yaml'
        scene = Scene(made, bundle, 'pipeline:=packed')
        recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-p', f'robot:={robot}', '-p', f'folder:={tmp_path / "bag"}'),
        )
        made.wait_for(lambda: said.get('policy_found') == 'true', 'the policy to be found')

        def whole() -> int:
            """Frames of chunks that have all: one that is missing spoils another that came."""
            return int(said['frames_used']) - int(said['frames_missing'])

        def wait_for_recorded(more: int) -> None:
            # Chunks alone do not replay, nor do those of which a best-effort frame was lost.
            wanted = max(whole(), 0) + more * len(CAMERAS)
            made.wait_for(lambda: whole() >= wanted, f'{more} chunks with all their frames')

        wait_for_recorded(4)
        scene.instruct(SECOND)
        wait_for_recorded(4)
        assert made.call(Trigger, f'{POLICY}/reset', Trigger.Request()).success
        wait_for_recorded(4)
        assert recorder.stop(signal.SIGINT) == 0
        scene.close()
    run = read_run(BagReader(tmp_path / 'bag'))
    replayed = list(complete(Replay(run, Changes()).inferences()))
    assert len(replayed) >= 12
    assert {one.recorded.values['pipeline'] for one in replayed} == {'packed'}
    assert {one.recorded.instruction for one in replayed} == {FIRST, SECOND}
    assert [one.error.identical for one in replayed if one.error is not None] == [True] * len(
        replayed
    )


def complete(found: Iterator[Any]) -> Iterator[ReplayedInference]:
    """Inferences that are whole; at both ends of a recording a chunk or a frame may be missing."""
    for one in found:
        if isinstance(one, ReplayedInference) and one.recorded.chunk is not None:
            yield one
