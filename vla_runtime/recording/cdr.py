"""Facts at the front of a serialised message (CDR), read without making the message."""

from __future__ import annotations

import struct

_SECOND_NS = 1_000_000_000
# Two bytes of representation, two of options, then the message.
_HEADER_BYTES = 4


def header_stamp_ns(serialised: bytes) -> int | None:
    """Stamp of a message that begins with a `std_msgs/Header`; None where it is too short."""
    if len(serialised) < _HEADER_BYTES + 8:
        return None
    order = '<' if serialised[1] & 1 else '>'
    seconds, nanoseconds = struct.unpack_from(f'{order}iI', serialised, _HEADER_BYTES)
    return int(seconds) * _SECOND_NS + int(nanoseconds)
