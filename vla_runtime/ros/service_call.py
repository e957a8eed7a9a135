"""Service calls whose answer may be lost on its way.

A node may hear a request before it has discovered where the answer goes; rmw_fastrtps then drops
the answer ("client will not receive response") and the caller would wait for ever.
"""

from __future__ import annotations

import time
from typing import Any

from rclpy.client import Client

ASK_AGAIN_S = 2.0


class ServiceCall:
    """A request that is sent again until an answer comes; it may be carried out more than once.

    Args:
        client: of a service that is ready.
        request: to send.
        again_s: until it is sent again.
    """

    def __init__(self, client: Client, request: Any, again_s: float = ASK_AGAIN_S) -> None:
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
