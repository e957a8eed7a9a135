"""Checkpoints of ACT: LeRobot's folders.

The folder lacks only names, units and rate. Its `pretrained_backbone_weights` are those that
training began with; the folder's own tensors are newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from vla_convert.checkpoints.dims import MakeDims
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames, resnet_names, under
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations.act import Activation
from vla_runtime.files.json_file import JsonMapping


def _stack(name: str, attentions: Mapping[str, str]) -> dict[str, str]:
    """Layers of a transformer of PyTorch's, whose attention stacks query, key and value."""
    layers = {'norm{1|2|3}.*': 'norm{1|2|3}.*', 'linear{1|2}.*': 'mlp.fc{1|2}.*'}
    for theirs, ours in attentions.items():
        layers[f'{theirs}.in_proj_{{weight|bias}}'] = f'{ours}.{{q,k,v}}.{{weight|bias}}'
        layers[f'{theirs}.out_proj.*'] = f'{ours}.out.*'
    return under(f'{name}.layers.{{i}}.', f'{name}.{{i}}.', layers)


NAMES = TensorNames(
    rows={
        **resnet_names('backbone.', 'vision.backbone.', ('conv1', 'bn1'), 'layer{}', first=1),
        **_stack('encoder', {'self_attn': 'attention'}),
        **_stack('decoder', {'self_attn': 'self_attention', 'multihead_attn': 'cross_attention'}),
        # At inference the latent is zero, so its token is this bias.
        'encoder_latent_input_proj.bias': 'latent',
        'encoder_1d_feature_pos_embed.weight': 'vector_positions',
        'decoder_pos_embed.weight': 'action_positions',
        'encoder_img_feat_input_proj.*': 'vision.projection.*',
        'encoder_robot_state_input_proj.*': 'state_projection.*',
        'encoder_env_state_input_proj.*': 'environment_projection.*',
        '{encoder|decoder}.norm.*': '{encoder|decoder}_norm.*',
        'action_head.*': 'action_head.*',
    },
    # The encoder of actions is for training alone.
    unused=('vae_encoder*', 'encoder_latent_input_proj.weight'),
)


class ActReader(CheckpointReader):
    names = NAMES
    known = (
        'vision_backbone|pretrained_backbone_weights|dim_model|dim_feedforward',
        'n_(encoder|decoder|vae_encoder)_layers|use_vae|latent_dim|kl_weight',
        '(input|output)_normalization_modes(\\..*)?',
    )
    lerobot = (
        LeRobotPolicy(
            type='act',
            template=None,
            images=ImageSpec(padding='none', resample='none'),
            source=('vision_backbone', 'temporal_ensemble_coeff', 'n_action_steps'),
        ),
    )

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        # A config.json of 2024 names no type.
        if 'type' not in config and 'n_vae_encoder_layers' in config:
            return self.lerobot[0]
        return super().policy(config)

    def sizes(self, source: Source) -> MakeDims | None:
        config, sizes = read_config(source.folder), source.facts.image_sizes
        heads = config.count('n_heads')
        given = {
            'backbone.dilated': bool(
                config.get('replace_final_stride_with_dilation', (bool, int), False)
            ),
            'encoder.num_heads': heads,
            'decoder.num_heads': heads,
            'images': sizes[:1] if len(set(sizes)) == 1 else sizes,
            'activation': _activation(config),
            'pre_norm': config.get('pre_norm', bool, False),
        }
        return self.dims(source, given)


def _activation(config: JsonMapping) -> Activation:
    found = config.get('feedforward_activation', str, 'relu')
    if found not in get_args(Activation):
        raise config.error(
            'feedforward_activation',
            f"'{found}' is not supported; expected one of {', '.join(get_args(Activation))}",
        )
    return cast(Activation, found)


READER = ActReader()
