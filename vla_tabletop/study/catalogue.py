"""Catalogue of studies: question, conditions and episodes of each.

A new study is an entry here, with a new field of `Condition` where needed, such as

    Study('horizons', ..., grid(BASE, horizon=(8, 16)), x='horizon', ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vla_runtime.family.listing import find_family
from vla_tabletop.metaworld.tasks import TASKS
from vla_tabletop.study.condition import Condition, grid
from vla_tabletop.training.recipes import RECIPE_NAMES


@dataclass(frozen=True)
class Study:
    """A question and the conditions that answer it.

    Attributes:
        name: on the command line and in file names.
        conditions: on the same seeds, compared pair by pair.
        x: field along the plots' axis; conditions that differ elsewhere are separate curves.
        episodes: a condition; the command line may override it.
        reference: condition to compare with; or values of some fields, which each condition's
            reference has, else equal.
        same: pairs of conditions with bit-identical trajectories.
        judges: receipts of the bundles get the success of each precision beside float32's.
    """

    name: str
    title: str
    question: str
    conditions: tuple[Condition, ...]
    x: str
    episodes: int
    reference: Condition | Mapping[str, Any] | None = None
    same: tuple[tuple[Condition, Condition], ...] = ()
    judges: bool = False

    def __post_init__(self) -> None:
        if len(set(self.conditions)) != len(self.conditions):
            raise ValueError(f"study '{self.name}': a condition is named twice")
        references = {self.reference_of(condition) for condition in self.conditions}
        if not references <= {None, *self.conditions}:
            raise ValueError(f"study '{self.name}': the reference is none of its conditions")
        if not {condition for pair in self.same for condition in pair} <= set(self.conditions):
            raise ValueError(f"study '{self.name}': a pair that is the same is not in the study")
        named = {condition.policy_family != '' for condition in self.conditions}
        if len(named) > 1:
            raise ValueError(f"study '{self.name}': policy_family is given in some conditions only")

    def reference_of(self, condition: Condition) -> Condition | None:
        """Return the condition that one is compared with, which may be itself."""
        if isinstance(self.reference, Mapping):
            return replace(condition, **self.reference)
        return self.reference

    @property
    def world(self) -> str:
        """World of the conditions, which have one."""
        return self.conditions[0].world

    @property
    def compares_families(self) -> bool:
        """True where the conditions say whose bundle runs them."""
        return any(condition.policy_family for condition in self.conditions)


BASE = Condition()
# The replan interval alone is to vary: no delay, and each chunk as it is.
_BARE = replace(BASE, handover='switch', delay_steps=0.0)
_REPLAN_INTERVALS = (1, 2, 4, 8, 12, 16, 32)
_BELT = replace(_BARE, variant='moving')
_BELT_SPEEDS = (1.0, 1.3)
# The one task of a policy without language.
_ONE_TASK = replace(BASE, families=('colour',), colours=('red',))
# Policies that write tokens learned less and have their own study.
_COMPARED = tuple(name for name in RECIPE_NAMES if find_family(name).head != 'tokens')
_WITH_LANGUAGE = tuple(name for name in _COMPARED if find_family(name).has_language)
_METAWORLD = replace(BASE, world='metaworld', families=TASKS)
_METAWORLD_BARE = replace(_METAWORLD, handover='switch', delay_steps=0.0)
_DELAYS = (0.0, 2.0, 4.0, 8.0)
# As many of each task.
_METAWORLD_EPISODES = 104


def _delays(base: Condition, *delays: float) -> tuple[Condition, ...]:
    tied = replace(base, handover='rtc', rtc_mode='guided')
    return (
        *grid(base, handover=('switch', 'blend', 'ensemble'), delay_steps=delays),
        *grid(tied, rtc_mode=('guided', 'jacobian', 'hard_prefix'), delay_steps=delays),
    )


_STUDIES = (
    Study(
        'success',
        'Does the shipped policy do its task?',
        'The touch families on unseen scenes with still blocks, default settings; in the plain '
        'wording, and in wordings that training never saw.',
        grid(BASE, wording=('plain', 'held_out')),
        x='wording',
        episodes=200,
        reference=BASE,
    ),
    Study(
        'replan',
        'How many steps of a chunk should be executed?',
        'Replan interval S from one step to the whole horizon on still blocks, without delay, each '
        'chunk taken as it is (switch).',
        grid(_BARE, replan_interval=_REPLAN_INTERVALS),
        x='replan_interval',
        episodes=60,
        reference=_BARE,
    ),
    Study(
        'replan_moving',
        'How many steps, when the blocks move?',
        'The same on blocks that travel 3 to 5 cm/s (belt speed 1) or 4 to 6.5 cm/s (1.3) and turn '
        'back at the edges. The scripted expert, which knows where the blocks are, shows what the '
        'loop alone costs.',
        (
            *grid(_BELT, belt_speed=_BELT_SPEEDS, replan_interval=_REPLAN_INTERVALS),
            *grid(
                replace(_BELT, chunk_source='expert'),
                belt_speed=_BELT_SPEEDS,
                replan_interval=(4, 8, 16, 32),
            ),
        ),
        x='replan_interval',
        episodes=100,
        reference=_BELT,
    ),
    Study(
        'families',
        'Families of policies on one executor',
        'A small policy of each family, trained by train-demo, as they ship. Touch the red '
        'block, which is all that those know that read no instruction; and for those that '
        'read one, any block by colour or by place, in the plain wording.',
        (
            *grid(_ONE_TASK, policy_family=_COMPARED),
            *grid(BASE, policy_family=_WITH_LANGUAGE),
        ),
        x='policy_family',
        episodes=100,
    ),
    Study(
        'families_replan',
        'How many steps of a chunk, family by family?',
        'Touch the red block at replan intervals S from one step to the whole horizon, still '
        'blocks, no delay, each chunk taken as it is (switch).',
        grid(
            replace(_ONE_TASK, handover='switch', delay_steps=0.0),
            policy_family=_COMPARED,
            replan_interval=(1, 2, 4, 8, 16, 32),
        ),
        x='replan_interval',
        episodes=50,
    ),
    Study(
        'delay',
        'What does inference time cost, and which hand-over bears it best?',
        'Each chunk arrives so many steps (of 50 ms) after its observation, at S = 8 and a horizon '
        'of 32, for each way of handing over. Under rtc the policy ties each chunk to the '
        'committed plan in the way of rtc_mode; one that nothing tied is blended.',
        _delays(BASE, *_DELAYS),
        x='delay_steps',
        episodes=60,
    ),
    Study(
        'students',
        'Does a student do the task in one step or two?',
        'A policy that vla_runtime distill made of the shipped one, at the numbers of denoise '
        'steps that it knows, on still and on moving blocks (3 to 5 cm/s). The study denoise has '
        'the teacher at every number.',
        grid(BASE, variant=('still', 'moving'), denoise_steps=(1, 2)),
        x='denoise_steps',
        episodes=100,
    ),
    Study(
        'precision',
        'Does a lower precision still do the task?',
        'Large matrices in bfloat16 and float16, norms, softmax and the flow in float32, each '
        'against float32 on the same scenes, on still and on moving blocks (3 to 5 cm/s). What is '
        'found is written into the receipts of named bundles; precision auto leaves out what loses '
        'success.',
        grid(BASE, variant=('still', 'moving'), precision=('float32', 'bfloat16', 'float16')),
        x='precision',
        episodes=200,
        reference={'precision': 'float32'},
        judges=True,
    ),
    Study(
        'eight_bits',
        'Does the policy do its task in 8 bits?',
        'ONNX files in 8-bit integers (int8) against float32 on the same scenes and the same '
        'backend, on still and on moving blocks (3 to 5 cm/s). What is found is written into the '
        'receipts of named bundles, and decides whether precision auto may take 8 bits.',
        grid(
            replace(BASE, backend='onnxruntime'),
            variant=('still', 'moving'),
            precision=('float32', 'int8'),
        ),
        x='precision',
        episodes=200,
        reference={'precision': 'float32'},
        judges=True,
    ),
    Study(
        'metaworld',
        "Meta-World: does the policy do others' tasks?",
        'Eight tasks of Meta-World in turn, scenes never trained on, success as the environment '
        'judges it within 6.25 s; in the plain wording, and in wordings that training never saw.',
        grid(_METAWORLD, wording=('plain', 'held_out')),
        x='wording',
        episodes=200,
        reference=_METAWORLD,
    ),
    Study(
        'metaworld_replan',
        'Meta-World: how many steps of a chunk should be executed?',
        'Replan interval S from one step of 25 ms to the whole horizon, without delay, each chunk '
        'taken as it is (switch).',
        grid(_METAWORLD_BARE, replan_interval=(1, 2, 4, 8, 16, 32)),
        x='replan_interval',
        episodes=_METAWORLD_EPISODES,
        reference=replace(_METAWORLD_BARE, replan_interval=8),
    ),
)

STUDIES = {study.name: study for study in _STUDIES}
