"""Checkpoints of ACT: LeRobot's folders.

The folder lacks only names, units and rate. Its `pretrained_backbone_weights` are those that
training began with; the folder's own tensors are newer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast, get_args

from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import TensorNames, row, rows_under
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS
from vla_convert.readers.block_sizes import (
    Shapes,
    check_stated,
    checked_dims,
    resnet_dims,
    resnet_rows,
)
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.families.act.declaration import ActDims, Activation, StackDims
from vla_runtime.files.json_file import JsonMapping

_Rows = tuple[tuple[re.Pattern[str], str], ...]


def _stack(stack: str, attentions: Mapping[str, str]) -> _Rows:
    layers = [(r'norm(?P<n>\d)', r'norm\g<n>'), (r'linear(?P<n>[12])', r'mlp.fc\g<n>')]
    layers += [(rf'{theirs}\.out_proj', f'{ours}.out') for theirs, ours in attentions.items()]
    return rows_under(rf'{stack}\.layers\.(?P<i>\d+)\.', rf'{stack}.\g<i>.', layers)


def _packed(
    stack: str, attentions: Mapping[str, str]
) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    """Query, key and value projections, which PyTorch's attention stacks in this order."""
    return tuple(
        (
            re.compile(rf'{stack}\.layers\.(?P<i>\d+)\.{theirs}\.in_proj_(?P<leaf>weight|bias)'),
            tuple(rf'{stack}.\g<i>.{ours}.{part}.\g<leaf>' for part in ('q', 'k', 'v')),
        )
        for theirs, ours in attentions.items()
    )


_ENCODER = {'self_attn': 'attention'}
_DECODER = {'self_attn': 'self_attention', 'multihead_attn': 'cross_attention'}
NAMES = TensorNames(
    rows=(
        *resnet_rows(r'backbone\.', 'vision.backbone.', ('conv1', 'bn1'), r'layer{}', first=1),
        *_stack('encoder', _ENCODER),
        *_stack('decoder', _DECODER),
        # At inference the latent is zero, so its token is this bias.
        row(r'encoder_latent_input_proj\.bias', 'latent'),
        row(r'encoder_1d_feature_pos_embed\.weight', 'vector_positions'),
        row(r'decoder_pos_embed\.weight', 'action_positions'),
        *rows_under(
            '',
            '',
            (
                (r'encoder_img_feat_input_proj', 'vision.projection'),
                (r'encoder_robot_state_input_proj', 'state_projection'),
                (r'encoder_env_state_input_proj', 'environment_projection'),
                (r'encoder\.norm', 'encoder_norm'),
                (r'decoder\.norm', 'decoder_norm'),
                (r'action_head', 'action_head'),
            ),
        ),
    ),
    packed=(*_packed('encoder', _ENCODER), *_packed('decoder', _DECODER)),
    # The encoder of actions is for training alone.
    unused=(re.compile(r'vae_encoder.*'), re.compile(r'encoder_latent_input_proj\.weight')),
)


class ActReader(CheckpointReader):
    names = NAMES
    known = (
        *LEROBOT_KEYS,
        'vision_backbone|pretrained_backbone_weights|dim_model|dim_feedforward',
        'n_(encoder|decoder|vae_encoder)_layers|use_vae|latent_dim|kl_weight',
        '(input|output)_normalization_modes(\\..*)?',
    )
    lerobot = (
        LeRobotPolicy(
            type='act',
            template=None,
            images=ImageSpec(padding='none', resample='none'),
            steps=(),
            fixed={},
            has_state_token=True,
            padded=False,
            of_2024='n_vae_encoder_layers',
            source=('vision_backbone', 'temporal_ensemble_coeff', 'n_action_steps'),
        ),
    )

    def sizes(self, source: Source) -> MakeDims:
        folder, tensors, facts, _, missing = source
        shape, config = Shapes(tensors, 'ACT'), read_config(folder)
        dilated = bool(config.get('replace_final_stride_with_dilation', (bool, int), False))
        backbone = resnet_dims(shape, 'vision.backbone', dilated=dilated)
        heads, activation = config.count('n_heads'), _activation(config)
        pre_norm = config.get('pre_norm', bool, False)
        encoder, decoder = (_stack_dims(shape, stack, heads) for stack in ('encoder', 'decoder'))
        action_dim, _ = shape('action_head.weight', 2)
        state_dim, environment_dim = _state_dims(shape)
        check_stated(
            missing,
            ('chunk_size', facts.horizon, shape('action_positions', 2)[0]),
            ('action dimensions', facts.action_dim, action_dim),
            ('state dimensions', facts.state_dim, state_dim),
            ('environment state dimensions', facts.environment_length, environment_dim),
        )
        sizes = facts.image_sizes
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: ActDims(
                backbone=backbone,
                encoder=encoder,
                decoder=decoder,
                cameras=cameras,
                images=sizes[:1] if len(set(sizes)) == 1 else sizes,
                horizon=horizon,
                action_dim=action_dim,
                state_dim=state_dim,
                environment_dim=environment_dim,
                activation=activation,
                pre_norm=pre_norm,
            )
        )


def _stack_dims(shape: Shapes, stack: str, heads: int) -> StackDims:
    mlp_dim, width = shape(f'{stack}.0.mlp.fc1.weight', 2)
    return StackDims(width=width, depth=shape.depth(stack), num_heads=heads, mlp_dim=mlp_dim)


def _state_dims(shape: Shapes) -> tuple[int, int]:
    """Return the length of the whole state, and that of the environment's part."""
    environment = 'environment_projection.weight'
    environment_dim = shape(environment, 2)[1] if environment in shape else 0
    return shape('state_projection.weight', 2)[1] + environment_dim, environment_dim


def _activation(config: JsonMapping) -> Activation:
    found = config.get('feedforward_activation', str, 'relu')
    if found not in get_args(Activation):
        raise config.error(
            'feedforward_activation',
            f"'{found}' is not supported; expected one of {', '.join(get_args(Activation))}",
        )
    return cast(Activation, found)


READER = ActReader()
