"""Hand-overs and holds of the executor in a recording."""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.handover import HandoverReport, read_handover
from vla_runtime.recording.bag_reader import BagReader

_DIAGNOSTICS = 'diagnostic_msgs/msg/DiagnosticArray'


@dataclass(frozen=True)
class HoldEvent:
    """A stretch of time in which the executor held the robot, until something else was reported.

    `reason` is the executor's name of it, `text` its words.
    """

    begin_ns: int
    end_ns: int
    reason: str
    text: str


@dataclass(frozen=True)
class Events:
    """Hand-overs and holds of the executor in a policy's namespace."""

    handovers: tuple[HandoverReport, ...]
    holds: tuple[HoldEvent, ...]


def read_events(reader: BagReader, policy_node: str) -> Events:
    """Read the hand-overs and holds of the executor beside a policy node."""
    executor = f'{policy_node.rpartition("/")[0]}/vla_executor'
    handovers: list[HandoverReport] = []
    reports: list[tuple[int, bool, str, str]] = []
    topics = (f'{executor}/report', '/diagnostics')
    for raw in reader.messages(lambda topic, kind: topic in topics and kind == _DIAGNOSTICS):
        message = reader.read(raw)
        for status in message.status if message is not None else ():
            try:
                if status.name == f'{executor}: seam':
                    handovers.append(read_handover(status))
                elif status.name == f'{executor}: control':
                    values = values_of(status)
                    held = values['kind'] == 'hold'
                    reports.append((raw.time_ns, held, values.get('reason', ''), status.message))
            # A damaged message loses only its event.
            except (KeyError, ValueError):
                continue
    handovers.sort(key=lambda report: report.time_ns)
    reports.sort()
    return Events(tuple(handovers), tuple(_holds(reports)))


def _holds(reports: list[tuple[int, bool, str, str]]) -> list[HoldEvent]:
    holds: list[HoldEvent] = []
    begun: tuple[int, str, str] | None = None
    for time_ns, held, reason, text in reports:
        if begun is not None and (not held or reason != begun[1]):
            holds.append(HoldEvent(begun[0], time_ns, begun[1], begun[2]))
            begun = None
        if held and begun is None:
            begun = time_ns, reason, text
    if begun is not None:
        holds.append(HoldEvent(begun[0], reports[-1][0], begun[1], begun[2]))
    return holds
