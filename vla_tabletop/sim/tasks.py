"""Tasks of the tabletop robot: their words, and the judgement of success.

Left (negative y) and right are as the front camera sees them. `colour` and `position` ask for a
touch, `push` for a block beyond the stripe at one side. Touching or pushing one of the two other
blocks fails the episode.

Held-out wordings are never used in training; their words are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from vla_tabletop.sim.scene import COLOURS, EDGE_M, Colour

if TYPE_CHECKING:
    from vla_tabletop.sim.world import TabletopState

Family = Literal['colour', 'position', 'push']
FAMILIES: tuple[Family, ...] = get_args(Family)
Side = Literal['left', 'right']
SIDES: tuple[Side, ...] = get_args(Side)
SIDE_SIGN = {'left': -1.0, 'right': 1.0}  # of y
Wording = Literal['plain', 'training', 'held_out']
OutcomeName = Literal['success', 'wrong_block', 'timeout']

TOUCH_RADIUS_M = 0.025
PUSH_LANE_M = 0.06  # between centres: blocks turn while they slide
TIME_LIMIT_S: dict[Family, float] = {'colour': 6.0, 'position': 6.0, 'push': 12.0}

# The first of all is the plain wording; the second tuple of a pair is held out of training.
_TOUCH = (
    (
        'touch {what}',
        'tap {what}',
        'reach {what}',
        'move to {what}',
        'please touch {what}',
        'go and tap {what}',
    ),
    ('please tap {what}', 'go and touch {what}', 'please move to {what}'),
)
_PUSH = (
    (
        'push {what} to the {side} edge',
        'slide {what} to the {side} edge',
        'push {what} over to the {side}',
        'please push {what} to the {side} edge',
    ),
    ('slide {what} over to the {side}', 'please slide {what} to the {side} edge'),
)
_BY_COLOUR = (
    ('the {word} block', 'the {word} cube', 'the block that is {word}'),
    ('the cube that is {word}',),
)
_BY_PLACE = (
    (
        'the {word}-most block',
        'the {word}most block',
        'the block on the {word}',
        'the {word}-most cube',
    ),
    ('the {word}most cube', 'the cube on the {word}'),
)


@dataclass(frozen=True)
class Goal:
    """Block, and `side` to push it to; None for a touch."""

    block: int
    side: Side | None = None


@dataclass(frozen=True)
class Task:
    """One instruction, the family it belongs to, and what it means in the scene at hand."""

    family: Family
    instruction: str
    goal: Goal

    @property
    def time_limit_s(self) -> float:
        return TIME_LIMIT_S[self.family]


@dataclass(frozen=True)
class Outcome:
    """Outcome of an episode, with the simulated time from reset to the end.

    `name`: `success`, `wrong_block` or `timeout`; `block`: the one touched or pushed over, None
    after a timeout.
    """

    name: OutcomeName
    time_s: float
    block: int | None

    @property
    def success(self) -> bool:
        return self.name == 'success'


def wordings(
    family: Family, word: str, side: Side | None = None, held_out: bool = False
) -> list[str]:
    """All instructions of a family for a word (`red`, or `left`), plainest first.

    Args:
        word: a colour, or a side for the position family.
        held_out: return the wordings that training never sees.
    """
    sentences = _PUSH if family == 'push' else _TOUCH
    phrases = _BY_PLACE if family == 'position' else _BY_COLOUR
    if held_out:
        pairs = [
            *product(sentences[1], phrases[0]),
            *product(sentences[0], phrases[1]),
            *product(sentences[1], phrases[1]),
        ]
    else:
        pairs = [*product(sentences[0], phrases[0])]
    return [sentence.format(what=phrase.format(word=word), side=side) for sentence, phrase in pairs]


def all_instructions(held_out: bool = False) -> Iterator[str]:
    """Every instruction that a task can have."""
    for colour in COLOURS:
        yield from wordings('colour', colour, held_out=held_out)
        for side in SIDES:
            yield from wordings('push', colour, side, held_out=held_out)
    for side in SIDES:
        yield from wordings('position', side, held_out=held_out)


def make_task(family: Family, goal: Goal, block_m: np.ndarray) -> Task | None:
    """The plain task of a family for this goal; None if the family has no name for it.

    `block_m`: (3, 2 or 3) centres now, which decide who is left-most.
    """
    if (family == 'push') != (goal.side is not None):
        return None
    word: str = COLOURS[goal.block]
    if family == 'position':
        order = np.argsort(block_m[:, 1])
        if goal.block not in (order[0], order[-1]):
            return None
        word = 'left' if goal.block == order[0] else 'right'
    return Task(family, wordings(family, word, goal.side)[0], goal)


def sample_task(
    rng: np.random.Generator,
    block_m: np.ndarray,
    family: Family,
    wording: Literal['plain', 'training', 'held_out'] = 'plain',
    colours: Sequence[Colour] = COLOURS,
) -> Task:
    """Draw a block (and a side with a clear way to it) that the family can name, and a wording.

    The family must name one of any three blocks by `colours`.
    """
    while True:
        side: Side | None = SIDES[rng.integers(2)] if family == 'push' else None
        goal = Goal(COLOURS.index(colours[int(rng.integers(len(colours)))]), side)
        if not push_path_is_clear(goal, block_m):
            continue
        task = make_task(family, goal, block_m)
        if task is not None:
            break
    if wording == 'plain':
        return task
    word: str = COLOURS[goal.block]
    if family == 'position':
        word = 'left' if goal.block == np.argmin(block_m[:, 1]) else 'right'
    choices = wordings(family, word, side, held_out=wording == 'held_out')
    return Task(family, choices[rng.integers(len(choices))], goal)


def push_path_is_clear(goal: Goal, block_m: np.ndarray) -> bool:
    """Return whether no other block lies between this one and the stripe; true of every touch."""
    if goal.side is None:
        return True
    others = np.delete(block_m, goal.block, axis=0)
    ahead = SIDE_SIGN[goal.side] * (others[:, 1] - block_m[goal.block, 1]) > 0
    beside = np.abs(others[:, 0] - block_m[goal.block, 0]) > PUSH_LANE_M
    return bool(np.all(beside | ~ahead))


class Judge:
    """Decides from the simulator's state, tick by tick, whether and how an episode ended.

    The time limit runs from `start_s`, in simulated time.
    """

    def __init__(self, task: Task, start_s: float = 0.0) -> None:
        self.task = task
        self._start_s = start_s

    def judge(self, state: TabletopState) -> Outcome | None:
        """The outcome if the episode ended at this state, else None."""
        block = self._pushed(state) if self.task.goal.side else self._touched(state)
        elapsed_s = state.time_s - self._start_s
        if block is not None:
            name: OutcomeName = 'success' if block == self.task.goal.block else 'wrong_block'
            return Outcome(name, elapsed_s, block)
        if elapsed_s >= self.task.time_limit_s:
            return Outcome('timeout', elapsed_s, None)
        return None

    def _touched(self, state: TabletopState) -> int | None:
        distance = np.linalg.norm(state.block_m - state.tip_m, axis=1)
        nearest = int(np.argmin(distance))
        return nearest if distance[nearest] <= TOUCH_RADIUS_M else None

    def _pushed(self, state: TabletopState) -> int | None:
        goal = self.task.goal
        assert goal.side is not None
        if SIDE_SIGN[goal.side] * state.block_m[goal.block, 1] >= EDGE_M:
            return goal.block
        for block in range(len(COLOURS)):
            if block != goal.block and abs(state.block_m[block, 1]) >= EDGE_M:
                return block
        return None
