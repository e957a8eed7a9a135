"""A GR00T N1.6 or N1.7 folder, as NVIDIA's Isaac-GR00T and LeRobot 0.6 write it.

LeRobot (type `groot`) writes N1.7 alone, in its processors' steps; NVIDIA writes the same facts
into processor_config.json, statistics.json and embodiment_id.json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.feature_names import CAMERA_FEATURE
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, expect
from vla_convert.checkpoints.lerobot_folder import feature_image, feature_length, is_lerobot_folder
from vla_convert.checkpoints.lerobot_processors import (
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    read_pipeline,
    state_file,
)
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.readers.groot.n17_groups import GroupedColumns, flat_columns, grouped_columns
from vla_runtime.bundle.schema import (
    CameraSpec,
    CropSpec,
    ImageSpec,
    NormalisationSpec,
    earlier_name,
)
from vla_runtime.declarations.groot import DENOISE_STEPS, USUAL_PROMPT_LENGTH
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.processing.plain_images import shortest_edge_size

# --- Images: crop, and size at the network


def image_spec(settings: JsonMapping, *, nvidia: bool) -> ImageSpec:
    """Return the resizing and cutting of images.

    Args:
        settings: `image_target_size`, `image_crop_size`, `shortest_image_edge`,
            `crop_fraction`, `use_albumentations` and `letter_box_transform`.
        nvidia: NVIDIA's own code crops height and width separately with torchvision
            (`use_albumentations: false`).
    """
    target = _pair(settings, 'image_target_size')
    if target is None:
        raise settings.error(
            'image_target_size', 'is missing; images of any size are not supported'
        )
    edge = settings.get('shortest_image_edge', int, None) or target[0]
    fraction = settings.get('crop_fraction', float, None)
    crop = _pair(settings, 'image_crop_size')
    area = settings.get('use_albumentations', bool, False)
    letterbox = settings.get('letter_box_transform', bool, False)
    if nvidia and not area:
        if crop is None:
            raise settings.error('image_crop_size', 'is missing: how much is cut is not said')
        if any(kept > side for kept, side in zip(crop, target, strict=True)):
            raise settings.error('image_crop_size', f'{crop} is larger than the image, {target}')
        return ImageSpec(
            padding='crop',
            resample='bilinear_uint8',
            crop=CropSpec(target[0], crop[0] / target[0], crop[1] / target[1], letterbox=letterbox),
        )
    if fraction is None and crop is not None:
        fraction = crop[0] / target[0]
    if fraction is not None and not 0.0 < fraction < 1.0:
        fraction = None
    return ImageSpec(
        padding='crop',
        resample='area' if area else 'bicubic_uint8',
        crop=CropSpec(edge, 1.0 if fraction is None else fraction, letterbox=letterbox),
    )


def cut_image(
    settings: JsonMapping, images: ImageSpec, cameras: tuple[tuple[int, int], ...]
) -> tuple[int, int] | None:
    """Height and width of the images after the crop, before Qwen's own resize.

    None where the cameras' aspect is kept and not known. `cameras`: known (height, width) of each.
    Raises ExportError: cameras of different aspects.
    """
    target = _pair(settings, 'image_target_size')
    assert target is not None and images.crop is not None
    if images.resample != 'area':
        return target
    if images.crop.letterbox:
        return images.crop.edge, images.crop.edge
    # The aspect is kept, so the size follows from the cameras'.
    sizes = {shortest_edge_size(size, images.crop.edge) for size in cameras}
    if len(sizes) > 1:
        raise ExportError(
            f'{settings.path}: use_albumentations keeps the aspect of images, and the folder has '
            f'cameras of several aspects: {sorted(sizes)}'
        )
    return sizes.pop() if sizes else None


def _pair(settings: JsonMapping, key: str) -> tuple[int, int] | None:
    values = settings.get(key, list, None)
    if values is None:
        return None
    if len(values) != 2 or any(type(value) is not int or value < 1 for value in values):
        raise settings.error(key, f'{values} where height and width are expected')
    return values[0], values[1]


PROCESSOR_FILE, STATISTICS_FILE, EMBODIMENTS_FILE = (
    'processor_config.json',
    'statistics.json',
    'embodiment_id.json',
)
_PACK, _ENCODE = 'groot_n1_7_pack_inputs_v1', 'groot_n1_7_vlm_encode_v1'
_DECODE, _UNPACK = 'groot_n1_7_action_decode_v1', 'groot_action_unpack_unnormalize_v2'
_BEFORE = (
    'rename_observations_processor',
    'to_batch_processor',
    _PACK,
    _ENCODE,
    'device_processor',
)
_AFTER = (_DECODE, _UNPACK, 'device_processor')
# Actions of the published base model of N1.7, and the default of N1.6's configuration.
_HORIZON = 40
_HORIZONS = {'groot_n16': 16, 'groot_n17': _HORIZON}
_VERSIONS = {'groot_n16': 'N1.6', 'groot_n17': 'N1.7'}
# Settings of NVIDIA's config.json that the networks are written for.
_NETWORK = {
    'reproject_vision': False,
    'add_pos_embed': True,
    'use_vlln': True,
    'num_timestep_buckets': 1000,
    'strict_action_padding_mask': False,
    'state_history_length': 1,
    'exclude_state': False,
    'use_mean_std': False,
}
_DIT = {'norm_type': 'ada_norm', 'interleave_self_attention': True}
_IMAGE_SIZE = (
    "height and width of the cameras' images in pixels, such as 480x640: this policy keeps their "
    'aspect (use_albumentations), so they decide how many image tokens there are'
)


class _Settings(NamedTuple):
    """What both kinds of folder keep in other files; `raw_images`: (height, width) by camera."""

    general: JsonMapping
    images: JsonMapping
    modality: JsonMapping
    raw_images: tuple[tuple[int, int], ...] = ()
    cameras: tuple[str, ...] = ()


def n17_embodiments(folder: Path, options: ExportOptions) -> tuple[str | None, JsonMapping]:
    """Tag of the folder's robot, where it says one, and the slice of every tag."""
    if is_lerobot_folder(folder):
        pack = read_pipeline(folder / PREPROCESSOR_FILE, _BEFORE).step(_PACK)
        return pack.get('embodiment_tag', str), pack.mapping('embodiment_mapping')
    slots = read_json(folder / EMBODIMENTS_FILE)
    tag = _nvidia_tag(folder, options)
    if tag is not None and tag not in slots:
        raise slots.error(tag, 'is missing: the folder has no matrices for this robot')
    return tag, slots


def fill_n17(draft: Draft, family: str) -> None:
    """Fill a draft from a `groot_n16` or `groot_n17` folder.

    Raises ExportError or JsonError: unsupported settings, contradictory, missing or damaged files.
    """
    draft.is_of('LeRobot' if is_lerobot_folder(draft.folder) else 'NVIDIA', family)
    draft.source['checkpoint'] = f'{draft.kind} groot {_VERSIONS[family]}'
    if draft.kind == 'NVIDIA':
        found = _fill_nvidia(draft)
    elif family == 'groot_n17':
        found = _fill_lerobot(draft)
    else:
        raise ExportError(
            f"{draft.folder}: has the tensors of GR00T N1.6 in a folder of LeRobot's, which serves "
            "N1.5 and N1.7; export the folder of NVIDIA's that it was made from"
        )
    _check(found)
    _write_images(draft, found)
    draft.write(
        f'{draft.source["checkpoint"]} itself',
        normalisation=NormalisationSpec('clipped_range', 'clipped_range'),
        prompt_template='chat',
        prompt_cleaning='letters',
    )
    draft.assume(USUAL, prompt_length=USUAL_PROMPT_LENGTH)
    draft.write_tokenizer()


def _write_columns(draft: Draft, columns: GroupedColumns, ranges: str, modality: str) -> None:
    """Write the columns, with the places of their ranges and of their order."""
    draft.state_length, draft.action_length = columns.state, columns.actions
    draft.write(ranges, statistics=columns.statistics)
    draft.write(
        modality,
        deltas=columns.deltas,
        folder_poses=columns.poses,
        angle_groups=columns.angles,
        real_horizon=columns.horizon,
    )


def _write_schedule(draft: Draft, settings: JsonMapping, usual_horizon: int) -> None:
    """Write the actions of a chunk, and the steps that denoise them."""
    of_horizon, of_steps = 'action_horizon', 'num_inference_timesteps'
    horizon = settings.count(of_horizon, usual_horizon)
    draft.write(settings.place(of_horizon), horizon=horizon)
    steps = draft.config.count(of_steps, DENOISE_STEPS)
    draft.write(draft.config.place(of_steps), denoise_steps=steps)


def _write_images(draft: Draft, found: _Settings) -> None:
    """Write cameras, and crop and size of their images; ask for their size where it decides."""
    images = image_spec(found.images, nvidia=draft.kind == 'NVIDIA')
    if draft.family == 'groot_n16':
        # Its processor has no such transform.
        expect(found.images, 'letter_box_transform', False)
        if images.crop is not None:
            # Eagle's processor resizes with Pillow, Qwen's with torchvision.
            images = replace(images, crop=replace(images.crop, last='bicubic_pillow'))
    if images.resample == 'area':
        draft.missing.use('--image-size')
    draft.write(found.modality.place('video'), cameras=_cameras(found))
    draft.write(found.images.place('image_target_size'), images=images)
    cut = cut_image(found.images, images, _camera_images(draft, found))
    if cut is None:
        draft.missing.ask('--image-size', _IMAGE_SIZE)
    else:
        draft.write(found.images.place('image_crop_size'), image_sizes=(cut,))
    draft.notes += _letterbox_notes(draft, found)


def _letterbox_notes(draft: Draft, found: _Settings) -> tuple[str, ...]:
    """Return a note where the training's release decides whether images were padded."""
    if (
        draft.kind != 'NVIDIA'
        or draft.images.resample != 'area'
        or not found.images.get('letter_box_transform', bool, False)
    ):
        return ()
    return (
        'letter_box_transform: images get black bars to a square, as Isaac-GR00T does today; '
        'before its issue 541 it left them out where use_albumentations is true, and such a policy '
        'wants letter_box_transform false in processor_config.json',
    )


def _camera_images(draft: Draft, found: _Settings) -> tuple[tuple[int, int], ...]:
    """(height, width) of the cameras' images, of the folder or else of the options."""
    given = draft.options.image_size
    if given is None:
        return found.raw_images
    for stated in found.raw_images:
        if stated != given:
            raise ExportError(
                f'{draft.folder / CONFIG_FILE}: input_features has images of '
                f'{stated[0]}x{stated[1]} but --image-size says {given[0]}x{given[1]}'
            )
    return (given,)


def _fill_lerobot(draft: Draft) -> _Settings:
    folder, config = draft.folder, draft.config
    before = read_pipeline(folder / PREPROCESSOR_FILE, _BEFORE)
    after = read_pipeline(folder / POSTPROCESSOR_FILE, _AFTER)
    pack, decode = before.step(_PACK), after.step(_DECODE)
    draft.source['embodiment'] = tag = pack.get('embodiment_tag', str)
    # LeRobot takes this one at load, whatever the steps were saved with.
    _refuse_transform(config, tag)
    inputs = config.mapping('input_features')
    cameras = sorted(key for key in inputs.values if key.startswith(CAMERA_FEATURE))
    modality = pack.mapping('modality_config', optional=True)
    if pack.get('raw_stats', dict, None) and _DECODE in after.steps:
        ranges = pack.place('raw_stats')
        percentiles = pack.get('use_percentiles', bool, False)
        # The actions that it decodes were normalised by the other step.
        expect(decode, 'use_percentiles', percentiles)
        columns = grouped_columns(
            pack.mapping('raw_stats'),
            modality,
            percentiles=percentiles,
            relative=decode.get('use_relative_action', bool, False),
        )
        _refuse_transform(decode, tag)
    else:
        unpack = after.step(_UNPACK)
        expect(unpack, 'libero_gripper_action', False)
        expect(unpack, 'clip_normalized_action', True)
        expect(unpack, 'normalize_min_max', True)
        path, statistics = state_file(folder, before, _PACK)
        ranges = path.name
        columns = flat_columns(
            path,
            statistics,
            state=feature_length(config, 'input_features', 'observation.state'),
            actions=feature_length(config, 'output_features', 'action'),
            horizon=pack.count('valid_action_horizon', _HORIZON),
        )
    # The step is what is done; config.json is where the user asked for it.
    if config.get('use_relative_actions', bool, False) and not decode.get(
        'use_relative_action', bool, False
    ):
        raise config.error(
            'use_relative_actions',
            f'true, but use_relative_action of {POSTPROCESSOR_FILE} is false; they must agree',
        )
    for step, key, expected in (
        (config, 'n_obs_steps', 1),
        (pack, 'state_horizon', 1),
        (pack, 'normalize_min_max', True),
    ):
        expect(step, key, expected)
    _write_columns(draft, columns, ranges, pack.place('modality_config'))
    _write_schedule(draft, pack, _HORIZON)
    return _Settings(
        general=pack,
        images=before.step(_ENCODE),
        modality=modality,
        raw_images=tuple(feature_image(config, key) for key in cameras),
        cameras=tuple(key.removeprefix(CAMERA_FEATURE) for key in cameras),
    )


def _refuse_transform(settings: JsonMapping, tag: str) -> None:
    """Refuse actions that LeRobot changes after the network, as LIBERO's gripper is inverted."""
    transform = settings.get('action_decode_transform', str, None) or 'none'
    if transform == 'auto':
        transform = 'libero' if tag == 'libero_sim' else 'none'
    if transform != 'none':
        raise settings.error('action_decode_transform', f"'{transform}' is not supported")


def _fill_nvidia(draft: Draft) -> _Settings:
    folder, options, config = draft.folder, draft.options, draft.config
    processor = read_json(folder / PROCESSOR_FILE).mapping('processor_kwargs')
    tag = _nvidia_tag(folder, options)
    if tag is None:
        robots = ', '.join(processor.mapping('modality_configs').values)
        raise ExportError(f'{folder}: is for several robots; say one with --embodiment: {robots}')
    modality = processor.mapping('modality_configs').mapping(tag)
    columns = grouped_columns(
        read_json(folder / STATISTICS_FILE).mapping(tag),
        modality,
        percentiles=processor.get('use_percentiles', bool, False),
        relative=processor.get('use_relative_action', bool, False),
        sines=processor.get('apply_sincos_state_encoding', bool, False),
    )
    dit = config.mapping('diffusion_model_cfg', optional=True)
    for where, fixed in ((config, _NETWORK), (dit, _DIT)):
        for key, expected in fixed.items():
            expect(where, key, expected)
    if dit.value('positional_embeddings') is not None:
        raise dit.error('positional_embeddings', 'is not supported; expected null')
    draft.source['embodiment'] = tag
    of_tag = processor.mapping('modality_configs').place(tag)
    _write_columns(draft, columns, f'{STATISTICS_FILE}, {tag}', of_tag)
    _write_schedule(draft, config, _HORIZONS[draft.family])
    return _Settings(processor, processor, modality)


def _nvidia_tag(folder: Path, options: ExportOptions) -> str | None:
    """The robot that was asked for, or the only one."""
    modalities = read_json(folder / PROCESSOR_FILE).mapping('processor_kwargs')
    tags = list(modalities.mapping('modality_configs').values)
    given = options.embodiment
    if given is None:
        return tags[0] if len(tags) == 1 else None
    # NVIDIA's own commands take the names of an enumeration: NEW_EMBODIMENT for new_embodiment.
    for tag in tags:
        if tag.casefold() == given.casefold():
            return tag
    raise ExportError(
        f"--embodiment says '{given}', which is no robot of {modalities.path}"
        f'{did_you_mean(given, tags)}'
    )


def _check(found: _Settings) -> None:
    for key, expected in (
        ('formalize_language', True),
        ('clip_outliers', True),
        ('exclude_state', False),
        ('use_tactile', False),
        # Their statistics would be others.
        ('use_mean_std', False),
    ):
        for where in (found.general, found.images):
            expect(where, key, expected)
    state = found.modality.mapping('state', optional=True)
    if len(state.get('delta_indices', list, [0])) != 1:
        raise state.error('delta_indices', 'a history of states is not supported')
    if state.get('exclude_state', bool, False):
        raise state.error('exclude_state', 'a policy that sees no state is not supported')


def _cameras(found: _Settings) -> tuple[CameraSpec, ...]:
    """Cameras in the checkpoint's order: all of the earliest frame, then those of the next."""
    video = found.modality.mapping('video', optional=True)
    names = video.words('modality_keys')
    if names is None:
        names = found.general.words('video_modality_keys') or found.cameras
    if not names:
        raise found.modality.error('video', 'no camera')
    steps = video.get('delta_indices', list, [0])
    frames = found.general.get('video_horizon', int, len(steps))
    if frames != len(steps):
        raise found.general.error(
            'video_horizon',
            f'{frames} frames, but which ones is not said (modality_config.video.delta_indices)',
        )
    if any(type(step) is not int or step > 0 for step in steps) or steps[-1:] != [0]:
        raise video.error('delta_indices', f'{steps} where steps back that end in 0 are expected')
    return tuple(
        CameraSpec(name)
        if step == 0
        else CameraSpec(earlier_name(name, -step), frame_of=name, steps_ago=-step)
        for step in steps
        for name in names
    )
