"""Diffusion Policy (arXiv 2303.04137): a U-Net denoises the actions, without language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from vla_runtime.family.declaration import Family, no_inputs, states_input
from vla_runtime.family.dimensions import HistoryDims, Part, ResNetDims, Shown, TensorShapes, size
from vla_runtime.family.flow_time import layer_rows, linear_rows, time_code_rows
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.files.safetensors_reader import SafetensorsReader

# --------------------------------------------------------------------------------------------------
# The sizes of Diffusion Policy: one dataclass, a preset for the published model. Pure numbers.

# Numbers of a keypoint: its place across and down.
_PLACE = 2
# Every level but the last halves the actions' axis.
_HALVES = 2


def _channels(shape: TensorShapes) -> tuple[int, ...]:
    names = (f'down.{level}.0.conv1.conv.weight' for level in range(shape.depth('down')))
    return tuple(shape(name, 3)[0] for name in names)


def _is_scaled(shape: TensorShapes) -> bool:
    channels = shape('down.0.0.conv1.conv.weight', 3)[0]
    return shape('down.0.0.modulation.weight', 2)[0] == 2 * channels


@dataclass(frozen=True)
class UNetDims:
    """A U-Net over the actions of a chunk, modulated by time and observation (arXiv 1709.07871).

    Attributes:
        channels: channels of each level.
        kernel_size: actions that a convolution sees, odd.
        groups: groups of the norms; the last block has 8 whatever this is.
        scaled: the modulation scales and shifts; else it shifts alone.
    """

    channels: Annotated[tuple[int, ...], Shown(_channels, stated='down_dims')]
    kernel_size: Annotated[
        int, size('down.0.0.conv1.conv.weight', axis=2, axes=3, stated='kernel_size')
    ]
    groups: int
    time_width: Annotated[int, size('time2.weight', stated='diffusion_step_embed_dim')]
    scaled: Annotated[bool, Shown(_is_scaled)]

    def __post_init__(self) -> None:
        if not self.channels:
            raise ValueError('unet.channels is empty; at least one level is expected')
        if self.kernel_size % 2 == 0:
            raise ValueError(f'unet.kernel_size {self.kernel_size} where an odd number is expected')
        if self.time_width % 2 or self.time_width < 4:
            raise ValueError(
                f'unet.time_width {self.time_width} where an even number of at least 4 is expected'
            )
        odd = [count for count in self.channels if count % self.groups]
        if odd:
            raise ValueError(
                f'unet.channels: {odd[0]} is not a multiple of the {self.groups} groups of its norm'
            )
        if self.channels[0] % LAST_GROUPS:
            raise ValueError(
                f'unet.channels: {self.channels[0]} is not a multiple of the {LAST_GROUPS} groups '
                'of the last norm'
            )

    @property
    def shrinks(self) -> int:
        """Actions of a chunk must be a multiple of this."""
        return int(_HALVES ** (len(self.channels) - 1))

    @property
    def block_channels(self) -> tuple[int, ...]:
        """Channels of every modulated block, in the order in which they run."""
        down = [count for count in self.channels for _ in range(2)]
        up = [count for count in self.channels[-2::-1] for _ in range(2)]
        return (*down, self.channels[-1], self.channels[-1], *up)

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the modulated blocks in the network, in that order."""
        levels = range(len(self.channels))
        down = [f'down.{level}.{index}' for level in levels for index in range(2)]
        up = [f'up.{level}.{index}' for level in levels[:-1] for index in range(2)]
        return (*down, 'middle.0', 'middle.1', *up)

    @property
    def modulations(self) -> tuple[int, ...]:
        """Numbers that modulate each block."""
        return tuple(count * (2 if self.scaled else 1) for count in self.block_channels)


LAST_GROUPS = 8


@dataclass(frozen=True)
class DiffusionDims(HistoryDims):
    """All that fixes a diffusion policy.

    Attributes:
        separate_encoders: every camera has a residual network of its own.
        state_dim: measured state of a step, that of the environment included.
        environment_dim: numbers at the end of the state that are of the environment.
    """

    backbone: Annotated[ResNetDims, Part('vision.encoder.backbone.')]
    keypoints: Annotated[
        int,
        size('vision.encoder.pool.maps.weight', axes=4, stated='spatial_softmax_num_keypoints'),
    ]
    separate_encoders: bool
    image: tuple[int, int]
    unet: UNetDims
    scheduler: NoiseScheduler
    cameras: int
    observation_steps: int
    horizon: int
    real_horizon: int
    action_dim: Annotated[int, size('unet.out.weight', axes=3, stated='action dimensions')]
    state_dim: int
    environment_dim: int = 0
    resize: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_history()
        if self.horizon % self.unet.shrinks:
            raise ValueError(
                f'horizon {self.horizon} is not a multiple of {self.unet.shrinks}, by which the '
                f'{len(self.unet.channels)} levels of unet.channels shrink it'
            )
        if self.environment_dim >= self.state_dim:
            raise ValueError(
                f'environment_dim {self.environment_dim} leaves nothing of the state_dim '
                f'{self.state_dim} for the measured joints'
            )

    @property
    def image_width(self) -> int:
        """Numbers of an image's features: the places of its keypoints."""
        return self.keypoints * _PLACE

    @property
    def step_width(self) -> int:
        """Numbers of a step of the observation: state, images, environment."""
        return self.state_dim + self.own_cameras * self.image_width

    @property
    def prefix_length(self) -> int:
        """P: the images and the states of all steps."""
        return self.cameras + self.observation_steps


# PushT, as LeRobot published it (lerobot/diffusion_pusht).
PUSHT = DiffusionDims(
    backbone=ResNetDims(stem=64, channels=(64, 128, 256, 512), blocks=(2, 2, 2, 2), norm='group'),
    keypoints=32,
    separate_encoders=False,
    image=(96, 96),
    crop=(84, 84),
    unet=UNetDims(channels=(512, 1024, 2048), kernel_size=5, groups=8, time_width=128, scaled=True),
    scheduler=NoiseScheduler('ddpm', 100, 'squaredcos_cap_v2', 1e-4, 0.02, clip=1.0),
    cameras=2,
    observation_steps=2,
    horizon=16,
    real_horizon=8,
    action_dim=2,
    state_dim=2,
)


# --------------------------------------------------------------------------------------------------
# Time table of Diffusion Policy: what a training step adds to the modulations, in numpy.


class UNetTimes:
    """Rows of the U-Net's modulations by the training step.

    As `models.diffusion.UNet.time_modulation`.
    """

    def __init__(self, dims: DiffusionDims, weights: SafetensorsReader) -> None:
        self._unet, self._weights = dims.unet, weights

    @property
    def width(self) -> int:
        return sum(self._unet.modulations)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        width = self._unet.time_width
        seen = mish(self.features(times))
        parts = []
        for name in self._unet.block_names:
            weight = self._weights.read(f'unet.{name}.modulation.weight')[:, :width]
            parts.append(linear_rows(seen, weight, np.zeros(len(weight), np.float32)))
        return np.concatenate(parts, axis=1)

    def features(self, times: np.ndarray) -> np.ndarray:
        """Return the time features (N, time_width) of training steps (N,)."""
        code = time_code_rows(times, self._unet.time_width)
        return layer_rows(
            mish(layer_rows(code, self._weights, 'unet.time1')), self._weights, 'unet.time2'
        )


def mish(x: np.ndarray) -> np.ndarray:
    """x tanh(log(1 + exp x)) (arXiv 1908.08681), in float64."""
    wide = x.astype(np.float64)
    return (wide * np.tanh(np.logaddexp(wide, 0.0))).astype(np.float32)


# --------------------------------------------------------------------------------------------------

FAMILIES = (
    Family(
        name='diffusion',
        title='Diffusion Policy (arXiv 2303.04137)',
        head='diffusion',
        dims=DiffusionDims,
        presets={'diffusion': PUSHT},
        templates={},
        prefix_inputs=states_input,
        head_inputs=no_inputs,
        time_table=UNetTimes,
        flow_steps=100,
    ),
)
