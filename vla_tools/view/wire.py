"""Topics of a policy and its robot, and what their messages say: the view reads them here alone.

A message is any object with the message's fields, from the graph or from a bag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import (
    HandoverReport,
    TrajectoryError,
    chunk_type,
    message_to_chunk,
    message_to_plan,
    plan_type,
    read_handover,
)

PLAN, CHUNK, INFERENCE, HANDOVER = 'plan', 'chunk', 'inference', 'handover'
INSTRUCTION, DESCRIPTION, URDF = 'instruction', 'description', 'urdf'
STATUS_TOPIC = '/diagnostics'


@dataclass(frozen=True)
class Topic:
    """A topic by what it brings.

    Attributes:
        name: relative to the robot's namespace.
        message_type: returns the class of its messages; called where a robot is heard.
        latched: its newest message waits for whoever comes later.
    """

    name: str
    message_type: Callable[[], Any]
    latched: bool = False


def _diagnostics() -> Any:
    from diagnostic_msgs.msg import DiagnosticArray

    return DiagnosticArray


def _string() -> Any:
    from std_msgs.msg import String

    return String


TOPICS: Mapping[str, Topic] = {
    PLAN: Topic('committed_plan', plan_type),
    CHUNK: Topic('action_chunk', chunk_type),
    INFERENCE: Topic('vla_policy/report', _diagnostics),
    HANDOVER: Topic('vla_executor/report', _diagnostics),
    INSTRUCTION: Topic('vla_policy/current_instruction', _string, latched=True),
    DESCRIPTION: Topic('vla_policy/description', _string, latched=True),
    URDF: Topic('robot_description', _string, latched=True),
}


@dataclass(frozen=True, eq=False)
class Motion:
    """Rows of a chunk or of the committed plan.

    Attributes:
        rows: (n, columns) float64, in the robot's units; n may be 0.
        kinds: per column `position` or `velocity`.
        stamp_ns: ROS time of row 0.
        step_time_s: 0.0 where a single row does not tell.
        number: of the chunk; of the plan the number of its request.
    """

    rows: np.ndarray
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    stamp_ns: int
    step_time_s: float
    number: int

    def row_after(self, seconds: float) -> np.ndarray | None:
        """Return the row in force so long after row 0, the nearest one outside; None without."""
        if not len(self.rows):
            return None
        index = int(seconds / max(self.step_time_s, 1e-9))
        return self.rows[min(max(index, 0), len(self.rows) - 1)]

    @property
    def duration_s(self) -> float:
        return self.step_time_s * len(self.rows)


@dataclass(frozen=True)
class Inference:
    """One line of the policy's report.

    Attributes:
        total_ms: from the observation that was handed over to the chunk.
        reused: look-ups of the prefix cache that found an entry, of `looked_up`; 0 of 0 where the
            cache is off.
    """

    number: int
    total_ms: float
    milliseconds: Mapping[str, float]
    reused: int
    looked_up: int
    beta: float
    denoise_steps: int


def read_motion(role: str, message: Any) -> Motion | None:
    """Read a plan or a chunk; None where the message is none."""
    try:
        if role == PLAN:
            plan = message_to_plan(message)
            return Motion(
                plan.rows,
                plan.names,
                plan.kinds,
                plan.stamp_ns,
                plan.step_time_s or 0.0,
                plan.request or 0,
            )
        chunk, header = message_to_chunk(message, step_time_s=0.0)
    except TrajectoryError:
        return None
    return Motion(
        chunk.actions,
        chunk.names,
        chunk.kinds,
        header.observation_ns,
        chunk.step_time_s,
        header.number,
    )


def read_inferences(message: Any) -> Iterator[Inference]:
    """Yield the inferences of a report; a damaged one is left out."""
    for status in message.status:
        given = values_of(status)
        phases = {
            key.removeprefix('ms.'): value for key, value in given.items() if key.startswith('ms.')
        }
        cameras = [value for key, value in given.items() if key.startswith('cache.camera.')]
        words = [*cameras, *given.get('cache.rows', '').split()]
        try:
            yield Inference(
                number=int(given['number']),
                total_ms=float(phases['total']),
                milliseconds={name: float(value) for name, value in phases.items()},
                reused=sum(word in ('hit', 'reused') for word in words),
                looked_up=sum(word != 'off' for word in words),
                beta=float(given['beta']),
                denoise_steps=int(given['denoise_steps']),
            )
        except (KeyError, ValueError):
            continue


def read_handovers(message: Any) -> Iterator[HandoverReport]:
    """Yield the handovers of an executor's report; a damaged one is left out."""
    for status in message.status:
        if not status.name.endswith(': seam'):
            continue
        try:
            yield read_handover(status)
        except (KeyError, ValueError):
            continue
