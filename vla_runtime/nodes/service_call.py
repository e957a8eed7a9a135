"""Service calls whose request or answer may be lost on its way.

rmw_fastrtps drops an answer whose receiver it has not discovered ("client will not receive
response"): the caller would wait for ever.
"""

from __future__ import annotations

import time
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.client import Client

_ASK_AGAIN_S = 2.0
# Number of a transition, the state that it begins in, the state that it leads to.
TRANSITIONS = {
    'configure': (Transition.TRANSITION_CONFIGURE, 'unconfigured', 'inactive'),
    'activate': (Transition.TRANSITION_ACTIVATE, 'inactive', 'active'),
    'deactivate': (Transition.TRANSITION_DEACTIVATE, 'active', 'inactive'),
    'cleanup': (Transition.TRANSITION_CLEANUP, 'inactive', 'unconfigured'),
}
# States that a node is not on its way from.
_AT_REST = ('unconfigured', 'inactive', 'active', 'finalized')


class ServiceCall:
    """A request to a ready service, repeated until an answer comes; it may be carried out twice."""

    def __init__(self, client: Client, request: Any, again_s: float = _ASK_AGAIN_S) -> None:
        self._client = client
        self._request = request
        self._patience_s = again_s
        self._futures: list[Any] = []
        self._send()

    def answer(self) -> Any:
        """Return the response, or None while there is none. Sends the request again when due."""
        for future in self._futures:
            if future.done():
                self._forget(future)
                return future.result()
        if time.monotonic() > self._again_s:
            self._send()
        return None

    def _send(self) -> None:
        self._futures.append(self._client.call_async(self._request))
        self._again_s = time.monotonic() + self._patience_s

    def _forget(self, answered: Any) -> None:
        for future in self._futures:
            if future is not answered:
                self._client.remove_pending_request(future)
        self._futures = [answered]


class TransitionCall:
    """A lifecycle transition ('configure', 'activate', 'deactivate' or 'cleanup') that is repeated.

    The node's state is asked for now and then: the transition's end is an answer, and a node in
    the state before is asked again. `succeeded` is valid once it has ended.
    """

    def __init__(self, changes: Client, states: Client, transition: str) -> None:
        number, self._before, self._after = TRANSITIONS[transition]
        self._changes, self._states = changes, states
        self._request = ChangeState.Request(transition=Transition(id=number))
        self._sent = [changes.call_async(self._request)]
        self._state: ServiceCall | None = None
        self._ask_s = time.monotonic() + _ASK_AGAIN_S
        self.succeeded = False

    def ended(self) -> bool:
        """Return whether the node has made or refused the transition. Asks again when due."""
        ended: list[Any] = [change.result() for change in self._sent if change.done()]
        answers = [answer.success for answer in ended]
        # A second request finds nothing to do where the first was carried out: that it is refused
        # counts once the state is known.
        if any(answers) or (answers and len(self._sent) == 1):
            self.succeeded = any(answers)
            return True
        label = self._label()
        if label == self._before and not answers:
            self._sent.append(self._changes.call_async(self._request))
            return False
        self.succeeded = label == self._after
        return label in _AT_REST

    def _label(self) -> str:
        """Return the node's state when it is known anew, else ''."""
        if self._state is None:
            if time.monotonic() < self._ask_s:
                return ''
            self._state = ServiceCall(self._states, GetState.Request())
        answer = self._state.answer()
        if answer is None:
            return ''
        self._state, self._ask_s = None, time.monotonic() + _ASK_AGAIN_S
        return str(answer.current_state.label)
