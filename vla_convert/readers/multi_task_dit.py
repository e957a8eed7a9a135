"""Checkpoints of Multi-Task DiT: LeRobot's folders.

A folder lacks head counts (looked up by width) and tokenizer of its CLIP model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, get_args

from vla_convert.checkpoints.dims import Heads, MakeDims, Shapes, check_stated, renamed
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, scheduler_steps
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import SIGLIP_BLOCKS, TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations.multi_task_dit import Integrator
from vla_runtime.family.scheduler_config import common_image, pair, read_scheduler
from vla_runtime.files.json_file import JsonMapping

_VISION = 'observation_encoder.vision_encoder.model.vision_model.'
_OF_CAMERA = 'observation_encoder.vision_encoders.{c}.model.vision_model.'
_TEXT = 'observation_encoder.text_encoder.'
# What PyTorch puts before the names where the transformer was compiled.
_HEAD = 'noise_predictor.(_orig_mod.)'
# The CLIP blocks are named as SigLIP's.
_CLIP_VISION = {
    'embeddings.class_embedding': 'class_embedding',
    'embeddings.position_embedding.weight': 'position_embedding',
    'embeddings.patch_embedding.*': 'patch_embedding.*',
    # The library's own spelling.
    'pre_layrnorm.*': 'norm.*',
    **SIGLIP_BLOCKS,
}
_CLIP_TEXT = {
    'embeddings.position_embedding.weight': 'position_embedding',
    'embeddings.token_embedding.*': 'embedding.*',
    'final_layer_norm.*': 'norm.*',
    **SIGLIP_BLOCKS,
}
# Query, key and value of a layer with rotary positions, and of PyTorch's own attention without.
_BLOCK = {
    'attn.qkv_proj.{weight|bias}': 'attention.{q,k,v}.{weight|bias}',
    'multihead_attn.in_proj_{weight|bias}': 'attention.{q,k,v}.{weight|bias}',
    '(multihead_)attn.out_proj.*': 'attention.out.*',
    'mlp.0.*': 'mlp.fc1.*',
    'mlp.2.*': 'mlp.fc2.*',
    'adaLN_modulation.1.*': 'modulation.*',
}
NAMES = TensorNames(
    rows={
        **under(_VISION, 'vision.', _CLIP_VISION),
        **under(_OF_CAMERA, 'encoders.{c}.', _CLIP_VISION),
        **under(f'{_TEXT}text_encoder.text_model.', 'text.', _CLIP_TEXT),
        f'{_TEXT}projection.*': 'text.projection.*',
        f'{_HEAD}pos_embedding': 'transformer.position_embedding',
        f'{_HEAD}time_mlp.1.*': 'transformer.time1.*',
        f'{_HEAD}time_mlp.3.*': 'transformer.time2.*',
        f'{_HEAD}input_proj.*': 'transformer.action_in.*',
        f'{_HEAD}output_proj.*': 'transformer.action_out.*',
        **under(f'{_HEAD}transformer_blocks.{{i}}.', 'transformer.blocks.{i}.', _BLOCK),
    },
    unused=(
        *(f'{tower}post_layernorm.{{weight|bias}}' for tower in (_VISION, _OF_CAMERA)),
        'observation_encoder.*.embeddings.position_ids',
    ),
)

_DIFFUSION = LeRobotPolicy(
    type='multi_task_dit',
    template='clip',
    images=ImageSpec(padding='none', resample='none'),
    keys={
        'horizon': 'horizon',
        'observation_steps': 'n_obs_steps',
        'real_horizon': 'n_action_steps',
    },
    source=('vision_encoder_name', 'text_encoder_name', 'noise_scheduler_type'),
)
_FLOW = replace(
    _DIFFUSION,
    family='multi_task_dit_flow',
    keys={**_DIFFUSION.keys, 'denoise_steps': 'num_integration_steps'},
    source=('vision_encoder_name', 'text_encoder_name', 'integration_method'),
)
_OBJECTIVES = {'diffusion': _DIFFUSION, 'flow_matching': _FLOW}


class MultiTaskDitReader(CheckpointReader):
    names = NAMES
    known = (
        'objective|timestep_sampling_(strategy|s|alpha|beta)|sigma_min',
        'hidden_dim|num_layers|timestep_embed_dim|use_positional_encoding|rope_base',
        'vision_encoder_(name|lr_multiplier)|text_encoder_name|image_crop_is_random',
        'tokenizer_(padding|padding_side|truncation)',
        'use_separate_rgb_encoder_per_camera',
        'noise_scheduler_type|num_train_timesteps|beta_(schedule|start|end)|prediction_type',
        'clip_sample(_range)?',
        'num_inference_steps|num_integration_steps|integration_method',
    )
    lerobot = (_DIFFUSION,)
    # A head of every CLIP model of OpenAI's has 64 numbers.
    heads: ClassVar[Mapping[str, Heads]] = {
        'vision.num_heads': Heads({768: 12, 1024: 16}, 'CLIP ViT-B has 12'),
        'text.num_heads': Heads({512: 8, 768: 12}, 'that of CLIP ViT-B has 8'),
    }
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            'tokenizer.json of the CLIP model that config.json names as text_encoder_name, from '
            'the Hugging Face Hub'
        ),
    }

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        if super().policy(config) is None:
            return None
        objective = config.get('objective', str)
        if objective not in _OBJECTIVES:
            raise config.error(
                'objective',
                f"'{objective}' is not supported; expected one of {', '.join(_OBJECTIVES)}",
            )
        return _OBJECTIVES[objective]

    def read(self, draft: Draft) -> None:
        super().read(draft)
        if draft.family == _DIFFUSION.type:
            scheduler_steps(draft)

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, _, missing = source
        config, separate = read_config(folder), 'encoders.0.class_embedding' in tensors
        if facts.environment_length:
            raise config.error('input_features', 'a state of the environment is not served')
        # Encoders of several cameras are of the sizes of the first.
        tensors = renamed(tensors, 'encoders.0.', 'vision.')
        shape = Shapes(tensors)
        image = common_image(config, facts.image_sizes)
        resize, crop = pair(config, 'image_resize_shape'), pair(config, 'image_crop_shape')
        whole = resize or image
        if crop is not None and (crop[0] > whole[0] or crop[1] > whole[1]):
            # LeRobot leaves such a crop out.
            crop = None
        edge = (crop or whole)[0]
        width, _, patch, _ = shape('vision.patch_embedding.weight', 4)
        _check_positions(shape, edge // patch)
        state_dim, steps = facts.state_dim or 0, facts.observation_steps
        cameras = len(facts.image_sizes)
        rotary = config.get('use_rope', bool)
        given = {
            'vision.image_size': edge,
            'transformer.num_heads': config.count('num_heads'),
            'transformer.rotary_base': (
                float(config.get('rope_base', (int, float))) if rotary else None
            ),
            'image': image,
            'resize': resize,
            'crop': crop,
            'observation_steps': steps,
            'real_horizon': facts.real_horizon or 1,
            'state_dim': state_dim,
            'separate_encoders': separate,
            **_objective(config, facts.family),
        }
        make = self.dims(source._replace(tensors=tensors), given)
        text = shape('text.projection.weight', 2)[0]
        modulated = shape('transformer.blocks.0.modulation.weight', 2)[1]
        check_stated(
            missing,
            'numbers of an observation (state, cameras and prompt of all steps)',
            steps * (state_dim + cameras * width + text),
            modulated - shape('transformer.time2.weight', 2)[0],
        )
        if separate:
            check_stated(missing, 'encoders', cameras, Shapes(source.tensors).depth('encoders'))
        return make


def _objective(config: JsonMapping, family: str) -> dict[str, object]:
    """Return what the policy was trained to denoise."""
    if family == _DIFFUSION.type:
        return {'scheduler': read_scheduler(config)}
    method, known = config.get('integration_method', str), get_args(Integrator)
    if method not in known:
        raise config.error(
            'integration_method',
            f"'{method}' is not supported; expected one of {', '.join(known)}",
        )
    return {'integrator': method}


def _check_positions(shape: Shapes, side: int) -> None:
    positions = shape('vision.position_embedding', 2)[0]
    if positions != side**2 + 1:
        raise CheckpointError(
            f'the vision tower has {positions} positions where {side**2 + 1} are expected: those '
            f'of {side} x {side} patches, and one for the class token'
        )


READER = MultiTaskDitReader()
