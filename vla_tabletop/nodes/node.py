"""`tabletop_node`: the simulated tabletop robot, as its drivers and controllers would be.

It publishes the robot file's joint states (100 Hz) and cameras, `robot_description` (its URDF,
latched), `~/report` (one DiagnosticArray an instruction: the simulator's verdict) and
`/diagnostics`. It subscribes to the robot file's outputs
and the policy's current instruction. Service `~/reset` begins the scene of parameters `seed` and
`variant`.

Invariants:
- a world belongs to one thread: cameras render another world, set to the physics' state before
  each frame, so rendering never delays joint states;
- joint states and images carry the ROS time of their physics tick;
- the simulation runs in real time on the steady clock; it makes up for a few late steps, and the
  status says when a slow machine falls behind.
"""

from __future__ import annotations

import sys

if __name__ == '__main__':
    # Before what takes seconds to import: a Ctrl-C meanwhile ends the process quietly.
    from vla_runtime.nodes.node_main import run_module

    sys.exit(run_module('tabletop_node'))

import time
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import Trigger

from vla_runtime.files.package_files import share_folder
from vla_runtime.messages.diagnostics import (
    REPEAT_LOG_S,
    Level,
    StatusItem,
    Throttle,
    to_message,
)
from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.nodes.executor.steady_loop import SteadyLoop
from vla_runtime.nodes.node_parameters import refuse_unknown
from vla_runtime.nodes.node_runner import guarded, run_node
from vla_runtime.nodes.output_types import message_type
from vla_runtime.nodes.parameters import declare, values
from vla_runtime.nodes.polled_topics import HeardStatus
from vla_runtime.nodes.qos import LATCHED, RELIABLE
from vla_runtime.nodes.twins import ITEM, Claim, Twins, node_item
from vla_runtime.robot.file import find_robot, load_robot
from vla_tabletop.nodes.messages import command_taker, image_message, joint_state_message
from vla_tabletop.nodes.parameters import TABLETOP_PARAMETERS
from vla_tabletop.nodes.robot import require_tabletop
from vla_tabletop.sim.arm import JOINT_NAMES
from vla_tabletop.sim.controller import JointFollower
from vla_tabletop.sim.episode import Episode, Verdict
from vla_tabletop.sim.scene import Scene, sample_scene
from vla_tabletop.sim.world import Tabletop

_NAME = 'tabletop'
_OWN_NAMESPACE = 'give this one a namespace of its own (namespace:=left at launch)'
_RATE_HZ = 100.0
_CATCH_UP_STEPS = 5
_STATUS_PERIOD_S = 1.0
_RESET_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class _Snapshot:
    """Snapshot that the cameras render: scene, positions, and their time."""

    scene: Scene
    configuration: np.ndarray
    stamp: Time


class TabletopNode(Node):
    def __init__(self) -> None:
        super().__init__(_NAME)
        declare(self, TABLETOP_PARAMETERS)
        refuse_unknown(self, TABLETOP_PARAMETERS)
        given = values(self, TABLETOP_PARAMETERS)
        self._robot = load_robot(find_robot(given['robot'], share_folder() / 'config' / 'robots'))
        require_tabletop(self._robot)
        self._heard = HeardStatus(self, (ITEM,))
        self._twins = Twins(self, self._heard)
        self._twins.require_first(self._claim('unconfigured'), _OWN_NAMESPACE)
        self._throttle = Throttle(REPEAT_LOG_S)
        self._lock = Lock()
        self._snapshot: _Snapshot | None = None
        self._wanted: Future[str] | None = None
        self._episode = Episode()
        self._verdicts: list[Verdict] = []
        self._simulated_s: float | None = None
        self._behind = 0
        self._world = Tabletop(_RATE_HZ)
        self._world.reset(given['seed'], given['variant'])
        self._follower = JointFollower(JOINT_NAMES, self._world.joint_positions)
        self._make_publishers()
        self._make_subscriptions(given['instruction_topic'])
        self.create_service(Trigger, '~/reset', self._guarded('reset', self._on_reset))
        self.create_timer(
            _STATUS_PERIOD_S,
            self._guarded('status', self._publish_status),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )
        self._physics = self._thread(self._step, _RATE_HZ, 'physics')
        self._camera_world: Tabletop | None = None
        self._camera_scene: Scene | None = None
        self._cameras = self._thread(
            self._render, given['camera_rate_hz'], 'cameras', on_stop=self._close_cameras
        )
        self._physics.start()
        self._cameras.start()

    def destroy_node(self) -> None:
        for loop in (self._cameras, self._physics):
            loop.stop()
        self._heard.close()
        super().destroy_node()

    def _claim(self, lifecycle: str = 'active') -> Claim:
        """Return what this node says of itself."""
        topics = [self.resolve_topic_name(source.topic) for source in self._robot.joint_states]
        return self._twins.claim(lifecycle, topics=topics)

    def _make_publishers(self) -> None:
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', RELIABLE)
        self._report = self.create_publisher(DiagnosticArray, '~/report', RELIABLE)
        shape = self.create_publisher(String, 'robot_description', LATCHED)
        shape.publish(String(data=self._world.urdf()))
        self._joint_states: list[tuple[Any, list[str], np.ndarray]] = []
        for source in self._robot.joint_states:
            names = source.joints or tuple(joint.name for joint in self._robot.joints)
            publisher = self.create_publisher(
                JointState, source.topic, _qos(source.depth, source.reliability)
            )
            in_messages = [self._robot.joint(name).in_messages for name in names]
            where = np.array([JOINT_NAMES.index(name) for name in names])
            self._joint_states.append((publisher, in_messages, where))
        self._images = [
            (
                camera,
                self.create_publisher(
                    CompressedImage if camera.type == 'compressed' else Image,
                    camera.topic,
                    _qos(camera.depth, camera.reliability),
                ),
            )
            for camera in self._robot.cameras
        ]

    def _make_subscriptions(self, instruction_topic: str) -> None:
        for output in self._robot.outputs:
            take = command_taker(output, self._robot, self._follower, self._now_ns)

            def on_command(message: Any, take: Any = take) -> None:
                with self._lock:
                    take(message, time.monotonic())

            self.create_subscription(
                message_type(output.kind),
                output.topic,
                self._guarded(output.topic, on_command),
                RELIABLE,
            )
        self.create_subscription(
            String, instruction_topic, self._guarded('instruction', self._on_instruction), LATCHED
        )

    # ------------------------------------------------------------ physics thread

    def _step(self, now_s: float) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self._begin_scene(wanted)
            setpoints = self._follower.update(now_s, self._world.joint_positions).copy()
        for _ in range(self._steps_due(now_s)):
            self._world.step(setpoints)
        state = self._world.state()
        stamp = ns_to_stamp(self._now_ns())
        for publisher, names, where in self._joint_states:
            publisher.publish(
                joint_state_message(names, state.joint_rad[where], state.joint_rad_s[where], stamp)
            )
        self._snapshot = _Snapshot(self._world.scene, self._world.configuration(), stamp)
        with self._lock:
            verdict = self._episode.judge(state)
        if verdict is not None:
            self._publish_verdict(verdict)

    def _steps_due(self, now_s: float) -> int:
        """Physics steps that bring the simulation up to now, as far as it may catch up."""
        if self._simulated_s is None:
            self._simulated_s = now_s - 1.0 / _RATE_HZ
        due = round((now_s - self._simulated_s) * _RATE_HZ)
        steps = min(due, _CATCH_UP_STEPS)
        self._behind += due - steps
        self._simulated_s += due / _RATE_HZ
        return steps

    def _begin_scene(self, wanted: Future[str]) -> None:
        seed, variant = self.get_parameter('seed').value, self.get_parameter('variant').value
        self._world.load(sample_scene(seed, variant))
        self._follower.restart(self._world.joint_positions)
        self._episode.reset()
        wanted.set_result(f'scene of seed {seed}, {variant}')

    def _publish_verdict(self, verdict: Verdict) -> None:
        outcome = verdict.outcome
        self._verdicts.append(verdict)
        values_: dict[str, object] = {'instruction': verdict.instruction}
        if outcome is None:
            level, text = Level.WARN, f"'{verdict.instruction}' is no task of the tabletop"
        else:
            level = Level.OK if outcome.success else Level.WARN
            text = f"{outcome.name} after {outcome.time_s:.2f} s: '{verdict.instruction}'"
            block = '' if outcome.block is None else Tabletop.colours[outcome.block]
            values_ |= {'outcome': outcome.name, 'time_s': outcome.time_s, 'block': block}
        self.get_logger().info(text)
        self._publish(self._report, [StatusItem('instruction', level, text, values_)])

    # ------------------------------------------------------------ camera thread

    def _render(self, _: float) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        if self._camera_world is None:
            self._camera_world = Tabletop(_RATE_HZ)
        world = self._camera_world
        if snapshot.scene is not self._camera_scene:
            world.load(snapshot.scene)
            self._camera_scene = snapshot.scene
        world.show(snapshot.configuration)
        for camera, publisher in self._images:
            image = world.render(camera.name, camera.width or 320, camera.height or 240)
            publisher.publish(image_message(camera, image, snapshot.stamp))

    def _close_cameras(self) -> None:
        # The rendering context must go in the thread that made it.
        if self._camera_world is not None:
            self._camera_world.close()

    # ------------------------------------------------------------ callbacks

    def _on_instruction(self, message: String) -> None:
        with self._lock:
            if message.data.strip():
                self._episode.give(message.data)
            else:
                self._episode.reset()

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        wanted: Future[str] = Future()
        with self._lock:
            self._wanted = wanted
        response.message = wanted.result(timeout=_RESET_TIMEOUT_S)
        response.success = True
        return response

    def _publish_status(self) -> None:
        physics, cameras = self._physics.lateness(), self._cameras.lateness()
        slow = self._behind > 0.02 * max(physics.ticks, 1)
        text = f'{_RATE_HZ:g} Hz, {self._behind} steps behind'
        if slow:
            text += ': this machine is too slow for real time'
        done = sum(v.outcome is not None and v.outcome.success for v in self._verdicts)
        given = self.get_parameters(['seed', 'variant'])
        self._publish(
            self._diagnostics,
            [
                StatusItem(
                    'simulation',
                    Level.WARN if slow else Level.OK,
                    text,
                    {
                        'steps': physics.ticks,
                        'behind': self._behind,
                        'late_p99_ms': physics.p99_ms,
                        'frames': cameras.ticks,
                        'frames_skipped': cameras.skipped,
                        'seed': given[0].value,
                        'variant': given[1].value,
                    },
                ),
                StatusItem(
                    'instructions',
                    Level.OK,
                    f'{done} of {len(self._verdicts)} carried out',
                    {
                        'judged': len(self._verdicts),
                        'carried_out': done,
                        'current': self._episode.instruction or '',
                    },
                ),
                node_item(self._claim()),
            ],
        )

    # ------------------------------------------------------------ helpers

    def _thread(self, tick: Any, rate_hz: float, name: str, on_stop: Any = None) -> SteadyLoop:
        return SteadyLoop(
            tick, rate_hz, name, lambda error: self._on_error(name, error), on_stop=on_stop
        )

    def _guarded(self, name: str, callback: Any) -> Any:
        return guarded(self._on_error, name, callback)

    def _on_error(self, name: str, error: Exception) -> None:
        text = f'{name}: {type(error).__name__}: {error}'
        if self._throttle.passes(text, time.monotonic()):
            self.get_logger().warning(text)

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _publish(self, publisher: Any, conditions: list[StatusItem]) -> None:
        publisher.publish(
            to_message(
                conditions,
                node=self.get_fully_qualified_name(),
                hardware=self._robot.name,
                stamp=self.get_clock().now().to_msg(),
            )
        )


def _qos(depth: int, reliability: str) -> QoSProfile:
    """Return the QoS that a publisher offers a subscriber of the robot file."""
    wanted = (
        ReliabilityPolicy.RELIABLE if reliability == 'reliable' else ReliabilityPolicy.BEST_EFFORT
    )
    return QoSProfile(depth=depth, reliability=wanted)


def main(args: list[str] | None = None) -> int:
    """`ros2 run vla_runtime tabletop_node`."""
    return run_node(TabletopNode, _NAME, args)
