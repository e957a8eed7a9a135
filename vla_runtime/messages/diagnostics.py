"""Status of a node as `diagnostic_msgs`.

Times are steady seconds: a status must stay current while `/clock` stands still.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builtin_interfaces.msg import Time
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus

# A status that stays as it is, but for its numbers, is logged this often.
REPEAT_LOG_S = 10.0


class Level(IntEnum):
    """Severity; the numbers of `diagnostic_msgs/DiagnosticStatus`."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class StatusItem:
    """One line of a node's status.

    Attributes:
        name: subject of the item, such as `inference` or `camera wrist`.
        values: numbers and words for tools; written with `str`, floats so that they read back as
            they were.
    """

    name: str
    level: Level
    text: str
    values: Mapping[str, object] = field(default_factory=dict)


def to_message(
    conditions: Iterable[StatusItem], *, node: str, hardware: str, stamp: Time
) -> DiagnosticArray:
    """Make a message of status items; their names get the node's full name in front.

    `hardware` is the robot's name for `hardware_id`, `stamp` ROS time.
    """
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

    message = DiagnosticArray()
    message.header.stamp = stamp
    message.status = [
        DiagnosticStatus(
            level=bytes([condition.level]),
            name=f'{node}: {condition.name}',
            message=condition.text,
            hardware_id=hardware,
            values=[
                KeyValue(key=key, value=_text(value)) for key, value in condition.values.items()
            ],
        )
        for condition in conditions
    ]
    return message


def values_of(status: DiagnosticStatus) -> dict[str, str]:
    return {pair.key: pair.value for pair in status.values}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A NumPy float is a float, and writes its type's name as well.
    return repr(float(value)) if isinstance(value, float) else str(value)


# As Python writes them: 3, -0.25, 1e-05, nan. Digits in a name, such as joint_3, are no number.
_NUMBER = re.compile(r'(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|(?:nan|inf)\b)')


def without_numbers(text: str) -> str:
    """Return a text with a mark for each number: two that say the same at two times are equal."""
    return _NUMBER.sub('#', text)


class Throttle:
    """Lets each text through once a period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._passed_s: dict[str, float] = {}

    def passes(self, text: str, now_s: float) -> bool:
        """Return whether to log this text at a steady time; another number in it is no news."""
        words = without_numbers(text)
        if now_s - self._passed_s.get(words, float('-inf')) < self._period_s:
            return False
        self._passed_s = {
            known: when for known, when in self._passed_s.items() if now_s - when < self._period_s
        }
        self._passed_s[words] = now_s
        return True
