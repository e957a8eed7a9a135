"""Catalogue of studies: the question, its conditions, and the number of episodes of each.

A study is a tuple of conditions. One of a feature to come is a new field of `Condition` and an
entry here, such as

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
        title: a line for the page.
        question: question of the study, in a sentence or two.
        conditions: all run on the same seeds, so that they can be compared pair by pair.
        x: the field along the plots' axis; conditions that differ in others are separate curves.
        episodes: a condition, unless the command line says otherwise.
        reference: the condition that the others are compared with; or values of some fields: each
            condition is compared with the one that has these and is else the same.
        same: pairs of conditions whose trajectories must be the same, bit for bit.
        judges: success of each precision, beside float32, goes into the receipts of the bundles
            that ran.
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
_PUSH = replace(BASE, families=('push',))
# The replan interval alone is to vary: no delay, and each chunk as it is.
_BARE = replace(BASE, handover='switch', delay_steps=0.0)
_REPLAN_INTERVALS = (1, 2, 4, 8, 12, 16, 32)
_MOVING = replace(BASE, variant='moving')
_BELT = replace(_BARE, variant='moving')
_BELT_SPEEDS = (1.0, 1.3)
# All that a policy without language can be asked: the one task that it learned.
_ONE_TASK = replace(BASE, families=('colour',), colours=('red',))
_WITH_SCHEDULER = tuple(name for name in RECIPE_NAMES if find_family(name).has_scheduler)
# One that writes tokens was taught less, and has a study of its own.
_COMPARED = tuple(name for name in RECIPE_NAMES if find_family(name).head != 'tokens')
_WITH_LANGUAGE = tuple(name for name in _COMPARED if find_family(name).has_language)
# Often enough that images and state have hardly changed since the last inference. The cache knows
# nothing of the denoise steps, which are most of what such a study costs: half of them.
_OFTEN = replace(BASE, replan_interval=2, denoise_steps=5)
_RATES = replace(_OFTEN, wrist_every=3)
# Limits of 0 are `exact`.
_BOUNDED = replace(
    _OFTEN,
    cache='bounded',
    cache_max_reuses=4,
    cache_max_image_change=0.0,
    cache_max_state_bins=0,
)
_BOUNDED_MOVING = replace(_BOUNDED, variant='moving')
# What the policy that writes tokens was taught. An answer alone takes two steps of 50 ms; packed it
# is 5.3 times as old and 3.8 come in its time (benchmark/results/packed_policy.json).
_SEQUENTIAL = replace(BASE, policy_family='pi0_fast', families=('colour',), delay_steps=2.0)
_PACKED = replace(_SEQUENTIAL, delay_steps=11.0, answer_every=0.5, open_requests=28)
_METAWORLD = replace(BASE, world='metaworld', families=TASKS)
_METAWORLD_BARE = replace(_METAWORLD, handover='switch', delay_steps=0.0)
_DELAYS = (0.0, 2.0, 4.0, 8.0)
_METAWORLD_DELAYS = (0.0, 4.0, 8.0, 12.0)
# As many of each task.
_METAWORLD_EPISODES = 104
_METAWORLD_OFTEN = replace(_METAWORLD, replan_interval=2, denoise_steps=5)


def _cache_conditions(base: Condition) -> tuple[Condition, ...]:
    return (
        *grid(base, cache=('off', 'exact', 'image_blind')),
        *(replace(base, cache='bounded', cache_max_reuses=reuses) for reuses in (1, 2, 4)),
    )


def _delays(base: Condition, *delays: float) -> tuple[Condition, ...]:
    tied = replace(base, handover='rtc', rtc_mode='guided')
    return (
        *grid(base, handover=('switch', 'blend', 'ensemble'), delay_steps=delays),
        *grid(tied, rtc_mode=('guided', 'jacobian', 'hard_prefix'), delay_steps=delays),
    )


def _bounds(exact: Condition) -> tuple[Condition, ...]:
    return (
        exact,
        *grid(exact, cache_max_image_change=(2.0, 4.0, 8.0), cache_max_state_bins=(32,)),
        replace(exact, cache_max_image_change=8.0, cache_max_state_bins=8),
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
        'push',
        'And the harder family?',
        'Push a block to the stripe at one side, with nothing in its way, within 12 s.',
        grid(_PUSH, wording=('plain', 'held_out')),
        x='wording',
        episodes=100,
        reference=_PUSH,
    ),
    Study(
        'instruction',
        'Does the instruction matter?',
        'The same scenes and tasks; the robot is told its task, a task for another block (it '
        'should touch that one), or the same sentence in every episode (it cannot know its task; '
        'a third of the tasks is chance).',
        grid(BASE, instructed=('task', 'other_block', 'fixed')),
        x='instructed',
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
        'noise_steps',
        'How many steps of a scheduler, and which?',
        'A policy that a scheduler denoises touches the red block with as many steps as its '
        'training had and with fewer, with fresh noise every step (ddpm) and without (ddim).',
        grid(
            replace(_ONE_TASK, policy_family=_WITH_SCHEDULER[0]),
            noise_scheduler=('ddpm', 'ddim'),
            denoise_steps=(5, 10, 100),
        ),
        x='denoise_steps',
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
        'packed',
        'Policies that write tokens: when does packing requests pay?',
        'The policy that writes its chunks as tokens, one request after the other or packed, at '
        'the replan intervals S, on still blocks and on blocks that travel 3 to 5 cm/s. Alone an '
        'answer arrives 2 steps (of 50 ms) after its observation, and at most one comes every 2 '
        'steps; packed it arrives 11 steps after it, and one may come every half step. The ratios '
        'are those that were measured of this policy on a CPU; on a slower one both delays grow.',
        (
            *grid(_SEQUENTIAL, variant=('still', 'moving'), replan_interval=(2, 4, 8)),
            *grid(_PACKED, variant=('still', 'moving'), replan_interval=(1, 2, 4, 8)),
        ),
        x='replan_interval',
        episodes=40,
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
        'delay_moving',
        'What does inference time cost when the blocks move?',
        'The same on blocks that travel 3 to 5 cm/s, where what was seen so long ago is no longer '
        'there.',
        _delays(_MOVING, *_DELAYS),
        x='delay_steps',
        episodes=60,
    ),
    Study(
        'tie_horizon',
        'Over how many steps may a chunk be tied to the plan, when the blocks move?',
        'Real-time chunking (guided) over 10 steps of the plan, its default, and over all of it '
        '(24 steps), beside chunks that nothing ties, on blocks that travel 3 to 5 cm/s.',
        (
            *grid(_MOVING, handover=('switch',), delay_steps=(0.0, 8.0)),
            *grid(
                replace(_MOVING, handover='rtc', rtc_mode='guided'),
                rtc_horizon=(0, 1024),
                delay_steps=(0.0, 8.0),
            ),
        ),
        x='delay_steps',
        episodes=60,
    ),
    Study(
        'guidance',
        'What does guidance by the advantage tag change?',
        'Guidance off (the conditioned prompt alone), and the guidance scale beta. The prompt '
        'tagged negative, without guidance, shows what the tag itself does.',
        (
            *grid(BASE, beta=(None, 1.0, 1.25, 1.5, 2.0, 2.5, 3.5)),
            replace(BASE, advantage='negative'),
        ),
        x='beta',
        episodes=100,
        reference=BASE,
    ),
    Study(
        'guidance_rows',
        'Prompt rows together or one after the other?',
        'The guidance scale beta with both prompt rows in one run (fused) and one after the other '
        '(serial), which differ in rounding alone.',
        (BASE, *grid(BASE, cfg_mode=('fused', 'serial'), beta=(1.25, 1.5, 2.0, 2.5, 3.5))),
        x='beta',
        episodes=100,
        reference=BASE,
    ),
    Study(
        'cache',
        'What may be reused of the last inference?',
        'Nothing (off); what is equal (exact, the default): the same trajectories, bit for bit. '
        'Bounded: image tokens and prefix at most so often in a row, whatever has changed since. '
        'And a planted fault: a cache that ignores the pixels shows the policy the first images '
        'of the episode throughout. Still blocks.',
        _cache_conditions(BASE),
        x='cache',
        episodes=100,
        reference=BASE,
        same=((replace(BASE, cache='off'), BASE),),
    ),
    Study(
        'cache_moving',
        'What may be reused when the blocks move?',
        'The same on blocks that travel 3 to 5 cm/s.',
        _cache_conditions(_MOVING),
        x='cache',
        episodes=100,
        reference=_MOVING,
        same=((replace(_MOVING, cache='off'), _MOVING),),
    ),
    Study(
        'cache_rates',
        'What is found in the cache when cameras have different rates?',
        'A new wrist image every third step of 50 ms, the front camera always of now, and a chunk '
        'every second step: of three looks at the wrist camera one shows what the last one did. '
        'Off, exact (the same trajectories, bit for bit) and the planted fault; still and moving '
        'blocks; 5 denoise steps.',
        grid(_RATES, variant=('still', 'moving'), cache=('off', 'exact', 'image_blind')),
        x='cache',
        episodes=50,
        same=tuple(
            (replace(_RATES, variant=variant, cache='off'), replace(_RATES, variant=variant))
            for variant in ('still', 'moving')
        ),
    ),
    Study(
        'cache_bounds',
        'How much may change for bounded reuse, and what does it save?',
        'Limits on the change of an image (grey levels, mean over its pixels) and of the state '
        '(bins in the prompt), at most 4 reuses in a row, a chunk every second step of 50 ms; '
        'limits of 0 reuse what is equal. Still blocks, 5 denoise steps.',
        _bounds(_BOUNDED),
        x='cache_max_image_change',
        episodes=50,
        reference=_BOUNDED,
    ),
    Study(
        'cache_bounds_moving',
        'And when the blocks move?',
        'The same on blocks that travel 3 to 5 cm/s.',
        _bounds(_BOUNDED_MOVING),
        x='cache_max_image_change',
        episodes=50,
        reference=_BOUNDED_MOVING,
    ),
    Study(
        'denoise',
        'How many denoise steps does a chunk need?',
        'Euler steps from noise to chunk; the bundle recommends 10.',
        grid(BASE, denoise_steps=(1, 2, 5, 10)),
        x='denoise_steps',
        episodes=100,
        reference=replace(BASE, denoise_steps=10),
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
        'fp8_files',
        'Does the policy do its task in ONNX files in fp8?',
        'ONNX files in 8-bit floating point, for TensorRT (ONNX Runtime emulates them on a CPU), '
        'against float32 on the same scenes and the same backend, on still and on moving blocks '
        '(3 to 5 cm/s).',
        grid(
            replace(BASE, backend='onnxruntime'),
            variant=('still', 'moving'),
            precision=('float32', 'fp8'),
        ),
        x='precision',
        episodes=200,
        reference={'precision': 'float32'},
    ),
    Study(
        'nvfp4_files',
        'Does the policy do its task in ONNX files in NVFP4?',
        'ONNX files in 4-bit floating point with a scale for every 16 numbers, for TensorRT '
        '(emulated on a CPU, in float32 on the rounded numbers), against float32 on the same '
        'scenes and the same backend, on still and on moving blocks (3 to 5 cm/s).',
        grid(
            replace(BASE, backend='onnxruntime'),
            variant=('still', 'moving'),
            precision=('float32', 'nvfp4'),
        ),
        x='precision',
        episodes=200,
        reference={'precision': 'float32'},
    ),
    Study(
        'attention',
        "Does the policy do its task with attention as ONNX's own operator?",
        'ONNX files in float16, with scores in float32 and with attention fused in half '
        '(export --attention), each against float32 on the same scenes and the same backend, on '
        'still and on moving blocks (3 to 5 cm/s).',
        grid(replace(BASE, backend='onnxruntime'), variant=('still', 'moving'))
        + grid(
            replace(BASE, backend='onnxruntime', precision='float16'),
            variant=('still', 'moving'),
            attention=('exact', 'fused'),
        ),
        x='attention',
        episodes=200,
        reference={'precision': 'float32', 'attention': 'exact'},
    ),
    Study(
        'backend',
        'Does the policy do the task on ONNX Runtime as well?',
        'The same policy in PyTorch, in ONNX Runtime, and there with its matrices in float16.',
        (
            *grid(BASE, backend=('torch', 'onnxruntime')),
            replace(BASE, backend='onnxruntime', precision='float16'),
        ),
        x='backend',
        episodes=200,
        reference=BASE,
    ),
    Study(
        'cameras',
        'What if a camera is missing?',
        'The image of a camera is None throughout the episode: a masked camera, never seen in '
        'training.',
        grid(BASE, absent_cameras=((), ('front',), ('wrist',))),
        x='absent_cameras',
        episodes=100,
        reference=BASE,
    ),
    Study(
        'variants',
        'How far does it carry beyond still blocks in the usual light?',
        'Colour family: blocks on a belt, blocks shoved once, other light, displaced cameras.',
        grid(
            replace(BASE, families=('colour',)),
            variant=('still', 'moving', 'pushed', 'lighting', 'camera_jitter'),
        ),
        x='variant',
        episodes=100,
        reference=replace(BASE, families=('colour',)),
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
    Study(
        'metaworld_handover',
        'Meta-World: what does inference time cost a policy of any head?',
        'Each chunk arrives so many steps (of 25 ms) after its observation, at S = 8 and a horizon '
        'of 32, for the ways of handing over that need nothing of the policy. At a delay of 12 '
        'each is executed for 12, as the next one is not there.',
        grid(
            _METAWORLD,
            handover=('switch', 'blend', 'ensemble'),
            delay_steps=_METAWORLD_DELAYS,
        ),
        x='delay_steps',
        episodes=_METAWORLD_EPISODES,
        reference={'handover': 'switch'},
    ),
    Study(
        'metaworld_delay',
        'Meta-World: which hand-over bears inference time best?',
        'The same for each way of handing over, those in which a flow policy is tied to the plan '
        'among them.',
        _delays(_METAWORLD, *_METAWORLD_DELAYS),
        x='delay_steps',
        episodes=_METAWORLD_EPISODES,
        reference={'handover': 'switch', 'rtc_mode': 'off'},
    ),
    Study(
        'metaworld_cache',
        'Meta-World: what may be reused of the last inference?',
        'A chunk every second step of 25 ms: nothing reused (off), what is equal (exact), and '
        'image tokens and prefix at most so often in a row whatever has changed (bounded); '
        '5 denoise steps.',
        (
            *grid(_METAWORLD_OFTEN, cache=('off', 'exact')),
            *(
                replace(_METAWORLD_OFTEN, cache='bounded', cache_max_reuses=reuses)
                for reuses in (1, 2, 4)
            ),
        ),
        x='cache',
        episodes=_METAWORLD_EPISODES,
        reference=_METAWORLD_OFTEN,
        same=((replace(_METAWORLD_OFTEN, cache='off'), _METAWORLD_OFTEN),),
    ),
    Study(
        'metaworld_denoise',
        'Meta-World: how many denoise steps does a chunk need?',
        'Euler steps from noise to chunk; the bundle recommends 10.',
        grid(_METAWORLD, denoise_steps=(1, 2, 4, 10)),
        x='denoise_steps',
        episodes=_METAWORLD_EPISODES,
        reference=replace(_METAWORLD, denoise_steps=10),
    ),
    Study(
        'metaworld_students',
        'Meta-World: does a student do the tasks in one step or two?',
        'A policy that vla_runtime distill made of another, at the numbers of denoise steps that '
        'it knows. The study metaworld_denoise has the teacher at every number.',
        grid(_METAWORLD, denoise_steps=(1, 2)),
        x='denoise_steps',
        episodes=_METAWORLD_EPISODES,
    ),
    Study(
        'metaworld_guidance',
        'Meta-World: what does guidance by the advantage tag change?',
        'Guidance off, the guidance scale beta, and the prompt tagged negative.',
        (
            *grid(_METAWORLD, beta=(None, 1.5, 2.0, 3.0)),
            replace(_METAWORLD, advantage='negative'),
        ),
        x='beta',
        episodes=_METAWORLD_EPISODES,
        reference=_METAWORLD,
    ),
    Study(
        'metaworld_adaptive',
        'Meta-World: should the replan interval follow how far chunks disagree?',
        'S fixed, and 16 or 4 steps by the mean distance of a new chunk from the one before it on '
        'the next eight steps (normalised actions). What a rule costs is how few steps a chunk '
        'serves.',
        (
            *grid(_METAWORLD, replan_interval=(4, 8, 16)),
            *grid(_METAWORLD, agreement=(0.05, 0.1, 0.2)),
        ),
        x='agreement',
        episodes=_METAWORLD_EPISODES,
        reference=_METAWORLD,
    ),
    Study(
        'metaworld_precision',
        'Meta-World: does a lower precision still do the tasks?',
        'Large matrices in bfloat16 and float16, and ONNX files in 8 bits, against float32.',
        (
            *grid(_METAWORLD, precision=('float32', 'bfloat16', 'float16')),
            *grid(replace(_METAWORLD, backend='onnxruntime'), precision=('float32', 'int8', 'fp8')),
        ),
        x='precision',
        episodes=_METAWORLD_EPISODES,
        reference={'precision': 'float32'},
    ),
    Study(
        'metaworld_cameras',
        'Meta-World: what if a camera is missing, displaced, or sees other colours?',
        'A masked camera; both cameras shifted by up to 2 cm on each axis; everything tinted, by '
        '0.6 to 1.2 a colour. None of it was in the training.',
        (
            *grid(_METAWORLD, absent_cameras=((), ('corner4',), ('corner',))),
            *grid(_METAWORLD, variant=('camera_jitter', 'lighting')),
        ),
        x='variant',
        episodes=_METAWORLD_EPISODES,
        reference=_METAWORLD,
    ),
)

STUDIES = {study.name: study for study in _STUDIES}
