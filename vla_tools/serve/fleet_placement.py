"""Where a fleet's sessions are: the replicas that run, and which one a session goes to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

# Replicas that take calls, by application; written by the routers of this process.
running: dict[str, tuple[str, ...]] = {}


def replica_for_new(replicas: Sequence[str], sessions: Mapping[str, int]) -> str | None:
    """Return the replica with the fewest sessions; None where there is none.

    Args:
        sessions: number of sessions by replica.
    """
    return min(replicas, key=lambda one: sessions.get(one, 0), default=None)


def replica_for_name(name: str, replicas: Sequence[str]) -> str | None:
    """Return the replica of a session's name: the same whoever asks, None where there is none.

    A name begins with the replica that gave it. Where that one has gone, or a robot chose the name,
    each replica is as likely (rendezvous hashing: a replica that goes moves its own sessions only).
    """
    first = name.partition('.')[0]
    if first in replicas:
        return first
    return max(replicas, key=lambda one: _score(name, one), default=None)


def _score(name: str, replica: str) -> bytes:
    return hashlib.sha256(f'{name}\0{replica}'.encode()).digest()
