"""Runs one node as a process: what every executable's `main` has in common.

Invariants:
- the main thread only waits for a signal, so Ctrl-C works at any moment, also while a callback
  loads a policy for a minute;
- the context outlives the node's last words: rclpy's own signal handlers, which shut it down at
  once, are not installed;
- teardown order: callbacks stop, then (of a lifecycle node) deactivate, cleanup and shutdown run,
  then the node and the context go;
- an exception in a callback is logged and the node lives on.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import rclpy
from rclpy.executors import Executor, MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode
from rclpy.logging import get_logger
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from vla_runtime.ros.autostart import COULD_NOT_START, bring_up

# Told of an exception in a callback: where, and which.
OnError = Callable[[str, Exception], None]

_SPIN_S = 0.2
_STATE_TRANSITIONS = {
    'active': ('trigger_deactivate', 'trigger_cleanup', 'trigger_shutdown'),
    'inactive': ('trigger_cleanup', 'trigger_shutdown'),
    'unconfigured': ('trigger_shutdown',),
}


def run_node(make_node: Callable[[], Node], args: list[str] | None = None) -> int:
    """Spin a node until SIGINT or SIGTERM, then take it down in order.

    Args:
        make_node: builds the node; an exception means that it cannot start.
        args: command line, `sys.argv` when None.

    Returns:
        exit code: 0 after a signal; COULD_NOT_START when the node could not be made, or not
            configured and activated where its parameter `autostart` asks for it
    """
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        stop.set()
        # A second one ends the process at once: loading a policy cannot be interrupted.
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        try:
            node = make_node()
        except Exception as error:
            get_logger('vla_runtime').fatal(f'cannot start: {error}')
            return COULD_NOT_START
        try:
            return 0 if _spin(node, stop) else COULD_NOT_START
        finally:
            node.destroy_node()
    finally:
        rclpy.try_shutdown()


def _spin(node: Node, stop: threading.Event) -> bool:
    """Run the node's callbacks until `stop`; whether it came up."""
    executor = make_executor()
    executor.add_node(node)
    failed = threading.Event()

    def spin() -> None:
        if not bring_up(node, stop.is_set):
            failed.set()
            stop.set()
        while not stop.is_set():
            try:
                # One callback at a time and with a time-out: `spin` of Jazzy's events executor
                # keeps the interpreter lock for good while it waits.
                executor.spin_once(timeout_sec=_SPIN_S)
            # Callbacks guard themselves; this is for what rclpy raises around them.
            except Exception:
                node.get_logger().error(f'exception while spinning:\n{traceback.format_exc()}')

    thread = threading.Thread(target=spin, name='ros_callbacks', daemon=True)
    thread.start()
    # With a time-out, because a wait without one cannot be interrupted on every platform.
    while not stop.wait(_SPIN_S):
        pass
    thread.join()
    executor.shutdown()
    if isinstance(node, LifecycleNode):
        _take_down(node)
    return not failed.is_set()


def _take_down(node: LifecycleNode) -> None:
    """Run the transitions that lead from where the node is to finalized."""
    state = node._state_machine.current_state[1]
    for transition in _STATE_TRANSITIONS.get(state, ()):
        getattr(node, transition)()


def make_executor() -> Executor:
    """The events executor where this ROS 2 has it, the multi-threaded one elsewhere (Humble).

    Wait-set executors rebuild their wait set for every message, which costs a good part of a core
    for three cameras; the events executor does not.
    """
    try:
        from rclpy.experimental.events_executor import EventsExecutor
    except ImportError:
        return MultiThreadedExecutor(num_threads=3)
    return EventsExecutor()


def guarded(on_error: OnError, name: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback that never raises: `on_error(name, exception)` is told instead.

    A service's callback then answers with the response as far as it was filled in.
    """

    def call(*args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:
            on_error(name, error)
            return args[1] if len(args) > 1 else None

    return call


def guard_transitions(node: LifecycleNode, on_error: OnError) -> None:
    """Let a transition that the state does not allow fail instead of ending the node.

    rclpy raises out of the service's callback there (`activate` before `configure`, for example).
    """
    for service in node.services:
        if service.srv_name.endswith('/change_state'):
            service.callback = guarded(on_error, 'change_state', service.callback)
