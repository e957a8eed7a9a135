"""Sizes of a network, read off the shapes of its tensors.

Almost everything shows in a shape. Two numbers do not, because a projection is as wide as its heads
together: the vision tower's heads, and the language model's key/value heads (with those, the query
heads follow).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vla_runtime.export.checkpoint import CheckpointError, StoredTensor
from vla_runtime.families.blocks.dimensions import GemmaDims, VisionDims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.types import Family

# The one published vision tower (SigLIP So400m); other widths do not tell their heads.
_VISION_HEADS = {1152: 16}
# Gemma's published key/value heads, by the variant names that both projects write in config.json.
_KV_HEADS = {'gemma_2b': 1, 'gemma_300m': 1}
_GEMMA_2B_WIDTH = 2048


@dataclass(frozen=True)
class HeadCounts:
    """What no tensor tells: the vision tower's heads, the language model's key/value heads."""

    vision: int
    kv: int


class _Shapes:
    """Shapes by name; a missing one is an error for a person."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __call__(self, name: str, axes: int) -> tuple[int, ...]:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"the checkpoint has no tensor for '{name}'; is it a pi0 or pi0.5 policy?"
            )
        if len(stored.shape) != axes or 0 in stored.shape:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)} where "
                f'{axes} axes are expected'
            )
        return stored.shape

    def depth(self, stack: str) -> int:
        prefix = f'{stack}.blocks.'
        indices = {
            int(name.removeprefix(prefix).split('.')[0])
            for name in self._tensors
            if name.startswith(prefix)
        }
        if not indices or max(indices) + 1 != len(indices):
            lost = next(index for index in range(len(indices) + 1) if index not in indices)
            raise CheckpointError(f"the checkpoint has no tensors for '{prefix}{lost}'")
        return len(indices)


def family_of(tensors: Mapping[str, StoredTensor]) -> Family:
    """The family, told by how the flow time enters the expert.

    Raises:
        CheckpointError: neither family's tensors are there, or both are.
    """
    pi05, pi0 = 'time_in.weight' in tensors, 'action_time_in.weight' in tensors
    if pi05 == pi0:
        raise CheckpointError(
            f"the checkpoint has {'both' if pi05 else 'neither'} of 'time_mlp_in' (pi0.5) and "
            "'action_time_mlp_in' (pi0); a pi0.5 or pi0 policy has exactly one of them"
        )
    return 'pi05' if pi05 else 'pi0'


def vision_heads_of(tensors: Mapping[str, StoredTensor]) -> int | None:
    """Heads of a published vision tower; None where the width does not tell."""
    return _VISION_HEADS.get(_Shapes(tensors)('vision.patch_embedding.weight', 4)[0])


def kv_heads_of(tensors: Mapping[str, StoredTensor], variant: str | None) -> int | None:
    """Key/value heads by the stated variant, else by Gemma 2B's width; None: unknown."""
    if variant is not None:
        return _KV_HEADS.get(variant)
    width = _Shapes(tensors)('language.embedding.weight', 2)[1]
    return _KV_HEADS['gemma_2b'] if width == _GEMMA_2B_WIDTH else None


def fitting_vision_heads(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """The head counts that the vision tower's width divides into."""
    width = _Shapes(tensors)('vision.patch_embedding.weight', 4)[0]
    return tuple(heads for heads in range(1, width + 1) if width % heads == 0)


def fitting_kv_heads(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """The key/value head counts that the language model's projections divide into.

    A head is an even number of numbers wide, and the query heads are a multiple of these.
    """
    shape = _Shapes(tensors)
    queries, _ = shape('language.blocks.0.attention.q.weight', 2)
    keys, _ = shape('language.blocks.0.attention.k.weight', 2)
    return tuple(
        heads
        for heads in range(1, keys // 2 + 1)
        if keys % (2 * heads) == 0 and queries % keys == 0
    )


def dims_of(
    tensors: Mapping[str, StoredTensor],
    heads: HeadCounts,
    *,
    cameras: int,
    prompt_length: int,
    horizon: int,
) -> PiDims:
    """All sizes of a policy.

    Args:
        tensors: by our names.
        heads: what the tensors do not tell.
        cameras: number of camera inputs, masked ones included.
        prompt_length: tokens of the padded prompt.
        horizon: actions of a chunk.

    Raises:
        CheckpointError: a tensor is missing or contradicts another or the head counts.
    """
    shape = _Shapes(tensors)
    family = family_of(tensors)
    vocabulary, _ = shape('language.embedding.weight', 2)
    _, action_dim = shape('action_in.weight', 2)
    try:
        return PiDims(
            vision=_vision(tensors, heads.vision),
            language=_gemma(shape, 'language', heads),
            expert=_gemma(shape, 'expert', heads),
            vocabulary=vocabulary,
            cameras=cameras,
            prompt_length=prompt_length,
            horizon=horizon,
            action_dim=action_dim,
            state_dim=shape('state_projection.weight', 2)[1] if family == 'pi0' else 0,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f'the checkpoint contradicts itself: {error}') from None


def image_size_of(tensors: Mapping[str, StoredTensor]) -> int:
    """Edge of the square input image in pixels.

    Raises:
        CheckpointError: the patches or their positions do not form a square.
    """
    shape = _Shapes(tensors)
    _, channels, patch, patch_width = shape('vision.patch_embedding.weight', 4)
    positions, _ = shape('vision.position_embedding', 2)
    side = math.isqrt(positions)
    if channels != 3 or patch != patch_width or side * side != positions:
        raise CheckpointError(
            f'the vision tower has {channels} channels, patches of {patch}x{patch_width} and '
            f'{positions} positions; expected 3 channels, square patches and a square of them'
        )
    return side * patch


def _vision(tensors: Mapping[str, StoredTensor], num_heads: int) -> VisionDims:
    shape = _Shapes(tensors)
    width, _, patch, _ = shape('vision.patch_embedding.weight', 4)
    return VisionDims(
        width=width,
        depth=shape.depth('vision'),
        num_heads=num_heads,
        mlp_dim=shape('vision.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        image_size=image_size_of(tensors),
    )


def _gemma(shape: _Shapes, stack: str, heads: HeadCounts) -> GemmaDims:
    queries, width = shape(f'{stack}.blocks.0.attention.q.weight', 2)
    keys, _ = shape(f'{stack}.blocks.0.attention.k.weight', 2)
    head_dim = keys // heads.kv
    if keys % heads.kv or queries % head_dim:
        raise CheckpointError(
            f'{stack}: attention projections of {queries} query and {keys} key numbers do not fit '
            f'{heads.kv} key/value heads'
        )
    return GemmaDims(
        width=width,
        depth=shape.depth(stack),
        mlp_dim=shape(f'{stack}.blocks.0.mlp.gate.weight', 2)[0],
        num_heads=queries // head_dim,
        num_kv_heads=heads.kv,
        head_dim=head_dim,
    )
