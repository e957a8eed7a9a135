"""Everything that an active executor node has, from its activation to its deactivation.

Invariants:
- four threads: the control thread (`ControlLoop.tick` at the control rate), the dead-man's, which
  no callback can keep waiting, one that publishes requests and one that looks at the controllers;
  rclpy's callbacks only deliver;
- only the control thread and, beside it, the dead-man's and the teardown send commands;
- teardown: nothing comes in any more, the robot brakes to rest, the threads that command end, then
  the hold is sent and acknowledged. The hold is the last command on the wire;
- what began half-way ends as well, and a step that fails keeps none back; a thread that hangs is
  said, and the hold is sent without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rclpy.lifecycle import LifecycleNode
from rclpy.subscription import Subscription

from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.messages.trajectories import chunk_type
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.executor.controller_watch import LOOKS_HZ, ControllerWatch
from vla_runtime.nodes.executor.robot_link import RobotLink
from vla_runtime.nodes.executor.steady_loop import Lateness, SteadyLoop, system_time_ns
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.qos import CHUNKS
from vla_runtime.nodes.worker import LatestJobWorker
from vla_runtime.types import PlanRequest

CHUNK_TOPIC = 'action_chunk'
# A tick takes a thousandth of this; what takes longer will not end.
_HANGS_AFTER_S = 2.0
# Braking takes speed over acceleration, some tenths of a second on most robots.
_SHORTEST_BRAKING_S, _BRAKING_SLACK_S = 3.0, 1.0
# `ros2 launch` kills a node 10 s after its Ctrl-C.
_LONGEST_BRAKING_S = 8.0


@dataclass(frozen=True)
class SessionHooks:
    """Callbacks of the session.

    Attributes:
        now_ns: the ROS clock.
        on_chunk: called with every message on the chunk topic, in rclpy's thread.
        publish_plan: called with every request in a thread of its own; returns whether it is done.
        prefer_thread: called in each thread that the robot waits for, at its start.
        on_error: called with where an exception was raised, and the exception.
    """

    now_ns: Callable[[], int]
    on_chunk: Callable[[Any], None]
    publish_plan: Callable[[PlanRequest], bool]
    prefer_thread: Callable[[], None]
    on_error: OnError


class ExecutorSession:
    """See the module's invariants; `link` outlives the session."""

    def __init__(
        self,
        node: LifecycleNode,
        link: RobotLink,
        rate_hz: float,
        hooks: SessionHooks,
    ) -> None:
        self._node = node
        self._link = link
        self._rate_hz = rate_hz
        self._hooks = hooks
        self._requests: LatestJobWorker[PlanRequest] | None = None
        self._control: SteadyLoop | None = None
        self._dead_man: SteadyLoop | None = None
        self._chunks: Subscription | None = None
        self._watching: SteadyLoop | None = None
        self.watch: ControllerWatch | None = None
        self.loop: ControlLoop | None = None
        self._braking_s = 0.0

    def begin(self, core: ChunkExecutor, episode: int) -> None:
        """Tick a new core; nothing is commanded before its start."""
        hooks, rate_hz = self._hooks, self._rate_hz
        self._requests = LatestJobWorker(
            hooks.publish_plan,
            lambda error: hooks.on_error('committed_plan', error),
            poll_s=1.0,
            name='requests',
        )
        limits = core.config.limits
        self._braking_s = 0.0 if limits is None else limits.braking_s
        use_sim_time = core.config.watchdog.motion_clock == 'ros'
        writers = self._link.writers(1.0 / rate_hz)
        loop = ControlLoop(
            core,
            writers,
            hooks.now_ns,
            self._requests.submit,
            None if use_sim_time else system_time_ns,
        )
        self.loop = loop
        loop.begin_episode(episode)
        self._control = self._thread(loop.tick, rate_hz, 'control')
        # It looks every control period, so the hold comes at most one after the time-out.
        self._dead_man = self._thread(loop.check_alive, rate_hz, 'dead man')
        self._chunks = self._node.create_subscription(
            chunk_type(),
            CHUNK_TOPIC,
            guarded(hooks.on_error, 'chunk', hooks.on_chunk),
            CHUNKS,
        )
        self._link.listen(loop.observe_state, loop.give_way, hooks.on_error)
        watch = self._link.watch_controllers(hooks.now_ns, use_sim_time=use_sim_time)
        self.watch = watch

        def look(now_s: float) -> None:
            watch.look(now_s)
            loop.apply_controller_state(watch)
            self._link.apply_controller_state(watch)

        self._watching = SteadyLoop(
            look, LOOKS_HZ, 'controllers', lambda error: hooks.on_error('controllers', error)
        )
        loop.defer_gc()
        self._control.start()
        self._dead_man.start()
        self._watching.start()

    def _thread(self, call: Callable[[float], Any], rate_hz: float, name: str) -> SteadyLoop:
        hooks = self._hooks
        return SteadyLoop(
            call,
            rate_hz,
            name,
            lambda error: hooks.on_error(name, error),
            on_start=hooks.prefer_thread,
        )

    def lateness(self) -> Lateness:
        return self._control.lateness() if self._control else Lateness(0, 0.0, 0.0, 0.0, 0)

    def end(self) -> None:
        """Undo `begin`, complete or not; the last message sent is the hold."""
        # Steps run in reverse order.
        with ExitStack() as steps:
            # It commands nothing, so the hold does not wait for it.
            if self._requests is not None:
                steps.callback(self._requests.stop, _HANGS_AFTER_S)
            if self.loop is not None:
                steps.callback(self._link.wait_until_heard)
                steps.callback(self.loop.close)
            for thread in (self._control, self._dead_man):
                if thread is not None:
                    steps.callback(thread.stop, _HANGS_AFTER_S)
            if self.loop is not None:
                steps.callback(self._stop_and_wait, self.loop)
            if self.watch is not None:
                steps.callback(self.watch.close)
            if self._watching is not None:
                steps.callback(self._watching.stop, _HANGS_AFTER_S)
            if self._chunks is not None:
                steps.callback(self._node.destroy_subscription, self._chunks)
            steps.callback(self._link.ignore)

    @property
    def rests_within_s(self) -> float:
        """Seconds within which a robot that is stopped has come to rest and its hold is known."""
        wanted_s = max(self._braking_s + _BRAKING_SLACK_S, _SHORTEST_BRAKING_S)
        return min(wanted_s, _LONGEST_BRAKING_S)

    def _stop_and_wait(self, loop: ControlLoop) -> None:
        longest_s = self.rests_within_s
        if not loop.stop_and_wait(longest_s):
            self._hooks.on_error(
                'stop',
                TimeoutError(
                    f'the robot has not come to rest within {longest_s:g} s and is stopped at once '
                    f'(velocity over acceleration of its limits: {self._braking_s:g} s)'
                ),
            )
