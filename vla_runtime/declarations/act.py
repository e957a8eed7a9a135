"""ACT (arXiv 2304.13705): action chunking with a transformer, without language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vla_runtime.family.declaration import Family, NoTimes, no_inputs, state_input
from vla_runtime.family.dimensions import (
    Part,
    ResNetDims,
    Shown,
    TensorShapes,
    check_heads,
    depth_of,
    size,
)

# --------------------------------------------------------------------------------------------------
# The sizes of ACT: one dataclass, a preset for the published model. Pure numbers.

# LeRobot's other choice, `glu`, halves the width between the two linear layers and cannot run.
Activation = Literal['relu', 'gelu']


@dataclass(frozen=True)
class StackDims:
    """A transformer encoder or decoder."""

    width: Annotated[int, size('0.mlp.fc1.weight', axis=1)]
    depth: Annotated[int, depth_of()]
    num_heads: int
    mlp_dim: Annotated[int, size('0.mlp.fc1.weight')]


def _state_dim(shape: TensorShapes) -> int:
    environment = _ENVIRONMENT.read(shape)
    return environment + shape('state_projection.weight', 2)[1]


_ENVIRONMENT = size(
    'environment_projection.weight', axis=1, absent=0, stated='environment state dimensions'
)


@dataclass(frozen=True)
class ActDims:
    """All that fixes the shapes of an ACT policy.

    Attributes:
        images: (height, width) of the images in pixels: one for all cameras, or one for each.
        state_dim: measured state, that of the environment included.
        environment_dim: numbers at the end of the state that are a token of their own: the state of
            the environment; 0 without one.
        pre_norm: layer norms before attention and MLP, not after them.
    """

    backbone: Annotated[ResNetDims, Part('vision.backbone.')]
    encoder: StackDims
    decoder: StackDims
    cameras: int
    images: tuple[tuple[int, int], ...]
    horizon: Annotated[int, size('action_positions', stated='chunk_size')]
    action_dim: Annotated[int, size('action_head.weight', stated='action dimensions')]
    state_dim: Annotated[int, Shown(_state_dim, stated='state dimensions')]
    environment_dim: Annotated[int, _ENVIRONMENT] = 0
    activation: Activation = 'relu'
    pre_norm: bool = False

    def __post_init__(self) -> None:
        if len(self.images) not in (1, self.cameras):
            raise ValueError(
                f'images has {len(self.images)} sizes where 1, or one for each of the '
                f'{self.cameras} cameras is expected'
            )
        if self.encoder.width != self.decoder.width:
            raise ValueError(
                f'encoder.width is {self.encoder.width} but decoder.width {self.decoder.width}: '
                'the decoder reads what the encoder writes, so they must be equal'
            )
        if self.encoder.width % 4:
            raise ValueError(
                f'encoder.width {self.encoder.width} is not a multiple of 4; positions on a map '
                'are sines and cosines of its rows and columns'
            )
        for name, stack in (('encoder', self.encoder), ('decoder', self.decoder)):
            check_heads(name, stack)
        if self.environment_dim >= self.state_dim:
            raise ValueError(
                f'environment_dim {self.environment_dim} leaves nothing of the state_dim '
                f'{self.state_dim} for the measured joints'
            )

    @property
    def width(self) -> int:
        return self.encoder.width

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        return self.images * self.cameras if len(self.images) == 1 else self.images

    @property
    def map_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each camera's feature map; each of its places is an image token."""
        return tuple(self.backbone.map_size(size) for size in self.image_sizes)

    @property
    def vector_tokens(self) -> int:
        """Tokens before the images: latent, state and, where there is one, environment."""
        return 3 if self.environment_dim else 2

    @property
    def prefix_length(self) -> int:
        """P: tokens before the images, and the places of all feature maps."""
        return self.vector_tokens + sum(height * width for height, width in self.map_sizes)


# ALOHA's two arms and four cameras, in LeRobot's sizes: the published code reads one decoder layer.
ACT = ActDims(
    backbone=ResNetDims(stem=64, channels=(64, 128, 256, 512), blocks=(2, 2, 2, 2)),
    encoder=StackDims(width=512, depth=4, num_heads=8, mlp_dim=3200),
    decoder=StackDims(width=512, depth=1, num_heads=8, mlp_dim=3200),
    cameras=4,
    images=((480, 640),),
    horizon=100,
    action_dim=14,
    state_dim=14,
)


# --------------------------------------------------------------------------------------------------

FAMILIES = (
    Family(
        name='act',
        title='ACT (arXiv 2304.13705)',
        head='single',
        dims=ActDims,
        presets={'act': ACT},
        templates={},
        prefix_inputs=state_input,
        head_inputs=no_inputs,
        time_table=NoTimes,
    ),
)
