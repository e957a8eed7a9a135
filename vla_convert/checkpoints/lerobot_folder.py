"""A LeRobot policy folder (`pretrained_model/`): config, processors, statistics.

LeRobot runs what the processors' JSON says, so that decides. Where config.json repeats a fact, the
two must agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vla_convert.checkpoints.adapters import ADAPTER_FILES, is_adapter
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.feature_names import camera_name, feature_names
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, expect, must_agree
from vla_convert.checkpoints.lerobot_early import (
    early_pipelines,
    early_statistics,
    has_processors,
    is_of_2024,
)
from vla_convert.checkpoints.lerobot_processors import (
    ACTION,
    ENVIRONMENT,
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    STATE,
    Features,
    Pipeline,
    StoredStatistics,
    has_statistics,
    left_raw,
    read_normalisation,
    read_pipeline,
    read_statistics,
    state_file,
    stored_length,
)
from vla_runtime.bundle.schema import CameraSpec, ImageSpec, earlier_name
from vla_runtime.family.listing import find_family
from vla_runtime.files.json_file import JsonMapping, read_json

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
# In every config.json of LeRobot since 2025.
_FEATURES = 'input_features'
_NAMES = 'action_feature_names'
# In config.json since 0.5.1.
_LATER_KEY = 'use_relative_actions'
# -1 on a scale of 0 to 1, stretched as the image is.
_EARLIER_BARS = -3.0
_RELEASE = (
    '0.4 or 0.5: the LeRobot that trained the policy, 0.4.0 to 0.4.4 or 0.5.0 (later ones write '
    f'{_LATER_KEY} into config.json). They differ in what the network sees: 0.4 pads the state '
    'before it goes into the prompt, and images with another black'
)
# Fields of a draft to the keys of config.json that state them, where a policy type has no other.
_KEYS = {'horizon': 'chunk_size', 'prompt_length': 'tokenizer_max_length'}


@dataclass(frozen=True)
class LeRobotPolicy:
    """A policy type of LeRobot's; what else its folders say, its reader adds in `read`.

    Attributes:
        type: policy type in config.json, and the family's name unless `family` is given.
        template: prompt template; None: no language.
        images: resize and padding; with `none` images keep their sizes and are normalised as
            config.json says.
        keys: field of the draft to the key of config.json that states it: `horizon`,
            `denoise_steps` (without: the network runs once), `image_size`, `observation_steps`,
            `real_horizon` (actions that reach the robot, from the current one on), `variant`,
            `action_dim` and `state_dim` (of padded vectors; without `action_dim` none is padded).
        stateless: its folders may be without a state, which the policy then does not see.
        steps: its own processor steps that this runtime does too.
        renamed_steps: its own steps that are a usual one under another name.
        action_steps: those of `steps` that make other actions of the data set's before a training.
        fixed: the only values of config.json that are supported.
        source: further config.json keys, kept for people.
    """

    type: str
    template: str | None
    images: ImageSpec
    keys: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    renamed_steps: Mapping[str, str] = field(default_factory=dict)
    action_steps: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    stateless: bool = False
    family: str = ''


@dataclass(frozen=True)
class LeRobotFiles:
    """Files of a folder; `features` are those of the training."""

    policy: LeRobotPolicy
    config: JsonMapping
    before: Pipeline
    after: Pipeline
    stored: StoredStatistics
    features: Features

    @property
    def normalises_images(self) -> bool:
        """True where images are normalised as config.json says."""
        return self.policy.images.padding == 'none'

    def key(self, name: str) -> str | None:
        """Key of config.json that states a field of the draft; None: no key does."""
        return self.policy.keys.get(name, _KEYS.get(name))

    def write_count(self, draft: Draft, name: str) -> None:
        """Write a whole number, at least 1, where config.json has a key for it."""
        if (key := self.key(name)) is not None:
            draft.write(self.config.place(key), **{name: self.config.count(key)})


def is_lerobot_folder(folder: Path) -> bool:
    """Return whether config.json is LeRobot's, not openpi's."""
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        return False
    config = read_json(path)
    return 'type' in config or _FEATURES in config or is_of_2024(config)


def read_lerobot_folder(draft: Draft, policy: LeRobotPolicy) -> None:
    """Fill a draft from a LeRobot folder.

    Raises ExportError, JsonError: a policy or processing step that this runtime does not
    reproduce, files that contradict each other, missing or damaged files.
    """
    draft.is_of('LeRobot', policy.family or policy.type)
    files = _open(draft, policy)
    for step in (images, columns, statistics, prompt, schedule):
        step(files, draft)


def _open(draft: Draft, policy: LeRobotPolicy) -> LeRobotFiles:
    folder, config = draft.folder, draft.config
    early = not has_processors(folder)
    _check_values(config, policy)
    draft.notes += _check_merged(config, folder)
    draft.source = _source(policy, config, early=early)
    features = _features(config, policy)
    if early:
        before, after = early_pipelines(config)
        stored = early_statistics(folder, features)
    else:
        before, after = (
            read_pipeline(folder / file, (*steps, *policy.steps), policy.renamed_steps)
            for file, steps in (
                (PREPROCESSOR_FILE, _PREPROCESSORS),
                (POSTPROCESSOR_FILE, _POSTPROCESSORS),
            )
        )
        stored = StoredStatistics(
            *state_file(folder, before, 'normalizer_processor'),
            *state_file(folder, after, 'unnormalizer_processor'),
        )
        renames = before.step('rename_observations_processor')
        draft.write(renames.place('rename_map'), rename_map=_renamed(renames))
        stored = replace(stored, raw=left_raw(stored.before, draft.rename_map))
        if any(step in before.steps for step in policy.action_steps):
            stored = _without_others(stored, features.action)
    features, notes = _fitted(features, config, stored)
    draft.notes += notes
    return LeRobotFiles(policy, config, before, after, stored, features)


def images(files: LeRobotFiles, draft: Draft) -> None:
    """Write the cameras, in the network's order, and the size of their images."""
    config, policy, features = files.config, files.policy, files.features
    draft.write(config.place('type'), images=policy.images)
    files.write_count(draft, 'observation_steps')
    cameras = with_earlier_frames(_cameras(config, features), draft.observation_steps)
    draft.write(config.place(_FEATURES), cameras=cameras)
    draft.unseen_cameras = _unseen_cameras(files)
    if files.normalises_images:
        sizes = tuple(feature_image(config, key) for key in features.cameras)
        draft.write(config.place(_FEATURES), image_sizes=sizes)
    if (key := files.key('image_size')) is not None:
        draft.image_size_key = key
        draft.write(config.place(key), image_size=_image_size(config, key))


def columns(files: LeRobotFiles, draft: Draft) -> None:
    """Write the columns of state and actions, and the dimensions that the network has for them."""
    config, features = files.config, files.features
    draft.state_length, draft.action_length = sum(features.state.values()) or None, features.action
    draft.environment_length = features.state.get(ENVIRONMENT, 0)
    _check_relative(files)
    relative = files.before.step('relative_actions_processor')
    used = relative.get('action_names', list, None)
    place = config.place(_NAMES) if used is None else relative.place('action_names')
    written = config.get(_NAMES, list, None) if used is None else used
    # Where LeRobot wrote none that name each of them, the user is asked.
    draft.write(place, action_names=feature_names(written, features.action))
    draft.write(relative.place('enabled'), deltas=_deltas(files))
    # A padded policy without a key for its state takes none as a token.
    state_dim = 0 if files.key('action_dim') else draft.state_length or 0
    draft.write(config.place('output_features'), action_dim=draft.action_length)
    draft.write(config.place(_FEATURES), state_dim=state_dim)
    for name in ('action_dim', 'state_dim'):
        files.write_count(draft, name)


def statistics(files: LeRobotFiles, draft: Draft) -> None:
    """Write the normalisers that the policy was trained with, and their statistics."""
    config, stored, features = files.config, files.stored, files.features
    normalisation = read_normalisation(
        config,
        files.before,
        files.after,
        features,
        stored.raw,
        normalised_images=files.normalises_images,
    )
    draft.write(config.place('normalization_mapping'), normalisation=normalisation)
    found = read_statistics(config, stored, normalisation, features, padded=_padded(config))
    draft.write(stored.path.name, statistics=found)
    draft.statistics_file = stored.path
    draft.notes += _raw_notes(files)


def prompt(files: LeRobotFiles, draft: Draft) -> None:
    """Write the layout of the prompts, their length and the tokenizer."""
    config, policy = files.config, files.policy
    if policy.template is None:
        return
    place = config.place('type')
    draft.write(place, prompt_template=policy.template, prompt_cleaning='lerobot')
    draft.write_tokenizer()
    if (key := files.key('variant')) is not None:
        draft.variant = config.get(key, str)
    key = _KEYS['prompt_length']
    draft.write(config.place(key), prompt_length=_prompt_length(config, files.before, key))


def schedule(files: LeRobotFiles, draft: Draft) -> None:
    """Write the actions of a chunk, and the steps that denoise them."""
    config, delay = files.config, 'rtc_training_max_delay'
    draft.write(config.place('type'), denoise_steps=1)
    for name in ('horizon', 'real_horizon', 'denoise_steps'):
        files.write_count(draft, name)
    draft.write(config.place(delay), trained_delay_steps=config.get(delay, int, 0))
    # LeRobot silently gives fewer actions than configured.
    most = (draft.horizon or 0) - draft.observation_steps + 1
    if draft.real_horizon is not None and draft.real_horizon > most:
        raise config.error(
            files.key('real_horizon') or '',
            f'{draft.real_horizon} where at most the {most} actions are expected that a '
            'chunk has from the newest observation on; set it to what the robot is to get',
        )


def scheduler_steps(draft: Draft) -> None:
    """Write the steps of a scheduler: those of the training where none are for inference."""
    config = draft.config
    key = 'num_inference_steps'
    if config.value(key) is None:
        key = 'num_train_timesteps'
    draft.write(config.place(key), denoise_steps=config.count(key))


def summed_times(draft: Draft) -> None:
    """Write that flow times are sums, as in LeRobot before 0.4.3, the first with `use_peft`."""
    if 'use_peft' not in draft.config:
        draft.write(draft.config.place('use_peft'), flow_times='summed')


def padded_release(draft: Draft) -> None:
    """Write what depends on LeRobot's release at training, and ask for it.

    0.4 padded the prompt's state with zeros and images with -1 before [0, 1] became [-1, 1]; 0.5.0
    does neither under the same config.json; later ones have `use_relative_actions`.
    """
    if not has_processors(draft.folder):
        return
    given, later = draft.options.lerobot, '0.5' if _LATER_KEY in draft.config else None
    release = draft.missing.pick('--lerobot', given, later, _RELEASE)
    if given is not None:
        draft.source['lerobot'] = given
    if release != '0.4':
        return
    draft.write('--lerobot', images=replace(draft.images, bars=_EARLIER_BARS))
    layout = find_family(draft.family).templates[draft.prompt_template or '']
    if layout.has_state:
        draft.write('--lerobot', prompt_state_bins=draft.config.count('max_state_dim'))


def _without_others(stored: StoredStatistics, actions: int) -> StoredStatistics:
    """Leave out statistics of actions that are not so many: the data set's, not the policy's."""
    if stored_length(stored.before, ACTION) == actions:
        return stored
    before, after = (
        {key: values for key, values in found.items() if not key.startswith(f'{ACTION}.')}
        for found in (stored.before, stored.after)
    )
    return replace(stored, before=before, after=after)


def _fitted(
    features: Features, config: JsonMapping, stored: StoredStatistics
) -> tuple[Features, list[str]]:
    """Return the features with the state's length in training, and a note where it is another.

    A fine-tuned policy keeps the `input_features` of its base, and LeRobot pads any state, or has
    its networks made anew for it; the statistics are those of the training.
    """
    stated, longest = features.state.get(STATE), _padded(config).get(STATE)
    found = stored_length(stored.before, stored.raw.get(STATE, STATE))
    if not stated or not found or found == stated or (longest is not None and found >= longest):
        return features, []
    note = (
        f'{config.path.name} says {stated} numbers of the state, and its statistics are of '
        f'{found}: the training had {found}, the policy that it began with {stated}'
    )
    return replace(features, state={**features.state, STATE: found}), [note]


def _unseen_cameras(files: LeRobotFiles) -> tuple[str, ...]:
    """Return the cameras without statistics, where others have some."""
    cameras, stored = files.features.cameras, files.stored
    seen = [key for key in cameras if has_statistics(stored.before, key) or key in stored.raw]
    return tuple(name for key, name in cameras.items() if seen and key not in seen)


def _raw_notes(files: LeRobotFiles) -> list[str]:
    """Return a note on features that training did not normalise, though configured to."""
    modes = files.config.mapping('normalization_mapping')
    kinds = {STATE: 'STATE', ENVIRONMENT: 'ENV'}
    raw = [
        f'{ours} (from {theirs})'
        for ours, theirs in files.stored.raw.items()
        if modes.get(kinds.get(ours, 'VISUAL'), str, 'IDENTITY') != 'IDENTITY'
        and (ours in kinds or files.normalises_images)
    ]
    if not raw:
        return []
    return [
        f'{", ".join(raw)}: LeRobot 0.4 to 0.6.1 does not normalise what --rename_map renames; '
        'the policy was trained on these numbers as they are (images from 0 to 1), and gets them so'
    ]


def with_earlier_frames(cameras: Sequence[CameraSpec], steps: int) -> tuple[CameraSpec, ...]:
    """Return the cameras, then their frames of a step before, and so on, for so many steps."""
    earlier = [
        CameraSpec(
            earlier_name(camera.name, ago), camera.present, frame_of=camera.name, steps_ago=ago
        )
        for ago in range(1, steps)
        for camera in cameras
    ]
    return (*cameras, *earlier)


def _check_values(config: JsonMapping, policy: LeRobotPolicy) -> None:
    """Refuse values of config.json that network and processing are not written for."""
    usual = {} if 'observation_steps' in policy.keys else {'n_obs_steps': 1}
    for key, expected in {**usual, **policy.fixed}.items():
        expect(config, key, expected)


def _check_merged(config: JsonMapping, folder: Path) -> list[str]:
    """Refuse a policy with an adapter beside it, which may be merged into it or not.

    `use_peft` without adapter files means merged: PEFT leaves config.json as it is.
    """
    files = [name for name in ADAPTER_FILES if os.path.lexists(folder / name)]
    if not files or is_adapter(folder):
        return []
    listed = f'{" and ".join(files)} (LoRA)'
    stated = config.get('use_peft', bool, None)
    if stated is False:
        return [f'left out beside the weights, as {CONFIG_FILE} says use_peft false: {listed}']
    raise config.error(
        'use_peft',
        f'is {"missing" if stated is None else "true"}, and the weights of a policy have {listed} '
        'beside them: where the adapter is merged already, set the field to false; else move the '
        'weights to the folder of --base',
    )


def _features(config: JsonMapping, policy: LeRobotPolicy) -> Features:
    inputs = config.mapping('input_features')
    seen = [] if policy.stateless and STATE not in inputs else [STATE]
    state = [*seen, *([ENVIRONMENT] if ENVIRONMENT in inputs else [])]
    return Features(
        state={key: feature_length(config, 'input_features', key) for key in state},
        action=feature_length(config, 'output_features', ACTION),
        cameras={
            key: camera_name(key)
            for key in inputs.values
            if inputs.mapping(key).get('type', str) == 'VISUAL'
        },
    )


def feature_image(config: JsonMapping, key: str) -> tuple[int, int]:
    """Height and width of a camera's images in config.json; JsonError: another shape."""
    inputs = config.mapping('input_features')
    shape = inputs.mapping(key).get('shape', list)
    if len(shape) != 3 or shape[0] != 3 or not all(type(n) is int and n > 0 for n in shape):
        raise inputs.error(key, f'has shape {shape} where [3, height, width] is expected')
    return shape[1], shape[2]


def feature_length(config: JsonMapping, group: str, key: str) -> int:
    """Length of a state or an action in config.json; JsonError: another shape."""
    features = config.mapping(group)
    shape = features.mapping(key).get('shape', list)
    if len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise features.error(key, f'has shape {shape} where one number, at least 1, is expected')
    return int(shape[0])


def _cameras(config: JsonMapping, features: Features) -> tuple[CameraSpec, ...]:
    """Present cameras in the order of the features, then the empty ones, as LeRobot stacks them."""
    names = list(features.cameras.values())
    empty = [f'empty_camera_{index}' for index in range(config.get('empty_cameras', int, 0))]
    present = [name for name in names if name not in empty]
    if not present:
        raise config.error(
            'input_features',
            'no camera (a feature of type VISUAL); a policy that sees no image is not served',
        )
    return tuple(
        [CameraSpec(name) for name in present] + [CameraSpec(name, present=False) for name in empty]
    )


def _padded(config: JsonMapping) -> dict[str, int]:
    """Padded length of state and actions, by feature; their statistics may be as long."""
    keys = ((STATE, 'max_state_dim'), (ACTION, 'max_action_dim'))
    # A network that takes no state may have a length of none.
    return {feature: config.get(key, int) for feature, key in keys if key in config}


def _image_size(config: JsonMapping, key: str) -> int:
    size = config.get(key, list)
    if len(size) != 2 or size[0] != size[1] or type(size[0]) is not int or size[0] < 1:
        raise config.error(key, f'{size}; only square images are supported, as [size, size]')
    return int(size[0])


def _prompt_length(config: JsonMapping, before: Pipeline, key: str) -> int | None:
    """Tokens of the padded prompt; None where config.json has none."""
    length: int | None = config.count(key, None)
    tokenizer = before.step('tokenizer_processor')
    used = tokenizer.get('max_length', int, length)
    if length is not None:
        must_agree(config, key, length, tokenizer, 'max_length', used)
    if tokenizer.get('padding_side', str, 'right') != 'right':
        raise tokenizer.error('padding_side', "only 'right' is supported")
    return length


def _check_relative(files: LeRobotFiles) -> None:
    """Refuse files that differ in which actions are relative to the state (ExportError)."""
    config, step = files.config, files.before.step('relative_actions_processor')
    back = files.after.step('absolute_actions_processor')
    enabled, undone = (one.get('enabled', bool, False) for one in (step, back))
    stated = config.get('use_relative_actions', bool, False)
    must_agree(config, 'use_relative_actions', stated, step, 'enabled', enabled)
    must_agree(step, 'relative actions', enabled, back, 'absolute actions', undone)
    key = 'relative_exclude_joints'
    if enabled and key in config:
        used, written = step.words('exclude_joints') or (), config.words(key) or ()
        must_agree(config, key, list(written), step, 'exclude_joints', list(used))
    names, used_names = config.get(_NAMES, list, None), step.get('action_names', list, None)
    if names is not None and used_names is not None:
        must_agree(config, _NAMES, names, step, 'action_names', used_names)


def _deltas(files: LeRobotFiles) -> tuple[int | None, ...]:
    """Return per action the state's column that it is relative to: that of the same index.

    LeRobot's rule: actions whose names contain no excluded word (case ignored) are relative, and
    so are all without names and those beyond the names.
    """
    step, length = files.before.step('relative_actions_processor'), files.features.action
    if not step.get('enabled', bool, False):
        return (None,) * length
    names = step.get('action_names', list, None)
    words = [word.lower() for word in step.words('exclude_joints') or () if word]
    if names is None or not words:
        return tuple(range(length))
    left_out = [any(word in str(name).lower() for word in words) for name in names[:length]]
    left_out += [False] * (length - len(left_out))
    return tuple(None if out else index for index, out in enumerate(left_out))


def _renamed(step: JsonMapping) -> dict[str, str]:
    renamed = step.mapping('rename_map', optional=True)
    return {theirs: renamed.get(theirs, str) for theirs in renamed.values}


def _source(policy: LeRobotPolicy, config: JsonMapping, *, early: bool) -> dict[str, str]:
    source = {'checkpoint': f'LeRobot {policy.type}'}
    if early:
        source['lerobot'] = 'before 0.4'
    for key in policy.source:
        value = config.value(key)
        if isinstance(value, (str, int, float)):
            text = str(value)
            # A bundle names no path of one machine.
            if Path(text).is_absolute() or text.startswith('~'):
                text = Path(text).name
            source[key] = text
    return source
