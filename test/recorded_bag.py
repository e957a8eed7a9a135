"""A small recording made from a seed: the node's own responder and conversions, without a graph."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from vla_runtime.messages.diagnostics import to_message
from vla_runtime.messages.trajectories import (
    chunk_to_message,
    message_to_plan,
    ns_to_stamp,
    plan_to_message,
)
from vla_runtime.nodes.policy.description import Run, describe
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_runtime.nodes.policy.responder import Responder
from vla_runtime.nodes.policy.settings import settings_from
from vla_runtime.nodes.policy.status import report
from vla_runtime.nodes.recorder.topic_recorder import type_name
from vla_runtime.policy import Policy
from vla_runtime.recording.bag_writer import Offer
from vla_runtime.recording.recording import Recording, RecordingLimits
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.joint_buffer import JointSource
from vla_runtime.sensors.synchronizer import Synchronizer, SyncLimits
from vla_runtime.types import PlanRequest

START_NS = 1_700_000_000_000_000_000
# From one request to the next.
TURN_NS = 200_000_000
TASK = 'pick up the red cup'
NODE = '/vla_policy'
_LATCHED = Offer(depth=1, latched=True)
# Its drivers speak degrees at one joint, and know a camera by another name than the policy.
ROBOT = """
format: 1
name: tiny
joints:
  - {name: shoulder, unit: deg, lower: -170.0, upper: 170.0, velocity: 500.0}
  - {name: elbow, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
  - {name: gripper, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
cameras:
  - {name: overhead, topic: top/image, aliases: [top]}
  - {name: wrist, topic: wrist/image, width: 40, height: 30}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [shoulder, elbow, gripper]}
"""


@dataclass(frozen=True)
class Turn:
    """One inference to record.

    Attributes:
        settings: parameters of the node that are not as by default.
        episode: episode of the request.
        rows: setpoints of the committed plan.
        still: the cameras show what they showed before.
        same: cameras, by topic, that have no newer frame than before.
        age_ns: age of the frames and joint states when the inference begins.
        repeated: the request is sent again, with a newer plan, before it is answered.
        lost: topics whose messages of this turn are not in the recording.
        discarded: the instruction changed meanwhile: its chunk is not published, nor its report.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    episode: int = 1
    rows: int = 6
    still: bool = False
    same: Sequence[str] = ()
    age_ns: int = 0
    repeated: bool = False
    lost: Sequence[str] = ()
    discarded: bool = False


def record(
    folder: Path,
    bundle: Path,
    robot_file: Path,
    turns: Sequence[Turn],
    *,
    seed: int = 0,
    threads: int = 1,
    limits: RecordingLimits | None = None,
) -> Path:
    """Write a recording of these inferences; returns its folder."""
    maker = _Maker(folder, bundle, robot_file, seed, threads, limits or RecordingLimits())
    for turn in turns:
        maker.turn(turn)
    maker.close()
    return folder


class _Maker:
    def __init__(
        self,
        folder: Path,
        bundle: Path,
        robot_file: Path,
        seed: int,
        threads: int,
        limits: RecordingLimits,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._policy = Policy.load(bundle)
        self._robot = load_robot(robot_file)
        self._match = match_robot(self._robot, self._policy.spec, bundle)
        self._now_ns = START_NS
        self._step_ns = round(self._policy.spec.step_time_s * 1e9)
        topics = {name: f'/{camera.topic}' for name, camera in self._match.cameras.items()}
        earlier = self._match.earlier
        self._topics = {name: topic for name, topic in topics.items() if name not in earlier}
        self._joints_topic = '/joint_states'
        self._synchronizer = Synchronizer(
            topics,
            [JointSource(self._joints_topic, joint) for joint in self._match.measured_joints],
            SyncLimits(250_000_000, 500_000_000),
            self._match.earlier,
            self._match.state_ages_ns,
        )
        self._responder = Responder(
            self._policy,
            self._match,
            self._synchronizer,
            now_ns=START_NS - 1,
            steady_ns=0,
        )
        self._request = 0
        self._pixels: dict[str, np.ndarray] = {}
        self._lost: Sequence[str] = ()
        self._discarded = 0
        self._recording = Recording(folder, limits, self._fail)
        self._known: set[str] = set()
        run = Run(
            bundle=str(bundle),
            backend='torch',
            device='cpu',
            precision='float32',
            use_cuda_graphs=True,
            triton='off',
            threads=threads,
        )
        text = describe(
            self._policy.spec,
            self._robot,
            self._match,
            run,
            topic_name=lambda topic: f'/{topic}',
        )
        self._write(f'{NODE}/description', String(data=text), _LATCHED)

    def turn(self, turn: Turn) -> None:
        self._now_ns += TURN_NS
        self._lost = turn.lost
        frames = self._look(turn.still, turn.same)
        plan = self._ask(turn)
        given = {row.name: row.default for row in POLICY_PARAMETERS} | dict(turn.settings)
        self._now_ns += turn.age_ns
        settings = settings_from(given)
        answer = self._responder.answer(plan, TASK, settings, now_ns=self._now_ns).result()
        if turn.discarded:
            self._discarded += 1
            return
        chunk = chunk_to_message(answer.chunk, answer.header)
        self._write('/action_chunk', chunk)
        live = {row.name: given[row.name] for row in POLICY_PARAMETERS if not row.read_only}
        cameras = self._match.cameras.items()
        by_content = [name for name, camera in cameras if camera.stamp == 'receive']
        discarded, self._discarded = self._discarded, 0
        item = report(answer, live, 1.0, by_content, discarded)
        message = to_message([item], node=NODE, hardware='tiny', stamp=Time())
        self._write(f'{NODE}/report', message)
        for topic, frame in frames.items():
            self._write(topic, frame)

    def _look(self, still: bool, same: Sequence[str]) -> dict[str, Image]:
        """Show the cameras and the joints to the policy."""
        frames = {}
        for name, topic in self._topics.items():
            if topic in same:
                continue
            camera = self._match.cameras[name]
            if not still or name not in self._pixels:
                shape = (camera.height or 24, camera.width or 32, 3)
                self._pixels[name] = self._random.integers(0, 256, shape, dtype=np.uint8)
            height, width, _ = self._pixels[name].shape
            image = Image(height=height, width=width, encoding='rgb8', step=3 * width)
            image.header.stamp = ns_to_stamp(self._now_ns)
            image.data = array.array('B', self._pixels[name].tobytes())
            frames[topic] = image
            self._synchronizer.add_frame(name, Frame(self._now_ns, 1, image), self._now_ns)
        names = list(self._match.state_joints)
        positions = [float(value) for value in self._random.uniform(-1, 1, len(names))]
        joints = JointState(name=names, position=positions)
        joints.header.stamp = ns_to_stamp(self._now_ns)
        self._synchronizer.add_joints(
            self._joints_topic, names, positions, self._now_ns, self._now_ns
        )
        self._write(self._joints_topic, joints)
        return frames

    def _ask(self, turn: Turn) -> Any:
        """Send the request, twice with plans of their own where it is repeated."""
        self._request += 1
        columns = self._match.action_names
        for again in range(2 if turn.repeated else 1):
            rows = self._random.uniform(-1, 1, (turn.rows, len(columns)))
            message = plan_to_message(
                PlanRequest(
                    rows,
                    columns,
                    ['position'] * len(columns),
                    self._policy.spec.step_time_s,
                    stamp_ns=self._now_ns - self._step_ns + again * self._step_ns,
                    episode=turn.episode,
                    certain=min(2, turn.rows),
                    request=self._request,
                )
            )
            self._write('/committed_plan', message)
        return message_to_plan(message)

    def _write(self, topic: str, message: Any, offer: Offer | None = None) -> None:
        if topic in self._lost:
            return
        if topic not in self._known:
            self._known.add(topic)
            self._recording.add_topic(topic, type_name(type(message)), offer or Offer(depth=10))
        self._recording.write(topic, self._now_ns, serialize_message(message))

    def close(self) -> None:
        self._recording.close()
        self._policy.close()

    @staticmethod
    def _fail(text: str) -> None:
        raise AssertionError(text)


def first_turns() -> list[Turn]:
    """Turns with settings, episodes and repeats of every kind."""
    guided = {'cfg_enabled': True, 'cfg_beta': 1.0 + np.pi / 7}
    tied = {'real_time_chunking': True, 'max_guidance_weight': 1 / 3 + 5}
    return [
        Turn(),
        Turn(guided),
        Turn(guided | tied, repeated=True),
        replace(Turn(tied), still=True),
        Turn({'denoise_steps': 5, 'seed': 2**40 + 3}),
        Turn(episode=2),
        Turn({'seed': 3}, episode=2),
        Turn(episode=2, rows=0),
    ]
