"""A LeRobot policy folder (`pretrained_model/`): config, processors, statistics.

LeRobot runs what the processors' JSON says, so that decides. Where config.json repeats a fact, the
two must agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from vla_runtime.bundle.schema import (
    STATISTICS,
    STATISTICS_OF,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
)
from vla_runtime.export.errors import ExportError
from vla_runtime.export.folder import (
    CONFIG_FILE,
    FolderFacts,
    find_tokenizer,
)
from vla_runtime.files.input_files import regular_file
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.types import NormaliserKind, PromptTemplate

PREPROCESSOR_FILE = 'policy_preprocessor.json'
POSTPROCESSOR_FILE = 'policy_postprocessor.json'

_STATE, _ACTION = 'observation.state', 'action'
_NORMALISERS: Mapping[str, NormaliserKind] = {
    'IDENTITY': 'identity',
    'QUANTILES': 'quantiles_lerobot',
    'MEAN_STD': 'mean_std_lerobot',
    'MIN_MAX': 'min_max',
}
# Steps that this runtime does too, or that only move data about.
_PREPROCESSORS = (
    'rename_observations_processor',
    'to_batch_processor',
    'relative_actions_processor',
    'normalizer_processor',
    'tokenizer_processor',
    'device_processor',
)
_POSTPROCESSORS = ('unnormalizer_processor', 'absolute_actions_processor', 'device_processor')
# Values that every family is written for: a folder that says otherwise is refused.
_FIXED: Mapping[str, object] = {'n_obs_steps': 1, 'use_peft': False}
_EPSILON = 1e-8


@dataclass(frozen=True)
class LeRobotPolicy:
    """Facts in which the folders of one policy type differ from those of others.

    Attributes:
        type: in config.json; the family's name here too.
        template: of the prompt that LeRobot writes for it.
        images: resize and padding.
        steps: processing steps of its own that this runtime does too.
        fixed: values of config.json that network and processing are written for.
        at_most: largest numbers of config.json that they are written for.
        image_size_key: of the edge of the square images in config.json, as [size, size].
        denoise_steps_key: of the Euler steps in config.json.
        variant_key: of the language model's variant in config.json, where there is one.
        has_state_token: the network takes the state, padded to `max_state_dim`.
    """

    type: str
    template: PromptTemplate
    images: ImageSpec
    steps: tuple[str, ...]
    fixed: Mapping[str, object]
    image_size_key: str
    denoise_steps_key: str
    at_most: Mapping[str, int] = field(default_factory=dict)
    variant_key: str | None = None
    has_state_token: bool = False


@dataclass(frozen=True)
class _Pipeline:
    """A processor's JSON: registry name of each step to its configuration and tensors."""

    path: Path
    steps: Mapping[str, JsonMapping]
    state_files: Mapping[str, str]

    def step(self, name: str) -> JsonMapping:
        """A step's configuration, empty where the pipeline has no such step."""
        return self.steps.get(name, JsonMapping(self.path, {}))


def is_lerobot_folder(folder: Path) -> bool:
    """Return whether config.json names a policy type, as LeRobot's does, not openpi's."""
    path = folder / CONFIG_FILE
    return os.path.lexists(path) and 'type' in read_json(path)


def policy_type(folder: Path, known: Sequence[str]) -> str:
    """Return the policy type that config.json names.

    Raises:
        ExportError: none of the known.
    """
    config = read_json(folder / CONFIG_FILE)
    found: str = config.get('type', str)
    if found not in known:
        *others, last = (f"'{name}'" for name in known)
        served = f'{", ".join(others)} and {last}' if others else last
        raise config.error('type', f"policies of type '{found}' are not served, only {served}")
    return found


def read_lerobot_folder(folder: Path, policy: LeRobotPolicy) -> FolderFacts:
    """Read the facts of a LeRobot folder.

    Args:
        folder: whose config.json names the policy's type.
        policy: description of its policy type.

    Raises:
        ExportError, JsonError: a policy or processing step that this runtime does not reproduce,
            files that contradict each other, missing or damaged files.
    """
    config = read_json(folder / CONFIG_FILE)
    policy_type(folder, [policy.type])
    for key, expected in {**_FIXED, **policy.fixed}.items():
        found = config.get(key, (bool, int, float, str), expected)
        if found != expected:
            raise config.error(
                key, f'{found!r} is not supported; this runtime runs policies with {expected!r}'
            )
    for key, most in policy.at_most.items():
        found = config.get(key, int, most)
        if found > most:
            raise config.error(
                key, f'{found} is not supported; this runtime runs policies with at most {most}'
            )
    before = _pipeline(folder / PREPROCESSOR_FILE, (*_PREPROCESSORS, *policy.steps))
    after = _pipeline(folder / POSTPROCESSOR_FILE, _POSTPROCESSORS)
    state_length = _feature_length(config, 'input_features', _STATE)
    action_length = _feature_length(config, 'output_features', _ACTION)
    normalisation = _normalisation(config, before, after)
    return FolderFacts(
        kind='LeRobot',
        family=policy.type,
        cameras=_cameras(config),
        images=policy.images,
        normalisation=normalisation,
        statistics=_statistics(folder, before, after, normalisation, state_length, action_length),
        cleaning='lerobot',
        action_names=_action_names(config, before, action_length),
        state_length=state_length,
        action_length=action_length,
        deltas=_deltas(config, before, after, action_length),
        template=policy.template,
        prompt_length=_prompt_length(config, before),
        horizon=config.get('chunk_size', int),
        denoise_steps=config.get(policy.denoise_steps_key, int),
        trained_delay_steps=config.get('rtc_training_max_delay', int, 0),
        image_size=_image_size(config, policy.image_size_key),
        image_size_key=policy.image_size_key,
        action_dim=config.get('max_action_dim', int),
        state_dim=config.get('max_state_dim', int) if policy.has_state_token else 0,
        variant=config.get(policy.variant_key, str) if policy.variant_key else None,
        tokenizer=find_tokenizer(folder),
        source=_source(policy.type, before),
    )


def _pipeline(path: Path, known: tuple[str, ...]) -> _Pipeline:
    if not os.path.lexists(path):
        raise ExportError(
            f'{path}: is missing; a LeRobot older than 0.4 kept the statistics elsewhere: convert '
            'the policy with its lerobot/processor/migrate_policy_normalization.py'
        )
    steps: dict[str, JsonMapping] = {}
    files: dict[str, str] = {}
    for step in read_json(path).mappings('steps'):
        # A step that was never registered is saved under its Python class.
        name = step.get('registry_name', str, None) or step.get('class', str, 'without a name')
        if name not in known:
            raise ExportError(
                f"{path}: field {step.field}: the step '{name}' is not supported; known are "
                f'{", ".join(known)}'
            )
        if name in steps and name != 'device_processor':
            raise ExportError(f"{path}: field {step.field}: a second step '{name}'")
        steps[name] = step.mapping('config', optional=True)
        if 'state_file' in step:
            files[name] = step.get('state_file', str)
    return _Pipeline(path, steps, files)


def _feature_length(config: JsonMapping, group: str, key: str) -> int:
    features = config.mapping(group)
    shape = features.mapping(key).get('shape', list)
    if len(shape) != 1 or isinstance(shape[0], bool) or not isinstance(shape[0], int):
        raise features.error(key, f'has shape {shape} where one number is expected')
    return int(shape[0])


def _cameras(config: JsonMapping) -> tuple[CameraSpec, ...]:
    """Present cameras in the order of the features, then the empty ones, as LeRobot stacks them."""
    features = config.mapping('input_features')
    names = [
        key.removeprefix('observation.images.').removeprefix('observation.')
        for key in features.values
        if features.mapping(key).get('type', str) == 'VISUAL'
    ]
    empty = [f'empty_camera_{index}' for index in range(config.get('empty_cameras', int, 0))]
    present = [name for name in names if name not in empty]
    if not present:
        raise config.error('input_features', 'no camera (a feature of type VISUAL)')
    return tuple(
        [CameraSpec(name) for name in present] + [CameraSpec(name, present=False) for name in empty]
    )


def _image_size(config: JsonMapping, key: str) -> int:
    size = config.get(key, list)
    if len(size) != 2 or size[0] != size[1] or not isinstance(size[0], int):
        raise config.error(key, f'{size}; only square images are supported, as [size, size]')
    return int(size[0])


def _prompt_length(config: JsonMapping, before: _Pipeline) -> int:
    length = config.get('tokenizer_max_length', int)
    tokenizer = before.step('tokenizer_processor')
    used = tokenizer.get('max_length', int, length)
    if used != length:
        raise ExportError(
            f'{config.path} says tokenizer_max_length {length} but {before.path} says max_length '
            f'{used}; they must agree'
        )
    if tokenizer.get('padding_side', str, 'right') != 'right':
        raise tokenizer.error('padding_side', "only 'right' is supported")
    return int(length)


def _normalisation(config: JsonMapping, before: _Pipeline, after: _Pipeline) -> NormalisationSpec:
    stated = config.mapping('normalization_mapping')
    modes = {group: stated.get(group, str, 'IDENTITY') for group in ('VISUAL', 'STATE', 'ACTION')}
    for pipeline, name, groups in (
        (before, 'normalizer_processor', ('VISUAL', 'STATE', 'ACTION')),
        (after, 'unnormalizer_processor', ('ACTION',)),
    ):
        if name not in pipeline.steps:
            raise ExportError(f"{pipeline.path}: has no step '{name}'")
        step = pipeline.steps[name]
        used = step.mapping('norm_map', optional=True)
        for group in groups:
            if used.get(group, str, 'IDENTITY') != modes[group]:
                raise ExportError(
                    f'{config.path} says normalization_mapping.{group} {modes[group]} but '
                    f'{pipeline.path} says {used.values.get(group)}; they must agree'
                )
        epsilon = step.get('eps', (int, float), _EPSILON)
        if epsilon != _EPSILON:
            raise step.error('eps', f'{epsilon} is not {_EPSILON}')
    if modes['VISUAL'] != 'IDENTITY':
        raise stated.error('VISUAL', f'{modes["VISUAL"]} is not supported; images go in as [-1, 1]')
    only = before.step('normalizer_processor').words('normalize_observation_keys')
    if only is not None and _STATE not in only:
        modes['STATE'] = 'IDENTITY'
    return NormalisationSpec(
        state=_normaliser(stated, 'STATE', modes['STATE']),
        actions=_normaliser(stated, 'ACTION', modes['ACTION']),
    )


def _normaliser(stated: JsonMapping, group: str, mode: str) -> NormaliserKind:
    if mode not in _NORMALISERS:
        known = ', '.join(_NORMALISERS)
        raise stated.error(group, f"'{mode}' is not supported; expected one of {known}")
    return _NORMALISERS[mode]


def _statistics(
    folder: Path,
    before: _Pipeline,
    after: _Pipeline,
    normalisation: NormalisationSpec,
    state_length: int,
    action_length: int,
) -> dict[str, np.ndarray]:
    """Read the state and action statistics that this runtime knows, from the normaliser's file."""
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
        return path, load_file(str(regular_file(path)))
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f'{path}: cannot be read: {error}') from None


def _relative_step(config: JsonMapping, before: _Pipeline) -> JsonMapping:
    step = before.step('relative_actions_processor')
    enabled = step.get('enabled', bool, False)
    stated = config.get('use_relative_actions', bool, False)
    if enabled != stated:
        raise ExportError(
            f'{config.path} says use_relative_actions {stated} but {before.path} says enabled '
            f'{enabled}; they must agree'
        )
    used = step.words('exclude_joints') or ()
    written = (
        config.words('relative_exclude_joints') or ()
        if 'relative_exclude_joints' in config
        else used
    )
    if enabled and used != written:
        raise ExportError(
            f'{config.path} says relative_exclude_joints {list(written)} but {before.path} says '
            f'exclude_joints {list(used)}; they must agree'
        )
    return step


def _action_names(config: JsonMapping, before: _Pipeline, length: int) -> tuple[str, ...] | None:
    written = config.words('action_feature_names')
    used = _relative_step(config, before).words('action_names')
    if written is not None and used is not None and written != used:
        raise ExportError(
            f'{config.path} says action_feature_names {list(written)} but {before.path} says '
            f'action_names {list(used)}; they must agree'
        )
    names = used if used is not None else written
    if names is not None and len(names) != length:
        raise config.error('action_feature_names', f'{len(names)} names for {length} actions')
    return names


def _deltas(
    config: JsonMapping, before: _Pipeline, after: _Pipeline, length: int
) -> tuple[bool, ...]:
    """Return per action whether LeRobot trained it relative to the state of the same index.

    Its rule: every action whose name does not contain an excluded word, without regard to case;
    without names, or without excluded words, every action.
    """
    step = _relative_step(config, before)
    enabled = step.get('enabled', bool, False)
    back = after.step('absolute_actions_processor').get('enabled', bool, False)
    if enabled != back:
        raise ExportError(
            f'{before.path} says relative actions {enabled} but {after.path} says {back}; they '
            'must agree'
        )
    if not enabled:
        return (False,) * length
    names = step.words('action_names')
    words = [word.lower() for word in step.words('exclude_joints') or () if word]
    if names is None or not words:
        return (True,) * length
    return tuple(not any(word in name.lower() for word in words) for name in names)


def _source(family: str, before: _Pipeline) -> dict[str, str]:
    source = {'checkpoint': f'LeRobot {family}'}
    renamed = before.step('rename_observations_processor').mapping('rename_map', optional=True)
    if renamed.values:
        source['renamed_observations'] = ', '.join(
            f'{theirs} to {ours}' for theirs, ours in renamed.values.items()
        )
    return source
