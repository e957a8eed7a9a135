"""Seams and holds of the executor in a recording."""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.recording.bag_reader import BagReader

_DIAGNOSTICS = 'diagnostic_msgs/msg/DiagnosticArray'


@dataclass(frozen=True)
class SeamEvent:
    """One hand-over from chunk to chunk.

    Attributes:
        time_ns: ROS time of the step.
        chunk: inference number of the new chunk.
        text: text in the executor's words.
        late: True for a chunk that came after its time.
        position_jump: largest disagreement of a joint before blending, in its own unit.
    """

    time_ns: int
    chunk: int
    text: str
    late: bool
    position_jump: float


@dataclass(frozen=True)
class HoldEvent:
    """A stretch of time in which the robot was held, with the reason.

    Attributes:
        begin_ns: time when it was first said.
        end_ns: time when something else was said.
        reason: the executor's name of it.
        text: text in the executor's words.
    """

    begin_ns: int
    end_ns: int
    reason: str
    text: str


@dataclass(frozen=True)
class Events:
    """Seams and holds of the executor in a policy's namespace.

    Attributes:
        seams: seams in the order of time.
        holds: likewise.
    """

    seams: tuple[SeamEvent, ...]
    holds: tuple[HoldEvent, ...]


def read_events(reader: BagReader, policy_node: str) -> Events:
    """Read the seams and holds of the executor beside a policy node."""
    executor = f'{policy_node.rpartition("/")[0]}/vla_executor'
    seams: list[SeamEvent] = []
    said: list[tuple[int, bool, str, str]] = []
    topics = (f'{executor}/report', '/diagnostics')
    for raw in reader.messages(lambda topic, kind: topic in topics and kind == _DIAGNOSTICS):
        message = reader.read(raw)
        for status in message.status if message is not None else ():
            values = values_of(status)
            try:
                if status.name == f'{executor}: seam':
                    seams.append(_seam(values, status.message))
                elif status.name == f'{executor}: control' and 'kind' in values:
                    held = values['kind'] == 'hold'
                    said.append((raw.time_ns, held, values.get('reason', ''), status.message))
            # A damaged message costs its own event.
            except (KeyError, ValueError):
                continue
    seams.sort(key=lambda seam: seam.time_ns)
    said.sort()
    return Events(tuple(seams), tuple(_holds(said)))


def _seam(values: dict[str, str], text: str) -> SeamEvent:
    return SeamEvent(
        time_ns=int(values['stamp_ns']),
        chunk=int(values['chunk']),
        text=text,
        late=values['late'] == 'true',
        position_jump=float(values['position_jump']),
    )


def _holds(said: list[tuple[int, bool, str, str]]) -> list[HoldEvent]:
    holds: list[HoldEvent] = []
    begun: tuple[int, str, str] | None = None
    for time_ns, held, reason, text in said:
        if begun is not None and (not held or reason != begun[1]):
            holds.append(HoldEvent(begun[0], time_ns, begun[1], begun[2]))
            begun = None
        if held and begun is None:
            begun = time_ns, reason, text
    if begun is not None:
        holds.append(HoldEvent(begun[0], said[-1][0], begun[1], begun[2]))
    return holds
