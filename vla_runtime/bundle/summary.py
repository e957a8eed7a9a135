"""A bundle's spec in a few lines, for people."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from vla_runtime.bundle.schema import WORDLESS_TASKS, BundleSpec
from vla_runtime.family.declaration import PolicyDims, image_sizes, language_dims

_KEY_WIDTH = 12


def line(key: str, text: object) -> str:
    return f'{key:<{_KEY_WIDTH}}{text}'


def describe(spec: BundleSpec) -> str:
    """Summarise a spec for someone about to run the policy; no newline at the end."""
    dims = spec.dims
    cameras = [item.name if item.present else f'{item.name} (absent)' for item in spec.cameras]
    state = [f'{item.name} [{item.unit}]' for item in spec.state]
    lines = [
        line('policy', f'{spec.name} ({spec.family})'),
        line('networks', ', '.join([*_stacks(dims), *_vocabulary(spec)])),
        line('cameras', f'{", ".join(cameras)}; {_images(spec)}'),
        line('state', ', '.join(state)),
    ]
    for index, action in enumerate(spec.actions):
        relative = f' to {action.relative_to}' if action.relative_to else ''
        text = f'{action.name} [{action.unit}] {action.kind}{relative}'
        lines.append(line('' if index else 'actions', text))
    for pose in spec.poses:
        lines.append(line('pose', f'{pose.name}: {pose.form}, {pose.kind} in {pose.frame}'))
    if spec.joint_frame is not None:
        signs, offsets = spec.joint_frame.signs, spec.joint_frame.offsets
        lines.append(line('joint frame', f'signs {list(signs)}, offsets {list(offsets)}'))
    if spec.joint_space is not None:
        lines.append(line('joint space', f'{spec.joint_space}, converted from and to the robot'))
    delay = spec.trained_delay_steps
    summed = f', {spec.flow_times} flow times' if spec.flow_times else ''
    trained = f', trained with up to {delay} known actions' if delay else ''
    lines += [
        line(
            'chunk',
            f'{spec.real_horizon} actions of {spec.step_time_s * 1e3:g} ms '
            f'({spec.real_horizon * spec.step_time_s:.2f} s), {spec.denoise_steps} denoise steps'
            f'{summed}{trained}',
        ),
        line('prompt', _prompt(spec)),
        line(
            'normalised',
            f'state {spec.normalisation.state}, actions {spec.normalisation.actions}'
            + (f', images {spec.normalisation.images}' if spec.normalisation.images else '')
            + _angles(spec),
        ),
    ]
    for index, (theirs, ours) in enumerate(spec.rename_map.items()):
        lines.append(line('' if index else 'data', f'{theirs} is {ours}'))
    for index, (key, text) in enumerate(spec.source.items()):
        lines.append(line('' if index else 'source', f'{key}: {text}'))
    return '\n'.join(lines)


def task_notes(spec: BundleSpec) -> list[str]:
    """Return a note for a person where the training had tasks without words."""
    tasks_without_text = spec.source.get(WORDLESS_TASKS)
    if tasks_without_text is None:
        return []
    return [
        f'{tasks_without_text} tasks of the training have no words, and a policy is never run '
        'without an instruction: any words are new to it. Name the tasks in the data set and train '
        'again, or judge it with care'
    ]


def _vocabulary(spec: BundleSpec) -> list[str]:
    return [] if spec.prompt is None else [f'vocabulary {language_dims(spec.dims).vocabulary}']


def _angles(spec: BundleSpec) -> str:
    """Names of the state that go in as sine and cosine."""
    names = [name for group in spec.normalisation.angles for name in group]
    return f'; sine and cosine of {", ".join(names)}' if names else ''


def _images(spec: BundleSpec) -> str:
    """Size of the images, and how a camera's image gets there: `224 px, centre, antialias`."""
    sizes = image_sizes(spec.dims)
    written = [f'{h}' if h == w else f'{h}x{w}' for h, w in dict.fromkeys(sizes)]
    if len(written) > 1:
        written = [f'{h}x{w}' for h, w in sizes]
    resized = f'{spec.images.padding}, {spec.images.resample}'
    crop = spec.images.crop
    if crop is not None:
        across = '' if crop.fraction_across is None else f' x {crop.fraction_across:.0%}'
        squared = ' of a letterboxed square' if crop.letterbox else ''
        resized += f', {crop.fraction:.0%}{across} of {crop.edge} px{squared}'
    if spec.images.bars is not None:
        resized += f', bars {spec.images.bars:g}'
    if spec.images.padding == 'none':
        resized = 'not resized'
    return f'{", ".join(written)} px, {resized}'


def _prompt(spec: BundleSpec) -> str:
    if spec.prompt is None:
        return 'none: the policy has no language'
    advantage = f', advantage {spec.advantage}' if spec.advantage else ''
    bins = f', state in {spec.prompt.state_bins} bins' if spec.prompt.state_bins else ''
    return (
        f'{spec.prompt.template}, {spec.prompt.cleaning} cleaning{bins}, at most '
        f'{language_dims(spec.dims).prompt_length} tokens{advantage}'
    )


def _stacks(dims: PolicyDims) -> list[str]:
    parts = [(field.name, getattr(dims, field.name)) for field in fields(cast(Any, dims))]
    return [
        f'{name} {part.depth}x{part.width}'
        for name, part in parts
        if hasattr(part, 'depth') and hasattr(part, 'width')
    ]
