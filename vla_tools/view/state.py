"""What is known of a robot at one moment, put together from its messages: no ROS 2 in here.

The graph and a bag fill it alike. Times are ROS times in nanoseconds; the caller has the clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.policy.description import read_description
from vla_runtime.nodes.robot_report import RobotReport
from vla_runtime.robot.limits import urdf_limits
from vla_runtime.robot.schema import Robot
from vla_tools.view import wire
from vla_tools.view.wire import Inference, Motion

# A stamp further than this from the clock is another clock's: the age is that of the arrival.
_SAME_CLOCK_NS = 60_000_000_000
# A plan is asked for again before it ends.
_PLAN_OVER_S = 1.0
# Chunks whose paths are shown, the oldest faintest.
SHOWN_CHUNKS = 5


@dataclass(frozen=True)
class Strip:
    """One quantity over time: its unit in words, and what a point's mark means."""

    title: str
    unit: str
    mark: str = ''


STRIPS: Mapping[str, Strip] = {
    'latency': Strip('Inference', 'ms'),
    'cache': Strip('Prefix cache', '% reused'),
    'replan': Strip('Replan interval', 'steps'),
    'delay': Strip('Delay', 'steps', 'late'),
    'age': Strip('Observation behind the action', 'ms'),
    'tick': Strip('Ticks of the executor, p99 late', 'ms'),
}


@dataclass
class _Measured:
    position: float
    stamp_ns: int


@dataclass
class CameraState:
    """One camera.

    Attributes:
        topic: full name.
        number: of the newest picture, counted up.
        rate_hz: of its driver; None before two frames came.
        problem: what is wrong with its frames; '' where nothing is.
    """

    name: str
    topic: str
    number: int = 0
    stamp_ns: int = 0
    arrived_ns: int = 0
    rate_hz: float | None = None
    problem: str = ''

    def age_ms(self, now_ns: int) -> float | None:
        """Return the age of the newest frame; None before the first."""
        if not self.arrived_ns:
            return None
        behind = now_ns - self.stamp_ns
        if abs(behind) > _SAME_CLOCK_NS:
            behind = now_ns - self.arrived_ns
        return max(behind, 0) * 1e-6


@dataclass
class ViewState:
    """Everything that a page shows; one thread fills and reads it.

    Attributes:
        namespace: full name, '' for the root.
        robot: the robot file, given or from the policy's description; None where it is not known.
        urdf: text of the robot's description; '' where there is none.
        version: counts changes of robot, cameras and joints: what `moment.constants` returns.
        kept_points: of each strip, for a page that opens.
    """

    namespace: str
    robot: Robot | None = None
    urdf: str = ''
    version: int = 0
    instruction: str = ''
    chunks: deque[Motion] = field(default_factory=lambda: deque(maxlen=SHOWN_CHUNKS))
    cameras: dict[str, CameraState] = field(default_factory=dict)
    inference: Inference | None = None
    report: RobotReport | None = None
    kept_points: int = 3000
    points: dict[str, deque[tuple[float, float, bool]]] = field(default_factory=dict)
    _plan: Motion | None = None
    _plan_begin_ns: int = 0
    _measured: dict[str, _Measured] = field(default_factory=dict)
    _fresh: list[tuple[str, float, float, bool]] = field(default_factory=list)
    _own_urdf: str = ''

    def __post_init__(self) -> None:
        self.points = {name: deque(maxlen=self.kept_points) for name in STRIPS}
        if self.robot is not None:
            self.use_robot(self.robot)

    def full_name(self, topic: str) -> str:
        return topic if topic.startswith('/') else f'{self.namespace}/{topic}'

    def use_robot(self, robot: Robot) -> None:
        """Show this robot's joints and cameras from now on."""
        self.robot = robot
        self.urdf = robot.urdf_text or self._own_urdf
        self.cameras = {
            camera.name: CameraState(camera.name, self.full_name(camera.topic))
            for camera in robot.cameras
        }
        self.version += 1

    def encoding_of(self, name: str) -> str | None:
        """Return what the robot file says that a camera's bytes mean."""
        cameras = self.robot.cameras if self.robot is not None else ()
        return next((camera.encoding for camera in cameras if camera.name == name), None)

    # --- messages

    def take(self, role: str, message: Any, now_ns: int) -> None:
        """Take a message of one of `wire.TOPICS`."""
        if role in (wire.PLAN, wire.CHUNK):
            motion = wire.read_motion(role, message)
            if motion is None:
                return
            if role == wire.PLAN:
                self._plan = motion
                same_clock = abs(now_ns - motion.stamp_ns) < _SAME_CLOCK_NS
                self._plan_begin_ns = motion.stamp_ns if same_clock else now_ns
            elif not self.chunks or self.chunks[-1].stamp_ns != motion.stamp_ns:
                self.chunks.append(motion)
        elif role == wire.INFERENCE:
            for inference in wire.read_inferences(message):
                self._take_inference(inference, now_ns)
        elif role == wire.HANDOVER:
            for handover in wire.read_handovers(message):
                self._add('delay', now_ns, handover.delay_steps, mark=handover.late)
        elif role == wire.INSTRUCTION:
            self.instruction = message.data
        elif role == wire.DESCRIPTION:
            self._take_description(message.data)
        elif role == wire.URDF:
            self._take_urdf(message.data)

    def take_joints(self, message: Any, now_ns: int) -> None:
        """Take a `sensor_msgs/JointState`."""
        stamp_ns = stamp_to_ns(message.header.stamp) or now_ns
        known = self._measured.keys()
        if self.robot is None and not known >= {*message.name}:
            self.version += 1
        for name, position in zip(message.name, message.position, strict=False):
            self._measured[name] = _Measured(float(position), stamp_ns)

    def take_report(self, report: RobotReport | None, now_ns: int) -> None:
        """Take what the robot's nodes say of themselves."""
        self.report = report
        control, tick = self.item('control'), self.item('tick')
        self._add_value('replan', now_ns, control, 'replan_interval')
        if report is not None and report.is_moving:
            self._add_value('age', now_ns, control, 'observation_age_ms')
        self._add_value('tick', now_ns, tick, 'late_p99_ms')

    def take_frame(self, name: str, stamp_ns: int, now_ns: int, rate_hz: float | None) -> None:
        """Note that a camera's frame has come; `rate_hz` is its driver's, None if not known."""
        camera = self.cameras[name]
        camera.number += 1
        camera.stamp_ns, camera.arrived_ns, camera.rate_hz = stamp_ns, now_ns, rate_hz

    def _take_inference(self, inference: Inference, now_ns: int) -> None:
        self.inference = inference
        self._add('latency', now_ns, inference.total_ms)
        if inference.looked_up:
            self._add('cache', now_ns, 100.0 * inference.reused / inference.looked_up)

    def _take_description(self, text: str) -> None:
        try:
            robot = read_description(text).robot
        except ValueError:
            # Of another release, or of a node that is not ours.
            return
        if self.robot is None or self.robot.text != robot.text:
            self.use_robot(robot)

    def _take_urdf(self, text: str) -> None:
        self._own_urdf = text
        if text != self.urdf and not (self.robot and self.robot.urdf_text):
            self.urdf = text
            self.version += 1

    # --- strips

    def fresh_points(self) -> list[tuple[str, float, float, bool]]:
        """Return strip, time (s), value and mark of the points since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _add_value(self, strip: str, now_ns: int, values: Mapping[str, str], key: str) -> None:
        try:
            value = float(values[key])
        except (KeyError, ValueError):
            return
        self._add(strip, now_ns, value)

    def _add(self, strip: str, now_ns: int, value: float, *, mark: bool = False) -> None:
        if not math.isfinite(value):
            return
        point = (round(now_ns * 1e-9, 2), round(value, 2), mark)
        self.points[strip].append(point)
        self._fresh.append((strip, *point))

    # --- what is so

    def plan_at(self, now_ns: int) -> Motion | None:
        """Return the committed plan; None where it is over, as after a stop."""
        plan = self._plan
        if plan is None or not len(plan.rows):
            return None
        over_ns = self._plan_begin_ns + round((plan.duration_s + _PLAN_OVER_S) * 1e9)
        return plan if now_ns < over_ns else None

    def positions(self) -> dict[str, float]:
        """Return the newest position of every joint, by its name in messages."""
        return {name: one.position for name, one in self._measured.items()}

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return lower and upper limit of each joint in its unit, by its name in messages.

        Those of the robot file, else the URDF's; infinite where neither has one.
        """
        if self.robot is None:
            return {}
        known = urdf_limits(self.robot)
        found = {}
        for joint in self.robot.joints:
            its = known.get(joint.name, ColumnLimits())
            found[joint.in_messages] = (
                its.lower if joint.lower is None else joint.lower,
                its.upper if joint.upper is None else joint.upper,
            )
        return found

    def targets(self, now_ns: int) -> dict[str, float]:
        """Return the committed setpoint of each joint now; empty without a plan."""
        plan = self.plan_at(now_ns)
        row = None if plan is None else plan.row_after(1e-9 * (now_ns - self._plan_begin_ns))
        if plan is None or row is None:
            return {}
        return {
            name: float(value)
            for name, kind, value in zip(plan.names, plan.kinds, row, strict=True)
            if kind == 'position'
        }

    def item(self, item: str) -> Mapping[str, str]:
        """Return the values of a line of the executor's status; empty where it said none."""
        executor = None if self.report is None else self.report.executor
        found = None if executor is None else executor.item(item)
        return {} if found is None else found.values
