"""Condition of a closed-loop experiment: robot, task, policy and executor settings.

A condition is plain data, to be stored, hashed and sent to a process. A new field is read where it
acts (`chunk_sources` for the policy, `episode` for executor and world) and varied by a study
(`catalogue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal, get_args

from vla_runtime.execution.handover import HandoverMode
from vla_runtime.execution.parameters import ExecutorParameters, Overrun
from vla_runtime.family.listing import family_names
from vla_runtime.family.step_schedule import SchedulerChoice
from vla_runtime.inference.real_time_chunking import RtcMode
from vla_runtime.inference.settings import CfgMode
from vla_runtime.types import Advantage
from vla_tabletop.sim.scene import COLOURS, Colour
from vla_tabletop.sim.tasks import Family, Wording
from vla_tabletop.study.world_words import WORDS, WorldName

ChunkSourceName = Literal['policy', 'expert']
Precision = Literal['float32', 'bfloat16', 'float16', 'int8', 'fp8', 'nvfp4']
Backend = Literal['torch', 'onnxruntime']
# Precisions that one backend alone has.
_BACKEND_OF: dict[str, Backend] = dict.fromkeys(('int8', 'fp8', 'nvfp4'), 'onnxruntime')
Cache = Literal['off', 'exact', 'bounded', 'image_blind']

TOUCH: tuple[Family, ...] = ('colour', 'position')
# The executor's defaults.
_EXECUTOR = ExecutorParameters()


@dataclass(frozen=True)
class Condition:
    """One cell of a study; the executor's defaults are a robot's.

    Attributes:
        families: episode i is of family i modulo their number.
        colours: block colours of the tasks; fewer than all where a policy knows no others.
        policy_family: family among the study's bundles; empty if there is one bundle.
        belt_speed: factor on the blocks' speed (1 is 3 to 5 cm/s).
        wording: `held_out`: sentences that training never saw.
        absent_cameras: cameras whose image is None.
        wrist_every: steps between frames of the wrist camera, at least 1.
        chunk_source: the bundle's `policy`, or the scripted `expert`, which knows the blocks'
            positions: the best that this loop allows.
        denoise_steps: None: as recommended.
        beta: guidance scale; None: off.
        cache: reuse of the last inference; `bounded`: also of changed inputs, within the
            limits below. `image_blind` is a planted fault: image tokens are found without their
            pixels, so an episode's first ones are used throughout.
        cache_max_reuses: for `bounded`, in a row.
        cache_max_image_change: for `bounded`, grey levels; None: no limit.
        cache_max_state_bins: for `bounded`, of the state in the prompt; None: no limit.
        replan_interval: S, steps.
        delay_steps: from observation to the chunk's arrival, in policy steps, maybe
            fractional. The executor's estimate starts right.
        handover: transition between chunks; `rtc` needs an `rtc_mode`.
        rtc_mode: how the policy conditions on the committed plan. `rtc` blends an
            unconditioned chunk, as the executor node does.
        rtc_horizon: as the policy's; 0: as many steps as the mode usually conditions.
        overrun: motion after S steps when the next chunk is late.
        max_overrun_steps: steps past S, for `continue`.
    """

    world: WorldName = 'tabletop'
    families: tuple[str, ...] = TOUCH
    colours: tuple[Colour, ...] = COLOURS
    policy_family: str = ''
    variant: str = 'still'
    belt_speed: float = 1.0
    wording: Wording = 'plain'
    absent_cameras: tuple[str, ...] = ()
    wrist_every: int = 1
    chunk_source: ChunkSourceName = 'policy'
    backend: Backend = 'torch'
    precision: Precision = 'float32'
    denoise_steps: int | None = None
    noise_scheduler: SchedulerChoice = 'bundle'
    beta: float | None = None
    cfg_mode: CfgMode = 'auto'
    advantage: Advantage = 'positive'
    cache: Cache = 'exact'
    cache_max_reuses: int = 0
    cache_max_image_change: float | None = None
    cache_max_state_bins: int | None = None
    replan_interval: int = _EXECUTOR.replan_interval
    delay_steps: float = 1.0
    handover: HandoverMode = _EXECUTOR.handover.mode
    rtc_mode: RtcMode = 'off'
    rtc_horizon: int = 0
    overrun: Overrun = _EXECUTOR.overrun
    max_overrun_steps: int = _EXECUTOR.max_overrun_steps

    def __post_init__(self) -> None:
        _require_words('world', (self.world,), get_args(WorldName))
        words = WORDS[self.world]
        _require_words('families', self.families, words.families)
        _require_words('colours', self.colours, COLOURS)
        _require_words('policy_family', (self.policy_family,), ('', *family_names()))
        _require_words('absent_cameras', self.absent_cameras, words.cameras)
        for name, known in (
            ('variant', words.variants),
            ('wording', get_args(Wording)),
            ('chunk_source', get_args(ChunkSourceName)),
            ('backend', get_args(Backend)),
            ('precision', get_args(Precision)),
            ('noise_scheduler', get_args(SchedulerChoice)),
            ('cfg_mode', get_args(CfgMode)),
            ('advantage', get_args(Advantage)),
            ('cache', get_args(Cache)),
            ('handover', get_args(HandoverMode)),
            ('rtc_mode', get_args(RtcMode)),
        ):
            _require_words(name, (getattr(self, name),), known)
        if _BACKEND_OF.get(self.precision, self.backend) != self.backend:
            raise ValueError(
                f"condition: precision '{self.precision}' is of backend "
                f"'{_BACKEND_OF[self.precision]}', not '{self.backend}'"
            )
        if not self.families:
            raise ValueError('condition: families is empty; name at least one')
        if set(self.colours) != set(COLOURS) and (not self.colours or 'position' in self.families):
            raise ValueError(
                'condition: colours leaves the position family without a task in some scenes; '
                'choose the colour family, and at least one colour'
            )
        if set(self.absent_cameras) == set(words.cameras):
            raise ValueError('condition: absent_cameras leaves no camera; a policy needs one')
        if not 0.0 <= self.delay_steps < 100.0:
            raise ValueError(f'condition: delay_steps is {self.delay_steps}, expected 0 to 100')
        if not self.belt_speed >= 0.0:
            raise ValueError(f'condition: belt_speed is {self.belt_speed}, expected 0 or more')
        if self.world != 'tabletop' and (self.chunk_source != 'policy' or self.wrist_every != 1):
            raise ValueError('condition: chunk_source and wrist_every are of the tabletop alone')
        if self.wrist_every < 1:
            raise ValueError(f'condition: wrist_every is {self.wrist_every}, expected 1 or more')
        if self.handover == 'rtc' and self.rtc_mode == 'off':
            raise ValueError(
                "condition: handover is 'rtc' and rtc_mode 'off', which is 'blend': name one"
            )
        self._check_cache()

    def _check_cache(self) -> None:
        if (self.cache == 'bounded') != (self.cache_max_reuses > 0):
            raise ValueError(
                f"condition: cache is '{self.cache}' and cache_max_reuses {self.cache_max_reuses}: "
                'bounded reuse needs one of at least 1, and only that has one'
            )
        limits = (self.cache_max_image_change, self.cache_max_state_bins)
        if self.cache != 'bounded' and limits != (None, None):
            raise ValueError(
                f"condition: cache is '{self.cache}', which has no cache_max_image_change or "
                'cache_max_state_bins; only bounded has'
            )


def _require_words(field: str, found: Sequence[str], words: Sequence[str]) -> None:
    for word in found:
        if word not in words:
            raise ValueError(f"condition: {field} has '{word}', expected one of {list(words)}")


def grid(base: Condition, **axes: Sequence[Any]) -> tuple[Condition, ...]:
    """All combinations of fields' values, the last field fastest; TypeError: unknown field."""
    return tuple(
        replace(base, **dict(zip(axes, values, strict=True))) for values in product(*axes.values())
    )


def varied_fields(conditions: Sequence[Condition]) -> tuple[str, ...]:
    """Names of the fields in which the conditions differ, in the order of their declaration."""
    return tuple(
        field.name
        for field in fields(Condition)
        if len({getattr(condition, field.name) for condition in conditions}) > 1
    )


def value_text(name: str, value: Any) -> str:
    """A field's value for a table or an axis."""
    if value is None:
        return {'beta': 'off', 'denoise_steps': 'default'}.get(name, 'no limit')
    if isinstance(value, tuple):
        return ' + '.join(value) or 'none'
    return f'{value:g}' if isinstance(value, float) else str(value)
