"""Eight of Meta-World's fifty tasks, which policies are taught here, and their instructions."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

TaskName = Literal[
    'reach',
    'push',
    'drawer-open',
    'door-open',
    'button-press-topdown',
    'sweep-into',
    'window-open',
    'plate-slide',
]
TASKS: tuple[TaskName, ...] = get_args(TaskName)

# Two of the environment's own, left and right of the table, narrowed (from 45 and 60 degrees), as
# LeRobot moves one of them closer: a ball is five of 64 pixels wide and not two.
FIELDS_OF_VIEW_DEG = {'corner': 25.0, 'corner4': 42.0}
CAMERAS = tuple(FIELDS_OF_VIEW_DEG)

# A task's five wordings: the plain one, two more that training uses, two that it never sees.
_WORDINGS: dict[TaskName, tuple[str, str, str, str, str]] = {
    'reach': (
        'reach the red ball',
        'move the gripper to the red ball',
        'go to the red ball',
        'move to the red ball',
        'reach to the ball',
    ),
    'push': (
        'push the puck to the green ball',
        'move the puck to the green ball',
        'slide the puck to the goal',
        'push the puck to the goal',
        'move the puck to the goal',
    ),
    'drawer-open': (
        'open the drawer',
        'pull the drawer open',
        'pull out the drawer',
        'pull the drawer',
        'open up the drawer',
    ),
    'door-open': (
        'open the door',
        'pull the door open',
        'open up the door',
        'pull the door',
        'pull open the door',
    ),
    'button-press-topdown': (
        'press the button from above',
        'push the button down',
        'press down the button',
        'press the button down',
        'push the button from above',
    ),
    'sweep-into': (
        'sweep the block into the hole',
        'push the block into the hole',
        'move the block into the hole',
        'slide the block into the hole',
        'sweep the block to the hole',
    ),
    'window-open': (
        'open the window',
        'slide the window open',
        'push the window open',
        'slide the window',
        'push open the window',
    ),
    'plate-slide': (
        'slide the plate into the net',
        'push the plate into the net',
        'move the plate into the net',
        'slide the plate to the net',
        'push the plate to the net',
    ),
}
_TRAINED = 3

Wording = Literal['plain', 'training', 'held_out']


def wordings(task: TaskName, wording: Wording) -> tuple[str, ...]:
    """Return the sentences of a task: the plain one, those of training, or those it never sees."""
    of_task = _WORDINGS[task]
    if wording == 'plain':
        return of_task[:1]
    return of_task[_TRAINED:] if wording == 'held_out' else of_task[:_TRAINED]


def sample_instruction(task: TaskName, wording: Wording, rng: np.random.Generator) -> str:
    """Draw one of a task's sentences."""
    choices = wordings(task, wording)
    return choices[rng.integers(len(choices))]


def trained_instructions() -> tuple[str, ...]:
    """Every sentence that training uses."""
    return tuple(sentence for task in TASKS for sentence in wordings(task, 'training'))
