"""The rules of policy.yaml: lengths, names, and fields that must agree.

`parse_spec` and `check_spec` are the only gate: a spec that passes is complete and consistent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, get_args

import yaml

from vla_runtime.bundle.pose_rules import check_poses, check_unique
from vla_runtime.bundle.schema import (
    ENGINES_FOLDER,
    FORMAT,
    RATE_UNITS,
    SPEC_FILE,
    STEP_TIMES_S,
    TOKENIZER_SUFFIXES,
    ActionSpec,
    BundleSpec,
    CropSpec,
    StateSpec,
)
from vla_runtime.family.declaration import (
    MOST_FLOW_STEPS,
    Family,
    first_action,
    image_tiles,
    language_dims,
    observation_steps,
    scheduler_of,
)
from vla_runtime.family.dimensions import limits_of
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.files import typed_yaml
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.processing.joint_spaces import joint_space
from vla_runtime.types import CroppedResample, ImageResample, StretchedResample

# Largest accepted values, many times those of any published policy: a typo would ask for terabytes.
# Those of a family's own dimensions are in `family.dimensions`.
LIMITS: Mapping[str, int] = {
    'dimensions.vocabulary': 4_194_304,
    'dimensions.cameras': 16,
    'dimensions.prompt_length': 4096,
    'dimensions.horizon': 1024,
    'dimensions.action_dim': 1024,
    'dimensions.state_dim': 1024,
}
_EARLIER_KEYS = (('prompt', 'frame'), ('prompt', 'image'), ('dimensions', 'image_frames'))
# Frames of a camera are kept for so long.
EARLIEST_FRAME_S = 10.0
# As many as a padded state has numbers.
MOST_BINS = LIMITS['dimensions.state_dim']
# Image tokens of all cameras and prompt tokens: attention masks grow with their square.
PREFIX_LIMIT = 32768


def parse_spec(text: str) -> BundleSpec:
    """Read and check the text of a policy.yaml; FieldError names the first wrong field."""
    document = typed_yaml.loads(text)
    if not isinstance(document, dict):
        raise FieldError('', 'is not a mapping; expected the keys of a policy bundle')
    found = document.pop('format', None)
    if found != FORMAT or isinstance(found, bool):
        raise FieldError(
            'format', f'{quoted(found)} where {FORMAT} is expected (a newer vla_runtime?)'
        )
    _refuse_earlier_keys(document)
    return _checked(document)


def _refuse_earlier_keys(document: Mapping[str, Any]) -> None:
    for part, key in _EARLIER_KEYS:
        section = document.get(part)
        if isinstance(section, Mapping) and key in section:
            raise FieldError(
                f'{part}.{key}',
                'is a key of an earlier vla_runtime: the text around images is no longer in the '
                'bundle; export the checkpoint again (vla_runtime export)',
            )


def dump_spec(spec: BundleSpec) -> str:
    """Return the text of policy.yaml; `parse_spec` reads it back as an equal spec."""
    # A line for each file, so that a changed hash is a changed line.
    files = yaml.safe_dump({'files': dict(spec.files)}, default_flow_style=False, width=1000)
    rest = typed_yaml.to_plain(spec)
    del rest['files']
    return f'format: {FORMAT}\n{typed_yaml.dumps(rest)}{files}'


def check_spec(spec: BundleSpec) -> None:
    """Check a spec that was built in Python as `parse_spec` checks one that is read."""
    _checked(typed_yaml.to_plain(spec))


def _check_student(spec: BundleSpec, family: Family) -> None:
    """Steps that a student knows: of a flow, each once, and the recommended number among them."""
    known = spec.student_steps
    if not known:
        return
    if family.head != 'flow':
        raise FieldError('student_steps', f'is given, but the head of {spec.family} has no flow')
    if list(known) != sorted(set(known)) or not 1 <= known[0] <= known[-1] <= MOST_FLOW_STEPS:
        raise FieldError(
            'student_steps', f'{list(known)}: expected 1 to {MOST_FLOW_STEPS}, ascending'
        )
    if spec.denoise_steps not in known:
        raise FieldError(
            'denoise_steps', f'{spec.denoise_steps} is none of student_steps, {list(known)}'
        )


def _checked(document: Mapping[str, Any]) -> BundleSpec:
    """Make the spec of a document, and check its types, then lengths, names and agreement."""
    spec = typed_yaml.parse(BundleSpec, _with_dims(dict(document)))
    family = find_family(spec.family)
    _check_limits(spec, family)
    if family.has_scheduler:
        try:
            scheduler_of(spec.dims).check_steps(spec.denoise_steps)
        except ValueError as error:
            raise FieldError('denoise_steps', str(error)) from None
        if spec.trained_delay_steps:
            raise FieldError(
                'trained_delay_steps',
                f'{spec.trained_delay_steps} where 0 is expected: the actions of a chunk of '
                f'{spec.family} share one time',
            )
    elif family.head != 'flow' and (spec.denoise_steps, spec.trained_delay_steps) != (1, 0):
        raise FieldError(
            'denoise_steps',
            f'{spec.denoise_steps} (trained_delay_steps: {spec.trained_delay_steps}) where 1 (0) '
            f'is expected: the head of {spec.family} runs once',
        )
    elif family.head == 'flow' and spec.denoise_steps > MOST_FLOW_STEPS:
        raise FieldError(
            'denoise_steps',
            f'{spec.denoise_steps} where 1 to {MOST_FLOW_STEPS} are expected for a flow',
        )
    _check_student(spec, family)
    if spec.flow_times is not None and family.head != 'flow':
        raise FieldError('flow_times', f'is given, but the head of {spec.family} has no flow')
    _check_cameras(spec)
    if spec.trained_delay_steps > spec.real_horizon:
        is_padded = hasattr(spec.dims, 'real_horizon')
        stated = 'dimensions.real_horizon' if is_padded else 'dimensions.horizon'
        raise FieldError(
            'trained_delay_steps',
            f'{spec.trained_delay_steps} is more than the {spec.real_horizon} actions of a chunk '
            f'that reach the robot ({stated})',
        )
    if spec.trained_delay_steps and first_action(spec.dims):
        raise FieldError(
            'trained_delay_steps',
            f'{spec.trained_delay_steps} where 0 is expected: the first of the actions that are '
            'denoised lie before the observation (dimensions.observation_steps)',
        )
    _check_state(spec)
    check_poses(spec)
    _check_actions(spec)
    check_joint_space(spec)
    shortest_s, longest_s = STEP_TIMES_S
    if not shortest_s <= spec.step_time_s <= longest_s:
        raise FieldError(
            'step_time_s',
            f'{spec.step_time_s:g} where {shortest_s:g} to {longest_s:g} seconds are expected',
        )
    _check_images(spec)
    _check_language(spec, family)
    for key, text in spec.source.items():
        if re.match(r'(/|~|[A-Za-z]:\\)', text):
            raise FieldError(f'source.{key}', f"'{text}' is a path of one machine; leave it out")
    _check_files(spec)
    return spec


def _check_crop(crop: CropSpec, resample: ImageResample) -> None:
    if not (1 <= crop.edge <= 4096 and 0.0 < crop.fraction <= 1.0):
        raise FieldError(
            'images.crop',
            f'edge {crop.edge}, fraction {crop.fraction} where an edge from 1 to 4096 and a '
            'fraction above 0 and at most 1 are expected',
        )
    across = crop.fraction_across
    if across is not None and not (resample == 'bilinear_uint8' and 0.0 < across <= 1.0):
        raise FieldError(
            'images.crop.fraction_across',
            f"{across:g} with the resample '{resample}' where a share above 0 and at most 1 and "
            "the resample 'bilinear_uint8' are expected",
        )
    if crop.size is not None and not (
        resample != 'area' and all(1 <= side <= 4096 for side in crop.size)
    ):
        raise FieldError(
            'images.crop.size',
            f"{list(crop.size)} with the resample '{resample}' where sides from 1 to 4096 and "
            "another resample than 'area' are expected",
        )


def _check_images(spec: BundleSpec) -> None:
    padding, resample = spec.images.padding, spec.images.resample
    words = {
        'stretch': get_args(StretchedResample),
        'crop': get_args(CroppedResample),
        'letterbox': ('bicubic_pillow',),
        'none': ('none',),
    }.get(padding, ('bilinear', 'antialias'))
    if resample not in words:
        raise FieldError(
            'images',
            f"the padding '{padding}' does not go with the resample '{resample}'; "
            f'its resample is {" or ".join(words)}',
        )
    if image_tiles(spec.dims) is not None and resample != 'bilinear_points':
        raise FieldError(
            'images.resample', f"'{resample}' where 'bilinear_points' is expected, because of tiles"
        )
    crop = spec.images.crop
    if (crop is not None) != (padding == 'crop'):
        raise FieldError('images.crop', "is for the padding 'crop', and needed there")
    if crop is not None:
        _check_crop(crop, resample)
    bars = spec.images.bars
    if bars is not None and not (padding in ('centre', 'left_top') and -4.0 <= bars <= 1.0):
        raise FieldError(
            'images.bars',
            f"{bars:g} with the padding '{padding}' where a pixel from -4 to 1 and the padding "
            "'centre' or 'left_top' are expected",
        )
    averaged = spec.images.averaged
    if averaged is not None and not (
        resample == 'bicubic_float' and all(1 <= side <= 4096 for side in averaged)
    ):
        raise FieldError(
            'images.averaged',
            f"{list(averaged)} with the resample '{resample}' where sides from 1 to 4096 and the "
            "resample 'bicubic_float' are expected",
        )
    fill = spec.images.fill
    if (fill is not None) != (padding == 'letterbox'):
        raise FieldError('images.fill', "is for the padding 'letterbox', and needed there")
    if fill is not None and max(fill) > 255:
        raise FieldError(
            'images.fill', f'{list(fill)} where grey levels from 0 to 255 are expected'
        )
    if spec.normalisation.images is not None and padding == 'letterbox':
        raise FieldError(
            'normalisation.images',
            f"'{spec.normalisation.images}' is not for images that are letterboxed; they go in as "
            '[-1, 1]',
        )
    if spec.normalisation.images is not None and padding in ('centre', 'left_top') and bars is None:
        raise FieldError(
            'images.bars',
            f'is missing: with normalisation.images {spec.normalisation.images} it says what the '
            'border is filled with, in that scale',
        )


def _check_language(spec: BundleSpec, family: Family) -> None:
    if not family.has_language:
        for field, value in (('prompt', spec.prompt), ('tokenizer', spec.tokenizer)):
            if value is not None:
                raise FieldError(
                    field, f'is given, but {spec.family} has no language; leave it out'
                )
        return
    if spec.prompt is None:
        raise FieldError('prompt', 'is missing')
    if spec.tokenizer is None:
        raise FieldError('tokenizer', 'is missing')
    if spec.prompt.template not in family.templates:
        raise FieldError(
            'prompt.template',
            f"'{spec.prompt.template}' is not a prompt of {spec.family}; expected one of "
            f'{", ".join(family.templates)}',
        )
    if spec.prompt.advantage is not None and family.head != 'flow':
        raise FieldError(
            'prompt.advantage',
            f"'{spec.prompt.advantage}', but the head of {spec.family} ({family.head}) cannot be "
            'guided; leave it out',
        )
    bins = spec.prompt.state_bins
    if bins is not None and not (
        family.templates[spec.prompt.template].has_state and len(spec.state) <= bins <= MOST_BINS
    ):
        raise FieldError(
            'prompt.state_bins',
            f'{bins} where a template with the state and {len(spec.state)} to {MOST_BINS} bins are '
            'expected',
        )
    _check_file_name(spec.tokenizer, 'tokenizer')
    if '/' in spec.tokenizer or not spec.tokenizer.endswith(TOKENIZER_SUFFIXES):
        raise FieldError(
            'tokenizer', f"'{spec.tokenizer}' where a *.json or *.model file name is expected"
        )


def _with_dims(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with `dimensions` as the dataclass of its family."""
    name = document.get('family')
    if not isinstance(name, str) or 'dimensions' not in document:
        return document  # `typed_yaml.parse` reports these errors.
    if name not in family_names():
        raise FieldError('family', f'{quoted(name)} is unknown{did_you_mean(name, family_names())}')
    dims: Any = typed_yaml.parse(find_family(name).dims, document['dimensions'], 'dimensions')
    return {**document, 'dimensions': dims}


def check_guidable(spec: BundleSpec, asked: str) -> None:
    """Refuse guidance, asked for by the setting or option `asked`, where it is impossible.

    Raises:
        ValueError: the policy has no language, or was trained without advantage tags.
    """
    if spec.prompt is None:
        raise ValueError(
            f"{asked}: policy '{spec.name}' reads no prompt ({spec.family} has no language), so "
            'there is nothing to guide with'
        )
    if spec.advantage is None:
        raise ValueError(
            f"{asked}: policy '{spec.name}' was trained without advantage tags ({SPEC_FILE}: "
            'prompt.advantage is not set), so there is nothing to guide with'
        )


def _check_limits(spec: BundleSpec, family: Family) -> None:
    document = typed_yaml.to_plain(spec)
    own = {f'dimensions.{field}': limit for field, limit in limits_of(family.dims).items()}
    # Not every family has every one of the general dimensions.
    shared = {field: limit for field, limit in LIMITS.items() if _has(document, field)}
    for field, limit in {**own, **shared}.items():
        value: Any = document
        for key in field.split('.'):
            # A stack that a policy does without is left out.
            value = value.get(key, {})
        if value == {}:
            continue
        largest = _largest(value)
        if largest > limit:
            raise FieldError(field, f'{largest} where at most {limit} is expected')
    if spec.dims.prefix_length > PREFIX_LIMIT:
        prompt = ''
        if family.has_language:
            prompt = f' and a prompt of {language_dims(spec.dims).prompt_length}'
        raise FieldError(
            'dimensions',
            f'{spec.dims.cameras} cameras{prompt} are '
            f'{spec.dims.prefix_length} tokens; at most {PREFIX_LIMIT} are expected',
        )


def _has(document: Mapping[str, Any], field: str) -> bool:
    parent, _, key = field.rpartition('.')
    return key in (document[parent] if parent else document)


def _largest(value: Any) -> Any:
    return max(map(_largest, value), default=0) if isinstance(value, list) else value


def _check_cameras(spec: BundleSpec) -> None:
    if len(spec.cameras) != spec.dims.cameras:
        raise FieldError(
            'cameras',
            f'{len(spec.cameras)} entries but dimensions.cameras is {spec.dims.cameras}',
        )
    check_unique(spec.camera_names, 'cameras')
    own = {camera.name: camera for camera in spec.cameras if camera.frame_of is None}
    for index, camera in enumerate(spec.cameras):
        if (camera.frame_of is None) != (camera.steps_ago is None):
            raise FieldError(f'cameras[{index}].steps_ago', 'goes with frame_of, and only with it')
        if camera.frame_of is None or camera.steps_ago is None:
            continue
        of = own.get(camera.frame_of)
        if of is None or of.present != camera.present:
            raise FieldError(
                f'cameras[{index}].frame_of',
                f"'{camera.frame_of}' is no camera of its own that is "
                f'{"" if camera.present else "not "}present',
            )
        age_s = camera.steps_ago * spec.step_time_s
        if age_s > EARLIEST_FRAME_S:
            raise FieldError(
                f'cameras[{index}].steps_ago',
                f'{camera.steps_ago} are {age_s:g} s; at most {EARLIEST_FRAME_S:g} s of frames '
                'are kept',
            )
    steps = observation_steps(spec.dims)
    if steps is not None:
        _check_frames(spec, steps)
    if not any(camera.present for camera in spec.cameras):
        raise FieldError('cameras', 'none is present; a policy needs at least one image')


def _check_frames(spec: BundleSpec, steps: int) -> None:
    """Check that every camera has a frame of each step, in the order in which they are seen."""
    count = len(spec.cameras) // steps
    for index, camera in enumerate(spec.cameras):
        ago, of = index // count, spec.cameras[index % count].name
        expected = (of, ago) if ago else (None, None)
        if (camera.frame_of, camera.steps_ago) != expected:
            raise FieldError(
                f'cameras[{index}]',
                f'frame_of {camera.frame_of}, steps_ago {camera.steps_ago} where {expected[0]} and '
                f'{expected[1]} are expected: the newest frames of all cameras, then those of the '
                f'step before, for the {steps} observation_steps of dimensions',
            )


def _check_state(spec: BundleSpec) -> None:
    if not spec.state:
        raise FieldError('state', 'is empty; expected the measured joints or poses, in order')
    check_unique(spec.state_names, 'state')
    padded = spec.dims.state_dim
    family = find_family(spec.family)
    token = 'state' in {**family.prefix_inputs(spec.dims), **family.head_inputs(spec.dims)}
    if not token and padded:
        raise FieldError(
            'dimensions.state_dim',
            f'{padded} where 0 is expected: {spec.family} has no state token',
        )
    angles = spec.normalisation.angles
    _check_angles(angles, spec.state_names)
    if angles and not token:
        raise FieldError(
            'normalisation.angles', f'is for a network with a state token; {spec.family} has none'
        )
    added = sum(map(len, angles))
    if token and padded < len(spec.state) + added:
        cosines = f' and {added} cosines' if added else ''
        raise FieldError(
            'dimensions.state_dim',
            f'{padded} is less than the {len(spec.state)} entries of state{cosines}; '
            f'{spec.family} pads them up to it',
        )


def _check_angles(angles: tuple[tuple[str, ...], ...], state: tuple[str, ...]) -> None:
    """Refuse groups that are no neighbours in the state, or not in its order."""
    end = 0
    for group in angles:
        first = state.index(group[0], end) if group and group[0] in state[end:] else -1
        if first < 0 or state[first : first + len(group)] != group:
            raise FieldError(
                'normalisation.angles',
                f'{", ".join(group) or "an empty group"}: expected names of the state that follow '
                'each other there, group by group in its order',
            )
        end = first + len(group)


def _check_actions(spec: BundleSpec) -> None:
    if not spec.actions:
        raise FieldError('actions', 'is empty; expected the action dimensions, in order')
    if len(spec.actions) > spec.dims.action_dim:
        raise FieldError(
            'actions',
            f'{len(spec.actions)} entries but dimensions.action_dim is {spec.dims.action_dim}',
        )
    check_unique(spec.action_names, 'actions')
    units = {item.name: item.unit for item in spec.state}
    in_delta_pose = {name for pose in spec.poses if pose.kind == 'delta' for name in pose.actions}
    for index, action in enumerate(spec.actions):
        here = f'actions[{index}]'
        if (action.unit in RATE_UNITS) != (action.kind == 'velocity') and not (
            action.kind == 'velocity' and action.unit in ('1', 'percent')
        ):
            raise FieldError(
                f'{here}.unit', f"'{action.unit}' does not fit the kind '{action.kind}'"
            )
        if action.switch is not None and action.kind != 'absolute':
            raise FieldError(f'{here}.switch', f"is not for the kind '{action.kind}'")
        if action.kind != 'delta' or action.name in in_delta_pose:
            if action.relative_to is not None:
                raise FieldError(
                    f'{here}.relative_to',
                    f"'{action.relative_to}' is only for the kind 'delta' outside of a pose",
                )
        elif action.relative_to is None:
            raise FieldError(
                f'{here}.relative_to', "is missing; the kind 'delta' needs the name of a state"
            )
        elif action.relative_to not in units:
            raise FieldError(
                f'{here}.relative_to',
                f"'{action.relative_to}' is not in state{did_you_mean(action.relative_to, units)}",
            )
        elif units[action.relative_to] != action.unit:
            raise FieldError(
                f'{here}.unit',
                f"'{action.unit}' but its state '{action.relative_to}' is in "
                f"'{units[action.relative_to]}'; a delta adds to its state",
            )


def _check_file_name(name: str, field: str) -> None:
    parts = PurePosixPath(name).parts
    if (
        name != '/'.join(parts)
        or name.startswith('/')
        or '\\' in name
        or any(part.startswith('.') for part in parts)
    ):
        raise FieldError(
            field, f"'{name}' where a plain relative file name without '..' is expected"
        )


def _check_files(spec: BundleSpec) -> None:
    for name, digest in spec.files.items():
        field = f"files['{name}']"
        _check_file_name(name, field)
        if name == SPEC_FILE or name.split('/')[0] == ENGINES_FOLDER:
            raise FieldError(field, f'{SPEC_FILE} and {ENGINES_FOLDER}/ are never listed')
        if not re.fullmatch(r'[0-9a-f]{64}', digest):
            raise FieldError(field, f"'{digest}' is not a SHA-256 in 64 small hex digits")


def _check_joint_frame(spec: BundleSpec) -> None:
    frame = spec.joint_frame
    if frame is None:
        return
    if spec.joint_space is not None:
        raise FieldError('joint_frame', f'does not go with joint_space {spec.joint_space}')
    for group, count in (('state', len(spec.state)), ('actions', len(spec.actions))):
        for name, numbers in (('signs', frame.signs), ('offsets', frame.offsets)):
            if len(numbers) != count:
                raise FieldError(
                    f'joint_frame.{name}', f'{len(numbers)} numbers where {group} has {count}'
                )
    if any(sign not in (1.0, -1.0) for sign in frame.signs):
        raise FieldError('joint_frame.signs', f'{list(frame.signs)} where 1 and -1 are expected')


def check_joint_space(spec: BundleSpec) -> None:
    """Check that state and actions are the joints that the joint space converts (FieldError)."""
    _check_joint_frame(spec)
    units = joint_space(spec.joint_space).units
    if units is None:
        return
    where = f'joint_space is {spec.joint_space}'
    groups: Mapping[str, Sequence[StateSpec | ActionSpec]]
    groups = {'state': spec.state, 'actions': spec.actions}
    for group, items in groups.items():
        if len(items) != len(units):
            raise FieldError(
                group,
                f'{len(items)} entries where {len(units)} are expected, because {where}: six '
                'joints and a gripper of the left arm, then of the right. Leave it out for another '
                'robot (export with --adapt-to-pi no)',
            )
        for index, (item, unit) in enumerate(zip(items, units, strict=True)):
            if item.unit != unit:
                raise FieldError(
                    f'{group}[{index}].unit',
                    f"'{item.unit}' of '{item.name}' where '{unit}' is expected, because {where}: "
                    "joints are in rad, grippers (the 7th and 14th) in '1', from 0 to 1",
                )
    for index, (action, state, unit) in enumerate(
        zip(spec.actions, spec.state, units, strict=True)
    ):
        if action.kind == 'velocity' or (action.kind == 'delta' and unit == '1'):
            raise FieldError(
                f'actions[{index}].kind',
                f"'{action.kind}' of '{action.name}' is not possible where {where}: joints are "
                'absolute or delta, grippers absolute',
            )
        if action.relative_to not in (None, state.name):
            raise FieldError(
                f'actions[{index}].relative_to',
                f"'{action.relative_to}' where '{state.name}' is expected, because {where}",
            )
    if spec.poses:
        raise FieldError('poses', f'are not possible where {where}, which is of joints')
