"""A policy that takes several requests at once: both nodes as processes, an arm that follows.

The policies are real. One is slow, so that the executor, which would replan at every step, has two
requests open all the time; one writes tokens, packed, and its steps are shorter than an answer.
"""

from __future__ import annotations

import array
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from executor_bench import PATIENT_ROBOT, Arm
from graph import LATCHED, RELIABLE, SENSOR, Graph, graph
from paths import ROOT
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import String
from std_srvs.srv import Trigger
from tabletop_policy import write_tabletop_policy
from thorough import thorough_but

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import (
    chunk_type,
    message_to_chunk,
    message_to_plan,
    ns_to_stamp,
    plan_type,
    stamp_to_ns,
)
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.types import ChunkHeader
from vla_tools.replay.recorded import read_run
from vla_tools.replay.rerun import Replay, ReplayedInference
from vla_tools.replay.setup import Changes

pytestmark = pytest.mark.graph

POLICY, EXECUTOR = '/vla_policy', '/vla_executor'
FIRST, SECOND = 'push the red cube', 'push the blue cube'
CAMERAS = ('front', 'wrist')
# A test that is starved for seconds misses no message of them.
_ALL = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)
# Shorter than an answer of the shipped token policy, and most tokens of one.
_TOKEN_STEP_S, _ANSWER_TOKENS = 0.02, 28


class Scene:
    """The arm, its cameras, and all that the two nodes say to each other, in order.

    Attributes:
        said: an int for each request, a `ChunkHeader` for each chunk.
        reports: time and values of each report of the policy.
        status: newest values of the executor's status.
        were_open: numbers of open requests by its status.
        most: requests that the policy takes.
        replaced: requests that newer ones have replaced, as the policy said last.
        robot: the robot file of both nodes.
    """

    most = 1

    def __init__(self, made: Graph, bundle: Path, *policy: str) -> None:
        self.graph = made
        self._settings = policy
        self.arm = Arm(made)
        self.said: list[int | ChunkHeader] = []
        self.reports: list[tuple[int, dict[str, str]]] = []
        self.status: dict[str, str] = {}
        self.were_open: set[int] = set()
        self.replaced = 0
        self._images = {
            name: made.node.create_publisher(Image, f'{name}/image_raw', SENSOR) for name in CAMERAS
        }
        self._random = np.random.default_rng(0)
        self._instruction = made.node.create_publisher(String, f'{POLICY}/instruction', LATCHED)
        for message_type, topic, call in (
            (plan_type(), 'committed_plan', self._on_plan),
            (chunk_type(), 'action_chunk', self._on_chunk),
            (DiagnosticArray, f'{POLICY}/report', self._on_report),
            (DiagnosticArray, '/diagnostics', self._on_diagnostics),
        ):
            made.node.create_subscription(message_type, topic, call, _ALL)
        self.timer = made.node.create_timer(0.05, self._show)
        self.robot = bundle.parent / 'patient.yaml'
        self.robot.write_text(PATIENT_ROBOT, encoding='utf-8')
        self._files = (
            *('-p', f'bundle:={bundle}'),
            *('-p', f'robot:={self.robot}'),
        )
        self.start_policy()
        # Time-outs and ages that a busy machine does not reach.
        made.start(
            'vla_runtime.nodes.executor.node',
            '--ros-args',
            *self._files,
            *('-p', 'replan_interval:=1'),
            *('-p', 'max_overrun_steps:=8'),
            *('-p', 'max_state_age_s:=1.0'),
            *('-p', 'clock_jump_s:=5.0'),
            *('-p', 'tick_timeout_s:=1.0'),
            *('-p', 'max_observation_age_s:=20.0'),
            *('-p', 'request_timeout_s:=20.0'),
        )
        for node in (POLICY, EXECUTOR):
            self.activate(node)
        self.instruct(FIRST)
        made.wait_for(lambda: self.call('start').success, 'the start')

    def close(self) -> None:
        self.timer.cancel()
        self.arm.close()

    def start_policy(self) -> None:
        self.policy = self.graph.start(
            'vla_runtime.nodes.policy.node',
            '--ros-args',
            *self._files,
            *('-p', 'torch_threads:=1'),
            *('-p', 'max_observation_age_s:=10.0'),
            *('-p', 'sync_tolerance_s:=1.0'),
            *(word for setting in self._settings for word in ('-p', setting)),
        )

    def activate(self, node: str) -> None:
        if self.graph.state(node) == 'unconfigured':
            assert self.graph.transition(node, 'configure')
        assert self.graph.transition(node, 'activate')

    def call(self, service: str, node: str = EXECUTOR) -> Trigger.Response:
        return self.graph.call(Trigger, f'{node}/{service}', Trigger.Request())

    def instruct(self, text: str) -> None:
        self._instruction.publish(String(data=text))

    def headers(self, since: int = 0) -> list[ChunkHeader]:
        return [one for one in self.said[since:] if isinstance(one, ChunkHeader)]

    def wait_for_chunks(self, count: int, what: str) -> None:
        wanted = len(self.headers()) + count
        self.graph.wait_for(lambda: len(self.headers()) >= wanted, what)

    def _show(self) -> None:
        stamp = ns_to_stamp(self.arm.now_ns())
        for publisher in self._images.values():
            pixels = self._random.integers(0, 256, (240, 320, 3), dtype=np.uint8)
            image = Image(height=240, width=320, encoding='rgb8', step=960)
            image.header.stamp = stamp
            image.data = array.array('B', pixels.tobytes())
            publisher.publish(image)

    def _on_plan(self, message: Any) -> None:
        request = message_to_plan(message).request
        assert request is not None
        self.said.append(request)

    def _on_chunk(self, message: Any) -> None:
        self.said.append(message_to_chunk(message)[1])

    def _on_report(self, message: DiagnosticArray) -> None:
        when_ns = stamp_to_ns(message.header.stamp)
        self.reports.append((when_ns, dict(values_of(message.status[0]))))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name.startswith(f'{EXECUTOR}: '):
                self.status.update(values_of(status))
                self.were_open.add(int(self.status.get('open_requests', 0)))
            if status.name == f'{POLICY}: inference':
                self.replaced = int(values_of(status)['requests_replaced'])


def write_token_policy(target: Path, step_time_s: float) -> Path:
    """The policy that ships, with other steps.

    What it sees here means nothing to it, so its arm goes a tenth of the way that it says, and its
    gripper stays half open: twenty chunks in a row beyond its end would stop the robot for good.
    """
    shipped = read_bundle(ROOT / 'engines' / 'demo_pi0_fast')
    spec = replace(shipped.spec, step_time_s=step_time_s, files={})
    statistics = {name: value.copy() for name, value in shipped.statistics.items()}
    for name in ('actions.q01', 'actions.q99'):
        statistics[name][:5] *= 0.1
        statistics[name][5] = 0.4 + 0.1 * (statistics[name][5] - 0.4)
    with new_bundle(target) as folder:
        for name in shipped.spec.files:
            shutil.copyfile(shipped.folder / name, folder / name)
        write_statistics(folder, statistics)
        seal(folder, spec)
    return target


@pytest.fixture(scope='module', params=thorough_but(['packed'], ['throughput', 'packed']))
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp('bundle') / 'tabletop'
    if request.param == 'packed':
        bundle, more = write_token_policy(folder, _TOKEN_STEP_S), ()
    else:
        bundle, more = write_tabletop_policy(folder), ('denoise_steps:=100',)
    with graph() as made:
        found = Scene(made, bundle, f'pipeline:={request.param}', *more)
        found.most = {'throughput': 2, 'packed': _ANSWER_TOKENS}[request.param]
        yield found
        found.close()


def most_open(said: list[int | ChunkHeader]) -> int:
    """Most requests that had been sent and not been answered at any time."""
    asked: set[int] = set()
    most, answered = 0, 0
    for one in said:
        if isinstance(one, ChunkHeader):
            answered = one.request or 0
            asked = {number for number in asked if number > answered}
        elif one > answered:
            asked.add(one)
        most = max(most, len(asked))
    return most


def test_several_requests_are_open_and_answered_in_their_order(scene: Scene) -> None:
    scene.wait_for_chunks(12, 'chunks of several requests at a time')
    # Seen from here a request may overtake the chunk that made room for it.
    scene.graph.wait_for(lambda: most_open(list(scene.said)) >= 2, 'two open requests')
    scene.graph.wait_for(lambda: max(scene.were_open) >= 2, 'two of them by the status')
    assert max(scene.were_open) <= scene.most
    headers = scene.headers()
    assert {one.open_requests for one in headers} == {scene.most}
    requests = [one.request for one in headers]
    assert requests == sorted(requests)
    assert [one.observation_ns for one in headers] == sorted(one.observation_ns for one in headers)
    scene.graph.wait_for(
        lambda: (
            int(scene.status.get('taken_over', 0)) >= 6
            and scene.status.get('most_open_requests') == str(scene.most)
            and float(scene.status['observation_age_mean_ms']) > 0.0
        ),
        'chunks to take over, and the age of their observations',
    )
    assert int(scene.status.get('refused.out_of_order', 0)) == 0


def test_no_answer_to_the_instruction_before_follows_a_change(scene: Scene) -> None:
    """Changed until an inference of the old instruction was under way, and ended after it."""
    discarded = 0
    for change, text in enumerate((SECOND, FIRST) * 10):
        scene.wait_for_chunks(2, 'chunks of the instruction before')
        replaced = scene.replaced
        assert scene.graph.set_parameter(POLICY, 'instruction', text).successful
        changed_ns = scene.arm.now_ns()
        last = scene.headers()[-1].request
        assert last is not None
        asked = [one for one in scene.said if isinstance(one, int)]

        def told_after(since_ns: int = changed_ns) -> list[dict[str, str]]:
            return [told for when_ns, told in list(scene.reports) if when_ns > since_ns]

        # Some from before it may still come.
        scene.graph.wait_for(lambda told=told_after: len(told()) >= 3, 'reports after the change')
        after = told_after()
        assert {told['instruction'] for told in after} == {text}
        discarded += sum(int(told['discarded']) for told in after)
        # Those that were open are answered anew, the oldest first; a starved node misses some.
        numbers = [one.request or 0 for one in scene.headers() if (one.request or 0) > last]
        assert numbers == sorted(numbers)
        # A request that was sent again counts once.
        open_then = {number for number in asked if number > last}
        if len(open_then) >= 2 and numbers[0] > max(open_then):
            # A robot whose plan ended on a starved machine has asked anew, for all of them.
            scene.graph.wait_for(
                lambda before=replaced: scene.replaced > before, 'requests in their places'
            )
        # Those in the passes of a packed policy are dropped on the way.
        if change >= 2 and (discarded or scene.most != 2):
            return
    raise AssertionError('no inference was under way at any change')


@pytest.mark.thorough
@pytest.mark.parametrize('scene', ['packed'], indirect=True)
def test_its_packed_chunks_replay_bit_for_bit(scene: Scene, tmp_path: Path) -> None:
    """Each alone now: packed with whatever was open, a request wrote what it writes alone."""
    made, said = scene.graph, dict[str, str]()

    def on_diagnostics(message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == '/vla_recorder: recording':
                said.update(values_of(status))

    made.node.create_subscription(DiagnosticArray, '/diagnostics', on_diagnostics, RELIABLE)
    assert made.set_parameter(POLICY, 'instruction', FIRST).successful
    scene.wait_for_chunks(2, 'chunks of the instruction')
    recorder = made.start(
        'vla_runtime.nodes.recorder.node',
        *('--ros-args', '-p', f'robot:={scene.robot}', '-p', f'folder:={tmp_path / "bag"}'),
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
