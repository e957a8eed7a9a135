"""What LeRobot's config.json says of a scheduler of noise, and of the images beside it."""

from __future__ import annotations

from typing import cast, get_args

from vla_runtime.family.noise_schedule import (
    BetaSchedule,
    NoiseScheduler,
    Prediction,
    SchedulerKind,
)
from vla_runtime.files.json_file import JsonMapping

# Fields of the scheduler that config.json calls otherwise.
_IN_CONFIG = {
    'train_steps': 'num_train_timesteps',
    'betas': 'beta_schedule',
    'clip': 'clip_sample_range',
}
# Settings of diffusers' schedulers that LeRobot has no fields for, and what it runs them with.
_FIXED = {
    'timestep_spacing': 'leading',
    'steps_offset': 0,
    'thresholding': False,
    'set_alpha_to_one': True,
    'rescale_betas_zero_snr': False,
    'variance_type': 'fixed_small',
}


def read_scheduler(config: JsonMapping) -> NoiseScheduler:
    """Read the scheduler of LeRobot's config.json (JsonError: not reproduced here)."""

    def word(key: str, known: tuple[str, ...], found: str) -> str:
        if found not in known:
            raise config.error(
                key, f"'{found}' is not supported; expected one of {', '.join(known)}"
            )
        return found

    for key, fixed in _FIXED.items():
        if key in config and (given := config.value(key)) != fixed:
            raise config.error(key, f'{given!r}, and this runtime samples with {fixed!r} alone')
    key = 'noise_scheduler_type'
    kind = word(key, get_args(SchedulerKind), config.get(key, str).lower())
    betas, prediction = (
        word(key, known, config.get(key, str))
        for key, known in (
            ('beta_schedule', get_args(BetaSchedule)),
            ('prediction_type', get_args(Prediction)),
        )
    )
    clip = (
        config.get('clip_sample_range', (int, float)) if config.get('clip_sample', bool) else None
    )
    train_steps = config.count('num_train_timesteps')
    steps = config.value('num_inference_steps')
    if isinstance(steps, int) and steps > train_steps:
        raise config.error(
            'num_inference_steps', f'{steps}, and num_train_timesteps is {train_steps}'
        )
    beta_start, beta_end = (config.get(key, (int, float)) for key in ('beta_start', 'beta_end'))
    try:
        return NoiseScheduler(
            kind=cast(SchedulerKind, kind),
            train_steps=train_steps,
            betas=cast(BetaSchedule, betas),
            beta_start=beta_start,
            beta_end=beta_end,
            prediction=cast(Prediction, prediction),
            clip=clip,
        )
    except ValueError as error:
        field, _, fault = str(error).removeprefix('scheduler.').partition(' ')
        raise config.error(_IN_CONFIG.get(field, field), fault) from None


def common_image(config: JsonMapping, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the size that all cameras' images have; JsonError where they differ."""
    if len(set(sizes)) != 1:
        raise config.error(
            'input_features', f'images of {sizes}; this policy takes images of one size'
        )
    return sizes[0]


def pair(config: JsonMapping, key: str) -> tuple[int, int] | None:
    """Read (height, width); None where config.json has none."""
    found = config.value(key)
    if found is None:
        return None
    sides = config.get(key, list)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise config.error(key, f'{sides} where [height, width] is expected')
    return sides[0], sides[1]
