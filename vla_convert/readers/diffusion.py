"""Checkpoints of Diffusion Policy: LeRobot's folders.

The tensors show whether each camera has an encoder, and its norms: LeRobot's own reader leaves
weights random where config.json lacks the one or means the other.
"""

from __future__ import annotations

from vla_convert.checkpoints.dims import MakeDims, Shapes, check_stated, renamed
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, scheduler_steps
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames, resnet_names, under
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.family.scheduler_config import common_image, pair, read_scheduler
from vla_runtime.files.json_file import JsonMapping

# torchvision's modules in LeRobot's sequence: convolution, norm, ReLU, pooling, four stages.
_STEM, _FIRST_STAGE = ('0', '1'), 4
# What LeRobot puts before the names, and PyTorch where the U-Net was compiled.
_ENCODER, _UNET = '(diffusion.)rgb_encoder.', '(diffusion.)unet.(_orig_mod.)'


def _encoder(theirs: str, ours: str) -> dict[str, str]:
    return {
        **resnet_names(f'{theirs}backbone.', f'{ours}backbone.', _STEM, '{}', first=_FIRST_STAGE),
        f'{theirs}pool.pos_grid': f'{ours}pool.grid',
        f'{theirs}pool.nets.*': f'{ours}pool.maps.*',
        f'{theirs}out.*': f'{ours}out.*',
    }


_BLOCK = {
    'conv{1|2}.block.0.*': 'conv{1|2}.conv.*',
    'conv{1|2}.block.1.*': 'conv{1|2}.norm.*',
    'cond_encoder.1.*': 'modulation.*',
    'residual_conv.*': 'shortcut.*',
}
NAMES = TensorNames(
    rows={
        **_encoder(_ENCODER, 'vision.encoder.'),
        **_encoder(f'{_ENCODER}{{c}}.', 'encoders.{c}.'),
        **under(f'{_UNET}down_modules.{{l}}.{{0|1}}.', 'unet.down.{l}.{0|1}.', _BLOCK),
        **under(f'{_UNET}mid_modules.{{0|1}}.', 'unet.middle.{0|1}.', _BLOCK),
        **under(f'{_UNET}up_modules.{{l}}.{{0|1}}.', 'unet.up.{l}.{0|1}.', _BLOCK),
        **under(
            _UNET,
            'unet.',
            {
                'diffusion_step_encoder.1.*': 'time1.*',
                'diffusion_step_encoder.3.*': 'time2.*',
                'down_modules.{l}.2.*': 'shrink.{l}.*',
                'up_modules.{l}.2.*': 'grow.{l}.*',
                'final_conv.0.block.0.*': 'last.conv.*',
                'final_conv.0.block.1.*': 'last.norm.*',
                'final_conv.1.*': 'out.*',
            },
        ),
    },
    unused=(f'{_ENCODER}*.num_batches_tracked',),
)


class DiffusionReader(CheckpointReader):
    names = NAMES
    known = (
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
            keys={
                'horizon': 'horizon',
                'observation_steps': 'n_obs_steps',
                'real_horizon': 'n_action_steps',
            },
            source=('vision_backbone', 'n_action_steps', 'noise_scheduler_type'),
        ),
    )

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        # A config.json of 2024 names no type.
        if 'type' not in config and 'down_dims' in config:
            return self.lerobot[0]
        return super().policy(config)

    def read(self, draft: Draft) -> None:
        super().read(draft)
        scheduler_steps(draft)

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, _, missing = source
        config, separate = read_config(folder), 'encoders.0.out.weight' in tensors
        # Encoders of several cameras are of the sizes of the first.
        tensors = renamed(tensors, 'encoders.0.', 'vision.encoder.')
        shape = Shapes(tensors)
        cameras, steps = len(facts.image_sizes), facts.observation_steps
        resize, crop = frames_of(config)
        norm = 'vision.encoder.backbone.stem.norm.running_mean'
        state_dim = facts.state_dim or 0
        make = self.dims(
            source._replace(tensors=tensors),
            {
                'backbone.norm': 'batch' if norm in shape else 'group',
                'separate_encoders': separate,
                'image': common_image(config, facts.image_sizes),
                'resize': resize,
                'crop': crop,
                'unet.groups': config.count('n_groups'),
                'scheduler': read_scheduler(config),
                'observation_steps': steps,
                'real_horizon': facts.real_horizon or 1,
                'state_dim': state_dim,
                'environment_dim': facts.environment_length,
            },
            config=config,
        )
        keypoints = shape('vision.encoder.pool.maps.weight', 4)[0]
        observed = shape('unet.down.0.0.modulation.weight', 2)[1] - shape('unet.time2.weight', 2)[0]
        check_stated(
            missing,
            'numbers of an observation (state, cameras and environment of all steps)',
            steps * (state_dim + cameras * 2 * keypoints),
            observed,
        )
        if separate:
            check_stated(missing, 'encoders', cameras, Shapes(source.tensors).depth('encoders'))
        return make


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
