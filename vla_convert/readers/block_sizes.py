"""Sizes of vision towers and decoder stacks, read off the shapes of their tensors.

Two numbers show in no shape, since a projection is as wide as its heads together: the vision
tower's heads, and the language model's key/value heads (query heads follow from these).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from vla_convert.checkpoints.folder_facts import FolderFacts
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensor_names import row
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.families.blocks.dimensions import DecoderDims, ResNetDims, VisionDims

T = TypeVar('T')


@dataclass(frozen=True)
class HeadCounts:
    """Counts that no shape shows: the vision tower's and the language model's key/value heads."""

    vision: int
    kv: int


class Shapes:
    """Tensor shapes by this package's names; a missing tensor is an error."""

    def __init__(self, tensors: Mapping[str, StoredTensor], policies: str) -> None:
        self._tensors = tensors
        self._policies = policies

    def __call__(self, name: str, axes: int) -> tuple[int, ...]:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"the checkpoint has no tensor for '{name}'; is it a {self._policies} policy?"
            )
        if len(stored.shape) != axes or 0 in stored.shape:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)} where "
                f'{axes} axes are expected'
            )
        return stored.shape

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def depth(self, stack: str) -> int:
        """Number of blocks of a stack such as `vision.blocks`; CheckpointError: blocks missing."""
        prefix = f'{stack}.'
        indices = {
            int(name.removeprefix(prefix).split('.')[0])
            for name in self._tensors
            if name.startswith(prefix)
        }
        if not indices or max(indices) + 1 != len(indices):
            lost = next(index for index in range(len(indices) + 1) if index not in indices)
            raise CheckpointError(f"the checkpoint has no tensors for '{prefix}{lost}'")
        return len(indices)


def image_size_of(shape: Shapes, class_tokens: int = 0) -> int:
    """Edge of the square input image in pixels; `class_tokens`: positions without a patch.

    Raises CheckpointError: patches or positions that form no square.
    """
    _, channels, patch, patch_width = shape('vision.patch_embedding.weight', 4)
    positions = shape('vision.position_embedding', 3 if class_tokens else 2)[-2]
    side = math.isqrt(positions - class_tokens)
    if channels != 3 or patch != patch_width or side * side != positions - class_tokens:
        raise CheckpointError(
            f'the vision tower has {channels} channels, patches of {patch}x{patch_width} and '
            f'{positions} positions; expected 3 channels, square patches and a square of them'
            + (f', and {class_tokens} position more for the class token' if class_tokens else '')
        )
    return side * patch


def square_edge(inputs: int, width: int, layer: str) -> int:
    """Edge of a layer's square of patches; CheckpointError: `inputs` / `width` is no square."""
    edge = math.isqrt(inputs // width)
    if width * edge**2 != inputs:
        raise CheckpointError(
            f'the {layer} takes {inputs} numbers, which is no square of patches of {width} each'
        )
    return edge


def vision_dims(shape: Shapes, num_heads: int, image_size: int) -> VisionDims:
    """Sizes of the vision tower; `image_size` is the edge of its images in pixels."""
    width, _, patch, _ = shape('vision.patch_embedding.weight', 4)
    return VisionDims(
        width=width,
        depth=shape.depth('vision.blocks'),
        num_heads=num_heads,
        mlp_dim=shape('vision.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        image_size=image_size,
    )


def decoder_dims(shape: Shapes, stack: str, kv_heads: int) -> DecoderDims:
    """Sizes of a stack; CheckpointError: projections that the heads do not divide."""
    queries, width = shape(f'{stack}.blocks.0.attention.q.weight', 2)
    keys, _ = shape(f'{stack}.blocks.0.attention.k.weight', 2)
    head_dim = keys // kv_heads
    if keys % kv_heads or queries % head_dim:
        raise CheckpointError(
            f'{stack}: attention projections of {queries} query and {keys} key numbers do not fit '
            f'{kv_heads} key/value heads'
        )
    return DecoderDims(
        width=width,
        depth=shape.depth(f'{stack}.blocks'),
        mlp_dim=shape(f'{stack}.blocks.0.mlp.gate.weight', 2)[0],
        num_heads=queries // head_dim,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def checked_dims(make: Callable[[], T]) -> T:
    """Return `make()`; raise its ValueError as a CheckpointError."""
    try:
        return make()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f'the checkpoint contradicts itself: {error}') from None


def check_shown(shape: Shapes, facts: FolderFacts, missing: MissingFacts) -> None:
    """Note sizes of image, action or state that differ between config.json and the tensors."""
    action_dim = shape('action_in.weight', 2)[1] if 'action_in.weight' in shape else None
    projection = 'state_projection.weight'
    state_dim = shape(projection, 2)[1] if projection in shape else 0
    check_stated(
        missing,
        (facts.image_size_key, facts.image_size, image_size_of(shape)),
        ('action dimensions', facts.action_dim, action_dim),
        ('state dimensions', facts.state_dim, state_dim),
    )


def check_stated(missing: MissingFacts, *sizes: tuple[str, object, object]) -> None:
    """Note sizes (name, in config.json, in the tensors) that differ; None: config.json has none."""
    for name, stated, found in sizes:
        if stated is not None and stated != found:
            missing.conflict(f'config.json says {name} {stated} but the tensors show {found}')


@dataclass(frozen=True)
class KnownHeads:
    """Head counts of published networks, None if unknown, with examples for questions."""

    vision: int | None
    kv: int | None
    vision_example: str
    kv_example: str


def resolve_heads(
    shape: Shapes, known: KnownHeads, options: ExportOptions, missing: MissingFacts
) -> HeadCounts | None:
    """Return the head counts of the published network or the options; None: one is missing."""
    kv = missing.pick(
        '--kv-heads',
        options.kv_heads,
        known.kv,
        f"the language model's key/value heads ({known.kv_example})",
    )
    vision = missing.pick(
        '--vision-heads',
        options.vision_heads,
        known.vision,
        f"the vision tower's attention heads ({known.vision_example})",
    )
    for option, given, fitting, what in (
        ('--vision-heads', options.vision_heads, _fitting_vision_heads, 'the vision tower'),
        ('--kv-heads', options.kv_heads, _fitting_kv_heads, "the language model's attention"),
    ):
        if given is not None and (fits := fitting(shape)) and given not in fits:
            missing.conflict(
                f'{option} says {given}, but {what} only divides into '
                f'{", ".join(map(str, fits))} heads'
            )
    return HeadCounts(vision, kv) if vision is not None and kv is not None else None


def _fitting_vision_heads(shape: Shapes) -> tuple[int, ...]:
    width = shape('vision.patch_embedding.weight', 4)[0]
    return tuple(heads for heads in range(1, width + 1) if width % heads == 0)


def _fitting_kv_heads(shape: Shapes) -> tuple[int, ...]:
    """Head counts with an even head width that divide the number of query heads."""
    queries, _ = shape('language.blocks.0.attention.q.weight', 2)
    keys, _ = shape('language.blocks.0.attention.k.weight', 2)
    return tuple(
        heads
        for heads in range(1, keys // 2 + 1)
        if keys % (2 * heads) == 0 and queries % keys == 0
    )


# --- Residual networks: tensor names and sizes

_Rows = tuple[tuple[re.Pattern[str], str], ...]
_STAGES = 4
# Convolutions of a bottleneck; other blocks have the first two.
_CONVOLUTIONS = 3


def resnet_rows(theirs: str, ours: str, stem: tuple[str, str], stage: str, *, first: int) -> _Rows:
    """Rows of a table of tensor names for torchvision's blocks.

    `theirs` and `ours` are prefixes (ours may refer to groups); `stem` has patterns of its
    convolution and norm; `stage` has `{}` for its number.
    """
    rows = list(_conv_norm(theirs, ours, *stem, 'stem'))
    for index in range(_STAGES):
        block = rf'{stage.format(index + first)}\.(?P<b>\d+)\.'
        own = rf'stages.{index}.\g<b>.'
        for number in range(_CONVOLUTIONS):
            rows += _conv_norm(
                theirs,
                ours,
                rf'{block}conv{number + 1}',
                rf'{block}bn{number + 1}',
                f'{own}convolutions.{number}',
            )
        rows += _conv_norm(
            theirs, ours, rf'{block}downsample\.0', rf'{block}downsample\.1', f'{own}shortcut'
        )
    return tuple(rows)


def _conv_norm(theirs: str, ours: str, conv: str, norm: str, own: str) -> _Rows:
    leaves = r'(?P<leaf>weight|bias|running_mean|running_var)'
    return (
        row(rf'{theirs}{conv}\.weight', rf'{ours}{own}.conv.weight'),
        row(rf'{theirs}{norm}\.{leaves}', rf'{ours}{own}.norm.\g<leaf>'),
    )


def resnet_dims(
    shape: Shapes,
    backbone: str,
    *,
    dilated: bool = False,
    norm: Literal['batch', 'group'] = 'batch',
) -> ResNetDims:
    """Sizes of the network whose tensors begin with `backbone`; CheckpointError: do not fit."""
    blocks = [shape.depth(f'{backbone}.stages.{stage}') for stage in range(_STAGES)]
    channels = [
        shape(f'{backbone}.stages.{stage}.0.convolutions.0.conv.weight', 4)[0]
        for stage in range(_STAGES)
    ]
    return checked_dims(
        lambda: ResNetDims(
            stem=shape(f'{backbone}.stem.conv.weight', 4)[0],
            channels=cast(tuple[int, int, int, int], tuple(channels)),
            blocks=cast(tuple[int, int, int, int], tuple(blocks)),
            bottleneck=f'{backbone}.stages.0.0.convolutions.2.conv.weight' in shape,
            dilated=dilated,
            norm=norm,
        )
    )
