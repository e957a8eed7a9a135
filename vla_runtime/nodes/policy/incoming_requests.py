"""The executor's requests as they arrive, each to be answered once, in the order of their numbers.

As many wait as the policy takes before its first answer; one more replaces the oldest, and one of
another episode all of them. The executor repeats an open request every 0.1 s, under the same
number, because a transport may lose it. A repeat brings a newer plan to a request that waits for a
frame; it changes nothing while the inference runs or its chunk is on the way. A late copy of the
plan that was answered or of an older one, or of an ended episode, is ignored: the executor sends a
newer one. So is a repeat of a request before one that has begun: that one's answer is for both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from threading import Lock

from vla_runtime.types import PlanRequest

# A repeat that left the executor before the chunk arrived there comes within this.
_ON_THE_WAY_NS = 50_000_000
# Answered requests that are remembered, so that a copy that comes late is known.
_REMEMBERED = 8
# A request of an ended episode that a transport held back comes within this. One that comes later
# begins an episode: a clock that was set back gives a number anew, and so does a bag played twice.
_HELD_BACK_NS = 5_000_000_000


@dataclass(eq=False)
class _Entry:
    """A request, whether its inference has begun and for what, and its answer's steady time.

    One that is to be answered anew has the time of its last answer until it begins.
    """

    request: PlanRequest
    begun: bool = False
    instruction: str = ''
    answered_ns: int | None = None


class IncomingRequests:
    """The newest requests, and how far their answers are. For any thread.

    Attributes:
        superseded: requests that newer ones replaced before they were answered.
        episode: episode of the newest request; None before the first.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: list[_Entry] = []
        # Ended episodes, and the steady times of their ends.
        self._ended: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._most = 1
        self.superseded = 0
        self.episode: int | None = None

    @property
    def most(self) -> int:
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        with self._lock:
            self._most = most
            self._prune()

    def receive(self, plan: PlanRequest, now_ns: int) -> PlanRequest | None:
        """Return the request to work on; None for a repeat or an old one."""
        with self._lock:
            if self._is_of_ended(plan, now_ns):
                return None
            if plan.episode != self.episode:
                self._begin(plan.episode, now_ns)
            entry = self._find(plan)
            if (entry is None or entry.begun) and self._comes_late(plan):
                return None
            if entry is None:
                entry = _Entry(replace(plan, arrived_ns=now_ns))
                self._insert(entry)
                self._prune()
            elif not entry.begun:
                entry.request = replace(plan, arrived_ns=entry.request.arrived_ns)
            elif (
                entry.answered_ns is None
                or now_ns - entry.answered_ns < _ON_THE_WAY_NS
                or plan.stamp_ns <= entry.request.stamp_ns
            ):
                return None
            else:
                entry.request = replace(plan, arrived_ns=now_ns)
                entry.begun = False
                self._prune()
            return entry.request

    def next(self) -> PlanRequest | None:
        with self._lock:
            return next((entry.request for entry in self._waiting()), None)

    def begin(self, request: PlanRequest, instruction: str = '') -> None:
        """A request's inference begins, for this instruction."""
        self._note(request, begun=True, instruction=instruction)

    def wait(self, request: PlanRequest) -> None:
        """A request waits again: its inference lacks an input, or was dropped."""
        self._note(request, begun=False)

    def turn_to(self, instruction: str, request: PlanRequest) -> None:
        """A request waits again: its inference was for another instruction.

        It is dropped where a newer one's has begun for this instruction, whose answer comes first:
        the executor takes no older chunk after it.
        """
        number = request.request
        with self._lock:
            entry = self._find(request)
            if entry is None:
                return
            entry.begun = False
            newer = (
                other
                for other in self._entries
                if other.begun and number is not None and (other.request.request or 0) > number
            )
            if any(other.instruction == instruction for other in newer):
                self._entries.remove(entry)
                self.superseded += 1
            else:
                self._prune()

    def answer(self, request: PlanRequest, now_ns: int) -> None:
        """A request's chunk was published; a much later repeat means that it was lost."""
        self._note(request, begun=True, answered_ns=now_ns)

    def fail(self, request: PlanRequest) -> None:
        """A request's inference failed: a repeat of it counts as a new request."""
        with self._lock:
            entry = self._find(request)
            if entry is not None:
                self._entries.remove(entry)

    def forget(self) -> None:
        """Drop the requests so far: a repeat of one counts as a new request."""
        with self._lock:
            self._entries.clear()

    def _insert(self, entry: _Entry) -> None:
        """Put a request before those of higher numbers; one without a number is the newest."""
        number = entry.request.request
        newer = (
            place
            for place, other in enumerate(self._entries)
            if number is not None and (other.request.request or 0) > number
        )
        self._entries.insert(next(newer, len(self._entries)), entry)

    def _begin(self, episode: int, now_ns: int) -> None:
        """Replace all that wait by another episode's requests."""
        self.superseded += len(self._waiting())
        self._entries.clear()
        if self.episode is not None:
            self._ended.append((self.episode, now_ns))
        self.episode = episode

    def _is_of_ended(self, plan: PlanRequest, now_ns: int) -> bool:
        """Return whether its episode has just ended; without numbers it may begin anew."""
        numbered = plan.request is not None and plan.episode != self.episode
        return numbered and any(
            episode == plan.episode and now_ns - ended_ns < _HELD_BACK_NS
            for episode, ended_ns in self._ended
        )

    def _note(
        self,
        request: PlanRequest,
        *,
        begun: bool,
        instruction: str | None = None,
        answered_ns: int | None = None,
    ) -> None:
        with self._lock:
            entry = self._find(request)
            if entry is not None:
                entry.begun, entry.answered_ns = begun, answered_ns
                if instruction is not None:
                    entry.instruction = instruction
                self._prune()

    def _waiting(self) -> list[_Entry]:
        return [entry for entry in self._entries if not entry.begun]

    def _comes_late(self, plan: PlanRequest) -> bool:
        """Return whether a newer request's inference began: no older answer is taken then."""
        begun = [
            entry.request.request or 0
            for entry in self._entries
            if entry.begun or entry.answered_ns is not None
        ]
        return plan.request is not None and plan.request < max(begun, default=0)

    def _prune(self) -> None:
        for entry in self._waiting()[: -self._most]:
            self._entries.remove(entry)
            self.superseded += 1
        answered = [
            entry for entry in self._entries if entry.begun and entry.answered_ns is not None
        ]
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
