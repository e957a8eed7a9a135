"""The executor's requests as they arrive, each to be answered once, in their order.

As many wait as the policy takes before its first answer; one more replaces the oldest, and one of
another episode all of them. The executor sends an open request again every 0.1 s, under the same
number, because a transport may lose it: a process that was suspended, a radio link. A repeat brings
a newer plan to a request that waits for a frame; it changes nothing while the inference runs or its
chunk is on the way. A copy of the plan that was answered is one that came late: asked again, the
executor sends a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock

from vla_runtime.types import PlanRequest

# A repeat that left the executor before the chunk arrived there comes within this.
_ON_THE_WAY_NS = 50_000_000
# Answered requests that are remembered, so that a copy that comes late is known.
_REMEMBERED = 8


@dataclass(eq=False)
class _Entry:
    """A request, whether its inference has begun, and the steady time of its answer."""

    request: PlanRequest
    begun: bool = False
    answered_ns: int | None = None


class IncomingRequests:
    """The newest requests, and how far their answers are. For any thread.

    Attributes:
        most: requests that may wait at once.
        superseded: requests that newer ones replaced before their inference began.
        episode: episode of the newest request; None before the first.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: list[_Entry] = []
        self.most = 1
        self.superseded = 0
        self.episode: int | None = None

    def receive(self, plan: PlanRequest, now_ns: int) -> PlanRequest | None:
        """The request to work on; None for one that needs no answer: a repeat, or an old one.

        Args:
            plan: plan as it arrived.
            now_ns: steady clock.
        """
        with self._lock:
            if plan.episode != self.episode:
                self.superseded += len(self._waiting())
                self._entries.clear()
                self.episode = plan.episode
            entry = self._find(plan)
            if entry is None and self._comes_late(plan):
                return None
            if entry is None:
                entry = _Entry(replace(plan, arrived_ns=now_ns))
                self._entries.append(entry)
                self._prune()
            elif not entry.begun:
                entry.request = replace(plan, arrived_ns=entry.request.arrived_ns)
            elif (
                entry.answered_ns is None
                or now_ns - entry.answered_ns < _ON_THE_WAY_NS
                or plan.stamp_ns == entry.request.stamp_ns
            ):
                return None
            else:
                entry.request = replace(plan, arrived_ns=now_ns)
                entry.begun, entry.answered_ns = False, None
            return entry.request

    def next(self) -> PlanRequest | None:
        """Return the oldest request that waits; None without one."""
        with self._lock:
            return next((entry.request for entry in self._waiting()), None)

    def begin(self, request: PlanRequest) -> None:
        """Note that a request's inference begins."""
        self._note(request, begun=True)

    def wait(self, request: PlanRequest) -> None:
        """Note that a request waits again: its inference lacks an input, or is to be made anew."""
        self._note(request, begun=False)

    def answer(self, request: PlanRequest, now_ns: int) -> None:
        """Note that a request's chunk was published; a much later repeat means that it was lost."""
        self._note(request, begun=True, answered_ns=now_ns)

    def fail(self, request: PlanRequest) -> None:
        """Forget a request whose inference failed: a repeat of it counts as a new one."""
        with self._lock:
            entry = self._find(request)
            if entry is not None:
                self._entries.remove(entry)

    def forget(self) -> None:
        """Forget the requests so far: a repeat of one counts as a new request."""
        with self._lock:
            self._entries.clear()

    def _note(self, request: PlanRequest, *, begun: bool, answered_ns: int | None = None) -> None:
        with self._lock:
            entry = self._find(request)
            if entry is not None:
                entry.begun, entry.answered_ns = begun, answered_ns

    def _waiting(self) -> list[_Entry]:
        return [entry for entry in self._entries if not entry.begun]

    def _comes_late(self, plan: PlanRequest) -> bool:
        """Return whether a request came after the inference of a newer one began.

        The executor takes no answer to it after that of the newer one.
        """
        begun = [entry.request.request or 0 for entry in self._entries if entry.begun]
        return plan.request is not None and plan.request < max(begun, default=0)

    def _prune(self) -> None:
        """Forget the oldest of too many that wait, or that were answered."""
        for entry in self._waiting()[: -self.most]:
            self._entries.remove(entry)
            self.superseded += 1
        answered = [entry for entry in self._entries if entry.answered_ns is not None]
        for entry in answered[:-_REMEMBERED]:
            self._entries.remove(entry)

    def _find(self, request: PlanRequest) -> _Entry | None:
        """Find a request or the one that it repeats; one without a number repeats none."""
        key = request.episode, request.request
        for entry in self._entries:
            known = entry.request
            same = (known.episode, known.request) == key and request.request is not None
            if known is request or same:
                return entry
        return None
