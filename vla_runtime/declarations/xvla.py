"""X-VLA (arXiv 2510.10274): Florence-2 and a soft-prompted transformer, 0.88 billion parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np

from vla_runtime.family.declaration import Family, RowInput, prompt_inputs, state_input
from vla_runtime.family.dimensions import Part, Shown, TensorShapes, check_heads, depth_of, size
from vla_runtime.family.noise_schedule import Renoising
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of X-VLA, a preset for the published model. Pure numbers.

ActionMode = Literal['ee6d', 'joint', 'so101_bimanual', 'agibot_ee6d', 'franka_joint7', 'auto']


class ActionSpace(NamedTuple):
    """What an action mode means.

    Attributes:
        actions: leading numbers of the network's actions that a robot gets; None: any.
        grippers: numbers that the network does not see, and gives as logits of 0 (open) to 1.
        arms: the actions are those of so many arms, one behind the other; a robot may have the
            first alone.
    """

    actions: int | None
    grippers: tuple[int, ...] = ()
    arms: int = 1


ACTION_SPACES: dict[ActionMode, ActionSpace] = {
    'ee6d': ActionSpace(20, (9, 19), arms=2),
    'joint': ActionSpace(14, (6, 13), arms=2),
    'so101_bimanual': ActionSpace(12, (5, 11), arms=2),
    'agibot_ee6d': ActionSpace(20, arms=2),
    'franka_joint7': ActionSpace(7),
    'auto': ActionSpace(None),
}


def _of_stages(tensor: str, axis: int, axes: int = 4) -> Shown:
    """An axis of a tensor of each stage."""

    def read(shape: TensorShapes) -> tuple[int, ...]:
        stages = range(shape.depth('convs'))
        return tuple(shape(tensor.format(stage), axes)[axis] for stage in stages)

    return Shown(read)


def _blocks(shape: TensorShapes) -> tuple[int, ...]:
    return tuple(shape.depth(f'stages.{stage}') for stage in range(shape.depth('convs')))


@dataclass(frozen=True)
class DavitDims:
    """A DaViT tower (arXiv 2204.03645) and what makes image tokens of its last map.

    Attributes:
        channels, blocks, num_heads, groups, kernels, strides, paddings, pre_norms: of each stage:
            width, blocks, heads inside windows, groups of channels, and its convolution's sizes;
            with `pre_norms` the norm is before the convolution.
        window: edge of the windows, in places.
        positions: places of a map's edge that have a position, at most.
        input_major: the projection's matrix is stored (inputs, outputs).
    """

    channels: Annotated[tuple[int, ...], _of_stages('convs.{}.conv.weight', 0)]
    blocks: Annotated[tuple[int, ...], Shown(_blocks)]
    num_heads: tuple[int, ...]
    groups: tuple[int, ...]
    mlp_dim: Annotated[tuple[int, ...], _of_stages('stages.{}.0.spatial.mlp.fc1.weight', 0, 2)]
    kernels: Annotated[tuple[int, ...], _of_stages('convs.{}.conv.weight', 2)]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    pre_norms: tuple[bool, ...]
    window: int
    positions: Annotated[int, size('row_positions')]
    qkv_bias: Annotated[bool, Shown(lambda s: 'stages.0.0.spatial.attention.q.bias' in s)] = True
    input_major: bool = False

    def __post_init__(self) -> None:
        stages = len(self.channels)
        for name in (
            *('blocks', 'num_heads', 'groups', 'mlp_dim', 'kernels', 'strides', 'paddings'),
            'pre_norms',
        ):
            if len(getattr(self, name)) != stages:
                raise ValueError(
                    f'vision.{name} {list(getattr(self, name))} where one for each of the {stages} '
                    'stages (vision.channels) is expected'
                )
        for name in ('num_heads', 'groups', 'strides'):
            counts = getattr(self, name)
            bad = [n for n in counts if n < 1]
            if bad or (name != 'strides' and any(map(math.fmod, self.channels, counts))):
                raise ValueError(
                    f'vision.{name} {list(counts)} where divisors of the channels '
                    f'{list(self.channels)} are expected'
                )
        if self.window < 1:
            raise ValueError(f'vision.window {self.window} where at least 1 is expected')

    def map_sizes(self, image: tuple[int, int]) -> list[tuple[int, int]]:
        """Height and width of each stage's map of an image of this height and width."""
        found = []
        for kernel, stride, padding in zip(self.kernels, self.strides, self.paddings, strict=True):
            high, wide = ((side + 2 * padding - kernel) // stride + 1 for side in image)
            image = high, wide
            found.append(image)
        return found


@dataclass(frozen=True)
class BartDims:
    """BART's encoder (arXiv 1910.13461); `scaled`: words are multiplied by the width's root."""

    width: Annotated[int, size('embedding.weight', axis=1)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    # Two rows of the table are of no place.
    positions: Annotated[int, Shown(lambda s: s('position_embedding', 2)[0] - 2)]
    scaled: bool = False

    def __post_init__(self) -> None:
        check_heads('text', self)


@dataclass(frozen=True)
class SoftPromptedDims:
    """The transformer over actions, features and the soft prompts of a domain.

    `by_domain`: features go through layers of the domain too.
    """

    width: Annotated[int, size('blocks.0.mlp.fc1.weight', axis=1)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    positions: Annotated[int, size('position_embedding', axis=1, axes=3, stated='max_len_seq')]
    time_width: int
    soft_prompts: Annotated[int, size('soft_prompts', absent=0, stated='len_soft_prompts')] = 0
    by_domain: bool = False

    def __post_init__(self) -> None:
        check_heads('head', self)


@dataclass(frozen=True)
class XvlaDims:
    """All that fixes an X-VLA policy in one of its domains.

    Attributes:
        image: (height, width) of all cameras' images.
        empty_views: views of zeros behind those of the cameras.
        sees_padding: padding behind a prompt is read as words are; else it is not there.
        action_mode: what the actions are.
    """

    vision: DavitDims
    text: BartDims
    head: Annotated[SoftPromptedDims, Part('')]
    vocabulary: Annotated[int, size('text.embedding.weight')]
    image: tuple[int, int]
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: Annotated[int, size('action_decoder.bias', axes=1, stated='action dimensions')]
    action_mode: ActionMode
    state_dim: int = 0
    empty_views: int = 0
    sees_padding: bool = True

    def __post_init__(self) -> None:
        last = self.vision.map_sizes(self.image)[-1]
        if not 1 <= min(last) <= max(last) <= self.vision.positions:
            raise ValueError(
                f'image {self.image}: its map of {last} places where 1 to {self.vision.positions} '
                'a side (vision.positions) are expected'
            )
        if self.features_length > self.text.positions:
            raise ValueError(
                f'prompt_length {self.prompt_length}: with the {self.image_tokens} tokens of an '
                f'image more than text.positions {self.text.positions}'
            )
        placed = self.horizon + self.prefix_length - self.head.soft_prompts
        if placed > self.head.positions:
            raise ValueError(
                f'head.positions {self.head.positions} where {placed} are needed: {self.horizon} '
                f'actions, {self.features_length} features, and the tokens of {self.views - 1} '
                'further views'
            )
        space = ACTION_SPACES[self.action_mode]
        if self.action_dim < max(space.actions or 0, *(n + 1 for n in space.grippers), 1):
            raise ValueError(
                f"action_dim {self.action_dim} is less than action_mode '{self.action_mode}' has"
            )
        if space.grippers and self.state_dim <= max(space.grippers):
            raise ValueError(
                f"state_dim {self.state_dim}: action_mode '{self.action_mode}' has grippers in it, "
                f'up to number {max(space.grippers)}'
            )

    @property
    def views(self) -> int:
        """Views that the transformer sees."""
        return self.cameras + self.empty_views

    @property
    def grippers(self) -> tuple[int, ...]:
        return ACTION_SPACES[self.action_mode].grippers

    @property
    def scheduler(self) -> Renoising:
        return Renoising()

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        return (self.image,) * self.cameras

    @property
    def image_tokens(self) -> int:
        """N: a mean, and the places of the last map."""
        return 1 + math.prod(self.vision.map_sizes(self.image)[-1])

    @property
    def features_length(self) -> int:
        """Tokens of the encoder: those of the first view, and the prompt."""
        return self.image_tokens + self.prompt_length

    @property
    def prefix_length(self) -> int:
        """P: the encoder's features, the other views, the soft prompts."""
        return self.features_length + (self.views - 1) * self.image_tokens + self.head.soft_prompts


# The published size (2toINF/X-VLA-Pt on Florence-2-large), with two cameras.
XVLA = XvlaDims(
    vision=DavitDims(
        channels=(256, 512, 1024, 2048),
        blocks=(1, 1, 9, 1),
        num_heads=(8, 16, 32, 64),
        groups=(8, 16, 32, 64),
        mlp_dim=(1024, 2048, 4096, 8192),
        kernels=(7, 3, 3, 3),
        strides=(4, 2, 2, 2),
        paddings=(3, 1, 1, 1),
        pre_norms=(False, True, True, True),
        window=12,
        positions=50,
    ),
    text=BartDims(width=1024, depth=12, num_heads=16, mlp_dim=4096, positions=4096),
    head=SoftPromptedDims(
        width=1024,
        depth=24,
        num_heads=16,
        mlp_dim=4096,
        positions=512,
        time_width=32,
        soft_prompts=32,
    ),
    vocabulary=51289,
    image=(224, 224),
    cameras=2,
    prompt_length=64,
    horizon=30,
    action_dim=20,
    action_mode='ee6d',
    state_dim=20,
    empty_views=1,
)


# --------------------------------------------------------------------------------------------------
# The time code of X-VLA's transformer, in numpy.

# Ratio of the longest wavelength to the shortest.
WAVELENGTHS = 100.0


class TimeCode:
    """Cosines, then sines, of the flow time, from 1 (noise) to 1/N."""

    def __init__(self, dims: XvlaDims, weights: SafetensorsReader) -> None:
        self.width = dims.head.time_width

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """(N,) flow times to (N, time_width) float32; zero at the end of an odd width."""
        half = self.width // 2
        exponents = np.arange(half, dtype=np.float32) / np.float32(max(half, 1))
        frequencies = np.exp(np.float32(-math.log(WAVELENGTHS)) * exponents)
        angles = np.asarray(times, np.float32)[:, None] * frequencies
        odd = np.zeros((len(angles), self.width % 2), np.float32)
        return np.concatenate([np.cos(angles), np.sin(angles), odd], axis=1)


# --------------------------------------------------------------------------------------------------


def _head_inputs(dims: XvlaDims) -> dict[str, RowInput]:
    return state_input(dims) if dims.state_dim else {}


FAMILIES = (
    Family(
        name='xvla',
        title='X-VLA (arXiv 2510.10274)',
        head='diffusion',
        dims=XvlaDims,
        presets={'xvla': XVLA},
        templates={'bart': PromptLayout('{task}', closing='</s>')},
        prefix_inputs=prompt_inputs,
        head_inputs=_head_inputs,
        time_table=TimeCode,
    ),
)
