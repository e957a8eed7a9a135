"""Sizes of a pi0 or pi0.5 network, read off the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.checkpoints.tensors import CheckpointError
from vla_runtime.families.blocks.block_sizes import (
    HeadCounts,
    KnownHeads,
    Shapes,
    checked_dims,
    decoder_dims,
    image_size_of,
    vision_dims,
)
from vla_runtime.families.pi.dimensions import PiDims

# The one published vision tower (SigLIP So400m); other widths do not determine the heads.
_VISION_HEADS = {1152: 16}
# Gemma's published key/value heads, by the variant names that both projects write in config.json.
_KV_HEADS = {'gemma_2b': 1, 'gemma_300m': 1}
_GEMMA_2B_WIDTH = 2048


def pi_shapes(tensors: Mapping[str, StoredTensor]) -> Shapes:
    """Shapes of a pi0 or pi0.5 checkpoint."""
    return Shapes(tensors, 'pi0 or pi0.5')


def family_of(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the family, found from the layers that take the flow time.

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


def known_heads(shape: Shapes, variant: str | None) -> KnownHeads:
    """Return the head counts of the published tower and of Gemma, by variant or by width."""
    if variant is None:
        width = shape('language.embedding.weight', 2)[1]
        variant = 'gemma_2b' if width == _GEMMA_2B_WIDTH else ''
    return KnownHeads(
        vision=_VISION_HEADS.get(shape('vision.patch_embedding.weight', 4)[0]),
        kv=_KV_HEADS.get(variant),
        vision_example='SigLIP So400m has 16',
        kv_example='Gemma 2B has 1',
    )


def dims_of(
    tensors: Mapping[str, StoredTensor],
    heads: HeadCounts,
    *,
    cameras: int,
    prompt_length: int,
    horizon: int,
) -> PiDims:
    """Return all sizes of a policy.

    Args:
        tensors: tensors by our names.
        heads: head counts, which the tensors do not show.
        cameras: number of camera inputs, masked ones included.
        prompt_length: tokens of the padded prompt.
        horizon: actions of a chunk.

    Raises:
        CheckpointError: a tensor is missing or contradicts another or the head counts.
    """
    shape = pi_shapes(tensors)
    has_state_token = family_of(tensors) == 'pi0'
    return checked_dims(
        lambda: PiDims(
            vision=vision_dims(shape, heads.vision, image_size_of(shape)),
            language=decoder_dims(shape, 'language', heads.kv),
            expert=decoder_dims(shape, 'expert', heads.kv),
            vocabulary=shape('language.embedding.weight', 2)[0],
            cameras=cameras,
            prompt_length=prompt_length,
            horizon=horizon,
            action_dim=shape('action_in.weight', 2)[1],
            state_dim=shape('state_projection.weight', 2)[1] if has_state_token else 0,
        )
    )
