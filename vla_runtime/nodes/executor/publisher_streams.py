"""Tells the publishers of one topic apart by the numbers that they give their messages.

rclpy does not say which publisher a message came from (`rmw_message_info_t.publisher_gid`), but
DDS counts the messages of each, and delivers those of one in order. So a number that is not behind
the last one of a publisher may be the next of it, and the one right behind is. Nodes that were
started together have the same numbers: the joints that they publish tell these apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# More publishers than a topic has; the one that was silent for longest is forgotten.
_MOST = 8


@dataclass
class _Stream:
    name: int
    last: int
    joints: tuple[str, ...]
    all_joints: set[tuple[str, ...]]


class PublisherStreams:
    """Sorts the messages of one topic by publisher."""

    def __init__(self) -> None:
        # The one that was heard of last is at the end.
        self._streams: list[_Stream] = []
        self._made = 0

    def name_of(self, number: int, joints: tuple[str, ...]) -> int:
        """Return a number that stands for the publisher of a message.

        Args:
            number: the message's `publication_sequence_number`.
            joints: names in it.
        """
        found = self._next_of(number, joints)
        if found is None:
            self._made += 1
            found = _Stream(self._made, number, joints, set())
            del self._streams[: len(self._streams) - _MOST + 1]
        else:
            self._streams.remove(found)
        found.last, found.joints = number, joints
        found.all_joints.add(joints)
        self._streams.append(found)
        return found.name

    def _next_of(self, number: int, joints: tuple[str, ...]) -> _Stream | None:
        """Return the stream that a message belongs to, None for a new one: the likeliest first."""
        same = [stream for stream in self._streams if stream.joints == joints]
        known = [stream for stream in self._streams if joints in stream.all_joints]
        return (
            _right_behind(same, number)
            # Messages in between were lost.
            or _nearest_behind(same, number)
            # One node may publish these joints and those by turns.
            or _right_behind(known, number)
            or _right_behind(self._streams, number)
            or _nearest_behind(known, number)
        )


def _right_behind(streams: Iterable[_Stream], number: int) -> _Stream | None:
    return next((stream for stream in streams if stream.last + 1 == number), None)


def _nearest_behind(streams: Iterable[_Stream], number: int) -> _Stream | None:
    behind = (stream for stream in streams if stream.last < number)
    return max(behind, key=lambda stream: stream.last, default=None)
