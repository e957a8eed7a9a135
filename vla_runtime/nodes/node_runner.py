"""Runs one node as a process: what every executable's `main` has in common.

Invariants:
- the main thread only waits for a signal, so Ctrl-C works at any moment, also while a callback
  loads a policy for a minute;
- the first SIGINT, SIGTERM or SIGHUP begins the teardown, and no further one disturbs it: the
  process ends by itself, with code 0;
- the teardown is bounded: a callback that hangs is not waited for longer than a moment, and a
  teardown that hangs ends the process with code 1, even where it keeps the interpreter lock;
- the context outlives the node's last words: rclpy's own signal handlers, which shut it down at
  once, are not installed;
- teardown order: a node with a `farewell` says it, callbacks stop, then (of a lifecycle node)
  deactivate, cleanup and shutdown run, then the node and the context go;
- an exception in a callback is logged and the node lives on;
- a node that the middleware has cut off is taken down, and its process starts again, with its
  parameters and as far up as it was.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from traceback import format_exc
from typing import Any, NoReturn

import rclpy
from rclpy.executors import Executor, MultiThreadedExecutor
from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.logging import get_logger
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from vla_runtime.nodes.middleware import why_no_shared_memory
from vla_runtime.nodes.parameter_file import check_files_on_command_line
from vla_runtime.nodes.parameter_table import COULD_NOT_START, bring_up
from vla_runtime.nodes.restart import (
    NodeState,
    forget_state_before,
    start_again,
    state_before,
    state_of,
)
from vla_runtime.nodes.shared_memory import PortWatch, remove_dead_segments
from vla_runtime.processes.interrupt import Interrupt, interruptible
from vla_runtime.processes.parent_death import LAUNCH_VARIABLE

# Warnings of the package's other modules, and of libraries, in the ROS log.


class RosLogHandler(logging.Handler):
    """Hands what Python's `logging` gets, from WARNING on, to a node's logger."""

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        # A line each: rclpy refuses another severity from the same line.
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        else:
            self._logger.warning(text)


# Called with an exception in a callback: where, and which.
OnError = Callable[[str, Exception], None]

_SPIN_S = 0.2
_LOOK_S = 0.02
# A callback that takes longer loads a policy, or hangs; the hold of a robot does not wait for it.
_CALLBACK_S = 2.0
# For what a node has to do with others before its end; see `farewell` of the task node.
_FAREWELL_S = 3.0
# Longer than all that the executor waits for in vain when an output hangs; less than the 20 s that
# the demo and the launch files wait.
_TEARDOWN_S = 15.0
# So much later the process ends even where a thread keeps the interpreter lock.
_LAST_WAY_OUT_S = 1.0
_SUCCESS = TransitionCallbackReturn.SUCCESS
# What leads a step nearer to finalized, by the state that the node is in.
_NEXT_TRANSITION = {
    'active': 'trigger_deactivate',
    'inactive': 'trigger_cleanup',
    'unconfigured': 'trigger_shutdown',
}


def run_node(make_node: Callable[[], Node], name: str, args: list[str] | None = None) -> int:
    """Spin a node until SIGINT, SIGTERM or SIGHUP, then take it down in order.

    Args:
        name: where the command line gives the node none.
        args: command line, `sys.argv` when None.

    Once there is a node this does not return: the process ends with code 0 after a signal, 1 when a
    step of the teardown failed, COULD_NOT_START when the node could not be configured and activated
    where its parameter `autostart` asks for it. A node that has run, and could not start again in
    its place, ends with 1 as after a crash.

    Returns:
        Exit code of a process whose command line could not be read, or whose node not be made.
    """
    before = state_before()
    failed = COULD_NOT_START if before is None else 1
    with interruptible() as interrupt:
        try:
            warnings = check_files_on_command_line(sys.argv if args is None else args, name)
            # A launch gives one file to all its nodes, and has looked at it.
            for warning in () if LAUNCH_VARIABLE in os.environ else warnings:
                print(f'warning: {warning}', file=sys.stderr)
            remove_dead_segments()
            if full := why_no_shared_memory(os.environ):
                print(f'warning: {full}', file=sys.stderr)
            rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
        except Exception as error:
            # No logger yet; rclpy's errors are of many classes that differ between distributions.
            print(f'error: cannot start: {error}', file=sys.stderr)
            return failed
        try:
            try:
                node = make_node()
            except Exception as error:
                get_logger('vla_runtime').fatal(f'cannot start: {error}')
                return failed
            forget_state_before()
            logging.getLogger().addHandler(RosLogHandler(node.get_logger()))
            _Run(node, interrupt, before).until_it_ends()
        finally:
            rclpy.try_shutdown()


class _Run:
    """A node, made and not yet brought up, to its end.

    `before` are the replaced process's notes.
    """

    def __init__(self, node: Node, interrupt: Interrupt, before: NodeState | None) -> None:
        self._node, self._interrupt = node, interrupt
        self._before = before
        self._brought_up = False
        # What the next process needs, once the middleware has cut this one off.
        self._cut_off: NodeState | None = None
        self._failed = threading.Event()
        self._executor = make_executor()
        self._executor.add_node(node)

    def until_it_ends(self) -> NoReturn:
        """Run the callbacks until the interrupt, take the node down, and end the process."""
        name = self._node.get_name()
        thread = threading.Thread(target=self._spin, name='ros_callbacks', daemon=True)
        thread.start()
        watch = PortWatch()
        while not self._over():
            time.sleep(_LOOK_S)
            if lost := watch.lost(time.monotonic()):
                self._leave(lost)
        with _bounded(name):
            thread.join(getattr(self._node, 'callback_s', _CALLBACK_S))
            code = 0 if _take_down(self._node) else 1
            if self._failed.is_set():
                code = COULD_NOT_START if self._before is None else 1
            if thread.is_alive():
                self._end_now(code)
            self._executor.shutdown()
            if self._cut_off is not None:
                # Publishers and services go, the participant stays: with it Fast DDS would remove
                # what has the names of its ports, the files of its senders.
                with self._node.handle:
                    self._node.destroy_node()
                    self._end_now(code)
            if isinstance(self._node, LifecycleNode):
                # rclpy leaves it, and it keeps the participant: others would see the node, and call
                # its services, until Fast DDS takes it for dead after 20 s.
                self._node._state_machine.destroy_when_not_in_use()
            self._node.destroy_node()
            rclpy.try_shutdown()
        self._end_now(code)

    def _end_now(self, code: int) -> NoReturn:
        """Skip Python's own end: it may crash beside a thread, and takes seconds beside PyTorch."""
        if self._cut_off is not None:
            start_again(self._cut_off, self._interrupt)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _over(self) -> bool:
        return self._interrupt.wanted or self._failed.is_set() or self._cut_off is not None

    def _spin(self) -> None:
        if self._before is not None:
            self._before.set_parameters_of(self._node)
        state = '' if self._before is None else self._before.lifecycle
        if not bring_up(self._node, self._over, state):
            self._failed.set()
        self._brought_up = True
        while not self._over():
            self._spin_once()
        farewell = getattr(self._node, 'farewell', None)
        if farewell is None or not self._interrupt.wanted:
            return
        end_s = time.monotonic() + _FAREWELL_S
        while not farewell() and time.monotonic() < end_s:
            self._spin_once()

    def _spin_once(self) -> None:
        try:
            # One callback at a time and with a time-out: `spin` of Jazzy's events executor keeps
            # the interpreter lock for good while it waits.
            self._executor.spin_once(timeout_sec=_SPIN_S)
        # Callbacks guard themselves; this is for what rclpy raises around them.
        except Exception:
            self._node.get_logger().error(f'exception while spinning:\n{format_exc()}')

    def _leave(self, lost: frozenset[str]) -> None:
        self._node.get_logger().error(
            f'cut off: the shared memory of this node ({", ".join(sorted(lost))}) was given to a '
            'new file, as Fast DDS does when a process stands still for more than a second, so '
            'nothing arrives any more; the process starts again, with the parameters it has now '
            '(an executor holds, and then needs ~/start)'
        )
        state = state_of(self._node)
        if not self._brought_up:
            # Still on its way up: the next one has the same way to go.
            before = self._before
            state = replace(state, lifecycle='' if before is None else before.lifecycle)
        self._cut_off = state


def _take_down(node: Node) -> bool:
    done = True
    if isinstance(node, LifecycleNode):
        # One that fails leads elsewhere, but never further away.
        for _ in _NEXT_TRANSITION:
            name = _NEXT_TRANSITION.get(node._state_machine.current_state[1])
            if name is not None:
                done = getattr(node, name)() is _SUCCESS and done
    return done


@contextmanager
def _bounded(name: str) -> Iterator[None]:

    def give_up() -> None:
        os.write(2, f'{name}: the teardown hangs; ended after {_TEARDOWN_S:g} s\n'.encode())
        os._exit(1)

    # Whoever hangs with the interpreter lock leaves no thread of Python anything to do.
    faulthandler.dump_traceback_later(_TEARDOWN_S + _LAST_WAY_OUT_S, exit=True, file=2)
    timer = threading.Timer(_TEARDOWN_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    """Wrap a callback so that it never raises; `on_error(name, exception)` is called instead.

    A service's callback then answers with the response as far as it was filled in. The result has
    the callback's own signature: by it Kilted decides whether a timer's gets a `TimerInfo`.
    """

    @wraps(callback)
    def call(*args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:
            on_error(name, error)
            return args[1] if len(args) > 1 else None

    return call
