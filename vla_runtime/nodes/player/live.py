"""Plays recorded inferences through a real policy node, one after the other.

Invariants:
- the node is a process of its own, on a ROS domain of its own on this machine only: nothing that is
  played reaches a robot, and no robot's cameras reach the node;
- the node can answer from what a step gives it, and from nothing else: `replay.live_steps`;
- it has a step's time before it gets the step's messages: it refuses what lies ahead of its clock,
  and an older message after a newer one;
- what the transport loses is sent again until the chunk is there; a request has one number, by
  which the node knows that it was answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rclpy
from rcl_interfaces.msg import ParameterEvent
from rcl_interfaces.srv import SetParameters
from rclpy.client import Client
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import qos_profile_parameter_events
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_srvs.srv import Trigger

from vla_runtime.files.package_files import share_folder
from vla_runtime.messages.trajectories import (
    chunk_type,
    message_to_chunk,
    ns_to_stamp,
    plan_to_message,
    plan_type,
    stamp_to_ns,
)
from vla_runtime.nodes.middleware import REACH_VARIABLES, lossless_images, stay_on_this_machine
from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.player.steps import LiveStep, PlayedMessage, PolicyNodeOptions
from vla_runtime.nodes.qos import LOSSLESS
from vla_runtime.nodes.service_call import ServiceCall
from vla_runtime.processes.domains import claim_domain
from vla_runtime.processes.supervisor import Child, Supervisor
from vla_runtime.types import ActionChunk, ChunkHeader

_TYPES: Mapping[str, type] = {
    'sensor_msgs/msg/Image': Image,
    'sensor_msgs/msg/CompressedImage': CompressedImage,
    'sensor_msgs/msg/JointState': JointState,
}
# A large policy on a busy CPU takes minutes to load, and many seconds for a chunk.
_TIMEOUT_S = 300.0
_SEND_AGAIN_S = 0.25
_NODE = 'policy'


class LivePlayError(RuntimeError):
    """The node did not start, or ended; the message has its last output."""


def own_domain() -> int:
    """Choose another ROS domain for this process and its children, on this machine only."""
    domain = claim_domain()
    os.environ['ROS_DOMAIN_ID'] = str(domain)
    # A reach that the user chose is for the robot's graph.
    for reach in REACH_VARIABLES:
        os.environ.pop(reach, None)
    stay_on_this_machine(os.environ)
    os.environ.update(lossless_images(os.environ, share_folder() / 'config'))
    return domain


class LivePlayer:
    """A policy node and what plays to it; a context. Call `own_domain` before.

    Args:
        log_folder: the node's output goes to a file in it.
        warn: called in another thread where that file can no longer be written.
    """

    def __init__(
        self,
        options: PolicyNodeOptions,
        step_time_s: float,
        log_folder: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._options = options
        self._step_time_s = step_time_s
        self._processes = Supervisor(log_folder, warn)
        self._chunks: list[tuple[ActionChunk, ChunkHeader]] = []
        self._request = 0
        # The node's time when it set a parameter last.
        self._node_ns = 0
        self._publishers: dict[str, Any] = {}
        self._context = rclpy.Context()
        self._process: Child | None = None

    def __enter__(self) -> LivePlayer:
        rclpy.init(context=self._context)
        self._node = Node('vla_replay', namespace=self._options.namespace, context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._clock = self._node.create_publisher(Clock, '/clock', 10)
        self._plans = self._node.create_publisher(plan_type(), 'committed_plan', LOSSLESS)
        self._node.create_subscription(chunk_type(), 'action_chunk', self._on_chunk, LOSSLESS)
        self._node.create_subscription(
            ParameterEvent, '/parameter_events', self._on_event, qos_profile_parameter_events
        )
        name = self._options.name
        self._set: Client = self._node.create_client(SetParameters, f'{name}/set_parameters')
        self._reset: Client = self._node.create_client(Trigger, f'{name}/reset')
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.stop()
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown(context=self._context)

    def play(self, step: LiveStep) -> tuple[ActionChunk, ChunkHeader] | None:
        """Return the chunk of one inference, or None; LivePlayError where the node ended."""
        if step.begins_episode:
            self._call(self._reset, Trigger.Request(), '~/reset')
        self._set_parameters(step.parameters, step.now_ns)
        count = len(self._chunks)
        self._request += 1
        publishers = [self._publisher(message) for message in step.messages]
        step_time_s = step.plan.step_time_s or self._step_time_s
        plan = plan_to_message(replace(step.plan, step_time_s=step_time_s, request=self._request))
        end_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end_s:
            for publisher, message in zip(publishers, step.messages, strict=True):
                publisher.publish(message.serialised)
            self._plans.publish(plan)
            if self._wait(lambda: len(self._chunks) > count, _SEND_AGAIN_S):
                return self._chunks[-1]
        return None

    def _start(self) -> None:
        given = [f'{name}:={value}' for name, value in self._options.parameters.items()]
        arguments = [word for text in given for word in ('-p', text)]
        self._process = self._processes.start(
            _NODE,
            MODULES['policy_node'],
            (
                *('--ros-args', '-r', f'__ns:={self._options.namespace}'),
                *('-p', 'autostart:=true', '-p', 'use_sim_time:=true', *arguments),
            ),
        )
        listens = lambda: self._plans.get_subscription_count() > 0  # noqa: E731
        if not self._wait(listens, _TIMEOUT_S):
            raise LivePlayError(f'the policy node did not start; {self._last_output()}')

    def _publisher(self, message: PlayedMessage) -> Any:
        if message.topic not in self._publishers:
            made: Any = self._node.create_publisher(
                _TYPES[message.type_name], message.topic, LOSSLESS
            )
            self._publishers[message.topic] = made
            # A message before the two know each other is lost.
            self._wait(lambda: made.get_subscription_count() > 0, _TIMEOUT_S)
        return self._publishers[message.topic]

    def _set_parameters(self, wanted: Mapping[str, Any], now_ns: int) -> None:
        """Set parameters again until the node, by its own clock, has done so."""
        request = SetParameters.Request()
        request.parameters = [
            Parameter(name, value=value).to_parameter_msg() for name, value in wanted.items()
        ]
        end_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end_s:
            self._clock.publish(Clock(clock=ns_to_stamp(now_ns)))
            answer = self._call(self._set, request, 'set_parameters')
            refused = [result.reason for result in answer.results if not result.successful]
            if refused:
                raise LivePlayError(f'the policy node refused a parameter: {refused[0]}')
            if self._wait(lambda: self._node_ns == now_ns, _SEND_AGAIN_S):
                return
        raise LivePlayError(f'the policy node does not follow /clock; {self._last_output()}')

    def _call(self, client: Any, request: Any, name: str) -> Any:
        if not self._wait(client.service_is_ready, _TIMEOUT_S):
            raise LivePlayError(f'no service {name} of the policy node; {self._last_output()}')
        call = ServiceCall(client, request)
        if not self._wait(lambda: call.answer() is not None, _TIMEOUT_S):
            raise LivePlayError(f'no answer of {name}; {self._last_output()}')
        return call.answer()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not condition():
            if self._process is not None and not self._process.running:
                raise LivePlayError(self._process.death())
            if time.monotonic() > end_s:
                return False
            self._executor.spin_once(timeout_sec=0.02)
        return True

    def _on_chunk(self, message: Any) -> None:
        self._chunks.append(message_to_chunk(message, step_time_s=self._step_time_s))

    def _on_event(self, event: ParameterEvent) -> None:
        if event.node == self._options.name:
            self._node_ns = stamp_to_ns(event.stamp)

    def _last_output(self) -> str:
        return '' if self._process is None else self._process.last_output()
