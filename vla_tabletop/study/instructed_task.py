"""The instruction of an episode: its task, or something else as a control."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_tabletop.sim.instructions import find_task
from vla_tabletop.sim.scene import COLOURS
from vla_tabletop.sim.tasks import Goal, Task, make_task, push_path_is_clear
from vla_tabletop.study.condition import Instructed

# Any sentence would do: it says nothing about the episode's task.
FIXED_INSTRUCTION = 'touch the red block'


@dataclass(frozen=True)
class InstructedTask:
    """An instruction, and the block that it names in the scene."""

    instruction: str
    block: int


def instructed_task(
    instructed: Instructed, task: Task, block_m: np.ndarray, seed: int
) -> InstructedTask:
    """Return the instruction of an episode.

    Args:
        instructed: see `Condition`.
        task: the episode's task, by which success is judged.
        block_m: (3, 2 or 3) block centres.
        seed: seed of the episode; draws the other block.
    """
    if instructed == 'task':
        return InstructedTask(task.instruction, task.goal.block)
    if instructed == 'fixed':
        meant = find_task(FIXED_INSTRUCTION, block_m)
        assert meant is not None
        return InstructedTask(FIXED_INSTRUCTION, meant.goal.block)
    others = [block for block in range(len(COLOURS)) if block != task.goal.block]
    np.random.default_rng([seed, 200]).shuffle(others)
    for block in others:
        goal = Goal(block, task.goal.side)
        other = make_task(task.family, goal, block_m)
        if other is not None and push_path_is_clear(goal, block_m):
            return InstructedTask(other.instruction, block)
    raise ValueError(
        f"instructed 'other_block': no other block can be named in the {task.family} family of "
        f'seed {seed}; choose the colour or position family'
    )
