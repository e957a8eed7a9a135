"""A service that answers when what its request began is done, while other callbacks go on.

rclpy sends what a service's callback returns at once, and its events executor awaits no coroutine.
So the response is kept, and sent when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.node import Node

from vla_runtime.nodes.node_runner import OnError, guarded

# Fills the response in and returns True, or returns False while it is too early.
Complete = Callable[[], bool]


class LaterService:
    """One service of a node; `look` belongs to a timer of the same node.

    Args:
        begin: takes request and response, and returns what completes the response.
        on_error: called with where an exception was raised, and the exception. The answer is then
            the response as far as it was filled in.
    """

    def __init__(
        self,
        node: Node,
        service_type: Any,
        name: str,
        begin: Callable[[Any, Any], Complete],
        on_error: OnError,
    ) -> None:
        self._begin = begin
        self._complete: Complete | None = None
        self._waiting: list[tuple[Complete, Any, Any]] = []
        self._service = node.create_service(service_type, name, guarded(on_error, name, self._call))
        self._guard = lambda complete: guarded(on_error, name, complete)
        self._send = self._service.send_response
        self._service.send_response = self._send_or_keep  # type: ignore[method-assign]

    def _call(self, request: Any, response: Any) -> Any:
        self._complete = self._begin(request, response)
        return response

    def _send_or_keep(self, response: Any, header: Any) -> None:
        """Send, or keep for later, what the callback just returned."""
        complete, self._complete = self._complete, None
        if complete is None:
            self._send(response, header)
            return
        self._waiting.append((complete, response, header))
        self.look()

    def look(self) -> None:
        for one in self._waiting.copy():
            complete, response, header = one
            # None: it raised, and that was reported.
            if self._guard(complete)() is not False:
                self._waiting.remove(one)
                self._send(response, header)
