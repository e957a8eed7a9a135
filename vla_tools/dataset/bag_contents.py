"""All but the pixels of a bag: measured and commanded numbers, stamps of frames, and events.

One pass over the bag, in whatever namespace it was recorded. All times, also the recording times
of events, are of one clock (`BagClock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import TrajectoryError, message_to_plan
from vla_runtime.recording.bag_clock import BagClock, StampLog
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import RawMessage
from vla_runtime.recording.topics import (
    IMAGE_TYPES,
    INSTRUCTIONS,
    JOINT_STATE,
    PLAN_TYPES,
    STRING,
    Namespace,
    camera_topics,
    is_topic,
)
from vla_runtime.robot.match import command_units
from vla_runtime.robot.schema import Robot, RobotCamera, RobotOutput, is_received
from vla_tools.dataset.bag_facts import COMMAND_KINDS, DIAGNOSTICS, find_topics
from vla_tools.dataset.drivers import DriverChange, Drivers, changes_of
from vla_tools.dataset.layout import DatasetError

# --- Time series of measured or commanded numbers

# Age before the first row.
NEVER_NS = np.iinfo(np.int64).max
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class JointSeries:
    """Rows of one number a name, at rising times."""

    names: tuple[str, ...]
    times_ns: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)

    def add(self, time_ns: int, row: list[float]) -> None:
        """Add a row; one that is not newer than the last, or not finite, is left out."""
        newer = not self.times_ns or time_ns > self.times_ns[-1]
        # No NaN, infinity or float32 overflow.
        if newer and len(row) == len(self.names) and all(abs(value) < _LARGEST for value in row):
            self.times_ns.append(time_ns)
            self.rows.append(row)

    def at(self, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest rows at or before these times, (n,) int64.

        Rows are (n, names) float32, their ages (n,) int64 ns; `NEVER_NS` before the first.
        """
        values = np.array(self.rows, dtype=np.float32).reshape(-1, len(self.names))
        index, ages = newest(np.array(self.times_ns, dtype=np.int64), times_ns)
        if not len(values):
            return np.zeros((len(times_ns), len(self.names)), np.float32), ages
        return values[index], ages


def newest(known_ns: np.ndarray, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return index (n,) and age (n,) int64 of the newest known time at or before each time.

    `known_ns` (k,) int64 rises. Where there is none, the index is 0 and the age `NEVER_NS`.
    """
    after = np.searchsorted(known_ns, times_ns, side='right')
    index = np.maximum(after - 1, 0)
    ages = np.full(len(times_ns), NEVER_NS, dtype=np.int64)
    there = after > 0
    ages[there] = times_ns[there] - known_ns[index[there]]
    return index, ages


@dataclass(frozen=True)
class Event:
    """Begin or end of an episode, on the bag's clock.

    `kind` is `instruction`, `episode` (of the executor) or `verdict`; `text` is the instruction,
    `success` the verdict.
    """

    time_ns: int
    kind: str
    text: str = ''
    success: bool | None = None


@dataclass
class BagContents:
    """Contents of a bag, pixels left out.

    Attributes:
        states: by joint, in the robot file's order.
        actions: by recorded output of the robot file.
        missing_outputs: topics of the outputs not recorded.
        frames: camera to the times of its frames, (n,) int64, rising.
        events: rising in time.
        drivers: who drove when.
    """

    reader: BagReader
    clock: BagClock
    states: list[JointSeries]
    actions: list[JointSeries]
    missing_outputs: list[str]
    camera_topics: dict[str, str]
    cameras: dict[str, RobotCamera]
    frames: dict[str, np.ndarray]
    events: list[Event]
    drivers: Drivers


def read_contents(reader: BagReader, robot: Robot, namespace: str | None = None) -> BagContents:
    """Read a bag.

    Raises MissingTopicError: a topic of the robot file is missing; NamespaceError: several robots;
    ClockError: messages cannot be ordered; DatasetError: a joint is never in its topic.
    `namespace`: of the robot in the bag; None: the only one.
    """
    collector = _EpisodeCollector(reader, robot, namespace)
    for raw in tqdm(
        reader.messages(collector.wants), f'read {reader.path.name}', disable=None, leave=False
    ):
        collector.take(raw)
    return collector.contents()


@dataclass
class _Topic:
    """Messages of one topic, as far as they matter, and when they were recorded."""

    kind: str
    times_ns: list[int] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


class _EpisodeCollector:
    def __init__(self, reader: BagReader, robot: Robot, namespace: str | None) -> None:
        self._reader, self._robot = reader, robot
        self._wanted, self._namespace = namespace, Namespace()
        self._topics: dict[str, _Topic] = {}
        self._stamps = StampLog()
        images = {name for camera in robot.cameras for name in camera_topics(camera.topic)}
        outputs = {(output.command_topic, COMMAND_KINDS[output.kind]) for output in robot.outputs}
        self._names: set[tuple[str, str]] = {
            *((name, kind) for name in images for kind in IMAGE_TYPES),
            *((source.topic, JOINT_STATE) for source in robot.joint_states),
            *outputs,
            *((name, STRING) for name in INSTRUCTIONS),
            *(('committed_plan', kind) for kind in PLAN_TYPES),
            ('report', DIAGNOSTICS),
        }

    def wants(self, topic: str, kind: str) -> bool:
        return any(kind == wanted and is_topic(topic, name) for name, wanted in self._names)

    def take(self, raw: RawMessage) -> None:
        topic = self._topics.setdefault(raw.topic, _Topic(raw.type_name))
        if raw.type_name in IMAGE_TYPES:
            self._stamps.note(raw)
            return
        message = self._reader.read(raw)
        if message is None:
            return
        self._stamps.note(raw)
        topic.times_ns.append(raw.time_ns)
        topic.items.append(message)

    def contents(self) -> BagContents:
        robot = self._robot
        kinds = {name: one.kind for name, one in self._topics.items()}
        topics = find_topics(self._reader, robot, kinds, self._wanted)
        self._namespace = topics.namespace
        cameras, joints, outputs = topics.cameras, topics.joints, topics.outputs
        clock = self._stamps.clock(
            self._reader.path,
            [*joints.values(), *cameras.values(), *outputs.values()],
            {
                *(cameras[one.name] for one in robot.cameras if one.stamp == 'receive'),
                *(topic for name, topic in joints.items() if is_received(robot, name)),
            },
        )
        actions = self._actions(outputs, clock)
        return BagContents(
            reader=self._reader,
            clock=clock,
            states=[self._state(joint, topic, clock) for joint, topic in joints.items()],
            actions=list(actions.values()),
            missing_outputs=[o.command_topic for o in robot.outputs if o.topic not in actions],
            camera_topics=cameras,
            cameras={camera.name: camera for camera in robot.cameras},
            frames={camera: np.unique(clock.times(topic)) for camera, topic in cameras.items()},
            events=sorted(
                self._events(clock, topics.instructions), key=lambda event: event.time_ns
            ),
            drivers=Drivers(self._driver_changes(clock)),
        )

    def _find(self, names: Sequence[str], types: Sequence[str]) -> str | None:
        kinds = {name: one.kind for name, one in self._topics.items()}
        return self._namespace.find_topic(kinds, names, types)

    def _state(self, joint: str, topic: str, clock: BagClock) -> JointSeries:
        robot = self._robot
        series, name = JointSeries((joint,)), robot.joint(joint).in_messages
        for time_ns, message in self._timed(topic, clock):
            names = list(message.name)
            if name in names and len(message.position) == len(names):
                series.add(time_ns, [float(message.position[names.index(name)])])
        if not series.rows:
            raise DatasetError(
                f"{self._reader.path}: topic {topic} never has joint '{name}' of the robot file "
                f'{self._robot.file.name}'
            )
        return series

    def _actions(self, topics: Mapping[str, str], clock: BagClock) -> dict[str, JointSeries]:
        found = {}
        for output in self._robot.outputs:
            if output.topic not in topics:
                continue
            series = JointSeries(_column_names(output))
            read = _READERS[output.kind](output, self._robot)
            units = command_units(output, self._robot)
            for time_ns, message in self._timed(topics[output.topic], clock):
                row = read(message)
                # Commands and measured positions of a joint are in one unit in a data set.
                if row is not None and units is not None and len(row) == len(output.joints):
                    row = units.to_policy(np.array(row)).tolist()
                if row is not None:
                    series.add(time_ns, row)
            if series.rows:
                found[output.topic] = series
        return found

    def _timed(self, topic: str, clock: BagClock) -> Iterator[tuple[int, Any]]:
        """Yield a topic's messages with their times."""
        items = self._topics[topic].items
        return zip(clock.times(topic).tolist(), items, strict=True) if items else iter(())

    def _events(self, clock: BagClock, instructions: str | None) -> list[Event]:
        """Return the events by the times of their recording, which is their order."""

        def event(time_ns: int, kind: str, **facts: Any) -> Event:
            return Event(int(clock.at(np.array([time_ns]))[0]), kind, **facts)

        events = []
        if instructions is not None:
            topic = self._topics[instructions]
            for time_ns, message in zip(topic.times_ns, topic.items, strict=True):
                events.append(event(time_ns, 'instruction', text=message.data.strip()))
        plans = self._find(('committed_plan',), PLAN_TYPES)
        episode: int | None = None
        for time_ns, plan in self._trajectories(plans, message_to_plan):
            if plan.episode != episode:
                episode = plan.episode
                events.append(event(time_ns, 'episode'))
        for time_ns, message in self._reports():
            success = _verdict(message)
            if success is not None:
                events.append(event(time_ns, 'verdict', success=success))
        return events

    def _driver_changes(self, clock: BagClock) -> Iterator[DriverChange]:
        for time_ns, message in self._reports():
            yield from changes_of(message, int(clock.at(np.array([time_ns]))[0]))

    def _reports(self) -> Iterator[tuple[int, Any]]:
        """Yield the robot's reports with the times of their recording."""
        for name, topic in self._topics.items():
            if is_topic(name, 'report') and not self._namespace.is_other(name):
                yield from zip(topic.times_ns, topic.items, strict=True)

    def _trajectories(self, name: str | None, read: Callable[[Any], Any]) -> list[tuple[int, Any]]:
        if name is None:
            return []
        topic, found = self._topics[name], []
        for time_ns, message in zip(topic.times_ns, topic.items, strict=True):
            try:
                found.append((time_ns, read(message)))
            except TrajectoryError:
                continue
        return found


def _verdict(message: Any) -> bool | None:
    """Return a report's verdict: True if its status is OK."""
    for status in message.status:
        if status.name.endswith(': instruction') and 'outcome' in values_of(status):
            level = status.level
            return (level[0] if isinstance(level, bytes) else int(level)) == 0
    return None


def _column_names(output: RobotOutput) -> tuple[str, ...]:
    if output.kind == 'pose_stamped':
        return tuple(f'{output.pose}.{axis}' for axis in ('x', 'y', 'z', 'qx', 'qy', 'qz', 'qw'))
    if output.kind == 'twist_stamped':
        return tuple(f'{output.pose}.{axis}' for axis in ('vx', 'vy', 'vz', 'wx', 'wy', 'wz'))
    suffix = '.velocity' if output.interface == 'velocity' else ''
    return tuple(f'{joint}{suffix}' for joint in output.joints)


_Read = Callable[[Any], 'list[float] | None']


def _by_name(
    output: RobotOutput, robot: Robot, names: Sequence[str], values: Sequence[float]
) -> list[float] | None:
    """Return values in the output's order; None where a joint is missing."""
    given = dict(zip(names, values, strict=False))
    wanted = [robot.joint(joint).in_commands for joint in output.joints]
    return [float(given[name]) for name in wanted] if given.keys() >= set(wanted) else None


def _is_ahead(time_from_start: Any) -> bool:
    return bool(time_from_start.sec or time_from_start.nanosec)


def _trajectory(output: RobotOutput, robot: Robot) -> _Read:
    def read(message: Any) -> list[float] | None:
        if not message.points:
            return None
        # A first point at time zero is where the motion begins, unless it is alone. Of commands at
        # the times when they are due the next one is about where the controller is now.
        ahead = (point for point in message.points if _is_ahead(point.time_from_start))
        point = next(ahead, message.points[-1])
        values = point.velocities if output.interface == 'velocity' else point.positions
        return _by_name(output, robot, message.joint_names, values)

    return read


def _joint_state(output: RobotOutput, robot: Robot) -> _Read:
    return lambda message: _by_name(output, robot, message.name, getattr(message, output.interface))


def _array(output: RobotOutput, robot: Robot) -> _Read:
    return lambda message: [float(value) for value in message.data]


def _group(output: RobotOutput, robot: Robot) -> _Read:
    return lambda message: [float(value) for value in message.cmd]


def _single(output: RobotOutput, robot: Robot) -> _Read:
    return lambda message: [float(message.cmd)]


def _pose(output: RobotOutput, robot: Robot) -> _Read:
    def read(message: Any) -> list[float]:
        position, turn = message.pose.position, message.pose.orientation
        return [position.x, position.y, position.z, turn.x, turn.y, turn.z, turn.w]

    return read


def _twist(output: RobotOutput, robot: Robot) -> _Read:
    def read(message: Any) -> list[float]:
        linear, angular = message.twist.linear, message.twist.angular
        return [linear.x, linear.y, linear.z, angular.x, angular.y, angular.z]

    return read


_READERS: Mapping[str, Callable[[RobotOutput, Robot], _Read]] = {
    'joint_trajectory': _trajectory,
    'float64_multi_array': _array,
    'joint_state': _joint_state,
    'joint_group_command': _group,
    'joint_single_command': _single,
    'gripper_command': _joint_state,
    'parallel_gripper_command': _joint_state,
    'pose_stamped': _pose,
    'twist_stamped': _twist,
}
