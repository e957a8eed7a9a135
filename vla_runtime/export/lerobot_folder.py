"""A LeRobot policy folder (`pretrained_model/`): config, processors, statistics.

What the processors' JSON says is what LeRobot runs, so it decides; where config.json says the same
thing a second time, the two must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from vla_runtime.bundle import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.bundle_schema import STATISTICS, STATISTICS_OF
from vla_runtime.export.errors import ExportError
from vla_runtime.export.folder import (
    CONFIG_FILE,
    FolderFacts,
    field_of,
    find_tokenizer,
    read_json,
)
from vla_runtime.types import Family, NormaliserKind, PromptTemplate

PREPROCESSOR_FILE = 'policy_preprocessor.json'
POSTPROCESSOR_FILE = 'policy_postprocessor.json'

_STATE, _ACTION = 'observation.state', 'action'
_NORMALISERS: Mapping[str, NormaliserKind] = {
    'IDENTITY': 'identity',
    'QUANTILES': 'quantiles_lerobot',
    'MEAN_STD': 'mean_std_lerobot',
    'MIN_MAX': 'min_max',
}
_TEMPLATES: Mapping[Family, PromptTemplate] = {'pi05': 'pi05_state', 'pi0': 'pi0'}
# Steps that this runtime does too, or that only move data about.
_PREPROCESSORS = (
    'rename_observations_processor',
    'to_batch_processor',
    'relative_actions_processor',
    'normalizer_processor',
    'pi05_prepare_state_tokenizer_processor_step',
    'pi0_new_line_processor',
    'tokenizer_processor',
    'device_processor',
)
_POSTPROCESSORS = ('unnormalizer_processor', 'absolute_actions_processor', 'device_processor')
# Values the networks and normalisers are written for: a folder that says otherwise is refused.
_FIXED: Mapping[str, object] = {
    'n_obs_steps': 1,
    'use_visual_memory': False,
    'use_proprioceptive_memory': False,
    'use_peft': False,
    'min_period': 0.004,
    'max_period': 4.0,
}
_EPSILON = 1e-8


@dataclass(frozen=True)
class _Pipeline:
    """A processor's JSON: registry name of each step to its configuration."""

    path: Path
    steps: Mapping[str, Mapping[str, Any]]
    state_files: Mapping[str, str]


def is_lerobot_folder(folder: Path) -> bool:
    """LeRobot's config.json names its policy type; openpi's does not."""
    path = folder / CONFIG_FILE
    return path.is_file() and 'type' in read_json(path)


def read_lerobot_folder(folder: Path) -> FolderFacts:
    """Read all that a LeRobot folder says.

    Raises:
        ExportError: a policy or processing step that this runtime does not reproduce, files that
            contradict each other, missing or damaged files.
    """
    path = folder / CONFIG_FILE
    config = read_json(path)
    family = _family(config, path)
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise ExportError(
                f'{path}: field {key}: {config[key]!r} is not supported; this runtime runs '
                f'policies with {expected!r}'
            )
    before = _pipeline(folder / PREPROCESSOR_FILE, _PREPROCESSORS)
    after = _pipeline(folder / POSTPROCESSOR_FILE, _POSTPROCESSORS)
    state_length = _feature_length(config, path, 'input_features', _STATE)
    action_length = _feature_length(config, path, 'output_features', _ACTION)
    normalisation = _normalisation(config, path, before, after)
    names = _action_names(config, path, before, action_length)
    return FolderFacts(
        kind='LeRobot',
        family=family,
        cameras=_cameras(config, path),
        images=ImageSpec(padding='centre', resample='bilinear'),
        normalisation=normalisation,
        statistics=_statistics(folder, before, after, normalisation, state_length, action_length),
        cleaning='lerobot',
        action_names=names,
        state_length=state_length,
        action_length=action_length,
        deltas=_deltas(config, path, before, after, action_length),
        template=_TEMPLATES[family],
        prompt_length=_prompt_length(config, path, before),
        horizon=field_of(config, path, 'chunk_size', int),
        denoise_steps=field_of(config, path, 'num_inference_steps', int),
        image_size=_image_size(config, path),
        action_dim=field_of(config, path, 'max_action_dim', int),
        state_dim=field_of(config, path, 'max_state_dim', int) if family == 'pi0' else 0,
        variant=field_of(config, path, 'paligemma_variant', str),
        tokenizer=find_tokenizer(folder),
        source=_source(config, before),
    )


def _family(config: Mapping[str, Any], path: Path) -> Family:
    found = field_of(config, path, 'type', str)
    for family in get_args(Family):
        if found == family:
            return family
    raise ExportError(
        f"{path}: field type: '{found}' is not supported; expected one of "
        f'{", ".join(get_args(Family))}'
    )


def _pipeline(path: Path, known: tuple[str, ...]) -> _Pipeline:
    if not path.exists():
        raise ExportError(
            f'{path}: is missing; a LeRobot older than 0.4 kept the statistics elsewhere: convert '
            'the policy with its lerobot/processor/migrate_policy_normalization.py'
        )
    document = read_json(path)
    steps: dict[str, Mapping[str, Any]] = {}
    files: dict[str, str] = {}
    for index, step in enumerate(field_of(document, path, 'steps', list)):
        name = step.get('registry_name', step.get('class')) if isinstance(step, dict) else None
        if name not in known:
            raise ExportError(
                f"{path}: field steps[{index}]: the step '{name}' is not supported; known are "
                f'{", ".join(known)}'
            )
        steps[name] = step.get('config', {})
        if 'state_file' in step:
            files[name] = str(step['state_file'])
    return _Pipeline(path, steps, files)


def _feature_length(config: Mapping[str, Any], path: Path, group: str, key: str) -> int:
    features = field_of(config, path, group, dict)
    shape = features.get(key, {}).get('shape')
    if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int):
        raise ExportError(
            f"{path}: field {group}: no '{key}' with a shape of one number (found: {shape}); a "
            'policy without it cannot drive a robot'
        )
    return shape[0]


def _cameras(config: Mapping[str, Any], path: Path) -> tuple[CameraSpec, ...]:
    """Present cameras in the order of the features, then the empty ones, as LeRobot stacks them."""
    names = [
        key.removeprefix('observation.images.').removeprefix('observation.')
        for key, feature in field_of(config, path, 'input_features', dict).items()
        if feature.get('type') == 'VISUAL'
    ]
    empty = [f'empty_camera_{index}' for index in range(config.get('empty_cameras', 0))]
    present = [name for name in names if name not in empty]
    if not present:
        raise ExportError(f'{path}: field input_features: no camera (a feature of type VISUAL)')
    return tuple(
        [CameraSpec(name) for name in present] + [CameraSpec(name, present=False) for name in empty]
    )


def _image_size(config: Mapping[str, Any], path: Path) -> int:
    height, width = field_of(config, path, 'image_resolution', list)
    if height != width:
        raise ExportError(
            f'{path}: field image_resolution: {height}x{width}; only square images are supported'
        )
    return int(height)


def _prompt_length(config: Mapping[str, Any], path: Path, before: _Pipeline) -> int:
    length = field_of(config, path, 'tokenizer_max_length', int)
    tokenizer = before.steps.get('tokenizer_processor', {})
    if tokenizer.get('max_length', length) != length:
        raise ExportError(
            f'{path} says tokenizer_max_length {length} but {before.path} says max_length '
            f'{tokenizer["max_length"]}; they must agree'
        )
    if tokenizer.get('padding_side', 'right') != 'right':
        raise ExportError(f"{before.path}: field padding_side: only 'right' is supported")
    return int(length)


def _normalisation(
    config: Mapping[str, Any], path: Path, before: _Pipeline, after: _Pipeline
) -> NormalisationSpec:
    stated = field_of(config, path, 'normalization_mapping', dict)
    for pipeline, step, groups in (
        (before, 'normalizer_processor', ('VISUAL', 'STATE', 'ACTION')),
        (after, 'unnormalizer_processor', ('ACTION',)),
    ):
        if step not in pipeline.steps:
            raise ExportError(f"{pipeline.path}: has no step '{step}'")
        found = pipeline.steps[step].get('norm_map', {})
        for group in groups:
            if found.get(group, 'IDENTITY') != stated.get(group, 'IDENTITY'):
                raise ExportError(
                    f'{path} says normalization_mapping.{group} {stated.get(group)} but '
                    f'{pipeline.path} says {found.get(group)}; they must agree'
                )
        epsilon = pipeline.steps[step].get('eps', _EPSILON)
        if epsilon != _EPSILON:
            raise ExportError(f'{pipeline.path}: field eps: {epsilon} is not {_EPSILON}')
    if stated.get('VISUAL', 'IDENTITY') != 'IDENTITY':
        raise ExportError(
            f'{path}: field normalization_mapping.VISUAL: {stated["VISUAL"]} is not supported; '
            'images go in as [-1, 1]'
        )
    only = before.steps['normalizer_processor'].get('normalize_observation_keys')
    state_mode = 'IDENTITY' if only is not None and _STATE not in only else stated.get('STATE')
    return NormalisationSpec(
        state=_normaliser(state_mode, path, 'STATE'),
        actions=_normaliser(stated.get('ACTION'), path, 'ACTION'),
    )


def _normaliser(mode: Any, path: Path, group: str) -> NormaliserKind:
    kind = _NORMALISERS.get('IDENTITY' if mode is None else str(mode))
    if kind is None:
        raise ExportError(
            f"{path}: field normalization_mapping.{group}: '{mode}' is not supported; expected one "
            f'of {", ".join(_NORMALISERS)}'
        )
    return kind


def _statistics(
    folder: Path,
    before: _Pipeline,
    after: _Pipeline,
    normalisation: NormalisationSpec,
    state_length: int,
    action_length: int,
) -> dict[str, np.ndarray]:
    """All statistics this runtime knows of state and actions, from the normaliser's file."""
    path, found = _state_file(folder, before, 'normalizer_processor')
    other_path, other = _state_file(folder, after, 'unnormalizer_processor')
    statistics: dict[str, np.ndarray] = {}
    for feature, group, length in (
        (_STATE, 'state', state_length),
        (_ACTION, 'actions', action_length),
    ):
        for name in STATISTICS:
            key = f'{feature}.{name}'
            if key not in found:
                continue
            if found[key].shape != (length,):
                raise ExportError(
                    f"{path}: tensor '{key}' has shape {list(found[key].shape)} but {CONFIG_FILE} "
                    f'says {length} dimensions'
                )
            if feature == _ACTION and key in other and not np.array_equal(found[key], other[key]):
                raise ExportError(
                    f"{path} and {other_path} differ in '{key}'; they must agree, or actions are "
                    'decoded with statistics they were not trained with'
                )
            statistics[f'{group}.{name}'] = found[key]
    for feature, group in ((_STATE, 'state'), (_ACTION, 'actions')):
        for name in STATISTICS_OF[getattr(normalisation, group)]:
            if f'{group}.{name}' not in statistics:
                raise ExportError(
                    f"{path}: has no '{feature}.{name}'; a policy that was never trained on a data "
                    'set (a base model) has none and cannot drive a robot yet'
                )
    return statistics


def _state_file(folder: Path, pipeline: _Pipeline, step: str) -> tuple[Path, dict[str, np.ndarray]]:
    name = pipeline.state_files.get(step)
    if name is None:
        return pipeline.path, {}
    path = folder / name
    if Path(name).name != name or not name.endswith('.safetensors'):
        raise ExportError(
            f"{pipeline.path}: field state_file: '{name}' is not the plain name of a safetensors "
            'file'
        )
    try:
        return path, load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ExportError(f'{path}: cannot be read: {error}') from None


def _relative_step(config: Mapping[str, Any], path: Path, before: _Pipeline) -> Mapping[str, Any]:
    step = before.steps.get('relative_actions_processor', {'enabled': False})
    enabled = bool(step.get('enabled', False))
    if enabled != bool(config.get('use_relative_actions', False)):
        raise ExportError(
            f'{path} says use_relative_actions {config.get("use_relative_actions", False)} but '
            f'{before.path} says enabled {enabled}; they must agree'
        )
    used = list(step.get('exclude_joints') or ())
    written = list(config.get('relative_exclude_joints', used) or ())
    if enabled and used != written:
        raise ExportError(
            f'{path} says relative_exclude_joints {written} but {before.path} says exclude_joints '
            f'{used}; they must agree'
        )
    return step


def _action_names(
    config: Mapping[str, Any], path: Path, before: _Pipeline, length: int
) -> tuple[str, ...] | None:
    written = config.get('action_feature_names')
    used = _relative_step(config, path, before).get('action_names')
    if written is not None and used is not None and list(written) != list(used):
        raise ExportError(
            f'{path} says action_feature_names {written} but {before.path} says action_names '
            f'{used}; they must agree'
        )
    names = used if used is not None else written
    if names is None:
        return None
    if len(names) != length:
        raise ExportError(
            f'{path}: field action_feature_names: {len(names)} names for {length} actions'
        )
    return tuple(str(name) for name in names)


def _deltas(
    config: Mapping[str, Any], path: Path, before: _Pipeline, after: _Pipeline, length: int
) -> tuple[bool, ...]:
    """Which actions LeRobot trained relative to the state of the same index.

    Its rule: every action whose name does not contain an excluded word, without regard to case;
    without names, or without excluded words, every action.
    """
    step = _relative_step(config, path, before)
    enabled = bool(step.get('enabled', False))
    back = bool(after.steps.get('absolute_actions_processor', {}).get('enabled', False))
    if enabled != back:
        raise ExportError(
            f'{before.path} says relative actions {enabled} but {after.path} says {back}; they '
            'must agree'
        )
    if not enabled:
        return (False,) * length
    names = step.get('action_names')
    words = [str(word).lower() for word in step.get('exclude_joints') or () if word]
    if names is None or not words:
        return (True,) * length
    return tuple(not any(word in str(name).lower() for word in words) for name in names)


def _source(config: Mapping[str, Any], before: _Pipeline) -> dict[str, str]:
    source = {'checkpoint': f'LeRobot {config["type"]}'}
    renamed = before.steps.get('rename_observations_processor', {}).get('rename_map') or {}
    if renamed:
        source['renamed_observations'] = ', '.join(f'{a} to {b}' for a, b in renamed.items())
    return source
