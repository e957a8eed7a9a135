"""Checkpoints of Diffusion Policy: LeRobot's folders.

The tensors show whether each camera has an encoder, and its norms: LeRobot's own reader leaves
weights random where config.json lacks the one or means the other.
"""

from __future__ import annotations

import re
from typing import Literal

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
from vla_runtime.families.blocks.scheduler_config import common_image, pair, read_scheduler
from vla_runtime.families.diffusion.declaration import DiffusionDims, UNetDims
from vla_runtime.files.json_file import JsonMapping

_Rows = tuple[tuple[re.Pattern[str], str], ...]
# torchvision's modules in LeRobot's sequence: convolution, norm, ReLU, pooling, four stages.
_STEM, _FIRST_STAGE = (r'0', r'1'), 4
# What LeRobot puts before the names, and PyTorch where the U-Net was compiled.
_START, _COMPILED = r'(?:diffusion\.)?', r'(?:_orig_mod\.)?'


def _encoder_rows(theirs: str, ours: str) -> _Rows:
    return (
        *resnet_rows(rf'{theirs}backbone\.', f'{ours}backbone.', _STEM, r'{}', first=_FIRST_STAGE),
        row(rf'{theirs}pool\.pos_grid', f'{ours}pool.grid'),
        *rows_under(theirs, ours, ((r'pool\.nets', 'pool.maps'), (r'out', 'out'))),
    )


def _block_rows(theirs: str, ours: str) -> _Rows:
    parts = [
        (rf'conv{number}\.block\.{index}', f'conv{number}.{part}')
        for number in (1, 2)
        for index, part in enumerate(('conv', 'norm'))
    ]
    parts += [(r'cond_encoder\.1', 'modulation'), (r'residual_conv', 'shortcut')]
    return rows_under(rf'{_START}unet\.{_COMPILED}{theirs}\.', f'unet.{ours}.', parts)


NAMES = TensorNames(
    rows=(
        *_encoder_rows(rf'{_START}rgb_encoder\.', 'vision.encoder.'),
        *_encoder_rows(rf'{_START}rgb_encoder\.(?P<c>\d+)\.', r'encoders.\g<c>.'),
        *_block_rows(r'down_modules\.(?P<l>\d+)\.(?P<i>[01])', r'down.\g<l>.\g<i>'),
        *_block_rows(r'mid_modules\.(?P<i>[01])', r'middle.\g<i>'),
        *_block_rows(r'up_modules\.(?P<l>\d+)\.(?P<i>[01])', r'up.\g<l>.\g<i>'),
        *rows_under(
            rf'{_START}unet\.{_COMPILED}',
            'unet.',
            (
                (r'diffusion_step_encoder\.1', 'time1'),
                (r'diffusion_step_encoder\.3', 'time2'),
                (r'down_modules\.(?P<l>\d+)\.2', r'shrink.\g<l>'),
                (r'up_modules\.(?P<l>\d+)\.2', r'grow.\g<l>'),
                (r'final_conv\.0\.block\.0', 'last.conv'),
                (r'final_conv\.0\.block\.1', 'last.norm'),
                (r'final_conv\.1', 'out'),
            ),
        ),
    ),
    unused=(re.compile(rf'{_START}rgb_encoder\..*\.num_batches_tracked'),),
)


class DiffusionReader(CheckpointReader):
    names = NAMES
    known = (
        *LEROBOT_KEYS,
        'vision_backbone|pretrained_backbone_weights|use_group_norm',
        'use_separate_rgb_encoder_per_camera|use_film_scale_modulation',
        'crop_(is_random|shape|ratio)|clip_sample_range',
        '(input|output)_normalization_modes(\\..*)?',
    )
    lerobot = (
        LeRobotPolicy(
            type='diffusion',
            template=None,
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
            of_2024='down_dims',
            source=('vision_backbone', 'n_action_steps', 'noise_scheduler_type'),
        ),
    )

    def sizes(self, source: Source) -> MakeDims:
        folder, tensors, facts, _, missing = source
        shape, config = Shapes(tensors, 'Diffusion Policy'), read_config(folder)
        separate = 'encoders.0.out.weight' in shape
        encoder = 'encoders.0' if separate else 'vision.encoder'
        norms = f'{encoder}.backbone.stem.norm.running_mean'
        norm: Literal['batch', 'group'] = 'batch' if norms in shape else 'group'
        backbone = resnet_dims(shape, f'{encoder}.backbone', norm=norm)
        unet = _unet(shape, config)
        scheduler, steps = read_scheduler(config), facts.observation_steps
        image = common_image(config, facts.image_sizes)
        resize, crop = frames_of(config)
        own = len(facts.image_sizes)
        keypoints = shape(f'{encoder}.pool.maps.weight', 4)[0]
        state_dim = facts.state_dim or 0
        observed = shape('unet.down.0.0.modulation.weight', 2)[1] - unet.time_width
        check_stated(
            missing,
            ('action dimensions', facts.action_dim, shape('unet.out.weight', 3)[0]),
            (
                'numbers of an observation (state, cameras and environment of all steps)',
                steps * (state_dim + own * 2 * keypoints),
                observed,
            ),
            ('encoders', own if separate else 1, shape.depth('encoders') if separate else 1),
            ('down_dims', config.get('down_dims', list, None), list(unet.channels)),
            ('kernel_size', config.get('kernel_size', int, None), unet.kernel_size),
            (
                'diffusion_step_embed_dim',
                config.get('diffusion_step_embed_dim', int, None),
                unet.time_width,
            ),
            (
                'spatial_softmax_num_keypoints',
                config.get('spatial_softmax_num_keypoints', int, None),
                keypoints,
            ),
        )
        real_horizon = facts.real_horizon or 1
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: DiffusionDims(
                backbone=backbone,
                keypoints=keypoints,
                separate_encoders=separate,
                image=image,
                resize=resize,
                crop=crop,
                unet=unet,
                scheduler=scheduler,
                cameras=cameras,
                observation_steps=steps,
                horizon=horizon,
                real_horizon=real_horizon,
                action_dim=shape('unet.out.weight', 3)[0],
                state_dim=state_dim,
                environment_dim=facts.environment_length,
            )
        )


def _unet(shape: Shapes, config: JsonMapping) -> UNetDims:
    levels = shape.depth('unet.down')
    channels = [shape(f'unet.down.{level}.0.conv1.conv.weight', 3)[0] for level in range(levels)]
    first, _, kernel = shape('unet.down.0.0.conv1.conv.weight', 3)
    modulation = shape('unet.down.0.0.modulation.weight', 2)[0]
    groups = config.count('n_groups')
    return checked_dims(
        lambda: UNetDims(
            channels=tuple(channels),
            kernel_size=kernel,
            groups=groups,
            time_width=shape('unet.time2.weight', 2)[0],
            scaled=modulation == 2 * first,
        )
    )


def frames_of(
    config: JsonMapping,
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Read (height, width) of resize and crop (a fraction of a resize); None for none."""
    resize = pair(config, 'resize_shape')
    if resize is None:
        return None, pair(config, 'crop_shape')
    share = config.get('crop_ratio', (int, float), 1.0)
    if not 0.0 < share <= 1.0:
        raise config.error('crop_ratio', f'{share} where a share above 0 and at most 1 is expected')
    if share == 1.0:
        return resize, None
    return resize, (int(resize[0] * share), int(resize[1] * share))


READER = DiffusionReader()
