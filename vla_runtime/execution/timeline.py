"""The plan in force on the grid of steps, and how much of it has been consumed.

Steps are counted from the start of the episode. Step k is the span of plan time from k to k+1: the
setpoint leaves where step k-1 ended and reaches row k when step k ends. So S executed steps are
exactly S rows reached. (Against a robot that is sent row k for the whole of step k, as in most
training data, this lags by half a step; leaving from row k at time k would lead by half a step.)

Plan time only passes while the robot tracks, in integer nanoseconds, so that step boundaries are
exact at any control rate. The timeline always ends at rest: running out of plan is a smooth stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_runtime.execution.handover import Handover, LiveChunk, hand_over, mode_for
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.plan import Plan, Sampler, make_plan, monotone_slopes

# Finished steps that are kept for the committed plan, so that a policy whose observation is a few
# steps old still finds the rows that belong to it.
PAST_STEPS = 64


@dataclass(frozen=True)
class Segment:
    """A chunk's place on the timeline.

    Attributes:
        join_step: first executed step of the chunk.
        boundary: the step at which its successor should take over (`join_step + S`).
        end_step: the step at which the robot holds when no successor came.
        rows: (rows left, columns) setpoints from `join_step` on, after hand-over; they go on past
            `end_step` to the end of the chunk.
    """

    chunk: LiveChunk
    join_step: int
    boundary: int
    end_step: int
    rows: np.ndarray
    seam: Handover

    @property
    def join_index(self) -> int:
        return self.join_step - self.chunk.first_step


class Timeline:
    """The plan in force, the chunk that is spliced in behind it, and the plan time consumed."""

    def __init__(self, is_velocity: np.ndarray) -> None:
        self._is_velocity = is_velocity
        self._sampler = Sampler()
        self.step_ns = 0
        self.consumed_ns = 0
        self.in_force: Segment | None = None
        self.pending: Segment | None = None
        self._plan = make_plan(np.zeros((1, len(is_velocity))))
        self._before_pending = self._plan

    @property
    def step_time_s(self) -> float:
        return self.step_ns * 1e-9

    @property
    def current_step(self) -> int:
        return self.consumed_ns // self.step_ns if self.step_ns else 0

    @property
    def next_step(self) -> int:
        """The first step that has not begun."""
        return -(-self.consumed_ns // self.step_ns) if self.step_ns else 0

    @property
    def at_end(self) -> bool:
        last = self.pending or self.in_force
        return last is None or self.consumed_ns >= last.end_step * self.step_ns

    def restart(self, step_ns: int, setpoints: np.ndarray) -> None:
        """Begin an episode: step 0, holding at the setpoints."""
        self.step_ns = step_ns
        self.consumed_ns = 0
        self.hold_at(setpoints)

    def hold_at(self, setpoints: np.ndarray) -> None:
        """Drop the plan, with a step that has begun; the next chunk sets out from here."""
        self.consumed_ns = self.next_step * self.step_ns
        self.in_force = None
        self.pending = None
        self.set_out_from(setpoints)
        self._plan = self._before_pending

    def set_out_from(self, setpoints: np.ndarray) -> None:
        """Let the next chunk set out from these setpoints; called while holding."""
        self._before_pending = make_plan(
            np.array(setpoints, dtype=np.float64)[None, :], self.next_step
        )

    def joins_at(self) -> int:
        """The step at which a chunk that arrives now takes over."""
        if self.in_force is None:
            return self.next_step
        return max(self.in_force.boundary, self.next_step)

    def setpoint_at_join(self) -> np.ndarray:
        """(columns,) where the plan is when a chunk that arrives now takes over."""
        plan = self._before_pending
        return plan.knots[self.joins_at() - plan.first_step]

    @property
    def brakes_early(self) -> bool:
        """True when the chunk in force comes to rest at its boundary, and slows down before it."""
        return self.in_force is not None and self.in_force.end_step == self.in_force.boundary

    def handed_over(
        self, chunks: Sequence[LiveChunk], parameters: ExecutorParameters
    ) -> np.ndarray:
        """(rows left of the newest chunk, columns) what follows `joins_at()`; changes nothing."""
        join = self.joins_at()
        return hand_over(
            parameters.handover, self._rows_from(join), chunks, join, ~self._is_velocity
        )

    def splice(
        self,
        chunks: Sequence[LiveChunk],
        delay_steps: int,
        parameters: ExecutorParameters,
        starved: bool = False,
        rows: np.ndarray | None = None,
    ) -> Segment:
        """Let the last of the live chunks take over at `joins_at()`; replaces one spliced before.

        Args:
            chunks: live chunks, oldest first.
            delay_steps: delay of the chunk in steps; reported only.
            starved: reported only: the robot holds because this chunk is late.
            rows: result of `handed_over` for the same chunks, where it is known already.
        """
        chunk, join = chunks[-1], self.joins_at()
        old_plan, old_rows = self._leading_to(join), self._rows_from(join)
        if rows is None:
            rows = self.handed_over(chunks, parameters)
        available = len(rows)
        interval = min(parameters.replan_interval, available)
        executed = min(parameters.replan_interval + parameters.overrun_steps, available)
        in_force = self.in_force
        self._plan = self._join(old_plan, join, rows[:executed], parameters)
        seam = Handover(
            step=join,
            chunk=chunk.number,
            join_index=join - chunk.first_step,
            delay_steps=delay_steps,
            mode=mode_for(parameters.handover, chunk),
            late=starved or (in_force is not None and join > in_force.boundary),
            from_hold=in_force is None,
            position_jump=chunk.rows[join - chunk.first_step]
            - (old_rows[0] if len(old_rows) else old_plan.knots[join - old_plan.first_step]),
            velocity_jump=self._velocity_jump(join),
        )
        self.pending = Segment(chunk, join, join + interval, join + executed, rows, seam)
        return self.pending

    def _leading_to(self, join: int) -> Plan:
        """Return the plan as it is followed until `join`; a bend stays once its step has begun."""
        begun = self.consumed_ns > (join - 1) * self.step_ns
        return self._plan if begun and self.pending is not None else self._before_pending

    def _rows_from(self, step: int) -> np.ndarray:
        """Return (n, columns) rows of the plan in force from a step on; of a hold, its position."""
        if self.in_force is None:
            return np.repeat(self._before_pending.knots[-1:], 64, axis=0)
        return self.in_force.rows[step - self.in_force.join_step :]

    def _join(self, old: Plan, join: int, rows: np.ndarray, parameters: ExecutorParameters) -> Plan:
        """The old plan up to the setpoint at `join`, then the rows, ending at rest.

        The slope at `join` may change only while the step that leads there has not begun.
        """
        first = max(old.first_step, self.current_step - PAST_STEPS)
        seam = join - first
        kept = slice(first - old.first_step, join - old.first_step + 1)
        knots = np.vstack([old.knots[kept], rows])
        slopes = np.zeros_like(knots)
        slopes[: seam + 1] = old.slopes[kept]
        begun = seam == 0 or self.consumed_ns > (join - 1) * self.step_ns
        settled = seam + 1 if begun else seam
        slopes[settled:] = monotone_slopes(knots[max(seam - 1, 0) :])[settled - max(seam - 1, 0) :]
        slopes[-1] = 0.0
        plan = make_plan(knots, first, parameters.interpolation, slopes)
        # The curve in force stays, in whichever way it was interpolated.
        curves = max(settled - 1, 0)
        plan.coefficients[:curves] = old.coefficients[kept][:curves]
        return plan

    def _velocity_jump(self, join: int) -> np.ndarray:
        """(columns,) change of the mean velocity of a step at the hand-over, per second."""
        knots, at = self._plan.knots, join - self._plan.first_step
        before = knots[at] - knots[at - 1] if at > 0 else np.zeros_like(knots[at])
        return (knots[at + 1] - knots[at] - before) / self.step_time_s

    def advance(self, dt_ns: int) -> bool:
        """Let plan time pass, at most to the plan's end; return whether a pending chunk took over.

        That is when its first step begins: a moment after the boundary, not at it.
        """
        last = self.pending or self.in_force
        if last is None:
            return False
        self.consumed_ns = min(self.consumed_ns + dt_ns, last.end_step * self.step_ns)
        pending = self.pending
        if pending is None or self.consumed_ns <= pending.join_step * self.step_ns:
            return False
        self.in_force, self.pending = pending, None
        self._before_pending = self._plan
        return True

    def sample_into(self, setpoints: np.ndarray, velocity: np.ndarray) -> int:
        """Sample setpoints and rates (per second) now, after `advance`; return their step."""
        # At a boundary the step that has just ended: its row is the setpoint.
        step = self.next_step - 1
        fraction = (self.consumed_ns - step * self.step_ns) / self.step_ns
        interval = step - self._plan.first_step
        self._sampler.sample_into(self._plan, interval, fraction, setpoints, velocity)
        velocity /= self.step_time_s
        return step

    def committed_rows(self, past_steps: int) -> tuple[int, np.ndarray]:
        """Return the first step, and the rows from there to the end of the last spliced chunk.

        `past_steps` finished steps come first, as many as are kept.
        """
        plan, last = self._plan, self.pending or self.in_force
        first = max(self.current_step - past_steps, plan.first_step)
        # The row of step k is the knot at which step k ends.
        rows = plan.knots[first + 1 - plan.first_step :]
        if last is not None:
            rows = np.vstack([rows, last.rows[last.end_step - last.join_step :]])
        return first, rows.copy()
