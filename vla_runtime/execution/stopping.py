"""Stop behaviour for each cause: brake along the plan, or freeze at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from vla_runtime.execution.command import Reason

OnStop = Literal['brake', 'freeze']


@dataclass(frozen=True)
class StopActions:
    """Stop behaviour of a robot in motion, for each cause (`Reason`).

    `brake` slows down along the plan within the limits of acceleration. `freeze` repeats the last
    command from this very tick on: the step of the velocity is left to the robot's controller.

    Some stops always freeze, because no motion can be computed: an exception inside a tick, a
    steady clock that reads no number, a simulated clock that stands still, and ticks that stop
    coming under a simulated clock.

    Attributes:
        stopped: `~/stop`, a change of `dry_run`, deactivation and shutdown.
        paused: `~/pause`, and the end of an episode.
        released: `~/release`, or another node that commands the robot.
        tracking_error: a joint is further from its command than `max_tracking_error`, or blocked.
        others: named like the reasons in `/diagnostics`.
    """

    stopped: OnStop = 'brake'
    paused: OnStop = 'brake'
    released: OnStop = 'brake'
    state_missing: OnStop = 'brake'
    state_stale: OnStop = 'brake'
    state_from_future: OnStop = 'brake'
    state_not_finite: OnStop = 'brake'
    state_implausible: OnStop = 'brake'
    state_doubled: OnStop = 'brake'
    tracking_error: OnStop = 'freeze'
    step_from_measured: OnStop = 'brake'
    approach_timeout: OnStop = 'brake'
    tick_late: OnStop = 'brake'
    clock_jump: OnStop = 'brake'
    clamp_latch: OnStop = 'brake'
    controller: OnStop = 'brake'
    internal_error: OnStop = 'brake'

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value not in get_args(OnStop):
                raise ValueError(
                    f"on_stop: {item.name} is '{value}', expected one of {list(get_args(OnStop))}"
                )

    def freezes(self, reason: Reason) -> bool:
        """Return whether to stop at once for this reason; always without a field for it."""
        return getattr(self, reason.value, 'freeze') == 'freeze'
