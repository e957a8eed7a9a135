"""The recorder node beside a real policy node: what it records replays bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from graph import LATCHED, RELIABLE, Graph, Process, graph, popen, statuses
from rosbags.interfaces import QosDurability
from rosbags.rosbag2 import Reader
from std_msgs.msg import String
from std_srvs.srv import Trigger
from thorough import thorough_but
from tiny_policy import CAMERAS, tiny_spec, two_frames_spec, write_tiny_policy
from tiny_robot import ROBOT, Drivers, write_robot

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_type
from vla_runtime.nodes.policy.description import Run, describe
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import header_stamp_ns
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot
from vla_tools.replay.recorded import SkippedInference, read_run
from vla_tools.replay.rerun import Replay
from vla_tools.replay.setup import Changes

pytestmark = pytest.mark.graph

NODE = '/vla_policy'
TASK = 'pick up the red cup'


@pytest.fixture(scope='module', params=thorough_but(['pi05'], ['pi05', 'smolvla']))
def bundle(request, tmp_path_factory):
    spec = tiny_spec(request.param, advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', spec)


@pytest.fixture(scope='module')
def robot(tmp_path_factory):
    return write_robot(tmp_path_factory.mktemp('robot') / 'tiny.yaml')


class Bench:
    """Policy, recorder and drivers."""

    def __init__(self, made: Graph, bundle, robot, folder, *recorder) -> None:
        self.made = made
        self.folder = folder
        self.recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-p', f'robot:={robot}', '-p', f'folder:={folder}', *recorder),
        )
        policy = ['-p', f'bundle:={bundle}', '-p', f'robot:={robot}']
        limits = ['-p', 'max_observation_age_s:=5.0', '-p', 'sync_tolerance_s:=1.0']
        made.start(
            'vla_runtime.nodes.policy.node',
            *('--ros-args', *policy, *limits, '-p', 'torch_threads:=1'),
        )
        self.drivers = Drivers(made)
        self.chunks = made.collect(chunk_type(), '/action_chunk')
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        assert made.transition(NODE, 'configure')
        assert made.transition(NODE, 'activate')
        self.drivers.instruct(TASK)
        # Both sides: what a node sends before it has found the recorder is not in the bag.
        self.drivers.wait_for_listeners(2)
        made.wait_for(lambda: self.status()['policy_found'] == 'true', 'the policy to be found')

    def chunk(self, **request) -> None:
        count = len(self.chunks)
        self.drivers.request(**request)
        self.made.wait_for(lambda: len(self.chunks) > count, 'a chunk', meanwhile=self.drivers)

    def status(self) -> dict[str, str]:
        """The recorder's next status."""
        self.diagnostics.clear()

        def found():
            said = next(statuses(self.diagnostics, '/vla_recorder: recording'), None)
            return said and values_of(said)

        return self.made.wait_for(found, "the recorder's status")

    def quiet(self) -> int:
        """Messages in the bag, once the drivers' are all there: the nodes' statuses go on."""
        found = [0]

        def still() -> bool:
            found.append(int(self.status()['messages']))
            return found[-1] - found[-2] < 20

        self.made.wait_for(still, 'the recorder to have everything')
        return found[-1]

    def wait_for_chunks(self, count: int) -> None:
        def recorded() -> bool:
            status = self.status()
            return int(status['chunks']) >= count and status['frames_missing'] == '0'

        self.made.wait_for(recorded, 'the recorded chunks', timeout_s=60.0)


def test_what_it_records_replays_bit_for_bit(bundle, robot, tmp_path):
    with graph() as made:
        bench = Bench(made, bundle, robot, tmp_path / 'bag')
        # From before the oldest frame that may be used to long after the request.
        rows = np.linspace(-0.5, 0.5, 600).reshape(200, 3)
        bench.chunk()
        for name, value in (
            ('cfg_enabled', True),
            ('cfg_beta', 1.0 + 1 / 3),
            ('real_time_chunking', True),
        ):
            assert made.set_parameter(NODE, name, value).successful
            bench.chunk(rows=rows, certain=2, ahead_s=-4.0)
        assert made.call(Trigger, f'{NODE}/reset', Trigger.Request()).success
        bench.chunk(rows=rows)
        bench.chunk(episode=4)
        bench.wait_for_chunks(6)
        assert bench.recorder.stop(signal.SIGINT) == 0
    run = read_run(BagReader(tmp_path / 'bag'))
    replay = Replay(run, Changes())
    found = list(replay.inferences())
    assert not run.problems and not run.reader.problems
    assert list(replay.differences) == []
    assert [one.recorded.number for one in found] == [0, 1, 2, 3, 0, 0]
    assert [one.recorded.chunk is not None for one in found] == [True] * 6
    assert [one.error is not None and one.error.identical for one in found] == [True] * 6
    assert found[3].report.rtc_mode == 'guided'
    with Reader(tmp_path / 'bag') as reader:
        counts = {c.topic: c.msgcount for c in reader.connections}
        qos = {c.topic: c.ext.offered_qos_profiles[0] for c in reader.connections}
    # Each frame that was used, once, as it was published: the wrist camera sends PNG.
    assert counts['/top/image'] <= 6 and counts['/wrist/image'] <= 6
    assert counts['/parameter_events'] > 0
    assert counts['/rosout'] > 0
    assert counts['/joint_states'] > 0
    # At the end once more: damage at the begin must not cost the recording.
    assert counts[f'{NODE}/description'] == 2
    assert qos[f'{NODE}/description'].durability is QosDurability.TRANSIENT_LOCAL


@pytest.mark.parametrize('images', thorough_but(['used'], ['used', 'all']))
@pytest.mark.parametrize('bundle', ['pi05'], indirect=True)
def test_what_is_stamped_when_it_is_received_replays_bit_for_bit(bundle, tmp_path, images):
    """Stamps of a recorder's own would not be those that the policy node gave."""
    robot = write_robot(
        tmp_path / 'tiny.yaml',
        ROBOT.replace('topic: top/image', 'topic: top/image, stamp: receive')
        .replace('topic: wrist/image', 'topic: wrist/image, stamp: receive')
        .replace('{topic: joint_states', '{topic: joint_states, stamp: receive')
        .replace('{topic: gripper', '{stamp: receive, topic: gripper'),
    )
    folder = tmp_path / 'bag'
    with graph() as made:
        bench = Bench(made, bundle, robot, folder, '-p', f'record_images:={images}')
        # No stamps, and a clock of its own.
        bench.drivers.offset_ns = {'top': None, 'wrist': 10**13, 'arm': None, 'gripper': -(10**13)}
        bench.chunk()
        assert made.set_parameter(NODE, 'real_time_chunking', True).successful
        for _ in range(3):
            bench.chunk(rows=np.linspace(-0.5, 0.5, 18).reshape(6, 3), certain=2)
        bench.chunk(episode=4)
        bench.wait_for_chunks(5)
        assert bench.status()['joint_states_missing'] == '0'
        assert bench.recorder.stop(signal.SIGINT) == 0
    run = read_run(BagReader(folder))
    found = list(Replay(run, Changes()).inferences())
    assert [one.error is not None and one.error.identical for one in found] == [True] * 5
    # The stamps that were used are in the recording, and are those of the receipt.
    for one in found:
        assert all(abs(at - one.recorded.time_ns) < 60e9 for at in one.recorded.stamps_ns.values())
    # As they came: a driver that stamps nothing has no stamps there either.
    tops = list(run.reader.messages(lambda topic, _: topic == '/top/image'))
    assert tops and {header_stamp_ns(raw.serialised) for raw in tops} == {0}
    assert_live_as_recorded(folder, 5)


def assert_live_as_recorded(folder, count: int) -> None:
    result = folder.with_suffix('.json')
    command = ['replay', str(folder), '--live', '--json', str(result)]
    live = Process(popen('vla_runtime', command), 'replay')
    assert live.wait() == 0, live.text()
    (played,) = json.loads(result.read_text())['recordings']
    assert (played['live']['played'], played['live']['as_recorded']) == (count, count), live.text()


@pytest.mark.thorough
@pytest.mark.parametrize('stamp', ['header', 'receive'])
def test_earlier_frames_are_recorded_with_the_newest(tmp_path, stamp):
    bundle = write_tiny_policy(tmp_path / 'n17', two_frames_spec(steps_ago=1))
    text = ROBOT.replace('/image', f'/image, stamp: {stamp}')
    robot = write_robot(tmp_path / 'tiny.yaml', text)
    with graph() as made:
        bench = Bench(made, bundle, robot, tmp_path / 'bag')
        for _ in range(6):
            bench.chunk()
        bench.wait_for_chunks(6)
        assert bench.recorder.stop(signal.SIGINT) == 0
    run = read_run(BagReader(tmp_path / 'bag'))
    found = list(Replay(run, Changes()).inferences())
    # At first a camera's first frame stands for the earlier one.
    last = found[-1].recorded.stamps_ns
    assert all(last[f'{name}_before'] < last[name] for name in CAMERAS)
    assert [one.error is not None and one.error.identical for one in found] == [True] * 6
    assert_live_as_recorded(tmp_path / 'bag', 6)


def test_a_report_may_come_before_the_description_that_tells_its_cameras(robot, tmp_path):
    """Topics have no order among each other. Here the policy node is the test's own."""
    bundle = write_tiny_policy(tmp_path / 'n17', two_frames_spec())
    spec, loaded = read_bundle(bundle).spec, load_robot(robot)
    run = Run(str(bundle), 'torch', 'cpu', 'float32', use_cuda_graphs=True, triton='off', threads=1)
    text = describe(
        spec,
        loaded,
        match_robot(loaded, spec, bundle),
        run,
        topic_name=lambda topic: f'/{topic}',
    )
    folder = tmp_path / 'bag'
    with graph() as made:
        recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-p', f'robot:={robot}', '-p', f'folder:={folder}'),
        )
        drivers = Drivers(made)
        reports = made.node.create_publisher(DiagnosticArray, f'{NODE}/report', RELIABLE)
        descriptions = made.node.create_publisher(String, f'{NODE}/description', LATCHED)
        status = made.collect(DiagnosticArray, '/diagnostics')
        drivers.wait_for_listeners(1)
        made.wait_for(reports.get_subscription_count, 'the recorder to listen to reports')

        def said() -> dict[str, str]:
            found = [one for message in status for one in message.status]
            return values_of(found[-1]) if found else {}

        # What comes before the recorder has found the camera is lost.
        comes = lambda: float(said().get('frame_megabytes', 0)) > 0  # noqa: E731
        made.wait_for(comes, 'frames', meanwhile=drivers)
        for _ in range(2):
            drivers()
        before, newest = sorted(drivers.frames['top'])[-2:]
        used = {'stamp_ns.top_before': before, 'stamp_ns.top': newest}
        values = [KeyValue(key=key, value=str(value)) for key, value in used.items()]
        reports.publish(DiagnosticArray(status=[DiagnosticStatus(values=values)]))
        made.wait_for(lambda: said().get('chunks') == '1', 'the report to be there')
        assert said()['policy_found'] == 'false'
        descriptions.publish(String(data=text))
        made.wait_for(lambda: said().get('policy_found') == 'true', 'the description')
        assert recorder.stop(signal.SIGINT) == 0
    messages = BagReader(folder).messages(lambda topic, _: topic == '/top/image')
    assert {header_stamp_ns(raw.serialised) for raw in messages} == {before, newest}


@pytest.mark.thorough
@pytest.mark.parametrize('bundle', ['pi05'], indirect=True)
def test_joint_states_wait_for_a_recorder_that_is_not_scheduled(bundle, robot, tmp_path):
    with graph() as made:
        bench = Bench(made, bundle, robot, tmp_path / 'bag')
        bench.chunk()
        bench.drivers.silent = {'top', 'wrist'}
        bench.quiet()
        stopped_ns, rounds, begin_s = time.time_ns(), 0, time.monotonic()
        os.kill(bench.recorder.pid, signal.SIGSTOP)
        # Shorter than a second: after it Fast DDS takes the recorder for dead and sends it nothing.
        # A busy machine sends less in that time.
        while rounds < 50 and time.monotonic() < begin_s + 0.4:
            bench.drivers()
            rounds += 1
            time.sleep(0.002)
        os.kill(bench.recorder.pid, signal.SIGCONT)
        bench.quiet()
        assert bench.status()['joint_states_missing'] == '0'
        assert bench.recorder.stop(signal.SIGINT) == 0
    reader = BagReader(tmp_path / 'bag')
    messages = reader.messages(lambda topic, kind: kind == 'sensor_msgs/msg/JointState')
    came = Counter(raw.topic for raw in messages if raw.time_ns >= stopped_ns)
    assert rounds > 5
    assert came == {'/joint_states': rounds, '/gripper/joint_states': rounds}


@pytest.mark.parametrize('bundle', ['pi05'], indirect=True)
def test_reduced_images_are_said_to_be_no_replay(bundle, robot, tmp_path):
    with graph() as made:
        bench = Bench(made, bundle, robot, tmp_path / 'bag', '-p', 'record_images:=reduced')
        bench.chunk()
        bench.wait_for_chunks(1)
        assert bench.recorder.stop(signal.SIGTERM) == 0
    (found,) = Replay(read_run(BagReader(tmp_path / 'bag')), Changes()).inferences()
    assert isinstance(found, SkippedInference)
    assert "/top/image has reduced images only (record_images: 'reduced')" in found.reason


def test_a_folder_that_exists_is_refused(robot, tmp_path):
    with graph() as made:
        recorder = made.start(
            'vla_runtime.nodes.recorder.node',
            *('--ros-args', '-p', f'robot:={robot}', '-p', f'folder:={tmp_path}'),
        )
        made.wait_for(lambda: not recorder.running, 'its end')
        assert f'cannot start: {tmp_path} exists already' in recorder.text()
