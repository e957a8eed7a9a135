"""Checkpoints of Multi-Task DiT: LeRobot's folders.

A folder lacks head counts (looked up by width) and tokenizer of its CLIP model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast, get_args

from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import SIGLIP, TensorNames, row, rows_under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import Shapes, check_stated, checked_dims
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.blocks.scheduler_config import common_image, pair, read_scheduler
from vla_runtime.families.multi_task_dit.declaration import (
    DitDims,
    Integrator,
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
    TextDims,
    TransformerDims,
)
from vla_runtime.files.json_file import JsonMapping

_VISION = r'observation_encoder\.vision_encoder\.model\.vision_model\.'
_EYES_OF_CAMERA = r'observation_encoder\.vision_encoders\.(?P<c>\d+)\.model\.vision_model\.'
_READER = r'observation_encoder\.text_encoder\.'
_TEXT = rf'{_READER}text_encoder\.text_model\.'
# What PyTorch puts before the names where the transformer was compiled.
_HEAD = r'noise_predictor\.(?:_orig_mod\.)?'
_BLOCK = rf'{_HEAD}transformer_blocks\.(?P<i>\d+)\.'
# The CLIP blocks are named as SigLIP's.
_BLOCKS = tuple(entry for entry in SIGLIP if entry[0].startswith('encoder'))


def _eye_rows(theirs: str, ours: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return (
        row(rf'{theirs}embeddings\.class_embedding', f'{ours}class_embedding'),
        row(rf'{theirs}embeddings\.position_embedding\.weight', f'{ours}position_embedding'),
        *rows_under(
            theirs,
            ours,
            (
                (r'embeddings\.patch_embedding', 'patch_embedding'),
                # The library's own spelling.
                (r'pre_layrnorm', 'norm'),
                *_BLOCKS,
            ),
        ),
    )


NAMES = TensorNames(
    rows=(
        *_eye_rows(_VISION, 'vision.'),
        *_eye_rows(_EYES_OF_CAMERA, r'encoders.\g<c>.'),
        row(rf'{_TEXT}embeddings\.position_embedding\.weight', 'text.position_embedding'),
        *rows_under(
            _TEXT,
            'text.',
            (
                (r'embeddings\.token_embedding', 'embedding'),
                (r'final_layer_norm', 'norm'),
                *_BLOCKS,
            ),
        ),
        *rows_under(_READER, 'text.', ((r'projection', 'projection'),)),
        row(rf'{_HEAD}pos_embedding', 'transformer.position_embedding'),
        *rows_under(
            _HEAD,
            'transformer.',
            (
                (r'time_mlp\.1', 'time1'),
                (r'time_mlp\.3', 'time2'),
                (r'input_proj', 'action_in'),
                (r'output_proj', 'action_out'),
            ),
        ),
        *rows_under(
            _BLOCK,
            r'transformer.blocks.\g<i>.',
            (
                (r'(?:attn|multihead_attn)\.out_proj', 'attention.out'),
                (r'mlp\.0', 'mlp.fc1'),
                (r'mlp\.2', 'mlp.fc2'),
                (r'adaLN_modulation\.1', 'modulation'),
            ),
        ),
    ),
    # One layer with rotary positions, PyTorch's own attention without.
    packed=tuple(
        (
            re.compile(rf'{_BLOCK}{packed}(?P<leaf>weight|bias)'),
            tuple(
                rf'transformer.blocks.\g<i>.attention.{part}.\g<leaf>' for part in ('q', 'k', 'v')
            ),
        )
        for packed in (r'attn\.qkv_proj\.', r'multihead_attn\.in_proj_')
    ),
    unused=(
        re.compile(rf'(?:{_VISION}|{_EYES_OF_CAMERA})post_layernorm\.(?:weight|bias)'),
        re.compile(r'observation_encoder\..*\.embeddings\.position_ids'),
    ),
)
# Numbers of a head in every CLIP model of OpenAI's.
_HEAD_WIDTH = 64
_EYE_WIDTHS, _TEXT_WIDTHS = (768, 1024), (512, 768)


_DIFFUSION = LeRobotPolicy(
    type='multi_task_dit',
    selected_by=('objective', 'diffusion'),
    template='clip',
    images=ImageSpec(padding='none', resample='none'),
    steps=(),
    fixed={},
    horizon_key='horizon',
    denoise_steps_key='num_inference_steps',
    train_steps_key='num_train_timesteps',
    observation_steps_key='n_obs_steps',
    action_steps_key='n_action_steps',
    has_state_token=True,
    padded=False,
    source=('vision_encoder_name', 'text_encoder_name', 'noise_scheduler_type'),
)
_FLOW = replace(
    _DIFFUSION,
    family='multi_task_dit_flow',
    selected_by=('objective', 'flow_matching'),
    denoise_steps_key='num_integration_steps',
    train_steps_key=None,
    source=('vision_encoder_name', 'text_encoder_name', 'integration_method'),
)


class MultiTaskDitReader(CheckpointReader):
    names = NAMES
    known = (
        *LEROBOT_KEYS,
        'objective|timestep_sampling_(strategy|s|alpha|beta)|sigma_min',
        'hidden_dim|num_layers|timestep_embed_dim|use_positional_encoding|rope_base',
        'vision_encoder_(name|lr_multiplier)|text_encoder_name|image_crop_is_random',
        'tokenizer_(padding|padding_side|truncation)',
        'use_separate_rgb_encoder_per_camera',
        'noise_scheduler_type|num_train_timesteps|beta_(schedule|start|end)|prediction_type',
        'clip_sample(_range)?',
        'num_inference_steps|num_integration_steps|integration_method',
    )
    lerobot = (_DIFFUSION, _FLOW)
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            'tokenizer.json of the CLIP model that config.json names as text_encoder_name, from '
            'the Hugging Face Hub'
        ),
    }

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape, config = Shapes(tensors, 'Multi-Task DiT'), read_config(folder)
        if facts.environment_length:
            raise config.error('input_features', 'a state of the environment is not served')
        separate = 'encoders.0.class_embedding' in shape
        eyes = 'encoders.0' if separate else 'vision'
        vision_width, _, patch, _ = shape(f'{eyes}.patch_embedding.weight', 4)
        text_width = shape('text.embedding.weight', 2)[1]
        eye_heads = missing.pick(
            '--vision-heads',
            options.vision_heads,
            vision_width // _HEAD_WIDTH if vision_width in _EYE_WIDTHS else None,
            "the vision tower's attention heads (CLIP ViT-B has 12)",
        )
        text_heads = missing.pick(
            '--kv-heads',
            options.kv_heads,
            text_width // _HEAD_WIDTH if text_width in _TEXT_WIDTHS else None,
            "the text transformer's attention heads (that of CLIP ViT-B has 8)",
        )
        if eye_heads is None or text_heads is None:
            return None
        image = common_image(config, facts.image_sizes)
        resize, crop = pair(config, 'image_resize_shape'), pair(config, 'image_crop_shape')
        whole = resize or image
        if crop is not None and (crop[0] > whole[0] or crop[1] > whole[1]):
            # LeRobot leaves such a crop out.
            crop = None
        edge = (crop or whole)[0]
        _check_positions(shape, eyes, edge // patch)
        vision = checked_dims(
            lambda: VisionDims(
                width=vision_width,
                depth=shape.depth(f'{eyes}.blocks'),
                num_heads=eye_heads,
                mlp_dim=shape(f'{eyes}.blocks.0.mlp.fc1.weight', 2)[0],
                patch_size=patch,
                image_size=edge,
            )
        )
        text = checked_dims(
            lambda: TextDims(
                width=text_width,
                depth=shape.depth('text.blocks'),
                num_heads=text_heads,
                mlp_dim=shape('text.blocks.0.mlp.fc1.weight', 2)[0],
                positions=shape('text.position_embedding', 2)[0],
            )
        )
        transformer = _transformer(shape, config)
        objective, steps = _objective(config, facts.family), facts.observation_steps
        projected, action_dim = (
            shape(f'{name}.weight', 2)[0] for name in ('text.projection', 'transformer.action_out')
        )
        state_dim, own = facts.state_dim or 0, len(facts.image_sizes)
        modulated = shape('transformer.blocks.0.modulation.weight', 2)[1]
        check_stated(
            missing,
            ('action dimensions', facts.action_dim, action_dim),
            (
                'numbers of an observation (state, cameras and prompt of all steps)',
                steps * (state_dim + own * vision_width + projected),
                modulated - transformer.time_width,
            ),
            ('encoders', own if separate else 1, shape.depth('encoders') if separate else 1),
        )
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: objective(
                vision=vision,
                text=text,
                text_width=projected,
                transformer=transformer,
                image=image,
                resize=resize,
                crop=crop,
                vocabulary=shape('text.embedding.weight', 2)[0],
                prompt_length=prompt_length,
                cameras=cameras,
                observation_steps=steps,
                horizon=horizon,
                real_horizon=facts.real_horizon or 1,
                action_dim=action_dim,
                state_dim=state_dim,
                separate_encoders=separate,
            )
        )


def _objective(config: JsonMapping, family: str) -> Callable[..., DitDims]:
    """Return the dimensions of what the policy was trained to denoise, all others left open."""
    if family == _DIFFUSION.type:
        return partial(MultiTaskDitDims, scheduler=read_scheduler(config))
    method, known = config.get('integration_method', str), get_args(Integrator)
    if method not in known:
        raise config.error(
            'integration_method',
            f"'{method}' is not supported; expected one of {', '.join(known)}",
        )
    return partial(MultiTaskDitFlowDims, integrator=cast(Integrator, method))


def _check_positions(shape: Shapes, eyes: str, side: int) -> None:
    positions = shape(f'{eyes}.position_embedding', 2)[0]
    if positions != side**2 + 1:
        raise CheckpointError(
            f'the vision tower has {positions} positions where {side**2 + 1} are expected: those '
            f'of {side} x {side} patches, and one for the class token'
        )


def _transformer(shape: Shapes, config: JsonMapping) -> TransformerDims:
    rotary = config.get('use_rope', bool)
    mlp_dim, width = shape('transformer.blocks.0.mlp.fc1.weight', 2)
    return checked_dims(
        lambda: TransformerDims(
            width=width,
            depth=shape.depth('transformer.blocks'),
            num_heads=config.count('num_heads'),
            mlp_dim=mlp_dim,
            time_width=shape('transformer.time2.weight', 2)[0],
            rotary_base=float(config.get('rope_base', (int, float))) if rotary else None,
            learned_positions='transformer.position_embedding' in shape,
        )
    )


READER = MultiTaskDitReader()
