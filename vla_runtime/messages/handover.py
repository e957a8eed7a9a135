"""The executor's report of a handover, read back from its message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vla_runtime.messages.diagnostics import values_of

if TYPE_CHECKING:
    from diagnostic_msgs.msg import DiagnosticStatus


@dataclass(frozen=True)
class HandoverReport:
    """One handover from chunk to chunk.

    Attributes:
        time_ns: ROS time of the first command after it.
        delay_steps: steps between its observation and its arrival.
        position_jump: largest disagreement of a joint before blending, in its own unit.
        velocity_jump: largest jump of a joint's velocity, per second.
    """

    time_ns: int
    chunk: int
    delay_steps: int
    late: bool
    from_hold: bool
    position_jump: float
    velocity_jump: float
    text: str


def read_handover(status: DiagnosticStatus) -> HandoverReport:
    """Read the status `seam`; KeyError or ValueError where a value is missing or no number."""
    values = values_of(status)
    return HandoverReport(
        time_ns=int(values['stamp_ns']),
        chunk=int(values['chunk']),
        delay_steps=int(values['delay_steps']),
        late=values['late'] == 'true',
        from_hold=values['from_hold'] == 'true',
        position_jump=float(values['position_jump']),
        velocity_jump=float(values['velocity_jump']),
        text=status.message,
    )
