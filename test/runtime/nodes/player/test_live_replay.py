"""A recording played through the real policy node gives the chunks of the offline replay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph import Process, popen
from rclpy.serialization import deserialize_message
from recorded_bag import ROBOT, Turn, first_turns, record
from sensor_msgs.msg import Image, JointState
from thorough import thorough_after
from tiny_policy import CAMERAS, history_spec, tiny_spec, two_frames_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.player.steps import LiveStep, PlayedMessage
from vla_runtime.nodes.policy.description import MEASURED
from vla_runtime.nodes.policy.parameters import limits_from
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.match import RobotMatch
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.joint_buffer import JointSource
from vla_runtime.sensors.synchronizer import Selection, Synchronizer, SyncLimits
from vla_tools.cli._live import LiveResult, _compare
from vla_tools.replay.live_steps import live_steps
from vla_tools.replay.recorded import SkippedInference, read_run
from vla_tools.replay.setup import fit_recording

pytestmark = pytest.mark.graph

NEWEST = dict.fromkeys(CAMERAS, 0)
BOTH = ['/top/image', '/wrist/image']


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', spec)


@pytest.fixture(scope='module')
def robot_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('robot') / 'tiny.yaml'
    path.write_text(ROBOT)
    return path


def history(folder) -> tuple[Path, Path]:
    """Write a policy that sees three steps, and a robot file for it."""
    robot_file = folder / 'robot_64x48.yaml'
    size = 'width: 64, height: 48'
    robot = ROBOT.replace('aliases: [top]', f'aliases: [top], {size}')
    robot_file.write_text(robot.replace('width: 40, height: 30', size))
    # A turn of the recording is a step of the policy.
    spec = replace(history_spec(3), step_time_s=0.2)
    return write_tiny_policy(folder / 'history', spec), robot_file


def replay(folder, tmp_path, *words: str) -> tuple[int, dict, str]:
    """Run the command in a process of its own, as it takes a ROS domain of its own."""
    result = tmp_path / 'result.json'
    command = ['replay', str(folder), '--live', '--json', str(result), *words]
    process = Process(popen('vla_runtime', command), 'replay')
    code = process.wait()
    (found,) = json.loads(result.read_text())['recordings'] if result.exists() else ({},)
    return code, found, process.text()


def test_live_offline_and_recorded_chunks_are_the_same(tmp_path, bundle, robot_file):
    turns = [
        *first_turns(),
        *[Turn(episode=3)] * 2,
        # Older than the time between the two inferences before, as on a busy machine.
        Turn(episode=3, age_ns=400_000_000),
        Turn(episode=3),
        # Costs its own inference alone.
        Turn(episode=3, lost=['/top/image']),
        Turn(episode=3),
    ]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    code, found, said = replay(folder, tmp_path)
    assert code == 0, said
    count = len(turns) - 1
    live = found['live']
    assert (live['played'], live['answered'], sum(live['skipped'].values())) == (count, count, 1)
    assert (live['as_offline'], live['as_recorded'], live['agrees']) == (count, count, True), said
    assert f'live: played {count} in' in said


@pytest.mark.thorough
def test_a_what_if_agrees_live_and_offline(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(), Turn(episode=2)]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    code, found, said = replay(folder, tmp_path, '--set', 'denoise_steps=2', '--rate', '8')
    assert code == 0, said
    live = found['live']
    assert (live['played'], live['as_offline'], live['as_recorded']) == (3, 3, 0)
    # Eight times as fast as it was recorded, and no faster.
    assert live['seconds'] >= found['recorded_s'] / 8


@pytest.mark.thorough
def test_an_earlier_frame_of_each_camera_and_frames_used_twice_agree_live(tmp_path, robot_file):
    bundle = write_tiny_policy(tmp_path / 'n17', two_frames_spec())
    turns = [Turn(), Turn(), Turn(same=['/top/image']), Turn(same=BOTH), Turn(episode=2), Turn()]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    code, found, said = replay(folder, tmp_path)
    assert code == 0, said
    live = found['live']
    assert (live['played'], live['as_offline'], live['as_recorded']) == (6, 6, 6), said


@pytest.mark.thorough
def test_a_history_of_frames_and_states_agrees_live(tmp_path):
    """Noise of every step, and the states and frames of two steps before."""
    bundle, robot_file = history(tmp_path)
    turns = [
        Turn(),
        Turn(same=['/top/image']),
        Turn({'real_time_chunking': True}),
        Turn({'noise_scheduler': 'ddim', 'denoise_steps': 5}),
        Turn(episode=2),
        Turn(episode=2),
    ]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    run = read_run(BagReader(folder))
    states = [one.state.tolist() for one in run.inferences]
    earlier = [[state.tolist() for state in one.earlier_states] for one in run.inferences]
    # The first observation of an episode stands for those before it.
    first = [0, 0, 0, 1, 4, 4]
    assert earlier == [
        [states[max(number - ago, first[number])] for ago in (1, 2)] for number in range(6)
    ]
    code, found, said = replay(folder, tmp_path)
    assert code == 0, said
    live = found['live']
    assert (live['played'], live['as_offline'], live['as_recorded']) == (6, 6, 6), said


def test_a_joint_state_that_is_not_in_the_recording_costs_nothing(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/joint_states']), Turn()]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    run = read_run(BagReader(folder))
    states = [state_of(step) for _, step in live_steps(run, {}, NEWEST)]
    assert [list(state.values()) for state in states] == [
        [float(number) for number in one.report[MEASURED].split()] for one in run.inferences
    ]


def state_of(step: LiveStep) -> dict[str, float]:
    *_, played = (one for one in step.messages if one.topic == '/joint_states')
    message = deserialize_message(played.serialised, JointState)
    return dict(zip(message.name, message.position, strict=True))


@pytest.mark.parametrize('frames', [1, 2, 3])
@pytest.mark.parametrize('seed', thorough_after(2, range(8)))
def test_a_step_is_answered_from_its_own_messages_however_they_come(
    tmp_path, bundle, robot_file, frames, seed
):
    """A slow machine: of several topics, any message may be late, and the request too."""
    if frames == 2:
        bundle = write_tiny_policy(tmp_path / 'n17', two_frames_spec())
    if frames == 3:
        bundle, robot_file = history(tmp_path)
    turns = [
        Turn(),
        Turn(same=['/top/image']),
        Turn(),
        Turn(same=BOTH),
        Turn(same=['/wrist/image']),
    ]
    run = read_run(BagReader(record(tmp_path / 'bag', bundle, robot_file, turns)))
    random = np.random.default_rng(seed)
    match, cameras, _ = fit_recording(run.inferences[0].description, read_bundle(bundle))
    ages_ns = {name: match.earlier[name].age_ns if name in match.earlier else 0 for name in cameras}
    node = Node(match)
    for found in live_steps(run, {}, ages_ns, match.state_ages_ns):
        assert isinstance(found, tuple)
        inference, step = found
        answer = node.play(step, random)
        assert answer.stamp_ns == step.stamp_ns
        assert dict(zip(match.state_joints, answer.state, strict=True)) == state_of(step)
        earlier = [match.state.to_policy(state) for _, state in answer.earlier_states]
        assert np.array_equal(earlier, inference.recorded.earlier_states)
        assert {name: bytes(frame.message.data) for name, frame in answer.frames.items()} == {
            name: bytes(message.data) for name, message in inference.messages.items()
        }


class Node:
    """What a policy node does with the messages of steps: select what belongs together."""

    def __init__(self, match: RobotMatch) -> None:
        self._topics = {name: f'/{camera.topic}' for name, camera in match.cameras.items()}
        self._newest = [name for name in self._topics if name not in match.earlier]
        joints = [JointSource('/joint_states', joint) for joint in match.state_joints]
        limits = SyncLimits(50_000_000, 500_000_000)
        self._made = Synchronizer(self._topics, joints, limits, match.earlier, match.state_ages_ns)
        self._now_ns = 0

    def play(self, step: LiveStep, random: np.random.Generator) -> Selection:
        """Get the messages of a step, in order by topic, until it can be answered."""
        asked = False
        # The player waits for it.
        self._now_ns = step.now_ns
        if step.begins_episode:
            self._made.begin_episode()
        for _ in range(2):
            topics: dict[str, list[PlayedMessage | str]] = {'ask': ['ask']}
            for message in step.messages:
                topics.setdefault(message.topic, []).append(message)
            while topics:
                topic = str(random.choice(sorted(topics)))
                one = topics[topic].pop(0)
                if not topics[topic]:
                    del topics[topic]
                if one == 'ask':
                    asked = True
                else:
                    self._take(one)
                # Of the node's status, which looks with the limits of the last request.
                self._made.select(self._now_ns)
                if asked:
                    self._made.limits = limits_from(step.parameters)
                    found = self._made.select(self._now_ns)
                    if isinstance(found, Selection):
                        self._made.note_observation(found)
                        return found
        raise AssertionError(found)

    def _take(self, message: PlayedMessage) -> None:
        if message.topic == '/joint_states':
            read = deserialize_message(message.serialised, JointState)
            stamp_ns = stamp_to_ns(read.header.stamp)
            self._made.add_joints(message.topic, read.name, read.position, stamp_ns, self._now_ns)
        for name in self._newest:
            if self._topics[name] == message.topic:
                image = deserialize_message(message.serialised, Image)
                frame = Frame(stamp_to_ns(image.header.stamp), 1, image)
                self._made.add_frame(name, frame, self._now_ns)


def test_the_first_live_chunk_that_differs_is_named():
    result, stamp_ns = LiveResult(), 17
    _compare(result, None, None, (3, 1, stamp_ns), stamp_ns)
    _compare(result, None, None, (3, 2, 18), 18)
    assert not result.agrees
    words = f'first that differs from offline: inference 1 of episode 3 (stamp {stamp_ns} ns)'
    assert any(words in line for line in result.lines())


def test_an_episode_is_played_up_to_its_first_gap(tmp_path, bundle, robot_file):
    turns = [Turn(), Turn(lost=['/committed_plan']), Turn(), Turn(episode=2)]
    folder = record(tmp_path / 'bag', bundle, robot_file, turns)
    found = list(live_steps(read_run(BagReader(folder)), {}, NEWEST))
    reasons = [one.reason if isinstance(one, SkippedInference) else '' for one in found]
    assert [bool(reason) for reason in reasons] == [False, True, True, False]
    assert 'inferences of its episode before it are missing' in reasons[2]
    assert [one[1].begins_episode for one in found if isinstance(one, tuple)] == [True, True]
    assert [one[1].parameters['instruction'] for one in found if isinstance(one, tuple)] == [
        'pick up the red cup'
    ] * 2


def test_what_cannot_be_played_is_refused(tmp_path, bundle, robot_file, capsys):
    from vla_runtime.cli import main as program

    folder = str(record(tmp_path / 'bag', bundle, robot_file, [Turn()]))
    again = str(shutil.copytree(folder, tmp_path / 'again'))
    assert program.main(['replay', folder, again, '--live']) == 2
    assert '--live plays one recording' in capsys.readouterr().err
    assert program.main(['replay', folder, '--live', '--rate', '-1']) == 2
    assert '--rate -1: expected more than 0' in capsys.readouterr().err
