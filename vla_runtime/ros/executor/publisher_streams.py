"""Tells the publishers of one topic apart by the numbers that they give their messages.

rclpy does not say which publisher a message came from (`rmw_message_info_t.publisher_gid`), but
DDS counts the messages of each, and delivers those of one in order. So a number that is not behind
the last one of a publisher may be the next of it, and the one right behind is.
"""

from __future__ import annotations

from dataclasses import dataclass

# More publishers than a topic has; the one that was silent for longest is forgotten.
_MOST = 8


@dataclass
class _Stream:
    name: int
    last: int


class PublisherStreams:
    """Sorts the messages of one topic by publisher."""

    def __init__(self) -> None:
        # The one that was heard of last is at the end.
        self._streams: list[_Stream] = []
        self._made = 0

    def name_of(self, number: int) -> int:
        """Return a number that stands for the publisher of a message.

        Args:
            number: the message's `publication_sequence_number`.
        """
        found = next((stream for stream in self._streams if stream.last + 1 == number), None)
        if found is None:
            # Messages in between were lost.
            behind = [stream for stream in self._streams if stream.last < number]
            found = max(behind, key=lambda stream: stream.last, default=None)
        if found is None:
            self._made += 1
            found = _Stream(self._made, number)
            del self._streams[: len(self._streams) - _MOST + 1]
        else:
            self._streams.remove(found)
        found.last = number
        self._streams.append(found)
        return found.name
