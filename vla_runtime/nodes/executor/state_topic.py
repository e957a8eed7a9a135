"""The executor's state as a typed message, on `~/state` beside its status on `/diagnostics`.

Nothing is published where `vla_interfaces` is not built.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rclpy.node import Node

from vla_runtime.execution.command import Driver, LimitKind
from vla_runtime.messages.diagnostics import StatusItem
from vla_runtime.messages.trajectories import typed_messages
from vla_runtime.nodes.executor.status import Facts
from vla_runtime.nodes.qos import RELIABLE


class StateTopic:
    """Publishes `ExecutorState`; one thread calls."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._typed: Any = typed_messages()
        self._stands: tuple[str, str] = ('', '')
        self._since_s = time.monotonic()
        self._limited: Mapping[tuple[str, LimitKind], int] = {}
        if self._typed is not None:
            self._publisher = node.create_publisher(self._typed.ExecutorState, '~/state', RELIABLE)

    def publish(self, control: StatusItem, facts: Facts | None, episode_outcome: str) -> None:
        """Publish the state of which `control` is the status; `facts` None while inactive."""
        if self._typed is None:
            return
        message = self._typed.ExecutorState(text=control.text, episode_outcome=episode_outcome)
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.mode, message.driver = str(control.values['mode']), Driver.NOBODY.value
        message.step = message.chunk = message.pending_chunk = -1
        message.observation_age_s = math.nan
        if facts is None:
            self._limited = {}
        else:
            self._fill(message, facts)
        if (message.mode, message.reason) != self._stands:
            self._stands, self._since_s = (message.mode, message.reason), time.monotonic()
        message.seconds = time.monotonic() - self._since_s
        self._publisher.publish(message)

    def _fill(self, message: object, facts: Facts) -> None:
        executor, counters = facts.executor, facts.status.counters
        fields: dict[str, object] = {
            'reason': executor.reason.value,
            'driver': executor.driver.value,
            'start_refused': facts.start_refused,
            'limits': self._limits(dict(counters.limited)),
            'clamp_latched': bool(executor.clamp_latched),
            'dry_run': executor.dry_run,
            'episode': executor.episode,
            'step': executor.step,
            'chunk': executor.chunk,
            'pending_chunk': executor.pending_chunk,
            'replan_interval': executor.parameters.replan_interval,
            'delay_steps': max(0, executor.delay_estimate),
            'open_requests': executor.open_requests,
            'max_open_requests': executor.most_open_requests,
            'inputs': [
                self._typed.InputAge(name=topic, age_s=age_ms * 1e-3)
                for topic, age_ms in facts.state_ages_ms.items()
            ],
            'commands': facts.status.sent,
            'chunks': counters.taken_over,
            'starvations': counters.starvations,
        }
        if executor.chunk >= 0:
            fields['observation_age_s'] = executor.observation_age_ms * 1e-3
        for name, value in fields.items():
            setattr(message, name, value)

    def _limits(self, limited: Mapping[tuple[str, LimitKind], int]) -> list[object]:
        before, self._limited = self._limited, limited
        return [
            self._typed.BindingLimit(
                joint=joint,
                limit=kind.value,
                ticks=ticks,
                binds=ticks > before.get((joint, kind), 0),
            )
            for (joint, kind), ticks in limited.items()
        ]
