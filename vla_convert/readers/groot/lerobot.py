"""A LeRobot folder of type `groot`, of N1.5.

Its processors are its own steps: normalise, pad and name the embodiment; write the prompt; prepare
the images; undo the normalisation. LeRobot 0.4.4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.feature_names import CAMERA_FEATURE
from vla_convert.checkpoints.folder_facts import ExportError, expect
from vla_convert.checkpoints.lerobot_folder import feature_length
from vla_convert.checkpoints.lerobot_processors import (
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    Pipeline,
    read_pipeline,
    state_file,
)
from vla_runtime.bundle.schema import CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.declarations.groot import DENOISE_STEPS, USUAL_PROMPT_LENGTH
from vla_runtime.files.json_file import JsonMapping

PACK_STEP, UNPACK_STEP = 'groot_pack_inputs_v3', 'groot_action_unpack_unnormalize_v1'
PREPROCESSORS = (
    'rename_observations_processor',
    'to_batch_processor',
    PACK_STEP,
    'groot_eagle_encode_v3',
    'groot_eagle_collate_v3',
    'device_processor',
)
_POSTPROCESSORS = (UNPACK_STEP, 'device_processor')
# Actions that the published base model makes, whatever the folder's chunk_size.
_HORIZON = 16


def fill_groot(draft: Draft) -> None:
    """Fill a draft from a folder of type `groot`, of N1.5.

    Raises ExportError or JsonError: unsupported settings, contradictory, missing or damaged files.
    """
    draft.is_of('LeRobot', 'groot_n15')
    folder, config = draft.folder, draft.config
    before = read_pipeline(folder / PREPROCESSOR_FILE, PREPROCESSORS)
    after = read_pipeline(folder / POSTPROCESSOR_FILE, _POSTPROCESSORS)
    pack, unpack = before.step(PACK_STEP), after.step(UNPACK_STEP)
    for step, key, expected in (
        (config, 'n_obs_steps', 1),
        (pack, 'state_horizon', 1),
        (pack, 'formalize_language', False),
        (pack, 'normalize_min_max', True),
        (unpack, 'normalize_min_max', True),
    ):
        expect(step, key, expected)
    state, actions = (
        feature_length(config, 'input_features', 'observation.state'),
        feature_length(config, 'output_features', 'action'),
    )
    draft.source = {
        'checkpoint': 'LeRobot groot',
        'embodiment': pack.get('embodiment_tag', str),
    }
    draft.write(config.place('input_features'), cameras=_cameras(config))
    draft.write(
        config.place('type'),
        images=ImageSpec(padding='stretch', resample='bicubic_uint8'),
        normalisation=NormalisationSpec('min_max_flat', 'min_max_flat'),
        prompt_template='chat',
        prompt_cleaning='python_list',
        denoise_steps=DENOISE_STEPS,
        deltas=(None,) * actions,
    )
    draft.state_length, draft.action_length = state, actions
    found = _statistics(folder, before, after, state, actions)
    draft.write(before.path.name, statistics=found)
    horizon = pack.count('action_horizon', _HORIZON)
    draft.write(pack.place('action_horizon'), horizon=_HORIZON if horizon == _HORIZON else None)
    for name in ('action_dim', 'state_dim'):
        draft.write(config.place(f'max_{name}'), **{name: config.count(f'max_{name}')})
    draft.assume(USUAL, prompt_length=USUAL_PROMPT_LENGTH)
    draft.write_tokenizer()


def _cameras(config: JsonMapping) -> tuple[CameraSpec, ...]:
    """Cameras in the order of the alphabet, which is LeRobot's for this policy."""
    names = sorted(
        key for key in config.mapping('input_features').values if key.startswith(CAMERA_FEATURE)
    )
    if not names:
        raise config.error('input_features', f'no camera (a feature {CAMERA_FEATURE}…)')
    return tuple(CameraSpec(name.removeprefix(CAMERA_FEATURE)) for name in names)


def _statistics(
    folder: Path, before: Pipeline, after: Pipeline, state: int, actions: int
) -> dict[str, np.ndarray]:
    path, found = state_file(folder, before, PACK_STEP)
    other_path, other = state_file(folder, after, UNPACK_STEP)
    statistics: dict[str, np.ndarray] = {}
    for feature, group, length in (
        ('observation.state', 'state', state),
        ('action', 'actions', actions),
    ):
        for name in ('min', 'max'):
            key = f'{feature}.{name}'
            values = found.get(key)
            if values is None or values.shape != (length,):
                shape = 'none' if values is None else f'shape {list(values.shape)}'
                raise ExportError(
                    f"{path}: tensor '{key}' has {shape} where [{length}] is expected; a policy "
                    'that was never trained on a data set (a base model) has none and cannot drive '
                    'a robot yet'
                )
            if key in other and not np.array_equal(values, other[key]):
                raise ExportError(
                    f"{path} and {other_path} differ in '{key}'; they must agree, or actions are "
                    'decoded with statistics they were not trained with'
                )
            statistics[f'{group}.{name}'] = values
    return statistics
