"""One closed-loop episode: chunks in, joints moved, outcome out.

For the expert, the data and quick checks of a policy: no delay, the first `replan_steps` rows of a
chunk, then the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_tabletop.sim.expert import STEP_TIME_S
from vla_tabletop.sim.tasks import Judge, Outcome, Task
from vla_tabletop.sim.world import Tabletop


def follow(
    world: Tabletop,
    rows: np.ndarray,
    judge: Judge | None,
    step_time_s: float = STEP_TIME_S,
) -> Outcome | None:
    """Command rows (n, 6) one policy step each, joined by straight lines at the control rate.

    Row i is due at its step's start; the last row is held. Stops at the judge's verdict.
    """
    ticks = round(step_time_s / world.control_period_s)
    for i, row in enumerate(rows):
        following = rows[min(i + 1, len(rows) - 1)]
        for tick in range(ticks):
            world.step(row + (following - row) * (tick / ticks))
            outcome = None if judge is None else judge.judge(world.state())
            if outcome is not None:
                return outcome
    return None


def run_episode(
    world: Tabletop,
    task: Task,
    chunk: Callable[[Tabletop, Task], np.ndarray],
    replan_steps: int,
) -> Outcome:
    """Run a loaded world to the end of the task.

    `chunk` gives (horizon, 6) setpoints in rad, of which `replan_steps` rows are executed.
    """
    judge = Judge(task, world.sim_time_s)
    while True:
        rows = chunk(world, task)
        outcome = follow(world, rows[:replan_steps], judge)
        if outcome is not None:
            return outcome
