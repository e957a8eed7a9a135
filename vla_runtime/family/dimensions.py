"""Dimensions of shared blocks, the tensors that show a dimension, and the limits. Pure numbers.

A field of a dataclass of dimensions may say where a checkpoint shows it (`Annotated`):

    width: Annotated[int, size('patch_embedding.weight', axes=4)]

`vla_convert.checkpoints.dims` reads such fields; those without an annotation are given to it. Names
are those of our tensors, in a nested dataclass without its prefix (`Part`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast, get_args, get_type_hints

from vla_runtime.family.noise_schedule import MOST_TRAIN_STEPS

# --------------------------------------------------------------------------------------------------
# Where a checkpoint shows a dimension.


class TensorShapes(Protocol):
    """Shapes of a checkpoint's tensors by our names; ValueError for one that does not fit."""

    def __call__(self, name: str, *axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there, of one of these numbers of axes."""

    def __contains__(self, name: object) -> bool: ...

    def depth(self, stack: str) -> int:
        """Return the number of blocks of a stack such as `vision.blocks`."""


@dataclass(frozen=True)
class Shown:
    """What a function makes of the shapes of tensors.

    `stated`: what states it too: a key of the configuration, or a fact of the folder (`action
    dimensions`).
    """

    read: Callable[[TensorShapes], Any]
    stated: str = ''


def size(
    tensor: str, axis: int = 0, axes: int = 2, absent: int | None = None, stated: str = ''
) -> Shown:
    """Length of an axis of a tensor of so many axes.

    `absent`: length where there is no such tensor; None: it must be there.
    """

    def read(shape: TensorShapes) -> int:
        if absent is not None and tensor not in shape:
            return absent
        return shape(tensor, axes)[axis]

    return Shown(read, stated)


def depth_of(stack: str = '', *, first: str = '') -> Shown:
    """Blocks of a stack; without a name of the one whose prefix the dataclass has.

    `first`: tensor of the first block, of a stack that may have none.
    """

    def read(shape: TensorShapes) -> int:
        return 0 if first and f'{stack}.0.{first}' not in shape else shape.depth(stack)

    return Shown(read)


def squares_joined(layer: str, axes: int = 2, *, tower: str = '') -> Shown:
    """Edge of the square of patches that a layer joins; `tower`: prefix of the patches' tower."""

    def read(shape: TensorShapes) -> int:
        inputs, width = shape(layer, axes)[-1], shape(f'{tower}patch_embedding.weight', 2, 4, 5)[0]
        edge = math.isqrt(inputs // width)
        if width * edge**2 != inputs:
            raise ValueError(
                f'the {layer.removeprefix(tower).partition(".")[0]} takes {inputs} numbers, which '
                f'is no square of patches of {width} each'
            )
        return edge

    return Shown(read)


@dataclass(frozen=True)
class Share:
    """Length of a tensor's first axis for each of another field of the same dataclass.

    `even`: an odd share is refused where heads are asked for.
    """

    tensor: str
    among: str
    even: bool = False


@dataclass(frozen=True)
class Part:
    """Prefix of a nested dataclass's tensors; without this the field's name and a dot.

    `kv_heads_of`: field of another stack that has as many key/value heads.
    """

    prefix: str
    kv_heads_of: str = ''


@dataclass(frozen=True)
class Most:
    """Largest accepted value of a field, where it is not that of its name (`LIMITS`)."""

    limit: int


class DimField(NamedTuple):
    """A field of a dataclass of dimensions.

    Attributes:
        notes: its annotations.
        part: dataclass nested in it; `optional`: or None.
        required: it has no default.
    """

    name: str
    notes: tuple[Any, ...]
    part: type | None
    optional: bool
    required: bool


@cache
def dim_fields(dims: type) -> tuple[DimField, ...]:
    hints = get_type_hints(dims, include_extras=True)
    found = []
    for field in fields(dims):
        hint = hints[field.name]
        notes = getattr(hint, '__metadata__', ())
        bare = get_args(hint)[0] if notes else hint
        choices = get_args(bare) or (bare,)
        part = next((cast(type, one) for one in choices if is_dataclass(one)), None)
        required = field.default is MISSING and field.default_factory is MISSING
        found.append(DimField(field.name, notes, part, type(None) in choices, required))
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# Largest accepted values, by the name of the field in whatever dataclass.

LIMITS = {
    'width': 16384,
    'depth': 512,
    'mlp_dim': 131072,
    'num_heads': 1024,
    'num_kv_heads': 1024,
    'head_dim': 1024,
    'image_size': 4096,
    'patch_size': 1024,
    'pixel_shuffle': 64,
    'merge': 64,
    'positions': 4096,
    'window': 4096,
    'text_width': 16384,
    'time_width': 16384,
    'head_width': 131072,
    'head_blocks': 64,
    'projector_dim': 131072,
    'state_hidden': 131072,
    'velocity_hidden': 131072,
    'dino_registers': 64,
    'future_tokens': 4096,
    # Residual networks and the U-Net.
    'stem': 16384,
    'channels': 16384,
    'blocks': 512,
    'keypoints': 4096,
    'kernel_size': 255,
    'groups': 16384,
    'kernels': 255,
    'strides': 255,
    'paddings': 255,
    'soft_prompts': 4096,
    'empty_views': 64,
    # Images, height and width.
    'image': 4096,
    'images': 4096,
    'resize': 4096,
    'crop': 4096,
    'real_horizon': 1024,
    'environment_dim': 1024,
    'observation_steps': 16,
    'state_steps': 1024,
    'state_place': 4096,
    'answer_tokens': 4096,
    'skipped_tokens': 1_000_000,
    'used_vocabulary': 4_194_304,
    'stop_token': 4_194_304,
    'action_bins': 65536,
    'self_attention_every': 512,
    'text_every': 512,
    'train_steps': MOST_TRAIN_STEPS,
}


def limits_of(dims: type, path: str = '') -> dict[str, int]:
    """Return the largest accepted values of a dataclass's fields, nested ones as `vision.width`."""
    found: dict[str, int] = {}
    for one in dim_fields(dims):
        own = next((note.limit for note in one.notes if isinstance(note, Most)), None)
        limit = LIMITS.get(one.name) if own is None else own
        if one.part is not None:
            found |= limits_of(one.part, f'{path}{one.name}.')
        elif limit is not None:
            found[f'{path}{one.name}'] = limit
    return found


# --------------------------------------------------------------------------------------------------
# Sizes of policies that see several steps of an observation. Pure numbers.


class HistoryDims:
    """What follows from cameras, steps and images; a subclass is a dataclass with these fields.

    Attributes:
        image: (height, width) of the cameras' images in pixels.
        resize: (height, width) that they are resized to; None: they are not.
        crop: (height, width) of the middle that the network sees; None: all.
        cameras: images of an observation; an earlier frame of a camera is an image of its own. The
            newest frames of all cameras come first, then those of a step before, and so on.
        observation_steps: steps of the observation that the policy sees, the newest included.
        horizon: actions that are denoised; the first is that of the oldest step.
        real_horizon: actions that the robot has, from that of the newest step on.
    """

    image: tuple[int, int]
    resize: tuple[int, int] | None
    crop: tuple[int, int] | None
    cameras: int
    observation_steps: int
    horizon: int
    real_horizon: int

    def check_history(self) -> None:
        if self.observation_steps < 1 or self.cameras % self.observation_steps:
            raise ValueError(
                f'cameras {self.cameras} is not a multiple of the {self.observation_steps} '
                'observation_steps; every camera has a frame of each step'
            )
        most = self.horizon - self.first_action
        if not 1 <= self.real_horizon <= most:
            raise ValueError(
                f'real_horizon {self.real_horizon} where 1 to {most} is expected: horizon '
                f'{self.horizon} without the {self.first_action} actions of earlier steps'
            )
        if self.crop is not None:
            high, wide = self.resize or self.image
            if self.crop[0] > high or self.crop[1] > wide or min(self.crop) < 1:
                raise ValueError(f'crop {self.crop} does not lie in images of {(high, wide)}')

    @property
    def own_cameras(self) -> int:
        return self.cameras // self.observation_steps

    @property
    def first_action(self) -> int:
        """Row of a chunk that is due at the observation's time."""
        return self.observation_steps - 1

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        return (self.image,) * self.cameras

    @property
    def seen(self) -> tuple[int, int]:
        """(height, width) that the vision network sees."""
        return self.crop or self.resize or self.image


# --------------------------------------------------------------------------------------------------
# The sizes of a residual network. Pure numbers.

# Channels of a bottleneck's output for each of its inner ones (arXiv 1512.03385, table 1).
_EXPANSION = 4
_STEM_SHRINKS = 2
_STAGES = 4
# Channels of a group of a group norm, at least.
_GROUP = 16


def _channels(shape: TensorShapes) -> tuple[int, ...]:
    names = (f'stages.{stage}.0.convolutions.0.conv.weight' for stage in range(_STAGES))
    return tuple(shape(name, 4)[0] for name in names)


def _blocks(shape: TensorShapes) -> tuple[int, ...]:
    return tuple(shape.depth(f'stages.{stage}') for stage in range(_STAGES))


@dataclass(frozen=True)
class ResNetDims:
    """A residual network up to its last feature map (arXiv 1512.03385), as torchvision builds it.

    Attributes:
        stem: channels after the first convolution.
        channels: inner channels of the blocks of each of the four stages.
        bottleneck: blocks of three convolutions (ResNet 50 and more), not of two.
        dilated: the last stage keeps the size of its input, its later blocks dilated by two.
        norm: `batch`, with frozen statistics, or `group` (arXiv 1803.08494), a group for every 16
            channels.
    """

    stem: Annotated[int, size('stem.conv.weight', axes=4)]
    channels: Annotated[tuple[int, int, int, int], Shown(_channels)]
    blocks: Annotated[tuple[int, int, int, int], Shown(_blocks)]
    bottleneck: Annotated[
        bool, Shown(lambda shape: 'stages.0.0.convolutions.2.conv.weight' in shape)
    ] = False
    dilated: bool = False
    norm: Literal['batch', 'group'] = 'batch'

    def __post_init__(self) -> None:
        if self.dilated and not self.bottleneck:
            raise ValueError('dilated is for bottleneck blocks; others have no dilated form')
        for n in (self.stem, *self.channels) if self.norm == 'group' else ():
            if n < _GROUP or n % self.groups(n):
                raise ValueError(
                    f'norm group: {n} channels do not part into the {n // _GROUP} groups of a norm '
                    f'(one for every {_GROUP})'
                )

    @property
    def expansion(self) -> int:
        """Channels of a block's output for each of its inner ones."""
        return _EXPANSION if self.bottleneck else 1

    def groups(self, channels: int) -> int:
        """Return the groups of a norm of so many channels; 0 for frozen statistics."""
        return channels // _GROUP if self.norm == 'group' else 0

    @property
    def width(self) -> int:
        return self.channels[-1] * self.expansion

    @property
    def depth(self) -> int:
        """Layers, as in the name: 18 for ResNet-18."""
        return sum(self.blocks) * (3 if self.bottleneck else 2) + 2

    def map_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the feature map of an image of this height and width."""
        halvings = _STEM_SHRINKS + len(self.blocks) - (2 if self.dilated else 1)
        for _ in range(halvings):
            image = ((image[0] + 1) // 2, (image[1] + 1) // 2)
        return image


# --------------------------------------------------------------------------------------------------


class VisionBlockDims(Protocol):
    """Sizes of one block of a vision transformer."""

    @property
    def width(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def mlp_dim(self) -> int: ...


def _image_size(shape: TensorShapes) -> int:
    """Edge of the square image in pixels, whose patches have a position each."""
    _, channels, patch, across = shape('patch_embedding.weight', 4)
    positions = shape('position_embedding', 2, 3)[-2]
    side = math.isqrt(positions)
    # A class token may have a position of its own.
    expected = side**2, side**2 + ('class_token' in shape)
    if channels != 3 or patch != across or positions not in expected:
        raise ValueError(
            f'the vision tower has {channels} channels, patches of {patch}x{across} and '
            f'{positions} positions; expected 3 channels, square patches and a square of them'
        )
    return side * patch


@dataclass(frozen=True)
class VisionDims:
    """A SigLIP vision transformer (arXiv 2303.15343)."""

    width: Annotated[int, size('patch_embedding.weight', axes=4)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    patch_size: Annotated[int, size('patch_embedding.weight', axis=2, axes=4)]
    image_size: Annotated[int, Shown(_image_size, stated='image size')]

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class ShuffledImages:
    """Image sizes of a family whose vision tower joins squares of patches to image tokens."""

    vision: VisionDims
    pixel_shuffle: int

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        return self.vision.tokens // self.pixel_shuffle**2

    def check_images(self) -> None:
        """Raise ValueError if the image does not divide into patches, or they into squares."""
        check_vision(self.vision)
        side = self.vision.image_size // self.vision.patch_size
        if side % self.pixel_shuffle:
            raise ValueError(
                f'pixel_shuffle {self.pixel_shuffle} does not divide the {side} patches of an '
                "image's edge"
            )


@dataclass(frozen=True)
class DecoderDims:
    """A decoder stack with grouped-query attention and gated MLPs: Gemma, Llama."""

    width: Annotated[int, size('blocks.0.attention.q.weight', axis=1)]
    depth: Annotated[int, depth_of('blocks')]
    mlp_dim: Annotated[int, size('blocks.0.mlp.gate.weight')]
    num_heads: Annotated[int, Share('blocks.0.attention.q.weight', among='head_dim')]
    num_kv_heads: int
    head_dim: Annotated[int, Share('blocks.0.attention.k.weight', among='num_kv_heads', even=True)]


def check_heads(name: str, dims: VisionBlockDims) -> None:
    """Raise ValueError if the width of a stack does not divide into its heads."""
    if dims.width % dims.num_heads:
        raise ValueError(
            f'{name}: width {dims.width} is not a multiple of num_heads {dims.num_heads}'
        )


def check_vision(dims: VisionDims) -> None:
    """Raise ValueError if the image does not divide into patches, or the width into heads."""
    if dims.image_size % dims.patch_size:
        raise ValueError(
            f'vision: image_size {dims.image_size} is not a multiple of patch_size '
            f'{dims.patch_size}'
        )
    check_heads('vision', dims)


def check_language(dims: DecoderDims) -> None:
    """Raise ValueError if the heads do not divide, or are of an odd width."""
    if dims.num_heads % dims.num_kv_heads:
        raise ValueError(
            f'language: num_heads {dims.num_heads} is not a multiple of num_kv_heads '
            f'{dims.num_kv_heads}'
        )
    if dims.head_dim % 2:
        raise ValueError(
            f'language: head_dim {dims.head_dim} is odd; the rotary embedding turns pairs of '
            'numbers'
        )


def check_positive(dims: object, *names: str) -> None:
    for name in names:
        if getattr(dims, name) <= 0:
            raise ValueError(f'{name} {getattr(dims, name)} where a number above 0 is expected')


def check_stacks(language: DecoderDims, expert: DecoderDims) -> None:
    """Raise ValueError if the stacks do not fit one attention, or heads do not divide."""
    for name in ('depth', 'num_heads', 'num_kv_heads', 'head_dim'):
        ours, others = getattr(language, name), getattr(expert, name)
        if ours != others:
            raise ValueError(
                f'language.{name} is {ours} but expert.{name} is {others}: both feed one '
                'attention, so they must be equal'
            )
    check_language(language)
    if expert.width % 2:
        raise ValueError(
            f'expert: width {expert.width} is odd; the flow time enters as as many sines as cosines'
        )


def check_places(places: tuple[int, ...], cameras: int, prompt_length: int) -> None:
    """Raise ValueError if there is not one place for each image, in order, inside the prompt."""
    if len(places) != cameras:
        raise ValueError(
            f'image_places has {len(places)} entries where one for each of the '
            f'{cameras} cameras is expected'
        )
    if any(a > b for a, b in pairwise((0, *places, prompt_length))):
        raise ValueError(
            f'image_places {list(places)} must ascend from 0 to prompt_length {prompt_length}'
        )
