"""Bags for data sets, made by hand as `ros2 bag record` writes them: no policy, no graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer

from vla_runtime.recording.storage_file import message_types

TYPES = message_types()
KINDS = TYPES.types
START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
ROBOT = """
format: 1
name: small
joints:
  - {name: shoulder, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0, message_name: joint_1}
  - {name: gripper, unit: m, lower: 0.0, upper: 0.1, velocity: 1.0}
cameras:
  - {name: top, topic: top/image}
  - {name: hand, topic: hand/image, type: compressed}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [shoulder]}
  - {kind: float64_multi_array, topic: gripper/rate, interface: velocity, joints: [gripper]}
"""
HEIGHT, WIDTH = 12, 16
REPORTED_MS = 100


@dataclass
class Story:
    """Events of a bag; times in milliseconds from its start.

    Attributes:
        length_ms: length of the bag.
        said: time and instruction.
        episodes: time and number of the executor's episode.
        verdicts: time and whether it was a success.
        drivers: time, who drives from then on and who did before; reported 0.1 s late.
        frame_ms: between two frames of a camera.
        no_frames: camera to a time from and until which it is silent.
        damaged: numbers of the hand camera's frames that are no image.
        commands: True where outputs are in the bag.
        step_ms: step time of the chunks; 0 for no chunks.
        late_ms: stamp of one joint state more, at the end; 0 for none.
        clock_ms: by how much the recording's clock is ahead of the stamps.
        slow: seconds of the recording's clock in one of the stamps'.
        reset_ms: time at which the stamps begin at zero again; 0 for never.
        camera_ms: by how much stamps of the top camera are ahead; None: it has none.
        encoding: encoding of the top camera.
        prefix: namespace of all topics.
        typed: chunks and plans are those of `vla_interfaces`.
    """

    length_ms: int = 3000
    said: tuple[tuple[int, str], ...] = ((0, 'wave'),)
    episodes: tuple[tuple[int, int], ...] = ()
    verdicts: tuple[tuple[int, bool], ...] = ()
    drivers: tuple[tuple[int, str, str], ...] = ()
    frame_ms: int = 50
    no_frames: dict[str, tuple[int, int]] = field(default_factory=dict)
    damaged: tuple[int, ...] = ()
    commands: bool = True
    step_ms: int = 50
    late_ms: int = 0
    clock_ms: int = 0
    slow: float = 1.0
    reset_ms: int = 0
    camera_ms: int | None = 0
    encoding: str = 'rgb8'
    prefix: str = ''
    typed: bool = False
    plugin: StoragePlugin = StoragePlugin.MCAP


def position(ms: float) -> float:
    """Measured angle of the shoulder, radians."""
    return 0.001 * ms


def command(ms: float) -> float:
    """Commanded angle of the shoulder, radians: a little ahead."""
    return 0.001 * ms + 0.5


def pixels(number: int) -> np.ndarray:
    """(height, width, 3) uint8: a camera's frame."""
    return np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def jpeg(number: int) -> bytes:
    return bytes(cv2.imencode('.jpg', pixels(number)[:, :, ::-1])[1])


def write_bag(folder: Path, *stories: Story) -> Path:
    """Write a bag of one robot, or of several at once; returns its folder."""
    with Writer(folder, version=9, storage_plugin=stories[0].plugin) as writer:
        for story in stories:
            _Teller(writer, story).tell()
    return folder


class _Teller:
    def __init__(self, writer: Writer, story: Story) -> None:
        self._writer, self._story = writer, story
        self._connections: dict[str, Any] = {}

    def tell(self) -> None:
        story = self._story
        for ms in range(0, story.length_ms, 10):
            for at, text in story.said:
                if at == ms:
                    self._put(ms, 'vla_policy/instruction', 'std_msgs/msg/String', data=text)
            for at, number in story.episodes:
                if at == ms:
                    self._plan(ms, number)
            for at, success in story.verdicts:
                if at == ms:
                    self._verdict(ms, success)
            for at, driver, before in story.drivers:
                if at + REPORTED_MS == ms:
                    self._driver(at, driver, before)
            if ms == 0 and story.step_ms:
                self._chunk(ms)
            self._joints(ms)
            if story.commands:
                self._commands(ms)
            if ms % story.frame_ms == 0:
                self._frames(ms, ms // story.frame_ms)
        if story.late_ms:
            self._joints(story.late_ms)

    def _put(self, ms: float, topic: str, kind: str, **values: Any) -> None:
        name = f'{self._story.prefix}/{topic}'
        if name not in self._connections:
            self._connections[name] = self._writer.add_connection(name, kind, typestore=TYPES)
        message = KINDS[kind](**values)
        time_ns = START_NS + round((ms * self._story.slow + self._story.clock_ms) * MS)
        data = bytes(TYPES.serialize_cdr(message, kind))
        self._writer.write(self._connections[name], time_ns, data)

    def _joints(self, ms: int) -> None:
        none = np.zeros(0)
        self._put(
            ms,
            'joint_states',
            'sensor_msgs/msg/JointState',
            header=self._header(ms),
            name=['gripper', 'joint_1'],
            position=np.array([0.05, position(ms)]),
            velocity=none,
            effort=none,
        )

    def _commands(self, ms: int) -> None:
        # As the executor sends them: from the command before it to this one.
        rows = [[command(ms) - 0.5], [command(ms)]]
        self._trajectory(ms, 'arm/joint_trajectory', '', ['joint_1'], rows, stamp=False)
        layout = KINDS['std_msgs/msg/MultiArrayLayout'](dim=[], data_offset=0)
        kind = 'std_msgs/msg/Float64MultiArray'
        self._put(ms, 'gripper/rate', kind, layout=layout, data=np.array([0.25]))

    def _plan(self, ms: int, episode: int) -> None:
        tag = f'plan episode={episode} certain=0 request=0'
        self._trajectory(ms, 'committed_plan', tag, ['shoulder'], [])

    def _chunk(self, ms: int) -> None:
        tag = 'chunk episode=0 number=0 tied=0 request=0'
        self._trajectory(ms, 'action_chunk', tag, ['shoulder'], [[0.0], [0.1]])

    def _trajectory(
        self,
        ms: int,
        topic: str,
        tag: str,
        names: list[str],
        rows: list[list[float]],
        stamp: bool = True,
    ) -> None:
        none = np.zeros(0)
        duration = KINDS['builtin_interfaces/msg/Duration']
        points = [
            KINDS['trajectory_msgs/msg/JointTrajectoryPoint'](
                positions=np.array(row),
                velocities=none,
                accelerations=none,
                effort=none,
                time_from_start=duration(
                    sec=index * self._story.step_ms // 1000,
                    nanosec=index * self._story.step_ms % 1000 * MS,
                ),
            )
            for index, row in enumerate(rows)
        ]
        header = self._header(ms if stamp else None, tag)
        kind = 'trajectory_msgs/msg/JointTrajectory'
        fields = {'header': header, 'joint_names': names, 'points': points}
        if self._story.typed and tag:
            header.frame_id = ''
            what, *said = tag.split()
            facts = {key: int(value) for key, _, value in (one.partition('=') for one in said)}
            kind, fields = _typed(what, facts, KINDS[kind](**fields))
        self._put(ms, topic, kind, **fields)

    def _verdict(self, ms: int, success: bool) -> None:
        level = 0 if success else 1
        self._report(ms, 'judge/report', '/judge: instruction', level, {'outcome': 'some'})

    def _driver(self, ms: int, driver: str, before: str) -> None:
        stamp_ns = START_NS + ms * MS
        values = {'stamp_ns': str(stamp_ns), 'driver': driver, 'before': before}
        name = '/vla_executor: driver'
        self._report(ms + REPORTED_MS, 'vla_executor/report', name, 0, values)

    def _report(self, ms: int, topic: str, name: str, level: int, values: dict[str, str]) -> None:
        pair = KINDS['diagnostic_msgs/msg/KeyValue']
        status = KINDS['diagnostic_msgs/msg/DiagnosticStatus'](
            level=level,
            name=name,
            message='',
            hardware_id='',
            values=[pair(key=key, value=value) for key, value in values.items()],
        )
        kind = 'diagnostic_msgs/msg/DiagnosticArray'
        self._put(ms, topic, kind, header=self._header(ms), status=[status])

    def _frames(self, ms: int, number: int) -> None:
        camera_ms = self._story.camera_ms
        if not self._is_silent('top', ms):
            self._put(
                ms + 1,
                'top/image',
                'sensor_msgs/msg/Image',
                header=self._header(None if camera_ms is None else ms + camera_ms),
                height=HEIGHT,
                width=WIDTH,
                encoding=self._story.encoding,
                is_bigendian=0,
                step=3 * WIDTH,
                data=pixels(number).ravel(),
            )
        if not self._is_silent('hand', ms):
            data = b'\xff\xd8 cut off' if number in self._story.damaged else jpeg(number)
            self._put(
                ms + 1,
                'hand/image',
                'sensor_msgs/msg/CompressedImage',
                header=self._header(ms),
                format='jpeg',
                data=np.frombuffer(data, np.uint8),
            )

    def _header(self, ms: float | None, frame_id: str = '') -> Any:
        reset_ms = self._story.reset_ms
        if ms is not None and reset_ms and ms >= reset_ms:
            ms -= reset_ms
        return _header(ms, frame_id)

    def _is_silent(self, camera: str, ms: int) -> bool:
        begin, end = self._story.no_frames.get(camera, (0, 0))
        return begin <= ms < end


def _typed(what: str, facts: dict[str, int], trajectory: Any) -> tuple[str, dict[str, Any]]:
    """The type of a chunk or plan, and its fields, by the facts of its tag."""
    fields = {
        'trajectory': trajectory,
        'episode': facts['episode'],
        'has_step': False,
        'step': 0,
        'has_request': True,
        'request': facts['request'],
    }
    if what == 'plan':
        more = {'committed_steps': facts['certain']}
        return 'vla_interfaces/msg/CommittedPlan', {**fields, **more}
    more = {'number': facts['number'], 'conditioned': False, 'max_open_requests': 1}
    return 'vla_interfaces/msg/ActionChunk', {**fields, **more}


def _header(ms: float | None, frame_id: str = '') -> Any:
    stamp_ns = 0 if ms is None else START_NS + round(ms * MS)
    stamp = KINDS['builtin_interfaces/msg/Time'](
        sec=stamp_ns // 1_000_000_000, nanosec=stamp_ns % 1_000_000_000
    )
    return KINDS['std_msgs/msg/Header'](stamp=stamp, frame_id=frame_id)
