"""The executor's requests as they arrive, each to be answered once.

The executor sends an open request again every 0.1 s, under the same number, because a transport may
lose it: a process that was suspended, a radio link. A repeat brings a newer plan to a request that
waits for a frame; it changes nothing while the inference runs or its chunk is on the way. A copy of
the plan that was answered is one that came late: asked again, the executor sends a newer one.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

from vla_runtime.types import PlanRequest

# A repeat that left the executor before the chunk arrived there comes within this.
_ON_THE_WAY_NS = 50_000_000


class IncomingRequests:
    """The newest request, and how far its answer is. For any thread.

    Attributes:
        superseded: requests that a newer one replaced before their inference began.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._newest: PlanRequest | None = None
        self._begun = False
        self._answered_ns: int | None = None
        self.superseded = 0

    def receive(self, plan: PlanRequest, now_ns: int) -> PlanRequest | None:
        """The request to work on next; None for a repeat that needs no answer of its own.

        Args:
            plan: plan as it arrived.
            now_ns: steady clock.
        """
        request = replace(plan, arrived_ns=now_ns)
        with self._lock:
            newest = self._newest
            if newest is not None and _repeats(request, newest):
                if not self._begun:
                    request = replace(plan, arrived_ns=newest.arrived_ns)
                elif (
                    self._answered_ns is None
                    or now_ns - self._answered_ns < _ON_THE_WAY_NS
                    or plan.stamp_ns == newest.stamp_ns
                ):
                    return None
            elif newest is not None and not self._begun:
                self.superseded += 1
            self._newest, self._begun, self._answered_ns = request, False, None
        return request

    def begin(self, request: PlanRequest) -> None:
        """Note that a request's inference begins."""
        self._note(request, begun=True)

    def wait(self, request: PlanRequest) -> None:
        """Note that its inference lacks an input; a repeat may replace it."""
        self._note(request, begun=False)

    def answer(self, request: PlanRequest, now_ns: int) -> None:
        """Note that a request's chunk was published; a much later repeat means that it was lost."""
        self._note(request, begun=True, answered_ns=now_ns)

    def _note(self, request: PlanRequest, *, begun: bool, answered_ns: int | None = None) -> None:
        with self._lock:
            newest = self._newest
            if newest is not None and (newest is request or _repeats(newest, request)):
                self._begun, self._answered_ns = begun, answered_ns

    def forget(self) -> None:
        """Forget the requests so far: a repeat of one counts as a new request."""
        with self._lock:
            self._newest, self._begun, self._answered_ns = None, False, None


def _repeats(one: PlanRequest, other: PlanRequest) -> bool:
    """Return whether both carry the same number of one episode; one without never does."""
    same = (one.episode, one.request) == (other.episode, other.request)
    return same and one.request is not None
