"""Sessions of robots on one policy, and how long one that was left is kept.

Invariants:
- one connection has a session, and a session at most one connection;
- a session takes a place of its own with its first request: until then nobody knows whose it is;
- everything here runs on the event loop's thread, but for what `RobotSession` says otherwise.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from vla_runtime.inference.sessions import Session

# A connection that was dropped ends with the request that it has open.
_LEAVING_S = 2.0


class SessionError(ValueError):
    """A connection that gets no session."""


@dataclass(eq=False)
class RobotSession:
    """One robot's session.

    Attributes:
        engine: its prefix cache and inference numbers; None before its first request. Only the
            engine's thread touches it.
        seed: seed of the noise; None: the server's.
        last_chunk: (H, actions) float64 of the last answer to this connection, for
            `executed_steps`: one to an earlier connection may not have come. None after a reset.
        connected: it has a connection.
        ended: it is in no table any more; a request of it that still waits is refused.
        left_s: steady time at which its connection went.
        probe: asks its connection for a sign of life, and drops one that gives none; None: this
            wire cannot ask.
    """

    name: str
    engine: Session | None = None
    seed: int | None = None
    last_chunk: np.ndarray | None = None
    connected: bool = True
    left_s: float = 0.0
    probe: Callable[[], Awaitable[bool]] | None = None
    opened_s: float = field(default_factory=time.monotonic)
    requests: int = 0
    faults: int = 0
    ended: bool = False


class SessionTable:
    """Sessions of one policy by name.

    Args:
        most: connections, and sessions that have been used; the longest kept makes room for a new
            one.
        keep_s: seconds for which a session without a connection is kept.
        forget: called with a session that has ended.
    """

    def __init__(
        self,
        most: int,
        keep_s: float,
        forget: Callable[[RobotSession], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._keep_s = most, keep_s
        self._forget, self._clock = forget, clock
        self._sessions: dict[str, RobotSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def connected(self) -> list[RobotSession]:
        return [session for session in self._sessions.values() if session.connected]

    @property
    def all(self) -> list[RobotSession]:
        return list(self._sessions.values())

    def open(self, name: str | None = None) -> RobotSession:
        """Return a new session, or the one of this name that was left.

        Raises:
            SessionError: the session has a connection, or there are as many as there may be.
        """
        if len(self.connected) >= self._most:
            raise SessionError(
                f'the server has its {self._most} sessions; close one, or start it with a larger '
                '--max-sessions'
            )
        return self._connect(name)

    def _connect(self, name: str | None) -> RobotSession:
        session = None if name is None else self._sessions.get(name)
        if session is None:
            session = RobotSession(name or secrets.token_hex(16))
            self._sessions[session.name] = session
        elif session.connected:
            raise SessionError(
                'session_id: this session has a connection already; one robot uses one session'
            )
        session.connected, session.last_chunk = True, None
        return session

    def move(self, session: RobotSession, name: str | None) -> RobotSession:
        """Return the session that a request names; its connection leaves the one it had.

        Raises:
            SessionError: the session has a connection; this one keeps its session then.
        """
        if name is None or name == session.name:
            return session
        if name not in self._sessions and not session.requests:
            # Nothing of it is there yet.
            del self._sessions[session.name]
            session.name = name
            self._sessions[name] = session
            return session
        is_new = name not in self._sessions
        other = self._connect(name)
        self.leave(session)
        if is_new and not session.ended and self._is_full:
            # A robot with many names takes no other robot's place.
            self._end(session)
        return other

    def admit(self, session: RobotSession) -> None:
        """Give a session its place, with its first request; the longest kept one makes room.

        With a later request any thread may call it: it does not look at the other sessions.
        """
        if session.requests or not self._is_full:
            return
        left = [one for one in self._sessions.values() if not one.connected]
        if left:
            self._end(min(left, key=lambda one: one.left_s))

    @property
    def _is_full(self) -> bool:
        return sum(one.requests > 0 for one in self._sessions.values()) >= self._most

    async def find_room(self) -> None:
        """Where there is no room, let go of connections that are dead, though nobody knows yet."""
        if len(self.connected) >= self._most:
            await asyncio.gather(*(self.free(session.name) for session in self.connected))

    async def free(self, name: str | None) -> None:
        """Let go of a session's connection that is dead, though nobody knows yet."""
        session = self._sessions.get(name or '')
        if session is None or not session.connected or session.probe is None:
            return
        if not await session.probe():
            end_s = time.monotonic() + _LEAVING_S
            while session.connected and time.monotonic() < end_s:
                await asyncio.sleep(0.01)

    def leave(self, session: RobotSession) -> None:
        """Note that a session's connection has gone; one without a request ends at once."""
        session.connected, session.left_s, session.probe = False, self._clock(), None
        if not session.requests or not self._keep_s:
            self._end(session)

    def end_kept(self) -> None:
        """End the sessions that were left longer ago than they are kept."""
        for session in self.all:
            if not session.connected and self._clock() - session.left_s > self._keep_s:
                self._end(session)

    def _end(self, session: RobotSession) -> None:
        del self._sessions[session.name]
        session.ended = True
        self._forget(session)
