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
from vla_convert.checkpoints.feature_names import camera_name, feature_names
from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    AbsentCameras,
    ExportError,
    FolderFacts,
    Question,
    expect,
    find_tokenizer,
)
from vla_convert.checkpoints.lerobot_early import (
    early_pipelines,
    early_statistics,
    has_processors,
    is_of_2024,
    read_config,
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
    camera_statistics,
    has_statistics,
    left_raw,
    read_normalisation,
    read_pipeline,
    read_statistics,
    state_file,
    stored_length,
)
from vla_convert.checkpoints.options import LeRobotRelease
from vla_runtime.bundle.schema import CameraSpec, ImageSpec, earlier_name
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import one_line

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
# In config.json since 0.5.1.
_LATER_KEY = 'use_relative_actions'
_LATER: LeRobotRelease = '0.5'
# -1 on a scale of 0 to 1, stretched as the image is.
_EARLIER_BARS = -3.0
_RELEASE = Question(
    '--lerobot',
    '0.4 or 0.5: the LeRobot that trained the policy, 0.4.0 to 0.4.4 or 0.5.0 (later ones write '
    f'{_LATER_KEY} into config.json). They differ in what the network sees: 0.4 pads the state '
    'before it goes into the prompt, and images with another black',
)
# Values required of every family.
_FIXED: Mapping[str, object] = {'n_obs_steps': 1}


@dataclass(frozen=True)
class LeRobotPolicy:
    """Facts in which the folders of one policy type differ from those of others.

    Attributes:
        type: policy type in config.json, and the family's name unless `family` is given.
        told_by: key of config.json and the value that selects this policy among those of its
            type.
        template: prompt template; None: no language.
        images: resize and padding; with `none` images keep their sizes and are normalised as
            config.json says.
        steps: its own processor steps that this runtime does too.
        fixed: the only values of config.json that are supported.
        at_most: largest values of config.json that are supported.
        views_key: config.json key of the number of images; missing cameras are masked black
            images.
        image_statistics: mean and standard deviation of the channels in [0, 1], where the
            network normalises images itself.
        usual_prompt_length: used where config.json has none.
        image_size_key: config.json key of the square image, [size, size]; None: only camera
            shapes are given.
        denoise_steps_key: config.json key of the Euler steps; None: the network runs once.
        train_steps_key: config.json key of the training noise steps, used where
            `denoise_steps_key` is null.
        observation_steps_key: config.json key of the frames of an observation; None: one.
        action_steps_key: config.json key of the actions that reach the robot, from the current
            one on; None: all.
        has_state_token: the network takes the state, padded to `max_state_dim` where `padded`.
        padded: config.json has `max_action_dim` and `max_state_dim`.
        source: further config.json keys, kept for people.
        absent_cameras: LeRobot's treatment of a config.json camera that the data lack.
        padded_release: LeRobot 0.4 padded the state of the prompt, and padded images with -3.
        summed_times: LeRobot before 0.4.3 summed the flow times of the steps in float32.
        of_2024: field that only this policy has in a config.json of 2024, which names no type.
        early: description of folders before 0.4, where they differ.
    """

    type: str
    template: str | None
    images: ImageSpec
    steps: tuple[str, ...]
    fixed: Mapping[str, object]
    family: str = ''
    selected_by: tuple[str, str] | None = None
    views_key: str | None = None
    image_statistics: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None
    usual_prompt_length: int | None = None
    state_in_prompt: bool = False
    horizon_key: str = 'chunk_size'
    image_size_key: str | None = None
    denoise_steps_key: str | None = None
    train_steps_key: str | None = None
    observation_steps_key: str | None = None
    action_steps_key: str | None = None
    at_most: Mapping[str, int] = field(default_factory=dict)
    variant_key: str | None = None
    has_state_token: bool = False
    padded: bool = True
    source: tuple[str, ...] = ()
    absent_cameras: AbsentCameras | None = None
    padded_release: bool = False
    summed_times: bool = False
    of_2024: str | None = None
    early: LeRobotPolicy | None = None


def is_lerobot_folder(folder: Path) -> bool:
    """Return whether config.json is LeRobot's, not openpi's."""
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        return False
    config = read_json(path)
    return 'type' in config or _FEATURES in config or is_of_2024(config)


def policy_type(folder: Path, known: Sequence[str], policies: Sequence[LeRobotPolicy] = ()) -> str:
    """Return the policy type of config.json's name or fields; ExportError: none of `known`."""
    config = read_config(folder)
    shown = [policy.type for policy in policies if policy.of_2024 and policy.of_2024 in config]
    *others, last = (f"'{name}'" for name in known)
    served = f'{", ".join(others)} and {last}' if others else last
    if config.get('type', str, None) is None and not shown:
        raise config.error(
            'type',
            'is missing, which says what kind of policy it is; copy config.json again, or add it '
            f'(train_config.json beside it has it as policy.type). Served are {served}',
        )
    found: str = config.get('type', str, *shown[:1])
    if found not in known:
        raise config.error('type', f"policies of type '{found}' are not served, only {served}")
    return found


def described_policy(folder: Path, policies: Sequence[LeRobotPolicy]) -> LeRobotPolicy:
    """Return the policy that config.json selects; JsonError: none."""
    config = read_config(folder)
    for policy in policies:
        if (
            policy.selected_by is None
            or config.get(policy.selected_by[0], str) == policy.selected_by[1]
        ):
            return policy
    told = [policy.selected_by for policy in policies if policy.selected_by is not None]
    key = told[0][0]
    raise config.error(
        key,
        f"'{config.get(key, str)}' is not supported; expected one of "
        f'{", ".join(value for _, value in told)}',
    )


def read_lerobot_folder(
    folder: Path, policy: LeRobotPolicy, release: LeRobotRelease | None = None
) -> FolderFacts:
    """Read the facts of a LeRobot folder.

    Raises ExportError, JsonError: a policy or processing step that this runtime does not
    reproduce, files that contradict each other, missing or damaged files.
    """
    config = read_config(folder)
    policy_type(folder, [policy.type], [policy])
    early = not has_processors(folder)
    if early:
        policy = policy.early or policy
    _check_values(config, policy)
    merged = _check_merged(config, folder)
    features = _features(config)
    if early:
        before, after = early_pipelines(config)
        stored = early_statistics(folder, features)
    else:
        before = read_pipeline(folder / PREPROCESSOR_FILE, (*_PREPROCESSORS, *policy.steps))
        after = read_pipeline(folder / POSTPROCESSOR_FILE, (*_POSTPROCESSORS, *policy.steps))
        stored = StoredStatistics(
            *state_file(folder, before, 'normalizer_processor'),
            *state_file(folder, after, 'unnormalizer_processor'),
        )
        stored = replace(stored, raw=left_raw(stored.before, _renamed(before)))
    padded = _padded(config) if policy.padded else {}
    features, notes = _fitted(features, config, stored, padded)
    state_length, action_length = sum(features.state.values()), features.action
    plain = policy.images.padding == 'none'
    normalisation = read_normalisation(
        config, before, after, features, stored.raw, normalised_images=plain
    )
    statistics = read_statistics(config, stored, normalisation, features, padded=padded)
    cameras = _cameras(config, features, policy.views_key)
    if policy.image_statistics is not None:
        normalisation = replace(normalisation, images='mean_std_lerobot')
        statistics |= camera_statistics(cameras, *policy.image_statistics)
    size_key = policy.image_size_key
    steps_key = policy.observation_steps_key
    steps = config.count(steps_key) if steps_key else 1
    horizon = config.count(policy.horizon_key)
    images, state_bins, questions = _of_release(config, policy, release, early=early)
    return FolderFacts(
        kind='LeRobot',
        family=policy.family or policy.type,
        cameras=with_earlier_frames(cameras, steps),
        images=images,
        normalisation=normalisation,
        statistics=statistics,
        statistics_file=stored.path,
        cleaning='lerobot',
        action_names=_action_names(config, before, action_length),
        state_length=state_length,
        action_length=action_length,
        deltas=_deltas(config, before, after, action_length),
        template=policy.template,
        state_bins=state_bins,
        prompt_length=_prompt_length(config, before, policy),
        usual_prompt_length=policy.usual_prompt_length,
        horizon=horizon,
        real_horizon=_real_horizon(config, policy, horizon - steps + 1),
        observation_steps=steps,
        denoise_steps=_denoise_steps(config, policy),
        # 0.4.3 was the first to write `use_peft`, and to compute each time by itself.
        flow_times='summed' if policy.summed_times and 'use_peft' not in config else None,
        trained_delay_steps=config.get('rtc_training_max_delay', int, 0),
        image_size=_image_size(config, size_key) if size_key else None,
        image_size_key=size_key or '',
        image_sizes=tuple(feature_image(config, key) for key in features.cameras) if plain else (),
        action_dim=config.count('max_action_dim') if policy.padded else action_length,
        state_dim=_state_dim(config, policy, state_length),
        environment_length=features.state.get(ENVIRONMENT, 0),
        variant=config.get(policy.variant_key, str) if policy.variant_key else None,
        tokenizer=find_tokenizer(folder),
        source=_source(policy, config, release, early=early),
        questions=questions,
        absent_cameras=policy.absent_cameras,
        renamed=_renamed(before),
        notes=(
            *notes,
            *merged,
            *_camera_notes(config, features, stored),
            *_raw_notes(config, stored, normalised_images=plain),
        ),
    )


def _of_release(
    config: JsonMapping, policy: LeRobotPolicy, release: LeRobotRelease | None, *, early: bool
) -> tuple[ImageSpec, int | None, tuple[Question, ...]]:
    """Return images, state bins and questions that depend on LeRobot's release at training.

    0.4 padded the prompt's state with zeros and images with -1 before [0, 1] became [-1, 1]; 0.5.0
    does neither under the same config.json; later ones have `use_relative_actions`.
    """
    asked = policy.padded_release and not early and _LATER_KEY not in config
    if release is not None and not asked and (release != _LATER or not policy.padded_release):
        raise ExportError(
            f'--lerobot says {release}, but {config.path} is of another release: '
            + (f'it has {_LATER_KEY}' if _LATER_KEY in config else 'leave the option out')
        )
    if asked and release is None:
        return policy.images, None, (_RELEASE,)
    if not asked or release == _LATER:
        return policy.images, None, ()
    has_state = policy.template is not None and policy.state_in_prompt
    bins = int(config.count('max_state_dim')) if has_state else None
    return replace(policy.images, bars=_EARLIER_BARS), bins, ()


def _fitted(
    features: Features, config: JsonMapping, stored: StoredStatistics, padded: Mapping[str, int]
) -> tuple[Features, list[str]]:
    """Return the features with the state's length in training, and a note where it is another.

    A fine-tuned policy keeps the `input_features` of its base, and LeRobot pads any state; the
    statistics are those of the training.
    """
    stated, longest = features.state[STATE], padded.get(STATE, 0)
    found = stored_length(stored.before, stored.raw.get(STATE, STATE))
    if found is None or found in (stated, longest) or not 0 < found < longest:
        return features, []
    note = (
        f'{config.path.name} says {stated} numbers of the state, and its statistics are of '
        f'{found}: the training had {found}, the policy that it began with {stated}'
    )
    return replace(features, state={**features.state, STATE: found}), [note]


def _camera_notes(config: JsonMapping, features: Features, stored: StoredStatistics) -> list[str]:
    """Return a note on cameras that the data of the training seem to have lacked."""
    seen = [
        key for key in features.cameras if has_statistics(stored.before, key) or key in stored.raw
    ]
    unseen = [name for key, name in features.cameras.items() if key not in seen]
    if not seen or not unseen:
        return []
    return [
        f'{config.path.name} lists {", ".join(unseen)}, but only other cameras have statistics: '
        f'if the training lacked it, say --cameras …,{unseen[0]}=absent'
    ]


def _raw_notes(
    config: JsonMapping, stored: StoredStatistics, *, normalised_images: bool
) -> list[str]:
    """Return a note on features that training did not normalise, though configured to."""
    modes = config.mapping('normalization_mapping')
    kinds = {STATE: 'STATE', ENVIRONMENT: 'ENV'}
    raw = [
        f'{ours} (from {theirs})'
        for ours, theirs in stored.raw.items()
        if modes.get(kinds.get(ours, 'VISUAL'), str, 'IDENTITY') != 'IDENTITY'
        and (ours in kinds or normalised_images)
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


def _real_horizon(config: JsonMapping, policy: LeRobotPolicy, most: int) -> int | None:
    """Return the actions that reach the robot; LeRobot silently gives fewer than configured."""
    key = policy.action_steps_key
    if key is None:
        return None
    count = config.count(key)
    if count > most:
        raise config.error(
            key,
            f'{count} where at most the {most} actions are expected that a '
            'chunk has from the newest observation on; set it to what the robot is to get',
        )
    return int(count)


def _denoise_steps(config: JsonMapping, policy: LeRobotPolicy) -> int:
    """Return the steps of a chunk, 1 for a network that runs once."""
    key, trained = policy.denoise_steps_key, policy.train_steps_key
    if key is None:
        return 1
    return config.count(trained if trained and config.value(key) is None else key)


def _check_values(config: JsonMapping, policy: LeRobotPolicy) -> None:
    """Refuse values of config.json that network and processing are not written for."""
    usual = {} if policy.observation_steps_key else _FIXED
    for key, expected in {**usual, **policy.fixed}.items():
        expect(config, key, expected)
    for key, most in policy.at_most.items():
        found = config.get(key, int, most)
        if found > most:
            raise config.error(
                key, f'{found} is not supported; this runtime runs policies with at most {most}'
            )


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


def _features(config: JsonMapping) -> Features:
    inputs = config.mapping('input_features')
    state = [STATE, *([ENVIRONMENT] if ENVIRONMENT in inputs else [])]
    return Features(
        state={key: feature_length(config, 'input_features', key) for key in state},
        action=feature_length(config, 'output_features', ACTION),
        cameras={
            key: camera_name(key)
            for key in inputs.values
            if inputs.mapping(key).get('type', str) == 'VISUAL'
        },
    )


def _state_dim(config: JsonMapping, policy: LeRobotPolicy, state_length: int) -> int:
    if not policy.has_state_token:
        return 0
    return int(config.count('max_state_dim')) if policy.padded else state_length


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


def _cameras(
    config: JsonMapping, features: Features, views_key: str | None
) -> tuple[CameraSpec, ...]:
    """Present cameras in the order of the features, then the empty ones, as LeRobot stacks them."""
    names = list(features.cameras.values())
    empty = [f'empty_camera_{index}' for index in range(config.get('empty_cameras', int, 0))]
    present = [name for name in names if name not in empty]
    if not present:
        raise config.error(
            'input_features',
            'no camera (a feature of type VISUAL); a policy that sees no image is not served',
        )
    if views_key is not None:
        views = config.count(views_key)
        if len(present) > views:
            raise config.error(views_key, f'{views}, but input_features has {len(present)} cameras')
        empty = [f'empty_camera_{index}' for index in range(views - len(present))]
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


def _prompt_length(config: JsonMapping, before: Pipeline, policy: LeRobotPolicy) -> int | None:
    """Tokens of the padded prompt; None without language, or where config.json has none."""
    if policy.template is None or policy.usual_prompt_length is not None:
        return None
    length = config.count('tokenizer_max_length')
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


def _relative_step(config: JsonMapping, before: Pipeline) -> JsonMapping:
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


def _action_names(config: JsonMapping, before: Pipeline, length: int) -> tuple[str, ...] | None:
    """Return the names of the actions; None where LeRobot wrote none that name each of them."""
    written = config.get('action_feature_names', list, None)
    used = _relative_step(config, before).get('action_names', list, None)
    if written is not None and used is not None and written != used:
        raise ExportError(
            f'{config.path} says action_feature_names {_listed(written)} but {before.path} says '
            f'action_names {_listed(used)}; they must agree'
        )
    return feature_names(used if used is not None else written, length)


def _listed(names: list[object]) -> str:
    return one_line(str(names), 200)


def _deltas(
    config: JsonMapping, before: Pipeline, after: Pipeline, length: int
) -> tuple[int | None, ...]:
    """Return per action the state's column that it is relative to: that of the same index.

    LeRobot's rule: actions whose names contain no excluded word (case ignored) are relative, and
    so are all without names and those beyond the names.
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
        return (None,) * length
    names = step.get('action_names', list, None)
    words = [word.lower() for word in step.words('exclude_joints') or () if word]
    if names is None or not words:
        return tuple(range(length))
    left_out = [any(word in str(name).lower() for word in words) for name in names[:length]]
    left_out += [False] * (length - len(left_out))
    return tuple(None if out else index for index, out in enumerate(left_out))


def _renamed(before: Pipeline) -> dict[str, str]:
    step = before.step('rename_observations_processor')
    renamed = step.mapping('rename_map', optional=True)
    return {theirs: renamed.get(theirs, str) for theirs in renamed.values}


def _source(
    policy: LeRobotPolicy,
    config: JsonMapping,
    release: LeRobotRelease | None,
    *,
    early: bool,
) -> dict[str, str]:
    source = {'checkpoint': f'LeRobot {policy.type}'}
    if early:
        source['lerobot'] = 'before 0.4'
    elif release is not None:
        source['lerobot'] = release
    for key in policy.source:
        value = config.value(key)
        if isinstance(value, (str, int, float)):
            source[key] = str(value)
    return source
