"""A node's conditions, kept current on `/diagnostics` and in its log.

A condition is published at once when it says something new, and all of them every second on a
steady timer, so that they stay visible while `/clock` is paused. Any thread may set one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from time import monotonic

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from vla_runtime.messages.diagnostics import (
    REPEAT_LOG_S,
    Level,
    StatusItem,
    Throttle,
    to_message,
)
from vla_runtime.nodes.qos import RELIABLE

_PERIOD_S = 1.0


class StatusBoard:
    """Publishes a node's conditions; `gather` is called every second for those made on demand."""

    def __init__(
        self,
        node: Node,
        gather: Callable[[], Iterable[StatusItem]],
        callback_group: CallbackGroup,
    ) -> None:
        self.hardware = ''
        self._node = node
        self._gather = gather
        self._lock = Lock()
        self._conditions: dict[str, StatusItem] = {}
        self._news = Throttle(_PERIOD_S)
        self._log = Throttle(REPEAT_LOG_S)
        self._publisher = node.create_publisher(
            DiagnosticArray,
            '/diagnostics',
            RELIABLE,
        )
        node.create_timer(
            _PERIOD_S,
            self._on_timer,
            callback_group=callback_group,
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def set(self, condition: StatusItem) -> None:
        """Publish this status from now on; log one worse than OK, and its end."""
        now_s = monotonic()
        with self._lock:
            last = self._conditions.get(condition.name)
            self._conditions[condition.name] = condition
            is_news = self._news.passes(condition.name + condition.text, now_s)
            is_bad = condition.level != Level.OK
            # What comes and goes all the time is logged once a period, its end likewise.
            loud = (is_bad or (last is not None and last.level != Level.OK)) and self._log.passes(
                condition.name + condition.text, now_s
            )
        if is_news:
            self.publish([condition])
        if loud:
            log_item(self._node, condition)

    def drop(self, name: str) -> None:
        with self._lock:
            self._conditions.pop(name, None)

    def publish(self, conditions: Iterable[StatusItem]) -> None:
        self._publisher.publish(self.to_message(conditions))

    def to_message(self, conditions: Iterable[StatusItem]) -> DiagnosticArray:
        return to_message(
            conditions,
            node=self._node.get_fully_qualified_name(),
            hardware=self.hardware,
            stamp=self._node.get_clock().now().to_msg(),
        )

    def _on_timer(self) -> None:
        try:
            gathered = list(self._gather())
        # A status that cannot be made is itself worth a status, and must not end the node.
        except Exception as error:
            gathered = [StatusItem('status', Level.ERROR, f'cannot be made: {error!r}')]
        with self._lock:
            kept = list(self._conditions.values())
        self.publish([*kept, *gathered])


def log_item(node: Node, condition: StatusItem) -> None:
    text, logger = f'{condition.name}: {condition.text}', node.get_logger()
    # rclpy remembers a severity for each line that logs: one line for each.
    if condition.level >= Level.ERROR:
        logger.error(text)
    elif condition.level == Level.WARN:
        logger.warning(text)
    else:
        logger.info(text)
