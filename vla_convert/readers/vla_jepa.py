"""Checkpoints of VLA-JEPA (arXiv 2602.10098): LeRobot's folders.

The folder has neither the settings nor the tokenizer of its Qwen3-VL, which LeRobot looks up by
name (qwen_model_name).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vla_convert.checkpoints.dims import MakeDims, Shapes, check_stated
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, must_agree
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, feature_image
from vla_convert.checkpoints.lerobot_processors import POSTPROCESSOR_FILE, PREPROCESSOR_FILE
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames, under
from vla_convert.readers.qwen3_vl import (
    DIT_HEAD,
    QWEN3,
    QWEN_TOWER,
    check_mergers,
    pixel_limits,
    processor_beside,
    read_qwen,
    smart_size,
)
from vla_runtime.bundle.schema import ImageSpec, SwitchSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.declarations.vla_jepa import FRAME_TOKEN, PROMPT, READ, READ_TOKEN, VLA_JEPA
from vla_runtime.family.scheduler_config import common_image, pair
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.prompts import Piece
from vla_runtime.processing.tokenizer import Tokenizer

_QWEN = 'qwen.model.model.'
_LAYERS = {
    '{state_encoder|action_decoder}.layer{1|2}.*': '{state_encoder|action_decoder}.fc{1|2}.*',
    'action_encoder.layer1.*': 'action_encoder.embed.*',
    'action_encoder.layer2.*': 'action_encoder.mix.*',
    'action_encoder.layer3.*': 'action_encoder.out.*',
}
NAMES = TensorNames(
    rows={
        **under(f'{_QWEN}visual.', 'vision.', QWEN_TOWER),
        **under(f'{_QWEN}language_model.', 'language.', QWEN3),
        # LeRobot saves one of two tied tables.
        'qwen.model.lm_head.weight': 'language.output.weight',
        **under('action_model.', '', {**DIT_HEAD, **_LAYERS}),
    },
    # The features are those before the last norm; the world model serves training.
    unused=(f'{_QWEN}language_model.norm.weight', 'video_{encoder|predictor}.*'),
    tied={'language.output.weight': 'language.embedding.weight'},
)
# Heads and their width of the sizes that config.json names (`action_model_type`).
_SIZES = {'DiT-B': (12, 64), 'DiT-L': (32, 48), 'DiT-test': (2, 8)}
_STATE_ENCODER = 'state_encoder.'
_CLIP, _SNAP, _BINARISE = (
    'vla_jepa_clip_actions',
    'vla_jepa_pre_snap_gripper',
    'vla_jepa_binarize_gripper',
)
_PREPARE = 'vla_jepa_image_prep'
# Settings of the steps that read no file, as LeRobot 0.6 takes them when it reads a folder. Later
# releases save them, with the column that they found by its name (gripper_joint_names).
_GRIPPER, _THRESHOLD = 6, 0.5
# Text tokens of a prompt without those of the training: a long task among them.
_PROMPT_LENGTH = 128
_PROMPT = (
    'Your task is {instruction}. Infer the temporal dynamics from frames {actions} and produce the '
    'corresponding policy actions {e_actions}.'
)
_TOKENIZER = (
    'tokenizer.json of the model that config.json names as qwen_model_name '
    '(Qwen/Qwen3-VL-2B-Instruct), from the Hugging Face Hub, with its config.json and '
    'preprocessor_config.json beside it'
)


class VlaJepaReader(CheckpointReader):
    names = NAMES
    lerobot = (
        LeRobotPolicy(
            type='vla_jepa',
            template='chat',
            images=ImageSpec(padding='stretch', resample='bicubic_float'),
            steps=(_CLIP, _SNAP, _BINARISE, _PREPARE),
            fixed={
                'prompt_template': _PROMPT,
                'special_action_token': FRAME_TOKEN,
                'embodied_action_token': READ_TOKEN,
                'action_num_timestep_buckets': 1000,
            },
            keys={'denoise_steps': 'num_inference_timesteps'},
            source=('qwen_model_name', 'action_model_type', 'torch_dtype'),
            stateless=True,
        ),
    )
    wanted: ClassVar[Mapping[str, str]] = {'--tokenizer': _TOKENIZER}
    known = (
        'jepa_encoder_name|(freeze|enable)_(qwen|world_model)|reinit_modules',
        'tokenizer_padding_side|action_dim|state_dim|action_(hidden_size|num_layers|dropout)',
        'action_noise_(beta_alpha|beta_beta|s)|num_target_vision_tokens|action_max_seq_len',
        'num_embodied_action_tokens_per_instruction|predictor_(depth|num_heads|mlp_ratio|dropout)',
        'world_model_(loss_weight|num_views)|repeated_diffusion_steps|causal_world_model_context',
        'policy_action_contract|relative_exclude_joints',
        # Said again by the steps behind the network, or of steps that are not there.
        'gripper_(dim|threshold|joint_names)',
        r'steps\[\d+\]\.config\.expand_channels',
    )

    def read(self, draft: Draft) -> None:
        super().read(draft)
        config = draft.config
        draft.missing.use('--image-size')
        _write_images(draft)
        _write_actions(draft)
        horizon = config.count('chunk_size')
        frames, tokens = _frames(config)
        draft.added_tokens = (*map(FRAME_TOKEN.format, range(4 * horizon)), READ_TOKEN)
        read = config.count('num_embodied_action_tokens_per_instruction')
        draft.assume(USUAL, prompt_length=_PROMPT_LENGTH + frames * tokens + read)
        base = config.get('qwen_model_name', str, '')
        for folder in (Path(os.path.expanduser(base)), draft.folder.parent / base) if base else ():
            if draft.options.tokenizer is None and (folder / 'tokenizer.json').is_file():
                draft.write(config.place('qwen_model_name'), tokenizer=folder / 'tokenizer.json')
                break

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Leave out the encoder of a state that the policy does not see."""
        if source.facts.state_length is not None:
            return dict(source.tensors)
        return {
            name: stored
            for name, stored in source.tensors.items()
            if not name.startswith(_STATE_ENCODER)
        }

    def sizes(self, source: Source) -> MakeDims | None:
        config, facts, shape = read_config(source.folder), source.facts, Shapes(source.tensors)
        tokenizer = source.options.tokenizer or facts.tokenizer
        beside = None if tokenizer is None else tokenizer.with_name(CONFIG_FILE)
        beside = beside if beside is not None and beside.is_file() else None
        if not _is_published(shape) and (beside is None or processor_beside(beside) is None):
            # Without a tokenizer the draft asks for all of it.
            if tokenizer is not None:
                source.missing.ask('--tokenizer', f'{_TOKENIZER}: it is not the published size')
            return None
        if beside is not None:
            qwen = read_qwen(read_json(beside))
            check_mergers(shape, qwen['vision.deepstack'])
        else:
            fields = (
                'vision.num_heads',
                'vision.deepstack',
                'rope_sections',
                'rope_base',
                'rms_epsilon',
            )
            qwen = {name: attrgetter(name)(VLA_JEPA) for name in fields}
        least, most = pixel_limits(tokenizer)
        heads, width = _dit(config)
        keys = shape('language.blocks.0.attention.k.weight', 2)[0]
        head_dim = shape('language.blocks.0.attention.k_norm.weight', 1)[0]
        key, read = 'num_embodied_action_tokens_per_instruction', shape('future_tokens', 2)[0]
        check_stated(source.missing, key, config.count(key), read)
        frames, tokens = _frames(config)
        given: dict[str, Any] = {
            **qwen,
            'language.num_kv_heads': max(1, keys // head_dim),
            'dit.num_heads': heads,
            'image': lambda values: smart_size(
                facts.image_sizes[0],
                values['vision.patch_size'] * values['vision.merge'],
                least,
                most,
            ),
            'frames': frames,
            'frame_tokens': tokens,
            'tokens_behind': lambda values: _tokens_behind(facts),
            'state_dim': facts.state_length or 0,
        }
        if facts.state_length:
            found = shape('state_encoder.fc1.weight', 2)[1]
            check_stated(source.missing, 'observation.state', facts.state_length, found)
        check_stated(
            source.missing,
            'action_num_heads times action_attention_head_dim',
            heads * width,
            shape('dit.0.attention.q.weight', 2)[0],
        )
        return self.dims(source, given, config=config)


def _frames(config: JsonMapping) -> tuple[int, int]:
    """Frames in the prompt, at most as many as there are tokens, and tokens of each."""
    video, tubelet = config.count('num_video_frames'), config.count('jepa_tubelet_size')
    if video < 2 * tubelet:
        raise config.error('num_video_frames', f'{video} where at least {2 * tubelet} are expected')
    frames = min(video // tubelet - 1, 4 * config.count('chunk_size'))
    return frames, config.count('num_action_tokens_per_timestep')


def _dit(config: JsonMapping) -> tuple[int, int]:
    """Heads of the DiT and their width (JsonError: a size of another name)."""
    size = config.get('action_model_type', str)
    stated = [config.count(k, None) for k in ('action_num_heads', 'action_attention_head_dim')]
    if None in stated and size not in _SIZES:
        raise config.error(
            'action_model_type', f"'{size}' is not supported; expected one of {', '.join(_SIZES)}"
        )
    usual = _SIZES.get(size, (0, 0))
    return stated[0] or usual[0], stated[1] or usual[1]


def _is_published(shape: Shapes) -> bool:
    """Return whether the tensors are of the published Qwen3-VL."""
    sizes = (
        shape('vision.patch_embedding.weight', 5)[0],
        shape.depth('vision.blocks'),
        shape('language.blocks.0.attention.k_norm.weight', 1)[0],
    )
    return sizes == (VLA_JEPA.vision.width, VLA_JEPA.vision.depth, VLA_JEPA.language.head_dim)


def _tokens_behind(facts: Draft) -> int:
    """Tokens of the prompt behind those that the head reads, in the draft's vocabulary."""
    assert facts.tokenizer is not None
    vocabulary = Tokenizer.load(facts.tokenizer, bos=False)
    behind = PROMPT.text.partition(READ)[2]
    (tokens,) = vocabulary.piece_tokens([Piece(behind, frame=True)])
    return len(tokens)


def _write_images(draft: Draft) -> None:
    """Write the size that images have before Qwen's own resize."""
    config, step = draft.config, _step(draft.folder, PREPROCESSOR_FILE, _PREPARE)
    averaged = pair(config, 'resize_images_to')
    if step is not None:
        must_agree(config, 'resize_images_to', averaged, step, 'resize_to', pair(step, 'resize_to'))
    if averaged is not None:
        place = config.place('resize_images_to')
        images = ImageSpec('stretch', 'bicubic_float', averaged=averaged)
        draft.write(place, images=images, image_sizes=(averaged,))
        return
    if (given := draft.options.image_size) is not None:
        draft.write('--image-size', image_sizes=(given,))
        return
    inputs = config.mapping('input_features')
    keys = [key for key in inputs.values if inputs.mapping(key).get('type', str) == 'VISUAL']
    size = common_image(config, tuple(feature_image(config, key) for key in keys))
    draft.write(config.place('input_features'), image_sizes=(size,))


def _write_actions(draft: Draft) -> None:
    """Write what the steps behind the network do to actions.

    Raises ExportError, JsonError: config.json and the steps contradict each other, or neither says
    which action is the gripper.
    """
    config = draft.config
    stated = draft.normalisation.actions
    steps = {
        name: _step(draft.folder, POSTPROCESSOR_FILE, name) for name in (_CLIP, _SNAP, _BINARISE)
    }
    for key, name in (
        ('clip_normalized_actions', _CLIP),
        ('pre_snap_gripper_action', _SNAP),
        ('binarize_gripper_action', _BINARISE),
    ):
        found, asked = steps[name] is not None, config.get(key, bool, steps[name] is not None)
        # Later releases leave the step out where actions go by mean and spread.
        if found != asked and not (name == _CLIP and asked and stated != 'min_max'):
            raise ExportError(
                f'{config.path} says {key} {asked} but {POSTPROCESSOR_FILE} has '
                f"{'the' if found else 'no'} step '{name}': they must agree"
            )
    _write_switch(draft, steps[_SNAP], steps[_BINARISE])
    if steps[_CLIP] is not None:
        _write_clipped(draft)


def _write_clipped(draft: Draft) -> None:
    """Write the normaliser that clips: between what maps to -1 and to 1."""
    normaliser, length = _normaliser(draft), draft.action_length or 0
    ends = normaliser.denormalise(np.array([[-1.0] * length, [1.0] * length], np.float32))
    statistics = {
        name: values
        for name, values in (draft.statistics or {}).items()
        if not name.startswith('actions.')
    }
    statistics |= {'actions.low': ends[0], 'actions.high': ends[1]}
    draft.normalisation = replace(draft.normalisation, actions='clipped_range')
    draft.statistics = statistics


def _normaliser(draft: Draft) -> Normalizer:
    statistics = {
        name.removeprefix('actions.'): values
        for name, values in (draft.statistics or {}).items()
        if name.startswith('actions.')
    }
    names = tuple(f'action {n}' for n in range(draft.action_length or 0))
    return Normalizer(draft.normalisation.actions, statistics, names)


def _write_switch(draft: Draft, snap: JsonMapping | None, binarise: JsonMapping | None) -> None:
    """Write the action that is the gripper's, of which the steps make one of two."""
    config, length = draft.config, draft.action_length or 0
    found = [step for step in (snap, binarise) if step is not None]
    if not found:
        return
    settings = {
        (
            int(_setting(step, 'gripper_dim', config, 'gripper_dim')),
            float(_setting(step, 'threshold', config, 'gripper_threshold', float)),
        )
        for step in found
    }
    if len(settings) > 1:
        raise ExportError(f'{found[0].path}: the steps {_SNAP} and {_BINARISE} differ: {settings}')
    ((column, threshold),) = settings
    if 'gripper_dim' not in found[0] and (column, threshold) != (_GRIPPER, _THRESHOLD):
        draft.notes.append(
            f'action {column + 1} is switched at {threshold:g}, as config.json says (gripper_dim, '
            f'gripper_threshold) and the training had it; LeRobot 0.6, whose steps save no '
            f'settings, switches action {_GRIPPER + 1} at {_THRESHOLD:g} after reading it'
        )
    if not 0 <= column < length:
        if column < 0:
            raise config.error('gripper_dim', f'{column} where a column, from 0 on, is expected')
        return
    switch = _switch(_normaliser(draft), column, snap is not None, binarise is not None, threshold)
    stated = found[0] if 'gripper_dim' in found[0] else config
    draft.write(stated.place('gripper_dim'), switches={column: switch})
    told = f'action {column + 1} (gripper_dim {column}) is {switch.above:g} or {switch.below:g}'
    if switch.above == switch.below:
        told = f'{told}: the same, so that it never moves (gripper_threshold {threshold:g})'
    draft.notes.append(
        f'{told}; where it is no gripper, remove the steps {_SNAP} and {_BINARISE} from '
        f'{POSTPROCESSOR_FILE}, and set pre_snap_gripper_action and binarize_gripper_action of '
        f'{CONFIG_FILE} to false'
    )


def _setting(step: JsonMapping, key: str, config: JsonMapping, of: str, *kind: type) -> Any:
    """A number of a step; of config.json where the step has none."""
    where, name = (config, of) if step.value(key) is None else (step, key)
    return where.get(name, (int, *kind))


def _switch(
    normaliser: Normalizer, column: int, snaps: bool, binarises: bool, threshold: float
) -> SwitchSpec:
    """What the steps make of a column: `snaps` to 0 or 1, and `binarises` the robot's number."""

    def robot(level: float) -> float:
        row = np.zeros(normaliser.size or 0, np.float32)
        row[column] = level
        return float(normaliser.denormalise(row)[column])

    def binarised(value: float) -> float:
        return 1.0 - 2.0 * (value > threshold) if binarises else value

    if snaps:
        return SwitchSpec(threshold, above=binarised(robot(1.0)), below=binarised(robot(0.0)))
    row = np.zeros(normaliser.size or 0, np.float32)
    row[column] = threshold
    # Above it, not at it.
    after = np.nextafter(normaliser.normalise(row)[column], np.float32(np.inf))
    return SwitchSpec(float(after), above=-1.0, below=1.0)


def _step(folder: Path, file: str, name: str) -> JsonMapping | None:
    """Settings of a step of a processor; None: it has none of this name."""
    for step in read_json(folder / file).mappings('steps'):
        if step.get('registry_name', str, None) == name:
            return step.mapping('config', optional=True)
    return None


READER = VlaJepaReader()
