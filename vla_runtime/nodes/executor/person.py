"""What a person asks of an executor that runs: `~/pause`, `~/resume`, `~/home`, `~/take_over`.

Services are of `std_srvs`, so that they work without this package's interfaces. `~/pause` answers
when the robot rests, `~/home` as soon as it is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode
from std_srvs.srv import SetBool, Trigger

from vla_runtime.execution.command import StartResult
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.executor.session import ExecutorSession
from vla_runtime.nodes.later_service import Complete, LaterService
from vla_runtime.nodes.node_runner import OnError, guarded

_INACTIVE = StartResult(False, 'the executor is not active: configure and activate it first')


class PersonServices:
    """The services of one node; `look` belongs to a timer of it.

    Args:
        session: returns the session of an active node.
        why_not_start: returns what the node has against a start now; empty where nothing.
        begin_next: begins another episode where the last one has ended.
        on_home: called when the robot is on its way home.
    """

    def __init__(
        self,
        node: LifecycleNode,
        session: Callable[[], ExecutorSession | None],
        why_not_start: Callable[[], str],
        begin_next: Callable[[], None],
        on_home: Callable[[], None],
        on_error: OnError,
    ) -> None:
        self._session = session
        self._why_not_start, self._begin_next = why_not_start, begin_next
        self._tell_home = on_home
        self._pause = LaterService(node, Trigger, '~/pause', self._on_pause, on_error)
        for name, kind, call in (
            ('resume', Trigger, self._on_resume),
            ('home', SetBool, self._on_home),
            ('take_over', SetBool, self._on_take_over),
        ):
            node.create_service(kind, f'~/{name}', guarded(on_error, name, call))

    @property
    def _loop(self) -> ControlLoop | None:
        session = self._session()
        return None if session is None else session.loop

    def look(self) -> None:
        self._pause.look()

    def _on_pause(self, _: Trigger.Request, response: Trigger.Response) -> Complete:
        session, loop = self._session(), self._loop
        result = _INACTIVE if loop is None else loop.pause()
        end_s = time.monotonic() + (0.0 if session is None else session.rests_within_s)

        def complete() -> bool:
            response.success, response.message = result.started, result.text
            if not result.started or loop is None or loop.rests():
                return True
            if time.monotonic() <= end_s:
                return False
            response.success = False
            response.message = 'the robot has not come to rest yet; /diagnostics says what keeps it'
            return True

        return complete

    def _on_resume(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        loop = self._loop
        result = _INACTIVE
        if loop is not None:
            # An episode begins where the way home has ended; until then `resume` refuses.
            if loop.is_started() and not loop.goes_home():
                self._begin_next()
            result = loop.resume()
        response.success, response.message = result.started, result.text
        return response

    def _on_take_over(
        self, request: SetBool.Request, response: SetBool.Response
    ) -> SetBool.Response:
        """Let the leader take over; without `data` the policy goes on."""
        loop, result = self._loop, _INACTIVE
        if loop is not None:
            result = loop.take_over() if request.data else loop.give_back()
        response.success, response.message = result.started, result.text
        return response

    def _on_home(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """Go home; `data` says that a person has looked at a way that is far."""
        loop, result = self._loop, _INACTIVE
        if loop is not None:
            refused = '' if loop.is_started() else self._why_not_start()
            result = StartResult(False, refused)
            if not refused:
                result = loop.go_home(time.monotonic(), far=request.data)
                if result.started:
                    self._tell_home()
        response.success, response.message = result.started, result.text
        return response
