"""A leader arm's topics: its positions to the core, and the button that is held to lead.

A button counts as held for as long as its joystick says so: one that falls silent pauses the robot
as a lost leader does, and leads again after it was let go.
"""

from __future__ import annotations

import time

from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from rclpy.timer import Timer
from sensor_msgs.msg import JointState, Joy

from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.qos import MessageStamps
from vla_runtime.robot.leader import LeaderPositions, led_joints
from vla_runtime.robot.match import RobotMatch
from vla_runtime.robot.schema import LeaderButton, Robot

# The newest counts, and either kind of publisher is heard.
_NEWEST = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


class LeaderLink:
    """Subscriptions of an active executor node, until `close`."""

    def __init__(
        self,
        node: LifecycleNode,
        robot: Robot,
        match: RobotMatch,
        loop: ControlLoop,
        on_error: OnError,
    ) -> None:
        self._node, self._loop = node, loop
        self._subscriptions: list[Subscription] = []
        self._is_pressed = False
        # Steady time of the joystick's last message; None while that is known to be too old.
        self._heard_s: float | None = None
        self._told_number = False
        self._timer: Timer | None = None
        leader, led = robot.leader, led_joints(robot, match)
        if leader is None or not led:
            return
        self._positions = LeaderPositions(robot, led)
        self._stamps = MessageStamps(node.get_clock(), leader.stamp)
        self._listen(JointState, leader.topic, guarded(on_error, leader.topic, self._on_state))
        button = leader.button
        if button is not None:
            topic, timeout_s = button.topic, leader.timeout_s

            def on_joy(message: Joy) -> None:
                self._on_joy(message, button)

            self._listen(Joy, topic, guarded(on_error, topic, on_joy))
            self._timer = node.create_timer(
                0.25 * timeout_s,
                guarded(on_error, topic, lambda: self._look(topic, timeout_s)),
                clock=Clock(clock_type=ClockType.STEADY_TIME),
            )

    def _listen(self, kind: type, topic: str, callback: object) -> None:
        self._subscriptions.append(
            self._node.create_subscription(kind, topic, callback, _NEWEST)  # type: ignore[arg-type]
        )

    def _on_state(self, message: JointState) -> None:
        positions = self._positions.read(message.name, message.position)
        self._loop.observe_leader(positions, self._stamps.of(message))

    def _on_joy(self, message: Joy, button: LeaderButton) -> None:
        """Take over when the button goes down, give back when it comes up."""
        number, there = button.number, len(message.buttons)
        self._heard_s = time.monotonic()
        if number >= there and not self._told_number:
            self._told_number = True
            self._node.get_logger().error(
                f'{button.topic} has {there} buttons, counted from 0, and no number {number} '
                '(leader.button.number of the robot file): it cannot let the leader lead'
            )
        pressed = number < there and bool(message.buttons[number])
        if pressed is self._is_pressed:
            return
        self._is_pressed = pressed
        result = self._loop.take_over() if pressed else self._loop.give_back()
        log = self._node.get_logger()
        (log.info if result.started else log.warning)(f'button of the leader: {result.text}')

    def _look(self, topic: str, timeout_s: float) -> None:
        """Pause a robot whose joystick has fallen silent with its button held."""
        if not self._is_pressed or self._heard_s is None:
            return
        silent_s = time.monotonic() - self._heard_s
        if silent_s <= timeout_s:
            return
        self._heard_s = None
        text = (
            f'{topic} has said nothing for {silent_s:.2f} s with its button held, at most '
            f'{timeout_s:g} s allowed (leader.timeout_s): look at the joystick, and let it repeat '
            'what it says (autorepeat_rate of joy_node)'
        )
        if self._loop.pause_leading(text):
            self._node.get_logger().error(text)

    def close(self) -> None:
        if self._timer is not None:
            self._node.destroy_timer(self._timer)
            self._timer = None
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            self._node.destroy_subscription(subscription)
